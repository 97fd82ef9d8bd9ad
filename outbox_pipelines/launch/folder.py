"""The launcher's private folder: its socket, the runs that wait, and a lock file for each run that goes on.

All of it is for one user and one machine. What matters here is what the kernel keeps:
a lock ends with the process that holds it, however that process ends, so nothing in the
folder can say of a dead worker that it lives.
"""

import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outbox_pipelines.errors import OutboxError

with suppress(ImportError):
    # Windows has none: its runs go to Dagster's own launcher, and no folder is made.
    import fcntl

_SOCKET_PATH_BYTES = 100
"""A socket's path may have 107 bytes on Linux and 103 on macOS, with the final zero."""


_LOOK_SECONDS = 0.0005
"""Longer than a look whether a lock is held."""


class NotPrivate(OutboxError):
    """The folder cannot be used: others could reach it, or it cannot be made."""


@dataclass(frozen=True)
class RunHolder:
    """Who holds a run's lock."""

    run_id: str
    pid: int


class Folder:
    """The files of one launcher.

    Args:
        path: made, with access for its owner alone, when it is missing.

    Raises:
        NotPrivate: when it belongs to somebody else, or others may enter it, or it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock_path = path / "launcher.lock"
        self._waiting = path / "waiting"
        self._running = path / "running"
        for folder in (path, self._waiting, self._running):
            _make_private(folder)
        self.socket_path = path / "launcher.sock"
        if len(os.fsencode(self.socket_path)) > _SOCKET_PATH_BYTES:
            digest = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]
            short = Path("/tmp") / f"warm-runs-{os.getuid()}-{digest}"
            _make_private(short)
            self.socket_path = short / "launcher.sock"

    # The launcher itself

    def hold_launcher(self) -> int | None:
        """Take the lock that one launcher at a time holds; ``None`` when another has it.

        Returns:
            a file descriptor: the lock is held while it is open, here or in a forked child.
        """
        return _lock(self.lock_path, create=True)

    # Runs that wait for a worker

    def keep_waiting(self, number: int, request: Mapping[str, Any]) -> Path:
        """Note a run that was accepted, so that the launcher's successor starts it if this one dies.

        Args:
            number: its place in the order.
            request: what was asked; written to a file that only its owner may read.
        """
        path = self._waiting / f"{number:020d}-{request['run_id']}.json"
        handle, name = tempfile.mkstemp(dir=self._waiting, prefix=".")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(request, file)
            # Whole or not at all, also for a launcher that is killed here.
            os.rename(name, path)
        except BaseException:
            os.unlink(name)
            raise
        return path

    def waiting(self) -> list[tuple[Path, int, object]]:
        """What an earlier launcher accepted and did not start, in its order.

        Returns:
            each file, its number and what was asked; ``None`` for a file that cannot be read as such.
        """
        found: list[tuple[Path, int, object]] = []
        for path in sorted(self._waiting.iterdir()):
            if path.name.startswith("."):
                # Half written: whoever asked was told nothing.
                path.unlink(missing_ok=True)
                continue
            try:
                found.append((path, int(path.name.partition("-")[0]), json.loads(path.read_text())))
            except (OSError, ValueError):
                found.append((path, 0, None))
        return found

    # Runs that go on

    def hold_run(self, run_id: str) -> int | None:
        """Take a run's lock; ``None`` when a process has it.

        Returns:
            a file descriptor: the lock is held while it is open, here or in a forked child.
        """
        return _lock(self._running / run_id, create=True)

    def name_holder(self, lock: int, pid: int) -> None:
        """Write into a run's lock file whose process holds it."""
        os.pwrite(lock, f"{pid}\n".encode(), 0)

    def forget_run(self, run_id: str) -> None:
        """Remove a run's lock file; only for a run that nobody holds, or by its holder at its end."""
        (self._running / run_id).unlink(missing_ok=True)

    def is_held(self, run_id: str) -> bool:
        """Whether a process that works on the run is alive."""
        try:
            lock = _lock(self._running / run_id, create=False)
        except FileNotFoundError:
            return False
        if lock is None:
            return True
        os.close(lock)
        return False

    def runs(self) -> Iterator[RunHolder]:
        """The runs that have a lock file, whether or not their worker is alive; pid 0 when it is not told."""
        for path in self._running.iterdir():
            try:
                text = path.read_text()
            except OSError:
                continue
            yield RunHolder(path.name, int(text) if text.strip().isdigit() else 0)


def default_folder(instance_root: str) -> Path:
    """Where the launcher of an instance lives unless dagster.yaml says otherwise: beside the instance's files."""
    return Path(instance_root) / "warm_runs"


def _lock(path: Path, *, create: bool) -> int | None:
    """Lock a file for this process alone, or, to look whether a process has it so, together with others who look.

    Returns:
        a file descriptor, or ``None`` when a process has it for itself.
    """
    while True:
        handle = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0) | os.O_CLOEXEC, 0o600)
        try:
            locked = _flock(handle, fcntl.LOCK_EX if create else fcntl.LOCK_SH)
            looked_at = not locked and create and _flock(handle, fcntl.LOCK_SH)
            # Its last holder may have removed the file between our opening and locking it: that lock says nothing.
            valid = locked and _is_at(path, handle)
        except BaseException:
            os.close(handle)
            raise
        if valid:
            return handle
        os.close(handle)
        if looked_at:
            time.sleep(_LOOK_SECONDS)
        elif not locked:
            return None


def _flock(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, handle: int) -> bool:
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    held = os.fstat(handle)
    return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)


def _make_private(folder: Path) -> None:
    remedy = "name another with `folder:` in run_launcher's config in dagster.yaml"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(folder)
    except OSError as error:
        raise NotPrivate(f"the launcher's folder {folder} cannot be made ({error.strerror}): {remedy}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise NotPrivate(f"the launcher's folder {folder} is not a folder of this user's: {remedy}")
    if found.st_mode & 0o077:
        raise NotPrivate(
            f"others may enter the launcher's folder {folder} (mode {stat.S_IMODE(found.st_mode):o}): "
            f"run chmod 700 {folder}, or {remedy}"
        )
