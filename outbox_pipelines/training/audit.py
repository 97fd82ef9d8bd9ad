"""What became of one row: the answer to "who sent row 123"."""

from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum

from sqlalchemy import Connection, text

from outbox_pipelines.database.quoting import driver_identifier
from outbox_pipelines.tenants.registry import Tenant


class Fate(StrEnum):
    """Where a row is."""

    DELIVERED = "delivered"
    DEAD = "dead letter"
    WAITING = "waiting"
    REMOVED = "removed by hand"
    UNKNOWN = "unknown"
    """Never written, or older than the ledger."""


@dataclass(frozen=True)
class Delivery:
    """A line of the ledger."""

    run_id: str
    delivered_at: datetime
    batch_key: str
    rows: int
    """Rows of that call."""

    first_id: int
    last_id: int
    run_pruned: bool
    """Whether the run is gone from Dagster's history."""


@dataclass(frozen=True)
class Removal:
    """A row was taken out by somebody."""

    how: str
    """``deleted`` or ``truncated`` from the outbox, ``discarded`` from the dead letters."""

    removed_by: str
    """The database's role."""

    removed_at: datetime


@dataclass(frozen=True)
class RowHistory:
    """Everything that is known of a row."""

    tenant: Tenant
    row_id: int
    fate: Fate
    deliveries: list[Delivery]
    """More than one only when the row was put back by hand after a delivery."""

    removals: list[Removal] = field(default_factory=list)
    created_at: datetime | None = None
    attempts: int = 0
    """Failed attempts while it waited."""

    reason: str | None = None
    """Why it is dead, or its last failure while it waits."""

    run_id: str | None = None
    """The run that took a dead letter out."""

    died_at: datetime | None = None


def trace_row(connection: Connection, tenant: Tenant, row_id: int) -> RowHistory:
    """Look a row up in the ledger, the dead letters and the outbox."""
    deliveries = [
        Delivery(row.run_id, row.delivered_at, row.batch_key, row.rows, row.first_id, row.last_id, row.pruned)
        for row in connection.execute(
            text("""
                SELECT run_id, delivered_at, batch_key, cardinality(row_ids) AS rows, first_id, last_id,
                       run_id IN (SELECT run_id FROM outbox.pruned_runs) AS pruned
                FROM outbox.training_ledger
                WHERE tenant_id = :tenant AND last_id >= :row AND first_id <= :row AND :row = ANY (row_ids)
                ORDER BY delivered_at
            """),
            {"tenant": tenant.tenant_id, "row": row_id},
        )
    ]
    removals = [
        Removal(**row._mapping)
        for row in connection.execute(
            text("""
                SELECT how, removed_by, removed_at FROM outbox.removed_rows
                WHERE tenant_id = :tenant AND row_id = :row ORDER BY removed_at
            """),
            {"tenant": tenant.tenant_id, "row": row_id},
        )
    ]
    known = RowHistory(tenant, row_id, Fate.UNKNOWN, deliveries, removals)
    schema = driver_identifier(tenant.schema)
    dead = connection.exec_driver_sql(
        f"SELECT created_at, attempts, reason, run_id, died_at FROM {schema}.ml_outbox_dead WHERE id = %(id)s",
        {"id": row_id},
    ).one_or_none()
    if dead is not None:
        return replace(known, fate=Fate.DEAD, **dead._mapping)
    waiting = connection.exec_driver_sql(
        f"SELECT created_at, attempts, last_error AS reason FROM {schema}.ml_outbox WHERE id = %(id)s", {"id": row_id}
    ).one_or_none()
    if waiting is not None:
        return replace(known, fate=Fate.WAITING, **waiting._mapping)
    if deliveries:
        return replace(known, fate=Fate.DELIVERED)
    return replace(known, fate=Fate.REMOVED) if removals else known
