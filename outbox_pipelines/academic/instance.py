"""What a timetable is to be made for: instances of curriculum-based course timetabling, and their file format.

The format (``.ctt``) is that of the second International Timetabling Competition, track 3
(ITC-2007). The shipped ``comp01`` is the competition's first instance, data of the University
of Udine.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import NoReturn

from outbox_pipelines.errors import OutboxError

SHIPPED = ("comp01",)
"""Instances that come with the package."""


class MalformedInstance(OutboxError):
    """A text that is no instance; tells the line and what is wrong there."""


class UnknownInstance(OutboxError):
    """No instance of that name comes with the package."""


@dataclass(frozen=True)
class Course:
    """A course, whose lectures are interchangeable."""

    name: str
    teacher: str
    lectures: int
    """In a week."""

    min_days: int
    """Days that the lectures should be spread over, at least."""

    students: int


@dataclass(frozen=True)
class Room:
    """A lecture room."""

    name: str
    capacity: int
    """Seats."""


@dataclass(frozen=True)
class Curriculum:
    """Courses that have students in common, so that no two may be at the same time."""

    name: str
    courses: tuple[str, ...]


@dataclass(frozen=True)
class Instance:
    """A week to be planned. Days and periods count from 0."""

    name: str
    days: int
    periods_per_day: int
    courses: tuple[Course, ...]
    rooms: tuple[Room, ...]
    curricula: tuple[Curriculum, ...]
    unavailable: frozenset[tuple[str, int, int]]
    """Course, day, period: when a course cannot be held."""


def shipped_instance(name: str) -> Instance:
    """An instance that comes with the package.

    Raises:
        UnknownInstance: naming those that do.
    """
    if name not in SHIPPED:
        raise UnknownInstance(f"there is no instance {name!r}; these come with the package: {', '.join(SHIPPED)}")
    return parse_instance((files("outbox_pipelines.academic") / f"{name}.ctt").read_text(encoding="utf-8"))


def parse_instance(text: str) -> Instance:
    """Read an instance in the ``.ctt`` format.

    Raises:
        MalformedInstance: telling the line and what is wrong there.
    """
    lines = _Lines(text)
    name = lines.header("Name")
    counts = {key: lines.number(lines.header(key), key, at_least) for key, at_least in _COUNTS.items()}
    days, periods = counts["Days"], counts["Periods_per_day"]

    courses: dict[str, Course] = {}
    for label, teacher, lectures, min_days, students in lines.section("COURSES", counts["Courses"], 5):
        lines.new(label, courses, "course")
        courses[label] = Course(
            label,
            teacher,
            lines.number(lectures, "lectures", 1),
            lines.number(min_days, "minimum working days", 0),
            lines.number(students, "students", 0),
        )

    rooms: dict[str, Room] = {}
    for label, capacity in lines.section("ROOMS", counts["Rooms"], 2):
        lines.new(label, rooms, "room")
        rooms[label] = Room(label, lines.number(capacity, "capacity", 0))

    curricula: dict[str, Curriculum] = {}
    for label, size, *members in lines.section("CURRICULA", counts["Curricula"]):
        lines.new(label, curricula, "curriculum")
        if lines.number(size, "number of courses", 1) != len(members):
            lines.fail(f"curriculum {label} tells {size} courses and lists {len(members)}")
        for member in members:
            lines.known(member, courses)
        if len(set(members)) != len(members):
            lines.fail(f"curriculum {label} lists a course twice")
        curricula[label] = Curriculum(label, tuple(members))

    unavailable = set()
    for label, day, period in lines.section("UNAVAILABILITY_CONSTRAINTS", counts["Constraints"], 3):
        lines.known(label, courses)
        unavailable.add((label, lines.number(day, "day", 0, days - 1), lines.number(period, "period", 0, periods - 1)))
    lines.end()
    return Instance(
        name,
        days,
        periods,
        tuple(courses.values()),
        tuple(rooms.values()),
        tuple(curricula.values()),
        frozenset(unavailable),
    )


_COUNTS = {"Courses": 1, "Rooms": 1, "Days": 1, "Periods_per_day": 1, "Curricula": 0, "Constraints": 0}
"""The header's lines after the name, in their order, and the least that each may be."""


class _Lines:
    """The lines that are not blank, one after the other; knows which one an error is about."""

    def __init__(self, text: str) -> None:
        self._lines = [(number, line.split()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        self._place = 0
        self._number = 0

    def fail(self, told: str) -> NoReturn:
        raise MalformedInstance(f"line {self._number}: {told}")

    def header(self, key: str) -> str:
        """The value of the line ``key: value``."""
        words = self._next(f"{key}: …")
        if words[0] != f"{key}:" or len(words) != 2:
            self.fail(f"expected '{key}: …', found '{' '.join(words)}'")
        return words[1]

    def section(self, title: str, count: int, width: int | None = None) -> Iterator[list[str]]:
        """The words of each line of a section, which has ``count`` lines of ``width`` words (two or more if none)."""
        if (words := self._next(f"{title}:")) != [f"{title}:"]:
            self.fail(f"expected '{title}:', found '{' '.join(words)}'")
        for place in range(count):
            words = self._next(f"line {place + 1} of {count} in {title}")
            if words[0].endswith(":") or words == ["END."]:
                self.fail(f"{title} ends after {place} lines; the header tells {count}")
            if len(words) < 2 or width not in (None, len(words)):
                self.fail(f"a line of {title} has {width or 'two or more'} words, not {len(words)}")
            yield words

    def number(self, word: str, what: str, at_least: int, at_most: int | None = None) -> int:
        """A whole number within bounds."""
        # Not int() alone: it takes "1_000" and "-0", too.
        if not (word.isascii() and word.isdigit()):
            self.fail(f"{what} must be a whole number, not '{word}'")
        value = int(word)
        if value < at_least or (at_most is not None and value > at_most):
            bounds = f"{at_least} or more" if at_most is None else f"from {at_least} to {at_most}"
            self.fail(f"{what} must be {bounds}, not {value}")
        return value

    def new(self, name: str, seen: Collection[str], what: str) -> None:
        if name in seen:
            self.fail(f"{what} {name} is there twice")

    def known(self, name: str, courses: Collection[str]) -> None:
        if name not in courses:
            self.fail(f"there is no course {name}")

    def end(self) -> None:
        if (words := self._next("END.")) != ["END."]:
            self.fail(f"expected 'END.', found '{' '.join(words)}': the header may tell too few lines")

    def _next(self, expected: str) -> list[str]:
        if self._place == len(self._lines):
            self._number += 1
            self.fail(f"the text ends where '{expected}' should be")
        self._number, words = self._lines[self._place]
        self._place += 1
        return words
