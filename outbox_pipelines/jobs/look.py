"""Look at messages and their history, for people and scripts."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, text

from outbox_pipelines.jobs.actions import UnknownMessage
from outbox_pipelines.jobs.message import AttemptOutcome, Outcome, State

LIVE = tuple(state for state in State if state is not State.COMPLETED)


@dataclass(frozen=True)
class MessageLine:
    """A message in a list."""

    message_id: int
    kind: str
    job_id: str | None
    state: State
    outcome: Outcome | None
    parked: bool
    """It waits because nobody has registered its kind."""

    priority: int
    attempts: int
    """Processing attempts so far."""

    created_at: datetime
    available_at: datetime
    waiting_seconds: float | None
    """How long it has been due, by the database's clock; none when it does not wait."""

    step: str | None
    fraction: float | None
    last_error: str | None


@dataclass(frozen=True)
class Attempt:
    """A claim that ended, as the ledger has it, or the one under way."""

    claim: int
    attempt: int
    run_id: str
    outcome: AttemptOutcome | None
    """None while it is under way."""

    started_at: datetime
    finished_at: datetime | None
    error: str | None
    run_url: str | None
    """The run's address in the Dagster UI; none for a worker's attempt, or a run that was pruned."""

    run_pruned: bool = False
    """Whether the run is gone from Dagster's history."""


@dataclass(frozen=True)
class MessageHistory:
    """All that is known of a message."""

    message: MessageLine
    payload: Any
    unique_key: str | None
    publish_attempts: int
    published_at: datetime | None
    lease_holder: str | None
    lease_expires_at: datetime | None
    completed_at: datetime | None
    attempts: list[Attempt]


@dataclass(frozen=True)
class ServerLine:
    """Who serves a kind, and how it gets on."""

    kind: str
    server: str
    consumers: int
    running: int
    prefetched: int
    progress_age: float
    """Seconds since it last got on. Large while jobs run or wait: alive, but not working."""

    seen_age: float
    """Seconds since it last said anything."""


_LINE = """
    message_id, kind, job_id, state, outcome, parked, priority, processing_attempts AS attempts, created_at,
    available_at, step, fraction, last_error,
    CASE WHEN state IN ('Pending', 'Publishing', 'Published') AND available_at <= clock_timestamp()
         THEN extract(epoch FROM clock_timestamp() - available_at)::float8 END AS waiting_seconds
"""


def list_messages(
    connection: Connection,
    *,
    kind: str | None = None,
    states: Sequence[State] = LIVE,
    outcome: Outcome | None = None,
    job_id: str | None = None,
    limit: int = 100,
) -> list[MessageLine]:
    """Messages, newest first.

    Args:
        connection: to the database.
        kind: of one kind.
        states: in one of these states.
        outcome: completed with this outcome.
        job_id: of one domain job, live or not.
        limit: at most so many.
    """
    conditions, parameters = [], dict[str, object](limit=limit)
    order = "message_id DESC"
    if outcome is not None:
        # Written out, so that the index of those that did not succeed is seen to fit.
        conditions.append(f"outcome = '{outcome}' AND state = 'Completed'")
        order = "completed_at DESC"
    elif job_id is None:
        conditions.append(f"state IN ({', '.join(repr(str(state)) for state in states)})")
    for name, value in (("kind", kind), ("job_id", job_id)):
        if value is not None:
            conditions.append(f"{name} = :{name}")
            parameters[name] = value
    rows = connection.execute(
        text(
            f"SELECT {_LINE} FROM outbox.messages WHERE {' AND '.join(conditions) or 'true'} "
            f"ORDER BY {order} LIMIT :limit"
        ),
        parameters,
    )
    return [_line(row) for row in rows]


def show_message(connection: Connection, message_id: int, *, ui_url: str) -> MessageHistory:
    """A message and every attempt at it.

    Args:
        connection: to the database.
        message_id: which message.
        ui_url: of the Dagster UI, for the runs' addresses.

    Raises:
        UnknownMessage: when there is none.
    """
    row = connection.execute(
        text(f"""
            SELECT {_LINE}, payload::text AS payload, unique_key, publish_attempts, published_at,
                   lease_holder, lease_expires_at, completed_at, claims, claimed_at
            FROM outbox.messages WHERE message_id = :id
        """),
        {"id": message_id},
    ).one_or_none()
    if row is None:
        raise UnknownMessage(f"there is no message {message_id}; see `outbox jobs list`")
    return MessageHistory(
        message=_line(row),
        payload=_decoded(row.payload),
        unique_key=row.unique_key,
        publish_attempts=row.publish_attempts,
        published_at=row.published_at,
        lease_holder=row.lease_holder,
        lease_expires_at=row.lease_expires_at,
        completed_at=row.completed_at,
        attempts=list(_attempts(connection, row, ui_url)),
    )


def _decoded(payload: str) -> Any:
    """What was enqueued; its text where Python cannot read what PostgreSQL could store."""
    try:
        return json.loads(payload)
    except (ValueError, RecursionError):
        return payload


def list_servers(connection: Connection) -> list[ServerLine]:
    """Who serves which kind; those that ended are shown for a day."""
    rows = connection.execute(
        text("""
            SELECT kind, server, consumers, running, prefetched,
                   extract(epoch FROM clock_timestamp() - progressed_at)::float8 AS progress_age,
                   extract(epoch FROM clock_timestamp() - seen_at)::float8 AS seen_age
            FROM outbox.job_servers ORDER BY kind, server
        """)
    )
    return [ServerLine(**row._mapping) for row in rows]


def _attempts(connection: Connection, message: Row[Any], ui_url: str) -> Iterator[Attempt]:
    ledger = connection.execute(
        text("""
            SELECT claim, attempt, run_id, outcome, started_at, finished_at, error,
                   run_id IN (SELECT run_id FROM outbox.pruned_runs) AS pruned
            FROM outbox.job_attempts WHERE message_id = :id ORDER BY claim
        """),
        {"id": message.message_id},
    )
    for row in ledger:
        yield Attempt(
            row.claim,
            row.attempt,
            row.run_id,
            AttemptOutcome(row.outcome),
            row.started_at,
            row.finished_at,
            row.error,
            None if row.pruned else run_url(row.run_id, ui_url),
            row.pruned,
        )
    if message.state == State.PROCESSING:
        holder = message.lease_holder
        yield Attempt(
            message.claims, message.attempts, holder, None, message.claimed_at, None, None, run_url(holder, ui_url)
        )


def run_url(run_id: str, ui_url: str) -> str | None:
    """A Dagster run's address in the UI; none for what a worker did."""
    return None if run_id.startswith("worker-") else f"{ui_url.rstrip('/')}/runs/{run_id}"


def _line(row: Row[Any]) -> MessageLine:
    return MessageLine(
        row.message_id,
        row.kind,
        row.job_id,
        State(row.state),
        None if row.outcome is None else Outcome(row.outcome),
        row.parked,
        row.priority,
        row.attempts,
        row.created_at,
        row.available_at,
        row.waiting_seconds,
        row.step,
        row.fraction,
        row.last_error,
    )
