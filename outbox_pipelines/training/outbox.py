"""The SQL of a tenant's outbox and of the training ledger.

Tenant statements go through ``exec_driver_sql`` with the schema's name quoted into each;
the session's ``search_path`` is never used, so a connection that served another tenant, or
that a pooler lent, cannot read the wrong table.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

from sqlalchemy import Connection

from outbox_pipelines.database.error_text import error_text
from outbox_pipelines.database.quoting import driver_identifier
from outbox_pipelines.lease.lease import (
    Lease,
    LeasedTable,
    Refused,
    claim,
    fence,
    fence_parameters,
    lost,
    release,
)
from outbox_pipelines.tenants.registry import Problem, Tenant
from outbox_pipelines.training.delivery import DeadLetter, Delivered
from outbox_pipelines.training.sink import OutboxRow

TENANT_LEASES = LeasedTable("outbox.tenants", "tenant_id", "uuid")


@dataclass
class Unsettled:
    """What calls have settled and the database does not know yet."""

    delivered: list[Delivered] = field(default_factory=list)
    dead: list[DeadLetter] = field(default_factory=list)
    failed_ids: list[int] = field(default_factory=list)
    """Rows of the batch that a failure left where they are."""

    failure: str = ""

    def __bool__(self) -> bool:
        return bool(self.delivered or self.dead or self.failed_ids)

    def put_before(self, later: "Unsettled") -> "Unsettled":
        """Both together, in their order."""
        return Unsettled(
            self.delivered + later.delivered,
            self.dead + later.dead,
            self.failed_ids + later.failed_ids,
            later.failure or self.failure,
        )

    @property
    def gone_ids(self) -> list[int]:
        """The rows that are to leave the outbox."""
        return [row_id for line in self.delivered for row_id in line.row_ids] + [letter.row_id for letter in self.dead]


@dataclass(frozen=True)
class ClaimedTenant:
    """The right to flush a tenant."""

    lease: Lease
    failure_count: int
    """How often in a row its deliveries have failed."""


def claim_tenant(
    connection: Connection, tenant: Tenant, *, holder: str, seconds: float, token: UUID
) -> ClaimedTenant | Refused:
    """Claim the right to flush a tenant that is not paused."""
    claimed = claim(
        connection,
        TENANT_LEASES,
        tenant.tenant_id,
        holder=holder,
        seconds=seconds,
        token=token,
        only_if="NOT paused",
        returning="failure_count",
    )
    return claimed if isinstance(claimed, Refused) else ClaimedTenant(claimed[0], claimed[1].failure_count)


def read_rows(
    connection: Connection, tenant: Tenant, *, limit: int, max_bytes: int, except_ids: Sequence[int]
) -> list[OutboxRow]:
    """The oldest rows by id that are there, except those in flight.

    Never ``id > last seen``: a lower id may commit later than a higher one. The excepted ids
    are a subquery, which the server hashes; ``<> ALL (array)`` with a parameter it searches
    from end to end for each row.

    Args:
        connection: the caller commits.
        tenant: whose.
        limit: rows at most.
        max_bytes: bytes of text after which no further row is taken; the first always is.
        except_ids: rows to leave out.
    """
    rows = connection.exec_driver_sql(
        f"""
        SELECT id, example FROM (
            SELECT id, example, sum(octet_length(example)) OVER (ORDER BY id) - octet_length(example) AS before
            FROM (
                SELECT id, example::text FROM {driver_identifier(tenant.schema)}.ml_outbox
                WHERE id NOT IN (SELECT unnest(%(except_ids)s::bigint[])) ORDER BY id LIMIT %(limit)s
            ) AS oldest
        ) AS measured
        WHERE before < %(max_bytes)s ORDER BY id
        """,
        {"except_ids": list(except_ids), "limit": limit, "max_bytes": max_bytes},
    )
    return [OutboxRow(*row) for row in rows]


def settle(connection: Connection, lease: Lease, tenant: Tenant, unsettled: Unsettled, *, run_id: str) -> bool:
    """Delete delivered rows with their ledger lines, and bury the dead ones, in one statement.

    Safe because every part asks ``held``, which renews the lease and is empty when it is
    lost: then nothing is written. Repeating it, when the outcome of a first try is unknown,
    loses and doubles nothing: rows that are gone are not deleted again, a ledger line is
    known by its ``delivery_id``. (A failed row's ``attempts`` may then count one too many.)

    Returns:
        Whether the tenant has been paused meanwhile.

    Raises:
        LeaseLost: nothing was written.
    """
    schema = driver_identifier(tenant.schema)
    parameters: dict[str, object] = {**fence_parameters(lease), "run_id": run_id}
    parts = [f"held AS ({fence(lease.table, returning='paused')})"]
    if unsettled.gone_ids:
        # For this transaction: what it deletes is not noted as removed by hand.
        parts.append("settling AS (SELECT FROM held WHERE set_config('outbox.settles', 'yes', true) = 'yes')")
    if unsettled.delivered:
        parts.append(f"""
            delivered AS (
                DELETE FROM {schema}.ml_outbox
                WHERE id = ANY (%(delivered_ids)s::bigint[]) AND EXISTS (SELECT FROM settling)
            ),
            noted AS (
                INSERT INTO outbox.training_ledger
                    (delivery_id, tenant_id, batch_key, run_id, row_ids, first_id, last_id, call_seconds)
                SELECT line.delivery_id, %(lease_key)s, line.batch_key, %(run_id)s, line.row_ids,
                       line.row_ids[1], line.row_ids[cardinality(line.row_ids)], line.call_seconds
                FROM jsonb_to_recordset(%(lines)s::jsonb)
                     AS line (delivery_id uuid, batch_key text, row_ids bigint[], call_seconds float8)
                WHERE EXISTS (SELECT FROM held)
                ON CONFLICT (delivery_id) DO NOTHING
            )""")
        parameters["delivered_ids"] = [row_id for line in unsettled.delivered for row_id in line.row_ids]
        parameters["lines"] = json.dumps(
            [
                {
                    "delivery_id": str(line.delivery_id),
                    "batch_key": line.batch_key,
                    "row_ids": line.row_ids,
                    "call_seconds": line.call_seconds,
                }
                for line in unsettled.delivered
            ]
        )
    if unsettled.dead:
        parts.append(f"""
            buried AS (
                DELETE FROM {schema}.ml_outbox AS waiting
                USING unnest(%(dead_ids)s::bigint[], %(reasons)s::text[]) AS dead (id, reason)
                WHERE waiting.id = dead.id AND EXISTS (SELECT FROM settling)
                RETURNING waiting.id, waiting.example, waiting.created_at, waiting.attempts + 1, dead.reason
            ),
            graves AS (
                INSERT INTO {schema}.ml_outbox_dead (id, example, created_at, attempts, reason, run_id)
                SELECT buried.*, %(run_id)s FROM buried
                -- The same id died before and came back by hand: the newer reason counts.
                ON CONFLICT (id) DO UPDATE
                SET example = excluded.example, attempts = excluded.attempts, reason = excluded.reason,
                    run_id = excluded.run_id, died_at = excluded.died_at
            )""")
        parameters["dead_ids"] = [letter.row_id for letter in unsettled.dead]
        parameters["reasons"] = [error_text(letter.reason) for letter in unsettled.dead]
    if unsettled.failed_ids:
        parts.append(f"""
            failed AS (
                UPDATE {schema}.ml_outbox SET attempts = attempts + 1, last_error = %(failure)s
                WHERE id = ANY (%(failed_ids)s::bigint[]) AND EXISTS (SELECT FROM held)
            )""")
        parameters["failed_ids"] = unsettled.failed_ids
        parameters["failure"] = error_text(unsettled.failure)
    row = connection.exec_driver_sql(f"WITH {', '.join(parts)} SELECT paused FROM held", parameters).one_or_none()
    if row is None:
        raise lost(lease)
    return bool(row.paused)


def release_well(connection: Connection, lease: Lease) -> None:
    """Give the lease back after deliveries that went well, forgetting earlier failures."""
    release(
        connection,
        lease,
        also_set="""failure_count = 0, failing_since = NULL, next_attempt_at = NULL,
                    problem = NULL, last_error = NULL, last_error_details = NULL""",
    )


@dataclass(frozen=True)
class Failure:
    """Why a tenant's delivery failed, and when it is tried again."""

    problem: Problem
    told: str
    """In our words; shown anywhere."""

    details: str
    """With the service's own words; shown where the payload is."""

    failures: int
    """In a row, this one included."""

    retry_in_seconds: float


def release_failed(connection: Connection, lease: Lease, failure: Failure) -> None:
    """Give the lease back after a failure: the tenant is due again when the time has passed."""
    release(
        connection,
        lease,
        also_set="""failure_count = :failures, failing_since = coalesce(failing_since, clock_timestamp()),
                    next_attempt_at = clock_timestamp() + make_interval(secs => :retry_in),
                    problem = :problem, last_error = :told, last_error_details = :details""",
        parameters={
            "failures": failure.failures,
            "problem": failure.problem.value,
            "told": error_text(failure.told),
            "details": error_text(failure.details),
            "retry_in": failure.retry_in_seconds,
        },
    )


def count_rows(connection: Connection, tenant: Tenant) -> int:
    """How many rows wait in the tenant's outbox."""
    count: int = connection.exec_driver_sql(
        f"SELECT count(*) FROM {driver_identifier(tenant.schema)}.ml_outbox"
    ).scalar_one()
    return count
