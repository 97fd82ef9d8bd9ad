"""Upkeep in Dagster: retention and backlog assets, their checks, and the schedules that keep them fresh."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

import dagster as dg
from sqlalchemy import Engine, text

from outbox_pipelines.database.database import Database
from outbox_pipelines.database.progress import DAILY, expect, note_success
from outbox_pipelines.settings import Settings
from outbox_pipelines.upkeep import checks
from outbox_pipelines.upkeep.archive import ArchiveFailed
from outbox_pipelines.upkeep.asset_metadata import backlog_metadata, purge_metadata
from outbox_pipelines.upkeep.checks import Finding, Severity
from outbox_pipelines.upkeep.reconciliation import forget_removed, reconcile
from outbox_pipelines.upkeep.retention import (
    FIRST_DAY,
    PurgedDay,
    Retention,
    TooYoung,
    due_days,
    oldest_left,
    purge_days,
    retentions,
)
from outbox_pipelines.upkeep.snapshot import (
    Snapshot,
    forget_history,
    latest,
    take_jobs,
    take_training,
)
from outbox_pipelines.upkeep.totals import roll_up
from outbox_pipelines.wording import counted

RETENTION_GROUP = "retention"
BACKLOG_GROUP = "backlog"
BACKLOG_ASSETS = ("training_backlog", "job_backlog")
SNAPSHOT_JOB = "backlog_snapshot"

days_partitions = dg.DailyPartitionsDefinition(start_date=FIRST_DAY.isoformat(), timezone="UTC")

_RANGE_START_TAG = "dagster/asset_partition_range_start"
_RANGE_END_TAG = "dagster/asset_partition_range_end"
_SNAPSHOT_MINUTES = 5

_NO_SNAPSHOT = Finding(True, "no snapshot yet: materialize the asset")


@dataclass(frozen=True)
class UpkeepPipeline:
    """Makes the definitions of upkeep for one installation."""

    settings: Settings
    database: Database

    def definitions(self) -> dg.Definitions:
        """Assets, checks, the two jobs over them, and their schedules."""
        kept = {retention.name: retention for retention in retentions(self.settings)}
        purges = [self._retention_asset(retention) for retention in kept.values()]
        purge_checks = [self._retention_check(retention) for retention in kept.values()]
        backlogs = [self._training_backlog(), self._job_backlog()]
        retention_job = dg.define_asset_job(
            "daily_retention",
            selection=dg.AssetSelection.assets(*purges),
            description="Purges what is older than its retention. Launch or backfill any days here.",
            executor_def=dg.in_process_executor,
        )
        snapshot_job = dg.define_asset_job(
            SNAPSHOT_JOB,
            # The checks of the purges as well: they are to speak up when no purge runs any more.
            selection=dg.AssetSelection.assets(*backlogs) | dg.AssetSelection.checks(*purge_checks),
            description="Looks what waits, for how long and whether it grows, and checks it and the purges.",
            executor_def=dg.in_process_executor,
        )
        return dg.Definitions(
            assets=[*purges, *backlogs],
            asset_checks=[self._training_checks(), self._job_checks(), *purge_checks],
            jobs=[retention_job, snapshot_job],
            schedules=[
                dg.ScheduleDefinition(
                    name="backlog_snapshot_schedule",
                    description="What waits is looked at every five minutes.",
                    job=snapshot_job,
                    cron_schedule=f"*/{_SNAPSHOT_MINUTES} * * * *",
                    default_status=dg.DefaultScheduleStatus.RUNNING,
                    owners=[self.settings.owner],
                ),
                self._retention_schedule(retention_job, kept),
            ],
        )

    # Retention

    def _retention_asset(self, retention: Retention) -> dg.AssetsDefinition:
        @dg.asset(
            name=retention.name,
            description=f"{retention.description} Kept for {retention.days:g} days ({retention.setting}). "
            "To materialize a day deletes its rows, 500 at most in one transaction; younger days refuse. "
            "A day that was never materialized had nothing to delete, or is not old enough.",
            partitions_def=days_partitions,
            backfill_policy=dg.BackfillPolicy.single_run(),
            group_name=RETENTION_GROUP,
            kinds={"postgres"},
            owners=[self.settings.owner],
            metadata={"retention (days)": retention.days, "setting": retention.setting},
        )
        def purge_of_days(context: dg.AssetExecutionContext) -> None:
            self._purge(context, retention)

        return purge_of_days

    def _purge(self, context: dg.AssetExecutionContext, retention: Retention) -> None:
        def told(day: PurgedDay) -> None:
            purged = day.purged
            line = f"{day.day}: {counted(purged.rows, retention.noun)} in {counted(purged.batches, 'transaction')}"
            context.log.info(f"{line}, {purged.seconds:.1f} s")
            context.add_asset_metadata(purge_metadata(day), partition_key=day.day.isoformat())

        try:
            purge_days(
                self.database.migrated_engine(),
                retention,
                [date.fromisoformat(key) for key in context.partition_keys],
                pause=self.settings.purge_pause_seconds,
                archive_dir=self.settings.archive_dir,
                on_day=told,
            )
        except (TooYoung, ArchiveFailed) as error:
            raise dg.Failure(f"{retention.name}, {error}", allow_retries=False) from None

    def _retention_schedule(self, job: Any, kept: dict[str, Retention]) -> dg.ScheduleDefinition:
        def request(_context: dg.ScheduleEvaluationContext) -> Iterable[dg.SkipReason | dg.RunRequest]:
            engine = self.database.migrated_engine()
            spans = {name: due_days(engine, retention) for name, retention in kept.items()}
            requests = [
                dg.RunRequest(
                    run_key=f"{name}:{span[0]}:{span[1]}",
                    asset_selection=[dg.AssetKey(name)],
                    tags={_RANGE_START_TAG: span[0].isoformat(), _RANGE_END_TAG: span[1].isoformat()},
                )
                for name, span in spans.items()
                if span is not None
            ]
            with engine.begin() as connection:
                # Nothing to do is a success, too.
                for name, span in spans.items():
                    if span is None:
                        note_success(connection, name, every=DAILY)
                forget_history(connection, days=self.settings.backlog_retention_days)
                # As long as the ledger may say of a row that it was delivered.
                forget_removed(connection, days=self.settings.training_ledger_retention_days)
            ages = ", ".join(f"{retention.noun}s {retention.days:g} days" for retention in kept.values())
            yield from requests
            if not requests:
                yield dg.SkipReason(f"nothing is older than it is kept: {ages}")

        return dg.ScheduleDefinition(
            name="daily_retention_schedule",
            description="Purges every day that is old enough and still has rows, also those of days it missed.",
            job=job,
            cron_schedule="10 3 * * *",
            execution_fn=request,
            default_status=dg.DefaultScheduleStatus.RUNNING,
            owners=[self.settings.owner],
        )

    def _retention_check(self, retention: Retention) -> dg.AssetChecksDefinition:
        @dg.asset_check(
            asset=retention.name,
            name="retention_keeps_up",
            description="Nothing is kept for more than two days longer than the retention says.",
        )
        def retention_keeps_up() -> dg.AssetCheckResult:
            engine = self.database.migrated_engine()
            with engine.connect() as connection:
                now = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
            return _result(
                checks.retention_keeps_up(
                    oldest_left(engine, retention),
                    now,
                    days=retention.days,
                    noun=retention.noun,
                    remedy=f"turn daily_retention_schedule on, or backfill the days of {retention.name}",
                )
            )

        return retention_keeps_up

    # Backlog

    def _training_backlog(self) -> dg.AssetsDefinition:
        return self._backlog_asset(
            "training_backlog",
            "What waits in the tenants' training outboxes, for how long, and whether it grows.",
            take_training,
        )

    def _job_backlog(self) -> dg.AssetsDefinition:
        return self._backlog_asset(
            "job_backlog",
            "Background jobs by kind and state: what waits, for how long, and whether it grows.",
            take_jobs,
        )

    def _backlog_asset(self, name: str, description: str, take: Any) -> dg.AssetsDefinition:
        @dg.asset(
            name=name,
            description=f"{description} History: outbox.{name}.",
            group_name=BACKLOG_GROUP,
            kinds={"postgres", "pandas"},
            owners=[self.settings.owner],
            freshness_policy=dg.FreshnessPolicy.time_window(
                fail_window=timedelta(minutes=4 * _SNAPSHOT_MINUTES),
                warn_window=timedelta(minutes=2 * _SNAPSHOT_MINUTES),
            ),
        )
        def backlog() -> dg.MaterializeResult[None]:
            engine = self.database.migrated_engine()
            snapshot: Snapshot = take(engine)
            # So that there is never much to count when metrics are asked for.
            roll_up(engine, tenants=self.settings.metrics_tenants)
            with engine.begin() as connection:
                note_success(connection, name, every=60.0 * _SNAPSHOT_MINUTES)
                expect(connection, {retention.name: DAILY for retention in retentions(self.settings)})
            return dg.MaterializeResult(metadata=backlog_metadata(engine, name, snapshot))

        return backlog

    def _training_checks(self) -> dg.AssetChecksDefinition:
        settings = self.settings

        def evaluate(engine: Engine) -> dict[str, Finding]:
            with engine.connect() as connection:
                rows = latest(connection, "training_backlog")
                if rows is None:
                    return {}
                return {
                    "oldest_wait": checks.oldest_wait(
                        _waits(rows, "tenant"),
                        "tenant",
                        targets=settings.training_wait_targets,
                        default=settings.training_wait_target_seconds,
                        remedy=checks.TRAINING_WAIT_REMEDY,
                    ),
                    "no_new_dead_letters": checks.nothing_new_died(
                        rows,
                        "tenant",
                        died="died",
                        noun="dead letter",
                        remedy="`outbox dead-letters list` says why; the job dead_letter_redrive puts them back",
                    ),
                    "keeps_up": checks.keeps_up(
                        connection,
                        "training_backlog",
                        remedy="give the flush runs more places (outbox/trigger in dagster.yaml), raise "
                        "OUTBOX_BATCH_SIZE and OUTBOX_MAX_ROWS_PER_TURN, or see whether the ML service is slow",
                    ),
                }

        def evaluate_all(engine: Engine) -> dict[str, Finding]:
            return {**evaluate(engine), "reconciliation": reconcile(engine)}

        return self._checks(
            "training_backlog",
            {
                "oldest_wait": "No tenant's rows wait longer than its target (OUTBOX_TRAINING_WAIT_TARGETS).",
                "no_new_dead_letters": "Nothing was taken out of the flow since the last snapshot.",
                "keeps_up": "Over the last hour no less left than came.",
                "reconciliation": "Every row that left an outbox is in the ledger once, in the dead letters, or noted "
                "as removed by hand.",
            },
            evaluate_all,
        )

    def _job_checks(self) -> dg.AssetChecksDefinition:
        settings = self.settings

        def evaluate(engine: Engine) -> dict[str, Finding]:
            with engine.connect() as connection:
                expired = checks.expired_leases(connection, older_than=2 * settings.recovery_seconds)
                rows = latest(connection, "job_backlog")
                if rows is None:
                    return {"expired_leases": expired}
                return {
                    "oldest_wait": checks.oldest_wait(
                        _waits(rows, "kind"),
                        "kind",
                        targets=settings.job_wait_targets,
                        default=settings.job_wait_target_seconds,
                        remedy=checks.JOB_WAIT_REMEDY,
                    ),
                    "expired_leases": expired,
                    "no_new_failures": checks.nothing_new_died(
                        rows,
                        "kind",
                        died="gave_up",
                        noun="job given up",
                        remedy="see `outbox jobs list --outcome failed`; the job failed_jobs_redrive puts them back",
                    ),
                    "keeps_up": checks.keeps_up(
                        connection, "job_backlog", remedy="give the kinds that grow more consumers, or start workers"
                    ),
                }

        return self._checks(
            "job_backlog",
            {
                "oldest_wait": "No kind's due jobs wait longer than its target (OUTBOX_JOB_WAIT_TARGETS).",
                "expired_leases": "No lease ended longer ago than two rounds of recovery.",
                "no_new_failures": "No job was given up since the last snapshot.",
                "keeps_up": "Over the last hour no less left than came.",
            },
            evaluate,
        )

    def _checks(self, asset: str, described: dict[str, str], evaluate: Any) -> dg.AssetChecksDefinition:
        @dg.multi_asset_check(
            name=f"{asset}_checks",
            specs=[dg.AssetCheckSpec(name, asset=asset, description=text) for name, text in described.items()],
            # So that the UI lets each be executed by itself.
            can_subset=True,
        )
        def all_checks(context: dg.AssetCheckExecutionContext) -> Iterable[dg.AssetCheckResult]:
            found: dict[str, Finding] = evaluate(self.database.migrated_engine())
            for name in sorted(key.name for key in context.selected_asset_check_keys):
                yield _result(found.get(name, _NO_SNAPSHOT), name=name, asset=asset)

        return all_checks


def _waits(rows: Any, names: str) -> dict[str, float]:
    return dict(zip(rows[names], rows["oldest_wait_seconds"].fillna(0.0), strict=True))


def _result(finding: Finding, **where: Any) -> dg.AssetCheckResult:
    names = {"check_name": where["name"], "asset_key": where["asset"]} if where else {}
    severity = dg.AssetCheckSeverity.ERROR if finding.severity is Severity.ERROR else dg.AssetCheckSeverity.WARN
    return dg.AssetCheckResult(
        passed=finding.passed,
        severity=severity,
        description=finding.text,
        metadata=dict(finding.numbers),
        **names,
    )
