"""Dead letters: look at them, put them back, or throw them away.

Why it is safe: a dead letter is moved by one statement, which deletes it and inserts the outbox
row with what it deleted. Who comes second finds nothing to move. No lease is needed: a flush touches only
rows that are in the outbox, and a dead letter is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from outbox_pipelines.database.quoting import driver_identifier
from outbox_pipelines.errors import OutboxError
from outbox_pipelines.tenants.registry import Tenant

MOVED_AT_ONCE = 500
"""Dead letters that one transaction moves at most."""


class UnknownDeadLetter(OutboxError):
    """There is no dead letter with that id."""


@dataclass(frozen=True)
class Letter:
    """A dead letter, without its example."""

    row_id: int
    """As it was in the outbox, and will be again: the idempotency key."""

    reason: str
    attempts: int
    """Failed attempts before it was taken out, over all its lives."""

    created_at: datetime
    died_at: datetime
    run_id: str
    """The run that took it out."""


_COLUMNS = "id, reason, attempts, created_at, died_at, run_id"


def list_dead_letters(connection: Connection, tenant: Tenant, *, limit: int) -> list[Letter]:
    """The tenant's dead letters, the latest first."""
    rows = connection.exec_driver_sql(
        f"SELECT {_COLUMNS} FROM {_dead(tenant)} ORDER BY died_at DESC, id DESC LIMIT %(limit)s", {"limit": limit}
    )
    return [Letter(*row) for row in rows]


def show_dead_letter(connection: Connection, tenant: Tenant, row_id: int) -> tuple[Letter, Any]:
    """A dead letter and its example.

    Raises:
        UnknownDeadLetter: naming the command that says where the row is.
    """
    row = connection.exec_driver_sql(
        f"SELECT {_COLUMNS}, example FROM {_dead(tenant)} WHERE id = %(id)s", {"id": row_id}
    ).one_or_none()
    if row is None:
        raise _unknown(tenant, [row_id])
    *letter, example = row
    return Letter(*letter), example


def count_dead_letters(connection: Connection, tenant: Tenant) -> int:
    """How many there are."""
    count: int = connection.exec_driver_sql(f"SELECT count(*) FROM {_dead(tenant)}").scalar_one()
    return count


def redrive(connection: Connection, tenant: Tenant, row_ids: Sequence[int]) -> list[int]:
    """Put dead letters back into the outbox; the caller commits.

    A row keeps its id, its age and its count of failed attempts; its last error says why it was dead. It is sent
    with the tenant's next flush.

    Args:
        connection: in a transaction of the caller's.
        tenant: whose.
        row_ids: which.

    Returns:
        The ids that were moved, in their order; see :func:`require_all`.
    """
    moved = connection.exec_driver_sql(
        f"""
        WITH back AS (
            DELETE FROM {_dead(tenant)} WHERE id = ANY (%(ids)s::bigint[])
            RETURNING id, example, created_at, attempts, reason
        )
        INSERT INTO {driver_identifier(tenant.schema)}.ml_outbox (id, example, created_at, attempts, last_error)
        OVERRIDING SYSTEM VALUE SELECT * FROM back ORDER BY id RETURNING id
        """,
        {"ids": list(row_ids)},
    )
    return sorted(moved.scalars())


def oldest_ids(connection: Connection, tenant: Tenant, *, limit: int, after: int | None = None) -> list[int]:
    """Ids of dead letters in ascending order, beyond ``after`` if it is given."""
    rows = connection.exec_driver_sql(
        f"SELECT id FROM {_dead(tenant)} WHERE %(after)s::bigint IS NULL OR id > %(after)s ORDER BY id LIMIT %(limit)s",
        {"after": after, "limit": limit},
    )
    return list(rows.scalars())


def discard(connection: Connection, tenant: Tenant, row_ids: Sequence[int]) -> list[int]:
    """Delete dead letters for good, and note that; the caller commits.

    Returns:
        The ids that went; see :func:`require_all`.
    """
    gone = connection.exec_driver_sql(
        f"""
        WITH gone AS (DELETE FROM {_dead(tenant)} WHERE id = ANY (%(ids)s::bigint[]) RETURNING id)
        INSERT INTO outbox.removed_rows (tenant_id, row_id, how) SELECT %(tenant)s, id, 'discarded' FROM gone
        RETURNING row_id
        """,
        {"ids": list(row_ids), "tenant": tenant.tenant_id},
    )
    return sorted(gone.scalars())


def require_all(tenant: Tenant, asked: Sequence[int], done: Sequence[int]) -> None:
    """For who named ids: inside the transaction that moved them, which the error rolls back.

    Raises:
        UnknownDeadLetter: when one was none.
    """
    missing = sorted(set(asked) - set(done))
    if missing:
        raise _unknown(tenant, missing)


def _unknown(tenant: Tenant, row_ids: Sequence[int]) -> UnknownDeadLetter:
    named = ", ".join(str(row_id) for row_id in row_ids[:5]) + (" …" if len(row_ids) > 5 else "")
    return UnknownDeadLetter(
        f"tenant {tenant.name!r} has no dead letter {named}: nothing was changed; "
        f"`outbox audit --tenant {tenant.name} --row {row_ids[0]}` says where a row is"
    )


def _dead(tenant: Tenant) -> str:
    return f"{driver_identifier(tenant.schema)}.ml_outbox_dead"
