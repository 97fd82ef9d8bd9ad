"""How far each task of upkeep got, for health and metrics."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, text


@dataclass(frozen=True)
class Progress:
    """A task as it last succeeded."""

    task: str
    rows_total: int
    """Rows that it dealt with since the table was made; never less than before."""

    succeeded_at: datetime | None
    age_seconds: float | None
    """Since then, by the database's clock."""


def note_success(connection: Connection, task: str, rows: int) -> None:
    """Note that a task has done what it had to, with so many rows; the caller commits."""
    connection.execute(
        text("""
            INSERT INTO outbox.upkeep AS known (task, rows_total, succeeded_at)
            VALUES (:task, :rows, clock_timestamp())
            ON CONFLICT (task) DO UPDATE
            SET rows_total = known.rows_total + excluded.rows_total, succeeded_at = excluded.succeeded_at
        """),
        {"task": task, "rows": rows},
    )


def all_progress(connection: Connection) -> dict[str, Progress]:
    """Every task that ever succeeded, by name."""
    rows = connection.execute(
        text("""
            SELECT task, rows_total, succeeded_at,
                   extract(epoch FROM clock_timestamp() - succeeded_at)::float8 AS age_seconds
            FROM outbox.upkeep ORDER BY task
        """)
    )
    return {row.task: Progress(**row._mapping) for row in rows}
