"""`outbox worker`: the runner without Dagster, for low latency and high rates."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self
from uuid import uuid4

import psycopg
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from outbox_pipelines import tracing
from outbox_pipelines.database.database import Database
from outbox_pipelines.database.engine import for_single_statements, open_engine
from outbox_pipelines.database.progress import RECOVERY, note_success
from outbox_pipelines.jobs.keeper import LeaseKeeper
from outbox_pipelines.jobs.kinds import JobKind, Kinds
from outbox_pipelines.jobs.lane import SETTLERS, Lane
from outbox_pipelines.jobs.recovery import Recovered, forget_server, note_served, recover, recover_orphans
from outbox_pipelines.jobs.transport import Served
from outbox_pipelines.settings import Pooler, Settings

_logger = logging.getLogger(__name__)

CHANNEL = "outbox_jobs"
"""Notified by the table's trigger with the kind's name."""

_WATCH_SECONDS = 0.2
_NOTE_SECONDS = 10.0
_LISTEN_PAUSE_SECONDS = 2.0
_TRUSTED_SECONDS = 1.0
_JOIN_SECONDS = 3.0
_STOP_SECONDS = 10.0
"""How long settling what ended may take after the grace period, before it is left to the leases."""


class Worker:
    """Serves kinds from this process until it is stopped; use it as a context manager.

    Leaving the block stops it gracefully: no more claims, what waits in memory is given back,
    running handlers may end within the grace period, the rest is interrupted and given back.

    Args:
        database: where the messages are; migrated.
        kinds: what to serve.
        settings: polling, prefetching, grace.
        consumers: threads for each kind; the kind's own number when not given.
    """

    def __init__(self, database: Database, kinds: Kinds, settings: Settings, *, consumers: int | None = None) -> None:
        self.name = f"worker-{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"
        """Unique for each start, never a host's name alone."""
        self._kinds = kinds
        self._settings = settings
        url = database.url
        threads = {kind.name: consumers or kind.consumers for kind in kinds.values()}
        self._engine = open_engine(settings, url, application_name="outbox worker", pool_size=5)
        self._lane_engines: list[Engine] = []

        def engine_of(kind: JobKind, what: str, pool_size: int, trusted_seconds: float = 0.0) -> Engine:
            name = f"outbox worker: {kind.name}{what}"[:63]
            opened = open_engine(
                settings, url, application_name=name, pool_size=pool_size, trusted_seconds=trusted_seconds
            )
            self._lane_engines.append(opened)
            return opened

        def lane(kind: JobKind) -> Lane:
            # For the claimer and the settlers, which try again what failed.
            own = engine_of(kind, "", 1 + SETTLERS, _TRUSTED_SECONDS)
            return Lane(
                kind,
                consumers=threads[kind.name],
                prefetch=settings.worker_prefetch,
                poll_seconds=settings.worker_poll_seconds,
                engine=own,
                statements=for_single_statements(own, settings),
                # A step of progress for each consumer.
                attempts_engine=engine_of(kind, ", attempts", 1 + threads[kind.name]),
                handlers_engine=engine_of(kind, ", handlers", 2 * threads[kind.name] + 1),
                keeper=self._keeper,
                holder=self.name,
            )

        self._keeper = LeaseKeeper(self._engine, url=url, settings=settings)
        self._lanes = {kind.name: lane(kind) for kind in kinds.values()}
        self._orphans_recovered = False
        self._stopping = threading.Event()
        self._listening = settings.database_pooler is not Pooler.TRANSACTION
        self._threads = [
            threading.Thread(target=self._every, args=(_WATCH_SECONDS, self._watch), name="watch", daemon=True),
            threading.Thread(target=self._every, args=(_NOTE_SECONDS, self._note), name="note", daemon=True),
            threading.Thread(
                target=self._every, args=(settings.recovery_seconds, self._recover), name="recover", daemon=True
            ),
        ]
        if self._listening:
            self._threads.append(threading.Thread(target=self._listen, name="listen", daemon=True))
        self._done = threading.Event()

    def __enter__(self) -> Self:
        # Decided before the first claim, whose lease would run while OpenTelemetry is imported.
        tracing.is_on()
        self._note()
        self._recover_orphans()
        self._keeper.__enter__()
        for thread in self._threads:
            thread.start()
        for lane in self._lanes.values():
            lane.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def keeper_pid(self) -> int | None:
        """The process that keeps the leases."""
        return self._keeper.pid

    def wake(self, kind: str) -> None:
        """See :class:`~outbox_pipelines.jobs.transport.Transport`."""
        lane = self._lanes.get(kind)
        if lane is not None:
            lane.wake()

    def served(self) -> list[Served]:
        """See :class:`~outbox_pipelines.jobs.transport.Transport`."""
        return [lane.served() for lane in self._lanes.values()]

    def stop(self, grace_seconds: float | None = None, *, cut_short: threading.Event | None = None) -> None:
        """Stop gracefully; a second call does nothing.

        Args:
            grace_seconds: that running handlers are given; the setting's value when not given.
            cut_short: ends the grace when it is set.
        """
        if self._stopping.is_set():
            return
        grace = self._settings.worker_grace_seconds if grace_seconds is None else grace_seconds
        self._stopping.set()
        for lane in self._lanes.values():
            lane.stop()
        settled = self._wait(grace, cut_short)
        if not settled:
            for lane in self._lanes.values():
                lane.interrupt()
            settled = self._wait(_STOP_SECONDS)
            if not settled:
                _logger.warning("not all of the ended jobs could be written; their leases end by themselves")
        self._done.set()
        ends_at = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, ends_at - time.monotonic()))
        self._keeper.__exit__(None, None, None)
        if settled:
            # Otherwise the database does not answer, and this would wait once more.
            forget_server(self._engine, self.name)
        for engine in (self._engine, *self._lane_engines):
            engine.dispose()

    def _wait(self, seconds: float, cut_short: threading.Event | None = None) -> bool:
        ends_at = time.monotonic() + seconds
        while not all(lane.is_done() for lane in self._lanes.values()):
            if time.monotonic() >= ends_at or (cut_short is not None and cut_short.is_set()):
                return False
            time.sleep(0.01)
        return True

    # The threads

    def _every(self, seconds: float, act: Callable[[], None]) -> None:
        # The watch goes on until everything has stopped.
        while not self._done.wait(seconds):
            try:
                act()
            except Exception:  # one fault must not end the watch over everything else
                _logger.exception("the worker goes on after a fault")

    def _watch(self) -> None:
        self._keeper.tick()
        for lane in self._lanes.values():
            lane.watch()

    def _note(self) -> None:
        try:
            with self._engine.begin() as connection:
                note_served(connection, self.name, self.served(), listening=self._listening)
        except SQLAlchemyError as error:
            _logger.warning("the worker's state could not be noted: %s", type(error).__name__)

    def _recover_orphans(self) -> None:
        done = recover_orphans(self._engine, self._kinds.values())
        # Once, unless a domain table was not there yet.
        self._orphans_recovered = not done.problems
        self._report(done)

    def _recover(self) -> None:
        if not self._orphans_recovered:
            self._recover_orphans()
        try:
            done = recover(
                self._engine,
                self._kinds,
                publish_timeout=self._settings.publish_timeout_seconds,
                also_published=True,
            )
            with self._engine.begin() as connection:
                rows = done.lost_leases + done.lost_publishes
                note_success(connection, RECOVERY, rows, every=self._settings.recovery_seconds)
        except SQLAlchemyError as error:
            _logger.warning("a recovery failed and will be tried again: %s", type(error).__name__)
            return
        self._report(done)
        if done.lost_leases or done.lost_publishes:
            self._wake_all()

    def _report(self, done: Recovered) -> None:
        if done != Recovered():
            _logger.log(logging.WARNING if done.problems else logging.INFO, "%s", done.words())

    def _wake_all(self) -> None:
        for lane in self._lanes.values():
            lane.wake()

    def _listen(self) -> None:
        while not self._stopping.is_set():
            try:
                self._hear()
            except (SQLAlchemyError, psycopg.Error) as error:
                # Polling goes on meanwhile.
                _logger.warning("not notified of new jobs for a moment: %s", type(error).__name__)
                self._stopping.wait(_LISTEN_PAUSE_SECONDS)

    def _hear(self) -> None:
        with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            driver = connection.connection.driver_connection
            assert isinstance(driver, psycopg.Connection)
            try:
                driver.execute(f"LISTEN {CHANNEL}")
                # What came while nobody listened.
                self._wake_all()
                while not self._stopping.is_set():
                    for notification in driver.notifies(timeout=1.0):
                        self.wake(notification.payload)
                        if self._stopping.is_set():
                            return
            finally:
                # Not to be used again: it listens.
                connection.invalidate()


def chosen(kinds: Kinds, names: list[str]) -> Kinds:
    """Those of the kinds that are named; all when none is.

    Raises:
        UnknownKind: listing those that there are.
    """
    found: list[JobKind] = [kinds.named(name) for name in dict.fromkeys(names)]
    return Kinds(found) if names else kinds
