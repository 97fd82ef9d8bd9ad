"""Engines and their pools: the only place that opens connections for this package."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, create_engine, event, exc
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry

from outbox_pipelines.database.error_text import first_line
from outbox_pipelines.database.url import engine_url
from outbox_pipelines.errors import OutboxError
from outbox_pipelines.settings import Pooler, Settings

OLDEST_SERVER = (14, 0)


class DatabaseUnreachable(OutboxError):
    """No connection could be made."""


def open_engine(
    settings: Settings, url: str, *, application_name: str, pool_size: int | None = None, trusted_seconds: float = 0.0
) -> Engine:
    """A pooled engine for ``url``; nothing is connected yet.

    Time-outs are start-up options of the connection. Behind a pooler in transaction mode
    these would be lost or refused, so there each transaction sets them for itself, and no
    statement is prepared.

    Args:
        settings: pool and time-outs.
        url: any PostgreSQL URL; the driver is set to psycopg 3.
        application_name: shown in ``pg_stat_activity``.
        pool_size: connections at most; the setting's value when not given.
        trusted_seconds: a connection that was in use so shortly ago is not tried out with a query of its own
            before it is used again. Whoever trusts one must get over its being dead.
    """
    options = (
        f"-c statement_timeout={int(settings.statement_timeout * 1000)} "
        f"-c lock_timeout={int(settings.lock_timeout * 1000)}"
    )
    connect_args: dict[str, Any] = {
        "connect_timeout": settings.connect_timeout,
        "application_name": application_name,
        # A statement that comes again is prepared; that lives in the session, too.
        "prepare_threshold": None if settings.database_pooler is Pooler.TRANSACTION else 5,
        # A server that went silent (power, network) is noticed in about a minute, not in hours.
        "keepalives_idle": 30,
        "keepalives_interval": 10,
        "keepalives_count": 3,
        # The same where data are on their way and nobody acknowledges them, which keepalives do not watch.
        "tcp_user_timeout": 60_000,
    }
    behind_pooler = settings.database_pooler is Pooler.TRANSACTION
    address = engine_url(url)
    if not behind_pooler:
        connect_args["options"] = " ".join(filter(None, [options, str(address.query.get("options", ""))]))
    engine = create_engine(
        address,
        connect_args=connect_args,
        pool_size=pool_size or settings.pool_size,
        max_overflow=0,
        pool_pre_ping=not trusted_seconds,
        pool_timeout=settings.connect_timeout,
        # psycopg asks the server for hstore's OID on each new connection otherwise.
        use_native_hstore=False,
        # Parameters hold payloads, and errors end up in logs.
        hide_parameters=True,
    )
    if trusted_seconds:
        _try_out_rested(engine, trusted_seconds)
    if behind_pooler:
        _set_timeouts_per_transaction(engine, settings)
    return engine


def _try_out_rested(engine: Engine, trusted_seconds: float) -> None:
    @event.listens_for(engine, "checkin")
    def note(_connection: object, record: ConnectionPoolEntry) -> None:
        record.info["used_at"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def try_out(connection: DBAPIConnection, record: ConnectionPoolEntry, _proxy: object) -> None:
        # A new one has no such note.
        if time.monotonic() - record.info.get("used_at", math.inf) <= trusted_seconds:
            return
        try:
            engine.dialect.do_ping(connection)
        except psycopg.Error as error:
            # The pool makes another.
            raise exc.InvalidatePoolError from error


def _set_timeouts_per_transaction(engine: Engine, settings: Settings) -> None:
    statement = (
        f"SET LOCAL statement_timeout = {int(settings.statement_timeout * 1000)}; "
        f"SET LOCAL lock_timeout = {int(settings.lock_timeout * 1000)}"
    )

    @event.listens_for(engine, "begin")
    def set_timeouts(connection: Connection) -> None:
        connection.exec_driver_sql(statement)


def for_single_statements(engine: Engine, settings: Settings) -> Engine:
    """The engine for transactions that are one statement each, sparing BEGIN and COMMIT.

    Behind a pooler in transaction mode they are real transactions all the same, since that
    is where their time-outs are set.
    """
    if settings.database_pooler is Pooler.TRANSACTION:
        return engine
    return engine.execution_options(isolation_level="AUTOCOMMIT")


@contextmanager
def explained(engine: Engine) -> Iterator[None]:
    """Turn a failure to connect into :class:`DatabaseUnreachable`, which says where to and why."""
    try:
        yield
    except exc.TimeoutError as error:
        raise DatabaseUnreachable(
            f"no free connection to {describe(engine)} within {engine.pool.timeout()} s: "  # type: ignore[attr-defined]
            "raise OUTBOX_POOL_SIZE or lower OUTBOX_TENANTS_IN_PARALLEL"
        ) from error
    except exc.ProgrammingError as error:
        if error.statement is not None:
            raise
        # The driver's word on the URL itself, for example an option that it does not know.
        raise DatabaseUnreachable(
            f"cannot connect to {describe(engine)}: {first_line(error.orig)}. Check OUTBOX_DATABASE_URL"
        ) from error
    except exc.OperationalError as error:
        if not error.connection_invalidated and error.statement is not None:
            raise
        raise DatabaseUnreachable(
            f"cannot connect to {describe(engine)}: {first_line(error.orig)}. "
            "Check OUTBOX_DATABASE_URL and that the server runs"
        ) from error


def check_server(connection: Connection) -> None:
    """Refuse a server that is too old for the SQL of this package."""
    version = connection.dialect.server_version_info or (0,)
    if version < OLDEST_SERVER:
        raise DatabaseUnreachable(
            f"the server is PostgreSQL {'.'.join(map(str, version))}; version {OLDEST_SERVER[0]} or newer is needed"
        )


def describe(engine: Engine) -> str:
    """The database's address for people: never the password."""
    url = engine.url
    host = url.host or url.query.get("host") or "the local socket"
    port = f":{url.port}" if url.port else ""
    return f"database {url.database!r} on {host}{port}"
