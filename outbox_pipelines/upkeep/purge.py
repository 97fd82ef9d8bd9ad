"""Deletes rows that are older than their age, in small transactions that stand in nobody's way.

Why it is safe, in READ COMMITTED:

- A row is deleted by a statement that locks it first and then says again what makes it
  deletable: its state and its time. A message that somebody put back meanwhile is not Completed
  any more, and stays.
- Rows that another transaction has locked are passed by (SKIP LOCKED): purgers never wait for
  each other, nor for a claim, and so never deadlock. What was passed by is found by the next purge.
- Nothing is remembered between two transactions but the keys to try: a purge that is killed
  has deleted whole batches, and the next goes on with what is left.
- Every instant that decides is the database's.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from sqlalchemy import Connection, Engine

from outbox_pipelines.database.quoting import driver_identifier

BATCH_ROWS = 500
"""Rows deleted in one transaction at most."""

_READ_AHEAD = 40
"""Batches whose keys are read at once: to find the oldest rows again for each batch would walk over the dead ones."""

Key = Sequence[Any]


@dataclass(frozen=True)
class Aged:
    """Rows that may go at some age, in one table."""

    noun: str
    """One of them, for people."""

    table: str
    """With its schema, as the driver takes it (see :func:`driver_identifier`)."""

    key: tuple[tuple[str, str], ...]
    """The columns that tell a row from all others, each with its type."""

    at: str
    """The column with the time from which it ages."""

    condition: str = "true"
    """What else makes it one of these rows."""


COMPLETED_JOBS = Aged(
    "completed message", "outbox.messages", (("message_id", "bigint"),), "completed_at", "state = 'Completed'"
)
JOB_ATTEMPTS = Aged(
    "job ledger line", "outbox.job_attempts", (("message_id", "bigint"), ("claim", "integer")), "finished_at"
)
DELIVERIES = Aged("training ledger line", "outbox.training_ledger", (("delivery_id", "uuid"),), "delivered_at")


def dead_letters_of(schema: str) -> Aged:
    """The dead letters of the tenant whose schema this is."""
    return Aged("dead letter", f"{driver_identifier(schema)}.ml_outbox_dead", (("id", "bigint"),), "died_at")


@dataclass
class Purged:
    """What a purge did."""

    rows: int = 0
    batches: int = 0
    """Transactions that deleted something."""

    largest_batch: int = 0
    left: int = 0
    """Rows that another transaction held all the time: the next purge takes them."""

    seconds: float = 0.0

    def __iadd__(self, other: "Purged") -> Self:
        self.rows += other.rows
        self.batches += other.batches
        self.largest_batch = max(self.largest_batch, other.largest_batch)
        self.left += other.left
        self.seconds += other.seconds
        return self


def purge(
    engine: Engine,
    aged: Aged,
    *,
    since: datetime | None,
    before: datetime,
    pause: float,
    keys: Iterable[Sequence[Key]] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Purged:
    """Delete the rows of a span of time.

    Args:
        engine: the database.
        aged: which rows.
        since: the span's begin, which belongs to it; from the oldest on when not given.
        before: its end, which does not belong to it.
        pause: seconds between two transactions.
        keys: delete only these of them, in chunks; all when not given.
        sleep: waits for the pause.
    """
    began = time.monotonic()
    done = Purged()
    for chunk in _chunks(engine, aged, since, before, done) if keys is None else keys:
        for begin in range(0, len(chunk), BATCH_ROWS):
            if done.batches and pause:
                sleep(pause)
            with engine.begin() as connection:
                deleted = _delete(connection, aged, chunk[begin : begin + BATCH_ROWS], since, before)
            done.rows += deleted
            done.batches += bool(deleted)
            done.largest_batch = max(done.largest_batch, deleted)
    with engine.connect() as connection:
        done.left = _count(connection, aged, since, before)
    done.seconds = time.monotonic() - began
    return done


def oldest(connection: Connection, aged: Aged, *, before: datetime | None = None) -> datetime | None:
    """The time of the oldest of these rows, of those before an instant if one is given; none when there is none."""
    limit = f"{aged.at} < %(before)s AND " if before is not None else ""
    found: datetime | None = connection.exec_driver_sql(
        f"SELECT min({aged.at}) FROM {aged.table} WHERE {limit}{aged.condition}", {"before": before}
    ).scalar_one()
    return found


def _chunks(
    engine: Engine, aged: Aged, since: datetime | None, before: datetime, done: Purged
) -> Iterator[Sequence[Key]]:
    """Keys of the rows that are left, until there are none, or nothing but such as somebody else holds."""
    columns = ", ".join(name for name, _type in aged.key)
    while True:
        rows_before = done.rows
        with engine.connect() as connection:
            keys = connection.exec_driver_sql(
                f"SELECT {columns} FROM {aged.table} WHERE {_span(aged, since)} LIMIT {_READ_AHEAD * BATCH_ROWS}",
                {"since": since, "before": before},
            ).all()
        if not keys:
            return
        yield keys
        if done.rows == rows_before:
            return


def _delete(connection: Connection, aged: Aged, keys: Sequence[Key], since: datetime | None, before: datetime) -> int:
    names = [name for name, _type in aged.key]
    arrays = ", ".join(f"%({name})s::{kind}[]" for name, kind in aged.key)
    columns = ", ".join(names)
    done = connection.exec_driver_sql(
        f"""
            WITH old AS MATERIALIZED (
                SELECT {columns} FROM {aged.table}
                WHERE ({columns}) IN (SELECT * FROM unnest({arrays})) AND {_span(aged, since)}
                FOR UPDATE SKIP LOCKED
            )
            DELETE FROM {aged.table} AS aged USING old
            WHERE {" AND ".join(f"aged.{name} = old.{name}" for name in names)}
        """,
        {
            **{name: [key[place] for key in keys] for place, name in enumerate(names)},
            "since": since,
            "before": before,
        },
    )
    return int(done.rowcount)


def _count(connection: Connection, aged: Aged, since: datetime | None, before: datetime) -> int:
    count: int = connection.exec_driver_sql(
        f"SELECT count(*) FROM {aged.table} WHERE {_span(aged, since)}", {"since": since, "before": before}
    ).scalar_one()
    return count


def _span(aged: Aged, since: datetime | None) -> str:
    begin = f"AND {aged.at} >= %(since)s " if since is not None else ""
    return f"{aged.at} < %(before)s {begin}AND {aged.condition}"
