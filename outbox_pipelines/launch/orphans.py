"""Runs that a launcher before this one started, and whose workers live on."""

import os
import signal
import time
from collections.abc import Iterator

from outbox_pipelines.launch.folder import Folder

_POLL_SECONDS = 0.5


class Orphans:
    """They are no children of this process: their runs' locks say whether they live.

    Args:
        folder: the launcher's.
        kill_grace_seconds: between the request to stop and the end.
    """

    def __init__(self, folder: Folder, kill_grace_seconds: float) -> None:
        self._folder = folder
        self._kill_grace_seconds = kill_grace_seconds
        self._pids = {holder.run_id: holder.pid for holder in folder.runs()}
        self._kill_at: dict[str, float] = {}
        self._looked_at = 0.0

    def pids(self) -> dict[str, int]:
        """The processes by their runs."""
        return dict(self._pids)

    def add(self, run_id: str) -> None:
        """There is one more."""
        self._pids.setdefault(run_id, 0)

    def next_deadline(self) -> float | None:
        """When to look again, on the monotonic clock."""
        return self._looked_at + _POLL_SECONDS if self._pids else None

    def ask_to_stop(self, run_id: str) -> bool:
        """Interrupt the run; whether it is one of these and its worker lives."""
        if run_id not in self._pids or not self._signal(run_id, signal.SIGINT):
            return False
        self._kill_at.setdefault(run_id, time.monotonic() + self._kill_grace_seconds)
        return True

    def ended(self) -> Iterator[tuple[str, int, bool]]:
        """Runs whose worker ended since the last look, with its number, and whether it was killed for not stopping."""
        now = time.monotonic()
        if not self._pids or now < self._looked_at + _POLL_SECONDS:
            return
        self._looked_at = now
        for run_id, pid in list(self._pids.items()):
            kill_at = self._kill_at.get(run_id)
            if not self._folder.is_held(run_id):
                del self._pids[run_id]
                self._kill_at.pop(run_id, None)
                yield run_id, pid, kill_at is not None and kill_at <= now
            elif kill_at is not None and kill_at <= now:
                self._signal(run_id, signal.SIGKILL)

    def _signal(self, run_id: str, number: signal.Signals) -> bool:
        """Signal the worker, and never another process that got its number.

        While the run's lock is held, its holder has the number that the lock's file names. A
        descriptor of the process that was opened before that was seen stays with that process.
        """
        holder = next((holder for holder in self._folder.runs() if holder.run_id == run_id and holder.pid), None)
        if holder is None:
            return False
        try:
            if not hasattr(os, "pidfd_open"):
                if self._folder.is_held(run_id):
                    os.kill(holder.pid, number)
                    return True
                return False
            descriptor = os.pidfd_open(holder.pid)
        except ProcessLookupError:
            return False
        try:
            if not self._folder.is_held(run_id):
                return False
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True
