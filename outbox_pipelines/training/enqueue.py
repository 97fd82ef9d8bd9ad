"""Write training examples into a tenant's outbox, inside the application's own transaction."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from uuid import UUID

import psycopg
from sqlalchemy import ARRAY, Connection, Text, cast, column, func, insert, quoted_name, select, table
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, scoped_session

from outbox_pipelines.database.error_text import forget_payload
from outbox_pipelines.database.quoting import quote_identifier
from outbox_pipelines.errors import OutboxError
from outbox_pipelines.settings import load_settings
from outbox_pipelines.tenants.registry import Tenant, get_tenant

Example = Mapping[str, Any]
"""A JSON object: string keys, and values of null, booleans, finite numbers, strings, lists, objects."""


Transaction = Session | scoped_session[Session] | Connection
"""What an application has in its hand inside a transaction. (An ``AsyncSession`` offers its
``Session`` through ``run_sync``.)"""


_MAX_DEPTH = 200
"""Levels of nesting. More would exhaust a stack, Python's or the server's, at a depth that varies."""


class InvalidExample(OutboxError):
    """An example that cannot be stored; none of the call's examples was."""


def enqueue_training(
    session: Transaction,
    tenant: str | UUID | Tenant,
    examples: Iterable[Example],
    *,
    max_bytes: int | None = None,
) -> list[int]:
    """Add examples to a tenant's outbox in the caller's transaction, which carries or drops them.

    >>> with Session(engine) as session, session.begin():        # doctest: +SKIP
    ...     session.add(Essay(...))
    ...     enqueue_training(session, "acme", [{"features": {"words": 12}, "label": True}])

    Args:
        session: a SQLAlchemy session or connection; neither committed nor rolled back here.
        tenant: name, id, or what ``get_tenant`` gave (which spares a look-up).
        examples: JSON objects.
        max_bytes: bytes of JSON in one example; ``OUTBOX_MAX_EXAMPLE_BYTES`` when not given.

    Returns:
        The rows' ids, in the order of the examples.

    Raises:
        InvalidExample: naming the example by its place; nothing was written.
        UnknownTenant: when there is none.
    """
    connection = _connection(session)
    texts = list(_encode(examples, max_bytes))
    found = get_tenant(connection, tenant)
    if not texts:
        return []
    # Built by SQLAlchemy, not written out: the application's driver may be any.
    outbox = table("ml_outbox", column("id"), column("example"), schema=quoted_name(found.schema, quote=True))
    new = func.unnest(cast(texts, ARRAY(Text))).table_valued("example", with_ordinality="place").render_derived()
    # In the order of the examples, and so are the ids that the rows are given.
    ordered = select(cast(new.c.example, JSONB)).order_by(new.c.place)
    try:
        inserted = connection.execute(insert(outbox).from_select(["example"], ordered).returning(outbox.c.id))
    except DBAPIError as error:
        # Its text would quote the examples, and end up in the application's log.
        forget_payload(error)
        raise
    return sorted(inserted.scalars())


def copy_training(
    session: Transaction,
    tenant: str | UUID | Tenant,
    examples: Iterable[Example],
    *,
    max_bytes: int | None = None,
) -> int:
    """Add many examples with COPY, in the caller's transaction; for loads and imports.

    Like :func:`enqueue_training`, but the examples are streamed and no ids come back. The
    session must use psycopg 3.

    Returns:
        How many were added.

    Raises:
        InvalidExample: the transaction can no longer be committed, so nothing is kept.
    """
    connection = _connection(session)
    found = get_tenant(connection, tenant)
    driver = connection.connection.driver_connection
    if not isinstance(driver, psycopg.Connection):
        raise InvalidExample(
            "copy_training needs an engine with psycopg 3 (postgresql+psycopg://); "
            "enqueue_training works with every driver"
        )
    if not connection.in_transaction():
        # COPY goes around SQLAlchemy, which would not know that there is something to commit.
        connection.begin()
    count = 0
    statement = f"COPY {quote_identifier(found.schema)}.ml_outbox (example) FROM STDIN"
    try:
        with driver.cursor().copy(statement.encode()) as copy:
            for text in _encode(examples, max_bytes):
                copy.write_row((text,))
                count += 1
    except psycopg.Error as error:
        forget_payload(error)
        raise
    return count


def _connection(session: Transaction) -> Connection:
    return session if isinstance(session, Connection) else session.connection()


def _encode(examples: Iterable[Example], max_bytes: int | None) -> Iterator[str]:
    limit = load_settings().max_example_bytes if max_bytes is None else max_bytes
    if isinstance(examples, Mapping | str | bytes):
        raise InvalidExample(f"examples must be a list of JSON objects, not one {type(examples).__name__}")
    for place, example in enumerate(examples):
        try:
            yield _encode_one(example, limit)
        except _Flaw as flaw:
            raise InvalidExample(f"example {place} cannot be stored: {flaw}; no example of this call was") from None


class _Flaw(Exception):
    """What is wrong with one example."""


def _encode_one(example: Example, limit: int) -> str:
    if not isinstance(example, Mapping):
        raise _Flaw(f"it is a {type(example).__name__}, and must be a JSON object (a dict)")
    try:
        _check(example)
        text = json.dumps(dict(example), ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_refuse)
    except ValueError as error:
        told = "a number is NaN or infinite" if "JSON compliant" in str(error) else str(error)
        raise _Flaw(f"{told}, which JSON cannot say") from None
    except TypeError as error:
        raise _Flaw(str(error)) from None
    except RecursionError:
        raise _Flaw("it is nested too deeply") from None
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise _Flaw("a text or key holds half of a surrogate pair, which is not valid Unicode") from None
    if size > limit:
        raise _Flaw(f"it is {size:,} bytes of JSON, more than the {limit:,} allowed (OUTBOX_MAX_EXAMPLE_BYTES)")
    return text


def _check(value: object, depth: int = 0) -> None:
    """Find what json.dumps lets through and PostgreSQL does not, or what would change silently."""
    if isinstance(value, str):
        if "\x00" in value:
            raise _Flaw("a text or key holds the character NUL, which PostgreSQL cannot store")
        return
    if not isinstance(value, Mapping | list | tuple):
        return
    if depth > _MAX_DEPTH:
        raise _Flaw(f"it is nested too deeply (more than {_MAX_DEPTH} levels)")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise _Flaw(f"a key is a {type(key).__name__}, and must be a text")
            _check(key)
            _check(item, depth + 1)
        return
    for item in value:
        _check(item, depth + 1)


def _refuse(value: object) -> object:
    raise TypeError(f"a value is a {type(value).__name__}, which JSON cannot say")
