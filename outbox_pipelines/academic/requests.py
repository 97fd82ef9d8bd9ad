"""The application's side: each request writes a domain job and its message in one transaction.

It knows the kinds by their names alone, so a web process loads none of the handlers.
"""

from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

from outbox_pipelines.academic.timetable import ITERATIONS
from outbox_pipelines.jobs.enqueue import enqueue_job


def request_timetable(
    session: Session, *, instance: str = "comp01", seed: int = 0, iterations: int = ITERATIONS
) -> int:
    """Ask for a timetable; gives the domain job's id, which is also the timetable's.

    Args:
        session: the caller commits.
        instance: what to plan, one of those that come with the package.
        seed: the same seed and iterations find the same timetable.
        iterations: how many changes to try when improving it; a million take some seconds.
    """
    return _request(
        session,
        "automatic_timetable",
        "INSERT INTO academic.timetable_jobs (instance, seed, iterations) VALUES (:instance, :seed, :iterations)",
        {"instance": instance, "seed": seed, "iterations": iterations},
    )


def request_publication(session: Session, timetable_id: int, *, outages: int = 0) -> int:
    """Ask for a timetable to be put on the notice board; gives the domain job's id.

    Args:
        session: the caller commits.
        timetable_id: what ``request_timetable`` gave.
        outages: for how many attempts the notice board plays dead.
    """
    return _request(
        session,
        "timetable_publishing",
        "INSERT INTO academic.publication_jobs (timetable_id) VALUES (:timetable)",
        {"timetable": timetable_id},
        payload={"outages": outages} if outages else {},
    )


def request_makeup_exam(
    session: Session, course: str, *, students: int, day: int, period: int, timetable_id: int | None = None
) -> int:
    """Ask for a room for a makeup exam; gives the domain job's id.

    Args:
        session: the caller commits.
        course: whose exam it is.
        students: seats that are needed.
        day: of the week, 0 is Monday.
        period: of the day, from 0.
        timetable_id: the timetable whose lectures take rooms, if any.
    """
    return _request(
        session,
        "makeup_exams",
        """
        INSERT INTO academic.exam_jobs (course, students, day, period, timetable_id)
        VALUES (:course, :students, :day, :period, :timetable)
        """,
        {"course": course, "students": students, "day": day, "period": period, "timetable": timetable_id},
    )


def _request(
    session: Session,
    kind: str,
    insert: str,
    inputs: dict[str, Any],
    *,
    payload: dict[str, Any] | None = None,
) -> int:
    number = int(session.execute(text(f"{insert} RETURNING id"), inputs).scalar_one())
    enqueue_job(session, kind, job_id=str(number), payload=payload)
    return number
