"""The kind ``timetable_publishing``: outages pass, and a timetable that was not made leaves a reason."""

import json
import time

import pytest
from sqlalchemy import Engine, text

from outbox_pipelines.academic import timetable_publishing
from outbox_pipelines.academic.automatic_timetable import AUTOMATIC_TIMETABLE, make_timetable
from outbox_pipelines.academic.domain_jobs import UnfitJob
from outbox_pipelines.academic.requests import request_publication, request_timetable
from outbox_pipelines.academic.timetable_publishing import (
    TIMETABLE_PUBLISHING,
    NoticeBoardUnreachable,
    TimetableNotReady,
    publish_timetable,
)
from tests.academic.attempts import Attempt, message, request, rows, run

LECTURES = "SELECT course, day, period, room FROM academic.lectures WHERE timetable_id = {} ORDER BY 2, 3, 4"
NOTICE = "SELECT course, day, period, room FROM academic.notice_lectures WHERE publication_id = {} ORDER BY 2, 3, 4"


@pytest.fixture
def timetable_id(school: Engine) -> int:
    """A finished timetable."""
    return finished(school, seed=1)


def finished(school: Engine, seed: int) -> int:
    job_id = request(school, request_timetable, seed=seed, iterations=0)
    make_timetable(Attempt(school, AUTOMATIC_TIMETABLE, job_id))
    return job_id


def attempt(school: Engine, job_id: int) -> Attempt:
    return Attempt(school, TIMETABLE_PUBLISHING, job_id)


def assert_nothing_published(school: Engine, job_id: int) -> None:
    assert rows(school, "SELECT FROM academic.notices") == []
    assert message(school, TIMETABLE_PUBLISHING, job_id) == ("Processing", None)


def test_the_whole_timetable_is_copied_and_no_other(school: Engine, timetable_id: int) -> None:
    finished(school, seed=2)
    job_id = request(school, request_publication, timetable_id)
    publish_timetable(attempt(school, job_id))
    assert rows(school, NOTICE.format(job_id)) == rows(school, LECTURES.format(timetable_id))
    assert rows(school, "SELECT publication_id, timetable_id, reason FROM academic.notices") == [
        (job_id, timetable_id, None)
    ]
    assert rows(school, "SELECT status, message FROM academic.publication_jobs") == [
        ("succeeded", "160 lectures published")
    ]
    assert message(school, TIMETABLE_PUBLISHING, job_id) == ("Completed", "succeeded")


def test_with_two_outages_the_third_attempt_publishes(school: Engine, timetable_id: int) -> None:
    job_id = request(school, request_publication, timetable_id, outages=2)
    for number in (1, 2):
        with pytest.raises(NoticeBoardUnreachable, match=rf"does not answer \(attempt {number}\)"):
            publish_timetable(attempt(school, job_id))
        assert_nothing_published(school, job_id)
    publish_timetable(attempt(school, job_id))
    assert len(rows(school, NOTICE.format(job_id))) == 160


def test_of_a_timetable_that_was_not_made_an_empty_notice_tells_the_reason(school: Engine) -> None:
    for status, told, ended in (
        ("failed", "'no luck'", "could not be made (no luck)"),
        ("failed", "NULL", "could not be made"),
        ("cancelled", "NULL", "was cancelled"),
    ):
        timetable_id = request(school, request_timetable)
        run(
            school,
            f"UPDATE academic.timetable_jobs SET status = '{status}', message = {told} WHERE id = {timetable_id}",
        )
        job_id = request(school, request_publication, timetable_id)
        publish_timetable(attempt(school, job_id))
        reason = f"timetable {timetable_id} {ended}"
        assert rows(school, f"SELECT reason FROM academic.notices WHERE publication_id = {job_id}") == [(reason,)]
        assert rows(school, NOTICE.format(job_id)) == []
        assert rows(school, f"SELECT status, message FROM academic.publication_jobs WHERE id = {job_id}") == [
            ("succeeded", f"published empty: {reason}")
        ]


def test_a_timetable_that_is_being_made_is_waited_for(school: Engine) -> None:
    timetable_id = request(school, request_timetable, iterations=0)
    job_id = request(school, request_publication, timetable_id)

    def finish_meanwhile(step: str) -> None:
        if step == "waiting for the timetable":
            make_timetable(Attempt(school, AUTOMATIC_TIMETABLE, timetable_id))

    publishing = Attempt(school, TIMETABLE_PUBLISHING, job_id, on_step=finish_meanwhile)
    publish_timetable(publishing)
    assert [step for step, _ in publishing.told] == [
        "reaching the notice board",
        "waiting for the timetable",
        "copying the lectures",
    ]
    assert len(rows(school, NOTICE.format(job_id))) == 160


def test_a_timetable_that_takes_too_long_is_left_to_another_attempt(
    school: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timetable_publishing, "_PATIENCE_SECONDS", 0.0)
    timetable_id = request(school, request_timetable)
    job_id = request(school, request_publication, timetable_id)
    for status in ("queued", "running"):
        run(school, f"UPDATE academic.timetable_jobs SET status = '{status}'")
        with pytest.raises(TimetableNotReady, match=f"timetable {timetable_id} is {status}"):
            publish_timetable(attempt(school, job_id))
    assert_nothing_published(school, job_id)


def test_a_publication_that_is_cancelled_waits_no_longer(school: Engine) -> None:
    job_id = request(school, request_publication, request(school, request_timetable))
    began = time.monotonic()
    with pytest.raises(TimetableNotReady):
        publish_timetable(Attempt(school, TIMETABLE_PUBLISHING, job_id, looks=0))
    assert time.monotonic() - began < 30
    assert_nothing_published(school, job_id)


def test_a_timetable_that_is_not_there_is_told(school: Engine) -> None:
    job_id = request(school, request_publication, 4711)
    with pytest.raises(UnfitJob, match="there is no timetable 4711 to publish"):
        publish_timetable(attempt(school, job_id))
    assert_nothing_published(school, job_id)


def test_a_payload_that_means_nothing_is_refused(school: Engine) -> None:
    job_id = request(school, request_publication, request(school, request_timetable))
    for payload, told in (
        ({"outages": -1}, "outages must be a whole number of attempts, 0 or more, not -1"),
        ({"outages": 1.5}, "not 1.5"),
        ({"outages": "2"}, "not '2'"),
        ({"outages": True}, "not True"),
        ({"outages": None}, "not None"),
        ({"outage": 2}, "the payload has the key 'outage'; known: outages"),
    ):
        with school.begin() as connection:
            connection.execute(text("UPDATE outbox.messages SET payload = :new"), {"new": json.dumps(payload)})
        with pytest.raises(UnfitJob, match=told):
            publish_timetable(attempt(school, job_id))
    assert rows(school, "SELECT status FROM academic.publication_jobs") == [("queued",)]
