"""The root of the errors that this package raises on purpose."""


class OutboxError(Exception):
    """Something a person can act on: the text says what happened, to what, and the remedy.

    Commands print it without a traceback and exit with ``exit_code``.
    """

    exit_code = 1
