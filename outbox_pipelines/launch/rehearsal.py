"""One small run executed in the launcher's process before any other, so that its forks find everything at hand.

A run imports some sixty modules when it first needs them and has SQLAlchemy compile each of
its statements: over half of a small run's time. What one run has imported and compiled, every fork has.

The run is Dagster's own work from end to end, in the instance's own storage, and leaves no
trace there: all its statements are in one transaction, which is rolled back.
"""

import logging
import signal
import sys

import dagster as dg

from outbox_pipelines.launch.internals import (
    CodePointer,
    GrpcServerCodeLocationOrigin,
    InstanceRef,
    JobPythonOrigin,
    LoadableTargetOrigin,
    ManagedGrpcPythonEnvCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
    RepositoryPythonOrigin,
    deserialize_value,
)
from outbox_pipelines.launch.rehearsal_job import __file__ as rehearsal_file
from outbox_pipelines.launch.rehearsal_job import rehearsal_job
from outbox_pipelines.launch.storage import is_pooled, rolled_back
from outbox_pipelines.launch.worker import STOP_SIGNALS, execute

_logger = logging.getLogger(__name__)


def rehearse(instance_ref: str) -> dict[str, dg.DagsterInstance]:
    """Execute the run; a failure costs speed only, and is logged.

    Returns:
        the opened instance by its reference, for forks to use: it has looked up what it looks
        up once. Nothing when the storage is not the pooled one: other storages may not survive a fork.
    """
    opened: dict[str, dg.DagsterInstance] = {}
    before = logging.root.manager.disable
    # Its events would be told on stderr as those of a real run.
    logging.disable(logging.CRITICAL)
    problem: Exception | None = None
    try:
        with dg.DagsterInstance.ephemeral() as memory:
            _execute_in(memory)
        instance = dg.DagsterInstance.from_ref(deserialize_value(instance_ref, InstanceRef))
        if is_pooled(instance):
            opened[instance_ref] = instance
            with rolled_back():
                _execute_in(instance)
    except Exception as error:  # the storage may be away, or be of any kind; runs report their own failures
        problem = error
    finally:
        logging.disable(before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if problem is not None:
        _logger.warning("the first runs will be slower: the rehearsal failed (%s)", type(problem).__name__)
    return opened


def _execute_in(instance: dg.DagsterInstance) -> None:
    run = instance.create_run_for_job(rehearsal_job, job_code_origin=_code(), remote_job_origin=_asked_for_at())
    execute(instance, run.run_id)
    ended = instance.get_run_by_id(run.run_id)
    if ended is None or not ended.is_success:
        raise RuntimeError("the rehearsal did not succeed")


def _code() -> JobPythonOrigin:
    """Where the job's code is: in a file, which the run loads anew as it does with a user's."""
    pointer = CodePointer.from_python_file(rehearsal_file, "defs", None)
    repository = RepositoryPythonOrigin(executable_path=sys.executable, code_pointer=pointer)
    return JobPythonOrigin(rehearsal_job.name, repository)


def _asked_for_at() -> RemoteJobOrigin:
    """Where the job was asked for: at a code server of either sort. So the classes of both are made ready."""
    GrpcServerCodeLocationOrigin(host="localhost", port=1, location_name="rehearsal")
    target = LoadableTargetOrigin(executable_path=sys.executable, python_file=rehearsal_file, attribute="defs")
    managed = ManagedGrpcPythonEnvCodeLocationOrigin(target, location_name="rehearsal")
    return RemoteJobOrigin(RemoteRepositoryOrigin(managed, "__repository__"), rehearsal_job.name)
