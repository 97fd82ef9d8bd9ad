"""Who has rows waiting, and who of these is due: what the sensor asks at each tick."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Generic, TypeVar
from uuid import UUID

from sqlalchemy import Connection, Engine, Row, text
from sqlalchemy.exc import DBAPIError

from outbox_pipelines.database.error_text import first_line
from outbox_pipelines.database.quoting import driver_identifier
from outbox_pipelines.database.steps import is_passing
from outbox_pipelines.tenants.registry import MISSING_REMEDY, Problem, Tenant
from outbox_pipelines.wording import counted

Answer = TypeVar("Answer")

CHUNK = 500
"""Tenants asked about in one transaction: thousands of tables in one exhaust the server's lock table."""

_LOCK_WAIT_MILLISECONDS = 200
"""How long the look waits for a table that somebody has locked; the next look comes soon."""

_ONE_LOCK_WAIT_MILLISECONDS = 10
"""The same when tenants are asked one by one, after one of them kept all waiting: many may be locked."""

COUNT_AT_MOST = 1_000
"""Rows counted of one tenant; a backlog beyond that is said to be "at least" so many."""


class Standing(StrEnum):
    """Why a tenant is or is not due."""

    DUE = "due"
    EMPTY = "empty"
    PAUSED = "paused"
    LEASED = "leased"
    """A run is flushing it now."""

    BACKING_OFF = "backing off"
    """Its last delivery failed and the next attempt is later."""

    BROKEN = "broken"
    """Its schema, or a table in it, is missing."""

    UNREADABLE = "unreadable"
    """Its outbox is locked, or we may not read it; the error says which."""


@dataclass(frozen=True)
class TenantBacklog:
    """A tenant as one look found it."""

    tenant: Tenant
    standing: Standing
    oldest: datetime | None
    """When its oldest row by id was written; none when no row waits."""

    next_attempt_at: datetime | None
    problem: Problem | None
    last_error: str | None


@dataclass(frozen=True)
class Backlog:
    """All tenants at one instant of the database's clock."""

    asked_at: datetime
    tenants: list[TenantBacklog] = field(default_factory=list)

    @property
    def due(self) -> list[TenantBacklog]:
        """Those to be flushed, the longest waiting first."""
        due = [entry for entry in self.tenants if entry.standing is Standing.DUE]
        return sorted(due, key=lambda entry: entry.oldest or self.asked_at)

    @property
    def waiting(self) -> list[TenantBacklog]:
        """Those that have rows, due or not."""
        return [entry for entry in self.tenants if entry.oldest is not None]

    def standing(self, standing: Standing) -> list[TenantBacklog]:
        """Those that stand so."""
        return [entry for entry in self.tenants if entry.standing is standing]


@dataclass(frozen=True)
class Reachability:
    """What is known of the ML service."""

    reachable: bool
    detail: str
    since: datetime
    """When it was first found so, without a change since."""


def look(engine: Engine) -> Backlog:
    """Find who has rows waiting: a few statements for the registry, a few for each 500 tenants.

    Tenants whose tables are missing are noted as broken, those found again as mended.
    """
    with engine.begin() as connection:
        asked_at: datetime = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
        registered = connection.execute(
            text("""
                SELECT tenant_id, name, schema_name, paused, next_attempt_at, problem, last_error,
                       coalesce(lease_expires_at > clock_timestamp(), false) AS leased,
                       coalesce(next_attempt_at > clock_timestamp(), false) AS backing_off
                FROM outbox.tenants ORDER BY name
            """)
        ).all()
    found = _ask_all(engine, [row.schema_name for row in registered], _oldest_rows)
    entries = []
    for row in registered:
        answer = found.answers.get(row.schema_name)
        trouble = found.unreadable.get(row.schema_name)
        missing = row.schema_name in found.missing
        standing = _standing(row, waits=answer is not None, missing=missing, unreadable=trouble is not None)
        known = Problem(row.problem) if row.problem else None
        entries.append(
            TenantBacklog(
                Tenant(row.tenant_id, row.name, row.schema_name, row.paused),
                standing,
                answer,
                row.next_attempt_at,
                Problem.BROKEN if missing else None if known is Problem.BROKEN else known,
                trouble or row.last_error,
            )
        )
    _note_broken(
        engine,
        broken=[row.tenant_id for row in registered if row.schema_name in found.missing and row.problem != "broken"],
        mended=[row.tenant_id for row in registered if row.schema_name in found.answers and row.problem == "broken"],
    )
    return Backlog(asked_at, entries)


def _standing(row: Row[Any], *, waits: bool, missing: bool, unreadable: bool) -> Standing:
    if missing:
        return Standing.BROKEN
    if unreadable:
        return Standing.UNREADABLE
    if not waits:
        return Standing.EMPTY
    if row.paused:
        return Standing.PAUSED
    if row.leased:
        return Standing.LEASED
    # A table that is there again need not wait for the time that was set while it was missing.
    if row.backing_off and row.problem != Problem.BROKEN:
        return Standing.BACKING_OFF
    return Standing.DUE


@dataclass
class _Found(Generic[Answer]):
    """What asking the outboxes gave, by schema."""

    answers: dict[str, Answer] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    unreadable: dict[str, str] = field(default_factory=dict)


def _ask_all(
    engine: Engine, schemas: Sequence[str], ask: Callable[[Connection, Sequence[str]], dict[str, Answer]]
) -> _Found[Answer]:
    """Ask about all outboxes, :data:`CHUNK` in one statement, each chunk in its own transaction.

    Its own, since a transaction holds a lock on every table it has read until it ends.
    """
    found: _Found[Answer] = _Found()
    for begin in range(0, len(schemas), CHUNK):
        chunk = schemas[begin : begin + CHUNK]
        try:
            with engine.begin() as connection:
                _ask_chunk(connection, chunk, ask, found, _LOCK_WAIT_MILLISECONDS)
        except DBAPIError as error:
            if is_passing(error):
                raise
            # One is locked, unreadable, or was dropped meanwhile: the others are asked without it.
            _ask_one_by_one(engine, chunk, ask, found)
    return found


def _ask_one_by_one(
    engine: Engine,
    schemas: Sequence[str],
    ask: Callable[[Connection, Sequence[str]], dict[str, Answer]],
    found: _Found[Answer],
) -> None:
    for schema in schemas:
        try:
            with engine.begin() as connection:
                _ask_chunk(connection, [schema], ask, found, _ONE_LOCK_WAIT_MILLISECONDS)
        except DBAPIError as error:
            if is_passing(error):
                raise
            found.unreadable[schema] = first_line(error.orig)


def _ask_chunk(
    connection: Connection,
    schemas: Sequence[str],
    ask: Callable[[Connection, Sequence[str]], dict[str, Answer]],
    found: _Found[Answer],
    lock_wait: int,
) -> None:
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{lock_wait}ms'")
    there = _schemas_with_outbox(connection, schemas)
    found.answers.update(ask(connection, there))
    found.missing.update(set(schemas) - set(there))


def _schemas_with_outbox(connection: Connection, schemas: Sequence[str]) -> list[str]:
    """Those that hold both tables, the outbox and the dead letters."""
    found = connection.execute(
        text("""
            SELECT space.nspname FROM pg_class AS class JOIN pg_namespace AS space ON space.oid = class.relnamespace
            WHERE class.relname IN ('ml_outbox', 'ml_outbox_dead') AND class.relkind IN ('r', 'p')
              AND space.nspname = ANY (:schemas)
            GROUP BY space.nspname HAVING count(*) = 2
        """),
        {"schemas": list(schemas)},
    )
    there = set(found.scalars())
    # In the same order each time: the statement made from it is then one that the server has prepared.
    return [schema for schema in schemas if schema in there]


def _oldest_rows(connection: Connection, schemas: Sequence[str]) -> dict[str, datetime | None]:
    """By schema: when its oldest row was written, none when it is empty."""
    # One index probe each. By id, not by time: the index is there, and ids follow time closely.
    found = _union(connection, schemas, "SELECT {place}, created_at FROM {table} ORDER BY id LIMIT 1")
    return {schema: found.get(place) for place, schema in enumerate(schemas)}


def _row_counts(connection: Connection, schemas: Sequence[str]) -> dict[str, int]:
    found = _union(
        connection,
        schemas,
        "SELECT {place}, (SELECT count(*) FROM (SELECT 1 FROM {table} LIMIT " + str(COUNT_AT_MOST) + ") AS few)",
    )
    return {schema: found[place] for place, schema in enumerate(schemas)}


@dataclass(frozen=True)
class OutboxCounts:
    """All rows of one tenant."""

    waiting: int
    dead: int
    """Dead letters that are kept."""

    died: int
    """Of these, those that died after the instant that was asked for."""


def count_outboxes(engine: Engine, schemas: Sequence[str], *, died_since: datetime | None) -> dict[str, OutboxCounts]:
    """Count all rows and dead letters, by schema; nothing for a schema that is missing or cannot be read.

    Args:
        engine: the database.
        schemas: of the tenants.
        died_since: count those that died after it apart.
    """

    def ask(connection: Connection, there: Sequence[str]) -> dict[str, OutboxCounts]:
        found = _union(
            connection,
            there,
            "SELECT {place}, ARRAY[(SELECT count(*) FROM {table}), count(*), "
            "count(*) FILTER (WHERE died_at > %(since)s::timestamptz)] FROM {table}_dead",
            {"since": died_since},
        )
        return {schema: OutboxCounts(*found[place]) for place, schema in enumerate(there)}

    return _ask_all(engine, schemas, ask).answers


def delivered_and_waiting(engine: Engine, tenants: Sequence[Tenant]) -> dict[Tenant, int]:
    """How many of the rows that wait are in the ledger as delivered, by tenant; nothing for those with none."""
    by_schema = {tenant.schema: tenant for tenant in tenants}

    def ask(connection: Connection, there: Sequence[str]) -> dict[str, int]:
        # Ids grow: of the ledger only lines count that reach up to the oldest waiting row.
        query = """
            SELECT {place}, count(*) FROM {table} WHERE id IN (
                SELECT unnest(row_ids) FROM outbox.training_ledger
                WHERE tenant_id = (%(tenants)s::uuid[])[{place} + 1] AND last_id >= (SELECT min(id) FROM {table})
            )
        """
        owners = [by_schema[schema].tenant_id for schema in there]
        found = _union(connection, there, query, {"tenants": owners})
        return {schema: found[place] for place, schema in enumerate(there)}

    counts = _ask_all(engine, list(by_schema), ask).answers
    return {by_schema[schema]: count for schema, count in counts.items() if count}


def oldest_dead_letters(engine: Engine, schemas: Sequence[str], *, before: datetime) -> dict[str, datetime]:
    """When the oldest dead letter died that did before an instant, by schema; nothing for those without one."""

    def ask(connection: Connection, there: Sequence[str]) -> dict[str, datetime]:
        query = "SELECT {place}, min(died_at) FROM {table}_dead WHERE died_at < %(before)s"
        found = _union(connection, there, query, {"before": before})
        return {schema: found[place] for place, schema in enumerate(there) if found[place] is not None}

    return _ask_all(engine, schemas, ask).answers


def _union(
    connection: Connection, schemas: Sequence[str], query: str, parameters: dict[str, object] | None = None
) -> dict[int, Any]:
    if not schemas:
        return {}
    parts = (
        "(" + query.format(place=place, table=f"{driver_identifier(schema)}.ml_outbox") + ")"
        for place, schema in enumerate(schemas)
    )
    return dict(iter(connection.exec_driver_sql(" UNION ALL ".join(parts), parameters)))


def _note_broken(engine: Engine, *, broken: list[UUID], mended: list[UUID]) -> None:
    if not broken and not mended:
        return
    # A line that somebody has locked is noted by the next look.
    with engine.begin() as connection:
        connection.execute(
            text("""
                UPDATE outbox.tenants
                SET problem = 'broken', failing_since = coalesce(failing_since, clock_timestamp()),
                    last_error = 'schema ' || quote_ident(schema_name) || ' or a table in it is missing; ' || :remedy
                WHERE tenant_id IN (
                    SELECT tenant_id FROM outbox.tenants WHERE tenant_id = ANY (:ids) FOR UPDATE SKIP LOCKED
                )
            """),
            {"ids": broken, "remedy": MISSING_REMEDY},
        )
        connection.execute(
            text("""
                UPDATE outbox.tenants
                SET problem = NULL, failing_since = NULL, last_error = NULL, last_error_details = NULL,
                    next_attempt_at = NULL
                WHERE tenant_id IN (
                    SELECT tenant_id FROM outbox.tenants
                    WHERE tenant_id = ANY (:ids) AND problem = 'broken' FOR UPDATE SKIP LOCKED
                )
            """),
            {"ids": mended},
        )


@dataclass(frozen=True)
class RowCount:
    """How many rows wait, of how many tenants."""

    rows: int
    tenants: int
    exact: bool

    def __str__(self) -> str:
        least = "" if self.exact else "at least "
        return f"{least}{counted(self.rows, 'row')} of {counted(self.tenants, 'tenant')}"


def count_waiting(engine: Engine, entries: Iterable[TenantBacklog]) -> RowCount:
    """Count the rows of tenants, at most :data:`COUNT_AT_MOST` of each."""
    found = _ask_all(engine, [entry.tenant.schema for entry in entries], _row_counts)
    counts = [count for count in found.answers.values() if count]
    exact = not found.unreadable and all(count < COUNT_AT_MOST for count in counts)
    return RowCount(sum(counts), len(counts), exact)


def note_reachability(connection: Connection, target: str, *, reachable: bool, detail: str) -> Reachability:
    """Remember what a probe found; ``since`` stays while the answer does."""
    row = connection.execute(
        text("""
            INSERT INTO outbox.ml_service_health AS known (target, reachable, detail)
            VALUES (:target, :reachable, :detail)
            ON CONFLICT (target) DO UPDATE
            SET since = CASE WHEN known.reachable = excluded.reachable THEN known.since ELSE clock_timestamp() END,
                reachable = excluded.reachable, detail = excluded.detail, checked_at = clock_timestamp()
            RETURNING since
        """),
        {"target": target, "reachable": reachable, "detail": detail},
    ).one()
    return Reachability(reachable, detail, row.since)
