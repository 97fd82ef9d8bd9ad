"""How far each recurring task got: polls, recoveries, purges, snapshots. What health and metrics tell of."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, text

RECOVERY = "job_recovery"
"""The task of bringing back lost claims, of whoever does it: Dagster's sensor or a worker."""

DAILY = 86_400.0
"""Seconds between two successes of what is done once a day."""


@dataclass(frozen=True)
class Progress:
    """A task as it last succeeded."""

    task: str
    rows_total: int
    """Rows that it dealt with since the table was made; never less than before."""

    succeeded_at: datetime | None
    every_seconds: float | None
    """How often it is to succeed; none when that is not expected of it."""

    paused: bool
    """Whether it was turned off on purpose."""

    age_seconds: float
    """Since it succeeded, or since it is expected to; by the database's clock."""

    @property
    def allowed_seconds(self) -> float | None:
        """The age from which on it is overdue: two rounds may be missed, of a daily task two hours."""
        if self.every_seconds is None:
            return None
        return self.every_seconds + min(2 * self.every_seconds + 30, 7_200)

    @property
    def is_overdue(self) -> bool:
        """Whether it should have succeeded by now."""
        allowed = self.allowed_seconds
        return allowed is not None and not self.paused and self.age_seconds > allowed


def note_success(connection: Connection, task: str, rows: int = 0, *, every: float | None = None) -> None:
    """Note that a task has done what it had to; the caller commits.

    Args:
        connection: to the database.
        task: which.
        rows: how many it dealt with.
        every: seconds after which it is to succeed again; as before when not given.
    """
    connection.execute(
        text("""
            INSERT INTO outbox.upkeep AS known (task, rows_total, succeeded_at, every_seconds)
            VALUES (:task, :rows, clock_timestamp(), :every)
            ON CONFLICT (task) DO UPDATE
            SET rows_total = known.rows_total + excluded.rows_total, succeeded_at = excluded.succeeded_at,
                every_seconds = coalesce(excluded.every_seconds, known.every_seconds), paused = false
        """),
        {"task": task, "rows": rows, "every": every},
    )


def expect(connection: Connection, tasks: Mapping[str, float], *, paused: Iterable[str] = ()) -> None:
    """Note which tasks are to succeed how often (seconds), and which of them are turned off; the caller commits.

    One that never succeeds is then seen, too.
    """
    connection.execute(
        text("""
            INSERT INTO outbox.upkeep AS known (task, every_seconds, paused)
            SELECT task, every, task = ANY (CAST(:paused AS text[]))
            FROM unnest(CAST(:tasks AS text[]), CAST(:every AS float8[])) AS expected (task, every) ORDER BY task
            ON CONFLICT (task) DO UPDATE
            SET every_seconds = excluded.every_seconds, paused = excluded.paused,
                expected_since = CASE WHEN known.paused AND NOT excluded.paused OR known.every_seconds IS NULL
                                      THEN clock_timestamp() ELSE known.expected_since END
        """),
        {"tasks": list(tasks), "every": [float(every) for every in tasks.values()], "paused": list(paused)},
    )


def forget(connection: Connection, tasks: Iterable[str]) -> None:
    """Expect these tasks no more; the caller commits."""
    connection.execute(
        text("UPDATE outbox.upkeep SET every_seconds = NULL WHERE task = ANY (:tasks)"), {"tasks": list(tasks)}
    )


def all_progress(connection: Connection) -> dict[str, Progress]:
    """Every task that ever succeeded or is to, by name."""
    rows = connection.execute(
        text("""
            SELECT task, rows_total, succeeded_at, every_seconds, paused,
                   extract(epoch FROM clock_timestamp() - greatest(succeeded_at, expected_since))::float8 AS age_seconds
            FROM outbox.upkeep ORDER BY task
        """)
    )
    return {row.task: Progress(**row._mapping) for row in rows}
