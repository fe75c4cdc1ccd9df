"""Judgements on readings, pure: no clock, no I/O. A rule turns facts into findings, or into the words of evidence for a suspicion."""
