"""Rows of some age, for tests of upkeep."""

from datetime import UTC, date, datetime, timedelta

from sqlalchemy import Engine

from outbox_pipelines.database.quoting import driver_identifier, quote_identifier
from outbox_pipelines.tenants.registry import Tenant
from tests.jobs.messages import rows, run, value


def days_ago(engine: Engine, days: float) -> date:
    """The day of so many days ago, in UTC by the database's clock."""
    now: datetime = value(engine, "SELECT clock_timestamp()")
    return (now.astimezone(UTC) - timedelta(days=days)).date()


def complete(engine: Engine, count: int, *, days: float, kind: str = "work", outcome: str = "succeeded") -> None:
    """Messages that were completed so many days ago, at noon UTC, each with a line in the ledger."""
    run(
        engine,
        """
        WITH done AS (
            INSERT INTO outbox.messages
                (kind, job_id, payload, state, outcome, created_at, available_at, completed_at, claims, last_error)
            SELECT :kind, n::text, jsonb_build_object('n', n), 'Completed', :outcome, at.noon, at.noon, at.noon, 1,
                   CASE WHEN :outcome = 'failed' THEN 'no' END
            FROM generate_series(1, :count) AS n, LATERAL (SELECT
                (date_trunc('day', clock_timestamp() AT TIME ZONE 'UTC') - make_interval(days => :days)
                 + interval '12 hours') AT TIME ZONE 'UTC' AS noon) AS at
            RETURNING message_id, completed_at
        )
        INSERT INTO outbox.job_attempts (message_id, claim, attempt, run_id, outcome, started_at, finished_at)
        SELECT message_id, 1, 1, 'run', 'succeeded', completed_at, completed_at FROM done
        """,
        kind=kind,
        count=count,
        outcome=outcome,
        days=int(days),
    )


def completed(engine: Engine) -> int:
    """How many messages are completed."""
    return int(value(engine, "SELECT count(*) FROM outbox.messages WHERE state = 'Completed'"))


def attempts(engine: Engine) -> int:
    """How many lines the ledger of attempts has."""
    return int(value(engine, "SELECT count(*) FROM outbox.job_attempts"))


def bury(engine: Engine, tenant: Tenant, count: int, *, days: float) -> None:
    """Dead letters of so many days ago."""
    schema = driver_identifier(tenant.schema)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            f"""
            INSERT INTO {schema}.ml_outbox_dead (id, example, created_at, attempts, reason, run_id, died_at)
            SELECT nextval(pg_get_serial_sequence(%(table)s, 'id')), '{{"n": 1}}', now(), 1, 'no', 'run',
                   clock_timestamp() - make_interval(secs => %(seconds)s)
            FROM generate_series(1, %(count)s) AS n
            """,
            {"count": count, "seconds": days * 86_400, "table": f"{quote_identifier(tenant.schema)}.ml_outbox"},
        )


def deliver(engine: Engine, tenant: Tenant, ids: list[int], *, days: float = 0, run_id: str = "run") -> None:
    """A line in the ledger of deliveries."""
    run(
        engine,
        """
        INSERT INTO outbox.training_ledger
            (delivery_id, tenant_id, batch_key, run_id, row_ids, first_id, last_id, call_seconds, delivered_at)
        VALUES (gen_random_uuid(), :tenant, 'key', :run_id, :ids, :first, :last, 0.01,
                clock_timestamp() - make_interval(secs => :seconds))
        """,
        tenant=tenant.tenant_id,
        ids=ids,
        first=min(ids),
        last=max(ids),
        run_id=run_id,
        seconds=days * 86_400,
    )


def deliveries(engine: Engine) -> list[str]:
    """The runs that the ledger of deliveries names."""
    return [row.run_id for row in rows(engine, "SELECT run_id FROM outbox.training_ledger ORDER BY delivered_at")]
