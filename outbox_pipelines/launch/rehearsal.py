"""One small run executed in the launcher's process before any other, so that its forks find everything at hand.

A run imports some sixty modules when it first needs them and has SQLAlchemy compile each of
its statements: over half of a small run's time. What one run has imported and compiled, every fork has.

The run is Dagster's own work from end to end, in the instance's own storage, and leaves no
trace there: all its statements are in one transaction, which is rolled back.
"""

import logging

import dagster as dg

from outbox_pipelines.launch.internals import (
    InstanceRef,
    deserialize_value,
    execute_run,
    recon_job_for,
)
from outbox_pipelines.launch.storage import is_pooled, rolled_back

_logger = logging.getLogger(__name__)


@dg.op(out=dg.Out(dg.Nothing))
def rehearse_op(context: dg.OpExecutionContext) -> None:
    """What a small run does: it says something."""
    context.log.debug("rehearsal")


@dg.job(executor_def=dg.in_process_executor)
def rehearsal_job() -> None:
    """Run in the launcher's process, where its traces are rolled back."""
    rehearse_op()


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
    if problem is not None:
        _logger.warning("the first runs will be slower: the rehearsal failed (%s)", type(problem).__name__)
    return opened


def _execute_in(instance: dg.DagsterInstance) -> None:
    recon_job = recon_job_for(rehearsal_job)
    run = instance.create_run_for_job(rehearsal_job, job_code_origin=recon_job.get_python_origin())
    execute_run(run.run_id, instance, lambda _event: None, set_exit_code_on_failure=False)
    ended = instance.get_run_by_id(run.run_id)
    if ended is None or not ended.is_success:
        raise RuntimeError("the rehearsal did not succeed")
