"""The lease keeper's own process: renews what its worker holds, and survives it by a moment.

It reads JSON lines from its worker and writes JSON lines back. It ends with its worker: at the
end of its input, or when the worker is no longer its parent (a child that the worker forked may
hold the pipe open). A worker that died with claims in its hands has them given back at once.
"""

import json
import os
import select
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from outbox_pipelines.database.engine import open_engine
from outbox_pipelines.jobs.message import MESSAGES
from outbox_pipelines.jobs.outbox import expire_dead
from outbox_pipelines.lease.heartbeat import heartbeat_interval
from outbox_pipelines.lease.lease import Lease, renew
from outbox_pipelines.settings import load_settings

FROZEN_SECONDS = 10.0
"""How long a worker may be silent beyond the longest timeout of what it holds, before it is killed."""

_LOOK_SECONDS = 1.0
_RETRY_SECONDS = 1.0
"""Until the next beat after one that failed: the shortest lease is as long as two regular ones."""

_DYING_SECONDS = 5.0
_GIVE_BACK_SECONDS = 30.0


def main() -> None:
    """Run until the worker is gone. The last argument is its process id."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A terminal's Ctrl-C goes to the whole group; the leases are needed until the worker is done.
        signal.signal(number, signal.SIG_IGN)
    keeper = _Keeper(worker=int(sys.argv[-1]))
    threading.Thread(target=keeper.listen, name="listen", daemon=True).start()
    keeper.keep()


@dataclass
class _Kept:
    lease: Lease
    due: float
    timeout: float


class _Keeper:
    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._changed = threading.Condition()
        self._held: dict[tuple[int, UUID], _Kept] = {}
        self._engine: Engine | None = None
        self._over = False
        self._died = False
        self._ticked_at = time.monotonic()
        self._unsent = b""
        self._unsent_lost: list[tuple[Any, str]] = []
        os.set_blocking(1, False)

    # The thread that listens to the worker and watches it

    def listen(self) -> None:
        try:
            self._listen()
        finally:
            # Whatever happened to us: without this thread nobody would notice the worker's end.
            with self._changed:
                self._over = True
                self._changed.notify()

    def _listen(self) -> None:
        rest = b""
        while True:
            ready, _, _ = select.select([0], [], [], _LOOK_SECONDS)
            if ready:
                chunk = os.read(0, 65_536)
                if not chunk:
                    break
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))
                # All that it wrote is read, before it is asked whether it lives.
                continue
            if self._is_dead():
                break
            if self._is_frozen():
                # Its own clockwork would have ended a handler that is stuck; it cannot.
                os.kill(self._worker, signal.SIGKILL)
        ends_at = time.monotonic() + _DYING_SECONDS
        while self._held and not self._is_dead() and time.monotonic() < ends_at:
            time.sleep(0.01)
        self._died = self._is_dead()

    def _take(self, message: dict[str, Any]) -> None:
        if "environment" in message:
            # Through the pipe, not on the command line, which everybody can read.
            os.environ.update(message["environment"])
            settings = load_settings()
            assert settings.database_url is not None
            url = settings.database_url.get_secret_value()
            self._engine = open_engine(settings, url, application_name="outbox lease keeper", pool_size=2)
        now = time.monotonic()
        with self._changed:
            self._ticked_at = now
            if hold := message.get("hold"):
                token, seconds = UUID(hold["token"]), hold["seconds"]
                # Not from now: we may have been started, or started again, late. The clock is the machine's.
                due = hold["renewed_at"] + heartbeat_interval(seconds)
                for key in hold["keys"]:
                    self._held[key, token] = _Kept(Lease(MESSAGES, key, token, seconds), due, hold["timeout"])
                self._changed.notify()
            for dropped, keys in message.get("drop", {}).items():
                token = UUID(dropped)
                for key in keys:
                    self._held.pop((key, token), None)

    def _is_dead(self) -> bool:
        return os.getppid() != self._worker

    def _is_frozen(self) -> bool:
        with self._changed:
            longest = max((kept.timeout for kept in self._held.values()), default=None)
            return longest is not None and time.monotonic() > self._ticked_at + longest + FROZEN_SECONDS

    # The thread that renews

    def keep(self) -> None:
        while True:
            with self._changed:
                while not self._over and (wait := self._until_due()) > 0:
                    self._changed.wait(wait)
                if self._over:
                    break
                now = time.monotonic()
                due = [kept for kept in self._held.values() if kept.due <= now]
                for kept in due:
                    kept.due = now + heartbeat_interval(kept.lease.seconds)
            self._beat({kept.lease for kept in due})
        if self._died:
            self._give_back()

    def _until_due(self) -> float:
        first = min((kept.due for kept in self._held.values()), default=None)
        return 3600.0 if first is None else first - time.monotonic()

    def _beat(self, due: set[Lease]) -> None:
        assert self._engine is not None
        asked_at = time.monotonic()
        try:
            with self._engine.begin() as connection:
                renewal = renew(connection, due)
        except SQLAlchemyError as error:
            # The leases still run, and the next beat tries again; the worker keeps its own clock.
            sys.stderr.write(f"a heartbeat failed and will be tried again: {type(error).__name__}\n")
            with self._changed:
                again_at = time.monotonic() + _RETRY_SECONDS
                for kept in self._held.values():
                    if kept.lease in due:
                        kept.due = min(kept.due, again_at)
            return
        with self._changed:
            for lease in renewal.lost:
                self._held.pop((lease.key, lease.token), None)
        self._tell(asked_at, renewal.renewed, renewal.lost)

    def _tell(self, asked_at: float, renewed: set[Lease], lost: set[Lease]) -> None:
        """Report without ever waiting: a worker that does not read must not stop the heartbeats."""
        self._unsent_lost += [(lease.key, str(lease.token)) for lease in lost]
        if not self._unsent:
            report = {
                "at": asked_at,
                "renewed": [(lease.key, str(lease.token)) for lease in renewed],
                "lost": self._unsent_lost,
            }
            self._unsent = json.dumps(report).encode() + b"\n"
            self._unsent_lost = []
        try:
            self._unsent = self._unsent[os.write(1, self._unsent) :]
        except BlockingIOError:
            # The pipe is full of reports that say the same; the worker asks the database if it must know.
            return
        except BrokenPipeError:
            self._unsent = b""

    def _give_back(self) -> None:
        """The worker is dead, and its claims with it: others need not wait for the leases to end."""
        ends_at = time.monotonic() + _GIVE_BACK_SECONDS
        found_none = 0
        # Twice, since rows are passed by that the dead worker's last statement has still locked.
        while self._held and self._engine is not None and found_none < 2 and time.monotonic() < ends_at:
            try:
                with self._engine.begin() as connection:
                    given_back = expire_dead(connection, [kept.lease for kept in self._held.values()])
            except SQLAlchemyError as error:
                # Should it not work at all, the leases end by themselves.
                sys.stderr.write(f"giving back failed and will be tried again: {type(error).__name__}\n")
                time.sleep(_LOOK_SECONDS)
                continue
            if not given_back:
                found_none += 1
                time.sleep(_LOOK_SECONDS)
