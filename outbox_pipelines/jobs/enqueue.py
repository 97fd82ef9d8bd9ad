"""Write background jobs into the outbox, inside the application's own transaction."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ARRAY, Connection, DateTime, SmallInteger, Text, cast, column, func, literal, select, table, text
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.exc import DBAPIError

from outbox_pipelines import tracing
from outbox_pipelines.database.error_text import forget_payload
from outbox_pipelines.database.json_text import JsonObject, Unstorable, check_text, encode_object
from outbox_pipelines.database.session import Transaction, connection_of
from outbox_pipelines.errors import OutboxError
from outbox_pipelines.settings import load_settings

LARGEST_PRIORITY = 32_767
_FIRST_YEAR, _LAST_YEAR = 1971, 8999
"""Of ``run_at``. Beyond, some driver or time zone cannot say it."""

_CHUNK = 5_000
"""Jobs in one INSERT."""

_ROUNDS = 10
"""How often a key is tried whose message is completed just between our two statements."""

_messages = table(
    "messages",
    column("message_id"),
    *(
        column(name)
        for name in ("kind", "job_id", "payload", "available_at", "priority", "unique_key", "trace_context")
    ),
    schema="outbox",
)
_live_key = text("unique_key IS NOT NULL AND state <> 'Completed'")


class InvalidJob(OutboxError):
    """A job that cannot be stored; none of the call's jobs was."""


@dataclass(frozen=True)
class NewJob:
    """A job to enqueue; see :func:`enqueue_job` for the fields."""

    job_id: str | int | UUID | None = None
    payload: JsonObject = field(default_factory=dict)
    run_at: datetime | None = None
    priority: int = 0
    unique_key: str | None = None


@dataclass(frozen=True)
class EnqueuedJob:
    """The message of a job."""

    message_id: int

    is_new: bool
    """False when a live message with the same unique key was there; it was left as it is."""


def enqueue_job(
    session: Transaction,
    kind: str,
    *,
    job_id: str | int | UUID | None = None,
    payload: JsonObject | None = None,
    run_at: datetime | None = None,
    priority: int = 0,
    unique_key: str | None = None,
) -> EnqueuedJob:
    """Add a job in the caller's transaction, which carries or drops it.

    >>> with Session(engine) as session, session.begin():        # doctest: +SKIP
    ...     session.add(job := TimetableJob(...))
    ...     session.flush()
    ...     enqueue_job(session, "automatic_timetable", job_id=job.id)

    Args:
        session: a SQLAlchemy session or connection; neither committed nor rolled back here.
        kind: the name of its kind. One that nobody has registered waits, parked with a reason.
        job_id: the id in the application's own table of jobs, if it has one.
        payload: a JSON object for the handler.
        run_at: not before this instant (with a time zone); at once when not given.
        priority: the larger go first, -32,768 to 32,767; jobs of one priority go by age.
        unique_key: while a message of the kind with this key is not completed, no second is made.

    Raises:
        InvalidJob: nothing was written.
    """
    job = NewJob(job_id, {} if payload is None else payload, run_at, priority, unique_key)
    return enqueue_jobs(session, kind, [job])[0]


def enqueue_jobs(session: Transaction, kind: str, jobs: Iterable[NewJob]) -> list[EnqueuedJob]:
    """Add many jobs of a kind in the caller's transaction, a few thousand in a statement.

    Returns:
        The messages, in the order of the jobs.

    Raises:
        InvalidJob: naming the job by its place (from 0); nothing was written.
    """
    connection = connection_of(session)
    rows = _checked(kind, jobs)
    enqueued: list[EnqueuedJob] = []
    for begin in range(0, len(rows), _CHUNK):
        enqueued += _insert(connection, kind, rows[begin : begin + _CHUNK])
    return enqueued


@dataclass(frozen=True)
class _Row:
    job_id: str | None
    payload: str
    run_at: datetime | None
    priority: int
    unique_key: str | None


def _checked(kind: str, jobs: Iterable[NewJob]) -> list[_Row]:
    if not isinstance(kind, str) or not 1 <= len(kind) <= 100:
        raise InvalidJob(f"kind {kind!r}: a kind's name is 1 to 100 characters long")
    limit = load_settings().max_payload_bytes
    rows = []
    place = 0
    try:
        _storable("kind", kind)
        for place, job in enumerate(jobs):  # noqa: B007  # told in the error
            rows.append(_row(job, limit))
    except Unstorable as flaw:
        raise InvalidJob(f"job {place} of kind {kind!r} cannot be stored: {flaw}; no job of this call was") from None
    return rows


def _row(job: NewJob, limit: int) -> _Row:
    if not isinstance(job, NewJob):
        raise Unstorable(f"it is a {type(job).__name__}, and must be a NewJob")
    if job.job_id is not None and (isinstance(job.job_id, bool) or not isinstance(job.job_id, str | int | UUID)):
        raise Unstorable(f"job_id is a {type(job.job_id).__name__}, and must be a text, a whole number or a UUID")
    job_id = None if job.job_id is None else str(job.job_id)
    for name, value in (("job_id", job_id), ("unique_key", job.unique_key)):
        if value is not None:
            _storable(name, value)
    if isinstance(job.priority, bool) or not isinstance(job.priority, int):
        raise Unstorable(f"priority is {job.priority!r}, and must be a whole number")
    if not -LARGEST_PRIORITY - 1 <= job.priority <= LARGEST_PRIORITY:
        raise Unstorable(f"priority is {job.priority}; allowed are -32,768 to 32,767")
    if job.run_at is not None and (not isinstance(job.run_at, datetime) or job.run_at.tzinfo is None):
        raise Unstorable(f"run_at is {job.run_at!r}, and must be a datetime with a time zone")
    if job.run_at is not None and not _FIRST_YEAR <= job.run_at.year <= _LAST_YEAR:
        raise Unstorable(f"run_at is in the year {job.run_at.year}; allowed are {_FIRST_YEAR} to {_LAST_YEAR}")
    try:
        payload = encode_object(job.payload, max_bytes=limit, variable="OUTBOX_MAX_PAYLOAD_BYTES")
    except Unstorable as flaw:
        raise Unstorable(f"its payload: {flaw}") from None
    return _Row(job_id, payload, job.run_at, job.priority, job.unique_key)


def _storable(name: str, value: str) -> None:
    if not isinstance(value, str) or not 1 <= len(value) <= 500:
        raise Unstorable(f"{name} must be a text of 1 to 500 characters")
    try:
        check_text(value)
    except Unstorable as flaw:
        raise Unstorable(f"{name}: {flaw}") from None


def _insert(connection: Connection, kind: str, rows: Sequence[_Row]) -> list[EnqueuedJob]:
    made = _insert_once(connection, kind, rows)
    keys = {row.unique_key for row in rows if row.unique_key is not None}
    by_key: dict[str | None, EnqueuedJob] = {
        key: EnqueuedJob(message_id, True) for message_id, key in made if key is not None
    }
    without_key = iter(sorted(message_id for message_id, key in made if key is None))
    for _ in range(_ROUNDS):
        missing = [key for key in keys if key not in by_key]
        if not missing:
            break
        by_key |= _live(connection, kind, missing)
        # Completed between the two statements, and so in nobody's way any more.
        again = [row for row in rows if row.unique_key in keys and row.unique_key not in by_key]
        firsts = list({row.unique_key: row for row in reversed(again)}.values())
        if firsts:
            again_made = _insert_once(connection, kind, firsts)
            by_key |= {key: EnqueuedJob(message_id, True) for message_id, key in again_made if key is not None}
    else:
        raise InvalidJob(f"kind {kind!r}: its unique keys are completed faster than they can be enqueued; try again")
    enqueued, seen = [], set()
    for row in rows:
        if row.unique_key is None:
            enqueued.append(EnqueuedJob(next(without_key), True))
            continue
        first = by_key[row.unique_key]
        # The second of a key in one call finds the first.
        enqueued.append(EnqueuedJob(first.message_id, first.is_new and row.unique_key not in seen))
        seen.add(row.unique_key)
    return enqueued


def _insert_once(connection: Connection, kind: str, rows: Sequence[_Row]) -> list[tuple[int, str | None]]:
    # Built by SQLAlchemy, not written out: the application's driver may be any.
    def array(values: list[Any], item: Any) -> Any:
        return cast(values, ARRAY(item))

    new = (
        func.unnest(
            array([row.job_id for row in rows], Text),
            array([row.payload for row in rows], Text),
            array([row.run_at for row in rows], DateTime(timezone=True)),
            array([row.priority for row in rows], SmallInteger),
            array([row.unique_key for row in rows], Text),
        )
        .table_valued("job_id", "payload", "run_at", "priority", "unique_key", with_ordinality="place")
        .render_derived()
    )
    # In the order given, and so are the ids that the rows get.
    ordered = select(
        literal(kind, Text),
        new.c.job_id,
        cast(new.c.payload, JSONB),
        func.coalesce(new.c.run_at, func.now()),
        new.c.priority,
        new.c.unique_key,
        literal(tracing.current_traceparent(), Text),
    ).order_by(new.c.place)
    names = ["kind", "job_id", "payload", "available_at", "priority", "unique_key", "trace_context"]
    # DO NOTHING, not DO UPDATE: that would lock the message that is there until the caller commits, and its
    # worker could not renew the lease meanwhile.
    statement = (
        insert(_messages)
        .from_select(names, ordered)
        .on_conflict_do_nothing(index_elements=["kind", "unique_key"], index_where=_live_key)
        .returning(_messages.c.message_id, _messages.c.unique_key)
    )
    try:
        return [(int(row[0]), row[1]) for row in connection.execute(statement)]
    except DBAPIError as error:
        # Its text would quote the payload, and end up in the application's log.
        forget_payload(error)
        raise


def _live(connection: Connection, kind: str, keys: Sequence[str]) -> dict[str | None, EnqueuedJob]:
    found = connection.execute(
        select(_messages.c.message_id, _messages.c.unique_key).where(
            _messages.c.kind == kind, _messages.c.unique_key == func.any(cast(list(keys), ARRAY(Text))), _live_key
        )
    )
    return {row[1]: EnqueuedJob(int(row[0]), False) for row in found}
