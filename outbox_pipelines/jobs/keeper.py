"""Keeps the leases of a worker's claims alive from a process of its own.

A thread would not do: a handler that computes in C may hold Python's lock for minutes, and
every lease of the worker would end. The keeper (:mod:`keeper_process`) also knows at once when
its worker has died, and gives its claims back without waiting for their leases to end.
"""

import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self
from uuid import UUID

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from outbox_pipelines.lease.lease import Lease, renew
from outbox_pipelines.settings import Settings, as_environment

_logger = logging.getLogger(__name__)

_ROOT = str(Path(__file__).parents[2])
_RUN = "import sys; sys.path.append(sys.argv[1]); from outbox_pipelines.jobs.keeper_process import main; main()"
_STUB = str(Path(__file__).with_name("keeper_stub.py"))
_TICK_SECONDS = 1.0
_FULL_SECONDS = 5.0
"""How long a keeper may leave our pipe full, before another takes its place."""

_ANSWER_SECONDS = 5.0
"""How long the database may take to say whether a lease is still ours."""


class LeaseKeeper:
    """The worker's side of its keeper; use it as a context manager.

    Args:
        engine: the database, for asking about a lease when the keeper has been silent.
        url: the same database's URL with its password.
        settings: what the keeper's connection is made with.
        delay: seconds until the keeper is really started. Most jobs are over before; until
            then a stub of a few milliseconds' work stands in for it.
    """

    def __init__(self, engine: Engine, *, url: str, settings: Settings, delay: float = 0.0) -> None:
        self._engine = engine
        self._greeting = {"environment": {**as_environment(settings), "OUTBOX_DATABASE_URL": url}}
        self._delay = delay
        self._lock = threading.Lock()
        self._held: dict[Lease, _Held] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._question: _Question | None = None
        self._ticked_at = 0.0
        self._started_at = 0.0
        self._closed = False

    def __enter__(self) -> Self:
        with self._lock:
            self._start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._closed = True
            process = self._process
        if process is None:
            return
        if self._held:
            # At the end of its input it watches us no more. Should this process end within a few seconds,
            # with claims in its hands, it gives them back; otherwise they are left to their leases.
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    @property
    def pid(self) -> int | None:
        """The keeper's process."""
        return self._process.pid if self._process is not None else None

    def hold(
        self, leases: Iterable[Lease], *, timeout: float, asked_at: float, on_lost: Callable[[Lease], None]
    ) -> None:
        """Keep leases alive from now on.

        Args:
            leases: of one claim.
            timeout: seconds that their handlers may take. When this process is frozen for
                longer, the keeper kills it.
            asked_at: when the claim was asked for (monotonic).
            on_lost: called once for each lease that the database says is lost.
        """
        held = list(leases)
        if not held:
            return
        with self._lock:
            for lease in held:
                self._held[lease] = _Held(on_lost, asked_at, timeout)
            self._send(_hold_line(held, timeout, asked_at))

    def drop(self, leases: Iterable[Lease]) -> None:
        """Stop keeping leases alive."""
        by_token: defaultdict[UUID, list[Any]] = defaultdict(list)
        with self._lock:
            for lease in leases:
                if self._held.pop(lease, None) is not None:
                    by_token[lease.token].append(lease.key)
            if by_token:
                self._send({"drop": {str(token): keys for token, keys in by_token.items()}})

    def renewals(self, lease: Lease) -> int:
        """How often a held lease was renewed."""
        with self._lock:
            held = self._held.get(lease)
            return held.renewals if held is not None else 0

    def is_held(self, lease: Lease, *, known_for: float | None = None) -> bool:
        """Whether the lease may be relied on; asks the database when renewals have been missed.

        No when the database says so, and also when it cannot be reached for as long as the
        lease was known to run: another may have taken over by then.

        Args:
            lease: one that was given to :meth:`hold`.
            known_for: seconds since the last renewal after which the database is asked; when the
                lease has run out by our clock, if not given.
        """
        sure_for = lease.seconds if known_for is None else min(known_for, lease.seconds)
        while True:
            # Asked for each job, so without the lock, which is held while the pipe is written.
            held = self._held.get(lease)
            if held is None:
                return False
            if time.monotonic() < held.renewed_at + sure_for:
                return True
            with self._lock:
                question = self._ask(lease)
            if not question.answered.wait(max(0.0, question.asked_at + _ANSWER_SECONDS - time.monotonic())):
                return False
            if lease in question.leases:
                return lease in question.held

    def waits_for_answer(self) -> bool:
        """Whether the database has been asked about a lease, and is silent."""
        with self._lock:
            return self._question is not None and not self._question.answered.is_set()

    def tick(self) -> None:
        """Tell the keeper that this process gets on; to be called every second or so."""
        now = time.monotonic()
        with self._lock:
            if now - self._ticked_at >= _TICK_SECONDS:
                self._ticked_at = now
                self._send({"tick": now})

    # All below with the lock held, but for the reading thread.

    def _start(self) -> None:
        self._started_at = time.monotonic()
        # With -P: a module of the working folder must not stand in for one of the library.
        command = [sys.executable, "-P", "-c", _RUN, _ROOT]
        if self._delay:
            command = [sys.executable, "-I", "-S", _STUB, str(self._delay), *command]
        self._process = subprocess.Popen(
            [*command, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        threading.Thread(
            target=self._read, args=(self._process, self._process.stdout), name="lease-keeper", daemon=True
        ).start()
        self._send(self._greeting)
        by_claim: defaultdict[tuple[UUID, float, float], list[Lease]] = defaultdict(list)
        for lease, held in self._held.items():
            by_claim[lease.token, lease.seconds, held.timeout].append(lease)
        for (_token, _seconds, timeout), leases in by_claim.items():
            self._send(_hold_line(leases, timeout, min(self._held[lease].renewed_at for lease in leases)))

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        pipe = self._process.stdin
        assert pipe is not None
        rest = memoryview(json.dumps(message).encode() + b"\n")
        ends_at = time.monotonic() + _FULL_SECONDS
        try:
            while rest:
                # None when the pipe is full.
                rest = rest[pipe.write(rest) or 0 :]
                if rest and time.monotonic() > ends_at:
                    # It is stopped or stuck, and we must not be; the reading thread starts another.
                    self._process.kill()
                    return
                if rest:
                    select.select([], [pipe], [], 0.1)
        except (OSError, ValueError):
            # It has died; the reading thread starts another.
            return

    def _ask(self, lease: Lease) -> "_Question":
        """Ask the database about this lease and all that ran out, in a thread: it may never answer."""
        if self._question is None or self._question.answered.is_set():
            now = time.monotonic()
            stale = {one for one, held in self._held.items() if now >= held.renewed_at + one.seconds}
            self._question = _Question({lease, *stale}, now)
            threading.Thread(target=self._answer, args=(self._question,), name="lease-question", daemon=True).start()
        return self._question

    def _answer(self, question: "_Question") -> None:
        try:
            with self._engine.begin() as connection:
                renewal = renew(connection, question.leases)
            self._renewed(renewal.renewed, question.asked_at)
            # One whose row is locked is ours still: its handler's own transaction, completing it, for example.
            question.held = question.leases - renewal.lost
        except SQLAlchemyError as error:
            _logger.warning("the database could not be asked about a lease: %s", type(error).__name__)
        finally:
            question.answered.set()

    def _read(self, process: "subprocess.Popen[bytes]", lines: IO[bytes]) -> None:
        for line in _lines(lines):
            report = json.loads(line)
            lost: list[tuple[Lease, _Held]] = []
            with self._lock:
                held = {(lease.key, str(lease.token)): lease for lease in self._held}
            self._renewed([held[key, token] for key, token in report["renewed"] if (key, token) in held], report["at"])
            for key, token in report["lost"]:
                with self._lock:
                    lease = held.get((key, token))
                    gone = self._held.pop(lease, None) if lease is not None else None
                if lease is not None and gone is not None:
                    lost.append((lease, gone))
            for lease, gone in lost:
                gone.on_lost(lease)
        code = process.wait()
        with self._lock:
            if self._closed or self._process is not process:
                return
            _logger.warning("the lease keeper ended with code %s and is started again", code)
            early = time.monotonic() < self._started_at + _FULL_SECONDS
        if early:
            # It may end at once again.
            time.sleep(_TICK_SECONDS)
        with self._lock:
            if not self._closed:
                self._delay = 0.0
                self._start()

    def _renewed(self, leases: Iterable[Lease], asked_at: float) -> None:
        with self._lock:
            for lease in leases:
                held = self._held.get(lease)
                if held is not None:
                    held.renewed_at = max(held.renewed_at, asked_at)
                    held.renewals += 1


@dataclass
class _Question:
    leases: set[Lease]
    asked_at: float
    held: set[Lease] = field(default_factory=set)
    answered: threading.Event = field(default_factory=threading.Event)


@dataclass
class _Held:
    on_lost: Callable[[Lease], None]
    renewed_at: float
    timeout: float
    renewals: int = 0


def _hold_line(leases: list[Lease], timeout: float, renewed_at: float) -> dict[str, Any]:
    first = leases[0]
    return {
        "hold": {
            "keys": [lease.key for lease in leases],
            "token": str(first.token),
            "seconds": first.seconds,
            "timeout": timeout,
            "renewed_at": renewed_at,
        }
    }


def _lines(pipe: IO[bytes]) -> Iterable[bytes]:
    # Unbuffered pipes give short reads; whole lines are put together here.
    rest = b""
    while chunk := pipe.read(65_536):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
