"""The registry of tenants, the training ledger and the ML service's last known health."""

from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    # Every turn renews a lease: the free space lets these updates stay on their page (HOT).
    op.execute("""
        CREATE TABLE outbox.tenants (
            tenant_id        uuid PRIMARY KEY,
            name             text NOT NULL UNIQUE,
            schema_name      text NOT NULL UNIQUE,
            paused           boolean NOT NULL DEFAULT false,
            lease_token      uuid,
            lease_expires_at timestamptz,
            lease_holder     text,
            failure_count    integer NOT NULL DEFAULT 0,
            failing_since    timestamptz,
            next_attempt_at  timestamptz,
            problem          text CHECK (problem IN ('unwell', 'misconfigured', 'broken')),
            last_error       text,
            last_error_details text,
            created_at       timestamptz NOT NULL DEFAULT now(),
            CHECK ((lease_token IS NULL) = (lease_expires_at IS NULL))
        ) WITH (fillfactor = 50)
    """)
    op.execute("""
        CREATE TABLE outbox.training_ledger (
            delivery_id  uuid PRIMARY KEY,
            tenant_id    uuid NOT NULL,
            batch_key    text NOT NULL,
            run_id       text NOT NULL,
            row_ids      bigint[] NOT NULL CHECK (cardinality(row_ids) > 0),
            first_id     bigint NOT NULL,
            last_id      bigint NOT NULL,
            call_seconds double precision NOT NULL,
            delivered_at timestamptz NOT NULL DEFAULT clock_timestamp()
        )
    """)
    # "Who sent row 123": the batches of the tenant that span the id.
    op.execute("CREATE INDEX ON outbox.training_ledger (tenant_id, last_id, first_id)")
    op.execute("CREATE INDEX ON outbox.training_ledger (run_id)")
    op.execute("""
        CREATE TABLE outbox.ml_service_health (
            target     text PRIMARY KEY,
            reachable  boolean NOT NULL,
            detail     text NOT NULL,
            since      timestamptz NOT NULL DEFAULT clock_timestamp(),
            checked_at timestamptz NOT NULL DEFAULT clock_timestamp()
        )
    """)
