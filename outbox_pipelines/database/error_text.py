"""Error texts that a column can always hold, and that hold no payload."""

from sqlalchemy.exc import StatementError

MAX_ERROR_LENGTH = 2_000
"""Characters of an error's text that are kept."""

_CUT = " … (cut)"
_REPLACEMENT = "\ufffd"


def error_text(error: BaseException | str, *, limit: int = MAX_ERROR_LENGTH) -> str:
    """The text of an error, fit to be stored: at most ``limit`` characters, visibly cut.

    PostgreSQL cannot store NUL, nor UTF-8 a lone surrogate: each becomes U+FFFD. An error
    whose ``str()`` raises is told by its type. Never raises.
    """
    if isinstance(error, str):
        text = error
    else:
        try:
            text = str(error) or type(error).__name__
        except Exception:  # a foreign __str__ may do anything; the error must still be told
            text = f"{type(error).__name__} (its text cannot be read)"
    # Cut before the replacing, which would cost time on a text of many megabytes.
    kept = text if len(text) <= limit else text[: max(limit - len(_CUT), 0)] + _CUT[:limit]
    return "".join(_REPLACEMENT if char == "\x00" or "\ud800" <= char <= "\udfff" else char for char in kept)


def first_line(error: BaseException | None) -> str:
    """The first line of an error's text. PostgreSQL's says what failed; the next may quote the row."""
    lines = error_text(error if error is not None else "").strip().splitlines()
    return lines[0] if lines else type(error).__name__


def forget_payload(error: BaseException) -> None:
    """Keep of a database error's text the first line alone, here and in what it wraps.

    The lines after it (DETAIL, CONTEXT) quote the row that failed, and SQLAlchemy adds the
    parameters: an application that logs the error would log the payload.
    """
    if isinstance(error, StatementError):
        error.hide_parameters = True
        if error.orig is not None:
            forget_payload(error.orig)
    error.args = (first_line(error), *error.args[1:])
