"""Reading instances: all of the file comes through, and a fault is told with its line."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_pipelines.academic.instance import (
    Course,
    Curriculum,
    MalformedInstance,
    Room,
    UnknownInstance,
    parse_instance,
    shipped_instance,
)
from tests.academic.weeks import TOY, competition_instance


def test_the_shipped_instance_is_whole() -> None:
    comp01 = shipped_instance("comp01")
    assert (comp01.name, comp01.days, comp01.periods_per_day) == ("Fis0506-1", 5, 6)
    assert (len(comp01.courses), len(comp01.rooms), len(comp01.curricula), len(comp01.unavailable)) == (30, 6, 14, 53)
    assert sum(course.lectures for course in comp01.courses) == 160
    assert comp01.courses[0] == Course("c0001", "t000", lectures=6, min_days=4, students=130)
    assert comp01.rooms[0] == Room("B", 200)
    assert comp01.curricula[3] == Curriculum("q003", ("c0030", "c0032", "c0033"))
    assert ("c0025", 2, 5) in comp01.unavailable


@pytest.mark.parametrize(("name", "courses", "unavailable"), [("comp02", 82, 513), ("comp08", 86, 478)])
def test_larger_instances_are_whole(name: str, courses: int, unavailable: int) -> None:
    instance = competition_instance(name)
    assert (len(instance.courses), len(instance.unavailable)) == (courses, unavailable)


def test_an_instance_that_is_not_shipped_is_refused_with_those_that_are() -> None:
    with pytest.raises(UnknownInstance, match=r"'\.\./secrets'; these come with the package: comp01"):
        shipped_instance("../secrets")


def test_blank_lines_spaces_and_foreign_line_ends_mean_nothing() -> None:
    assert parse_instance(TOY.replace("\n", " \r\n\r\n")) == parse_instance(TOY)


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("Name: Toy", "Toy", r"^line 1: expected 'Name: …', found 'Toy'"),
        ("Days: 5", "Days: five", "^line 4: Days must be a whole number, not 'five'"),
        ("Days: 5", "Days: 0", "^line 4: Days must be 1 or more, not 0"),
        ("Days: 5", "Days: 1_0", "^line 4: Days must be a whole number, not '1_0'"),
        ("COURSES:", "ROOMS:", "^line 9: expected 'COURSES:', found 'ROOMS:'"),
        ("Courses: 4", "Courses: 5", "^line 15: COURSES ends after 4 lines; the header tells 5"),
        ("Courses: 4", "Courses: 3", "^line 13: expected 'ROOMS:', found 'Geotec Scarlatti 5 4 18'"),
        ("SceCosC Ocra 3 3 30", "SceCosC Ocra 3 3", "^line 10: a line of COURSES has 5 words, not 4"),
        ("SceCosC Ocra 3 3 30", "SceCosC Ocra 0 3 30", "^line 10: lectures must be 1 or more, not 0"),
        ("ArcTec Indaco", "SceCosC Indaco", "^line 11: course SceCosC is there twice"),
        ("rB\t50", "rA\t50", "^line 17: room rA is there twice"),
        ("rB\t50", "rB\t-50", "^line 17: capacity must be a whole number, not '-50'"),
        ("Cur1 3", "Cur1 2", "^line 21: curriculum Cur1 tells 2 courses and lists 3"),
        ("Cur1 3 SceCosC", "Cur1 3 Unheard", "^line 21: there is no course Unheard"),
        ("Cur1 3 SceCosC", "Cur1 3 ArcTec", "^line 21: curriculum Cur1 lists a course twice"),
        ("Cur2 2", "Cur1 2", "^line 22: curriculum Cur1 is there twice"),
        ("TecCos 2 0", "Unheard 2 0", "^line 25: there is no course Unheard"),
        ("TecCos 2 0", "TecCos 5 0", "^line 25: day must be from 0 to 4, not 5"),
        ("TecCos 2 0", "TecCos 2 4", "^line 25: period must be from 0 to 3, not 4"),
        ("Constraints: 8", "Constraints: 7", "^line 32: expected 'END.', found 'ArcTec 4 3'"),
        ("Constraints: 8", "Constraints: 9", "^line 34: UNAVAILABILITY_CONSTRAINTS ends after 8 lines; the header"),
        ("END.", "", "^line 33: the text ends where 'END.' should be"),
    ],
)
def test_a_fault_is_told_with_its_line(right: str, wrong: str, told: str) -> None:
    assert right in TOY
    with pytest.raises(MalformedInstance, match=told):
        parse_instance(TOY.replace(right, wrong, 1))


@given(st.sampled_from([number for number, line in enumerate(TOY.splitlines()) if line]))
def test_a_lost_line_is_never_overlooked(number: int) -> None:
    lines = TOY.splitlines()
    with pytest.raises(MalformedInstance, match=r"^line \d+: "):
        parse_instance("\n".join(lines[:number] + lines[number + 1 :]))


@given(st.integers(0, len(TOY)), st.text(max_size=3), st.integers(0, 5))
def test_a_text_is_read_or_refused_in_words(place: int, inserted: str, removed: int) -> None:
    # Any other error would fail the test.
    with suppress(MalformedInstance):
        parse_instance(TOY[:place] + inserted + TOY[place + removed :])
