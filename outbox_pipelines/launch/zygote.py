"""The launcher's process: imports Dagster once and forks a worker for each run.

One thread, no user code, no connection to a database: a fork of it is as clean as a new
process. It answers at a Unix socket, starts what waits in the order in which it came, passes
on requests to stop, and sees to it that a run whose worker died gets its end.

What must not be lost is not in its memory. A run that was accepted is a file until a worker has
it; a run that goes on is a lock that its worker holds. So a successor knows all that
this process knew.
"""

import contextlib
import gc
import importlib
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from dagster import DagsterInstance

from outbox_pipelines.errors import OutboxError
from outbox_pipelines.launch.crew import RETRY_SECONDS, Crew
from outbox_pipelines.launch.ends import describe_exit
from outbox_pipelines.launch.folder import Folder
from outbox_pipelines.launch.front import Front
from outbox_pipelines.launch.options import Options
from outbox_pipelines.launch.orphans import Orphans

_logger = logging.getLogger(__name__)

_WHAT_A_RUN_NEEDS = ("run_id", "mode", "key", "python", "instance_ref")

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LauncherRuns(OutboxError):
    """Another launcher serves this folder."""


@dataclass
class _Waiting:
    request: dict[str, Any]
    path: Path
    """Its file; see :meth:`Folder.keep_waiting`."""


class Zygote:
    """See the module. It is this folder's launcher from its construction on.

    Args:
        folder: the launcher's.
        options: of the instance.
        instance_ref: the instance's, serialized: for the ends of runs that another launcher left.
        ends_when_idle: whether to end after ``idle_exit_seconds`` without a run.

    Raises:
        LauncherRuns: when another launcher serves the folder.
    """

    def __init__(self, folder: Folder, options: Options, instance_ref: str, *, ends_when_idle: bool = False) -> None:
        lock = folder.hold_launcher()
        if lock is None:
            raise LauncherRuns(f"another launcher serves {folder.path}")
        self._lock: int | None = lock
        self._folder = folder
        self._options = options
        self._instance_ref = instance_ref
        self._ends_when_idle = ends_when_idle
        self._waiting: deque[_Waiting] = deque()
        self._number = 0
        self._stop_requests = 0
        self._stopped = False
        self._busy_at = time.monotonic()
        self._retry_at = 0.0

    def serve(self, instances: dict[str, DagsterInstance], on_ready: Callable[[], None]) -> None:
        """Serve until a signal, a request to drain, or idleness ends it.

        Args:
            instances: opened ones by their serialized reference; forks use them.
            on_ready: called when questions are answered from now on.
        """
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        for number in _STOP_SIGNALS:
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._forget_wakeups)
        self._crew = Crew(self._folder, self._options, instances, self._selector, self._let_go)
        self._take_over()
        self._front = Front(self._folder.socket_path, self._selector, self._answer)
        # What is in memory now is shared with every worker: the collector shall not touch, and so copy, it.
        gc.collect()
        gc.freeze()
        on_ready()
        try:
            while not self._is_over():
                for key, _events in self._selector.select(self._seconds_to_wait()):
                    key.data()
                self._crew.reap()
                self._crew.start_undertakers()
                self._look_after_orphans()
                self._crew.kill_overdue()
                self._crew.retire_idle()
                self._start_waiting()
                self._front.drop_silent()
        finally:
            self._close()

    # Coming and going

    def _take_over(self) -> None:
        """Take over what a launcher before left."""
        holders = {holder.run_id: holder.pid for holder in self._folder.runs()}
        for path, number, request in self._folder.waiting():
            if not _is_whole(request):
                # Of another version, or cut off by a full disk. Run monitoring finds the run.
                _logger.warning("%s: this is no run that can be started; it is removed", path)
                path.unlink(missing_ok=True)
                continue
            self._number = number
            run_id = request["run_id"]
            if run_id in holders and (holders[run_id] or self._folder.is_held(run_id)):
                # It was begun, and that launcher had no time to say so: one of the orphans.
                path.unlink(missing_ok=True)
                continue
            # With a lock file that names nobody, that launcher was about to fork.
            self._folder.forget_run(run_id)
            self._waiting.append(_Waiting(request, path))
        self._orphans = Orphans(self._folder, self._options.kill_grace_seconds)
        if self._waiting or self._orphans.pids():
            _logger.info(
                "taking over from a launcher before: %d runs wait, %d were started",
                len(self._waiting),
                len(self._orphans.pids()),
            )

    def _on_stop(self, _number: int, _frame: object) -> None:
        self._stop_requests += 1

    def _make_place(self) -> None:
        """Take no more runs, and let another launcher come: it finds what waits in files."""
        # The socket goes before the lock, or we would remove the successor's.
        self._front.stop_listening()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self._waiting.clear()
        self._crew.retire_idle(all_of_them=True)

    def _is_over(self) -> bool:
        if self._stop_requests:
            self._stop_requests = 0
            self._make_place()
            if self._stopped:
                # Asked twice: no more patience.
                self._crew.kill()
            else:
                self._stopped = True
                _logger.info("stopping; runs that are interrupted: %d", len(self._crew.busy()))
                self._crew.stop()
        if self._ends_when_idle and self._lock is not None and self._idle_until() <= time.monotonic():
            _logger.info("no run for %d s: ending", self._options.idle_exit_seconds)
            self._make_place()
        return self._lock is None and self._crew.is_empty()

    def _idle_until(self) -> float:
        """When it will have been idle for too long, on the monotonic clock."""
        if self._waiting or self._crew.busy() or self._orphans.pids():
            self._busy_at = time.monotonic()
        return self._busy_at + self._options.idle_exit_seconds

    def _close(self) -> None:
        signal.set_wakeup_fd(-1)
        self._front.close()
        self._crew.close()
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()
        if self._lock is not None:
            os.close(self._lock)

    def _let_go(self) -> None:
        """In a forked child: close what is the launcher's."""
        self._front.let_go()
        self._wake_read.close()
        self._wake_write.close()
        if self._lock is not None:
            os.close(self._lock)

    def _seconds_to_wait(self) -> float | None:
        if self._stop_requests:
            return 0
        times = [self._front.next_deadline(), self._crew.next_deadline(), self._orphans.next_deadline()]
        if self._waiting:
            times.append(max(self._retry_at, self._crew.has_place() or 0.0))
        if self._ends_when_idle and self._lock is not None:
            times.append(self._idle_until())
        due = min((one for one in times if one is not None), default=float("inf"))
        return None if due == float("inf") else max(0.0, due - time.monotonic())

    def _forget_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_read.recv(4096):
                pass

    # Questions

    def _answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        match question["ask"]:
            case "launch":
                return self._launch(dict(question))
            case "terminate":
                return {"found": self._terminate(str(question["run_id"]))}
            case "status":
                return self._status()
            case "drain":
                self._make_place()
                return {"runs": [worker.run_id for worker in self._crew.busy()]}
            case other:
                return {"refused": f"the launcher does not know what {other!r} is"}

    def _launch(self, request: dict[str, Any]) -> dict[str, Any]:
        if not _is_whole(request):
            return {"refused": "the launcher is of another version, and does not understand it"}
        run_id = request["run_id"]
        if os.path.dirname(request["python"]) != os.path.dirname(sys.executable):
            return {"refused": f"its code runs with {request['python']}, the launcher with {sys.executable}"}
        if not self._knows(run_id):
            # Later than all before, also those of a launcher before, whose numbers were times as well.
            self._number = max(self._number + 1, time.time_ns())
            self._waiting.append(_Waiting(request, self._folder.keep_waiting(self._number, request)))
        return {"accepted": True}

    def _knows(self, run_id: str) -> bool:
        waits = any(waiting.request["run_id"] == run_id for waiting in self._waiting)
        return waits or self._crew.at(run_id) is not None or run_id in self._orphans.pids()

    def _terminate(self, run_id: str) -> str:
        for waiting in self._waiting:
            if waiting.request["run_id"] == run_id:
                waiting.path.unlink(missing_ok=True)
                self._waiting.remove(waiting)
                return "waiting"
        worker = self._crew.at(run_id)
        if worker is not None:
            self._crew.ask_to_stop(worker)
            return "running"
        return "running" if self._orphans.ask_to_stop(run_id) else "nowhere"

    def _status(self) -> dict[str, Any]:
        now = time.monotonic()
        running = [
            {"run_id": worker.run_id, "pid": worker.pid, "seconds": round(now - worker.since, 1)}
            for worker in self._crew.busy()
        ]
        running += [{"run_id": run_id, "pid": pid, "seconds": None} for run_id, pid in self._orphans.pids().items()]
        return {
            "pid": os.getpid(),
            "python": sys.executable,
            "started": self._crew.started,
            "running": running,
            "waiting": [waiting.request["run_id"] for waiting in self._waiting],
            "idle_workers": len(self._crew.idle()),
        }

    # Each turn

    def _start_waiting(self) -> None:
        while self._waiting and time.monotonic() >= self._retry_at and self._crew.has_place() is None:
            first = self._waiting[0]
            try:
                if not self._crew.start(first.request):
                    self._orphans.add(first.request["run_id"])
            except OSError as error:
                _logger.warning("run %s cannot be started yet: %s", first.request["run_id"], error.strerror)
                self._retry_at = time.monotonic() + RETRY_SECONDS
                return
            self._waiting.popleft()
            first.path.unlink(missing_ok=True)

    def _look_after_orphans(self) -> None:
        # Descriptors may be used up just now: it looks again soon.
        with contextlib.suppress(OSError):
            for run_id, pid, killed in self._orphans.ended():
                why = describe_exit(pid, None, killed_after=self._options.kill_grace_seconds if killed else None)
                self._crew.undertake(run_id, self._instance_ref, why)


def _is_whole(request: object) -> TypeGuard[dict[str, Any]]:
    """Whether this is a run that a worker can be given: one that lacks something must not end the launcher."""
    return (
        isinstance(request, dict)
        and all(isinstance(request.get(name), str) for name in _WHAT_A_RUN_NEEDS)
        # Files are named after it.
        and request["run_id"] == os.path.basename(request["run_id"]) != ""
    )


def preload(modules: tuple[str, ...]) -> None:
    """Import the libraries that the instance's settings name.

    Raises:
        OutboxError: naming the module that cannot be imported.
    """
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a module raises when it is imported
            raise OutboxError(
                f"run_launcher's preload names {name}, which cannot be imported ({type(error).__name__}: {error})"
            ) from error
