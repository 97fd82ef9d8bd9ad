"""Totals for metrics, what upkeep is expected, and rows that were removed by hand."""

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    # The ledger outlives the messages: without its own kind an old attempt would have none.
    op.execute("ALTER TABLE outbox.job_attempts ADD COLUMN kind text")
    # One row for each bucket of each series of a metric. Roll-ups change it again and again, on its page (HOT).
    op.execute("""
        CREATE TABLE outbox.totals (
            metric  text NOT NULL,
            label   text NOT NULL,
            outcome text NOT NULL,
            bucket  integer NOT NULL,
            count   bigint NOT NULL CHECK (count >= 0),
            seconds double precision NOT NULL CHECK (seconds >= 0),
            PRIMARY KEY (metric, label, outcome, bucket)
        ) WITH (fillfactor = 50)
    """)
    # Up to where a ledger is in the totals. What is from "next_until" on may still be uncommitted in a
    # transaction that is not newer than "next_xid".
    op.execute("""
        CREATE TABLE outbox.totals_reached (
            ledger     text PRIMARY KEY,
            until      timestamptz,
            next_until timestamptz,
            next_xid   xid8
        )
    """)
    op.execute("INSERT INTO outbox.totals_reached (ledger) VALUES ('attempts'), ('deliveries')")
    op.execute("CREATE TABLE outbox.metric_tenants (tenant_id uuid PRIMARY KEY, label text NOT NULL)")
    op.execute("""
        ALTER TABLE outbox.upkeep
            ADD COLUMN every_seconds double precision,
            ADD COLUMN paused boolean NOT NULL DEFAULT false,
            ADD COLUMN expected_since timestamptz NOT NULL DEFAULT clock_timestamp()
    """)
    op.execute("""
        CREATE TABLE outbox.removed_rows (
            tenant_id  uuid NOT NULL,
            row_id     bigint NOT NULL,
            how        text NOT NULL CHECK (how IN ('deleted', 'truncated', 'discarded')),
            removed_by text NOT NULL DEFAULT session_user,
            removed_at timestamptz NOT NULL DEFAULT clock_timestamp()
        )
    """)
    op.execute("CREATE INDEX removed_rows_row ON outbox.removed_rows (tenant_id, row_id)")
    # Fired where a row leaves an outbox and it was not a delivery. With its owner's rights: whoever may
    # delete there need not be allowed anything here.
    op.execute("""
        CREATE FUNCTION outbox.note_removed() RETURNS trigger LANGUAGE plpgsql
        SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
        BEGIN
            IF TG_OP = 'TRUNCATE' THEN
                EXECUTE format('INSERT INTO outbox.removed_rows (tenant_id, row_id, how)
                                SELECT tenant_id, id, ''truncated'' FROM %I.ml_outbox, outbox.tenants
                                WHERE schema_name = $1', TG_TABLE_SCHEMA) USING TG_TABLE_SCHEMA;
            ELSE
                INSERT INTO outbox.removed_rows (tenant_id, row_id, how)
                SELECT tenant_id, OLD.id, 'deleted' FROM outbox.tenants WHERE schema_name = TG_TABLE_SCHEMA;
            END IF;
            RETURN NULL;
        END
        $$
    """)
