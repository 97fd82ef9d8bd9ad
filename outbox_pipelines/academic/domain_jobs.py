"""What the three handlers do alike with their domain jobs: take one up, and mark it done."""

from typing import Any

from sqlalchemy import Row, text
from sqlalchemy.orm import Session

from outbox_pipelines.errors import OutboxError
from outbox_pipelines.jobs.context import GiveUp, JobContext
from outbox_pipelines.jobs.domain import TableDomain


class UnfitJob(GiveUp):
    """A job whose payload or domain job the handler cannot work with, however often it is tried."""


class EndedMeanwhile(OutboxError):
    """The domain job was ended while its handler worked; the next attempt sees how, before it begins."""


def domain(table: str) -> TableDomain:
    """How a table of domain jobs looks to the job outbox."""
    return TableDomain(
        table,
        live=("queued", "running"),
        succeeded="succeeded",
        failed="failed",
        cancelled="cancelled",
        message_column="message",
        step_column="current_step",
    )


def take_up(job: JobContext, table: str, inputs: str) -> Row[Any]:
    """Mark the domain job as running.

    Args:
        job: whose ``job_id`` names it.
        table: where it is.
        inputs: the columns that the handler needs.

    Returns:
        Its ``id`` and its inputs.

    Raises:
        UnfitJob: when there is no such job, or it is over.
    """
    number = job.job_id or ""
    if not (number.isascii() and number.isdigit()):
        raise UnfitJob(f"job_id must be the id of a row of {table}, not {job.job_id!r}")
    with job.session() as session:
        row: Row[Any] | None = session.execute(
            text(f"""
                UPDATE {table} SET status = 'running', started_at = coalesce(started_at, clock_timestamp())
                WHERE id = :id AND status IN ('queued', 'running')
                RETURNING id, {inputs}
            """),
            {"id": int(number)},
        ).one_or_none()
    if row is None:
        raise UnfitJob(f"{table} has no job {number} that is queued or running")
    return row


def complete(job: JobContext, session: Session, table: str, number: int, message: str) -> None:
    """Complete the job and mark its domain job as done, in the transaction of its effect.

    Args:
        job: the job.
        session: holds the effect; the caller lets it commit.
        table: where the domain job is.
        number: its id.
        message: for people.

    Raises:
        LeaseLost: the job is somebody else's by now. Let it pass, as the next: nothing is committed.
        EndedMeanwhile: somebody cancelled the domain job, for example.
    """
    # In this order, which whoever cancels a job has, too: message, then domain job. The other way
    # round the two could wait for each other.
    job.complete_in(session)
    marked = session.execute(
        text(f"""
            UPDATE {table} SET status = 'succeeded', message = :message, succeeded_at = clock_timestamp()
            WHERE id = :id AND status = 'running'
            RETURNING id
        """),
        {"id": number, "message": message},
    ).one_or_none()
    if marked is None:
        raise EndedMeanwhile(f"job {number} of {table} is not running any more: somebody ended it meanwhile")


def refuse_unknown(job: JobContext, *known: str) -> None:
    """Refuse a payload with keys that the handler would overlook.

    Raises:
        UnfitJob: naming one.
    """
    for key in job.payload:
        if key not in known:
            raise UnfitJob(f"the payload has the key {key!r}; known: {', '.join(known) or 'none'}")
