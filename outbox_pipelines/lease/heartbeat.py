"""Keeps leases alive while their work is under way."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
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
    lost is reported to its ``on_lost`` once. Whether a lease may still be relied on, while
    renewals fail or hang, is for :meth:`is_sure` to say: it goes by this process's monotonic
    clock and stops work no later than the database would let another take over.
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
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def hold(self, lease: Lease, on_lost: Callable[[], None], *, asked_at: float) -> None:
        """Keep a lease alive from now on; it was asked for at ``asked_at`` (monotonic)."""
        with self._lock:
            self._held[lease] = _Held(on_lost, asked_at)

    def renewed(self, lease: Lease, *, asked_at: float) -> None:
        """Note that another statement, asked for at ``asked_at``, has renewed the lease."""
        with self._lock:
            held = self._held.get(lease)
            if held is not None:
                held.renewed_at = max(held.renewed_at, asked_at)

    def drop(self, lease: Lease) -> None:
        """Stop keeping a lease alive."""
        with self._lock:
            self._held.pop(lease, None)

    def is_sure(self, lease: Lease) -> bool:
        """Whether the lease is held and its last renewal has not run out."""
        with self._lock:
            held = self._held.get(lease)
            return held is not None and time.monotonic() < held.renewed_at + lease.seconds

    def beat(self) -> None:
        """Renew everything held once."""
        with self._lock:
            held = list(self._held)
        if not held:
            return
        asked_at = time.monotonic()
        try:
            with self._engine.begin() as connection:
                renewal = renew(connection, held)
        except SQLAlchemyError as error:
            # The leases still run, and the next beat tries again.
            _logger.warning("a heartbeat failed and will be tried again: %s", type(error).__name__)
            return
        for lease in renewal.renewed:
            self.renewed(lease, asked_at=asked_at)
        for lease in renewal.lost:
            with self._lock:
                lost = self._held.pop(lease, None)
            if lost is not None:
                lost.on_lost()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self.beat()


@dataclass
class _Held:
    on_lost: Callable[[], None]
    renewed_at: float
