"""Dagster's three PostgreSQL storages on one bounded connection pool for each process."""

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakSet

from dagster import DagsterEventType, DagsterInstance
from sqlalchemy import Connection, Engine, text

from outbox_pipelines.database.url import dagster_storage_url, render
from outbox_pipelines.launch.internals import (
    ASSET_CHECK_EVENTS,
    ASSET_EVENTS,
    ConfigurableClass,
    ConfigurableClassData,
    DagsterPostgresStorage,
    DagsterStorage,
    EventLogEntry,
    Field,
    IntSource,
    PostgresEventLogStorage,
    PostgresRunStorage,
    PostgresScheduleStorage,
    SqlEventLogStorageTable,
    UserConfigSchema,
    pg_config,
    pg_url_from_config,
    token_provider_of,
)
from outbox_pipelines.launch.pool import Pool, engine_of, holds_connection, is_rolling_back

_POOL_FIELDS: Mapping[str, tuple[int, str]] = {
    "pool_size": (5, "Connections that a process keeps open; 0 for no pool, as in Dagster's own storage."),
    "pool_overflow": (15, "Connections that a process opens beyond these when all are in use; closed after use."),
    "pool_timeout_seconds": (
        30,
        "Seconds that a caller waits for a free connection; Dagster then waits anew, six times before an error.",
    ),
    "ping_after_idle_seconds": (5, "Seconds of idling after which a connection is tried before it is used again."),
}

_MORE_TO_WRITE = ASSET_EVENTS | ASSET_CHECK_EVENTS
"""Events for which Dagster writes to more than one table."""

# As Dagster words them today: worded otherwise they do not wait, and nothing else changes.
_GAVE_NOTHING = 'Yielded output "result" of type "Nothing". (Type check passed).'
_EXECUTORS_WORDS = ("Executing steps in process", "Finished steps in process")

_INSERT_EVENT = SqlEventLogStorageTable.insert().inline()

_Storage = TypeVar("_Storage", bound="_Pooled")

_lock = threading.Lock()
_event_logs: "WeakSet[_EventLogStorage]" = WeakSet()
_created: set[str] = set()
"""URLs whose tables this process, or the one it was forked from, has seen."""


_together = False
"""Whether some events wait for the one that follows them; see :func:`events_together`."""


@contextmanager
def events_together() -> Iterator[None]:
    """Store some events with the next one, in one statement, inside the block.

    For a process that executes a run. Only such events wait as Dagster lets another follow within
    microseconds: what an executor in the run's own process says of itself, that resources are ready for
    the steps, and that a step gave nothing. A process that is killed in between lost no more than these words.
    """
    global _together
    _together = True
    try:
        yield
    finally:
        _together = False


def _is_followed_at_once(event: EventLogEntry) -> bool:
    told = event.dagster_event
    if told is None:
        return False
    if told.event_type is DagsterEventType.RESOURCE_INIT_SUCCESS:
        return True
    if told.event_type is DagsterEventType.STEP_OUTPUT:
        return told.message == _GAVE_NOTHING
    return told.event_type is DagsterEventType.ENGINE_EVENT and (told.message or "").startswith(_EXECUTORS_WORDS)


def _forget_held_back() -> None:
    global _lock
    _lock = threading.Lock()
    for log in _event_logs:
        # The parent tells of them.
        log._held_back = []


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_held_back)


class _Pooled:
    """What Dagster's three storages do alike here: use the process's engine, in the webserver too."""

    def __init__(self, url: str) -> None:
        self.found: set[tuple[str, ...]] = set()
        super().__init__(url, should_autocreate_tables=False)  # type: ignore[call-arg]  # what stands beside it

    def use(self, pool: Pool, token_provider: Any) -> None:
        self._pool = pool
        self._provider = token_provider
        self._pooled = engine_of(pool, token_provider)
        self._unpooled = engine_of(replace(pool, pool_size=0), token_provider)

    @property
    def _engine(self) -> Engine:
        """The engine for the next connection of this thread.

        Dagster asks for a second connection while it has one (whether a table exists, in the middle of
        a transaction). Threads that wait for a pool's last connections would wait for each other
        if these came from the pool too.
        """
        return self._unpooled if holds_connection() else self._pooled

    @_engine.setter
    def _engine(self, unused: Engine) -> None:
        """Take nothing of what Dagster's own constructor has made."""

    def optimize_for_webserver(self, statement_timeout: int, pool_recycle: int, max_overflow: int) -> None:
        """Take the webserver's limits on the pool that the three storages share.

        Args:
            statement_timeout: milliseconds.
            pool_recycle: seconds after which a connection is replaced.
            max_overflow: connections beyond the pool's.
        """
        # What the former pool keeps open would idle there for good.
        self._pooled.dispose()
        pool = replace(
            self._pool,
            recycle_seconds=pool_recycle,
            pool_overflow=max_overflow,
            statement_timeout_milliseconds=statement_timeout,
        )
        self.use(pool, self._provider)


def _remembers(*names: str) -> Callable[[type[_Storage]], type[_Storage]]:
    """Have a storage look only once for a table or column that is there.

    Dagster asks the catalog before nearly every look at runs, a quarter of a small run's time. What a
    migration has made stays; what is missing may be made at any time, and is looked for again.
    """

    def change(storage: type[_Storage]) -> type[_Storage]:
        for name in names:
            if hasattr(storage, name):
                setattr(storage, name, _remembering(name, getattr(storage, name)))
        return storage

    return change


def _remembering(name: str, look: Callable[..., bool]) -> Callable[..., bool]:
    @wraps(look)
    def remember(self: _Pooled, *arguments: Any) -> bool:
        key = (name, *(argument for argument in arguments if isinstance(argument, str)))
        if key not in self.found:
            if not look(self, *arguments):
                return False
            self.found.add(key)
        return True

    return remember


@_remembers(
    "has_run_stats_index_cols",
    "has_backfill_id_column",
    "has_bulk_actions_selector_cols",
    "has_bulk_action_job_name_column",
    "has_backfill_tags_table",
)
class _RunStorage(_Pooled, PostgresRunStorage):
    pass


@_remembers("has_table", "has_asset_key_col", "_has_asset_key_col_on_connection")
class _EventLogStorage(_Pooled, PostgresEventLogStorage):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._held_back: list[dict[str, Any]] = []
        """Events that the next statement of this storage takes with it; see :func:`events_together`."""
        _event_logs.add(self)

    def has_table(self, table_name: str) -> bool:
        """Whether a table is there. (Older releases look on a connection that they do not give back.)"""
        with self._connect() as connection:
            return bool(connection.dialect.has_table(connection, table_name))

    def store_event(self, event: EventLogEntry) -> None:
        """Store an event; one that is about no asset in a single statement.

        Dagster's own follows it by a NOTIFY, to which releases listened that are long gone.
        """
        if event.is_dagster_event and event.dagster_event_type in _MORE_TO_WRITE:
            super().store_event(event)
            return
        row = self._event_to_row(event)
        if _together and _is_followed_at_once(event):
            with _lock:
                self._held_back.append(row)
            return
        with self._taking_held_back() as held_back, super()._connect() as connection:
            # Built once: with the values in it, building and finding the compiled one takes longer than executing it.
            connection.execute(_INSERT_EVENT, [*held_back, row] if held_back else row)

    @contextmanager
    def _connect(self) -> Iterator[Connection]:
        # Whatever is asked or told, it comes after what was held back.
        with super()._connect() as connection:
            if self._held_back:
                with self._taking_held_back() as held_back:
                    connection.execute(_INSERT_EVENT, held_back)
            yield connection

    @contextmanager
    def _taking_held_back(self) -> Iterator[list[dict[str, Any]]]:
        """The events that were held back; they wait again if the block fails."""
        with _lock:
            taken, self._held_back = self._held_back, []
        try:
            yield taken
        except BaseException:
            with _lock:
                self._held_back = taken + self._held_back
            raise

    @contextmanager
    def index_transaction(self) -> Iterator[Connection]:
        # Its COMMIT is the driver's own, and would end the transaction that is to be rolled back.
        with self.index_connection() if is_rolling_back() else super().index_transaction() as connection:
            yield connection


@_remembers("_has_instigators_table", "_has_asset_daemon_asset_evaluations_table", "has_secondary_index_table")
class _ScheduleStorage(_Pooled, PostgresScheduleStorage):
    pass


def is_pooled(instance: DagsterInstance) -> bool:
    """Whether the instance keeps its events on a pool of this module."""
    return isinstance(instance.event_log_storage, _Pooled)


class PooledPostgresStorage(DagsterStorage, ConfigurableClass):
    """Dagster's PostgreSQL storage on one bounded connection pool for each process.

    Dagster's own opens a connection for every statement (its pool is a ``NullPool``): over a
    hundred sessions for one small run. Here runs, events, schedules and ticks share a pool. A
    connection is pinged before use only when it idled or when the server has closed it.
    Nothing else differs: the tables, the statements and ``dagster instance migrate`` are Dagster's.

    To be named in ``dagster.yaml``; every form of dagster-postgres's configuration works here::

        storage:
          custom:
            module: outbox_pipelines.launch
            class: PooledPostgresStorage
            config:
              postgres_url:
                env: DAGSTER_POSTGRES_URL

    The driver is psycopg 2, whatever the URL says: Dagster's statements need it.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        inst_data: ConfigurableClassData | None = None,
    ) -> None:
        self._inst_data = inst_data
        self.postgres_url = render(
            dagster_storage_url(pg_url_from_config(config), variable="storage's postgres_url in dagster.yaml")
        )
        self.should_autocreate_tables = bool(config.get("should_autocreate_tables", True))
        token_provider = token_provider_of(config)
        pool = Pool(
            self.postgres_url,
            json.dumps(config.get("auth_provider"), sort_keys=True),
            **{name: int(config.get(name, default)) for name, (default, _) in _POOL_FIELDS.items()},
        )
        if self.should_autocreate_tables:
            _create_tables_once(self.postgres_url, token_provider)
        self._run_storage = _RunStorage(self.postgres_url)
        self._event_log_storage = _EventLogStorage(self.postgres_url)
        self._schedule_storage = _ScheduleStorage(self.postgres_url)
        for storage in (self._run_storage, self._event_log_storage, self._schedule_storage):
            storage.use(pool, token_provider)
        super().__init__()  # type: ignore[no-untyped-call]

    @property
    def inst_data(self) -> ConfigurableClassData | None:
        return self._inst_data

    @classmethod
    def config_type(cls) -> UserConfigSchema:
        stock = pg_config()
        assert isinstance(stock, dict)
        return {
            **stock,
            **{
                name: Field(IntSource, is_required=False, default_value=default, description=description)
                for name, (default, description) in _POOL_FIELDS.items()
            },
        }

    @classmethod
    def from_config_value(
        cls, inst_data: ConfigurableClassData | None, config_value: Mapping[str, Any]
    ) -> "PooledPostgresStorage":
        return cls(config_value, inst_data)

    @property
    def event_log_storage(self) -> PostgresEventLogStorage:
        return self._event_log_storage

    @property
    def run_storage(self) -> PostgresRunStorage:
        return self._run_storage

    @property
    def schedule_storage(self) -> PostgresScheduleStorage:
        return self._schedule_storage


def _create_tables_once(url: str, token_provider: Any) -> None:
    """Let Dagster's own storage make the tables that are missing; asked once in a process and its forks."""
    with _lock:
        if url in _created:
            return
    # An argument that older releases do not know.
    provided = {} if token_provider is None else {"token_provider": token_provider}
    first = PostgresRunStorage(url, should_autocreate_tables=False, **provided)
    with first.connect() as connection, connection.execution_options(isolation_level="READ COMMITTED").begin():
        # Processes that find an empty database at the same time would find each other's half of the tables.
        connection.execute(text("SELECT pg_advisory_xact_lock(hashtext('dagster tables'))"))
        DagsterPostgresStorage(url, should_autocreate_tables=True, **provided)
    with _lock:
        _created.add(url)
