"""What the service knows of each tenant, durable on disk: one file per tenant.

A file is a header line (format, checksum) and one line of JSON. It is replaced whole: written beside,
synced, renamed, and the rename synced, so a reader finds the old state or the new one, never a mix.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from outbox_pipelines.ml_service.id_ranges import IdRanges
from outbox_pipelines.ml_service.model import OnlineModel

_FORMAT = b"outbox-pipelines-ml-state-1"
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class StateError(Exception):
    """A tenant's state could not be read or made durable. The text names the file and the remedy."""


@dataclass
class TenantState:
    """A model and the ids it has learned from. They change together and are saved together."""

    model: OnlineModel = field(default_factory=OnlineModel)
    learned: IdRanges = field(default_factory=IdRanges)


class StateFolder:
    """The folder that holds all tenants' states, owned by one server at a time.

    Calls for different tenants may overlap; calls for one tenant must not. Raises `StateError` when
    the folder cannot be made or another server owns it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            _make_durable(path)
            # A file of its own: network file systems cannot lock a folder.
            self._lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StateError(
                f"the state folder {path} cannot be used: {_why(error)}; name a folder this user can write to"
            ) from error
        try:
            # Two servers on one folder would overwrite each other's models. The system takes the
            # lock back when the process dies, however it dies.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise StateError(
                f"the state folder {path} is in use by another server ({_why(error)}); "
                "stop that one first or name another folder"
            ) from error

    def close(self) -> None:
        """Gives the folder up for another server."""
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def file_of(self, tenant: str) -> Path:
        """Where a tenant's state is kept: a safe, distinct name for every string, readable for a UUID."""
        if _UUID.fullmatch(tenant):
            return self.path / f"{tenant}.state"
        digest = hashlib.sha256(tenant.encode("utf-8", "surrogatepass")).hexdigest()
        return self.path / f"other-{digest}.state"

    def load(self, tenant: str) -> TenantState:
        """The last state saved, or a new one for a tenant never saved.

        Raises `StateError` for a file that is there but cannot be trusted: beginning anew would
        silently forget what the tenant's rows, deleted from the outbox by now, have taught.
        """
        file = self.file_of(tenant)
        try:
            try:
                content = file.read_bytes()
            except FileNotFoundError:
                return TenantState()
            # Its rename may not have been synced yet: the writer failed or died just then. Answers
            # built on this state must not promise more than the disk holds.
            _sync_folder(self.path)
        except OSError as error:
            raise StateError(f"the state file {file} cannot be read: {_why(error)}; make it readable") from error
        try:
            return _decode(tenant, content)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(
                f"the state file {file} is damaged ({_why(error)}); restore it from a backup, or move it "
                "away to let this tenant start again from an untrained model"
            ) from error

    def save(self, tenant: str, state: TenantState) -> None:
        """Makes the state durable; it is when this returns. Raises `StateError` otherwise.

        After an error the disk holds the old state, or the new one if only the last sync failed.
        """
        file = self.file_of(tenant)
        beside = file.with_suffix(".new")  # one writer per tenant, so a left-over is simply overwritten
        try:
            try:
                _write_synced(beside, _encode(tenant, state))
                os.replace(beside, file)
            except BaseException:
                with suppress(OSError):  # the first error is the one to tell
                    beside.unlink(missing_ok=True)
                raise
            _sync_folder(self.path)
        except (OSError, ValueError) as error:
            raise StateError(
                f"the state file {file} cannot be written: {_why(error)}; "
                "free or repair the disk, the caller will send the rows again"
            ) from error


def _encode(tenant: str, state: TenantState) -> bytes:
    body = json.dumps(
        {"tenant": tenant, "learned": state.learned.ranges(), "model": state.model.to_record()},
        separators=(",", ":"),
        allow_nan=False,  # a model that went wrong is never saved over a good one
    ).encode("ascii")
    return b"%s %s\n%s\n" % (_FORMAT, hashlib.sha256(body).hexdigest().encode("ascii"), body)


def _decode(tenant: str, content: bytes) -> TenantState:
    header, _, rest = content.partition(b"\n")
    name, _, checksum = header.partition(b" ")
    if name != _FORMAT:
        raise ValueError("it is not in the format this version writes")
    body = rest.removesuffix(b"\n")
    if hashlib.sha256(body).hexdigest().encode("ascii") != checksum:
        raise ValueError("its checksum does not match")
    record = json.loads(body)
    if record["tenant"] != tenant:
        raise ValueError("it belongs to another tenant")
    state = TenantState(
        model=OnlineModel.from_record(record["model"]),
        learned=IdRanges((int(first), int(last)) for first, last in record["learned"]),
    )
    if len(state.learned) != state.model.examples_seen:
        raise ValueError("its ids and its model do not agree")
    return state


def _write_synced(file: Path, content: bytes) -> None:
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def _sync_folder(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _make_durable(folder: Path) -> None:
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        _sync_folder(each.parent)


def _why(error: Exception) -> str:
    # An OSError's own text repeats the path.
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
