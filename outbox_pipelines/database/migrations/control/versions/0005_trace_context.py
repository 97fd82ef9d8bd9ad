"""Whose trace a message belongs to."""

from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    # NOT VALID, since the rows that are there have none: there is nothing to read them for while the table is locked.
    op.execute("""
        ALTER TABLE outbox.messages
        ADD COLUMN trace_context text,
        ADD CONSTRAINT messages_trace_context_check CHECK (length(trace_context) <= 100) NOT VALID
    """)
