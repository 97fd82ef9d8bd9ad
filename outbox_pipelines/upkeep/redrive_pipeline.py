"""Repairs launched from the UI: dead letters and given-up jobs are put back, a tenant or a day at a time."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import dagster as dg
from dagster import MetadataValue
from pydantic import Field

from outbox_pipelines.database.database import Database
from outbox_pipelines.jobs.actions import NotPossible, UnknownMessage, failed_between, retry
from outbox_pipelines.jobs.kinds import Kinds
from outbox_pipelines.settings import Settings
from outbox_pipelines.tenants.registry import UnknownTenant, get_tenant
from outbox_pipelines.training.dead_letters import (
    MOVED_AT_ONCE,
    count_dead_letters,
    list_dead_letters,
    oldest_ids,
    redrive,
)
from outbox_pipelines.training.pipeline import TENANT_TAG, tenants_partitions
from outbox_pipelines.upkeep.pipeline import days_partitions
from outbox_pipelines.wording import counted

DAY_TAG = "outbox/day"
_TABLE_ROWS = 100


class RedriveConfig(dg.Config):
    """What a redrive may do."""

    dry_run: bool = Field(False, description="Only list what would move.")
    most: int = Field(100_000, ge=1, le=10_000_000, description="Rows to move at most (1 to 10,000,000).")


class FailedJobsConfig(RedriveConfig):
    """A redrive of jobs."""

    kind: str | None = Field(None, description="Jobs of this kind only; all kinds if none.")


@dataclass(frozen=True)
class RedrivePipeline:
    """Makes the two jobs for one installation."""

    settings: Settings
    database: Database
    kinds: Kinds

    def definitions(self) -> dg.Definitions:
        """``dead_letter_redrive``, by tenant, and ``failed_jobs_redrive``, by day."""
        return dg.Definitions(jobs=[self._dead_letters_job(), self._failed_jobs_job()])

    def _dead_letters_job(self) -> dg.JobDefinition:
        @dg.op(
            name="redrive_dead_letters",
            description="Put the tenant's dead letters back into its outbox; they keep their ids.",
            out=dg.Out(dg.Nothing),
            tags={"dagster/compute_kind": "postgres"},
        )
        def redrive_dead_letters(context: dg.OpExecutionContext, config: RedriveConfig) -> Iterable[dg.Output[None]]:
            yield self._redrive_dead_letters(context, config)

        @dg.graph(
            name="dead_letter_redrive",
            description="Sends training examples again that were taken out of the flow. Choose the tenants; a dry run "
            "lists what would move.",
        )
        def dead_letter_redrive() -> None:
            redrive_dead_letters()

        return dead_letter_redrive.to_job(
            config=dg.PartitionedConfig(
                partitions_def=tenants_partitions,
                run_config_for_partition_key_fn=lambda _tenant: {},
                tags_for_partition_key_fn=lambda tenant: {TENANT_TAG: tenant},
            ),
            **self._common(),
        )

    def _failed_jobs_job(self) -> dg.JobDefinition:
        @dg.op(
            name="redrive_failed_jobs",
            description="Make the jobs due again that were given up on the day; they keep their ids and history.",
            out=dg.Out(dg.Nothing),
            tags={"dagster/compute_kind": "postgres"},
        )
        def redrive_failed_jobs(context: dg.OpExecutionContext, config: FailedJobsConfig) -> Iterable[dg.Output[None]]:
            yield self._redrive_failed_jobs(context, config)

        @dg.graph(
            name="failed_jobs_redrive",
            description="Tries background jobs again that were given up. Choose the days on which they were; a dry run "
            "lists what would move.",
        )
        def failed_jobs_redrive() -> None:
            redrive_failed_jobs()

        return failed_jobs_redrive.to_job(
            config=dg.PartitionedConfig(
                partitions_def=days_partitions,
                run_config_for_partition_key_fn=lambda _day: {},
                tags_for_partition_key_fn=lambda day: {DAY_TAG: day},
            ),
            **self._common(),
        )

    def _common(self) -> dict[str, Any]:
        return {
            "executor_def": dg.in_process_executor,
            "owners": [self.settings.owner],
        }

    # The runs

    def _redrive_dead_letters(self, context: dg.OpExecutionContext, config: RedriveConfig) -> dg.Output[None]:
        engine = self.database.migrated_engine()
        try:
            with engine.connect() as connection:
                tenant = get_tenant(connection, context.partition_key)
                there = count_dead_letters(connection, tenant)
                letters = list_dead_letters(connection, tenant, limit=_TABLE_ROWS)
        except UnknownTenant as error:
            raise dg.Failure(str(error), allow_retries=False) from None
        # Without the reasons, in which a service may quote its rows: `outbox dead-letters list` has them.
        table = MetadataValue.table(
            [
                dg.TableRecord({"id": str(one.row_id), "taken out": f"{one.died_at:%Y-%m-%d %H:%M} UTC"})
                for one in letters
            ]
        )
        whose = f"tenant {tenant.name}"
        if config.dry_run:
            count = min(there, config.most)
            context.log.info(f"{whose}: dry run: {counted(count, 'dead letter')} would be put back; nothing was moved")
            return dg.Output(None, metadata={"would move": count, "dead letters": table})
        moved, last = 0, None
        while moved < config.most:
            with engine.begin() as connection:
                ids = oldest_ids(connection, tenant, limit=min(MOVED_AT_ONCE, config.most - moved), after=last)
                if not ids:
                    break
                last = ids[-1]
                # Fewer when somebody else moves some meanwhile.
                moved += len(redrive(connection, tenant, ids))
        context.log.info(f"{whose}: {counted(moved, 'dead letter')} put back; the next flush sends them")
        return dg.Output(None, metadata={"moved": moved, "dead letters": table})

    def _redrive_failed_jobs(self, context: dg.OpExecutionContext, config: FailedJobsConfig) -> dg.Output[None]:
        engine = self.database.migrated_engine()
        window = context.partition_time_window
        begin, end = window.start, window.start + timedelta(days=1)
        with engine.connect() as connection:
            failed = failed_between(connection, begin, end, kind=config.kind, limit=config.most)
        table = MetadataValue.table(
            [
                dg.TableRecord({"id": str(one.message_id), "kind": one.kind, "job": one.job_id or ""})
                for one in failed[:_TABLE_ROWS]
            ]
        )
        if config.dry_run:
            context.log.info(f"dry run: {counted(len(failed), 'job')} would be tried again; nothing was moved")
            return dg.Output(None, metadata={"would move": len(failed), "jobs": table})
        moved, refused = 0, list[str]()
        for one in failed:
            try:
                with engine.begin() as connection:
                    retry(connection, self.kinds, one.message_id)
                moved += 1
            except (NotPossible, UnknownMessage) as error:
                refused.append(str(error))
                context.log.warning(str(error))
        context.log.info(f"{counted(moved, 'job')} due again")
        return dg.Output(
            None,
            metadata={"moved": moved, "not moved": len(refused), "jobs": table},
        )
