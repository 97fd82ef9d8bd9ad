"""A week being filled: what stands in each slot, and what putting or taking a lecture changes.

Sets of courses, of periods and of a curriculum's periods on a day are bits of whole numbers:
the search asks for them some hundred thousand times a second.
"""

from collections.abc import Iterable

from outbox_pipelines.academic.instance import Instance
from outbox_pipelines.academic.rules import PER_ISOLATED_LECTURE, PER_MISSING_DAY, Lecture

FREE = -1
"""In the place of a course: nothing stands in the slot."""


class Week:
    """The slots of a week (a period and a room each) and the courses in them.

    Courses, periods and rooms are numbers; slot ``s`` is room ``s % rooms`` in period
    ``s // rooms`` of the week. Since a slot holds one lecture, no room is ever taken twice;
    the other hard constraints are for the caller to ask, with :meth:`fits`.
    """

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self.rooms = len(instance.rooms)
        self.periods = instance.days * instance.periods_per_day
        self.slots = self.periods * self.rooms
        number = {course.name: place for place, course in enumerate(instance.courses)}
        groups = [[number[name] for name in curriculum.courses] for curriculum in instance.curricula]
        self.possible = [(1 << self.periods) - 1 for _ in instance.courses]
        """Of each course: the periods when it can be held."""
        for name, day, period in instance.unavailable:
            self.possible[number[name]] &= ~(1 << (day * instance.periods_per_day + period))
        self.rivals = [1 << place for place in range(len(instance.courses))]
        """Of each course: the courses that may not be at the same time, itself among them."""
        teachers: dict[str, list[int]] = {}
        for place, course in enumerate(instance.courses):
            teachers.setdefault(course.teacher, []).append(place)
        for group in (*groups, *teachers.values()):
            together = sum(1 << member for member in group)
            for member in group:
                self.rivals[member] |= together
        self.unseated = [
            [max(0, course.students - room.capacity) for room in instance.rooms] for course in instance.courses
        ]
        """Of each course, in each room: students without a seat."""

        self.at = [FREE] * self.slots
        """What stands in each slot."""
        self.busy = [0] * self.periods
        """In each period: the courses that are held."""

        self._day_of_slot = [slot // self.rooms // instance.periods_per_day for slot in range(self.slots)]
        self._bit_of_slot = [1 << (slot // self.rooms % instance.periods_per_day) for slot in range(self.slots)]
        self._curricula = [
            [place for place, group in enumerate(groups) if course in group] for course in number.values()
        ]
        self._taken = [[0] * instance.days for _ in groups]
        self._min_days = [course.min_days for course in instance.courses]
        self._on_day = [[0] * instance.days for _ in instance.courses]
        self._days = [0] * len(instance.courses)
        self._in_room = [[0] * self.rooms for _ in instance.courses]
        self._rooms_used = [0] * len(instance.courses)
        self.cost = PER_MISSING_DAY * sum(self._min_days)
        """Of what stands; a lecture that does not stand yet costs nothing."""

    def fits(self, course: int, period: int, leaving: int = 0) -> bool:
        """Whether a course can be held in a period, once the courses in ``leaving`` have left it."""
        return bool(self.possible[course] >> period & 1) and not self.rivals[course] & self.busy[period] & ~leaving

    def put(self, course: int, slot: int) -> None:
        """Let a course stand in a free slot of a period that it fits."""
        self.at[slot] = course
        self.busy[slot // self.rooms] |= 1 << course
        room, day, bit = slot % self.rooms, self._day_of_slot[slot], self._bit_of_slot[slot]
        change = self.unseated[course][room]
        if self._in_room[course][room] == 0:
            change += self._rooms_used[course] > 0
            self._rooms_used[course] += 1
        self._in_room[course][room] += 1
        if self._on_day[course][day] == 0:
            change -= PER_MISSING_DAY * (self._days[course] < self._min_days[course])
            self._days[course] += 1
        self._on_day[course][day] += 1
        for curriculum in self._curricula[course]:
            taken = self._taken[curriculum]
            before, after = taken[day], taken[day] | bit
            change += PER_ISOLATED_LECTURE * (_isolated(after) - _isolated(before))
            taken[day] = after
        self.cost += change

    def take(self, slot: int) -> int:
        """Free a slot; gives the course that stood there."""
        course = self.at[slot]
        self.at[slot] = FREE
        self.busy[slot // self.rooms] &= ~(1 << course)
        room, day, bit = slot % self.rooms, self._day_of_slot[slot], self._bit_of_slot[slot]
        change = -self.unseated[course][room]
        self._in_room[course][room] -= 1
        if self._in_room[course][room] == 0:
            self._rooms_used[course] -= 1
            change -= self._rooms_used[course] > 0
        self._on_day[course][day] -= 1
        if self._on_day[course][day] == 0:
            self._days[course] -= 1
            change += PER_MISSING_DAY * (self._days[course] < self._min_days[course])
        for curriculum in self._curricula[course]:
            taken = self._taken[curriculum]
            before, after = taken[day], taken[day] & ~bit
            change += PER_ISOLATED_LECTURE * (_isolated(after) - _isolated(before))
            taken[day] = after
        self.cost += change
        return course

    def lectures(self, at: Iterable[int] | None = None) -> tuple[Lecture, ...]:
        """The lectures that stand, or stood when ``at`` was copied; sorted."""
        instance = self._instance
        found = []
        for slot, course in enumerate(self.at if at is None else at):
            if course != FREE:
                day, period = divmod(slot // self.rooms, instance.periods_per_day)
                found.append(
                    Lecture(instance.courses[course].name, day, period, instance.rooms[slot % self.rooms].name)
                )
        return tuple(sorted(found))


def _isolated(taken: int) -> int:
    """How many of a day's periods are taken while neither neighbour is."""
    return (taken & ~(taken << 1) & ~(taken >> 1)).bit_count()
