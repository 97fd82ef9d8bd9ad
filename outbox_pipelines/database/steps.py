"""Database steps on threads that keep their connections.

Taking a connection from the pool, testing it and giving it back costs more than a short
statement. A flush makes thousands of these, so each of its database threads holds one
connection for as long as the flush runs.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, OperationalError

Result = TypeVar("Result")

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 1.0
_LAST_TRY_SECONDS = 5.0
"""How long a step goes on trying after everything was told to end: long enough to settle and
to give leases back over a fresh connection."""

_TRY_AGAIN = frozenset({"57P01", "57P02", "57P03", "53300", "40001", "40P01"})
"""SQLSTATEs that pass by themselves at once: shutdown and start-up of the server, too many
connections, a serialization failure, a deadlock. Not a lock or statement time-out: trying
these again would keep the thread from everybody else's steps."""


class StepThreads:
    """Runs steps, each one transaction, off the calling thread; use it as a context manager.

    A step that fails because the server is away is run again, on a new connection. It must
    therefore be safe to repeat: when a connection breaks during a commit, nobody knows
    whether it happened.

    Args:
        engine: gives the connections.
        threads: how many, and so how many connections at most.
        retry_seconds: how long a step is tried while the server is away (monotonic clock).
        give_up: cuts that short.
    """

    def __init__(self, engine: Engine, *, threads: int, retry_seconds: float, give_up: threading.Event) -> None:
        self._engine = engine
        self._retry_seconds = retry_seconds
        self._give_up = give_up
        self._local = threading.local()
        self._connections: set[Connection] = set()
        self._executor = ThreadPoolExecutor(threads, "outbox-database")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self._executor.shutdown()
        for connection in self._connections:
            connection.close()

    def submit(self, step: Callable[[Connection], Result]) -> "Future[Result]":
        """Begin a step."""
        return self._executor.submit(self._persistently, step)

    def run(self, step: Callable[[Connection], Result]) -> Result:
        """Run a step and wait for it."""
        return self.submit(step).result()

    def _persistently(self, step: Callable[[Connection], Result]) -> Result:
        return persistently(lambda: self._once(step), retry_seconds=self._retry_seconds, give_up=self._give_up)

    def _once(self, step: Callable[[Connection], Result]) -> Result:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._engine.connect()
            self._connections.add(connection)
        try:
            with connection.begin():
                return step(connection)
        except BaseException:
            # Whatever state it is in, the next step gets another.
            self._local.connection = None
            self._connections.discard(connection)
            connection.close()
            raise


def persistently(once: Callable[[], Result], *, retry_seconds: float, give_up: threading.Event) -> Result:
    """Run something that may be repeated, again and again while the server is away.

    Args:
        once: opens its own connection each time.
        retry_seconds: for how long it is tried (monotonic clock).
        give_up: cuts that short.
    """
    began = time.monotonic()
    pause = _FIRST_PAUSE_SECONDS
    while True:
        try:
            return once()
        except DBAPIError as error:
            seconds = min(retry_seconds, _LAST_TRY_SECONDS) if give_up.is_set() else retry_seconds
            if not is_passing(error) or time.monotonic() + pause > began + seconds:
                raise
        if not give_up.wait(pause):
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
        else:
            # The event is set and will not make us wait any more.
            time.sleep(_FIRST_PAUSE_SECONDS)


def is_passing(error: DBAPIError) -> bool:
    """Whether the server is away for a moment, rather than refusing the statement."""
    state = getattr(error.orig, "sqlstate", None)
    if state is None:
        return error.connection_invalidated or isinstance(error, OperationalError)
    return error.connection_invalidated or state in _TRY_AGAIN or state.startswith("08")
