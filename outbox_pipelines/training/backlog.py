"""Who has rows waiting, and who of these is due: what the sensor asks at each tick."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import Connection, text
from sqlalchemy.exc import ProgrammingError

from outbox_pipelines.database.quoting import driver_identifier
from outbox_pipelines.tenants.registry import Problem, Tenant
from outbox_pipelines.wording import counted

Answer = TypeVar("Answer")

CHUNK = 500
"""Tenants asked about in one statement: thousands of tables in one exhaust the server's lock table."""

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
    """Its schema or table is missing."""


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


def look(connection: Connection) -> Backlog:
    """Find who has rows waiting: one statement for the registry, two for each 500 tenants.

    Tenants whose table is missing are noted as broken, those found again as mended. The
    caller commits.
    """
    asked_at: datetime = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
    registered = connection.execute(
        text("""
            SELECT tenant_id, name, schema_name, paused, next_attempt_at, problem, last_error,
                   coalesce(lease_expires_at > clock_timestamp(), false) AS leased,
                   coalesce(next_attempt_at > clock_timestamp(), false) AS backing_off
            FROM outbox.tenants ORDER BY name
        """)
    ).all()
    oldest: dict[str, datetime | None] = {}
    schemas = [row.schema_name for row in registered]
    for begin in range(0, len(schemas), CHUNK):
        oldest.update(_of_existing(connection, schemas[begin : begin + CHUNK], _oldest_rows))
    entries = []
    broken: list[UUID] = []
    mended: list[UUID] = []
    for row in registered:
        missing = row.schema_name not in oldest
        if missing and row.problem != Problem.BROKEN:
            broken.append(row.tenant_id)
        if not missing and row.problem == Problem.BROKEN:
            mended.append(row.tenant_id)
        waits = oldest.get(row.schema_name)
        standing = (
            Standing.BROKEN
            if missing
            else Standing.EMPTY
            if waits is None
            else Standing.PAUSED
            if row.paused
            else Standing.LEASED
            if row.leased
            # A table that is there again need not wait for the time that was set for a missing one.
            else Standing.BACKING_OFF
            if row.backing_off and row.problem != Problem.BROKEN
            else Standing.DUE
        )
        entries.append(
            TenantBacklog(
                Tenant(row.tenant_id, row.name, row.schema_name, row.paused),
                standing,
                waits,
                row.next_attempt_at,
                Problem.BROKEN if missing else Problem(row.problem) if row.problem else None,
                row.last_error,
            )
        )
    _note_broken(connection, broken, mended)
    return Backlog(asked_at, entries)


def _of_existing(
    connection: Connection,
    schemas: Sequence[str],
    ask: Callable[[Connection, Sequence[str]], dict[str, Answer]],
) -> dict[str, Answer]:
    """Ask about the outboxes that are there, in one statement for all."""
    try:
        with connection.begin_nested():
            return ask(connection, _schemas_with_outbox(connection, schemas))
    except ProgrammingError:
        # One was dropped between the two statements; what is there now is asked once more.
        return ask(connection, _schemas_with_outbox(connection, schemas))


def _schemas_with_outbox(connection: Connection, schemas: Sequence[str]) -> list[str]:
    found = connection.execute(
        text("""
            SELECT space.nspname FROM pg_class AS class JOIN pg_namespace AS space ON space.oid = class.relnamespace
            WHERE class.relname = 'ml_outbox' AND class.relkind IN ('r', 'p')
              AND space.nspname = ANY (:schemas)
        """),
        {"schemas": list(schemas)},
    )
    return list(found.scalars())


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


def _union(connection: Connection, schemas: Sequence[str], query: str) -> dict[int, Any]:
    if not schemas:
        return {}
    parts = (
        "(" + query.format(place=place, table=f"{driver_identifier(schema)}.ml_outbox") + ")"
        for place, schema in enumerate(schemas)
    )
    return dict(connection.exec_driver_sql(" UNION ALL ".join(parts)).all())


def _note_broken(connection: Connection, broken: list[UUID], mended: list[UUID]) -> None:
    if broken:
        connection.execute(
            text("""
                UPDATE outbox.tenants
                SET problem = 'broken', failing_since = coalesce(failing_since, clock_timestamp()),
                    last_error = 'schema ' || quote_ident(schema_name) || ' has no table ml_outbox: '
                                 'run `outbox migrate`, or remove the tenant'
                WHERE tenant_id = ANY (:ids)
            """),
            {"ids": broken},
        )
    if mended:
        connection.execute(
            text("""
                UPDATE outbox.tenants
                SET problem = NULL, failing_since = NULL, last_error = NULL, next_attempt_at = NULL
                WHERE tenant_id = ANY (:ids) AND problem = 'broken'
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


def count_waiting(connection: Connection, entries: Iterable[TenantBacklog]) -> RowCount:
    """Count the rows of tenants, at most :data:`COUNT_AT_MOST` of each."""
    schemas = [entry.tenant.schema for entry in entries if entry.standing is not Standing.BROKEN]
    rows, exact = 0, True
    for begin in range(0, len(schemas), CHUNK):
        for count in _of_existing(connection, schemas[begin : begin + CHUNK], _row_counts).values():
            rows += count
            exact = exact and count < COUNT_AT_MOST
    return RowCount(rows, len(schemas), exact)


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
