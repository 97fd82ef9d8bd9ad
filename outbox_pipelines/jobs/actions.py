"""What a person does to a message: cancel it, or try it again."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, Row, text
from sqlalchemy.exc import IntegrityError

from outbox_pipelines.errors import OutboxError
from outbox_pipelines.jobs.kinds import Kinds
from outbox_pipelines.jobs.message import Outcome, State
from outbox_pipelines.jobs.runner import close_domain_job


class UnknownMessage(OutboxError):
    """There is no message with that id."""


class NotPossible(OutboxError):
    """The message is in a state in which that cannot be done; the text says what can."""


def cancel(connection: Connection, kinds: Kinds, message_id: int) -> State:
    """Complete a message as cancelled, whatever it waits for; the caller commits.

    One that is being processed is taken from its worker: whose heartbeat finds the lease lost,
    sets ``cancelled`` for the handler and writes nothing more.

    Args:
        connection: to the database.
        kinds: to mark the domain job as well, where its kind is among them.
        message_id: which message.

    Returns:
        The state that it was in.

    Raises:
        UnknownMessage, NotPossible: nothing was changed.
    """
    # Locked first: the line in the ledger is for the claim that is cut off, if there is one.
    row = _locked(connection, message_id)
    if row.state == State.COMPLETED:
        raise NotPossible(f"message {message_id} is completed already ({row.outcome})")
    reason = "cancelled by a person"
    if row.state == State.PROCESSING:
        connection.execute(
            text("""
                INSERT INTO outbox.job_attempts (message_id, kind, claim, attempt, run_id, outcome, started_at, error)
                SELECT message_id, kind, claims, processing_attempts, lease_holder, 'cancelled', claimed_at, :reason
                FROM outbox.messages WHERE message_id = :id
            """),
            {"id": message_id, "reason": reason},
        )
    connection.execute(
        text("""
            UPDATE outbox.messages
            SET state = 'Completed', outcome = 'cancelled', completed_at = clock_timestamp(), last_error = :reason,
                publish_token = NULL, lease_token = NULL, lease_expires_at = NULL, lease_holder = NULL, parked = false
            WHERE message_id = :id
        """),
        {"id": message_id, "reason": reason},
    )
    kind = kinds.get(row.kind)
    if kind is not None and kind.domain is not None and row.job_id is not None:
        close_domain_job(connection, kind, message_id, row.job_id, Outcome.CANCELLED, reason)
    return State(row.state)


def retry(connection: Connection, kinds: Kinds, message_id: int) -> State:
    """Make a message due now; the caller commits.

    One that failed or was cancelled gets all its attempts anew and keeps its id and history; one
    that waits for a backoff or a later time waits no longer.

    Returns:
        The state that it was in.

    Raises:
        UnknownMessage, NotPossible: nothing was changed.
    """
    row = _locked(connection, message_id)
    if row.state == State.PROCESSING:
        raise NotPossible(f"message {message_id} is being processed by {row.lease_holder}")
    if row.state in {State.PUBLISHING, State.PUBLISHED}:
        raise NotPossible(f"message {message_id} is published: its run is on its way")
    if row.outcome == Outcome.SUCCEEDED:
        raise NotPossible(f"message {message_id} has succeeded: enqueue a new job to do it again")
    anew = row.state == State.COMPLETED
    try:
        with connection.begin_nested():
            connection.execute(
                text("""
                    UPDATE outbox.messages
                    SET state = 'Pending', outcome = NULL, completed_at = NULL, available_at = clock_timestamp(),
                        processing_attempts = CASE WHEN :anew THEN 0 ELSE processing_attempts END,
                        lost_leases = CASE WHEN :anew THEN 0 ELSE lost_leases END,
                        last_error = CASE WHEN :anew THEN NULL ELSE last_error END
                    WHERE message_id = :id
                """),
                {"id": message_id, "anew": anew},
            )
    except IntegrityError as error:
        raise NotPossible(
            f"message {message_id}: another live message of kind {row.kind!r} has its unique key {row.unique_key!r}"
        ) from error
    # An UPDATE does not fire the trigger that wakes workers.
    connection.execute(text("SELECT pg_notify('outbox_jobs', :kind)"), {"kind": row.kind})
    kind = kinds.get(row.kind)
    if anew and kind is not None and kind.domain is not None and row.job_id is not None:
        kind.domain.reopen(connection, row.job_id)
    return State(row.state)


@dataclass(frozen=True)
class FailedJob:
    """A message that was given up."""

    message_id: int
    kind: str
    job_id: str | None


def failed_between(
    connection: Connection, since: datetime, before: datetime, *, kind: str | None, limit: int
) -> list[FailedJob]:
    """Messages that were given up in a span of time, the oldest first.

    Args:
        connection: to the database.
        since: its begin, which belongs to it.
        before: its end, which does not.
        kind: of this kind only.
        limit: at most so many.
    """
    rows = connection.execute(
        text("""
            SELECT message_id, kind, job_id FROM outbox.messages
            WHERE outcome = 'failed' AND completed_at >= :since AND completed_at < :before
              AND (CAST(:kind AS text) IS NULL OR kind = :kind)
            ORDER BY completed_at, message_id LIMIT :limit
        """),
        {"since": since, "before": before, "kind": kind, "limit": limit},
    )
    return [FailedJob(**row._mapping) for row in rows]


def _locked(connection: Connection, message_id: int) -> Row[tuple[object, ...]]:
    row = connection.execute(
        text("""
            SELECT kind, job_id, state, outcome, lease_holder, unique_key FROM outbox.messages
            WHERE message_id = :id FOR UPDATE
        """),
        {"id": message_id},
    ).one_or_none()
    if row is None:
        raise UnknownMessage(f"there is no message {message_id}; see `outbox jobs list`")
    return row
