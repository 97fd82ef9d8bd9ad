"""Warm runs behind Dagster's real daemon: its queue, its monitoring, and what is left when processes are killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import psutil
import pytest
import yaml
from dagster._core.workspace.load_target import GrpcServerTarget

from tests.launch.conftest import Home, Runs, opened, wait_until

pytestmark = pytest.mark.dagster_process

QUEUE = {
    "run_coordinator": {
        "module": "dagster.core.run_coordinator",
        "class": "QueuedRunCoordinator",
        "config": {"dequeue_interval_seconds": 1},
    },
    "run_monitoring": {"enabled": True, "poll_interval_seconds": 1},
}


class Daemon:
    """Dagster's daemon for an instance, which can be killed and started again."""

    def __init__(self, home: Home, code_server: GrpcServerTarget) -> None:
        self._home = home
        self._workspace = home.path / "workspace.yaml"
        server = {"host": "localhost", "socket": code_server.socket, "location_name": code_server.location_name}
        self._workspace.write_text(yaml.safe_dump({"load_from": [{"grpc_server": server}]}))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self._home.path / "daemon.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "dagster._daemon", "run", "-w", str(self._workspace)],
                env={**os.environ, "DAGSTER_HOME": str(self._home.path)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()


class Queued(Runs):
    """Runs that are submitted to the queue."""

    daemon: Daemon

    def submit(self, job_name: str, folder: Path | None = None, seconds: float = 0) -> str:
        run = self.create(job_name, op={"folder": str(folder), "seconds": seconds} if folder else None)
        self.instance.submit_run(run.run_id, self.workspace.create_request_context())
        return run.run_id

    def wait_for_op(self, run_id: str, folder: Path) -> int:
        """Wait until the run's op is at work; gives its process."""
        wait_until((folder / run_id).exists, f"the op of run {run_id} is at work")
        return int((folder / run_id).read_text())


@pytest.fixture
def queued(make_home: Callable[..., Home], code_server: GrpcServerTarget) -> Iterator[Queued]:
    home = make_home(QUEUE)
    home.start_launcher()
    daemon = Daemon(home, code_server)
    daemon.start()
    try:
        with opened(home, code_server) as runs:
            ready = Queued(home, runs.instance, runs.workspace, str(code_server.location_name))
            ready.daemon = daemon
            yield ready
    finally:
        daemon.stop()


def test_the_daemon_launches_what_is_queued_and_monitoring_lets_living_runs_be(queued: Queued, tmp_path: Path) -> None:
    slow = queued.submit("wait", tmp_path, seconds=5)
    quick = [queued.submit("say") for _ in range(5)]
    assert [queued.end_of(run_id) for run_id in quick] == [dg.DagsterRunStatus.SUCCESS] * 5
    # Monitoring has looked at it several times meanwhile.
    assert queued.end_of(slow) is dg.DagsterRunStatus.SUCCESS, queued.messages(slow)


def test_a_daemon_killed_in_the_middle_costs_no_run(queued: Queued, tmp_path: Path) -> None:
    slow = queued.submit("wait", tmp_path, seconds=8)
    queued.wait_for_op(slow, tmp_path)
    queued.daemon.kill()
    later = [queued.submit("say") for _ in range(3)]
    queued.daemon.start()
    assert [queued.end_of(run_id) for run_id in [slow, *later]] == [dg.DagsterRunStatus.SUCCESS] * 4


def test_all_processes_killed_at_once_leave_no_run_without_its_end(queued: Queued, tmp_path: Path) -> None:
    going_on = queued.submit("wait", tmp_path)
    worker = queued.wait_for_op(going_on, tmp_path)
    launcher = queued.home.status()["pid"]
    waiting = [queued.submit("say") for _ in range(3)]
    queued.daemon.kill()
    for pid in (launcher, worker):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(worker), "the worker is gone")
    queued.home.start_launcher()
    queued.daemon.start()
    assert queued.end_of(going_on) is dg.DagsterRunStatus.FAILURE
    assert f"the worker process {worker} is gone" in queued.messages(going_on)
    assert [queued.end_of(run_id) for run_id in waiting] == [dg.DagsterRunStatus.SUCCESS] * 3


def test_monitoring_ends_a_run_whose_worker_and_launcher_are_gone_for_good(queued: Queued, tmp_path: Path) -> None:
    run_id = queued.submit("wait", tmp_path)
    worker = queued.wait_for_op(run_id, tmp_path)
    for pid in (queued.home.status()["pid"], worker):
        os.kill(pid, signal.SIGKILL)
    assert queued.end_of(run_id) is dg.DagsterRunStatus.FAILURE
    assert "no process works on the run any more" in queued.messages(run_id)
