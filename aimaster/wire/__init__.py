"""The shared leaf: frozen records that the programs exchange. No I/O, no clock, no import of anything else of ours."""

PROTOCOL_VERSION = 1
"""Raised with every change that an older peer would misread; a peer of another version is refused with both numbers named."""
