"""Short words for what tests do with messages, their ledger and an application's table of jobs."""

from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import Engine, Row, text

from outbox_pipelines.jobs.context import JobContext
from outbox_pipelines.jobs.domain import TableDomain
from outbox_pipelines.jobs.enqueue import NewJob, enqueue_job, enqueue_jobs
from outbox_pipelines.jobs.kinds import JobKind
from outbox_pipelines.jobs.message import AttemptOutcome, Claimed, NotClaimed, Settlement
from outbox_pipelines.jobs.outbox import claim_due, claim_message, settle

KIND = "work"

APP_JOBS = TableDomain(
    "app.jobs",
    live=("queued", "running"),
    failed="failed",
    succeeded="done",
    cancelled="cancelled",
    message_column="message",
    step_column="step",
)
"""What :func:`make_app_jobs` makes."""


def do_nothing(job: JobContext) -> None:
    """A handler."""


def a_kind(name: str = KIND, handler: Callable[[JobContext], object] = do_nothing, **how: Any) -> JobKind:
    """A kind; the shortest lease unless told otherwise."""
    return JobKind(name, handler, **{"lease": 10.0, **how})


# SQL


def run(engine: Engine, statement: str, **parameters: object) -> int:
    """Run a statement and commit; says how many rows it touched."""
    with engine.begin() as connection:
        return int(connection.execute(text(statement), parameters).rowcount)


def rows(engine: Engine, query: str, **parameters: object) -> list[Row[Any]]:
    """What a query finds."""
    with engine.connect() as connection:
        return list(connection.execute(text(query), parameters))


def value(engine: Engine, query: str, **parameters: object) -> Any:
    """The one value that a query finds."""
    ((found,),) = rows(engine, query, **parameters)
    return found


# Messages


def enqueue(engine: Engine, kind: str = KIND, **how: Any) -> int:
    """Enqueue a job in a transaction of its own; returns its message's id."""
    with engine.begin() as connection:
        return enqueue_job(connection, kind, **how).message_id


def enqueue_many(engine: Engine, count: int, kind: str = KIND, **how: Any) -> list[int]:
    """Enqueue so many jobs, all alike, in a transaction of their own."""
    with engine.begin() as connection:
        return [one.message_id for one in enqueue_jobs(connection, kind, [NewJob(**how)] * count)]


def row(engine: Engine, message_id: int) -> Row[Any]:
    """A message's row, with the seconds until its lease ends and until it is due."""
    (found,) = rows(
        engine,
        """
        SELECT *, extract(epoch FROM lease_expires_at - clock_timestamp())::float8 AS seconds_left,
               extract(epoch FROM available_at - clock_timestamp())::float8 AS due_in
        FROM outbox.messages WHERE message_id = :id
        """,
        id=message_id,
    )
    return found


def states(engine: Engine) -> dict[int, str]:
    """The state of every message, by id."""
    found = rows(engine, "SELECT message_id, state FROM outbox.messages ORDER BY message_id")
    return {one.message_id: one.state for one in found}


def ledger(engine: Engine, message_id: int) -> list[tuple[int, int, str]]:
    """A message's lines in the ledger: claim, attempt, outcome."""
    return [(one.claim, one.attempt, one.outcome) for one in ledger_rows(engine, message_id)]


def ledger_rows(engine: Engine, message_id: int) -> list[Row[Any]]:
    """The same with all columns."""
    return rows(engine, "SELECT * FROM outbox.job_attempts WHERE message_id = :id ORDER BY claim", id=message_id)


def set_state(engine: Engine, message_id: int, state: str) -> None:
    """Put a message into a state, with what belongs to it and nothing of another; a lease runs for a minute."""
    run(
        engine,
        """
        UPDATE outbox.messages SET state = :state,
            outcome = CASE WHEN :state = 'Completed' THEN 'succeeded' END,
            completed_at = CASE WHEN :state = 'Completed' THEN clock_timestamp() END,
            publish_token = CASE WHEN :state IN ('Publishing', 'Published') THEN gen_random_uuid() END,
            published_at = CASE WHEN :state IN ('Publishing', 'Published') THEN clock_timestamp() END,
            publish_attempts = publish_attempts + CASE WHEN :state IN ('Publishing', 'Published') THEN 1 ELSE 0 END,
            lease_token = CASE WHEN :state = 'Processing' THEN gen_random_uuid() END,
            lease_holder = CASE WHEN :state = 'Processing' THEN 'somebody' END,
            lease_expires_at = CASE WHEN :state = 'Processing' THEN clock_timestamp() + interval '1 minute' END,
            claimed_at = CASE WHEN :state = 'Processing' THEN clock_timestamp() ELSE claimed_at END,
            claims = claims + CASE WHEN :state = 'Processing' THEN 1 ELSE 0 END,
            processing_attempts = processing_attempts + CASE WHEN :state = 'Processing' THEN 1 ELSE 0 END
        WHERE message_id = :id
        """,
        state=state,
        id=message_id,
    )


def let_expire(engine: Engine, *message_ids: int, seconds_ago: float = 1) -> None:
    """Move the end of these leases, or of all, into the past, instead of waiting for it."""
    run(
        engine,
        """
        UPDATE outbox.messages SET lease_expires_at = clock_timestamp() - make_interval(secs => :ago)
        WHERE state = 'Processing' AND (:every OR message_id = ANY (:ids))
        """,
        ago=seconds_ago,
        every=not message_ids,
        ids=list(message_ids),
    )


def make_due(engine: Engine, *message_ids: int) -> None:
    """Let these messages, or all, be due since a second, whatever a backoff says."""
    run(
        engine,
        """
        UPDATE outbox.messages SET available_at = clock_timestamp() - interval '1 second'
        WHERE state = 'Pending' AND (:every OR message_id = ANY (:ids))
        """,
        every=not message_ids,
        ids=list(message_ids),
    )


def age_publishes(engine: Engine, *message_ids: int, seconds: float = 3_600) -> None:
    """Let these messages, or all, have been published so long ago."""
    run(
        engine,
        """
        UPDATE outbox.messages SET published_at = published_at - make_interval(secs => :seconds)
        WHERE state IN ('Publishing', 'Published') AND (:every OR message_id = ANY (:ids))
        """,
        seconds=seconds,
        every=not message_ids,
        ids=list(message_ids),
    )


# Claims


def ask_for(
    engine: Engine,
    message_id: int,
    *,
    kind: str = KIND,
    holder: str = "me",
    seconds: float = 60,
    token: UUID | None = None,
) -> Claimed | NotClaimed:
    """Try to claim a message in a transaction of its own."""
    with engine.begin() as connection:
        return claim_message(connection, message_id, kind=kind, holder=holder, seconds=seconds, token=token or uuid4())


def take(engine: Engine, message_id: int, **how: Any) -> Claimed:
    """Claim a message that is free."""
    claimed = ask_for(engine, message_id, **how)
    assert isinstance(claimed, Claimed), claimed
    return claimed


def take_due(engine: Engine, kind: str = KIND, **how: Any) -> list[Claimed]:
    """Claim what is due, as a worker does that has a thousand consumers free."""
    asked: dict[str, Any] = {
        "limit": 1_000,
        "ready": 1_000,
        "alone": True,
        "attempts": 5,
        "holder": "me",
        "seconds": 60,
        "token": uuid4(),
        **how,
    }
    with engine.begin() as connection:
        return claim_due(connection, kind, **asked)


def end(
    engine: Engine,
    claimed: Claimed,
    outcome: AttemptOutcome = AttemptOutcome.SUCCEEDED,
    error: str | None = None,
    delay: float = 0.0,
    *,
    holder: str = "me",
) -> bool:
    """Settle a claim; says whether it was ours."""
    with engine.begin() as connection:
        return bool(settle(connection, [Settlement(claimed, outcome, error, delay)], holder=holder))


def complete(engine: Engine, message_id: int) -> None:
    """Claim a message and let it succeed."""
    assert end(engine, take(engine, message_id, kind=row(engine, message_id).kind))


# The application's table of jobs


def make_app_jobs(engine: Engine) -> TableDomain:
    """The table ``app.jobs``, which :data:`APP_JOBS` describes."""
    run(engine, "CREATE SCHEMA IF NOT EXISTS app")
    run(
        engine,
        """
        CREATE TABLE app.jobs (
            id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
            status text NOT NULL DEFAULT 'queued', message text, step text
        )
        """,
    )
    return APP_JOBS


def add_app_jobs(engine: Engine, count: int = 1, *, status: str = "queued") -> list[int]:
    """So many rows in it; returns their ids."""
    with engine.begin() as connection:
        made = connection.execute(
            text("INSERT INTO app.jobs (status) SELECT :status FROM generate_series(1, :count) RETURNING id"),
            {"status": status, "count": count},
        )
        return sorted(made.scalars())


def app_job(engine: Engine, job_id: int | str) -> tuple[str, str | None]:
    """Status and message of a row in it."""
    (found,) = rows(engine, "SELECT status, message FROM app.jobs WHERE id = :id", id=int(job_id))
    return found.status, found.message
