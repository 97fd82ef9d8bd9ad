"""The sample kinds as a whole: requested by the application, run by the package, through to their end."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from outbox_pipelines.academic import automatic_timetable
from outbox_pipelines.academic.instance import Instance
from outbox_pipelines.academic.kinds import KINDS
from outbox_pipelines.academic.requests import request_makeup_exam, request_publication, request_timetable
from outbox_pipelines.academic.timetable import Solution, solve
from outbox_pipelines.jobs.keeper import LeaseKeeper
from outbox_pipelines.jobs.kinds import load_kinds
from outbox_pipelines.jobs.message import AttemptOutcome
from outbox_pipelines.jobs.runner import Report, Runner
from outbox_pipelines.settings import load_settings
from tests.academic.attempts import request, rows, run

Work = Callable[[str, int], AttemptOutcome]
"""Runs the message of a kind's domain job once, however long its backoff, and tells how that ended."""


@pytest.fixture
def work(school: Engine, school_url: str) -> Iterator[Work]:
    kinds = load_kinds("outbox_pipelines.academic.kinds:KINDS")
    # So late that it is never really started: no job here takes that long.
    with LeaseKeeper(school, url=school_url, settings=load_settings(), delay=60.0) as keeper:

        def run_once(kind: str, job_id: int) -> AttemptOutcome:
            run(
                school,
                f"UPDATE outbox.messages SET available_at = now() WHERE state = 'Pending' AND job_id = '{job_id}'",
            )
            (found,) = rows(
                school, f"SELECT message_id FROM outbox.messages WHERE kind = '{kind}' AND job_id = '{job_id}'"
            )
            report = Runner(school, keeper, holder="test").run(
                kinds.named(kind), found.message_id, on_progress=lambda _step, _fraction: None
            )
            assert isinstance(report, Report), report
            return report.outcome

        yield run_once


def test_the_application_and_the_handlers_mean_the_same_kinds(school: Engine) -> None:
    timetable_id = request(school, request_timetable)
    request(school, request_publication, timetable_id)
    request(school, request_makeup_exam, "c0001", students=5, day=0, period=0)
    requested = [row.kind for row in rows(school, "SELECT kind FROM outbox.messages ORDER BY message_id")]
    assert requested == [kind.name for kind in KINDS]


def test_a_request_that_is_rolled_back_leaves_neither_job_nor_message(school: Engine) -> None:
    with Session(school) as session:
        timetable_id = request_timetable(session)
        request_publication(session, timetable_id)
        request_makeup_exam(session, "c0001", students=5, day=0, period=0)
        assert session.execute(text("SELECT count(*) FROM outbox.messages")).scalar_one() == 3
        session.rollback()
    for table in ("outbox.messages", "academic.timetable_jobs", "academic.publication_jobs", "academic.exam_jobs"):
        assert rows(school, f"SELECT FROM {table}") == []


def test_a_timetable_is_made_and_published_after_two_outages(school: Engine, work: Work) -> None:
    timetable_id = request(school, request_timetable, iterations=1_000)
    publication_id = request(school, request_publication, timetable_id, outages=2)
    assert work("automatic_timetable", timetable_id) is AttemptOutcome.SUCCEEDED
    ends = [work("timetable_publishing", publication_id) for _ in range(3)]
    assert ends == [AttemptOutcome.FAILED, AttemptOutcome.FAILED, AttemptOutcome.SUCCEEDED]
    assert len(rows(school, "SELECT FROM academic.notice_lectures")) == 160
    assert rows(school, "SELECT outcome FROM outbox.messages") == [("succeeded",), ("succeeded",)]


def test_an_exam_without_a_room_is_given_up_after_three_attempts_and_says_why(school: Engine, work: Work) -> None:
    exam_id = request(school, request_makeup_exam, "c0001", students=500, day=0, period=0)
    ends = [work("makeup_exams", exam_id) for _ in range(3)]
    assert ends == [AttemptOutcome.FAILED, AttemptOutcome.FAILED, AttemptOutcome.GIVEN_UP]
    (job,) = rows(school, "SELECT status, message FROM academic.exam_jobs")
    assert job.status == "failed"
    assert "no room has seats for the 500 students of c0001: the largest has 200" in job.message


def test_a_job_that_nobody_can_work_on_is_given_up_at_once(school: Engine, work: Work) -> None:
    timetable_id = request(school, request_timetable, instance="comp99")
    assert work("automatic_timetable", timetable_id) is AttemptOutcome.GIVEN_UP
    assert rows(school, "SELECT status, message FROM academic.timetable_jobs") == [
        ("failed", "there is no instance 'comp99'; these come with the package: comp01")
    ]
    publication_id = request(school, request_publication, 4711)
    assert work("timetable_publishing", publication_id) is AttemptOutcome.GIVEN_UP
    assert rows(school, "SELECT status, message FROM academic.publication_jobs") == [
        ("failed", "there is no timetable 4711 to publish")
    ]


def test_a_timetable_that_its_users_cancel_meanwhile_is_not_made_again(
    school: Engine, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    def solve_while_users_cancel(instance: Instance, **how: Any) -> Solution:
        run(school, "UPDATE academic.timetable_jobs SET status = 'cancelled'")
        return solve(instance, **how)

    monkeypatch.setattr(automatic_timetable, "solve", solve_while_users_cancel)
    timetable_id = request(school, request_timetable, iterations=0)
    assert work("automatic_timetable", timetable_id) is AttemptOutcome.FAILED
    assert work("automatic_timetable", timetable_id) is AttemptOutcome.CANCELLED
    assert rows(school, "SELECT status FROM academic.timetable_jobs") == [("cancelled",)]
    assert rows(school, "SELECT FROM academic.lectures") == []


def test_a_timetable_that_its_users_cancel_is_not_made(school: Engine, work: Work) -> None:
    timetable_id = request(school, request_timetable)
    run(school, "UPDATE academic.timetable_jobs SET status = 'cancelled'")
    assert work("automatic_timetable", timetable_id) is AttemptOutcome.CANCELLED
    assert rows(school, "SELECT FROM academic.lectures") == []
