"""The launcher's children: workers, which execute runs, and undertakers, which write the ends of dead workers' runs."""

import json
import logging
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from dagster import DagsterInstance

from outbox_pipelines.launch.ends import describe_exit, settle_persistently
from outbox_pipelines.launch.folder import Folder
from outbox_pipelines.launch.options import Mode, Options
from outbox_pipelines.launch.worker import Limits, open_instance, work

_logger = logging.getLogger(__name__)

MASKED = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD})
"""Signals that are held back around a fork: the child is not ready for them."""

RETRY_SECONDS = 1.0
"""Between two tries to do something for which the machine had no room."""

_STARTING_SECONDS = 2.0
"""How long a run counts as starting when it does not end before; see ``max_starting``."""


@dataclass(eq=False)
class Worker:
    """A child that executes runs."""

    pid: int
    key: str
    """Runs with the same key may be given to it; empty when it gets no more."""

    control: socket.socket | None
    """To it; ``None`` when nothing more is to be heard or said."""

    request: Mapping[str, Any] | None
    """The run that it is at; ``None`` when it waits for one."""

    since: float
    """When it got that run, or began to wait, on the monotonic clock."""

    runs: int = 1
    unread: bytes = b""
    asked_to_stop: bool = False
    killed: bool = False
    kill_at: float | None = None

    @property
    def run_id(self) -> str | None:
        """The run that it is at."""
        return None if self.request is None else str(self.request["run_id"])


class Crew:
    """See the module.

    Args:
        folder: the launcher's.
        options: of the instance.
        instances: those that the launcher has opened, by reference; forks use them.
        selector: told of what workers say; each event's ``data`` is to be called.
        let_go: called in each child, to close what else the launcher has open.
    """

    def __init__(
        self,
        folder: Folder,
        options: Options,
        instances: dict[str, DagsterInstance],
        selector: selectors.BaseSelector,
        let_go: Callable[[], None],
    ) -> None:
        self._folder = folder
        self._options = options
        self._instances = instances
        self._selector = selector
        self._let_go_of_the_rest = let_go
        self._workers: dict[int, Worker] = {}
        self._undertakers: set[int] = set()
        self._to_settle: deque[tuple[str, str, str]] = deque()
        """Runs whose end nobody writes yet, each with its instance's reference and how its process ended."""
        self._settle_at = 0.0
        self.started = 0
        """Runs given to workers so far."""

    # Who there is

    def is_empty(self) -> bool:
        """Whether no child is left, and nothing for one to do."""
        return not (self._workers or self._undertakers or self._to_settle)

    def busy(self) -> list[Worker]:
        """The workers that are at a run."""
        return [worker for worker in self._workers.values() if worker.request is not None]

    def idle(self) -> list[Worker]:
        """The workers that wait for another run."""
        return [worker for worker in self._workers.values() if worker.request is None and worker.key]

    def at(self, run_id: str) -> Worker | None:
        """The worker that is at this run."""
        return next((worker for worker in self.busy() if worker.run_id == run_id), None)

    def starting(self) -> list[Worker]:
        """The workers whose run is new; the oldest first."""
        now = time.monotonic()
        return sorted(
            (worker for worker in self.busy() if now - worker.since < _STARTING_SECONDS), key=lambda one: one.since
        )

    def next_deadline(self) -> float | None:
        """When something is to be done though no child says or does anything, on the monotonic clock."""
        times = [worker.kill_at for worker in self._workers.values() if worker.kill_at is not None]
        times += [worker.since + self._options.idle_worker_seconds for worker in self.idle()]
        times += [self._settle_at] if self._to_settle else []
        return min(times, default=None)

    def has_place(self) -> float | None:
        """``None`` when a run may start now, or when to ask again, on the monotonic clock."""
        starting = self.starting()
        if len(starting) >= self._options.max_starting:
            return starting[0].since + _STARTING_SECONDS
        if len(self.busy()) >= self._options.max_workers:
            return float("inf")
        return None

    # Giving runs out

    def start(self, request: Mapping[str, Any]) -> bool:
        """Have a worker execute a run.

        Returns:
            ``False`` when a process of another launcher is at it.

        Raises:
            OSError: when no memory, descriptor, process or disk block is left just now.
        """
        worker = self._idle_for(request)
        if worker is not None:
            self._give(worker, request)
            return True
        if len(self._workers) >= self._options.max_workers and (idle := self.idle()):
            self.retire(idle[0])
        return self._fork_worker(request)

    def _idle_for(self, request: Mapping[str, Any]) -> Worker | None:
        if request["mode"] != Mode.REUSE:
            return None
        return next((worker for worker in self.idle() if worker.key == request["key"]), None)

    def _give(self, worker: Worker, request: Mapping[str, Any]) -> None:
        assert worker.control is not None
        try:
            worker.control.sendall(json.dumps(request).encode() + b"\n")
        except OSError:
            # It ended just now, as will be seen; the run is given to another.
            self.retire(worker)
            raise
        worker.request, worker.since = request, time.monotonic()
        worker.runs += 1
        self.started += 1

    def _fork_worker(self, request: Mapping[str, Any]) -> bool:
        run_lock = self._folder.hold_run(str(request["run_id"]))
        if run_lock is None:
            return False
        reuses = request["mode"] == Mode.REUSE
        limits = Limits(
            self._options.runs_per_process if reuses else 1,
            self._options.max_memory_mb * 1024 * 1024,
            self._options.discard_output,
        )
        try:
            ours, theirs = socket.socketpair()

            def execute() -> NoReturn:
                ours.close()
                work(theirs, self._folder, run_lock, request, limits, self._instances)

            try:
                pid = self._fork(execute)
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
        finally:
            # The child's now, or nobody's: held here, the run would look as if it went on.
            os.close(run_lock)
        ours.setblocking(False)
        worker = Worker(pid, str(request["key"]) if reuses else "", ours, request, time.monotonic())
        self._workers[pid] = worker
        self.started += 1
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._listen_to(worker))
        return True

    def _fork(self, child: Callable[[], NoReturn]) -> int:
        """Fork; ``child`` goes on in the new process, with nothing of the launcher's but what it is given."""
        signal.pthread_sigmask(signal.SIG_BLOCK, MASKED)
        try:
            pid = os.fork()
        except BaseException:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, MASKED)
            raise
        if pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, MASKED)
            return pid
        try:
            # A successor could not take the launcher's place, nor ends be seen, while a child had these open.
            signal.set_wakeup_fd(-1)
            for number in MASKED:
                signal.signal(number, signal.SIG_DFL)
            self._selector.close()
            self._let_go_of_the_rest()
            for worker in self._workers.values():
                if worker.control is not None:
                    worker.control.close()
            child()
        finally:
            os._exit(1)

    # Hearing from workers

    def _listen_to(self, worker: Worker) -> None:
        if worker.control is None:
            return
        try:
            more = worker.control.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        if not more:
            # It ended, or is about to; its status will say how.
            self._hang_up(worker)
            return
        worker.unread += more
        *lines, worker.unread = worker.unread.split(b"\n")
        for line in lines:
            if json.loads(line)["done"] == worker.run_id:
                worker.request, worker.since = None, time.monotonic()
                if worker.runs >= self._options.runs_per_process or worker.asked_to_stop:
                    # A late signal for this run must not hit another.
                    self.retire(worker)

    def _hang_up(self, worker: Worker) -> None:
        if worker.control is not None:
            self._selector.unregister(worker.control)
            worker.control.close()
            worker.control = None

    def retire(self, worker: Worker) -> None:
        """Let a worker without a run end: it sees that nobody is there any more."""
        worker.key = ""
        self._hang_up(worker)

    def retire_idle(self, *, all_of_them: bool = False) -> None:
        """Let workers end that waited too long for another run."""
        now = time.monotonic()
        for worker in self.idle():
            if all_of_them or now - worker.since >= self._options.idle_worker_seconds:
                self.retire(worker)

    # Stopping

    def ask_to_stop(self, worker: Worker) -> None:
        """Interrupt a worker's run; the process is killed when it goes on for ``kill_grace_seconds``."""
        # It is not reaped yet, so the number is its own.
        worker.asked_to_stop = True
        if worker.kill_at is None and not worker.killed:
            worker.kill_at = time.monotonic() + self._options.kill_grace_seconds
        os.kill(worker.pid, signal.SIGINT)

    def stop(self) -> None:
        """Interrupt all runs, and let no worker outlast the grace: a thread may go on though its run is over."""
        for worker in self._workers.values():
            self.ask_to_stop(worker)

    def kill(self) -> None:
        """End every child now."""
        for worker in self._workers.values():
            self._kill(worker)
        for pid in self._undertakers:
            # What these could not write, run monitoring finds by the runs' locks.
            os.kill(pid, signal.SIGKILL)

    def kill_overdue(self) -> None:
        """End those that did not stop in time."""
        now = time.monotonic()
        for worker in self._workers.values():
            if worker.kill_at is not None and worker.kill_at <= now:
                self._kill(worker)

    def _kill(self, worker: Worker) -> None:
        worker.kill_at, worker.killed = None, True
        os.kill(worker.pid, signal.SIGKILL)

    # Ends

    def reap(self) -> None:
        """See which children ended, and have the ends written of runs that died with their workers."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            self._undertakers.discard(pid)
            worker = self._workers.pop(pid, None)
            if worker is None:
                continue
            if worker.control is not None:
                # Its last words are there before its end is.
                self._listen_to(worker)
                self._hang_up(worker)
            if worker.request is not None:
                grace = self._options.kill_grace_seconds if worker.killed else None
                why = describe_exit(pid, status, killed_after=grace)
                self.undertake(str(worker.request["run_id"]), str(worker.request["instance_ref"]), why)

    def undertake(self, run_id: str, instance_ref: str, why: str) -> None:
        """Have a dead worker's run given its end by a process of its own: the storage may be slow, or away."""
        _logger.warning("run %s: %s", run_id, why)
        self._to_settle.append((run_id, instance_ref, why))
        self.start_undertakers()

    def start_undertakers(self) -> None:
        """Start those that are due; the machine may have had no room for one before."""
        while self._to_settle and time.monotonic() >= self._settle_at:
            run_id, instance_ref, why = self._to_settle[0]

            def write(run_id: str = run_id, instance_ref: str = instance_ref, why: str = why) -> NoReturn:
                os.setsid()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, MASKED)
                settle_persistently(partial(open_instance, instance_ref, self._instances), run_id, why)
                os._exit(0)

            try:
                self._undertakers.add(self._fork(write))
            except OSError as error:
                _logger.warning("run %s: its end cannot be written yet: %s", run_id, error.strerror)
                self._settle_at = time.monotonic() + RETRY_SECONDS
                return
            self._to_settle.popleft()
            # Not before: a successor finds by it what was not done here.
            self._folder.forget_run(run_id)

    def close(self) -> None:
        """Hang up on the workers that are left."""
        for worker in self._workers.values():
            self._hang_up(worker)
