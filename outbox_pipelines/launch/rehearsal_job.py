"""What the rehearsal executes, loaded from this file as user code is."""

import dagster as dg


@dg.op(out=dg.Out(dg.Nothing))
def rehearse_op(context: dg.OpExecutionContext) -> None:
    """What a small run does: it says something."""
    context.log.info("rehearsal")


@dg.job(executor_def=dg.in_process_executor)
def rehearsal_job() -> None:
    """Run in the launcher's process, where its traces are rolled back."""
    rehearse_op()


defs = dg.Definitions(jobs=[rehearsal_job])
