"""What is written of a run whose process ended before the run did, or that was canceled as it began or ended."""

import logging
import os
import signal
import time
from collections.abc import Callable

from dagster import DagsterEventType, DagsterInstance, DagsterRunStatus

_logger = logging.getLogger(__name__)

ENDS = frozenset({DagsterEventType.RUN_SUCCESS, DagsterEventType.RUN_FAILURE, DagsterEventType.RUN_CANCELED})
"""Events with which a run ends."""

_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 10.0
_PATIENCE_SECONDS = 15 * 60.0
_STATUS_SECONDS = 1.0
"""How long after the event of its end a run's status is sure to be written: by the next statement."""

_HINTS = {
    "SIGKILL": ", which the kernel does when memory runs out, and people do",
    "SIGSEGV": ": native code in a library crashed",
    "SIGABRT": ": native code in a library gave up",
    "SIGBUS": ": native code in a library crashed, or a disk is full",
}


def settle(instance: DagsterInstance, run_id: str, why: str, *, begun_here: bool = True) -> None:
    """Give a run that no process works on any more the end it is due; nothing if it has one.

    A run that was being canceled is CANCELED; any other is FAILURE.

    Args:
        why: how its process ended, for the run's log.
        begun_here: whether the run began in that process. One that is STARTED and began elsewhere
            is left alone: that process may be alive.
    """
    run = instance.get_run_by_id(run_id)
    if run is None or run.is_finished:
        return
    if run.status is DagsterRunStatus.CANCELING:
        instance.report_run_canceled(run, f"The run was canceled: {why}.")
    elif begun_here or run.status in {DagsterRunStatus.STARTING, DagsterRunStatus.NOT_STARTED}:
        instance.report_run_failed(run, f"The run ended with its process: {why}.")


def settle_persistently(
    opened: Callable[[], DagsterInstance], run_id: str, why: str, *, begun_here: bool = True
) -> None:
    """Do as :func:`settle` says, again and again for a quarter of an hour while the storage cannot be reached.

    Args:
        opened: gives the instance; to open one may need the storage as well.

    Raises:
        Exception: the storage's last error, after that time.
    """
    ends_at = time.monotonic() + _PATIENCE_SECONDS
    pause = _FIRST_PAUSE_SECONDS
    while True:
        try:
            settle(opened(), run_id, why, begun_here=begun_here)
            return
        except Exception as error:  # any storage may be configured: its errors are its own
            if time.monotonic() + pause > ends_at:
                raise
            _logger.warning("run %s: its end cannot be written yet (%s)", run_id, type(error).__name__)
        time.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)


def keep_canceling(instance: DagsterInstance, run_id: str) -> None:
    """Say again that a run is being canceled, if it is: Dagster's event of its begin made it STARTED.

    Dagster fails an interrupted run that is STARTED, as if nobody had asked for it.
    """
    if _has_event(instance, run_id, frozenset({DagsterEventType.RUN_CANCELING})):
        run = instance.get_run_by_id(run_id)
        if run is not None and run.status is DagsterRunStatus.STARTED:
            instance.report_run_canceling(run, "The run was canceled as it began.")


def end_canceling(instance: DagsterInstance, run_id: str) -> bool:
    """Give a run its end that is CANCELING though it has ended: the request to cancel was written after its end.

    Returns:
        whether it is CANCELED now, be it that its worker saw the request by itself.
    """
    ends_at = time.monotonic() + _STATUS_SECONDS
    while True:
        run = instance.get_run_by_id(run_id)
        if run is not None and run.status is DagsterRunStatus.CANCELED:
            return True
        if run is None or run.status is not DagsterRunStatus.CANCELING or not _has_event(instance, run_id, ENDS):
            return False
        if time.monotonic() > ends_at:
            instance.report_run_canceled(run, "The run ended as it was being canceled.")
            return True
        # Its worker may be between the two.
        time.sleep(_STATUS_SECONDS / 10)


def _has_event(instance: DagsterInstance, run_id: str, kinds: frozenset[DagsterEventType]) -> bool:
    return bool(instance.event_log_storage.get_logs_for_run(run_id, of_type=set(kinds), limit=1))


def describe_exit(pid: int, status: int | None, *, killed_after: float | None = None) -> str:
    """How a run's process ended, for people.

    Args:
        status: as :func:`os.waitpid` gives it; ``None`` for a process that was not this one's child.
        killed_after: seconds after a request to cancel at which the launcher killed it.
    """
    name = f"the worker process {pid}"
    if killed_after is not None:
        return f"{name} did not stop within {killed_after:g} s of being asked to, and was killed"
    if status is None:
        return f"{name} is gone"
    if not os.WIFSIGNALED(status):
        return (
            f"{name} ended with exit code {os.WEXITSTATUS(status)} in the middle of the run, "
            "which os._exit and crashed libraries do"
        )
    number = os.WTERMSIG(status)
    try:
        label = signal.Signals(number).name
    except ValueError:
        label = f"signal {number}"
    hint = _HINTS.get(label, "")
    return f"{name} was killed by {label}{hint}"
