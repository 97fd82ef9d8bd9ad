"""The application's own transaction, as it has it in its hand."""

from sqlalchemy import Connection
from sqlalchemy.orm import Session, scoped_session

Transaction = Session | scoped_session[Session] | Connection
"""A SQLAlchemy session or connection. (An ``AsyncSession`` offers its ``Session`` through ``run_sync``.)"""


def connection_of(session: Transaction) -> Connection:
    """The connection that the transaction runs on."""
    return session if isinstance(session, Connection) else session.connection()
