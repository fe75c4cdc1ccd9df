"""What can go wrong with rows."""


class DataError(Exception):
    """The data set cannot be used as configured; the message says what was found and what to change."""
