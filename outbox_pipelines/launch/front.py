"""The launcher's socket: listens, hears one question from each caller, and answers."""

import contextlib
import json
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outbox_pipelines.launch.protocol import LONGEST_LINE

_logger = logging.getLogger(__name__)

_CALLER_SECONDS = 10.0
"""How long a caller may take to say its question."""

Answer = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass
class _Caller:
    connection: socket.socket
    until: float
    unread: bytes = b""


class Front:
    """Listens from the start, for this user's processes alone.

    Args:
        path: of the socket; what is there is replaced, so only the holder of the launcher's lock may.
        selector: told of what comes; each event's ``data`` is to be called.
        answer: answers a question.
    """

    def __init__(self, path: Path, selector: selectors.BaseSelector, answer: Answer) -> None:
        self._path = path
        self._selector = selector
        self._answer = answer
        self._callers: dict[int, _Caller] = {}
        path.unlink(missing_ok=True)
        self._listener: socket.socket | None = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)
        try:
            self._listener.bind(str(path))
        finally:
            os.umask(before)
        self._listener.listen(128)
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def stop_listening(self) -> None:
        """Remove the socket; callers that are heard already get their answer."""
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Stop listening, and hang up on everybody."""
        self.stop_listening()
        for caller in list(self._callers.values()):
            self._hang_up(caller)

    def let_go(self) -> None:
        """In a forked child: close the descriptors and leave the socket to the launcher."""
        if self._listener is not None:
            self._listener.close()
        for caller in self._callers.values():
            caller.connection.close()

    def next_deadline(self) -> float | None:
        """When the next silent caller is to be dropped, on the monotonic clock."""
        return min((caller.until for caller in self._callers.values()), default=None)

    def drop_silent(self) -> None:
        """Hang up on callers that take too long: they must not use up the descriptors."""
        now = time.monotonic()
        for caller in [caller for caller in self._callers.values() if caller.until <= now]:
            self._hang_up(caller)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            # Hung up meanwhile, or no descriptor is left: the next turn tries again.
            return
        connection.setblocking(False)
        caller = _Caller(connection, time.monotonic() + _CALLER_SECONDS)
        self._callers[connection.fileno()] = caller
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(caller))

    def _hear(self, caller: _Caller) -> None:
        try:
            more = caller.connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        caller.unread += more
        if not more or len(caller.unread) > LONGEST_LINE:
            self._hang_up(caller)
        elif caller.unread.endswith(b"\n"):
            try:
                answer = self._answer(json.loads(caller.unread))
            except Exception as error:  # one bad question must not end the launcher
                _logger.exception("a question could not be answered")
                answer = {"refused": f"the launcher could not do it ({type(error).__name__}: {error})"}
            caller.connection.settimeout(1)
            with contextlib.suppress(OSError):
                caller.connection.sendall(json.dumps(answer).encode() + b"\n")
            self._hang_up(caller)

    def _hang_up(self, caller: _Caller) -> None:
        if self._callers.pop(caller.connection.fileno(), None) is not None:
            self._selector.unregister(caller.connection)
            caller.connection.close()
