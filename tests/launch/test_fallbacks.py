"""A run that the launcher's process cannot execute goes to Dagster's own launcher, and its log says why."""

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest
from dagster._core.workspace.load_target import WorkspaceLoadTarget

from outbox_pipelines.launch.protocol import LauncherSilent
from tests.launch.conftest import MakeHome, Runs, is_gone, opened, wait_until

_LED_ASIDE = "Launched by Dagster's own launcher instead of a warm one"


def assert_led_aside(runs: Runs, run_id: str, *why: str) -> None:
    told = runs.messages(run_id)
    assert _LED_ASIDE in told
    for words in why:
        assert words in told
    assert runs.end_of(run_id) is dg.DagsterRunStatus.SUCCESS
    assert runs.times(run_id, dg.DagsterEventType.RUN_START) == 1


def waited(runs: Runs, run_id: str) -> float:
    """Seconds from the launch of a run until it was led aside."""
    launched, led_aside = (
        next(entry.timestamp for entry in runs.instance.all_logs(run_id) if words in str(entry))
        for words in ("PIPELINE_STARTING", _LED_ASIDE)
    )
    return led_aside - launched


@pytest.mark.parametrize(
    ("otherwise", "why"),
    [
        (
            {"origin": {"executable_path": "/elsewhere/bin/python"}},
            f"its code runs with /elsewhere/bin/python, the launcher with {sys.executable}",
        ),
        ({"origin": {"container_image": "school:1.2"}}, "its code is in the image school:1.2"),
        ({"host": "code.example.org"}, "its code server is on code.example.org"),
    ],
)
def test_a_run_whose_code_is_elsewhere_is_led_aside(runs: Runs, otherwise: dict[str, Any], why: str) -> None:
    run = runs.create("say", **otherwise)
    runs.launch_created(run)
    assert_led_aside(runs, run.run_id, why)


def test_a_run_with_the_same_python_by_another_name_is_not_led_aside(runs: Runs) -> None:
    run = runs.create("say", origin={"executable_path": str(Path(sys.executable).with_name("python3"))})
    runs.launch_created(run)
    assert runs.end_of(run.run_id) is dg.DagsterRunStatus.SUCCESS
    assert _LED_ASIDE not in runs.messages(run.run_id)


def test_runs_are_led_aside_while_there_is_no_launcher_and_wait_for_it_once(
    make_home: MakeHome, code_server: WorkspaceLoadTarget
) -> None:
    home = make_home(autostart=False, start_seconds=2)
    with opened(home, code_server) as runs:
        first, second = runs.launch("say"), runs.launch("say")
        assert waited(runs, first) >= 2 > waited(runs, second)
        for run_id in (first, second):
            assert_led_aside(runs, run_id, "no launcher answers at", str(home.folder.socket_path))
        # It is asked again and again: as soon as it is there, it gets the next run.
        home.start_launcher()
        third = runs.launch("say")
        assert _LED_ASIDE not in runs.messages(third)
        assert runs.end_of(third) is dg.DagsterRunStatus.SUCCESS


def test_a_canceled_run_that_cannot_be_told_so_says_what_to_do(
    make_home: MakeHome, code_server: WorkspaceLoadTarget, tmp_path: Path
) -> None:
    home = make_home(start_seconds=0)
    launcher = home.start_launcher()
    with opened(home, code_server) as runs:
        run_id = runs.begin("wait", tmp_path)
        launcher.kill()
        launcher.wait()
        assert not runs.launcher.terminate(run_id)
        assert "Start the launcher (outbox launcher) and cancel the run again" in runs.messages(run_id)
        home.start_launcher()
        assert runs.launcher.terminate(run_id)
        assert runs.end_of(run_id) is dg.DagsterRunStatus.CANCELED


def test_a_launcher_is_started_for_a_run_and_ends_when_none_comes(
    make_home: MakeHome, code_server: WorkspaceLoadTarget, tmp_path: Path
) -> None:
    home = make_home(autostart=True, idle_exit_seconds=3, start_seconds=60)
    with opened(home, code_server) as runs:
        run_id = runs.launch("gate", op={"folder": str(tmp_path)})
        pid = int(home.status()["pid"])
        try:
            assert os.getsid(pid) == pid, "it would end with the terminal of the process that needed it first"
            runs.left(run_id, tmp_path)
            # A run that goes on is not idleness.
            time.sleep(4)
            assert home.status()["pid"] == pid
            (tmp_path / "open").touch()
            assert runs.end_of(run_id) is dg.DagsterRunStatus.SUCCESS
            assert _LED_ASIDE not in runs.messages(run_id)
            wait_until(lambda: is_gone(pid), "the launcher ends")
            assert not home.folder.socket_path.exists()

            # And again.
            assert runs.end_of(runs.launch("say")) is dg.DagsterRunStatus.SUCCESS
            pid = int(home.status()["pid"])
        finally:
            if not is_gone(pid):
                os.kill(pid, signal.SIGTERM)
    wait_until(lambda: is_gone(pid), "the launcher ends")


def test_a_run_that_a_paused_launcher_was_asked_for_is_executed_once(
    make_home: MakeHome, code_server: WorkspaceLoadTarget, tmp_path: Path
) -> None:
    """It reads the request when it goes on, and another launcher has the run by then."""
    home = make_home(start_seconds=0)
    launcher = home.start_launcher()
    with opened(home, code_server) as runs:
        launcher.send_signal(signal.SIGSTOP)
        run_id = runs.launch("gate", op={"folder": str(tmp_path)})
        assert _LED_ASIDE in runs.messages(run_id)
        runs.left(run_id, tmp_path)
        launcher.send_signal(signal.SIGCONT)
        # By the time that this one is done, the launcher has seen the other.
        assert runs.end_of(runs.launch("say")) is dg.DagsterRunStatus.SUCCESS
        wait_until(lambda: not home.status()["running"], "the launcher is done with it")
        assert runs.run(run_id).status is dg.DagsterRunStatus.STARTED
        (tmp_path / "open").touch()
        assert_led_aside(runs, run_id)


@contextmanager
def limited(pid: int, what: int, soft: int) -> Iterator[None]:
    """A process may have no more of something inside the block: the kernel refuses it."""
    before = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (soft, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, what, before)


needs_prlimit = pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="Linux alone changes another's limits")


@needs_prlimit
def test_a_run_that_the_launcher_cannot_note_is_led_aside(runs: Runs) -> None:
    """Its disk is full, for example."""
    with limited(runs.home.status()["pid"], resource.RLIMIT_FSIZE, 0):
        run_id = runs.launch("say")
    assert_led_aside(runs, run_id, "the launcher could not do it (OSError: ", "File too large")
    assert runs.home.status()["waiting"] == []
    assert list((runs.home.folder.path / "waiting").iterdir()) == []
    assert runs.end_of(runs.launch("say")) is dg.DagsterRunStatus.SUCCESS


def limit_for_new_descriptors(pid: int, number: int) -> int:
    """A limit that lets a process open so many."""
    used = {int(one) for one in os.listdir(f"/proc/{pid}/fd")}
    return [one for one in range(len(used) + number + 1) if one not in used][number - 1] + 1


@needs_prlimit
def test_runs_wait_while_the_launcher_has_no_room_for_a_worker(
    make_home: MakeHome, code_server: WorkspaceLoadTarget
) -> None:
    home = make_home()
    launcher = home.start_launcher()
    with opened(home, code_server) as runs:
        before = psutil.Process(launcher.pid).num_fds()
        # What a worker needs is one more than what a question needs.
        with limited(launcher.pid, resource.RLIMIT_NOFILE, limit_for_new_descriptors(launcher.pid, 2)):
            ids = [runs.launch("say") for _ in range(2)]
            wait_until(lambda: "cannot be started yet: Too many open files" in home.log.read_text(), "it says so")
            assert home.status()["waiting"] == ids
        for run_id in ids:
            assert runs.end_of(run_id) is dg.DagsterRunStatus.SUCCESS, runs.messages(run_id)
        wait_until(lambda: psutil.Process(launcher.pid).num_fds() == before, "it leaks no descriptors")


@needs_prlimit
@pytest.mark.skipif(os.getuid() == 0, reason="the kernel denies root no process")
def test_the_end_of_a_run_is_written_late_when_there_is_no_room_for_a_process(
    make_home: MakeHome, code_server: WorkspaceLoadTarget, tmp_path: Path
) -> None:
    home = make_home()
    launcher = home.start_launcher()
    with opened(home, code_server) as runs:
        run_id = runs.begin("wait", tmp_path)
        with limited(launcher.pid, resource.RLIMIT_NPROC, 1):
            os.kill(home.pid_of(run_id), signal.SIGKILL)
            wait_until(lambda: "its end cannot be written yet" in home.log.read_text(), "it says so")
            assert runs.run(run_id).status is dg.DagsterRunStatus.STARTED
            waiting = runs.launch("say")
            wait_until(lambda: home.status()["waiting"] == [waiting], "a run waits for room")
        assert runs.end_of(run_id) is dg.DagsterRunStatus.FAILURE
        assert runs.end_of(waiting) is dg.DagsterRunStatus.SUCCESS


def test_a_folder_that_others_may_enter_leads_runs_aside_with_the_remedy(
    make_home: MakeHome, code_server: WorkspaceLoadTarget
) -> None:
    home = make_home()
    home.folder.path.chmod(0o755)
    with opened(home, code_server) as runs:
        run_id = runs.launch("say")
        (home.path / "warm_runs").chmod(0o700)
        assert_led_aside(runs, run_id, f"run chmod 700 {home.path / 'warm_runs'}", "name another with `folder:`")


def test_a_socket_that_nobody_listens_at_is_no_launcher(make_home: MakeHome, code_server: WorkspaceLoadTarget) -> None:
    home = make_home(start_seconds=0)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(home.folder.socket_path))
    with pytest.raises(LauncherSilent):
        home.status()
    with opened(home, code_server) as runs:
        assert_led_aside(runs, runs.launch("say"), "Connection refused")
    # A launcher takes the dead one's place.
    home.start_launcher()


def test_on_a_system_without_fork_the_launcher_loads_and_leaves_its_runs_to_dagsters_own(tmp_path: Path) -> None:
    # What Windows lacks, taken away before anything of this package is imported.
    script = """
import os, select, sys, types
import dagster as dg
import dagster_postgres
sys.modules["fcntl"] = sys.modules["resource"] = None
for module, names in ((os, ("fork", "register_at_fork", "getuid")), (select, ("poll",))):
    for name in names:
        delattr(module, name)
from outbox_pipelines.launch import PooledPostgresStorage, WarmRunLauncher
from outbox_pipelines.launch.options import read_options
launcher = WarmRunLauncher(read_options({}))
events = []
launcher._instance_weakref = lambda: types.SimpleNamespace(
    report_engine_event=lambda message, run, cls=None: events.append(message)
)
launcher._stock = types.SimpleNamespace(launch_run=lambda context: events.append("stock"))
launcher.launch_run(types.SimpleNamespace(dagster_run=types.SimpleNamespace(job_name="any", tags={})))
print(events)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "this system has no fork" in done.stdout
    assert done.stdout.rstrip().endswith("'stock']")
