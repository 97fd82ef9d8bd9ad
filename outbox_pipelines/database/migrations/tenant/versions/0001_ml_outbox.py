"""A tenant's training outbox and its dead letters.

Like every migration of a tenant's schema it can be repeated, and then makes what is missing.
"""

from alembic import context, op

from outbox_pipelines.database.quoting import driver_identifier

revision = "0001"
down_revision = None


def upgrade() -> None:
    schema = driver_identifier(context.config.attributes["schema"])
    # Rows live for seconds: vacuum by count, not by share, and without pausing, or the
    # reader walks over ever more dead index entries to reach the oldest row.
    statements = (
        f"""
        CREATE TABLE IF NOT EXISTS {schema}.ml_outbox (
            id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            example    jsonb NOT NULL
                       CONSTRAINT ml_outbox_example_is_an_object CHECK (jsonb_typeof(example) = 'object'),
            created_at timestamptz NOT NULL DEFAULT now(),
            attempts   integer NOT NULL DEFAULT 0,
            last_error text
        ) WITH (
            autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 5000,
            autovacuum_vacuum_cost_delay = 0
        )
        """,
        f"""
        CREATE TABLE IF NOT EXISTS {schema}.ml_outbox_dead (
            id         bigint PRIMARY KEY,
            example    jsonb NOT NULL,
            created_at timestamptz NOT NULL,
            attempts   integer NOT NULL,
            reason     text NOT NULL,
            run_id     text NOT NULL,
            died_at    timestamptz NOT NULL DEFAULT clock_timestamp()
        )
        """,
    )
    for statement in statements:
        # Not as text(): a colon in the schema's name is not a parameter.
        op.get_bind().exec_driver_sql(statement)
