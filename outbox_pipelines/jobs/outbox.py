"""The SQL that claims messages and ends their claims.

What moves messages that nobody works on stands with who does it, under the same rules and with
its own reason beside it: publishing in ``publisher``, taking back and parking in ``recovery``,
cancelling and retrying in ``actions``.

Why it is safe, in READ COMMITTED:

- A message is claimed by an UPDATE that finds it in a state in which nobody works on it, and
  locks it. Whoever comes second waits (by id) or passes it by (SKIP LOCKED), and then checks
  its condition on the row as the first left it.
- Whatever a worker writes about its message says ``lease_token = <its token>``. A message that
  was recovered, cancelled or claimed anew has another token or none, and the write touches no
  row. The same holds for a publisher and ``publish_token``.
- Each ended claim appends its line to the ledger in the statement that ends it: both happen,
  or neither does.
- Statements over several messages lock with SKIP LOCKED, or touch only rows whose token is the
  caller's: no two of them wait for each other.
- Every instant is the database's.
"""

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, text

from outbox_pipelines.database.error_text import error_text
from outbox_pipelines.jobs.message import (
    MESSAGES,
    AttemptOutcome,
    Care,
    Claimed,
    NotClaimed,
    Outcome,
    Refusal,
    Settlement,
    State,
)
from outbox_pipelines.lease.lease import Lease, Refused
from outbox_pipelines.lease.lease import claim as claim_lease

EXPIRED_AT_ONCE = 1_000
"""Lost leases that one statement recovers."""

_CARES = tuple(Care)

# What every claim does besides taking the lease. The same token again is the same claim, repeated
# because its first outcome was unknown: it counts once.
_CLAIMED = """
    state = 'Processing', publish_token = NULL, last_error = NULL, parked = false, step = NULL, fraction = NULL,
    processing_attempts = processing_attempts + CASE WHEN lease_token = :token THEN 0 ELSE 1 END,
    claims = claims + CASE WHEN lease_token = :token THEN 0 ELSE 1 END,
    claimed_at = CASE WHEN lease_token = :token THEN claimed_at ELSE clock_timestamp() END
"""
_CLAIM = """
    {table}.message_id, {table}.job_id, {table}.payload::text AS payload, {table}.processing_attempts, {table}.claims,
    greatest(0, extract(epoch FROM {table}.claimed_at - {table}.available_at))::float8 AS waited, {table}.trace_context
"""


def claim_message(
    connection: Connection, message_id: int, *, kind: str, holder: str, seconds: float, token: UUID
) -> Claimed | NotClaimed:
    """Claim one message: a run's first step.

    Claimable are Published and Publishing messages, Pending ones that are due, and Processing
    ones whose lease has ended (whose lost attempt gets its line in the ledger first).
    """
    expire(connection, "message_id = :message_id", {"message_id": message_id}, wait=True)
    taken = claim_lease(
        connection,
        MESSAGES,
        message_id,
        holder=holder,
        seconds=float(seconds),
        token=token,
        only_if="""
            kind = :kind AND state <> 'Completed'
            AND (state <> 'Pending' OR available_at <= clock_timestamp())
            AND (state <> 'Processing' OR lease_token = :token)
        """,
        also_set=_CLAIMED,
        returning=_CLAIM.format(table="messages"),
        parameters={"kind": kind},
    )
    if isinstance(taken, Refused):
        return _why_not(connection, message_id, kind, taken)
    lease, row = taken
    return _claimed(row, kind, lease)


def _why_not(connection: Connection, message_id: int, kind: str, refused: Refused) -> NotClaimed:
    row = connection.execute(
        text("""
            SELECT kind, state, outcome, lease_expires_at, lease_holder, available_at,
                   extract(epoch FROM available_at - clock_timestamp())::float8 AS due_in
            FROM outbox.messages WHERE message_id = :id
        """),
        {"id": message_id},
    ).one_or_none()
    if row is None:
        return NotClaimed(message_id, Refusal.UNKNOWN)
    if row.kind != kind:
        return NotClaimed(message_id, Refusal.OTHER_KIND)
    if row.state == State.COMPLETED:
        return NotClaimed(message_id, Refusal.COMPLETED, outcome=Outcome(row.outcome))
    if row.state == State.PROCESSING:
        return NotClaimed(
            message_id,
            Refusal.HELD,
            holder=row.lease_holder,
            until=row.lease_expires_at,
            # None when the lease ended while we asked.
            seconds_left=refused.seconds_left or 1.0,
        )
    return NotClaimed(message_id, Refusal.NOT_DUE, until=row.available_at, seconds_left=max(row.due_in, 1.0))


def claim_due(
    connection: Connection,
    kind: str,
    *,
    limit: int,
    ready: int,
    alone: bool,
    attempts: int,
    holder: str,
    seconds: float,
    token: UUID,
) -> list[Claimed]:
    """Claim the most urgent messages of a kind that are due: by priority, then age.

    All under one token; those that must not wait in memory come first (see :class:`Care`).

    Args:
        connection: the caller commits.
        kind: which kind.
        limit: how many at most.
        ready: how many consumers are free: as many may be such that must not wait.
        alone: whether there may be one that is to be alone of its sort.
        attempts: the kind's limit.
        holder: shown to people.
        seconds: how long the lease lasts.
        token: of this claim.
    """
    claimed = connection.execute(
        text(f"""
            WITH due AS MATERIALIZED (
                SELECT message_id, priority, available_at, care
                FROM outbox.messages, LATERAL (SELECT
                    CASE WHEN lost_leases >= 2 OR (lost_leases = 1 AND processing_attempts + 1 >= :attempts) THEN 2
                         WHEN lost_leases = 1 OR processing_attempts + 1 >= :attempts THEN 1
                         ELSE 0 END AS care
                ) AS careful
                WHERE kind = :kind AND state = 'Pending' AND available_at <= statement_timestamp() AND care <= :most
                ORDER BY priority DESC, available_at, message_id
                LIMIT :limit FOR UPDATE OF messages SKIP LOCKED
            ), first AS (
                SELECT *, row_number() OVER (PARTITION BY care ORDER BY priority DESC, available_at, message_id)
                          AS place
                FROM due
            ), ranked AS (
                SELECT *, row_number() OVER (PARTITION BY care > 0 ORDER BY priority DESC, available_at, message_id)
                          AS careful_place
                FROM first WHERE care < 2 OR place = 1
            ), claimed AS (
                UPDATE outbox.messages AS message
                SET lease_token = :token, lease_holder = :holder,
                    lease_expires_at = clock_timestamp() + make_interval(secs => :seconds), {_CLAIMED}
                FROM ranked
                WHERE message.message_id = ranked.message_id AND (care = 0 OR careful_place <= :ready)
                RETURNING {_CLAIM.format(table="message")}, care, message.priority, message.available_at
            )
            SELECT message_id, job_id, payload, processing_attempts, claims, waited, trace_context, care FROM claimed
            ORDER BY care DESC, priority DESC, available_at, message_id
        """),
        {
            "kind": kind,
            "limit": limit,
            "ready": ready,
            # Those that cannot be taken now hold up none of the others.
            "most": int(Care.NONE if ready < 1 else Care.ALONE if alone else Care.AT_ONCE),
            "attempts": attempts,
            "token": token,
            "holder": holder,
            "seconds": seconds,
        },
    )
    return [_claimed(row, kind, _lease(row, token, seconds), _CARES[care]) for *row, care in claimed]


def claimed_under(connection: Connection, kind: str, *, token: UUID, seconds: float) -> list[Claimed]:
    """The messages that a claim took whose outcome its caller never learned."""
    rows = connection.execute(
        text(f"""
            SELECT {_CLAIM.format(table="message")} FROM outbox.messages AS message
            WHERE kind = :kind AND state = 'Processing' AND lease_token = :token
        """),
        {"kind": kind, "token": token},
    )
    # What care each needs is not known any more: the greater does no harm.
    return [_claimed(row, kind, _lease(row, token, seconds), Care.AT_ONCE) for row in rows]


def _lease(row: Sequence[Any], token: UUID, seconds: float) -> Lease:
    # Those of several kinds are renewed together, and the driver refuses a list of 60 and 120.0.
    return Lease(MESSAGES, row[0], token, float(seconds))


def _claimed(row: Sequence[Any], kind: str, lease: Lease, care: Care = Care.NONE) -> Claimed:
    # By place, not by name, which costs a worker more than all else that it does with the row.
    _, job_id, payload, attempt, claim, waited, trace_context = row
    return Claimed(lease, kind, job_id, payload, attempt, claim, waited, care, trace_context)


def settle(connection: Connection, settlements: Sequence[Settlement], *, holder: str) -> set[int]:
    """End claims, each under its token: finish, release, give up, interrupt, cancel.

    Returns:
        The ids of the messages that were ours. The others were lost; nothing was written of them.
    """
    # PostgreSQL evaluates the right sides on the row as it was: available_at, processing_attempts.
    done = connection.execute(
        text("""
            WITH ending AS (
                SELECT *, CASE outcome WHEN 'succeeded' THEN 'succeeded' WHEN 'given up' THEN 'failed'
                                       WHEN 'cancelled' THEN 'cancelled' END AS final
                FROM unnest(CAST(:ids AS bigint[]), CAST(:tokens AS uuid[]), CAST(:outcomes AS text[]),
                            CAST(:errors AS text[]), CAST(:delays AS float8[]))
                     AS ending (id, token, outcome, error, delay)
            ), ended AS (
                UPDATE outbox.messages AS message
                SET state = CASE WHEN ending.final IS NULL THEN 'Pending' ELSE 'Completed' END,
                    outcome = ending.final,
                    completed_at = CASE WHEN ending.final IS NOT NULL THEN clock_timestamp() END,
                    available_at = CASE WHEN ending.outcome = 'failed'
                                        THEN clock_timestamp() + make_interval(secs => ending.delay)
                                        ELSE message.available_at END,
                    processing_attempts = message.processing_attempts
                                        - CASE WHEN ending.outcome = 'interrupted' THEN 1 ELSE 0 END,
                    last_error = ending.error,
                    lease_token = NULL, lease_expires_at = NULL, lease_holder = NULL
                FROM ending
                WHERE message.message_id = ending.id AND message.lease_token = ending.token
                  -- Said twice, or a batch of some hundred would be joined to a scan of a whole small table.
                  AND message.message_id = ANY (CAST(:ids AS bigint[]))
                RETURNING message.message_id, message.kind, message.claims, message.claimed_at, ending.outcome,
                          ending.error,
                          message.processing_attempts + CASE WHEN ending.outcome = 'interrupted' THEN 1 ELSE 0 END
                          AS attempt
            )
            INSERT INTO outbox.job_attempts (message_id, kind, claim, attempt, run_id, outcome, started_at, error)
            SELECT message_id, kind, claims, attempt, :holder, outcome, claimed_at, error FROM ended
            RETURNING message_id
        """),
        {
            "ids": _array(one.claimed.message_id for one in settlements),
            "tokens": _array(one.claimed.lease.token for one in settlements),
            "outcomes": _array(one.outcome for one in settlements),
            "errors": [None if one.error is None else error_text(one.error) for one in settlements],
            "delays": _array(float(one.delay) for one in settlements),
            "holder": holder,
        },
    )
    return set(done.scalars().all())


def _array(values: Iterable[float | UUID | AttemptOutcome]) -> str:
    """Numbers, tokens or words as SQL writes an array: the driver takes longer for a list than for all else here."""
    return f"{{{','.join(map(str, values))}}}"


def ended_as(connection: Connection, claims: Iterable[Claimed]) -> dict[int, AttemptOutcome]:
    """What the ledger says of claims, by message: how each ended, if it has."""
    asked = list(claims)
    found = connection.execute(
        text("""
            SELECT ledger.message_id, ledger.outcome
            FROM unnest(CAST(:ids AS bigint[]), CAST(:claims AS integer[])) AS asked (id, claim)
            JOIN outbox.job_attempts AS ledger ON ledger.message_id = asked.id AND ledger.claim = asked.claim
        """),
        {"ids": [one.message_id for one in asked], "claims": [one.claim for one in asked]},
    )
    return {int(row.message_id): AttemptOutcome(row.outcome) for row in found}


def last_attempt(connection: Connection, message_id: int) -> tuple[AttemptOutcome | None, str | None]:
    """How the last ended claim of a message ended, and its error."""
    row = connection.execute(
        text("SELECT outcome, error FROM outbox.job_attempts WHERE message_id = :id ORDER BY claim DESC LIMIT 1"),
        {"id": message_id},
    ).one_or_none()
    return (None, None) if row is None else (AttemptOutcome(row.outcome), row.error)


def note_progress(connection: Connection, claimed: Claimed, step: str, fraction: float | None) -> bool:
    """Write how far the handler is; says whether the message is still ours."""
    done = connection.execute(
        text("""
            UPDATE outbox.messages SET step = :step, fraction = :fraction
            WHERE message_id = :id AND lease_token = :token
        """),
        {"step": step, "fraction": fraction, "id": claimed.message_id, "token": claimed.lease.token},
    )
    return bool(done.rowcount)


def expire(
    connection: Connection,
    which: str = "true",
    parameters: dict[str, object] | None = None,
    *,
    only_ended: bool = True,
    wait: bool = False,
    reason: str = "the lease ended: the worker died, or was cut off from the database",
) -> list[int]:
    """Give up lost claims: back to Pending, due at once, with their line in the ledger.

    The attempt counts, since its handler may have run.

    Args:
        connection: the caller commits.
        which: a further SQL condition on the messages.
        parameters: those that it names.
        only_ended: leave leases alone that still run; False only when their worker is known to be dead.
        wait: for messages that another transaction has locked, instead of passing them by.
        reason: for people.

    Returns:
        The messages' ids; at most a thousand.
    """
    ended = "AND lease_expires_at <= clock_timestamp()" if only_ended else ""
    locked = "" if wait else "SKIP LOCKED"
    lost = connection.execute(
        text(f"""
            WITH lost AS MATERIALIZED (
                SELECT message_id, kind, claims, processing_attempts, lease_holder, claimed_at FROM outbox.messages
                WHERE state = 'Processing' {ended} AND ({which})
                LIMIT {EXPIRED_AT_ONCE} FOR UPDATE {locked}
            ), returned AS (
                UPDATE outbox.messages AS message
                SET state = 'Pending', lost_leases = lost_leases + 1, last_error = :reason,
                    lease_token = NULL, lease_expires_at = NULL, lease_holder = NULL
                FROM lost WHERE message.message_id = lost.message_id
            )
            INSERT INTO outbox.job_attempts (message_id, kind, claim, attempt, run_id, outcome, started_at, error)
            SELECT message_id, kind, claims, processing_attempts, lease_holder, 'lost', claimed_at, :reason FROM lost
            RETURNING message_id
        """),
        {**(parameters or {}), "reason": reason},
    )
    return [int(message_id) for message_id in lost.scalars()]


def expire_dead(connection: Connection, leases: Sequence[Lease]) -> list[int]:
    """Give up the claims of a worker that is known to be dead, without waiting for their leases to end."""
    return expire(
        connection,
        """
            EXISTS (SELECT FROM unnest(CAST(:ids AS bigint[]), CAST(:tokens AS uuid[])) AS dead (id, token)
                    WHERE dead.id = message_id AND dead.token = lease_token)
        """,
        {"ids": [lease.key for lease in leases], "tokens": [lease.token for lease in leases]},
        only_ended=False,
        reason="the worker's process died",
    )
