"""Counters that never fall, though the ledgers they come from are purged.

What a ledger holds from before a known instant is rolled up into ``outbox.totals``; what is younger is
counted when it is asked for. Together they count each line of a ledger once, from the moment it is
committed. The publisher adds to the totals itself, in its own transaction.

How an instant comes to be known: it is read from the clock, and then a transaction id is taken. Whoever
wrote a line with an earlier time had its transaction id before (a ledger's line is always written by a
statement that has first changed a row), so when no transaction up to that id runs any more, every line
from before the instant is committed, or never will be.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Engine, text

from outbox_pipelines.database.totals import BUCKETS, add_sql, bucket_sql

PROCESSED = "processed"
"""Attempts that ended, by kind and outcome, with the seconds that they ran."""

DELIVERED = "delivered"
"""Training rows delivered, by the tenant's label."""

CALLED = "called"
"""Calls that delivered rows, with the seconds that they took."""

UNKNOWN_KIND = "_unknown"
"""The kind of attempts from before the ledger knew it."""

OTHER_TENANTS = "_other"
"""The label of tenants beyond the number that have one of their own."""

_AT_ONCE = timedelta(days=1)
"""How much of a ledger one transaction rolls up."""

_RAN = "extract(epoch FROM finished_at - started_at)"


@dataclass(frozen=True)
class _Ledger:
    name: str
    table: str
    time: str
    """The column with the instant of a line."""

    query: str
    """What a part of it adds to the totals."""

    def part(self, *, ends: bool) -> str:
        """The query for what is from ``:since`` on, and before ``:before`` where the part ends."""
        span = f"{self.time} >= :since" + (f" AND {self.time} < :before" if ends else "")
        return self.query.format(table=self.table, span=span)


_ATTEMPTS = _Ledger(
    "attempts",
    "outbox.job_attempts",
    "finished_at",
    f"""
        SELECT '{PROCESSED}' AS metric, coalesce(kind, '{UNKNOWN_KIND}') AS label, outcome,
               {bucket_sql(_RAN)} AS bucket, count(*) AS count, sum(greatest(0, {_RAN}))::float8 AS seconds
        FROM {{table}} WHERE {{span}} GROUP BY 1, 2, 3, 4
    """,
)
_DELIVERIES = _Ledger(
    "deliveries",
    "outbox.training_ledger",
    "delivered_at",
    f"""
        SELECT '{DELIVERED}' AS metric, label, '' AS outcome, 0 AS bucket,
               sum(cardinality(row_ids))::bigint AS count, 0::float8 AS seconds
        FROM {{table}} JOIN outbox.metric_tenants USING (tenant_id) WHERE {{span}} GROUP BY 2
        UNION ALL
        SELECT '{CALLED}', '', '', {bucket_sql("call_seconds")}, count(*), sum(greatest(0, call_seconds))
        FROM {{table}} JOIN outbox.metric_tenants USING (tenant_id) WHERE {{span}} GROUP BY 4
    """,
)
_LEDGERS = (_ATTEMPTS, _DELIVERIES)


@dataclass
class Total:
    """One series of a metric."""

    count: int = 0
    seconds: float = 0.0
    """The sum of what was measured; nothing for a metric without."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    """How many took up to so many seconds, and longer than the bucket before; the last is of all that took longer."""

    def __iadd__(self, other: "Total") -> "Total":
        self.count += other.count
        self.seconds += other.seconds
        self.buckets = [ours + theirs for ours, theirs in zip(self.buckets, other.buckets, strict=True)]
        return self


Totals = dict[tuple[str, str, str], Total]
"""By metric, label and outcome."""


def roll_up(engine: Engine, *, tenants: int) -> None:
    """Add to the totals what the ledgers hold that is not in them; safe beside others who do so.

    Args:
        engine: the database.
        tenants: how many tenants get a label of their own; a label once given stays.
    """
    for ledger in _LEDGERS:
        while _advance(engine, ledger, tenants):
            pass
        _mark(engine, ledger)


def read_totals(connection: Connection) -> Totals:
    """All totals as of now.

    Args:
        connection: in a transaction of isolation REPEATABLE READ, so that all is of one instant.
    """
    totals: Totals = defaultdict(Total)
    reached_until = text("SELECT ledger, coalesce(until, '1970-01-01') FROM outbox.totals_reached")
    reached: dict[str, datetime] = dict(iter(connection.execute(reached_until)))
    known = text("SELECT metric, label, outcome, bucket, count, seconds FROM outbox.totals")
    rows: list[Sequence[Any]] = list(connection.execute(known))
    for ledger in _LEDGERS:
        rows += connection.execute(text(ledger.part(ends=False)), {"since": reached[ledger.name]})
    for metric, label, outcome, bucket, count, seconds in rows:
        total = totals[metric, label, outcome]
        total.count += count
        total.seconds += seconds
        total.buckets[bucket] += count
    return totals


def tenant_labels(connection: Connection) -> dict[object, str]:
    """The label of each tenant that has been given one, by its id."""
    return dict(iter(connection.execute(text("SELECT tenant_id, label FROM outbox.metric_tenants"))))


def _advance(engine: Engine, ledger: _Ledger, tenants: int) -> bool:
    """Roll up the next part of a ledger; says whether there may be another."""
    with engine.begin() as connection:
        # Of several who roll up one does it; the others have nothing to do. The lock is also what keeps
        # two from giving more labels than there are.
        row = connection.execute(
            text("""
                SELECT until, next_until,
                       coalesce(next_xid < pg_snapshot_xmin(pg_current_snapshot()), false) AS settled
                FROM outbox.totals_reached WHERE ledger = :ledger FOR UPDATE SKIP LOCKED
            """),
            {"ledger": ledger.name},
        ).one_or_none()
        if row is None:
            return False
        since, before = row.until, row.next_until
        if row.settled and since is None:
            # A table's oldest line is looked for once.
            oldest = connection.execute(text(f"SELECT min({ledger.time}) FROM {ledger.table}")).scalar_one()
            since = min(oldest or before, before)
        if row.settled:
            before = min(before, since + _AT_ONCE)
        span = {"since": since, "before": before} if row.settled else None
        if ledger is _DELIVERIES:
            _label_tenants(connection, tenants, span)
        if span is None:
            return False
        connection.execute(text(add_sql(ledger.part(ends=True))), span)
        connection.execute(
            text("""
                UPDATE outbox.totals_reached
                SET until = :before, next_until = nullif(next_until, :before),
                    next_xid = CASE WHEN next_until > :before THEN next_xid END
                WHERE ledger = :ledger
            """),
            {"before": before, "ledger": ledger.name},
        )
        return bool(before < row.next_until)


def _label_tenants(connection: Connection, most: int, span: dict[str, datetime] | None) -> None:
    """Give their label for good to tenants that have none: those registered, and those whose rows are now counted.

    Rows of a tenant without a label are not counted yet, so no series ever loses them to another.
    """
    delivering = "UNION SELECT tenant_id FROM outbox.training_ledger WHERE delivered_at >= :since"
    delivering += " AND delivered_at < :before"
    connection.execute(
        text(f"""
            INSERT INTO outbox.metric_tenants (tenant_id, label)
            SELECT tenant_id, CASE
                WHEN name IS NOT NULL
                     AND place + (SELECT count(*) FROM outbox.metric_tenants WHERE label <> :other) <= :most THEN name
                ELSE :other END
            FROM (
                SELECT tenant_id, name, row_number() OVER (ORDER BY created_at, tenant_id) AS place
                FROM (SELECT tenant_id FROM outbox.tenants {delivering if span else ""}) AS seen
                     LEFT JOIN outbox.tenants USING (tenant_id)
                WHERE tenant_id NOT IN (SELECT tenant_id FROM outbox.metric_tenants)
            ) AS new
        """),
        {"most": most, "other": OTHER_TENANTS, **(span or {})},
    )


def _mark(engine: Engine, ledger: _Ledger) -> None:
    """Note the instant up to which the ledger can be rolled up next."""
    with engine.begin() as connection:
        # Two statements: this transaction gets its id in the second, so that no older one is from after the instant.
        now = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
        connection.execute(
            text("""
                UPDATE outbox.totals_reached SET next_until = :now, next_xid = pg_current_xact_id()
                WHERE ledger = :ledger AND next_until IS NULL
            """),
            {"now": now, "ledger": ledger.name},
        )
