"""The kind ``automatic_timetable``: lectures, domain job and message change together, or not at all."""

import pytest
from sqlalchemy import Engine

from outbox_pipelines.academic.automatic_timetable import AUTOMATIC_TIMETABLE, make_timetable
from outbox_pipelines.academic.domain_jobs import EndedMeanwhile, UnfitJob
from outbox_pipelines.academic.instance import shipped_instance
from outbox_pipelines.academic.requests import request_timetable
from outbox_pipelines.academic.rules import Lecture, cost, violations
from outbox_pipelines.academic.timetable import SearchStopped, solve
from outbox_pipelines.jobs.context import GiveUp
from outbox_pipelines.jobs.enqueue import enqueue_job
from outbox_pipelines.lease.lease import LeaseLost
from tests.academic.attempts import Attempt, message, request, rows, run

STORING = "storing the lectures"


def requested(school: Engine, iterations: int = 2_000) -> int:
    return request(school, request_timetable, seed=3, iterations=iterations)


def assert_nothing_stored(school: Engine, job_id: int) -> None:
    assert rows(school, "SELECT FROM academic.lectures") == []
    assert message(school, AUTOMATIC_TIMETABLE, job_id) == ("Processing", None)


def test_the_lectures_are_stored_and_the_job_is_done(school: Engine) -> None:
    job_id = requested(school)
    attempt = Attempt(school, AUTOMATIC_TIMETABLE, job_id)
    make_timetable(attempt)
    stored = [Lecture(*row) for row in rows(school, "SELECT course, day, period, room FROM academic.lectures")]
    assert len(stored) == 160
    assert sorted(stored) == list(solve(shipped_instance("comp01"), seed=3, iterations=2_000).timetable)
    assert violations(shipped_instance("comp01"), stored) == []
    found = cost(shipped_instance("comp01"), stored).total
    (job,) = rows(school, f"SELECT * FROM academic.timetable_jobs WHERE id = {job_id}")
    assert (job.status, job.cost, job.current_step) == ("succeeded", found, STORING)
    assert job.message == f"160 lectures placed, cost {found}"
    assert job.created_at < job.started_at < job.succeeded_at
    assert message(school, AUTOMATIC_TIMETABLE, job_id) == ("Completed", "succeeded")


def test_progress_is_told_as_it_goes_and_never_goes_back(school: Engine) -> None:
    attempt = Attempt(school, AUTOMATIC_TIMETABLE, requested(school, iterations=20_000))
    make_timetable(attempt)
    fractions = [fraction for _, fraction in attempt.told if fraction is not None]
    assert fractions == sorted(fractions)
    assert len(fractions) == len(attempt.told) > 10
    steps = [step.partition(":")[0] for step, _ in attempt.told]
    assert list(dict.fromkeys(steps)) == ["placing lectures", "improving", STORING]


def test_people_see_the_domain_job_run_and_its_step(school: Engine) -> None:
    job_id = requested(school)
    seen: list[tuple[str, str]] = []

    def look(_step: str) -> None:
        (job,) = rows(school, f"SELECT status, current_step FROM academic.timetable_jobs WHERE id = {job_id}")
        seen.append((job.status, job.current_step))

    make_timetable(Attempt(school, AUTOMATIC_TIMETABLE, job_id, on_step=look))
    assert {status for status, _ in seen} == {"running"}
    assert seen[0] == ("running", "placing lectures")
    assert seen[-1] == ("running", STORING)


@pytest.mark.parametrize("looks", [0, 50, 163])
def test_a_cancelled_search_stops_at_its_next_look_and_stores_nothing(school: Engine, looks: int) -> None:
    job_id = requested(school, iterations=1_000_000)
    attempt = Attempt(school, AUTOMATIC_TIMETABLE, job_id, looks=looks)
    with pytest.raises(SearchStopped):
        make_timetable(attempt)
    assert_nothing_stored(school, job_id)
    # Still live: whoever takes it up again begins anew.
    assert rows(school, "SELECT status FROM academic.timetable_jobs") == [("running",)]
    run(school, "UPDATE academic.timetable_jobs SET iterations = 0")
    make_timetable(Attempt(school, AUTOMATIC_TIMETABLE, job_id))
    assert len(rows(school, "SELECT FROM academic.lectures")) == 160


def test_a_worker_that_lost_its_lease_stores_nothing(school: Engine) -> None:
    job_id = requested(school)

    def another_takes_over(step: str) -> None:
        if step == STORING:
            run(school, "UPDATE outbox.messages SET lease_token = gen_random_uuid()")

    with pytest.raises(LeaseLost):
        make_timetable(Attempt(school, AUTOMATIC_TIMETABLE, job_id, on_step=another_takes_over))
    assert_nothing_stored(school, job_id)
    assert rows(school, "SELECT status, cost FROM academic.timetable_jobs") == [("running", None)]


def test_a_timetable_that_nobody_wants_any_more_is_not_stored(school: Engine) -> None:
    job_id = requested(school)

    def users_cancel(step: str) -> None:
        if step == STORING:
            run(school, "UPDATE academic.timetable_jobs SET status = 'cancelled'")

    with pytest.raises(EndedMeanwhile, match=f"job {job_id} of academic.timetable_jobs is not running any more"):
        make_timetable(Attempt(school, AUTOMATIC_TIMETABLE, job_id, on_step=users_cancel))
    assert_nothing_stored(school, job_id)
    assert rows(school, "SELECT status FROM academic.timetable_jobs") == [("cancelled",)]


def test_an_instance_that_is_not_shipped_is_given_up_in_words(school: Engine) -> None:
    job_id = request(school, request_timetable, instance="comp99")
    with pytest.raises(GiveUp, match="there is no instance 'comp99'; these come with the package: comp01"):
        make_timetable(Attempt(school, AUTOMATIC_TIMETABLE, job_id))


def test_a_payload_that_would_be_overlooked_is_refused(school: Engine) -> None:
    job_id = requested(school)
    run(school, """UPDATE outbox.messages SET payload = '{"seed": 4}'""")
    with pytest.raises(UnfitJob, match="the payload has the key 'seed'; known: none"):
        make_timetable(Attempt(school, AUTOMATIC_TIMETABLE, job_id))


def test_a_job_id_that_is_no_rows_id_is_refused(school: Engine) -> None:
    requested(school)
    for job_id in ("1 OR true", "-1", "²", "x"):
        with school.begin() as connection:
            enqueue_job(connection, "automatic_timetable", job_id=job_id)
        with pytest.raises(UnfitJob, match=r"job_id must be the id of a row of academic\.timetable_jobs, not "):
            make_timetable(Attempt(school, AUTOMATIC_TIMETABLE, job_id))
    assert rows(school, "SELECT status FROM academic.timetable_jobs") == [("queued",)]


def test_a_domain_job_that_is_over_is_left_alone(school: Engine) -> None:
    for status in ("succeeded", "failed", "cancelled"):
        job_id = requested(school)
        run(school, f"UPDATE academic.timetable_jobs SET status = '{status}' WHERE id = {job_id}")
        with pytest.raises(UnfitJob, match=f"has no job {job_id} that is queued or running"):
            make_timetable(Attempt(school, AUTOMATIC_TIMETABLE, job_id))
        assert rows(school, f"SELECT status FROM academic.timetable_jobs WHERE id = {job_id}") == [(status,)]
