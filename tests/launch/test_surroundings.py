"""What runs do to the machine, and the machine to runs: children, output, memory, disks, folders, other users."""

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import dagster as dg
import psutil
import pytest
from dagster._core.workspace.load_target import WorkspaceLoadTarget

from outbox_pipelines.launch.folder import Folder, NotPrivate
from tests.launch.conftest import MakeHome, Runs, is_gone, opened, wait_until, wait_until_gone

_LOOK = """
import sys
from pathlib import Path
from outbox_pipelines.launch.folder import Folder

folder = Folder(Path(sys.argv[1]))
print(flush=True)
while True:
    folder.is_held("run")
"""

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone bounds a process's data")


@pytest.fixture
def left_behind() -> Iterator[list[int]]:
    """Processes to kill after the test."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("mode", ["fork", "reuse"])
def test_children_that_a_run_leaves_behind_do_not_look_like_it(
    runs: Runs, tmp_path: Path, left_behind: list[int], mode: str
) -> None:
    run_id = runs.launch("child", op={"folder": str(tmp_path)}, tags={"warm-runs/mode": mode})
    assert runs.end_of(run_id) is dg.DagsterRunStatus.SUCCESS, runs.messages(run_id)
    left_behind += [int(line) for line in runs.left(run_id, tmp_path)]
    wait_until(lambda: not runs.is_worked_on(run_id), "the run is over though its children live")
    assert not any(is_gone(pid) for pid in left_behind)
    wait_until(lambda: run_id not in {one["run_id"] for one in runs.home.status()["running"]}, "the launcher knows")
    assert runs.end_of(runs.launch("say")) is dg.DagsterRunStatus.SUCCESS


def test_a_killed_worker_is_seen_though_its_children_live(runs: Runs, tmp_path: Path, left_behind: list[int]) -> None:
    run_id = runs.launch("child", op={"folder": str(tmp_path), "seconds": 600})
    left_behind += [int(line) for line in runs.left(run_id, tmp_path)]
    assert runs.is_worked_on(run_id)
    os.kill(runs.home.pid_of(run_id), signal.SIGKILL)
    assert runs.end_of(run_id, seconds=3) is dg.DagsterRunStatus.FAILURE
    assert not any(is_gone(pid) for pid in left_behind)


def test_children_of_a_run_do_not_keep_the_launchers_place(
    make_home: MakeHome, code_server: WorkspaceLoadTarget, tmp_path: Path, left_behind: list[int]
) -> None:
    home = make_home()
    launcher = home.start_launcher()
    with opened(home, code_server) as runs:
        run_id = runs.launch("child", op={"folder": str(tmp_path), "seconds": 600})
        left_behind += [int(line) for line in runs.left(run_id, tmp_path)]
        worker = home.pid_of(run_id)
        for pid in (launcher.pid, worker):
            os.kill(pid, signal.SIGKILL)
        launcher.wait()
        wait_until_gone(worker)
        home.start_launcher()
        assert runs.end_of(run_id) is dg.DagsterRunStatus.FAILURE


def test_a_run_may_print_a_hundred_megabytes(runs: Runs) -> None:
    before = runs.home.log.stat().st_size
    try:
        assert runs.end_of(runs.launch("loud")) is dg.DagsterRunStatus.SUCCESS
        assert runs.home.log.stat().st_size - before >= 100 * 1024 * 1024
    finally:
        os.truncate(runs.home.log, 0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_runs_succeed_though_the_disk_of_the_launchers_log_is_full(
    make_home: MakeHome, code_server: WorkspaceLoadTarget
) -> None:
    home = make_home(mode="reuse")
    home.start_launcher(log=Path("/dev/full"))
    with opened(home, code_server) as runs:
        for job in ("loud", "say", "say"):
            run_id = runs.launch(job)
            assert runs.end_of(run_id) is dg.DagsterRunStatus.SUCCESS, runs.messages(run_id)
        crashed = runs.launch("crash", tags={"warm-runs/mode": "fork"})
        assert runs.end_of(crashed) is dg.DagsterRunStatus.FAILURE
        assert "was killed by SIGSEGV" in runs.messages(crashed)


def test_runs_succeed_though_nobody_reads_the_launchers_output_any_more(
    make_home: MakeHome, code_server: WorkspaceLoadTarget, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    home = make_home()
    home.start_launcher(log=pipe)
    os.close(reader)
    with opened(home, code_server) as runs:
        assert runs.end_of(runs.launch("loud")) is dg.DagsterRunStatus.SUCCESS
        assert runs.end_of(runs.launch("say")) is dg.DagsterRunStatus.SUCCESS


@LINUX
def test_a_run_that_wants_more_memory_than_it_may_have_fails_by_itself(
    make_home: MakeHome, code_server: WorkspaceLoadTarget
) -> None:
    home = make_home(max_memory_mb=700)
    home.start_launcher()
    with opened(home, code_server) as runs:
        run_id = runs.launch("greedy")
        assert runs.end_of(run_id) is dg.DagsterRunStatus.FAILURE
        assert "MemoryError" in runs.messages(run_id)
        assert runs.end_of(runs.launch("say")) is dg.DagsterRunStatus.SUCCESS


def test_output_can_be_thrown_away(make_home: MakeHome, code_server: WorkspaceLoadTarget) -> None:
    home = make_home(discard_output=True)
    home.start_launcher()
    with opened(home, code_server) as runs:
        assert runs.end_of(runs.launch("loud")) is dg.DagsterRunStatus.SUCCESS
        crashed = runs.launch("crash")
        assert runs.end_of(crashed) is dg.DagsterRunStatus.FAILURE
    assert home.log.stat().st_size < 10_000
    assert f"run {crashed}: the worker process" in home.log.read_text()


# The launcher's folder


def test_nobody_but_its_user_reaches_the_launcher(runs: Runs) -> None:
    folder = runs.home.folder
    assert stat.S_IMODE(folder.socket_path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.lock_path.stat().st_mode) == 0o600
    for path in (folder.path, folder.path / "waiting", folder.path / "running"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="root alone can be somebody else")
def test_another_user_can_neither_connect_nor_look(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> None:
    # Even if the folders above were open to all: as if the socket had been reached.
    path = runs.home.folder.socket_path
    child = os.fork()
    if not child:
        code = 1
        try:
            os.chdir(path.parent)
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            refused = 0
            for attempt in (lambda: socket.socket(socket.AF_UNIX).connect(path.name), lambda: os.listdir(".")):
                try:
                    attempt()
                except PermissionError:
                    refused += 1
            code = 0 if refused == 2 else 1
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_a_folder_that_is_not_its_users_alone_is_refused_with_the_remedy(make_home: MakeHome, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(elsewhere)
    file = tmp_path / "file"
    file.touch()
    loose = tmp_path / "loose"
    loose.mkdir()
    loose.chmod(0o755)
    for path, words in [
        (loose, f"run chmod 700 {loose}, or name another with `folder:`"),
        (link, "is not a folder of this user's: name another with `folder:`"),
        (file, "cannot be made (File exists): name another with `folder:`"),
        (file / "below", "cannot be made (Not a directory): name another with `folder:`"),
    ]:
        with pytest.raises(NotPrivate) as refused:
            Folder(path)
        assert words in str(refused.value)
    # The launcher's process ends and says so, without a traceback.
    process = make_home(folder=str(loose)).spawn_launcher(log=tmp_path / "log")
    assert process.wait(60) == 1
    told = (tmp_path / "log").read_text()
    assert told.startswith("error: others may enter the launcher's folder")
    assert "Traceback" not in told


@pytest.mark.skipif(os.getuid() != 0, reason="root alone can give a folder away")
def test_a_folder_of_another_users_is_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 65534, 65534)
    with pytest.raises(NotPrivate, match="is not a folder of this user's"):
        Folder(theirs)


def test_a_folder_may_have_a_path_that_is_too_long_for_a_socket(
    make_home: MakeHome, code_server: WorkspaceLoadTarget, tmp_path: Path
) -> None:
    path = tmp_path / ("a folder with a long name " * 5) / "ü" / "launcher"
    home = make_home(folder=str(path))
    socket_path = Folder(path).socket_path
    assert len(os.fsencode(socket_path)) < 104
    assert stat.S_IMODE(socket_path.parent.stat().st_mode) == 0o700
    launcher = home.spawn_launcher()
    try:
        wait_until(lambda: launcher.poll() is not None or socket_path.exists(), "the launcher listens")
        with opened(home, code_server) as runs:
            run_id = runs.launch("say")
            assert runs.end_of(run_id) is dg.DagsterRunStatus.SUCCESS
            assert "instead of a warm one" not in runs.messages(run_id)
    finally:
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) == 0
        assert not socket_path.exists()
        socket_path.parent.rmdir()


# Locks


def test_a_look_at_a_run_that_begins_does_not_take_it_from_its_worker(runs: Runs) -> None:
    """Run monitoring may ask for its health at any moment."""
    over = threading.Event()
    looked: list[bool] = []
    run = runs.create("say")

    def look() -> None:
        folder = runs.home.folder
        while not over.is_set():
            looked.append(folder.is_held(run.run_id))

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(10):
            run = runs.create("say")
            runs.launch_created(run)
            assert runs.end_of(run.run_id) is dg.DagsterRunStatus.SUCCESS, runs.messages(run.run_id)
    finally:
        over.set()
        for looker in lookers:
            looker.join()
    assert True in looked


def test_a_lock_is_taken_though_somebody_looks_whether_it_is(tmp_path: Path) -> None:
    (tmp_path / "launcher").mkdir(mode=0o700)
    folder = Folder(tmp_path / "launcher")
    held = folder.hold_run("run")
    assert held is not None
    os.close(held)
    command = [sys.executable, "-c", _LOOK, str(folder.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as looker:
        assert looker.stdout is not None
        looker.stdout.readline()
        try:
            for _ in range(2000):
                lock = folder.hold_run("run")
                assert lock is not None
                os.close(lock)
        finally:
            looker.kill()


def test_a_launcher_keeps_no_children_and_descriptors_of_runs_that_ended(runs: Runs) -> None:
    launcher = psutil.Process(runs.home.status()["pid"])
    # Those that wait for another run.
    for child in launcher.children():
        child.kill()
    assert runs.end_of(runs.launch("say")) is dg.DagsterRunStatus.SUCCESS
    wait_until(lambda: not launcher.children(), "no child is left")
    before = launcher.num_fds()
    for job in ("say", "fail", "os_exit", "crash"):
        run_id = runs.launch(job)
        runs.end_of(run_id)
    wait_until(lambda: not launcher.children(), "no child is left")
    assert launcher.num_fds() <= before
    assert list(runs.home.folder.runs()) == []
