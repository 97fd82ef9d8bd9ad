"""A worker process: what the launcher's forked child does, from the fork to its end."""

import atexit
import contextlib
import gc
import io
import json
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import coloredlogs
from dagster import DagsterEvent, DagsterEventType, DagsterInstance, DagsterRun, DagsterRunStatus

from outbox_pipelines.launch.ends import ENDS, keep_canceling, settle_persistently
from outbox_pipelines.launch.folder import Folder
from outbox_pipelines.launch.internals import (
    GRPC_INFO_TAG,
    LOG_RECORD_METADATA_ATTR,
    RUN_METRIC_TAGS,
    EngineEventData,
    InstanceRef,
    capture_interrupts,
    core_execute_run,
    deserialize_value,
    execute_run,
    recon_job_from_origin,
)
from outbox_pipelines.launch.storage import events_together

_logger = logging.getLogger(__name__)

STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
_TO_DO = frozenset({DagsterRunStatus.NOT_STARTED, DagsterRunStatus.STARTING, DagsterRunStatus.CANCELING})

_held: list[int] = []
"""Descriptors that must end with this process: the run's lock, and the line to the launcher."""


@dataclass(frozen=True)
class Limits:
    """What a worker is bound to."""

    runs: int
    """Runs that it executes before it ends; 1: a process for each run."""

    memory_bytes: int
    """Of data at most (RLIMIT_DATA), beyond which an allocation fails; 0: unbounded."""

    discards_output: bool
    """Whether what user code prints is thrown away."""


def work(
    control: socket.socket,
    folder: Folder,
    lock: int,
    request: Mapping[str, Any],
    limits: Limits,
    instances: dict[str, DagsterInstance],
) -> NoReturn:
    """Execute the run, and those that follow over ``control``; end the process.

    Called in the child of a fork with :data:`STOP_SIGNALS` blocked.

    Args:
        control: to the launcher, which is told of each run's end, and says what comes next.
        folder: the launcher's.
        lock: the run's, locked.
        request: the run.
        limits: of this process.
        instances: those that the launcher has opened.
    """
    code = 1
    try:
        _become_own_process(limits)
        _work(control, folder, lock, request, limits, instances)
        code = 0
    except BaseException:  # nothing may return into the launcher's stack
        _logger.exception("the worker process %d ended early", os.getpid())
    finally:
        _end_process(code)


def _become_own_process(limits: Limits) -> None:
    # A group of its own: a terminal's Ctrl-C is for the launcher, which decides.
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, set(signal.valid_signals()) - STOP_SIGNALS)
    if limits.memory_bytes:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limits.memory_bytes, hard))
    if "numpy.random" in sys.modules:
        # Each process a sequence of its own; the random module does so by itself.
        sys.modules["numpy.random"].seed()
    _open_output(limits)


def _open_output(limits: Limits) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    if limits.discards_output:
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
    else:
        # One stream, the launcher's log; what is printed belongs to no protocol.
        os.dup2(2, 1)
    os.close(nothing)
    sys.stdout = _unbreakable(1)
    sys.stderr = _unbreakable(2)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
            handler.setStream(sys.stderr)


def keep_events_off_stderr() -> None:
    """Have Dagster's console logger print nothing of runs, in this process and its forks; other handlers do."""
    coloredlogs.StandardErrorHandler.emit = _emit_unless_of_a_run


def _emit_unless_of_a_run(handler: logging.StreamHandler[Any], record: logging.LogRecord) -> None:
    if not hasattr(record, LOG_RECORD_METADATA_ATTR):
        logging.StreamHandler.emit(handler, record)


class _Unbreakable(io.FileIO):
    """A stream that a full disk or a reader that went away does not turn into a failed run."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            # The text is lost; what a run did is in its event log.
            return len(data)


def _unbreakable(descriptor: int) -> io.TextIOWrapper:
    raw = _Unbreakable(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), errors="replace", line_buffering=True)


def _let_go_after_fork() -> None:
    # A child that user code leaves behind must not look like the run that it came from.
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)


os.register_at_fork(after_in_child=_let_go_after_fork)


def open_instance(ref: str, opened: dict[str, DagsterInstance]) -> DagsterInstance:
    """The instance with this serialized reference: one of those, or added to them."""
    if ref not in opened:
        opened[ref] = DagsterInstance.from_ref(deserialize_value(ref, InstanceRef))
    return opened[ref]


def _work(
    control: socket.socket,
    folder: Folder,
    lock: int,
    request: Mapping[str, Any],
    limits: Limits,
    instances: dict[str, DagsterInstance],
) -> None:
    folder.name_holder(lock, os.getpid())
    lines = control.makefile("rb")
    surroundings = dict(os.environ), os.getcwd()
    runs = 0
    while True:
        runs += 1
        _held[:] = [control.fileno(), lock]
        if request.get("cwd"):
            with contextlib.suppress(OSError):
                os.chdir(request["cwd"])
        execute(partial(open_instance, request["instance_ref"], instances), request["run_id"])
        folder.forget_run(request["run_id"])
        os.close(lock)
        _tell(control, done=request["run_id"])
        if runs >= limits.runs:
            return
        _restore(*surroundings)
        gc.collect()
        next_one = lines.readline()
        if not next_one:
            return
        request = json.loads(next_one)
        taken = folder.hold_run(request["run_id"])
        if taken is None:
            return
        lock = taken
        folder.name_holder(lock, os.getpid())


def execute(opened: Callable[[], DagsterInstance], run_id: str) -> None:
    """Execute a run in this process and see to it that it has an end; leaves :data:`STOP_SIGNALS` blocked.

    Args:
        opened: gives the instance, as often as it is asked.
    """
    began = ended = False

    def watch(event: DagsterEvent) -> None:
        nonlocal began, ended
        if event.event_type is DagsterEventType.RUN_START:
            began = True
            keep_canceling(instance, run_id)
        elif not began and event.event_type is DagsterEventType.ENGINE_EVENT and _is_canceling(instance, run_id):
            # Since our look at it. Dagster takes that for a worker that starts again, and is about to fail the run.
            raise _CanceledBefore
        ended = ended or event.event_type in ENDS

    problem = ""
    with capture_interrupts():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        try:
            instance = opened()
            run = instance.get_run_by_id(run_id)
            if run is None or GRPC_INFO_TAG in run.tags or run.status not in _TO_DO:
                # Deleted, done, or at work elsewhere: Dagster's own launcher has those with this tag.
                return
            if run.status is not DagsterRunStatus.CANCELING:
                _execute_as_dagster_does(instance, run, watch)
        except Exception as error:  # told in the run, whatever it is
            _logger.exception("run %s", run_id)
            problem = f"it ended with {type(error).__name__} outside of the run's steps"
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    if not ended:
        why = problem or ("it stopped without an end" if began else "it had not begun")
        settle_persistently(opened, run_id, why, begun_here=began)


def _execute_as_dagster_does(instance: DagsterInstance, run: DagsterRun, watch: Callable[[DagsterEvent], None]) -> None:
    """Execute the run as Dagster's own worker process does; the run's failure is no error here.

    That process's function is called where it does more than the rest: it watches a run that asks for it
    by a tag. For all others it would read the run once more and say at the end that the process ends.
    """
    if instance.should_start_background_run_thread or not run.tags.keys().isdisjoint(RUN_METRIC_TAGS):
        execute_run(run.run_id, instance, watch, set_exit_code_on_failure=False)
        return
    assert run.job_code_origin is not None
    job = recon_job_from_origin(run.job_code_origin)
    pid = os.getpid()
    instance.report_engine_event(f"Started process for run (pid: {pid}).", run, EngineEventData.in_process(pid))
    # What fails, a SystemExit for example, has been written into the run when it comes out here.
    with contextlib.suppress(BaseException), events_together():
        for event in core_execute_run(job, run, instance, inject_env_vars=True):
            watch(event)


class _CanceledBefore(Exception):
    """The run is not to begin."""


def _is_canceling(instance: DagsterInstance, run_id: str) -> bool:
    run = instance.get_run_by_id(run_id)
    return run is not None and run.status is DagsterRunStatus.CANCELING


def _tell(control: socket.socket, **message: str) -> None:
    # The launcher may be gone: its successor finds this process by the run's lock.
    with contextlib.suppress(OSError):
        control.sendall(json.dumps(message).encode() + b"\n")


def _restore(environment: Mapping[str, str], folder: str) -> None:
    """Undo what a run did to the process that the next one shares, as far as that can be seen."""
    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)
    with contextlib.suppress(OSError):
        os.chdir(folder)


def _end_process(code: int) -> NoReturn:
    """End like an interpreter does, without taking every module apart first: that costs more than a small run."""
    try:
        # What multiprocessing does at the end of a forked process: threads that are not daemons are waited for.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except BaseException:  # nothing is left that could be told
        code = code or 1
    os._exit(code)
