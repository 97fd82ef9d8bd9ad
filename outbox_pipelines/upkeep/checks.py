"""What is to be said of a backlog: found, or not, with the numbers and the remedy. No Dagster here."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import TYPE_CHECKING

from sqlalchemy import Connection, text

from outbox_pipelines.upkeep.snapshot import ALL_TENANTS
from outbox_pipelines.wording import counted, spoken_seconds

if TYPE_CHECKING:
    # Imported where it is used: every run loads the code location, and few need it.
    import pandas as pd

_NAMED = 5
"""Tenants or kinds that a description names."""

GROWTH_HOURS = 1.0

TRAINING_WAIT_REMEDY = "`outbox tenants list` says why; look at the failed runs of tenant_flush"
JOB_WAIT_REMEDY = "see that the kind's sensor is on, and give it more consumers, or start workers"


class Severity(StrEnum):
    """How soon somebody is to look."""

    WARN = "warn"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """The answer of one check."""

    passed: bool
    text: str
    """What was found, whose, and what to do."""

    severity: Severity = Severity.WARN
    numbers: Mapping[str, float | int] = field(default_factory=dict)


def target_of(name: str, targets: Mapping[str, float], default: float) -> float:
    """The seconds that a tenant or kind may wait: of the first pattern that fits its name."""
    return next((seconds for pattern, seconds in targets.items() if fnmatchcase(name, pattern)), default)


def oldest_wait(
    waits: Mapping[str, float], noun: str, *, targets: Mapping[str, float], default: float, remedy: str
) -> Finding:
    """Whether nobody waits for longer than its target.

    Args:
        waits: the oldest wait in seconds, by tenant or kind.
        noun: what one of these is.
        targets: seconds by pattern of names (``*`` and ``?``), the first that fits counts.
        default: seconds for all others.
        remedy: what to do.
    """
    late = []
    for name, waited in waits.items():
        allowed = target_of(name, targets, default)
        if waited > allowed:
            late.append((waited / allowed, name, waited, allowed))
    longest = float(max(waits.values(), default=0.0))
    numbers = {"oldest wait (s)": round(longest, 1), "late": len(late)}
    if not late:
        return Finding(True, f"the oldest wait is {spoken_seconds(longest)}, within every target", numbers=numbers)
    late.sort(reverse=True)
    told = named(
        f"{name} for {spoken_seconds(waited)} (target {spoken_seconds(allowed)})" for _, name, waited, allowed in late
    )
    # Three times its target is no hiccup.
    severity = Severity.ERROR if late[0][0] >= 3 else Severity.WARN
    what = f"{counted(len(late), noun)} waited longer than the target allows"
    return Finding(False, f"{what}: {told}; {remedy}", severity, numbers)


def expired_leases(connection: Connection, *, older_than: float) -> Finding:
    """Whether recovery gets on: no lease may have ended longer ago than two of its rounds.

    Args:
        connection: to the database.
        older_than: seconds.
    """
    row = connection.execute(
        text("""
            SELECT count(*) AS leases, min(message_id) AS first,
                   extract(epoch FROM clock_timestamp() - min(lease_expires_at))::float8 AS oldest
            FROM outbox.messages
            WHERE state = 'Processing' AND lease_expires_at < clock_timestamp() - make_interval(secs => :seconds)
        """),
        {"seconds": older_than},
    ).one()
    numbers = {"expired leases": int(row.leases), "oldest (s)": round(row.oldest or 0.0, 1)}
    if not row.leases:
        return Finding(True, f"no lease ended more than {spoken_seconds(older_than)} ago", numbers=numbers)
    return Finding(
        False,
        f"{counted(row.leases, 'lease')} ended up to {spoken_seconds(row.oldest)} ago and nobody took the jobs back "
        f"(the first is message {row.first}): turn job_recovery_sensor on, see that the daemon runs, or start a worker "
        "(`outbox worker`), which recovers as well",
        Severity.ERROR,
        numbers,
    )


def nothing_new_died(rows: "pd.DataFrame", column: str, *, died: str, noun: str, remedy: str) -> Finding:
    """Whether nothing was taken out of the flow since the last snapshot.

    Args:
        rows: the last snapshot of tenants or kinds.
        column: with their names.
        died: the column with how many did.
        noun: one of them.
        remedy: what to do.
    """
    dead = rows[rows[died] > 0]
    count = int(dead[died].sum())
    if not count:
        return Finding(True, f"no new {noun} since the last look", numbers={f"new {noun}s": 0})
    most = dead.sort_values(died, ascending=False)
    told = named(f"{name}: {int(number):,}" for name, number in zip(most[column], most[died], strict=True))
    return Finding(False, f"{counted(count, f'new {noun}')} ({told}); {remedy}", numbers={f"new {noun}s": count})


def keeps_up(connection: Connection, table: str, *, remedy: str) -> Finding:
    """Whether, over the last hour, no less left than came, unless little waits.

    Args:
        connection: to the database.
        table: ``training_backlog`` or ``job_backlog``.
        remedy: what to do.
    """
    total = f"tenant_id = '{ALL_TENANTS}'" if table == "training_backlog" else "kind = ''"
    waiting = "waiting" if table == "training_backlog" else "waiting + publishing + published + processing"
    rows = connection.execute(
        text(f"""
            SELECT {waiting} AS waiting, arrived, drained, seconds FROM outbox.{table}
            WHERE {total} AND taken_at >= clock_timestamp() - make_interval(secs => 3600 * :hours)
              AND seconds IS NOT NULL ORDER BY taken_at
        """),
        {"hours": GROWTH_HOURS},
    ).all()
    seconds = sum(row.seconds for row in rows)
    arrived, drained = sum(row.arrived for row in rows), sum(row.drained for row in rows)
    numbers = {"arrived": arrived, "drained": drained, "hours": round(seconds / 3600, 2)}
    if seconds < GROWTH_HOURS * 3600 / 2:
        return Finding(True, f"too early to say: {spoken_seconds(seconds)} of snapshots", numbers=numbers)
    facts = f"in {spoken_seconds(seconds)} {arrived:,} came and {drained:,} left"
    if drained >= arrived or not rows[-1].waiting:
        return Finding(True, facts, numbers=numbers)
    # Each look found more than the one before: it grows, and is not a wave that passes.
    grew = all(later.waiting > earlier.waiting for earlier, later in pairwise(rows))
    return Finding(
        False,
        f"{facts}: {rows[-1].waiting:,} wait, and the backlog grows; {remedy}",
        Severity.ERROR if grew and len(rows) > 2 else Severity.WARN,
        numbers,
    )


def retention_keeps_up(oldest: datetime | None, now: datetime, *, days: float, noun: str, remedy: str) -> Finding:
    """Whether nothing is kept much longer than it is to be: a purge a day, and a day's grace.

    Args:
        oldest: when the oldest began to age; none when none is of about that age.
        now: of the database.
        days: the retention.
        noun: one of them.
        remedy: what to do.
    """
    age = (now - oldest).total_seconds() / 86_400 if oldest is not None else 0.0
    numbers = {"oldest (days)": round(age, 2), "retention (days)": days}
    if age <= days + 2:
        found = "none is that old" if oldest is None else f"the oldest is {age:.1f} days old"
        return Finding(True, f"{noun}s are kept for {days:g} days; {found}", numbers=numbers)
    return Finding(
        False,
        f"the oldest {noun} is {age:.1f} days old, and they are kept for {days:g} days: {remedy}",
        Severity.WARN,
        numbers,
    )


def named(names: Iterable[str]) -> str:
    """A few of the names, and how many more there are."""
    found = list(names)
    more = f" and {len(found) - _NAMED:,} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more
