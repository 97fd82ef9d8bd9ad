"""One small run executed in the launcher's process before any other, so that its forks find everything at hand.

A run imports some sixty modules when it first needs them and has SQLAlchemy compile each of
its statements: over half of a small run's time. What one run has imported and compiled, every fork has.

The run is Dagster's own work from end to end, in the instance's own storage, and leaves no
trace there: all its statements are in one transaction, which is rolled back.
"""

import logging
import signal
import sys
import time

import dagster as dg
from sqlalchemy.exc import OperationalError

from outbox_pipelines.launch.internals import (
    CodePointer,
    DagsterPostgresException,
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
from outbox_pipelines.launch.pool import rolled_back
from outbox_pipelines.launch.rehearsal_job import __file__ as rehearsal_file
from outbox_pipelines.launch.rehearsal_job import rehearsal_job
from outbox_pipelines.launch.storage import is_pooled
from outbox_pipelines.launch.worker import STOP_SIGNALS, execute

_logger = logging.getLogger(__name__)


_RETRY_SECONDS = 1.0


def rehearse(instance_ref: str) -> dict[str, dg.DagsterInstance]:
    """Execute the run, as soon as the instance's storage can be reached; another failure costs speed only.

    Returns:
        the opened instance by its reference, for forks to use: it has looked up what it looks
        up once. Nothing when the storage is not the pooled one: other storages may not survive a fork.
    """
    waits = False
    while True:
        opened: dict[str, dg.DagsterInstance] = {}
        problem = _rehearse(instance_ref, opened)
        if not isinstance(problem, DagsterPostgresException | OperationalError):
            break
        if not waits:
            _logger.warning("waiting for Dagster's storage, which cannot be reached (%s)", type(problem).__name__)
            waits = True
        time.sleep(_RETRY_SECONDS)
    if problem is not None:
        _logger.warning("runs will be slower: the rehearsal failed (%s)", type(problem).__name__)
    return opened


def _rehearse(instance_ref: str, opened: dict[str, dg.DagsterInstance]) -> Exception | None:
    before = logging.root.manager.disable
    # Its events would be told on stderr as those of a real run.
    logging.disable(logging.CRITICAL)
    try:
        with dg.DagsterInstance.ephemeral() as memory:
            _execute_in(memory)
        instance = dg.DagsterInstance.from_ref(deserialize_value(instance_ref, InstanceRef))
        if is_pooled(instance):
            opened[instance_ref] = instance
            with rolled_back():
                _execute_in(instance)
    except Exception as error:  # any storage may be configured; runs report their own failures
        return error
    finally:
        logging.disable(before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return None


def _execute_in(instance: dg.DagsterInstance) -> None:
    run = instance.create_run_for_job(rehearsal_job, job_code_origin=_code(), remote_job_origin=_asked_for_at())
    execute(lambda: instance, run.run_id)
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
