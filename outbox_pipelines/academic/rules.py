"""What makes a timetable right, and how good it is: the judge of what the search finds.

The formulation is that of L. Di Gaspero, B. McCollum and A. Schaerf, "The Second
International Timetabling Competition (ITC-2007): Curriculum-based Course Timetabling
(Track 3)", technical report, 2007. Written from there and from nothing in the search, which
keeps counts of its own: so each can prove the other wrong.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

from outbox_pipelines.academic.instance import Instance

PER_MISSING_DAY = 5
PER_ISOLATED_LECTURE = 2
"""Weights of the formulation; a student without a seat and a further room cost 1 each."""


@dataclass(frozen=True, order=True)
class Lecture:
    """One lecture and its place in the week."""

    course: str
    day: int
    period: int
    room: str


Timetable = Sequence[Lecture]


class Rule(StrEnum):
    """The hard constraints."""

    LECTURES = "lectures"
    """Each course has its lectures, all in different periods of the week and in rooms that exist."""

    ROOM_OCCUPANCY = "room occupancy"
    """A room holds one lecture at a time."""

    CONFLICTS = "conflicts"
    """Courses of a curriculum, or of a teacher, are not at the same time."""

    AVAILABILITY = "availability"
    """A course is not held when it cannot be."""


@dataclass(frozen=True)
class Violation:
    """One way in which a timetable breaks a rule."""

    rule: Rule
    told: str


@dataclass(frozen=True)
class Cost:
    """How far a timetable is from what is wished (the soft constraints); 0 is best."""

    room_capacity: int
    """Students without a seat, over all lectures."""

    minimum_working_days: int
    """5 for each day by which a course's lectures are spread over too few."""

    curriculum_compactness: int
    """2 for each lecture of a curriculum with no other of it right before or after on that day."""

    room_stability: int
    """1 for each room that a course uses beyond its first."""

    @property
    def total(self) -> int:
        return self.room_capacity + self.minimum_working_days + self.curriculum_compactness + self.room_stability


def violations(instance: Instance, timetable: Timetable) -> list[Violation]:
    """Every violation of a hard constraint; none for a timetable that can be held."""
    return [
        *_of_lectures(instance, timetable),
        *_of_room_occupancy(timetable),
        *_of_conflicts(instance, timetable),
        *_of_availability(instance, timetable),
    ]


def _of_lectures(instance: Instance, timetable: Timetable) -> Iterable[Violation]:
    held = Counter(lecture.course for lecture in timetable)
    wanted = {course.name: course.lectures for course in instance.courses}
    for name in sorted(held.keys() | wanted.keys()):
        if held[name] != wanted.get(name, 0):
            yield Violation(Rule.LECTURES, f"{name} has {held[name]} lectures, not {wanted.get(name, 0)}")
    for (name, day, period), count in Counter((at.course, at.day, at.period) for at in timetable).items():
        if count > 1:
            yield Violation(Rule.LECTURES, f"{name} has {count} lectures at day {day} period {period}")
    rooms = {room.name for room in instance.rooms}
    for at in timetable:
        if (
            at.room not in rooms
            or at.day not in range(instance.days)
            or at.period not in range(instance.periods_per_day)
        ):
            yield Violation(Rule.LECTURES, f"there is no room {at.room} at day {at.day} period {at.period}")


def _of_room_occupancy(timetable: Timetable) -> Iterable[Violation]:
    for (room, day, period), count in Counter((at.room, at.day, at.period) for at in timetable).items():
        if count > 1:
            yield Violation(Rule.ROOM_OCCUPANCY, f"room {room} has {count} lectures at day {day} period {period}")


def _of_conflicts(instance: Instance, timetable: Timetable) -> Iterable[Violation]:
    teacher = {course.name: course.teacher for course in instance.courses}
    curricula = {
        course.name: {curriculum.name for curriculum in instance.curricula if course.name in curriculum.courses}
        for course in instance.courses
    }
    at_once = defaultdict(set)
    for at in timetable:
        if at.course in teacher:
            at_once[at.day, at.period].add(at.course)
    for (day, period), courses in at_once.items():
        for one, other in combinations(sorted(courses), 2):
            if teacher[one] == teacher[other] or curricula[one] & curricula[other]:
                yield Violation(Rule.CONFLICTS, f"{one} and {other} are both at day {day} period {period}")


def _of_availability(instance: Instance, timetable: Timetable) -> Iterable[Violation]:
    for at in timetable:
        if (at.course, at.day, at.period) in instance.unavailable:
            yield Violation(Rule.AVAILABILITY, f"{at.course} cannot be held at day {at.day} period {at.period}")


def cost(instance: Instance, timetable: Timetable) -> Cost:
    """How good a timetable without violations is; lower is better."""
    seats = {room.name: room.capacity for room in instance.rooms}
    students = {course.name: course.students for course in instance.courses}
    days = defaultdict(set)
    rooms = defaultdict(set)
    for at in timetable:
        days[at.course].add(at.day)
        rooms[at.course].add(at.room)
    return Cost(
        sum(max(0, students[at.course] - seats[at.room]) for at in timetable),
        PER_MISSING_DAY * sum(max(0, course.min_days - len(days[course.name])) for course in instance.courses),
        PER_ISOLATED_LECTURE * sum(_isolated(curriculum.courses, timetable) for curriculum in instance.curricula),
        sum(len(used) - 1 for used in rooms.values()),
    )


def _isolated(courses: Sequence[str], timetable: Timetable) -> int:
    times = [(at.day, at.period) for at in timetable if at.course in courses]
    taken = set(times)
    return sum((day, period - 1) not in taken and (day, period + 1) not in taken for day, period in times)
