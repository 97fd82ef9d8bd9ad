"""Rows that leave a tenant's outbox otherwise than by being delivered or buried are noted."""

from alembic import context, op

from outbox_pipelines.database.quoting import driver_identifier

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    table = f"{driver_identifier(context.config.attributes['schema'])}.ml_outbox"
    # A flush says of its transaction that it settles: for its rows the condition is all that it costs.
    triggers = {
        "outbox_note_deleted": f"""
            AFTER DELETE ON {table} FOR EACH ROW
            WHEN (current_setting('outbox.settles', true) IS DISTINCT FROM 'yes')
        """,
        "outbox_note_truncated": f"BEFORE TRUNCATE ON {table} FOR EACH STATEMENT",
    }
    for name, event in triggers.items():
        for statement in (
            f"DROP TRIGGER IF EXISTS {name} ON {table}",
            f"CREATE TRIGGER {name} {event} EXECUTE FUNCTION outbox.note_removed()",
        ):
            # Not as text(): a colon in the schema's name is not a parameter.
            op.get_bind().exec_driver_sql(statement)
