"""The job kind ``automatic_timetable``: finds a timetable and stores its lectures."""

from sqlalchemy import text

from outbox_pipelines.academic.domain_jobs import complete, domain, refuse_unknown, take_up
from outbox_pipelines.academic.instance import UnknownInstance, shipped_instance
from outbox_pipelines.academic.timetable import NoTimetable, solve
from outbox_pipelines.jobs.context import GiveUp, JobContext
from outbox_pipelines.jobs.kinds import JobKind
from outbox_pipelines.wording import counted

_TABLE = "academic.timetable_jobs"
_SEARCH_SHARE = 0.95


def make_timetable(job: JobContext) -> None:
    """Search for a timetable, telling how it gets on, and store it together with the job's completion.

    Raises:
        UnfitJob: for a payload or domain job that this cannot work with.
        GiveUp: for an instance that is not shipped, or that no timetable was found for.
        SearchStopped: when the job was cancelled; nothing is stored.
    """
    refuse_unknown(job)
    wanted = take_up(job, _TABLE, "instance, seed, iterations")
    try:
        solution = solve(
            shipped_instance(wanted.instance),
            seed=wanted.seed,
            iterations=wanted.iterations,
            on_progress=lambda step, part: job.progress(step, _SEARCH_SHARE * part),
            should_stop=lambda: job.cancelled,
        )
    except (UnknownInstance, NoTimetable) as error:
        # The same seed would find as little again.
        raise GiveUp(str(error)) from error
    job.progress("storing the lectures", _SEARCH_SHARE)
    with job.session() as session:
        session.execute(
            text("""
                INSERT INTO academic.lectures (timetable_id, course, day, period, room)
                VALUES (:timetable, :course, :day, :period, :room)
            """),
            [{"timetable": wanted.id, **vars(lecture)} for lecture in solution.timetable],
        )
        placed = counted(len(solution.timetable), "lecture")
        complete(job, session, _TABLE, wanted.id, f"{placed} placed, cost {solution.cost.total}")
        session.execute(
            text("UPDATE academic.timetable_jobs SET cost = :cost WHERE id = :id"),
            {"cost": solution.cost.total, "id": wanted.id},
        )


AUTOMATIC_TIMETABLE = JobKind("automatic_timetable", make_timetable, consumers=2, timeout=600.0, domain=domain(_TABLE))
