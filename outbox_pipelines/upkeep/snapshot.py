"""What waits, of whom, for how long, and whether it grows: looked up, compared with last time, and noted.

Rates come from what happened since the last snapshot: rows that left are counted in the ledgers, and what
arrived is what left plus what there is more of.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from math import isnan
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sqlalchemy import Connection, Engine, text

from outbox_pipelines.training.backlog import Standing, count_outboxes, look

ALL_TENANTS = UUID(int=0)
"""Stands for all tenants together in the history, also when none of them has anything."""

if TYPE_CHECKING:
    # Imported where it is used: every run loads the code location, and few need it.
    import pandas as pd

LIVE_COLUMNS = ("waiting", "scheduled", "publishing", "published", "processing")
"""A job is in exactly one of these states until it is completed."""

TRAINING_COLUMNS = ("waiting", "oldest_wait_seconds", "in_flight", "dead_letters", "died", "arrived", "drained")
JOB_COLUMNS = (
    *LIVE_COLUMNS,
    "parked",
    "expired_leases",
    "failed",
    "gave_up",
    "oldest_wait_seconds",
    "arrived",
    "drained",
)


@dataclass(frozen=True)
class Snapshot:
    """A backlog at one instant of the database's clock."""

    taken_at: datetime
    seconds: float | None
    """Since the last snapshot; none when there was none."""

    rows: "pd.DataFrame"
    """A row for each tenant or kind that has anything; see the two functions."""

    total: "pd.Series"
    """The numbers of all together."""


def take_training(engine: Engine) -> Snapshot:
    """Look at all tenants' outboxes: a few statements for each 500 tenants, each in a short transaction.

    The frame's columns: ``tenant``, ``standing``, ``waiting`` rows, ``oldest_wait_seconds``,
    ``in_flight`` (1 while a run has the tenant's lease), ``dead_letters``, ``died`` (dead letters since
    the last snapshot), ``arrived`` and ``drained`` rows since then (dead letters are drained, too),
    ``arrival_rate`` and ``drain_rate`` (per second), ``seconds_to_drain`` (none when it grows).
    """
    with engine.connect() as connection:
        last = _last(connection, "training_backlog")
    backlog = look(engine)
    counts = count_outboxes(engine, [entry.tenant.schema for entry in backlog.tenants], died_since=last)
    with engine.connect() as connection:
        delivered = _numbers(
            connection,
            """
                SELECT tenant_id, sum(cardinality(row_ids)) FROM outbox.training_ledger
                WHERE delivered_at > :last AND delivered_at <= :now GROUP BY tenant_id
            """,
            {"last": last, "now": backlog.asked_at},
        )
        known = "SELECT tenant_id, waiting, dead_letters FROM outbox.training_backlog WHERE taken_at = :last"
        before = {row[0]: row[1:] for row in connection.execute(text(known), {"last": last})}
    lines = []
    for entry in backlog.tenants:
        tenant_id = entry.tenant.tenant_id
        found = counts.get(entry.tenant.schema)
        waited, dead_before = before.get(tenant_id, (0, 0))
        # An outbox that cannot be read just now, since somebody has locked it, has not become empty.
        waiting, dead, died = (waited, dead_before, 0) if found is None else (found.waiting, found.dead, found.died)
        drained = delivered.get(tenant_id, 0) + died
        line = {
            "tenant_id": tenant_id,
            "tenant": entry.tenant.name,
            "standing": str(entry.standing),
            "waiting": waiting,
            "oldest_wait_seconds": _since(entry.oldest, backlog.asked_at) if waiting else None,
            "in_flight": int(entry.standing is Standing.LEASED),
            "dead_letters": dead,
            "died": died,
            "arrived": max(0, waiting - waited + drained),
            "drained": drained,
        }
        if any(line[name] for name in TRAINING_COLUMNS):
            lines.append(line)
    names = ("tenant_id", "tenant", "standing")
    snapshot = _finished(lines, names, TRAINING_COLUMNS, backlog.asked_at, last, live=("waiting",))
    with engine.begin() as connection:
        _note(connection, "training_backlog", "tenant_id", "uuid", snapshot, TRAINING_COLUMNS, total=ALL_TENANTS)
    return snapshot


def take_jobs(engine: Engine) -> Snapshot:
    """Look at the messages of all kinds, at one instant.

    The frame's columns: ``kind``; messages by state: ``waiting`` (due, nobody at it), ``scheduled`` (for
    later), ``publishing``, ``published``, ``processing``; of these ``parked`` and ``expired_leases``;
    ``failed`` (given up and still kept), ``gave_up`` (given up since the last snapshot),
    ``oldest_wait_seconds``, ``arrived`` and ``drained`` since then, ``arrival_rate`` and
    ``drain_rate`` (per second), ``seconds_to_drain`` (none when it grows).
    """
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection, connection.begin():
        last = _last(connection, "job_backlog")
        now: datetime = connection.execute(text("SELECT now()")).scalar_one()
        before = _numbers(
            connection,
            """
                SELECT kind, waiting + scheduled + publishing + published + processing
                FROM outbox.job_backlog WHERE taken_at = :last
            """,
            {"last": last},
        )
        counted = count_jobs(connection, since=last)
    lines = []
    for row in counted:
        live = sum(getattr(row, name) for name in LIVE_COLUMNS)
        arrived = max(0, live - before.get(row.kind, 0) + row.drained)
        lines.append({**asdict(row), "arrived": arrived})
    snapshot = _finished(lines, ("kind",), JOB_COLUMNS, now, last, live=LIVE_COLUMNS)
    with engine.begin() as connection:
        _note(connection, "job_backlog", "kind", "text", snapshot, JOB_COLUMNS, total="")
    return snapshot


@dataclass(frozen=True)
class KindCounts:
    """The messages of a kind; for the names see :func:`take_jobs`."""

    kind: str
    waiting: int
    scheduled: int
    publishing: int
    published: int
    processing: int
    parked: int
    expired_leases: int
    failed: int
    drained: int
    gave_up: int
    oldest_wait_seconds: float | None


def count_jobs(connection: Connection, *, since: datetime | None) -> list[KindCounts]:
    """Count the messages of each kind that has any, or that is served.

    Args:
        connection: in a transaction, whose begin is the instant that is meant.
        since: completed messages are counted from then on; none when not given.
    """
    return [KindCounts(**row._mapping) for row in connection.execute(text(_JOBS), {"last": since})]


# Each part is answered by an index that holds the few live messages, or those of a span of time.
_JOBS = """
    WITH pending AS (
        SELECT kind, count(*) FILTER (WHERE available_at <= now()) AS waiting,
               count(*) FILTER (WHERE available_at > now()) AS scheduled, min(available_at) AS oldest
        FROM outbox.messages WHERE state = 'Pending' GROUP BY kind
    ), parked AS (
        SELECT kind, count(*) AS parked FROM outbox.messages WHERE parked GROUP BY kind
    ), flying AS (
        SELECT kind, count(*) FILTER (WHERE state = 'Publishing') AS publishing,
               count(*) FILTER (WHERE state = 'Published') AS published,
               count(*) FILTER (WHERE state = 'Processing') AS processing,
               count(*) FILTER (WHERE lease_expires_at <= now()) AS expired_leases,
               min(available_at) FILTER (WHERE state <> 'Processing') AS oldest
        FROM outbox.messages WHERE state IN ('Publishing', 'Published', 'Processing') GROUP BY kind
    ), failed AS (
        SELECT kind, count(*) AS failed FROM outbox.messages WHERE outcome = 'failed' GROUP BY kind
    ), ended AS (
        SELECT kind, count(*) AS drained, count(*) FILTER (WHERE outcome = 'failed') AS gave_up
        FROM outbox.messages WHERE state = 'Completed' AND completed_at > :last AND completed_at <= now() GROUP BY kind
    ), kinds AS (
        SELECT kind FROM outbox.job_servers UNION SELECT kind FROM pending UNION SELECT kind FROM flying
        UNION SELECT kind FROM failed UNION SELECT kind FROM ended
    )
    SELECT kind, coalesce(waiting, 0) AS waiting, coalesce(scheduled, 0) AS scheduled,
           coalesce(publishing, 0) AS publishing, coalesce(published, 0) AS published,
           coalesce(processing, 0) AS processing, coalesce(parked, 0) AS parked,
           coalesce(expired_leases, 0) AS expired_leases, coalesce(failed, 0) AS failed,
           coalesce(drained, 0) AS drained, coalesce(gave_up, 0) AS gave_up,
           CASE WHEN least(pending.oldest, flying.oldest) <= now()
                THEN extract(epoch FROM now() - least(pending.oldest, flying.oldest))::float8 END AS oldest_wait_seconds
    FROM kinds LEFT JOIN pending USING (kind) LEFT JOIN parked USING (kind) LEFT JOIN flying USING (kind)
         LEFT JOIN failed USING (kind) LEFT JOIN ended USING (kind)
    ORDER BY kind
"""


def forget_history(connection: Connection, *, days: float) -> int:
    """Delete snapshots older than so many days; the caller commits.

    Returns:
        How many lines went.
    """
    return sum(
        int(
            connection.execute(
                text(f"DELETE FROM outbox.{table} WHERE taken_at < clock_timestamp() - make_interval(secs => :age)"),
                {"age": timedelta(days=days).total_seconds()},
            ).rowcount
        )
        for table in ("training_backlog", "job_backlog")
    )


def history(connection: Connection, table: str, *, hours: float) -> "pd.DataFrame":
    """The totals of the last hours, the oldest first: ``taken_at`` and the columns of a snapshot.

    Args:
        connection: to the database.
        table: ``training_backlog`` or ``job_backlog``.
        hours: how far back.
    """
    import pandas as pd

    total = f"tenant_id = '{ALL_TENANTS}'" if table == "training_backlog" else "kind = ''"
    columns = TRAINING_COLUMNS if table == "training_backlog" else JOB_COLUMNS
    rows = connection.execute(
        text(f"""
            SELECT taken_at, {", ".join(columns)} FROM outbox.{table}
            WHERE {total} AND taken_at > clock_timestamp() - make_interval(secs => 3600 * :hours) ORDER BY taken_at
        """),
        {"hours": hours},
    )
    return pd.DataFrame(rows.all(), columns=["taken_at", *columns])


def latest(connection: Connection, table: str) -> "pd.DataFrame | None":
    """The last snapshot's lines as they were noted, with ``taken_at``; none when there is none yet.

    Args:
        connection: to the database.
        table: ``training_backlog``, with the tenants' names as ``tenant``, or ``job_backlog``, with ``kind``.
    """
    import pandas as pd

    columns: tuple[str, ...]
    if table == "training_backlog":
        columns = ("tenant", *TRAINING_COLUMNS)
        source = "outbox.training_backlog JOIN (SELECT tenant_id, name AS tenant FROM outbox.tenants) AS named "
        source += "USING (tenant_id)"
    else:
        columns = ("kind", *JOB_COLUMNS)
        source = "outbox.job_backlog"
    last = _last(connection, table)
    if last is None:
        return None
    rows = connection.execute(
        text(f"SELECT taken_at, {', '.join(columns)} FROM {source} WHERE taken_at = :last AND {columns[0]} <> ''"),
        {"last": last},
    )
    return pd.DataFrame(rows.all(), columns=["taken_at", *columns])


def _last(connection: Connection, table: str) -> datetime | None:
    found: datetime | None = connection.execute(text(f"SELECT max(taken_at) FROM outbox.{table}")).scalar_one()
    return found


def _numbers(connection: Connection, statement: str, parameters: dict[str, object]) -> dict[object, int]:
    return {row[0]: int(row[1]) for row in connection.execute(text(statement), parameters)}


def _since(then: datetime | None, now: datetime) -> float | None:
    return None if then is None else max(0.0, (now - then).total_seconds())


def _finished(
    lines: list[dict[str, object]],
    names: Sequence[str],
    columns: Sequence[str],
    now: datetime,
    last: datetime | None,
    *,
    live: Sequence[str],
) -> Snapshot:
    """Add the sum of all, and the rates."""
    import pandas as pd

    frame = pd.DataFrame(lines, columns=[*names, *columns])
    numbers = frame[list(columns)].astype(float)
    sums = numbers.sum()
    sums["oldest_wait_seconds"] = numbers["oldest_wait_seconds"].max()
    all_of_them = pd.concat([numbers, sums.to_frame().T], ignore_index=True)
    seconds = None if last is None else (now - last).total_seconds()
    if not seconds:
        # Nothing to compare with.
        all_of_them[["arrived", "drained"]] = float("nan")
    all_of_them["arrival_rate"] = all_of_them["arrived"] / (seconds or 1)
    all_of_them["drain_rate"] = all_of_them["drained"] / (seconds or 1)
    waiting = all_of_them[list(live)].sum(axis=1)
    shrinking = all_of_them["drain_rate"] - all_of_them["arrival_rate"]
    left = (waiting / shrinking).where(shrinking > 0)
    all_of_them["seconds_to_drain"] = left.mask(waiting == 0, 0.0)
    rows = pd.concat([frame[list(names)], all_of_them.iloc[:-1]], axis=1)
    return Snapshot(now, seconds, rows, all_of_them.iloc[-1])


def _note(
    connection: Connection,
    table: str,
    key: str,
    key_type: str,
    snapshot: Snapshot,
    columns: Sequence[str],
    *,
    total: object,
) -> None:
    """Append the snapshot to its history; the line of the sum is there even when nothing else is."""
    lines = [*snapshot.rows.to_dict("records"), {**snapshot.total.to_dict(), key: total}]
    given = [key, *columns]
    types = {name: "float8" if name == "oldest_wait_seconds" else "bigint" for name in columns}
    values = {
        name: [_plain(line[name], whole=name != "oldest_wait_seconds" and name != key) for line in lines]
        for name in given
    }
    arrays = ", ".join(f"CAST(:{name} AS {types.get(name, key_type)}[])" for name in given)
    connection.execute(
        text(f"""
            INSERT INTO outbox.{table} (taken_at, seconds, {", ".join(given)})
            SELECT :taken_at, :seconds, line.* FROM unnest({arrays}) AS line
            -- Two who look at the same instant see the same.
            ON CONFLICT DO NOTHING
        """),
        {"taken_at": snapshot.taken_at, "seconds": snapshot.seconds, **values},
    )


def _plain(value: Any, *, whole: bool) -> Any:
    """A number as the driver takes it; nothing for "not a number"."""
    if isinstance(value, float) and isnan(value):
        return None
    return int(value) if whole else value
