"""Which tenants' states are in memory, and who may touch one now."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from outbox_pipelines.ml_service.state import StateFolder, TenantState

#: States kept in memory, a few KB each; the least recently used beyond that are read again when needed.
KEPT_OPEN = 1_000


class OpenTenants:
    """Lends each tenant's state to one caller at a time, and keeps the recently used ones in memory."""

    def __init__(self, folder: StateFolder, kept_open: int = KEPT_OPEN) -> None:
        self._folder = folder
        self._kept_open = kept_open
        self._guard = threading.Lock()  # held for dictionary work only, never while reading a file
        self._idle: OrderedDict[str, TenantState] = OrderedDict()
        # A tenant's lock lives as long as a caller holds or awaits it.
        self._locks: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()

    @contextmanager
    def borrow(self, tenant: str) -> Iterator[TenantState]:
        """The tenant's state, for the length of the block, for this caller alone.

        An error in the block forgets the state in memory: the next borrower gets what is on disk, so
        nothing is kept that was not made durable. Raises `StateError` when it cannot be read.
        """
        with self._lock_of(tenant):
            state = self._take(tenant)
            if state is None:
                state = self._folder.load(tenant)
            yield state
            self._put_back(tenant, state)

    def _lock_of(self, tenant: str) -> threading.Lock:
        with self._guard:
            lock = self._locks.get(tenant)
            if lock is None:
                lock = self._locks[tenant] = threading.Lock()
            return lock

    def _take(self, tenant: str) -> TenantState | None:
        with self._guard:
            return self._idle.pop(tenant, None)

    def _put_back(self, tenant: str, state: TenantState) -> None:
        with self._guard:
            self._idle[tenant] = state
            while len(self._idle) > self._kept_open:
                self._idle.popitem(last=False)
