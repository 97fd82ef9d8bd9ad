"""JSON objects that a ``jsonb`` column can hold, and clear words about those that it cannot."""

import json
from collections.abc import Mapping
from typing import Any

JsonObject = Mapping[str, Any]
"""A JSON object: string keys, and values of null, booleans, finite numbers, strings, lists, objects."""

_MAX_DEPTH = 200
"""Levels of nesting. More would exhaust a stack, Python's or the server's, at a depth that varies."""


class Unstorable(Exception):
    """What is wrong with a value, said of "it"; a part of the sentence that the caller writes."""


def encode_object(value: JsonObject, *, max_bytes: int, variable: str) -> str:
    """The text of a JSON object.

    Args:
        value: what to encode.
        max_bytes: the longest text that is allowed, in UTF-8.
        variable: the setting that says so, for the error.

    Raises:
        Unstorable: saying what is wrong.
    """
    if not isinstance(value, Mapping):
        raise Unstorable(f"it is a {type(value).__name__}, and must be a JSON object (a dict)")
    try:
        _check(value)
        text = json.dumps(dict(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_refuse)
    except ValueError as error:
        told = "a number is NaN or infinite" if "JSON compliant" in str(error) else str(error)
        raise Unstorable(f"{told}, which JSON cannot say") from None
    except TypeError as error:
        raise Unstorable(str(error)) from None
    except RecursionError:
        raise Unstorable("it is nested too deeply") from None
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise Unstorable("a text or key holds half of a surrogate pair, which is not valid Unicode") from None
    if size > max_bytes:
        raise Unstorable(f"it is {size:,} bytes of JSON, more than the {max_bytes:,} allowed ({variable})")
    return text


def check_text(value: str) -> None:
    """Refuse what a ``text`` column cannot hold.

    Raises:
        Unstorable: saying what is wrong.
    """
    if "\x00" in value:
        raise Unstorable("it holds the character NUL, which PostgreSQL cannot store")
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise Unstorable("it holds half of a surrogate pair, which is not valid Unicode")


def _check(value: object, depth: int = 0) -> None:
    """Find what json.dumps lets through and PostgreSQL does not, or what would change silently."""
    if isinstance(value, str):
        if "\x00" in value:
            raise Unstorable("a text or key holds the character NUL, which PostgreSQL cannot store")
        return
    if not isinstance(value, Mapping | list | tuple):
        return
    if depth > _MAX_DEPTH:
        raise Unstorable(f"it is nested too deeply (more than {_MAX_DEPTH} levels)")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise Unstorable(f"a key is a {type(key).__name__}, and must be a text")
            _check(key)
            _check(item, depth + 1)
        return
    for item in value:
        _check(item, depth + 1)


def _refuse(value: object) -> object:
    raise TypeError(f"a value is a {type(value).__name__}, which JSON cannot say")
