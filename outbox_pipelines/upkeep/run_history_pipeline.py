"""Dagster's own growth: finished runs are pruned, and the ledgers still answer for them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import dagster as dg
from dagster import DagsterEventType, DagsterRunStatus, RunsFilter
from pydantic import Field
from sqlalchemy import Engine, bindparam, text

from outbox_pipelines.database.database import Database
from outbox_pipelines.database.progress import DAILY, note_success
from outbox_pipelines.settings import Settings
from outbox_pipelines.upkeep.pipeline import BACKLOG_ASSETS, SNAPSHOT_JOB
from outbox_pipelines.upkeep.pruned_runs import forget_pruned, note_pruned
from outbox_pipelines.wording import counted

NAME = "run_history_retention"

_AT_ONCE = 100
_HOLDS = {
    DagsterEventType.ASSET_MATERIALIZATION,
    DagsterEventType.ASSET_OBSERVATION,
    DagsterEventType.ASSET_CHECK_EVALUATION,
}
"""Events that an asset's history consists of: deleting their run would delete them."""

_SIZE = """
    SELECT coalesce(sum(pg_total_relation_size(oid)), 0) FROM pg_class
    WHERE relkind = 'r' AND pg_table_is_visible(oid)
      AND relname IN ('runs', 'run_tags', 'event_logs', 'snapshots', 'job_ticks', 'bulk_actions', 'asset_event_tags',
                      'asset_check_executions')
"""

# Dagster leaves these rows behind when it deletes a run.
_DELETE_CHECKS = text("DELETE FROM asset_check_executions WHERE run_id IN :runs").bindparams(
    bindparam("runs", expanding=True)
)


class PruneConfig(dg.Config):
    """What one pruning may do."""

    most: int = Field(100_000, ge=1, le=10_000_000, description="Runs to delete at most (1 to 10,000,000).")


@dataclass
class Pruned:
    """What a pruning did."""

    runs: int = 0
    kept: int = 0
    """Old enough, and kept for the materializations, observations or checks that they hold."""


@dataclass(frozen=True)
class RunHistoryPipeline:
    """Makes the asset for one installation.

    Args:
        settings: how long runs are kept.
        database: with the ledgers.
        jobs: the names of the jobs whose runs are pruned.
    """

    settings: Settings
    database: Database
    jobs: Sequence[str]

    def definitions(self) -> dg.Definitions:
        """The asset, its job and its schedule."""
        asset = self._asset()
        job = dg.define_asset_job(
            "run_history_cleanup",
            selection=dg.AssetSelection.assets(asset),
            description="Prunes finished flush and job runs from Dagster's history.",
            executor_def=dg.in_process_executor,
        )
        schedule = dg.ScheduleDefinition(
            name="run_history_schedule",
            description="Prunes Dagster's history once a day.",
            job=job,
            cron_schedule="40 3 * * *",
            default_status=dg.DefaultScheduleStatus.RUNNING,
            owners=[self.settings.owner],
        )
        return dg.Definitions(assets=[asset], jobs=[job], schedules=[schedule])

    def _asset(self) -> dg.AssetsDefinition:
        @dg.asset(
            name=NAME,
            description="Dagster's own history of flush and job runs: those that succeeded are deleted after "
            f"{self.settings.run_retention_days:g} days, failed and canceled ones after "
            f"{self.settings.failed_run_retention_days:g}. Runs that hold materializations are kept, but for backlog "
            f"snapshots of more than {self.settings.backlog_retention_days:g} days ago. The ledgers still say which "
            "run delivered or attempted what.",
            group_name="retention",
            kinds={"postgres"},
            owners=[self.settings.owner],
        )
        def run_history(context: dg.AssetExecutionContext, config: PruneConfig) -> dg.MaterializeResult[None]:
            return self._prune(context, config)

        return run_history

    def _prune(self, context: dg.AssetExecutionContext, config: PruneConfig) -> dg.MaterializeResult[None]:
        engine = self.database.migrated_engine()
        before = _bytes(context.instance)
        done = prune(
            context.instance,
            engine,
            self.jobs,
            days=self.settings.run_retention_days,
            failed_days=self.settings.failed_run_retention_days,
            snapshot_days=self.settings.backlog_retention_days,
            most=config.most,
        )
        with engine.begin() as connection:
            note_success(connection, NAME, done.runs, every=DAILY)
            # As long as the ledgers may name a run, and no longer.
            forget_pruned(
                connection,
                days=max(self.settings.training_ledger_retention_days, self.settings.job_ledger_retention_days),
            )
        after = _bytes(context.instance)
        context.log.info(f"{counted(done.runs, 'run')} pruned, {counted(done.kept, 'old run')} kept for what they hold")
        sizes = {} if before is None or after is None else {"bytes before": before, "bytes after": after}
        return dg.MaterializeResult(metadata={"runs pruned": done.runs, "old runs kept": done.kept, **sizes})


def prune(
    instance: dg.DagsterInstance,
    engine: Engine,
    jobs: Sequence[str],
    *,
    days: float,
    failed_days: float,
    snapshot_days: float,
    most: int,
) -> Pruned:
    """Delete finished runs that are older than their age, the oldest first.

    Args:
        instance: where the runs are.
        engine: the database of the ledgers, in which it is noted what was pruned.
        jobs: of these jobs, and backlog snapshots.
        days: age of runs that succeeded.
        failed_days: age of runs that failed or were canceled.
        snapshot_days: age of snapshots that succeeded. The last of each asset stays.
        most: delete at most so many.
    """
    done = Pruned()
    with engine.connect() as connection:
        now: datetime = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
    last_snapshots = _last_materializations(instance, BACKLOG_ASSETS)
    for job, age_of_success, holds in [
        *((job, days, lambda run_id: _holds_history(instance, run_id)) for job in jobs),
        (SNAPSHOT_JOB, snapshot_days, last_snapshots.__contains__),
    ]:
        for statuses, age in (
            ([DagsterRunStatus.SUCCESS], age_of_success),
            ([DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED], failed_days),
        ):
            wanted = RunsFilter(job_name=job, statuses=statuses, updated_before=now - timedelta(days=age))
            for batch in _batches(instance, wanted, holds, done):
                batch = batch[: most - done.runs]
                with engine.begin() as connection:
                    # Before: a run that is gone and not noted would look as if it had never been.
                    note_pruned(connection, batch)
                for run_id in batch:
                    instance.delete_run(run_id)
                _delete_checks(instance, batch)
                done.runs += len(batch)
                if done.runs >= most:
                    return done
    return done


def _batches(
    instance: dg.DagsterInstance, wanted: RunsFilter, holds: Callable[[str], bool], done: Pruned
) -> Iterator[list[str]]:
    """Ids of runs that may go; to be deleted before the next are asked for."""
    last_kept: str | None = None
    while True:
        runs = instance.get_runs(wanted, cursor=last_kept, limit=_AT_ONCE, ascending=True)
        if not runs:
            return
        kept = [run.run_id for run in runs if holds(run.run_id)]
        done.kept += len(kept)
        last_kept = kept[-1] if kept else last_kept
        if going := [run.run_id for run in runs if run.run_id not in set(kept)]:
            yield going


def _last_materializations(instance: dg.DagsterInstance, assets: Sequence[str]) -> set[str]:
    """The runs that hold what the UI shows as the assets' present state."""
    found = (instance.get_latest_materialization_event(dg.AssetKey(asset)) for asset in assets)
    return {event.run_id for event in found if event is not None}


def _delete_checks(instance: dg.DagsterInstance, run_ids: Sequence[str]) -> None:
    connect: Any = getattr(instance.event_log_storage, "index_connection", None)
    if connect is not None:
        with connect() as connection:
            connection.execute(_DELETE_CHECKS, {"runs": list(run_ids)})


def _holds_history(instance: dg.DagsterInstance, run_id: str) -> bool:
    return bool(instance.event_log_storage.get_logs_for_run(run_id, of_type=_HOLDS, limit=1))


def _bytes(instance: dg.DagsterInstance) -> int | None:
    """What Dagster's tables and their indexes take on disk; unknown for a storage that is not PostgreSQL."""
    connect: Any = getattr(instance.run_storage, "connect", None)
    if connect is None:
        return None
    with connect() as connection:
        if connection.dialect.name != "postgresql":
            return None
        return int(connection.execute(text(_SIZE)).scalar_one())
