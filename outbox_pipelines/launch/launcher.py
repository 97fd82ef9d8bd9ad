"""Dagster's run launcher of this package: hands each run to the launcher's process, which forks a worker for it."""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from dagster import DagsterInstance, DagsterRun, DagsterRunStatus

from outbox_pipelines.launch.ends import end_canceling
from outbox_pipelines.launch.folder import Folder, NotPrivate
from outbox_pipelines.launch.internals import (
    GRPC_INFO_TAG,
    CheckRunHealthResult,
    ConfigurableClass,
    ConfigurableClassData,
    DefaultRunLauncher,
    GrpcServerCodeLocationOrigin,
    LaunchRunContext,
    RunLauncher,
    UserConfigSchema,
    WorkerStatus,
    check_release,
    serialize_value,
)
from outbox_pipelines.launch.options import SCHEMA, InvalidOptions, Mode, Options, read_options
from outbox_pipelines.launch.protocol import LauncherSilent, ask

_logger = logging.getLogger(__name__)

_FALLBACK_SECONDS = 60.0
"""How long the launcher's process is not waited for again after it was waited for in vain."""

_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})


class _NotHere(Exception):
    """This run cannot be executed by the launcher's process; the text says why."""


class WarmRunLauncher(RunLauncher, ConfigurableClass):
    """Launches runs in processes that are forked from one that has imported Dagster.

    To be named in ``dagster.yaml``; see docs/warm-runs.md::

        run_launcher:
          module: outbox_pipelines.launch
          class: WarmRunLauncher

    Runs that it cannot execute (another interpreter, a code server on another machine, no
    launcher's process) go to Dagster's own launcher, and their events say so.
    """

    def __init__(self, options: Options, inst_data: ConfigurableClassData | None = None) -> None:
        check_release(allow_untested=options.allow_untested_dagster)
        self.options = options
        self._inst_data = inst_data
        self._stock = DefaultRunLauncher()
        self._starting = threading.Lock()
        self._silent_until = 0.0
        super().__init__()  # type: ignore[no-untyped-call]

    @property
    def inst_data(self) -> ConfigurableClassData | None:
        return self._inst_data

    @classmethod
    def config_type(cls) -> UserConfigSchema:
        return SCHEMA

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData, config_value: Mapping[str, Any]) -> "WarmRunLauncher":
        return cls(read_options(config_value), inst_data)

    def register_instance(self, instance: DagsterInstance) -> None:
        super().register_instance(instance)
        self._stock.register_instance(instance)

    def dispose(self) -> None:
        self._stock.dispose()

    # What Dagster asks

    def launch_run(self, context: LaunchRunContext) -> None:
        """Hand the run over; returns as soon as it is accepted."""
        run = context.dagster_run
        try:
            if not hasattr(os, "fork"):
                raise _NotHere("this system has no fork")
            mode = self.options.mode_of(run.job_name, run.tags)
            if mode is Mode.STOCK:
                self._stock.launch_run(context)
                return
            self._hand_over(context, mode)
        except (_NotHere, LauncherSilent, NotPrivate, InvalidOptions) as reason:
            self._instance.report_engine_event(
                f"Launched by Dagster's own launcher instead of a warm one: {reason}.", run, cls=self.__class__
            )
            self._stock.launch_run(context)

    def terminate(self, run_id: str) -> bool:
        """Ask the run to stop, whoever executes it."""
        run = self._instance.get_run_by_id(run_id)
        if run is None or run.is_finished:
            return False
        if GRPC_INFO_TAG in run.tags:
            return bool(self._stock.terminate(run_id))  # type: ignore[no-untyped-call]
        if run.status is not DagsterRunStatus.CANCELING:
            # Said twice, it could be said after the run's end, and take that back.
            self._instance.report_run_canceling(run)
        try:
            found = self._ask({"ask": "terminate", "run_id": run_id})["found"]
        except (LauncherSilent, NotPrivate) as reason:
            self._instance.report_engine_event(
                f"The request to cancel could not be passed on: {reason}. Start the launcher (outbox launcher) and "
                "cancel the run again.",
                run,
                cls=self.__class__,
            )
            return False
        if found == "waiting":
            self._instance.report_run_canceled(run, "The run was canceled before a worker had it.")
        elif end_canceling(self._instance, run_id):
            return True
        elif found == "nowhere":
            self._instance.report_engine_event(
                "No process of this machine works on the run; run monitoring ends it.", run, cls=self.__class__
            )
        return bool(found != "nowhere")

    @property
    def supports_check_run_worker_health(self) -> bool:
        return True

    def check_run_worker_health(self, run: DagsterRun) -> CheckRunHealthResult:
        """Whether a process works on the run: it holds the run's lock, which the kernel frees at its end."""
        if GRPC_INFO_TAG in run.tags:
            # Dagster's own launcher does not look after its runs.
            return CheckRunHealthResult(WorkerStatus.RUNNING)
        if self._folder().is_held(run.run_id):
            return CheckRunHealthResult(WorkerStatus.RUNNING)
        return CheckRunHealthResult(WorkerStatus.FAILED, "no process works on the run any more")

    def join(self, timeout: int = 30) -> None:
        """Wait until the runs that Dagster's own launcher was given have ended."""
        self._stock.join(timeout)  # type: ignore[no-untyped-call]

    # The launcher's process

    def _hand_over(self, context: LaunchRunContext, mode: Mode) -> None:
        run = context.dagster_run
        origin = run.job_code_origin
        if origin is None:
            raise _NotHere("the run does not say where its code is")
        key = ""
        if context.workspace is not None and run.remote_job_origin is not None:
            location_origin = run.remote_job_origin.repository_origin.code_location_origin
            if isinstance(location_origin, GrpcServerCodeLocationOrigin) and location_origin.host not in _LOCAL_HOSTS:
                raise _NotHere(f"its code server is on {location_origin.host}")
            if mode is Mode.REUSE:
                location = context.workspace.get_code_location(location_origin.location_name)
                # A reload gives the location another server, and so other workers.
                key = f"{location_origin.location_name} {getattr(location, 'server_id', '')}"
        image = origin.repository_origin.container_image
        if image and image != os.environ.get("DAGSTER_CURRENT_IMAGE"):
            raise _NotHere(f"its code is in the image {image}")
        request = {
            "ask": "launch",
            "run_id": run.run_id,
            "mode": (mode if key else Mode.FORK).value,
            "key": key,
            "python": origin.repository_origin.executable_path,
            "cwd": os.getcwd(),
            "instance_ref": serialize_value(self._instance.get_ref()),
        }
        answer = self._ask(request)
        if "refused" in answer:
            raise _NotHere(answer["refused"])

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Ask the launcher's process; wait for it, or start it, when nobody answers."""
        folder = self._folder()
        try:
            return ask(folder.socket_path, question)
        except LauncherSilent:
            if time.monotonic() < self._silent_until:
                raise
        with self._starting:
            ends_at = time.monotonic() + self.options.start_seconds
            process: subprocess.Popen[bytes] | None = None
            while True:
                try:
                    return ask(folder.socket_path, question)
                except LauncherSilent:
                    if time.monotonic() > ends_at:
                        self._silent_until = time.monotonic() + _FALLBACK_SECONDS
                        raise
                if self.options.autostart and (process is None or process.poll() is not None):
                    process = self._start()
                time.sleep(0.1)

    def _start(self) -> "subprocess.Popen[bytes]":
        root = self._instance.root_directory
        _logger.info("starting the launcher's process for %s", root)
        return subprocess.Popen(
            [sys.executable, "-m", "outbox_pipelines.launch", "--instance", root, "--until-idle"],
            stdin=subprocess.DEVNULL,
            # Of no terminal and no process group of ours: it outlives the process that needed it first.
            start_new_session=True,
        )

    def _folder(self) -> Folder:
        return Folder(self.options.folder_of(self._instance.root_directory))
