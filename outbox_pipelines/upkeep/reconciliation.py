"""Whether the training outboxes and the ledger agree: every row that left one is accounted for, once.

A row leaves an outbox with its line in the ledger, or into the dead letters, in one statement; whatever else
takes one out is noted by a trigger in ``outbox.removed_rows``. So a row can be unaccounted for only where the
trigger is missing or disabled, and what can disagree besides is a row that was put back by hand.
"""

from datetime import timedelta

from sqlalchemy import Connection, Engine, text

from outbox_pipelines.database.migrate import TENANT_TRIGGERS
from outbox_pipelines.training.backlog import Backlog, Standing, delivered_and_waiting, look
from outbox_pipelines.upkeep.checks import Finding, Severity, named
from outbox_pipelines.wording import counted, spoken

WINDOW = timedelta(hours=1)
"""How far back deliveries are compared with all others."""

LINES_AT_MOST = 100_000
"""Lines of the ledger that are compared, the youngest first."""


def reconcile(engine: Engine) -> Finding:
    """Compare the deliveries of the last hour with the ledger, and what waits with what was delivered."""
    backlog = look(engine)
    waiting = delivered_and_waiting(engine, [entry.tenant for entry in backlog.waiting])
    with engine.connect() as connection:
        lines, twice = _delivered_twice(connection)
        unwatched = _unwatched(connection, backlog)
        removed = connection.execute(
            text("SELECT count(*) FROM outbox.removed_rows WHERE removed_at > clock_timestamp() - :window"),
            {"window": WINDOW},
        ).scalar_one()
    numbers = {
        "calls compared": lines,
        "rows delivered twice": sum(twice.values()),
        "rows delivered and waiting": sum(waiting.values()),
        "rows removed by hand": int(removed),
        "tenants not watched": len(unwatched),
    }
    flaws = []
    names: dict[object, str] = {entry.tenant.tenant_id: entry.tenant.name for entry in backlog.tenants}
    if twice:
        told = named(f"{names.get(tenant, tenant)}: {rows:,}" for tenant, rows in twice.items())
        flaws.append(
            f"{counted(sum(twice.values()), 'row')} delivered twice ({told}): somebody put rows back by hand; "
            "`outbox audit` shows both deliveries"
        )
    if waiting:
        told = named(f"{tenant.name}: {rows:,}" for tenant, rows in waiting.items())
        flaws.append(
            f"{counted(sum(waiting.values()), 'row')} delivered and waiting again ({told}): put back by hand, and "
            "about to be sent once more; delete them if that is not wanted"
        )
    if unwatched:
        flaws.append(
            f"{counted(len(unwatched), 'tenant')} not watched ({named(unwatched)}): a trigger is missing or disabled, "
            "so that a row deleted by hand leaves no trace; `outbox migrate` makes what is missing, and ALTER TABLE "
            "ml_outbox ENABLE TRIGGER USER enables it"
        )
    if flaws:
        return Finding(False, "; ".join(flaws), Severity.ERROR if twice or waiting else Severity.WARN, numbers)
    by_hand = f"; {counted(int(removed), 'row')} removed by hand, and noted" if removed else ""
    facts = f"{counted(lines, 'call')} of the last {spoken(WINDOW)} compared: each row left once{by_hand}"
    return Finding(True, facts, numbers=numbers)


def _delivered_twice(connection: Connection) -> tuple[int, dict[object, int]]:
    """How many lines were compared, and how many of their rows other lines have as well, by tenant."""
    young = f"""
        young AS MATERIALIZED (
            SELECT tenant_id, delivery_id, row_ids, first_id FROM outbox.training_ledger
            WHERE delivered_at > clock_timestamp() - :window ORDER BY delivered_at DESC LIMIT {LINES_AT_MOST}
        )
    """
    lines = connection.execute(text(f"WITH {young} SELECT count(*) FROM young"), {"window": WINDOW}).scalar_one()
    rows = connection.execute(
        text(f"""
            WITH {young}, sent AS (
                SELECT tenant_id, row_id, count(*) AS times FROM young, unnest(row_ids) AS row_id GROUP BY 1, 2
            ), older AS (
                -- Ids grow, so that the lines before have few that reach into the young ones' range.
                SELECT ledger.tenant_id, row_id
                FROM (SELECT tenant_id, min(first_id) AS first FROM young GROUP BY 1) AS span
                JOIN outbox.training_ledger AS ledger
                     ON ledger.tenant_id = span.tenant_id AND ledger.last_id >= span.first,
                     unnest(ledger.row_ids) AS row_id
                WHERE ledger.delivery_id NOT IN (SELECT delivery_id FROM young)
            )
            SELECT tenant_id, count(*) FROM sent
            WHERE times > 1 OR (tenant_id, row_id) IN (SELECT tenant_id, row_id FROM older)
            GROUP BY tenant_id ORDER BY count(*) DESC
        """),
        {"window": WINDOW},
    )
    return int(lines), dict(iter(rows))


def _unwatched(connection: Connection, backlog: Backlog) -> list[str]:
    """Tenants whose outbox is there and does not note what is removed by hand."""
    watched = connection.execute(
        text("""
            SELECT space.nspname FROM pg_trigger AS trigger
            JOIN pg_class AS class ON class.oid = trigger.tgrelid
            JOIN pg_namespace AS space ON space.oid = class.relnamespace
            WHERE trigger.tgname = ANY (:names) AND class.relname = 'ml_outbox' AND trigger.tgenabled IN ('O', 'A')
            GROUP BY space.nspname HAVING count(*) = cardinality(:names)
        """),
        {"names": list(TENANT_TRIGGERS)},
    )
    known = set(watched.scalars())
    there = (entry for entry in backlog.tenants if entry.standing not in {Standing.BROKEN, Standing.UNREADABLE})
    return [entry.tenant.name for entry in there if entry.tenant.schema not in known]


def forget_removed(connection: Connection, *, days: float) -> None:
    """Forget rows that were removed by hand longer ago than so many days; the caller commits."""
    connection.execute(
        text("DELETE FROM outbox.removed_rows WHERE removed_at < clock_timestamp() - :age"),
        {"age": timedelta(days=days)},
    )
