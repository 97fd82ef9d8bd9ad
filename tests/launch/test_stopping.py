"""A launcher that is asked to end: what becomes of its runs, and of its place."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import psutil
import pytest
from dagster._core.workspace.load_target import WorkspaceLoadTarget

from outbox_pipelines.launch.protocol import LauncherSilent, ask
from tests.launch.conftest import PATIENCE, Home, MakeHome, Runs, opened, wait_until, wait_until_gone


@pytest.fixture
def stopping(make_home: MakeHome, code_server: WorkspaceLoadTarget) -> Iterator[Runs]:
    """An instance whose launcher is to be started, and ended, by the test; it works on two runs at a time."""
    home = make_home(max_workers=2, kill_grace_seconds=600)
    with opened(home, code_server) as ready:
        yield ready


def workers_of(launcher: "subprocess.Popen[bytes]") -> list[int]:
    return [child.pid for child in psutil.Process(launcher.pid).children()]


def assert_left_nothing(home: Home, launcher: "subprocess.Popen[bytes]", workers: list[int]) -> None:
    """Neither a process, nor a socket, nor a lock."""
    assert launcher.wait(PATIENCE) == 0
    wait_until_gone(*workers)
    assert not home.folder.socket_path.exists()
    assert list(home.folder.runs()) == []
    lock = home.folder.hold_launcher()
    assert lock is not None
    os.close(lock)


def test_a_launcher_that_is_asked_to_end_interrupts_its_runs_and_leaves_the_waiting_to_its_successor(
    stopping: Runs, tmp_path: Path
) -> None:
    home = stopping.home
    launcher = home.start_launcher()
    begun = [stopping.begin("wait", tmp_path) for _ in range(2)]
    waiting = [stopping.launch("say") for _ in range(2)]
    workers = workers_of(launcher)
    assert len(workers) == 2

    launcher.send_signal(signal.SIGTERM)

    assert {stopping.end_of(run_id) for run_id in begun} == {dg.DagsterRunStatus.FAILURE}
    assert "No user initiated termination request was found" in stopping.messages(begun[0])
    assert_left_nothing(home, launcher, workers)
    assert {stopping.run(run_id).status for run_id in waiting} == {dg.DagsterRunStatus.STARTING}
    home.start_launcher()
    assert {stopping.end_of(run_id) for run_id in waiting} == {dg.DagsterRunStatus.SUCCESS}


def test_a_launcher_that_is_asked_to_end_twice_kills_what_goes_on(stopping: Runs, tmp_path: Path) -> None:
    launcher = stopping.home.start_launcher()
    run_id = stopping.begin("stubborn", tmp_path)
    workers = workers_of(launcher)
    launcher.send_signal(signal.SIGTERM)
    wait_until(lambda: not stopping.home.folder.socket_path.exists(), "the launcher heard it")
    assert stopping.run(run_id).status is dg.DagsterRunStatus.STARTED

    launcher.send_signal(signal.SIGTERM)

    wait_until_gone(*workers)
    assert stopping.end_of(run_id, seconds=10) is dg.DagsterRunStatus.FAILURE
    assert_left_nothing(stopping.home, launcher, workers)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_launcher_ends_by_ctrl_c_and_with_its_terminal(stopping: Runs, number: signal.Signals) -> None:
    launcher = stopping.home.start_launcher()
    launcher.send_signal(number)
    assert_left_nothing(stopping.home, launcher, [])


def test_a_launcher_that_drains_lets_its_runs_end_and_makes_place_for_another_at_once(
    stopping: Runs, tmp_path: Path
) -> None:
    home = stopping.home
    first = home.start_launcher()
    begun = [stopping.begin("gate", tmp_path) for _ in range(2)]
    waiting = stopping.launch("say")
    workers = workers_of(first)

    assert ask(home.folder.socket_path, {"ask": "drain"}) == {"runs": begun}

    assert not home.folder.socket_path.exists()
    home.start_launcher()
    assert stopping.end_of(waiting) is dg.DagsterRunStatus.SUCCESS
    assert stopping.end_of(stopping.launch("say")) is dg.DagsterRunStatus.SUCCESS
    assert first.poll() is None
    assert all(stopping.is_worked_on(run_id) for run_id in begun)

    # The runs of the first are canceled through the second, as all others are.
    assert stopping.launcher.terminate(begun[0])
    assert stopping.end_of(begun[0]) is dg.DagsterRunStatus.CANCELED
    (tmp_path / "open").touch()
    assert stopping.end_of(begun[1]) is dg.DagsterRunStatus.SUCCESS
    assert first.wait(PATIENCE) == 0
    wait_until_gone(*workers)
    assert stopping.end_of(stopping.launch("say")) is dg.DagsterRunStatus.SUCCESS


def test_a_worker_that_is_killed_while_its_launcher_drains_leaves_one_end(stopping: Runs, tmp_path: Path) -> None:
    home = stopping.home
    first = home.start_launcher()
    run_id = stopping.begin("wait", tmp_path)
    ask(home.folder.socket_path, {"ask": "drain"})
    home.start_launcher()
    os.kill(home.pid_of(run_id), signal.SIGKILL)
    assert stopping.end_of(run_id, seconds=5) is dg.DagsterRunStatus.FAILURE
    assert first.wait(PATIENCE) == 0
    # The second launcher looks after it as well.
    wait_until(lambda: not home.status()["running"], "the second launcher sees it too")
    assert stopping.end_of(stopping.launch("say")) is dg.DagsterRunStatus.SUCCESS
    assert stopping.times(run_id, dg.DagsterEventType.RUN_FAILURE) == 1


def test_a_launcher_that_finds_another_waits_and_takes_its_place(stopping: Runs) -> None:
    home = stopping.home
    first = home.start_launcher()
    second_log = home.path / "second.log"
    second = home.spawn_launcher(log=second_log)
    wait_until(lambda: "waiting to take its place" in second_log.read_text(), "the second says that it waits")
    assert home.status()["pid"] == first.pid

    first.send_signal(signal.SIGTERM)
    home.wait_for(second)
    assert first.wait(PATIENCE) == 0
    assert stopping.end_of(stopping.launch("say")) is dg.DagsterRunStatus.SUCCESS


def test_a_launcher_that_was_started_for_a_run_ends_when_it_finds_another(stopping: Runs) -> None:
    home = stopping.home
    home.start_launcher()
    log = home.path / "second.log"
    second = home.spawn_launcher("--until-idle", log=log)
    assert second.wait(PATIENCE) == 1
    assert "another launcher serves" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert stopping.end_of(stopping.launch("say")) is dg.DagsterRunStatus.SUCCESS


def test_a_worker_that_cannot_end_though_its_run_is_over_does_not_keep_the_launcher(
    make_home: MakeHome, code_server: WorkspaceLoadTarget, tmp_path: Path
) -> None:
    """A thread that user code left behind may go on for ever."""
    home = make_home(kill_grace_seconds=1)
    launcher = home.start_launcher()
    with opened(home, code_server) as runs:
        run_id = runs.begin("thread", tmp_path)
        assert runs.end_of(run_id) is dg.DagsterRunStatus.SUCCESS
        wait_until(lambda: not home.status()["running"], "the run is over")
        workers = workers_of(launcher)
        assert len(workers) == 1
        launcher.send_signal(signal.SIGTERM)
        assert_left_nothing(home, launcher, workers)
        assert runs.run(run_id).status is dg.DagsterRunStatus.SUCCESS


def test_nobody_answers_where_no_launcher_is(stopping: Runs) -> None:
    with pytest.raises(LauncherSilent, match="no launcher answers at"):
        stopping.home.status()
