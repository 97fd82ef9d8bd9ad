"""The kind ``makeup_exams``: the smallest room that is free, once, and words for people when there is none."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import IntegrityError

from outbox_pipelines.academic.domain_jobs import UnfitJob
from outbox_pipelines.academic.makeup_exams import MAKEUP_EXAMS, NoRoomFree, place_exam
from outbox_pipelines.academic.requests import request_makeup_exam, request_timetable
from tests.academic.attempts import Attempt, message, request, rows, run

EXAMS = "SELECT room FROM academic.exams ORDER BY exam_id"


def requested(school: Engine, students: int, *, day: int = 2, period: int = 3, timetable_id: int | None = None) -> int:
    return request(
        school, request_makeup_exam, "c0001", students=students, day=day, period=period, timetable_id=timetable_id
    )


def place(school: Engine, job_id: int) -> None:
    place_exam(Attempt(school, MAKEUP_EXAMS, job_id))


def test_the_booking_the_domain_job_and_the_message_change_together(school: Engine) -> None:
    job_id = requested(school, 20)
    place(school, job_id)
    assert rows(school, "SELECT exam_id, day, period, room FROM academic.exams") == [(job_id, 2, 3, "G")]
    assert rows(school, "SELECT status, message, current_step FROM academic.exam_jobs") == [
        ("succeeded", "c0001: room G on Wednesday, period 4", "looking for a room")
    ]
    assert message(school, MAKEUP_EXAMS, job_id) == ("Completed", "succeeded")


def test_the_smallest_room_with_enough_seats_is_booked(school: Engine) -> None:
    wanted = {1: "E", 9: "E", 10: "G", 30: "F", 31: "C", 100: "C", 101: "B", 200: "B"}
    for period, students in enumerate(wanted):
        place(school, requested(school, students, period=period))
    assert rows(school, EXAMS) == [(room,) for room in wanted.values()]


def test_rooms_with_lectures_of_the_timetable_and_with_exams_at_that_time_are_not_free(school: Engine) -> None:
    timetable_id, another = (request(school, request_timetable) for _ in range(2))
    run(school, "UPDATE academic.timetable_jobs SET status = 'succeeded'")
    run(
        school,
        f"""
        INSERT INTO academic.lectures (timetable_id, course, day, period, room)
        VALUES ({timetable_id}, 'c0030', 2, 3, 'F'), ({another}, 'c0030', 2, 3, 'C'),
               ({timetable_id}, 'c0030', 2, 4, 'C')
        """,
    )
    for _ in range(2):
        place(school, requested(school, 21, timetable_id=timetable_id))
    assert rows(school, EXAMS) == [("S",), ("C",)]
    # Another period, and no timetable.
    place(school, requested(school, 21, period=4, timetable_id=another))
    place(school, requested(school, 21))
    assert rows(school, EXAMS) == [("S",), ("C",), ("F",), ("F",)]


def test_no_room_is_large_enough(school: Engine) -> None:
    job_id = requested(school, 201)
    with pytest.raises(NoRoomFree, match="no room has seats for the 201 students of c0001: the largest has 200"):
        place(school, job_id)
    assert message(school, MAKEUP_EXAMS, job_id) == ("Processing", None)


def test_every_room_that_is_large_enough_is_taken(school: Engine) -> None:
    for _ in range(2):
        place(school, requested(school, 100))
    with pytest.raises(NoRoomFree, match="seats for the 90 students of c0001 is taken on Wednesday, period 4"):
        place(school, requested(school, 90))
    assert rows(school, EXAMS) == [("C",), ("B",)]


def test_exams_placed_at_the_same_moment_get_different_rooms(school: Engine) -> None:
    attempts = [Attempt(school, MAKEUP_EXAMS, requested(school, 5)) for _ in range(6)]
    with ThreadPoolExecutor(len(attempts)) as threads:
        list(threads.map(place_exam, attempts))
    assert sorted(room for (room,) in rows(school, EXAMS)) == ["B", "C", "E", "F", "G", "S"]


def test_an_exam_waits_for_one_that_has_the_room_in_its_hand(school: Engine) -> None:
    first, second = requested(school, 200), requested(school, 200)
    attempt = Attempt(school, MAKEUP_EXAMS, second)
    with ThreadPoolExecutor(1) as thread, school.connect() as other:
        other.execute(text("INSERT INTO academic.exams VALUES (:first, 2, 3, 'B')"), {"first": first})
        placing = thread.submit(place_exam, attempt)
        while not rows(school, "SELECT FROM pg_locks WHERE NOT granted"):
            assert not placing.done()
        other.commit()
        with pytest.raises(NoRoomFree):
            placing.result()
    assert rows(school, EXAMS) == [("B",)]


def test_a_timetable_that_is_not_done_is_refused(school: Engine) -> None:
    queued = request(school, request_timetable)
    for timetable_id, told in ((queued, "is queued"), (4711, "is not there")):
        with pytest.raises(UnfitJob, match=f"timetable {timetable_id} {told}: nobody knows which rooms it takes"):
            place(school, requested(school, 5, timetable_id=timetable_id))
    assert rows(school, EXAMS) == []


def test_an_exam_that_cannot_be_is_refused_when_it_is_requested(school: Engine) -> None:
    for wrong in ({"students": 0}, {"day": 7}, {"period": -1}):
        with pytest.raises(IntegrityError):
            requested(school, **{"students": 5, **wrong})
    assert rows(school, "SELECT FROM outbox.messages") == []
