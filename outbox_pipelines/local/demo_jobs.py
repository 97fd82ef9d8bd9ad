"""The demonstration's background jobs: 12 of three kinds, and the proof of their end states.

Timetables are computed with progress, publications fail twice and then succeed, and makeup exams
for more students than any room has seats for are given up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from outbox_pipelines.academic.kinds import KINDS
from outbox_pipelines.academic.requests import request_makeup_exam, request_publication, request_timetable
from outbox_pipelines.academic.schema import install
from outbox_pipelines.database.engine import describe
from outbox_pipelines.errors import OutboxError
from outbox_pipelines.jobs.kinds import Kinds
from outbox_pipelines.jobs.message import AttemptOutcome, Outcome

KINDS_SETTING = "outbox_pipelines.academic.kinds:KINDS"
_KINDS = Kinds(KINDS)
_TIMETABLES = 8
_PUBLICATIONS = 2
_EXAMS = 2
_OUTAGES = 2

# What the ledger must say of each kind's jobs, claim by claim.
_EXPECTED: dict[str, list[AttemptOutcome]] = {
    "automatic_timetable": [AttemptOutcome.SUCCEEDED],
    "timetable_publishing": [AttemptOutcome.FAILED] * _OUTAGES + [AttemptOutcome.SUCCEEDED],
    "makeup_exams": [AttemptOutcome.FAILED] * (_KINDS["makeup_exams"].attempts - 1) + [AttemptOutcome.GIVEN_UP],
}
_TABLES = {
    "automatic_timetable": "academic.timetable_jobs",
    "timetable_publishing": "academic.publication_jobs",
    "makeup_exams": "academic.exam_jobs",
}


@dataclass(frozen=True)
class KindCounts:
    """Where the jobs of a kind are at one moment."""

    kind: str
    waiting: int
    running: int
    succeeded: int
    failed: int
    attempts: int
    step: str | None
    """What one of the running ones tells of its progress."""


@dataclass(frozen=True)
class JobsProof:
    """What the demonstration's jobs came to."""

    jobs: int
    succeeded: int
    given_up: int
    attempts: int
    flaws: list[str]
    """Where the end states are not as they must be."""


def refuse_foreign_jobs(engine: Engine) -> None:
    """The demonstration serves its own kinds alone, and with sample handlers: nobody else's jobs may wait.

    Raises:
        OutboxError: naming a job that is not the demonstration's.
    """
    with engine.connect() as connection:
        ours = connection.execute(text("SELECT to_regclass('academic.timetable_jobs') IS NOT NULL")).scalar_one()
        foreign = connection.execute(
            text("""
                SELECT message_id, kind FROM outbox.messages
                WHERE state <> 'Completed' AND NOT (:ours AND kind = ANY (:kinds)) LIMIT 1
            """),
            {"ours": ours, "kinds": list(_KINDS)},
        ).one_or_none()
    if foreign is not None:
        raise OutboxError(
            f"message {foreign.message_id} of kind {foreign.kind!r} waits in {describe(engine)}, and the demo serves "
            "sample kinds alone: run it without OUTBOX_DATABASE_URL, or with another OUTBOX_HOME"
        )


def prepare_jobs(engine: Engine) -> dict[int, str]:
    """Enqueue the jobs, each with its domain job in one transaction.

    Returns:
        The kind of each message.
    """
    with engine.begin() as connection:
        install(connection)
        # What an earlier demonstration left unfinished.
        connection.execute(
            text("DELETE FROM outbox.messages WHERE kind = ANY (:kinds) AND state <> 'Completed'"),
            {"kinds": list(_KINDS)},
        )
        for table in _TABLES.values():
            connection.execute(text(f"UPDATE {table} SET status = 'cancelled' WHERE status IN ('queued', 'running')"))
        last = connection.execute(text("SELECT coalesce(max(message_id), 0) FROM outbox.messages")).scalar_one()
    timetables = []
    for seed in range(_TIMETABLES):
        with Session(engine) as session, session.begin():
            timetables.append(request_timetable(session, seed=seed))
    for timetable in timetables[:_PUBLICATIONS]:
        with Session(engine) as session, session.begin():
            request_publication(session, timetable, outages=_OUTAGES)
    for period in range(_EXAMS):
        with Session(engine) as session, session.begin():
            request_makeup_exam(session, "Physics", students=10_000, day=4, period=period)
    with engine.connect() as connection:
        made = connection.execute(
            text("SELECT message_id, kind FROM outbox.messages WHERE message_id > :last AND kind = ANY (:kinds)"),
            {"last": last, "kinds": list(_KINDS)},
        )
        return {row.message_id: row.kind for row in made}


def count_jobs(engine: Engine, messages: dict[int, str]) -> list[KindCounts]:
    """Where the jobs are now."""
    with engine.connect() as connection:
        rows = connection.execute(
            text("""
                SELECT kind,
                       count(*) FILTER (WHERE state IN ('Pending', 'Publishing', 'Published')) AS waiting,
                       count(*) FILTER (WHERE state = 'Processing') AS running,
                       count(*) FILTER (WHERE outcome = 'succeeded') AS succeeded,
                       count(*) FILTER (WHERE outcome IN ('failed', 'cancelled')) AS failed,
                       coalesce(sum(claims), 0) AS attempts,
                       max(step || coalesce(' ' || round(fraction::numeric * 100) || ' %', ''))
                           FILTER (WHERE state = 'Processing') AS step
                FROM outbox.messages WHERE message_id = ANY (:ids) GROUP BY kind
            """),
            {"ids": list(messages)},
        ).all()
    found = {row.kind: KindCounts(*row) for row in rows}
    return [found[kind] for kind in _EXPECTED if kind in found]


def prove_jobs(engine: Engine, messages: dict[int, str]) -> JobsProof:
    """Compare messages, ledger and domain jobs with what must have come of each job."""
    counts = count_jobs(engine, messages)
    flaws: list[str] = []
    with engine.connect() as connection:
        for message_id, kind in sorted(messages.items()):
            row = connection.execute(
                text("SELECT state, outcome, job_id FROM outbox.messages WHERE message_id = :id"), {"id": message_id}
            ).one()
            ledger = connection.execute(
                text("SELECT outcome FROM outbox.job_attempts WHERE message_id = :id ORDER BY claim"),
                {"id": message_id},
            )
            status, steps = connection.execute(
                text(f"SELECT status, current_step IS NOT NULL FROM {_TABLES[kind]} WHERE id = CAST(:id AS bigint)"),
                {"id": row.job_id},
            ).one()
            flaws += _compare(message_id, kind, row.outcome, list(ledger.scalars()), status)
            if not steps:
                flaws.append(f"{kind}, message {message_id}: its domain job shows no step")
    return JobsProof(
        jobs=len(messages),
        succeeded=sum(entry.succeeded for entry in counts),
        given_up=sum(entry.failed for entry in counts),
        attempts=sum(entry.attempts for entry in counts),
        flaws=flaws,
    )


def _compare(message_id: int, kind: str, outcome: str | None, ledger: Sequence[str], status: str) -> list[str]:
    expected = _EXPECTED[kind]
    wanted = Outcome.SUCCEEDED if expected[-1] is AttemptOutcome.SUCCEEDED else Outcome.FAILED
    what = f"{kind}, message {message_id}"
    flaws = []
    if outcome != wanted:
        flaws.append(f"{what}: its outcome is {outcome}, expected {wanted}")
    if status != wanted:
        flaws.append(f"{what}: its domain job is {status}, expected {wanted}")
    if ledger != [str(line) for line in expected]:
        flaws.append(f"{what}: the ledger says {', '.join(ledger)}, expected {', '.join(expected)}")
    return flaws
