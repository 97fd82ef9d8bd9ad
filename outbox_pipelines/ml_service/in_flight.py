"""Calls in progress, so that a server can end them well before it goes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Stopping(Exception):
    """The server takes no new calls."""


class InFlight:
    """Counts calls in progress and, once draining, lets no new one in."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self._draining = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """One call, for the length of the block. Raises `Stopping` when draining has begun."""
        with self._changed:
            if self._draining:
                raise Stopping
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    def drain(self, seconds: float) -> bool:
        """Lets no new call in and waits for those in progress; False when some outlast the wait."""
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: self._count == 0, seconds)
