"""Finds timetables: every lecture is placed without breaking a rule, then the week is improved.

Placing takes the lecture with the fewest places left and, when it has none, turns others out,
those first that were turned out least (the conflict-based statistics of T. Müller, "ITC2007
solver description: a hybrid approach", 2009). Improving is simulated annealing over moves and
swaps that break no rule. Pure Python, and the same for the same seed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from outbox_pipelines.academic.instance import Instance
from outbox_pipelines.academic.rules import Cost, Timetable, cost
from outbox_pipelines.academic.week import FREE, Week
from outbox_pipelines.errors import OutboxError

Progress = Callable[[str, float], None]
"""Told the step, in words, and which part of the whole is done (0 to 1)."""

ITERATIONS = 1_500_000
"""Enough for good timetables of some hundred lectures, in a few seconds."""

_PLACING_SHARE = 0.05
_HOTTEST, _COLDEST = 3.0, 0.1
"""Temperatures in units of cost: a change for the worse by 1 passes often at first, hardly ever at last."""

_REPORTS = 40
_STEPS_BETWEEN_LOOKS = 1_000
"""Often enough to stop within some hundredths of a second, seldom enough to cost nothing."""


class NoTimetable(OutboxError):
    """No timetable that keeps all the rules was found."""


class SearchStopped(OutboxError):
    """The search was told to stop before its end; it gives nothing."""


@dataclass(frozen=True)
class Solution:
    """What a search found."""

    timetable: Timetable
    """All lectures, sorted; it keeps all the rules."""

    cost: Cost


def solve(
    instance: Instance,
    *,
    seed: int = 0,
    iterations: int = ITERATIONS,
    on_progress: Progress = lambda _step, _part: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Solution:
    """Find a timetable.

    >>> solve(shipped_instance("comp01"), seed=1).cost.total        # doctest: +SKIP
    9

    Args:
        instance: what to plan.
        seed: the same seed and iterations find the same timetable.
        iterations: changes to try when improving; more take longer and find better.
        on_progress: called some forty times.
        should_stop: asked often, so it must be quick.

    Raises:
        NoTimetable: telling how many lectures found no place.
        SearchStopped: when ``should_stop`` said so.
    """
    week = Week(instance)
    random = Random(seed)
    _place_all(week, instance, random, on_progress, should_stop)
    best = _improve(week, random, iterations, on_progress, should_stop)
    timetable = week.lectures(best)
    return Solution(timetable, cost(instance, timetable))


def _place_all(
    week: Week, instance: Instance, random: Random, on_progress: Progress, should_stop: Callable[[], bool]
) -> None:
    waiting = [number for number, course in enumerate(instance.courses) for _ in range(course.lectures)]
    total = len(waiting)
    turned_out = [0] * len(instance.courses)
    most_steps = 1_000 + 100 * total
    for step in range(most_steps):
        if not waiting:
            return
        if should_stop():
            raise SearchStopped("stopped while placing lectures")
        if step % max(1, total // 4) == 0:
            on_progress("placing lectures", _PLACING_SHARE * (total - len(waiting)) / total)
        course = waiting.pop(_hardest(week, waiting, random))
        if not week.possible[course]:
            raise NoTimetable(f"course {instance.courses[course].name} of {instance.name} cannot be held at any time")
        slot, leaving = _best_slot(week, course, turned_out, random)
        for gone in leaving:
            evicted = week.take(gone)
            turned_out[evicted] += 1
            waiting.append(evicted)
        week.put(course, slot)
    if waiting:
        raise NoTimetable(
            f"{len(waiting)} of {total} lectures of {instance.name} found no place after {most_steps:,} steps: "
            "try another seed, or take a constraint away"
        )


def _hardest(week: Week, waiting: list[int], random: Random) -> int:
    """Where in the list the course is that fits the fewest periods."""
    rooms = week.rooms
    free = [period for period in range(week.periods) if FREE in week.at[period * rooms : (period + 1) * rooms]]
    choices = {course: sum(week.fits(course, period) for period in free) for course in set(waiting)}
    return min(range(len(waiting)), key=lambda place: (choices[waiting[place]], random.random()))


def _best_slot(week: Week, course: int, turned_out: list[int], random: Random) -> tuple[int, list[int]]:
    """A slot for a course, and the slots to be freed for it; none of these when it fits somewhere."""
    best: tuple[tuple[int, int, float], int, list[int]] | None = None
    for period in range(week.periods):
        if not week.possible[course] >> period & 1:
            continue
        slots = range(period * week.rooms, (period + 1) * week.rooms)
        rivals = [slot for slot in slots if week.at[slot] != FREE and week.rivals[course] >> week.at[slot] & 1]
        for slot in slots:
            leaving = rivals if week.at[slot] == FREE or slot in rivals else [*rivals, slot]
            # Turned out often means hard to place: that one is better left where it is.
            pain = sum(1 + turned_out[week.at[gone]] for gone in leaving)
            rank = (pain, week.unseated[course][slot % week.rooms], random.random())
            if best is None or rank < best[0]:
                best = (rank, slot, leaving)
    assert best is not None, "the caller has seen to it that some period is possible"
    return best[1], best[2]


def _improve(
    week: Week, random: Random, iterations: int, on_progress: Progress, should_stop: Callable[[], bool]
) -> list[int]:
    """Anneal; gives the best week seen, as a copy of ``week.at``."""
    lectures = [slot for slot, course in enumerate(week.at) if course != FREE]
    best, best_cost = week.at.copy(), week.cost
    cooling = (_COLDEST / _HOTTEST) ** (1 / max(1, iterations))
    temperature = _HOTTEST
    report_every = max(1, iterations // _REPORTS)
    for iteration in range(iterations):
        if best_cost == 0:
            break
        if iteration % _STEPS_BETWEEN_LOOKS == 0 and should_stop():
            raise SearchStopped("stopped while improving")
        if iteration % report_every == 0:
            on_progress(f"improving: cost {best_cost}", _PLACING_SHARE + (1 - _PLACING_SHARE) * iteration / iterations)
        temperature *= cooling
        place = int(random.random() * len(lectures))
        here, there = lectures[place], int(random.random() * week.slots)
        if not _may_change(week, here, there):
            continue
        before = week.cost
        _change(week, here, there)
        if week.cost > before and random.random() >= math.exp((before - week.cost) / temperature):
            _change(week, there, here)
            continue
        if week.at[here] == FREE:
            lectures[place] = there
        if week.cost < best_cost:
            best, best_cost = week.at.copy(), week.cost
    on_progress(f"improving: cost {best_cost}", 1.0)
    return best


def _may_change(week: Week, here: int, there: int) -> bool:
    """Whether a lecture can go to another slot, and what stands there come back, with no rule broken."""
    course, other = week.at[here], week.at[there]
    if course == other:
        return False
    one, two = here // week.rooms, there // week.rooms
    if one == two:
        return True
    if other == FREE:
        return week.fits(course, two)
    return week.fits(course, two, 1 << other) and week.fits(other, one, 1 << course)


def _change(week: Week, here: int, there: int) -> None:
    course = week.take(here)
    other = FREE if week.at[there] == FREE else week.take(there)
    week.put(course, there)
    if other != FREE:
        week.put(other, here)
