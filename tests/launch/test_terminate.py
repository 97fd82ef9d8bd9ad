"""A run that is canceled ends, wherever it is on its way, and ends once."""

import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.workspace.load_target import WorkspaceLoadTarget

from tests.launch.conftest import MakeHome, Runs, file_target, opened, wait_until, wait_until_gone

_ROUNDS = 15
_CANCEL = """
import sys
from dagster import DagsterInstance

with DagsterInstance.from_config(sys.argv[1]) as instance:
    print(instance.run_launcher.terminate(sys.argv[2]))
"""

_SLOW = """
import time
from pathlib import Path

import dagster as dg
from dagster._core.execution.retries import RetryMode
from dagster._core.executor.in_process import InProcessExecutor


def pass_by(place):
    while (Path(__file__).parent / f"hold {place}").exists():
        (Path(__file__).parent / f"at {place}").touch()
        time.sleep(0.02)


pass_by("import")


class Told(dg.Config):
    seconds: float


@dg.op(out=dg.Out(dg.Nothing))
def quick_op(config: Told):
    pass


@dg.executor(name="slow")
def slow_executor(context):
    pass_by("executor")
    return InProcessExecutor(RetryMode.DISABLED)


@dg.job(executor_def=slow_executor)
def quick():
    quick_op()


defs = dg.Definitions(jobs=[quick])
"""


@pytest.fixture(scope="module")
def strict(make_shared_home: MakeHome, code_server: WorkspaceLoadTarget) -> Iterator[Runs]:
    """A launcher that works on one run at a time, and waits a second for one that does not stop."""
    home = make_shared_home(max_workers=1, kill_grace_seconds=1)
    home.start_launcher()
    with opened(home, code_server) as ready:
        yield ready


def test_a_run_is_interrupted_at_once_and_its_process_goes(runs: Runs, tmp_path: Path) -> None:
    run_id = runs.begin("wait", tmp_path)
    pid = runs.home.pid_of(run_id)
    began = time.monotonic()
    assert runs.launcher.terminate(run_id)
    assert runs.end_of(run_id) is dg.DagsterRunStatus.CANCELED, runs.messages(run_id)
    assert time.monotonic() - began < 5
    wait_until_gone(pid)
    wait_until(lambda: not runs.is_worked_on(run_id), "nobody works on the run")


def test_a_run_is_canceled_from_another_process_than_the_one_that_launched_it(runs: Runs, tmp_path: Path) -> None:
    run_id = runs.begin("wait", tmp_path)
    command = [sys.executable, "-W", "ignore", "-c", _CANCEL, str(runs.home.path), run_id]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "True"
    assert runs.end_of(run_id) is dg.DagsterRunStatus.CANCELED


def test_a_run_that_waits_for_a_worker_is_canceled_without_ever_having_one(strict: Runs, tmp_path: Path) -> None:
    first = strict.begin("wait", tmp_path)
    second = strict.launch("say", op={"folder": str(tmp_path)})
    wait_until(lambda: strict.home.status()["waiting"] == [second], "the second run waits")
    assert not strict.is_worked_on(second)

    assert strict.launcher.terminate(second)

    assert strict.run(second).status is dg.DagsterRunStatus.CANCELED
    assert "before a worker had it" in strict.messages(second)
    assert strict.home.status()["waiting"] == []
    assert strict.run(first).status is dg.DagsterRunStatus.STARTED
    assert strict.launcher.terminate(first)
    assert strict.end_of(first) is dg.DagsterRunStatus.CANCELED
    third = strict.launch("say")
    assert strict.end_of(third) is dg.DagsterRunStatus.SUCCESS
    assert strict.run(second).status is dg.DagsterRunStatus.CANCELED
    assert not (tmp_path / second).exists()


def test_a_run_that_cannot_be_interrupted_is_killed_after_the_grace_and_says_so(strict: Runs, tmp_path: Path) -> None:
    run_id = strict.begin("stubborn", tmp_path)
    pid = strict.home.pid_of(run_id)
    assert strict.launcher.terminate(run_id)
    assert strict.run(run_id).status is dg.DagsterRunStatus.CANCELING
    assert strict.end_of(run_id, seconds=15) is dg.DagsterRunStatus.CANCELED
    assert "did not stop within 1 s of being asked to, and was killed" in strict.messages(run_id)
    wait_until_gone(pid)


@pytest.mark.parametrize(
    ("job", "longest", "allowed"),
    [
        ("wait", 0.5, {dg.DagsterRunStatus.CANCELED}),
        ("say", 1.0, {dg.DagsterRunStatus.CANCELED, dg.DagsterRunStatus.SUCCESS}),
    ],
)
def test_a_run_that_is_canceled_at_any_moment_after_its_launch_ends_so_for_good(
    runs: Runs, job: str, longest: float, allowed: set[dg.DagsterRunStatus]
) -> None:
    delays = random.Random(job)
    ends: dict[str, dg.DagsterRunStatus] = {}
    for number in range(_ROUNDS):
        run_id = runs.launch(job)
        time.sleep(delays.uniform(0, longest) if number else 0)
        canceled = runs.launcher.terminate(run_id)
        ends[run_id] = runs.end_of(run_id, seconds=20)
        assert ends[run_id] in allowed, runs.messages(run_id)
        assert canceled or ends[run_id] is dg.DagsterRunStatus.SUCCESS
    # Nothing more comes of any of them.
    last = runs.launch("say")
    assert runs.end_of(last) is dg.DagsterRunStatus.SUCCESS
    assert {run_id: runs.run(run_id).status for run_id in ends} == ends


def test_a_run_that_ended_cannot_be_canceled(runs: Runs) -> None:
    run_id = runs.launch("say")
    assert runs.end_of(run_id) is dg.DagsterRunStatus.SUCCESS
    assert not runs.launcher.terminate(run_id)
    assert runs.run(run_id).status is dg.DagsterRunStatus.SUCCESS


def test_a_run_that_nobody_launched_cannot_be_canceled(runs: Runs) -> None:
    assert not runs.launcher.terminate("00000000-0000-0000-0000-000000000000")


def test_a_run_that_ends_while_it_is_being_canceled_does_not_stay_canceling(runs: Runs) -> None:
    """Somebody reads that it goes on, it ends, and that it is being canceled is written after its end."""
    run_id = runs.launch("say")
    assert runs.end_of(run_id) is dg.DagsterRunStatus.SUCCESS
    wait_until(lambda: not runs.is_worked_on(run_id), "its worker is gone")
    runs.instance.report_run_canceling(runs.run(run_id))
    runs.launcher.terminate(run_id)
    assert runs.end_of(run_id, seconds=5) is dg.DagsterRunStatus.CANCELED


def test_who_cancels_a_run_whose_worker_has_seen_it_already_is_told_that_it_is_canceled(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker begins, finds the run CANCELING, and ends it, all before the launcher is asked."""
    run = runs.create("wait")
    ask = runs.launcher._ask

    def launched_first(question: Mapping[str, Any]) -> dict[str, Any]:
        if question["ask"] == "terminate":
            runs.hand_over(run)
            assert runs.end_of(run.run_id) is dg.DagsterRunStatus.CANCELED
            wait_until(lambda: not runs.is_worked_on(run.run_id), "its worker is gone")
        return ask(question)

    monkeypatch.setattr(runs.launcher, "_ask", launched_first)
    assert runs.launcher.terminate(run.run_id)


def test_a_run_is_canceled_once_however_often_it_is_asked_for(runs: Runs, tmp_path: Path) -> None:
    run_id = runs.begin("wait", tmp_path)
    assert runs.launcher.terminate(run_id)
    runs.launcher.terminate(run_id)
    assert runs.end_of(run_id) is dg.DagsterRunStatus.CANCELED
    wait_until(lambda: not runs.is_worked_on(run_id), "its worker is gone")
    assert runs.times(run_id, dg.DagsterEventType.RUN_CANCELED) == 1
    assert not runs.launcher.terminate(run_id)


@pytest.mark.parametrize("place", ["import", "executor"])
def test_a_run_that_is_canceled_as_it_is_about_to_begin_is_canceled_and_not_failed(
    runs: Runs, tmp_path: Path, place: str
) -> None:
    """Before Dagster looks at it for the last time, and after; its event of the begin takes back the canceling."""
    file = tmp_path / "slow.py"
    file.write_text(_SLOW)
    with opened(runs.home, file_target(file), "slow") as slow:
        (tmp_path / f"hold {place}").touch()
        run_id = slow.launch("quick", op={"seconds": 0})
        wait_until((tmp_path / f"at {place}").exists, "a worker is about to begin the run")
        assert slow.launcher.terminate(run_id)
        (tmp_path / f"hold {place}").unlink()
        assert slow.end_of(run_id, seconds=20) is dg.DagsterRunStatus.CANCELED, slow.messages(run_id)
        assert slow.times(run_id, dg.DagsterEventType.RUN_FAILURE) == 0
        assert slow.times(run_id, dg.DagsterEventType.STEP_SUCCESS) == 0
