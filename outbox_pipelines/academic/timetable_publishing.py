"""The job kind ``timetable_publishing``: puts a finished timetable on the notice board."""

import time

from sqlalchemy import text
from sqlalchemy.orm import Session

from outbox_pipelines.academic.domain_jobs import UnfitJob, complete, domain, refuse_unknown, take_up
from outbox_pipelines.errors import OutboxError
from outbox_pipelines.jobs.context import JobContext
from outbox_pipelines.jobs.kinds import Backoff, JobKind
from outbox_pipelines.wording import counted

_TABLE = "academic.publication_jobs"
_PATIENCE_SECONDS = 60.0
"""How long an attempt waits for a timetable that is still being made."""

_LOOK_SECONDS = 0.5


class NoticeBoardUnreachable(OutboxError):
    """The notice board did not answer; another attempt may find it well."""


class TimetableNotReady(OutboxError):
    """The timetable is still being made; another attempt may find it done."""


def publish_timetable(job: JobContext) -> None:
    """Copy a timetable to the notice board; of one that was not made, an empty notice with the reason.

    A timetable that is still being made is waited for, a minute at most.

    The payload ``{"outages": 2}`` makes the board unreachable for the first two attempts.

    Raises:
        UnfitJob: for a payload or domain job that this cannot work with.
        TimetableNotReady: try again later.
        NoticeBoardUnreachable: try again later.
    """
    refuse_unknown(job, "outages")
    outages = job.payload.get("outages", 0)
    if isinstance(outages, bool) or not isinstance(outages, int) or outages < 0:
        raise UnfitJob(f"outages must be a whole number of attempts, 0 or more, not {outages!r}")
    wanted = take_up(job, _TABLE, "timetable_id")
    job.progress("reaching the notice board")
    if job.attempt <= outages:
        raise NoticeBoardUnreachable(f"the notice board does not answer (attempt {job.attempt}); it is tried again")
    reason = _reason_to_stay_empty(job, wanted.timetable_id)
    job.progress("copying the lectures")
    with job.session() as session:
        published = _post(session, wanted.id, wanted.timetable_id, reason)
        message = f"{counted(published, 'lecture')} published" if reason is None else f"published empty: {reason}"
        complete(job, session, _TABLE, wanted.id, message)


def _reason_to_stay_empty(job: JobContext, timetable_id: int) -> str | None:
    """Why there is no such timetable, once that is known; none when it is there."""
    ends_at = time.monotonic() + _PATIENCE_SECONDS
    while True:
        with job.session() as session:
            found = session.execute(
                text("SELECT status, message FROM academic.timetable_jobs WHERE id = :id"), {"id": timetable_id}
            ).one_or_none()
        if found is None:
            raise UnfitJob(f"there is no timetable {timetable_id} to publish")
        if found.status == "succeeded":
            return None
        if found.status in _ENDED:
            return f"timetable {timetable_id} {_ENDED[found.status]}{f' ({found.message})' if found.message else ''}"
        job.progress("waiting for the timetable")
        if time.monotonic() >= ends_at or job.wait(_LOOK_SECONDS):
            raise TimetableNotReady(f"timetable {timetable_id} is {found.status}: it is published when it is done")


_ENDED = {"failed": "could not be made", "cancelled": "was cancelled"}


def _post(session: Session, publication_id: int, timetable_id: int, reason: str | None) -> int:
    """Write the notice; gives how many lectures are on it, none of a timetable that was not made."""
    session.execute(
        text("""
            INSERT INTO academic.notices (publication_id, timetable_id, reason)
            VALUES (:publication, :timetable, :reason)
        """),
        {"publication": publication_id, "timetable": timetable_id, "reason": reason},
    )
    copied = session.execute(
        text("""
            INSERT INTO academic.notice_lectures (publication_id, course, day, period, room)
            SELECT :publication, course, day, period, room FROM academic.lectures WHERE timetable_id = :timetable
            RETURNING 1
        """),
        {"publication": publication_id, "timetable": timetable_id},
    )
    return len(copied.all())


TIMETABLE_PUBLISHING = JobKind(
    "timetable_publishing",
    publish_timetable,
    consumers=2,
    backoff=Backoff(first=2.0, maximum=60.0),
    timeout=120.0,
    domain=domain(_TABLE),
)
