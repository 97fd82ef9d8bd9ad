"""The code location that ``benchmarks.runs`` measures with: one small job, and a sensor that asks for its runs."""

import os

import dagster as dg
import psycopg2

PER_TICK = 120
POLL_SECONDS = 10


def _query(statement: str, *parameters: object) -> list[tuple[int]]:
    # With the driver of Dagster's storage, which every run has imported.
    connection = psycopg2.connect(os.environ["BENCH_WORK_URL"])
    try:
        with connection, connection.cursor() as cursor:
            cursor.execute(statement, parameters)
            return list(cursor.fetchall())
    finally:
        connection.close()


@dg.op(out=dg.Out(dg.Nothing))
def small_op() -> None:
    """A query that costs next to nothing."""
    _query("SELECT 1")


@dg.job(executor_def=dg.in_process_executor)
def small_job() -> None:
    """One op in the run's own process."""
    small_op()


@dg.sensor(job=small_job, minimum_interval_seconds=POLL_SECONDS, default_status=dg.DefaultSensorStatus.RUNNING)
def work_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
    """A run for each row that was committed since the last tick."""
    last = int(context.cursor or 0)
    ids = [row[0] for row in _query("SELECT id FROM work WHERE id > %s ORDER BY id LIMIT %s", last, PER_TICK)]
    if not ids:
        return dg.SkipReason("nothing was committed")
    requests = [dg.RunRequest(run_key=str(number), tags={"work": str(number)}) for number in ids]
    return dg.SensorResult(run_requests=requests, cursor=str(ids[-1]))


defs = dg.Definitions(jobs=[small_job], sensors=[work_sensor])
