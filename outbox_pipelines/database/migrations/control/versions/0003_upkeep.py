"""Upkeep: how far each task got, the history of backlogs, and rows removed by hand."""

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    # The ledgers are written in order of time, so a summary for each few pages finds their old lines, at a
    # thousandth of a B-tree's cost to those who write.
    op.execute("""
        CREATE INDEX job_attempts_finished ON outbox.job_attempts
        USING brin (finished_at) WITH (pages_per_range = 16, autosummarize = on)
    """)
    op.execute("""
        CREATE INDEX training_ledger_delivered ON outbox.training_ledger
        USING brin (delivered_at) WITH (pages_per_range = 16, autosummarize = on)
    """)
    op.execute("""
        CREATE TABLE outbox.upkeep (
            task         text PRIMARY KEY,
            rows_total   bigint NOT NULL DEFAULT 0 CHECK (rows_total >= 0),
            succeeded_at timestamptz,
            detail       text
        )
    """)
    op.execute("""
        CREATE TABLE outbox.pruned_runs (
            run_id    text PRIMARY KEY,
            pruned_at timestamptz NOT NULL DEFAULT clock_timestamp()
        )
    """)
    # A line for each tenant or kind that has anything, and one for all together.
    op.execute("""
        CREATE TABLE outbox.training_backlog (
            taken_at            timestamptz NOT NULL,
            tenant_id           uuid NOT NULL,
            waiting             bigint NOT NULL,
            oldest_wait_seconds double precision,
            in_flight           bigint NOT NULL,
            dead_letters        bigint NOT NULL,
            died                bigint NOT NULL,
            arrived             bigint,
            drained             bigint,
            seconds             double precision,
            PRIMARY KEY (taken_at, tenant_id)
        )
    """)
    op.execute("""
        CREATE TABLE outbox.job_backlog (
            taken_at            timestamptz NOT NULL,
            kind                text NOT NULL,
            waiting             bigint NOT NULL,
            scheduled           bigint NOT NULL,
            publishing          bigint NOT NULL,
            published           bigint NOT NULL,
            processing          bigint NOT NULL,
            parked              bigint NOT NULL,
            expired_leases      bigint NOT NULL,
            failed              bigint NOT NULL,
            gave_up             bigint NOT NULL,
            oldest_wait_seconds double precision,
            arrived             bigint,
            drained             bigint,
            seconds             double precision,
            PRIMARY KEY (taken_at, kind)
        )
    """)
