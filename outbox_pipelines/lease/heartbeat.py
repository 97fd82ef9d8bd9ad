"""Keeps leases alive while their work is under way."""

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from outbox_pipelines.lease.lease import Lease, renew

_logger = logging.getLogger(__name__)

SHORTEST_INTERVAL_SECONDS = 5.0


def heartbeat_interval(lease_seconds: float) -> float:
    """Seconds between two renewals: a third of the lease, at least 5 s."""
    return max(SHORTEST_INTERVAL_SECONDS, lease_seconds / 3)


class Heartbeat:
    """Renews leases of one table from a thread of its own; use it as a context manager.

    A renewal that fails is tried again at the next beat. A lease that the database says is
    lost, or that could not be renewed for its whole length (by the monotonic clock, so that
    a changed wall clock means nothing), is reported to its ``on_lost`` once.
    """

    def __init__(self, engine: Engine, *, lease_seconds: float) -> None:
        self._engine = engine
        self._interval = heartbeat_interval(lease_seconds)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._held: dict[Lease, _Held] = {}
        self._thread = threading.Thread(target=self._run, name="lease-heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def hold(self, lease: Lease, on_lost: Callable[[], None]) -> None:
        """Keep a lease alive from now on."""
        with self._lock:
            self._held[lease] = _Held(on_lost)

    def drop(self, lease: Lease) -> None:
        """Stop keeping a lease alive."""
        with self._lock:
            self._held.pop(lease, None)

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self.beat()

    def beat(self) -> None:
        """Renew everything held once."""
        with self._lock:
            held = dict(self._held)
        if not held:
            return
        asked_at = time.monotonic()
        try:
            with self._engine.begin() as connection:
                gone = set(renew(connection, held))
        except SQLAlchemyError as error:
            # The lease still runs; the next beat tries again, until it would have ended.
            _logger.warning("a heartbeat failed and will be tried again: %s", type(error).__name__)
            gone = {lease for lease, entry in held.items() if asked_at - entry.renewed_at >= lease.seconds}
        else:
            for lease, entry in held.items():
                if lease not in gone:
                    entry.renewed_at = asked_at
        for lease in gone:
            with self._lock:
                entry_or_none = self._held.pop(lease, None)
            if entry_or_none is not None:
                entry_or_none.on_lost()


class _Held:
    def __init__(self, on_lost: Callable[[], None]) -> None:
        self.on_lost = on_lost
        self.renewed_at = time.monotonic()
