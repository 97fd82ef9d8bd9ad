"""Write training examples into a tenant's outbox, inside the application's own transaction."""

from collections.abc import Iterable, Iterator, Mapping
from uuid import UUID

import psycopg
from sqlalchemy import ARRAY, Text, cast, column, func, insert, quoted_name, select, table
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.exc import DBAPIError

from outbox_pipelines.database.error_text import forget_payload
from outbox_pipelines.database.json_text import JsonObject, Unstorable, encode_object
from outbox_pipelines.database.quoting import quote_identifier
from outbox_pipelines.database.session import Transaction, connection_of
from outbox_pipelines.errors import OutboxError
from outbox_pipelines.settings import load_settings
from outbox_pipelines.tenants.registry import Tenant, get_tenant

Example = JsonObject


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
    connection = connection_of(session)
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
    connection = connection_of(session)
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


def _encode(examples: Iterable[Example], max_bytes: int | None) -> Iterator[str]:
    limit = load_settings().max_example_bytes if max_bytes is None else max_bytes
    if isinstance(examples, Mapping | str | bytes):
        raise InvalidExample(f"examples must be a list of JSON objects, not one {type(examples).__name__}")
    for place, example in enumerate(examples):
        try:
            yield encode_object(example, max_bytes=limit, variable="OUTBOX_MAX_EXAMPLE_BYTES")
        except Unstorable as flaw:
            raise InvalidExample(f"example {place} cannot be stored: {flaw}; no example of this call was") from None
