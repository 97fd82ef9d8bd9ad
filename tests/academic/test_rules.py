"""The judge: against the competition's own validator on its toy, and on each rule broken alone."""

from dataclasses import replace

import pytest

from outbox_pipelines.academic.instance import parse_instance
from outbox_pipelines.academic.rules import Cost, Lecture, Rule, cost, violations
from tests.academic.weeks import TOY

# A solution in the competition's format (course, room, day, period). It is published with the
# validator's answer: no violation, and no cost for capacity, working days and isolated lectures
# (README of the CB-CTT solver teaspoon, whose formulation UD1 knows no room stability).
_SOLUTION = """
Geotec rA 3 1
Geotec rA 3 2
SceCosC rA 1 3
Geotec rA 4 3
ArcTec rB 3 0
ArcTec rB 2 1
ArcTec rB 3 1
TecCos rB 1 2
TecCos rB 2 2
TecCos rB 0 3
Geotec rB 2 3
SceCosC rB 4 3
TecCos rC 0 2
SceCosC rC 3 2
TecCos rC 4 2
Geotec rC 1 3
"""

toy = parse_instance(TOY)


def lecture(line: str) -> Lecture:
    course, room, day, period = line.split()
    return Lecture(course, int(day), int(period), room)


solution = [lecture(line) for line in _SOLUTION.strip().splitlines()]


def with_change(before: str, after: str | None) -> list[Lecture]:
    """The solution, with one lecture elsewhere or gone."""
    changed = [at for at in solution if at != lecture(before)]
    assert len(changed) == len(solution) - 1
    return changed if after is None else [*changed, lecture(after)]


def test_the_published_solution_is_judged_as_by_the_competitions_validator() -> None:
    assert violations(toy, solution) == []
    # By hand: SceCosC is in 3 rooms, TecCos in 2, Geotec in 3.
    assert cost(toy, solution) == Cost(0, 0, 0, room_stability=2 + 1 + 2)


@pytest.mark.parametrize(
    ("before", "after", "rule", "told"),
    [
        ("ArcTec rB 3 1", None, Rule.LECTURES, "ArcTec has 2 lectures, not 3"),
        ("Geotec rA 4 3", "Geotec rC 1 2", Rule.CONFLICTS, "Geotec and TecCos are both at day 1 period 2"),
        ("Geotec rA 4 3", "Geotec rB 4 3", Rule.ROOM_OCCUPANCY, "room rB has 2 lectures at day 4 period 3"),
        ("Geotec rA 4 3", "Geotec rA 1 3", Rule.ROOM_OCCUPANCY, "room rA has 2 lectures at day 1 period 3"),
        ("Geotec rA 4 3", "Geotec rX 4 3", Rule.LECTURES, "there is no room rX at day 4 period 3"),
        ("Geotec rA 4 3", "Geotec rA 5 3", Rule.LECTURES, "there is no room rA at day 5 period 3"),
        ("Geotec rA 4 3", "Geotec rA 4 4", Rule.LECTURES, "there is no room rA at day 4 period 4"),
        ("Geotec rA 4 3", "Geotec rB 3 2", Rule.LECTURES, "Geotec has 2 lectures at day 3 period 2"),
        ("ArcTec rB 3 0", "ArcTec rB 4 1", Rule.AVAILABILITY, "ArcTec cannot be held at day 4 period 1"),
    ],
)
def test_a_broken_rule_is_found(before: str, after: str | None, rule: Rule, told: str) -> None:
    assert (rule, told) in [(found.rule, found.told) for found in violations(toy, with_change(before, after))]


def test_lectures_of_no_course_are_found() -> None:
    found = violations(toy, [*solution, Lecture("Unheard", 0, 0, "rA")])
    assert [(one.rule, one.told) for one in found] == [(Rule.LECTURES, "Unheard has 1 lectures, not 0")]


def test_courses_of_one_teacher_are_not_at_the_same_time() -> None:
    by_one = replace(toy, courses=tuple(replace(course, teacher="Ocra") for course in toy.courses))
    told = {found.told for found in violations(by_one, solution)}
    # Of no common curriculum, so only the teacher forbids it.
    assert "ArcTec and Geotec are both at day 3 period 1" in told
    assert {found.rule for found in violations(by_one, solution)} == {Rule.CONFLICTS}


def test_students_without_a_seat_cost_1_each() -> None:
    # 42 students in a room of 32; the course is then in two rooms.
    assert cost(toy, with_change("ArcTec rB 3 1", "ArcTec rA 3 1")) == Cost(10, 0, 0, room_stability=6)


def test_a_missing_working_day_costs_5() -> None:
    # SceCosC wants three days and has two; at day 3 it still stands beside ArcTec.
    changed = with_change("SceCosC rA 1 3", "SceCosC rC 3 3")
    found = cost(toy, changed)
    assert found.minimum_working_days == 5
    # Cur1 loses the neighbour of TecCos at day 1 period 2.
    assert found.curriculum_compactness == 2


def test_an_isolated_lecture_costs_2_in_each_of_its_curricula() -> None:
    # TecCos at day 0 is split in two, in both its curricula.
    assert cost(toy, with_change("TecCos rB 0 3", "TecCos rB 0 0")).curriculum_compactness == 2 * 2 * 2


def test_the_last_period_of_a_day_is_no_neighbour_of_the_next_days_first() -> None:
    one_course = replace(toy, courses=toy.courses[:1], curricula=(replace(toy.curricula[0], courses=("SceCosC",)),))
    found = cost(one_course, [Lecture("SceCosC", 0, 3, "rA"), Lecture("SceCosC", 1, 0, "rA")])
    assert found.curriculum_compactness == 4
