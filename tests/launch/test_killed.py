"""Whatever is killed, whenever: each run ends, and none is forgotten."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import psutil
import pytest
from dagster._core.workspace.load_target import WorkspaceLoadTarget

from outbox_pipelines.launch.internals import serialize_value
from tests.launch.conftest import Home, MakeHome, Runs, opened, wait_until, wait_until_gone

# The tests of a process share its launchers.
pytestmark = pytest.mark.xdist_group("launcher_killed")


def test_a_run_whose_worker_is_killed_is_failed_at_once_and_says_by_what(runs: Runs, tmp_path: Path) -> None:
    run_id = runs.begin("wait", tmp_path)
    assert runs.is_worked_on(run_id)

    os.kill(runs.home.pid_of(run_id), signal.SIGKILL)

    assert runs.end_of(run_id, seconds=3) is dg.DagsterRunStatus.FAILURE
    assert "was killed by SIGKILL, which the kernel does when memory runs out" in runs.messages(run_id)
    assert not runs.is_worked_on(run_id)
    assert runs.times(run_id, dg.DagsterEventType.RUN_FAILURE) == 1
    # Nothing of it is left, and the next run finds all well.
    wait_until(lambda: not has_zombies(runs.home), "the launcher buries its dead")
    assert run_id not in {one.run_id for one in runs.home.folder.runs()}
    assert runs.end_of(runs.launch("say")) is dg.DagsterRunStatus.SUCCESS


def test_a_worker_that_is_killed_while_it_is_being_canceled_leaves_a_canceled_run(runs: Runs, tmp_path: Path) -> None:
    run_id = runs.begin("stubborn", tmp_path)
    assert runs.launcher.terminate(run_id)
    os.kill(runs.home.pid_of(run_id), signal.SIGKILL)
    assert runs.end_of(run_id, seconds=3) is dg.DagsterRunStatus.CANCELED


def has_zombies(home: Home) -> bool:
    children = psutil.Process(home.status()["pid"]).children()
    return any(child.status() == psutil.STATUS_ZOMBIE for child in children)


@dataclass
class Legacy:
    """What a launcher left that was killed in the middle of its work."""

    runs: Runs
    folder: Path
    """Where the runs leave what they have to say; they go on until a file ``open`` is there."""

    going_on: str
    """A run that was left to itself, and was let through while there was no launcher."""

    running: list[str]
    """Runs that still go on under the successor."""

    stubborn: str
    """One that cannot be interrupted."""

    killed: str
    """One that went on, and whose worker was killed while there was no launcher."""

    waiting: list[str]
    """Runs that the dead launcher had accepted and not begun."""


@pytest.fixture(scope="module")
def legacy(
    make_shared_home: MakeHome, code_server: WorkspaceLoadTarget, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Legacy]:
    """A launcher was killed while runs went on and others waited; now its successor is here."""
    home = make_shared_home(max_workers=6, max_starting=6, kill_grace_seconds=1, start_seconds=0)
    launcher = home.start_launcher()
    folder, gate = tmp_path_factory.mktemp("left"), tmp_path_factory.mktemp("gate")
    with opened(home, code_server) as runs:
        going_on = runs.begin("gate", gate)
        running = [runs.begin("wait", folder) for _ in range(3)]
        stubborn, killed = runs.begin("stubborn", folder), runs.begin("wait", folder)
        waiting = [runs.launch("say", op={"folder": str(folder)}) for _ in range(3)]
        wait_until(lambda: home.status()["waiting"] == waiting, "three runs wait")

        launcher.kill()
        launcher.wait()

        assert all(runs.is_worked_on(run_id) for run_id in [going_on, *running, stubborn, killed])
        (gate / "open").touch()
        assert runs.end_of(going_on) is dg.DagsterRunStatus.SUCCESS
        os.kill(home.pid_of(killed), signal.SIGKILL)
        wait_until(lambda: not runs.is_worked_on(killed), "the kernel says so without a launcher")
        assert runs.run(killed).status is dg.DagsterRunStatus.STARTED

        home.start_launcher()
        yield Legacy(runs, folder, going_on, running, stubborn, killed, waiting)


def test_a_run_ends_well_though_its_launcher_was_killed(legacy: Legacy) -> None:
    assert legacy.runs.run(legacy.going_on).status is dg.DagsterRunStatus.SUCCESS
    assert legacy.runs.times(legacy.going_on, dg.DagsterEventType.RUN_SUCCESS) == 1


def test_runs_that_a_dead_launcher_had_accepted_are_begun_by_its_successor(legacy: Legacy) -> None:
    for run_id in legacy.waiting:
        assert legacy.runs.end_of(run_id) is dg.DagsterRunStatus.SUCCESS
        assert legacy.runs.times(run_id, dg.DagsterEventType.RUN_START) == 1


def test_a_successor_gives_runs_their_end_whose_worker_died_while_there_was_no_launcher(legacy: Legacy) -> None:
    assert legacy.runs.end_of(legacy.killed) is dg.DagsterRunStatus.FAILURE
    assert "is gone" in legacy.runs.messages(legacy.killed)


def test_a_successor_cancels_runs_that_a_dead_launcher_began(legacy: Legacy) -> None:
    run_id = legacy.running[0]
    pid = legacy.runs.home.pid_of(run_id)
    assert legacy.runs.launcher.terminate(run_id)
    assert legacy.runs.end_of(run_id) is dg.DagsterRunStatus.CANCELED
    wait_until_gone(pid)


def test_a_successor_sees_the_death_of_a_worker_that_is_not_its_child(legacy: Legacy) -> None:
    run_id = legacy.running[1]
    assert legacy.runs.is_worked_on(run_id)
    os.kill(legacy.runs.home.pid_of(run_id), signal.SIGKILL)
    assert legacy.runs.end_of(run_id, seconds=5) is dg.DagsterRunStatus.FAILURE
    assert not legacy.runs.is_worked_on(run_id)


def test_a_successor_kills_what_does_not_stop_though_it_is_not_its_child(legacy: Legacy) -> None:
    pid = legacy.runs.home.pid_of(legacy.stubborn)
    assert legacy.runs.launcher.terminate(legacy.stubborn)
    assert legacy.runs.end_of(legacy.stubborn, seconds=15) is dg.DagsterRunStatus.CANCELED
    assert "did not stop within 1 s" in legacy.runs.messages(legacy.stubborn)
    wait_until_gone(pid)


def test_a_successor_knows_and_tells_of_the_runs_that_go_on(legacy: Legacy) -> None:
    run_id = legacy.running[2]
    told = {one["run_id"]: one["pid"] for one in legacy.runs.home.status()["running"]}
    assert told[run_id] == legacy.runs.home.pid_of(run_id)
    # Asked again, it does not begin it a second time.
    run = legacy.runs.run(run_id)
    legacy.runs.launch_created(run)
    assert legacy.runs.end_of(legacy.runs.launch("say")) is dg.DagsterRunStatus.SUCCESS
    assert legacy.runs.times(run_id, dg.DagsterEventType.RUN_START) == 1


def test_runs_end_though_launcher_and_workers_are_killed_together(
    make_home: MakeHome, code_server: WorkspaceLoadTarget, tmp_path: Path
) -> None:
    home = make_home(max_workers=3, max_starting=3)
    launcher = home.start_launcher()
    with opened(home, code_server) as runs:
        begun = [runs.begin("wait", tmp_path) for _ in range(2)]
        canceled = runs.begin("stubborn", tmp_path)
        waiting = runs.launch("say")
        assert runs.launcher.terminate(canceled)

        # As the kernel does to a control group, and a power cut to all.
        pids = [home.pid_of(run_id) for run_id in [*begun, canceled]]
        for pid in [launcher.pid, *pids]:
            os.kill(pid, signal.SIGKILL)
        launcher.wait()
        wait_until_gone(*pids)

        # Run monitoring ends them by this when no launcher comes any more.
        assert not any(runs.is_worked_on(run_id) for run_id in begun)
        assert {runs.run(run_id).status for run_id in begun} == {dg.DagsterRunStatus.STARTED}

        home.start_launcher()
        assert {runs.end_of(run_id) for run_id in begun} == {dg.DagsterRunStatus.FAILURE}
        assert runs.end_of(canceled) is dg.DagsterRunStatus.CANCELED
        assert runs.end_of(waiting) is dg.DagsterRunStatus.SUCCESS
        wait_until(lambda: not list(home.folder.runs()), "no lock is left of them")


def test_a_launcher_that_is_killed_again_and_again_loses_no_run_and_begins_none_twice(
    make_home: MakeHome, code_server: WorkspaceLoadTarget
) -> None:
    home = make_home(max_workers=2, start_seconds=60)
    with opened(home, code_server) as runs:
        ids: list[str] = []
        for _ in range(3):
            launcher = home.start_launcher()
            ids += [runs.launch("say") for _ in range(8)]
            time.sleep(0.3)
            launcher.kill()
            launcher.wait()
        home.start_launcher()
        for run_id in ids:
            assert runs.end_of(run_id) is dg.DagsterRunStatus.SUCCESS, runs.messages(run_id)
            assert runs.times(run_id, dg.DagsterEventType.RUN_START) == 1


@pytest.mark.parametrize(("names_a_worker", "end"), [(False, "SUCCESS"), (True, "FAILURE")])
def test_a_run_that_both_waits_and_has_a_lock_file_is_begun_unless_it_was_begun_before(
    make_home: MakeHome, code_server: WorkspaceLoadTarget, names_a_worker: bool, end: str
) -> None:
    # What a launcher leaves that is killed just before its fork, and just after it.
    home = make_home()
    with opened(home, code_server) as left:
        run = left.create("say")
        assert run.job_code_origin is not None
        request = {"run_id": run.run_id, "mode": "fork", "key": "", "cwd": os.getcwd()}
        request["python"] = run.job_code_origin.repository_origin.executable_path
        request["instance_ref"] = serialize_value(left.instance.get_ref())
        home.folder.keep_waiting(1, request)
        lock = home.folder.hold_run(run.run_id)
        assert lock is not None
        if names_a_worker:
            gone = subprocess.Popen([sys.executable, "-c", ""])
            gone.wait()
            home.folder.name_holder(lock, gone.pid)
        os.close(lock)
        home.start_launcher()
        assert left.end_of(run.run_id).value == end, left.messages(run.run_id)
        wait_until(lambda: not list(home.folder.runs()), "nothing of it is left")
        assert home.status()["waiting"] == []
