"""Readers of facts. A sensor says what it read, never what that means; "not supported here" and "cannot read" are answers."""
