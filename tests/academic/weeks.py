"""Instances for tests: the competition's toy, its larger ones, and random ones that have a timetable."""

from pathlib import Path
from random import Random

from outbox_pipelines.academic.instance import Course, Curriculum, Instance, Room, parse_instance

# The example of the competition's own description of the format.
TOY = """Name: Toy
Courses: 4
Rooms: 3
Days: 5
Periods_per_day: 4
Curricula: 2
Constraints: 8

COURSES:
SceCosC Ocra 3 3 30
ArcTec Indaco 3 2 42
TecCos Rosa 5 4 40
Geotec Scarlatti 5 4 18

ROOMS:
rA\t32
rB\t50
rC\t40

CURRICULA:
Cur1 3 SceCosC ArcTec TecCos
Cur2 2 TecCos Geotec

UNAVAILABILITY_CONSTRAINTS:
TecCos 2 0
TecCos 2 1
TecCos 3 2
TecCos 3 3
ArcTec 4 0
ArcTec 4 1
ArcTec 4 2
ArcTec 4 3

END.
"""


def competition_instance(name: str) -> Instance:
    """An instance of ITC-2007, track 3, from the file beside this one."""
    return parse_instance((Path(__file__).parent / f"{name}.ctt").read_text(encoding="utf-8"))


def solvable_instance(seed: int) -> Instance:
    """A small random instance, made around a timetable that keeps its rules."""
    random = Random(seed)
    days, periods, rooms = random.randint(1, 4), random.randint(1, 5), random.randint(1, 3)
    times = [(day, period) for day in range(days) for period in range(periods)]
    held: dict[str, set[tuple[int, int]]] = {}
    seats_left = dict.fromkeys(times, rooms)
    for number in range(random.randint(1, 8)):
        open_times = [time for time in times if seats_left[time]]
        if open_times:
            held[f"c{number}"] = set(random.sample(open_times, random.randint(1, min(4, len(open_times)))))
            for time in held[f"c{number}"]:
                seats_left[time] -= 1
    curricula, teachers = [], {name: f"t-{name}" for name in held}
    for number in range(random.randint(0, 4)):
        apart = _apart(held, random)
        curricula.append(Curriculum(f"q{number}", apart))
    for name in _apart(held, random):
        teachers[name] = "one for several"
    return Instance(
        f"random {seed}",
        days,
        periods,
        tuple(
            Course(name, teachers[name], len(at), random.randint(0, days), random.randint(0, 60))
            for name, at in held.items()
        ),
        tuple(Room(f"r{number}", random.randint(0, 60)) for number in range(rooms)),
        tuple(curricula),
        frozenset(
            (name, *time) for name, at in held.items() for time in times if time not in at and random.random() < 0.4
        ),
    )


def _apart(held: dict[str, set[tuple[int, int]]], random: Random) -> tuple[str, ...]:
    """One or more courses of which no two are held at the same time."""
    taken: set[tuple[int, int]] = set()
    chosen = []
    for name in random.sample(sorted(held), len(held)):
        if not held[name] & taken:
            chosen.append(name)
            taken |= held[name]
    return tuple(chosen[: random.randint(1, len(chosen))])
