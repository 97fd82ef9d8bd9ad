"""The job kind ``makeup_exams``: finds a room for an exam that students take later than the others."""

from typing import Any

from sqlalchemy import Row, text
from sqlalchemy.orm import Session

from outbox_pipelines.academic.domain_jobs import UnfitJob, complete, domain, refuse_unknown, take_up
from outbox_pipelines.errors import OutboxError
from outbox_pipelines.jobs.context import JobContext
from outbox_pipelines.jobs.kinds import Backoff, JobKind

_TABLE = "academic.exam_jobs"
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


class NoRoomFree(OutboxError):
    """No room that is large enough is free at the wanted period."""


def place_exam(job: JobContext) -> None:
    """Book the smallest free room with a seat for every student.

    A room is free when neither another exam nor a lecture of the timetable that the domain
    job names, if it names one, is held there.

    Raises:
        UnfitJob: for a payload or domain job that this cannot work with.
        NoRoomFree: in words for whoever asked for the exam.
    """
    refuse_unknown(job)
    wanted = take_up(job, _TABLE, "course, students, day, period, timetable_id")
    job.progress("looking for a room")
    with job.session() as session:
        _check_timetable(session, wanted.timetable_id)
        room = _book(session, wanted)
        if room is None:
            raise NoRoomFree(_why_none(session, wanted))
        complete(job, session, _TABLE, wanted.id, f"{wanted.course}: room {room} on {_when(wanted)}")


def _check_timetable(session: Session, timetable_id: int | None) -> None:
    if timetable_id is None:
        return
    status = session.execute(
        text("SELECT status FROM academic.timetable_jobs WHERE id = :id"), {"id": timetable_id}
    ).scalar_one_or_none()
    if status != "succeeded":
        raise UnfitJob(f"timetable {timetable_id} is {status or 'not there'}: nobody knows which rooms it takes")


def _book(session: Session, wanted: Row[Any]) -> str | None:
    """Book a room; gives its name, or none when all that are large enough are taken."""
    free = session.execute(
        text("""
            SELECT name FROM academic.rooms AS room
            WHERE capacity >= :students
              AND NOT EXISTS (
                  SELECT FROM academic.lectures
                  WHERE timetable_id = :timetable AND day = :day AND period = :period AND room = room.name
              )
            ORDER BY capacity, name
        """),
        {"students": wanted.students, "timetable": wanted.timetable_id, "day": wanted.day, "period": wanted.period},
    )
    for name in free.scalars().all():
        # Waits for another exam's transaction that has the room in its hand, and leaves it the room.
        booked = session.execute(
            text("""
                INSERT INTO academic.exams (exam_id, day, period, room) VALUES (:exam, :day, :period, :room)
                ON CONFLICT (day, period, room) DO NOTHING
                RETURNING room
            """),
            {"exam": wanted.id, "day": wanted.day, "period": wanted.period, "room": name},
        ).scalar_one_or_none()
        if booked is not None:
            return str(booked)
    return None


def _why_none(session: Session, wanted: Row[Any]) -> str:
    large = session.execute(
        text("SELECT count(*) FILTER (WHERE capacity >= :students), max(capacity) FROM academic.rooms"),
        {"students": wanted.students},
    ).one()
    if large[0] == 0:
        return f"no room has seats for the {wanted.students} students of {wanted.course}: the largest has {large[1]}"
    return f"every room with seats for the {wanted.students} students of {wanted.course} is taken on {_when(wanted)}"


def _when(wanted: Row[Any]) -> str:
    return f"{_WEEKDAYS[wanted.day]}, period {wanted.period + 1}"


MAKEUP_EXAMS = JobKind(
    "makeup_exams",
    place_exam,
    consumers=2,
    attempts=3,
    backoff=Backoff(first=2.0, maximum=60.0),
    timeout=60.0,
    domain=domain(_TABLE),
)
