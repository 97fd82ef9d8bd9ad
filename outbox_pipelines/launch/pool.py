"""One bounded connection pool for each process and database of Dagster's."""

import contextlib
import os
import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, create_engine, event, exc
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry, NullPool, PoolProxiedConnection

from outbox_pipelines.database.url import dagster_storage_url
from outbox_pipelines.launch.internals import give_tokens, set_pg_statement_timeout

# A server that went silent (power, network) is noticed in about a minute, not in hours; a value in the URL wins.
_LIBPQ_DEFAULTS = {
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}


@dataclass(frozen=True)
class Pool:
    """What tells one pool of this process from another."""

    url: str
    auth_provider: str
    pool_size: int
    pool_overflow: int
    pool_timeout_seconds: int
    ping_after_idle_seconds: int
    recycle_seconds: int = -1
    statement_timeout_milliseconds: int | None = None


_lock = threading.Lock()
_engines: dict[Pool, Engine] = {}


class _Thread(threading.local):
    """What a thread holds of this module's pools."""

    def __init__(self) -> None:
        self.holds: set[ConnectionPoolEntry] = set()


_thread = _Thread()

_rolls_back = False
"""Whether new connections begin a transaction that nothing commits; see :func:`rolled_back`."""


@contextmanager
def rolled_back() -> Iterator[None]:
    """Undo at the end what the block writes through this process's pools; nobody else ever sees it.

    Dagster's statements run with autocommit. Each connection that is opened inside the block
    is told BEGIN behind the driver's back, which then has nothing to commit, and is closed at the end.
    For a process with one thread. A pool's compiled statements stay.
    """
    global _rolls_back
    for engine in _engines.values():
        engine.dispose()
    _rolls_back = True
    try:
        yield
    finally:
        _rolls_back = False
        for engine in _engines.values():
            engine.dispose()


def is_rolling_back() -> bool:
    """Whether the caller is inside :func:`rolled_back`."""
    return _rolls_back


def _after_fork_in_child() -> None:
    # The parent's sessions stay the parent's: the child forgets them without a word to the server.
    global _lock
    _lock = threading.Lock()
    for engine in _engines.values():
        engine.dispose(close=False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def holds_connection() -> bool:
    """Whether this thread has a connection of any of the pools."""
    return bool(_thread.holds)


def engine_of(pool: Pool, token_provider: Any) -> Engine:
    """The engine of this process for ``pool``, made when first asked for."""
    with _lock:
        if pool not in _engines:
            _engines[pool] = _make_engine(pool, token_provider)
        return _engines[pool]


def _make_engine(pool: Pool, token_provider: Any) -> Engine:
    url = dagster_storage_url(pool.url)
    limits: dict[str, Any] = {"poolclass": NullPool}
    if pool.pool_size:
        limits = {
            "pool_size": pool.pool_size,
            "max_overflow": pool.pool_overflow,
            "pool_timeout": pool.pool_timeout_seconds,
            "pool_recycle": pool.recycle_seconds,
            # The connection used last is used next, so that a quiet process lets the others go stale together.
            "pool_use_lifo": True,
        }
    engine = create_engine(
        url,
        # What Dagster's own storages run with.
        isolation_level="AUTOCOMMIT",
        # Two queries for each new connection otherwise; Dagster has no hstore.
        use_native_hstore=False,
        connect_args={name: value for name, value in _LIBPQ_DEFAULTS.items() if name not in url.query},
        **limits,
    )
    if token_provider is not None:
        give_tokens(engine, token_provider)
    timeout = pool.statement_timeout_milliseconds
    if timeout is not None:

        @event.listens_for(engine, "connect")
        def set_timeout(connection: DBAPIConnection, _record: ConnectionPoolEntry) -> None:
            set_pg_statement_timeout(connection, timeout)

    @event.listens_for(engine, "connect")
    def begin_rehearsal(connection: DBAPIConnection, _record: ConnectionPoolEntry) -> None:
        if _rolls_back:
            with contextlib.closing(connection.cursor()) as cursor:
                cursor.execute("BEGIN")

    @event.listens_for(engine, "checkin")
    def note_idle(_connection: DBAPIConnection | None, record: ConnectionPoolEntry) -> None:
        record.info["idle_since"] = time.monotonic()
        record.info.pop("held_among", set()).discard(record)

    @event.listens_for(engine, "checkout")
    def ping_when_in_doubt(
        connection: DBAPIConnection, record: ConnectionPoolEntry, _proxy: PoolProxiedConnection
    ) -> None:
        idle_since = record.info.get("idle_since")
        if idle_since is None:
            return
        idled = time.monotonic() - idle_since >= pool.ping_after_idle_seconds
        try:
            alive = not (idled or _has_something_to_read(connection)) or engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error:
            alive = False
        if not alive:
            # Those that idled beside it are no better: all are made anew.
            raise exc.InvalidatePoolError("the server closed this connection while it idled")

    @event.listens_for(engine, "checkout")
    def note_holder(_connection: DBAPIConnection, record: ConnectionPoolEntry, _proxy: PoolProxiedConnection) -> None:
        _thread.holds.add(record)
        # Another thread may return it.
        record.info["held_among"] = _thread.holds

    return engine


def _has_something_to_read(connection: Any) -> bool:
    """Whether the server has sent something to a session that asked for nothing: most often, that it closes.

    A server that restarts or ends a session closes the socket at once, so this finds it
    without a round trip.
    """
    if not hasattr(select, "poll"):
        # Windows: a connection is tried after idling alone.
        return False
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))
