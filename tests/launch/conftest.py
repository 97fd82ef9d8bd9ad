"""A Dagster instance on a real PostgreSQL, with the launcher's real process and a real code server."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest
import yaml
from dagster._core.launcher import WorkerStatus
from dagster._core.remote_origin import GrpcServerCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin
from dagster._core.test_utils import create_run_for_test
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import GrpcServerTarget, PythonFileTarget, WorkspaceLoadTarget

from outbox_pipelines.launch.folder import Folder
from outbox_pipelines.launch.internals import serialize_value
from outbox_pipelines.launch.launcher import WarmRunLauncher
from outbox_pipelines.launch.protocol import LauncherSilent, ask
from tests.conftest import made_database

LOCATION = Path(__file__).with_name("location.py")
PATIENCE = 60.0
"""Seconds for what takes a moment on a quiet machine."""


def wait_until(true: Callable[[], Any], what: str, *, seconds: float = PATIENCE) -> Any:
    """Wait until ``true`` returns something true, and return that."""
    ends_at = time.monotonic() + seconds
    while True:
        found = true()
        if found:
            return found
        assert time.monotonic() < ends_at, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Whether a process ended; whether its parent has noticed is the parent's affair."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(*pids: int) -> None:
    """Wait until these processes ended."""
    wait_until(lambda: all(is_gone(pid) for pid in pids), f"the processes {pids} end")


class Home:
    """The folder of a Dagster instance, and the launcher's process for it.

    Args:
        path: the folder.
        storage_url: of Dagster's tables.
        launcher: run_launcher's config.
        more: further settings of dagster.yaml.
    """

    def __init__(
        self, path: Path, storage_url: str, launcher: Mapping[str, Any], more: Mapping[str, Any] | None = None
    ) -> None:
        self.path = path
        self.storage_url = storage_url
        path.mkdir(exist_ok=True)
        self.log = path / "launcher.log"
        self._launchers: list[subprocess.Popen[bytes]] = []
        settings = {
            "storage": {
                "custom": {
                    "module": "outbox_pipelines.launch",
                    "class": "PooledPostgresStorage",
                    "config": {"postgres_url": storage_url},
                }
            },
            "run_launcher": {
                "module": "outbox_pipelines.launch",
                "class": "WarmRunLauncher",
                "config": {"autostart": False, **launcher},
            },
            "run_coordinator": {"module": "dagster.core.run_coordinator", "class": "DefaultRunCoordinator"},
            "compute_logs": {
                "module": "dagster._core.storage.noop_compute_log_manager",
                "class": "NoOpComputeLogManager",
            },
            "telemetry": {"enabled": False},
            **(more or {}),
        }
        (path / "dagster.yaml").write_text(yaml.safe_dump(settings))

    @property
    def folder(self) -> Folder:
        return Folder(self.path / "warm_runs")

    def spawn_launcher(self, *arguments: str, log: Path | None = None) -> "subprocess.Popen[bytes]":
        """Start the launcher's process.

        Args:
            log: what its stderr goes to; ``self.log`` when not given.
        """
        with (log or self.log).open("ab") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "outbox_pipelines.launch", "--instance", str(self.path), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
            )
        self._launchers.append(process)
        return process

    def wait_for(self, process: "subprocess.Popen[bytes]") -> None:
        """Wait until this launcher answers."""

        def answers() -> bool:
            assert process.poll() is None, self.log.read_text()[-3000:]
            try:
                return bool(self.status()["pid"] == process.pid)
            except LauncherSilent:
                return False

        wait_until(answers, "the launcher answers")

    def start_launcher(self, *arguments: str, log: Path | None = None) -> "subprocess.Popen[bytes]":
        """Start the launcher's process and wait until it answers."""
        process = self.spawn_launcher(*arguments, log=log)
        self.wait_for(process)
        return process

    def status(self) -> dict[str, Any]:
        """What the launcher says of itself."""
        return ask(self.folder.socket_path, {"ask": "status"})

    def pid_of(self, run_id: str) -> int:
        """The worker that is at this run, once there is one."""

        def found() -> int:
            return next((one.pid for one in self.folder.runs() if one.run_id == run_id), 0)

        return int(wait_until(found, f"a worker has run {run_id}"))

    def stop(self) -> None:
        """End the launcher, and every worker that one left."""
        for process in self._launchers:
            # Twice: the second time it has no patience with its runs.
            for _ in range(2):
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(5)
            process.kill()
            process.wait()
        for holder in self.folder.runs():
            if holder.pid and self.folder.is_held(holder.run_id):
                os.kill(holder.pid, signal.SIGKILL)


class Runs:
    """An instance and its code location, as the daemon sees them.

    Args:
        home: of the instance.
        name: of the location.
    """

    def __init__(self, home: Home, instance: dg.DagsterInstance, workspace: WorkspaceProcessContext, name: str) -> None:
        self.home = home
        self.instance = instance
        self.workspace = workspace
        self._name = name

    @property
    def launcher(self) -> WarmRunLauncher:
        """The instance's."""
        assert isinstance(self.instance.run_launcher, WarmRunLauncher)
        return self.instance.run_launcher

    def create(
        self,
        job_name: str,
        *,
        tags: Mapping[str, str] | None = None,
        op: Mapping[str, Any] | None = None,
        origin: Mapping[str, Any] | None = None,
        host: str | None = None,
    ) -> dg.DagsterRun:
        """A run that is ready to be launched.

        Args:
            op: the config of the job's op.
            origin: what to say otherwise of where its code is.
            host: the machine that its code server is on, other than the true one.
        """
        location = self.workspace.create_request_context().get_code_location(self._name)
        job = location.get_repository("__repository__").get_full_job(job_name)
        run_config = {"ops": {f"{job_name}_op": {"config": dict(op)}}} if op else {}
        plan = location.get_execution_plan(job, run_config, step_keys_to_execute=None, known_state=None)
        code_origin, remote_origin = job.get_python_origin(), job.get_remote_origin()
        if origin:
            code_origin = code_origin._replace(repository_origin=code_origin.repository_origin._replace(**origin))
        if host:
            there = GrpcServerCodeLocationOrigin(host, 4000, location_name=self._name)
            remote_origin = RemoteJobOrigin(
                RemoteRepositoryOrigin(there, remote_origin.repository_origin.repository_name), job_name
            )
        return create_run_for_test(
            self.instance,
            job_name=job_name,
            run_config=run_config,
            tags=dict(tags or {}),
            remote_job_origin=remote_origin,
            job_code_origin=code_origin,
            job_snapshot=job.job_snapshot,
            parent_job_snapshot=job.parent_job_snapshot,
            execution_plan_snapshot=plan.execution_plan_snapshot,
        )

    def launch(
        self, job_name: str, *, tags: Mapping[str, str] | None = None, op: Mapping[str, Any] | None = None
    ) -> str:
        """Create and launch a run; returns its id."""
        run = self.create(job_name, tags=tags, op=op)
        self.launch_created(run)
        return run.run_id

    def launch_created(self, run: dg.DagsterRun) -> None:
        """Launch a run as the daemon does."""
        self.instance.launch_run(run.run_id, self.workspace.create_request_context())

    def hand_over(self, run: dg.DagsterRun) -> None:
        """Give a run to the launcher's process, as the launcher does once it is written that the run is launched."""
        assert run.job_code_origin is not None
        request = {
            "ask": "launch",
            "run_id": run.run_id,
            "mode": "fork",
            "key": "",
            "python": run.job_code_origin.repository_origin.executable_path,
            "cwd": os.getcwd(),
            "instance_ref": serialize_value(self.instance.get_ref()),
        }
        assert ask(self.home.folder.socket_path, request) == {"accepted": True}

    def begin(self, job_name: str, folder: Path, *, tags: Mapping[str, str] | None = None, seconds: float = 0) -> str:
        """Launch a run of a job that leaves a file, and wait until it is in the middle; returns its id."""
        run_id = self.launch(job_name, tags=tags, op={"folder": str(folder), "seconds": seconds})
        self.left(run_id, folder)
        return run_id

    def left(self, run_id: str, folder: Path) -> list[str]:
        """The lines that the run's op left in ``folder``, once they are there."""
        path = folder / run_id
        wait_until(lambda: path.exists() or self.run(run_id).is_finished, f"the op of run {run_id} is at work")
        assert path.exists(), self.messages(run_id)
        return path.read_text().split("\n")

    def is_worked_on(self, run_id: str) -> bool:
        """What run monitoring is told of the run's worker."""
        status = self.launcher.check_run_worker_health(self.run(run_id)).status
        assert status in {WorkerStatus.RUNNING, WorkerStatus.FAILED}
        return status is WorkerStatus.RUNNING

    def run(self, run_id: str) -> dg.DagsterRun:
        """The run as it is now."""
        found = self.instance.get_run_by_id(run_id)
        assert found is not None
        return found

    def end_of(self, run_id: str, *, seconds: float = PATIENCE) -> dg.DagsterRunStatus:
        """The run's status once it is finished."""
        wait_until(lambda: self.run(run_id).is_finished, f"run {run_id} ends", seconds=seconds)
        return self.run(run_id).status

    def times(self, run_id: str, kind: dg.DagsterEventType) -> int:
        """How often an event is in the run's log."""
        return len(self.instance.all_logs(run_id, of_type=kind))

    def messages(self, run_id: str) -> str:
        """All that the run's log says, with its errors."""
        lines = []
        for entry in self.instance.all_logs(run_id):
            event = entry.dagster_event
            lines.append((event.message if event is not None else entry.message) or "")
            error = getattr(event.event_specific_data, "error", None) if event is not None else None
            if error is not None:
                lines.append(error.to_string())
        return "\n".join(lines)


@contextmanager
def opened(home: Home, target: WorkspaceLoadTarget, name: str = LOCATION.stem) -> Iterator[Runs]:
    """The instance of ``home`` with the code location that ``target`` names."""
    with (
        dg.DagsterInstance.from_config(str(home.path)) as instance,
        WorkspaceProcessContext(instance, target) as workspace,
    ):
        yield Runs(home, instance, workspace, name)


def file_target(file: Path) -> WorkspaceLoadTarget:
    """A code server of its own for a file."""
    return PythonFileTarget(str(file), None, str(file.parent), file.stem)


@pytest.fixture(scope="session")
def code_server() -> Iterator[WorkspaceLoadTarget]:
    """A code server for the code location of these tests, for any instance."""
    # A socket's path may have 107 bytes.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        socket = Path(folder) / "code.sock"
        command = ["-m", "dagster", "api", "grpc", "--socket", str(socket), "--python-file", str(LOCATION)]
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", *command, "--location-name", LOCATION.stem],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=LOCATION.parent,
        )
        try:
            wait_until(socket.exists, "the code server listens")
            yield GrpcServerTarget("localhost", None, str(socket), LOCATION.stem)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


@contextmanager
def made_storage(server_url: str) -> Iterator[str]:
    """A database for Dagster's tables, that exists inside the block."""
    with made_database(server_url, f"dagster_{os.getpid()}_{time.monotonic_ns()}") as url:
        yield url.replace("postgresql+psycopg://", "postgresql://")


@pytest.fixture(scope="session")
def storage_url(server_url: str) -> Iterator[str]:
    """A database with Dagster's tables, for all instances: runs have ids of their own."""
    with made_storage(server_url) as url:
        yield url


MakeHome = Callable[..., Home]


@contextmanager
def making_homes(folder: Path, storage_url: str) -> Iterator[MakeHome]:
    """A function that makes instances; their launchers end with the block."""
    made: list[Home] = []

    def make(more: Mapping[str, Any] | None = None, *, storage_url: str = storage_url, **launcher: Any) -> Home:
        home = Home(folder / f"home{len(made)}", storage_url, launcher, more)
        made.append(home)
        return home

    try:
        yield make
    finally:
        for home in made:
            home.stop()


@pytest.fixture
def make_home(tmp_path: Path, storage_url: str) -> Iterator[MakeHome]:
    """Makes the folder of an instance; its launcher is ended with the test."""
    with making_homes(tmp_path, storage_url) as make:
        yield make


@pytest.fixture(scope="module")
def make_shared_home(tmp_path_factory: pytest.TempPathFactory, storage_url: str) -> Iterator[MakeHome]:
    """Makes the folder of an instance for the tests of a file."""
    with making_homes(tmp_path_factory.mktemp("homes"), storage_url) as make:
        yield make


@pytest.fixture(scope="session")
def runs(
    storage_url: str, tmp_path_factory: pytest.TempPathFactory, code_server: WorkspaceLoadTarget
) -> Iterator[Runs]:
    """A launcher with the default settings, shared by all tests that leave it as they found it."""
    with making_homes(tmp_path_factory.mktemp("shared"), storage_url) as make:
        home = make()
        home.start_launcher()
        with opened(home, code_server) as ready:
            yield ready
