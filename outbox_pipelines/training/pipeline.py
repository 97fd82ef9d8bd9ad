"""The training outbox in Dagster: partitions, flush jobs and the sensor that polls."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg
from dagster import DagsterRunStatus, MetadataValue, RunsFilter
from pydantic import Field
from sqlalchemy.exc import DBAPIError

from outbox_pipelines.database.database import Database
from outbox_pipelines.database.error_text import first_line
from outbox_pipelines.database.progress import note_success
from outbox_pipelines.settings import LOCAL_MODE, RUN_START_SECONDS, Settings, TrainMode
from outbox_pipelines.tenants.registry import Tenant, UnknownTenant, get_tenant
from outbox_pipelines.training import outbox
from outbox_pipelines.training.backlog import Backlog, Standing, count_waiting, look, note_reachability
from outbox_pipelines.training.flusher import Flusher, FlushReport
from outbox_pipelines.training.outcome import Ending
from outbox_pipelines.training.report import ending_words, failure_line, standings, tenant_line
from outbox_pipelines.training.sink import SinkFactory
from outbox_pipelines.wording import counted

SENSOR = "training_outbox_sensor"
TENANT_TAG = "outbox/tenant"
TRIGGER_TAG = "outbox/trigger"
PARTITIONS_CHUNK = 1_000
"""Partitions added or deleted in one request."""

_TABLE_ROWS = 100
_QUEUED = [DagsterRunStatus.QUEUED, DagsterRunStatus.NOT_STARTED]
_RUNNING = [DagsterRunStatus.STARTING, DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING]
tenants_partitions = dg.DynamicPartitionsDefinition(name="tenants")


class FlushConfig(dg.Config):
    """What one flush run may do; the defaults are the installation's settings."""

    dry_run: bool = Field(False, description="Only count what waits; claim, send and delete nothing.")
    max_turns: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="Turns of each tenant at most (1 to 1,000,000); none: no such limit.",
    )
    budget_seconds: float | None = Field(
        None,
        ge=0,
        le=3600,
        description="Seconds until no further turn begins (0 to 3,600); OUTBOX_BUDGET_SECONDS if none.",
    )


class FleetFlushConfig(FlushConfig):
    """A flush of several tenants in one run."""

    tenants: list[str] = Field(min_length=1, max_length=10_000, description="Names of the tenants to flush.")


@dataclass(frozen=True)
class TrainingPipeline:
    """Makes the definitions of the training outbox for one installation."""

    settings: Settings
    database: Database
    make_sink: SinkFactory

    def definitions(self) -> dg.Definitions:
        """Two jobs and the sensor that launches them."""
        jobs = self._jobs()
        return dg.Definitions(jobs=jobs, sensors=[self._sensor(jobs)])

    def _jobs(self) -> Sequence[dg.JobDefinition]:
        @dg.op(
            name="flush_tenant",
            description="Claim the tenant's lease, send its rows in batches, delete what was delivered.",
            out=dg.Out(dg.Nothing),
            tags={"dagster/compute_kind": "grpc"},
        )
        def flush_tenant(context: dg.OpExecutionContext, config: FlushConfig) -> Iterable[dg.Output[None]]:
            yield self._flush(context, config, [context.partition_key])

        @dg.op(
            name="flush_fleet",
            description="Claim one tenant after another and flush them side by side, turn by turn.",
            out=dg.Out(dg.Nothing),
            tags={"dagster/compute_kind": "grpc"},
        )
        def flush_fleet(context: dg.OpExecutionContext, config: FleetFlushConfig) -> Iterable[dg.Output[None]]:
            yield self._flush(context, config, config.tenants)

        @dg.graph(
            name="tenant_flush",
            description="Carries a tenant's training examples to the ML service. Launch or backfill any tenants here.",
        )
        def tenant_flush() -> None:
            flush_tenant()

        @dg.graph(
            name="fleet_flush",
            description="Carries many tenants' training examples in one run, when more are due than runs are started.",
        )
        def fleet_flush() -> None:
            flush_fleet()

        common: dict[str, Any] = {
            "executor_def": dg.in_process_executor,
            # Kept few: each tag of a run is a row and an index entry.
            "run_tags": {TRIGGER_TAG: "manual"},
            "metadata": {"ledger": "outbox.training_ledger", "guarantees": "docs/guarantees.md"},
            "owners": [self.settings.owner],
        }
        config = dg.PartitionedConfig(
            partitions_def=tenants_partitions,
            run_config_for_partition_key_fn=lambda _tenant: {},
            tags_for_partition_key_fn=lambda tenant: {TENANT_TAG: tenant},
        )
        return tenant_flush.to_job(config=config, **common), fleet_flush.to_job(**common)

    def _sensor(self, jobs: Sequence[dg.JobDefinition]) -> dg.SensorDefinition:
        return dg.SensorDefinition(
            name=SENSOR,
            description="Looks which tenants have training rows waiting and starts their flush runs.",
            evaluation_fn=self._tick,
            jobs=jobs,
            minimum_interval_seconds=self.settings.poll_seconds,
            default_status=dg.DefaultSensorStatus.RUNNING,
            owners=[self.settings.owner],
        )

    # The runs

    def _flush(self, context: dg.OpExecutionContext, config: FlushConfig, names: Sequence[str]) -> dg.Output[None]:
        engine = self.database.migrated_engine()
        tenants, unknown = [], []
        with engine.connect() as connection:
            for name in dict.fromkeys(names):
                try:
                    tenants.append(get_tenant(connection, name))
                except UnknownTenant as error:
                    # Removed since the run was requested: the others are not affected.
                    unknown.append(str(error))
                    context.log.warning(str(error))
        if unknown and not tenants:
            raise dg.Failure(unknown[0], allow_retries=False)
        if config.dry_run:
            return self._dry_run(context, tenants)
        if self.settings.train_mode is TrainMode.LOCAL:
            raise dg.Failure(f"{LOCAL_MODE}; no row was sent", allow_retries=False)
        sink = self.make_sink()
        try:
            report = Flusher(engine, sink, self.settings, run_id=context.run_id).flush(
                tenants, max_turns=config.max_turns, budget_seconds=config.budget_seconds
            )
        finally:
            sink.close()
        for entry in report.tenants:
            context.log.info(tenant_line(entry))
        metadata = _metadata(report, context.run_id)
        if report.failed:
            raise dg.Failure(failure_line(report), metadata=metadata, allow_retries=False)
        return dg.Output(None, metadata=metadata)

    def _dry_run(self, context: dg.OpExecutionContext, tenants: Sequence[Tenant]) -> dg.Output[None]:
        records = []
        total = 0
        for tenant in tenants:
            try:
                with self.database.engine.connect() as connection:
                    rows = outbox.count_rows(connection, tenant)
            except DBAPIError as error:
                records.append(dg.TableRecord({"tenant": tenant.name, "rows": 0, "error": first_line(error.orig)}))
                continue
            total += rows
            records.append(dg.TableRecord({"tenant": tenant.name, "rows": rows, "error": ""}))
        context.log.info(f"dry run: {counted(total, 'row')} waiting; nothing was sent")
        return dg.Output(None, metadata={"rows waiting": total, "tenants": MetadataValue.table(records[:_TABLE_ROWS])})

    # The sensor

    def _tick(self, context: dg.SensorEvaluationContext) -> dg.SensorResult:
        result = self._poll(context)
        with self.database.engine.begin() as connection:
            note_success(connection, SENSOR, every=self.settings.poll_seconds)
        return result

    def _poll(self, context: dg.SensorEvaluationContext) -> dg.SensorResult:
        engine = self.database.migrated_engine()
        backlog = look(engine)
        changes = _partition_changes(
            set(context.instance.get_dynamic_partitions("tenants")), {entry.tenant.name for entry in backlog.tenants}
        )
        if self.settings.train_mode is TrainMode.LOCAL:
            skip = self._nothing(backlog, LOCAL_MODE)
            return dg.SensorResult(skip_reason=skip, dynamic_partitions_requests=changes)
        due = backlog.due
        if due or backlog.standing(Standing.BACKING_OFF):
            unreachable = self._unreachable(backlog)
            if unreachable is not None:
                return dg.SensorResult(skip_reason=unreachable, dynamic_partitions_requests=changes)
        if due:
            in_flight = _tenants_in_flight(context.instance, believe_for=self._longest_run())
            due = [entry for entry in due if entry.tenant.name not in in_flight]
        if not due:
            return dg.SensorResult(skip_reason=standings(backlog), dynamic_partitions_requests=changes)
        requests = _deal([entry.tenant.name for entry in due], self.settings.runs_per_tick)
        return dg.SensorResult(run_requests=requests, dynamic_partitions_requests=changes)

    def _longest_run(self) -> timedelta:
        return timedelta(seconds=RUN_START_SECONDS + self.settings.budget_seconds + self.settings.lease_seconds)

    def _unreachable(self, backlog: Backlog) -> str | None:
        sink = self.make_sink()
        try:
            health = sink.probe()
        finally:
            sink.close()
        with self.database.engine.begin() as connection:
            known = note_reachability(connection, sink.target, reachable=health.reachable, detail=health.detail)
        if known.reachable:
            return None
        return self._nothing(backlog, f"{sink.target} unreachable since {known.since:%H:%M:%S} UTC ({known.detail})")

    def _nothing(self, backlog: Backlog, fact: str) -> str:
        count = count_waiting(self.database.engine, backlog.waiting)
        return f"{fact}; {count} wait" if count.rows else f"{fact}; no rows wait"


def _tenants_in_flight(instance: dg.DagsterInstance, *, believe_for: timedelta) -> set[str]:
    """Tenants that a queued or running flush already covers.

    Only to spare runs: what keeps two runs off one tenant is its lease. A run that is said to
    be running is believed for a while after its last change of status; then its process may be
    gone unnoticed, and waiting for it would starve the tenant.
    """
    young = datetime.now(UTC) - believe_for
    tenants: set[str] = set()
    for job_name in ("tenant_flush", "fleet_flush"):
        for run in (
            *instance.get_runs(RunsFilter(job_name=job_name, statuses=_QUEUED)),
            *instance.get_runs(RunsFilter(job_name=job_name, statuses=_RUNNING, updated_after=young)),
        ):
            config: Any = run.run_config
            tenants.update(filter(None, [run.tags.get(TENANT_TAG)]))
            tenants.update(config.get("ops", {}).get("flush_fleet", {}).get("config", {}).get("tenants", []))
    return tenants


def _deal(tenants: Sequence[str], runs: int) -> list[dg.RunRequest]:
    """A run each, or as many fleet runs with the tenants dealt out like cards.

    No run key: it would block a tenant for as long as the run's row exists. A request that
    comes twice gives a run that finds the lease taken or nothing to send, and ends well.
    """
    if len(tenants) <= runs:
        return [
            dg.RunRequest(
                job_name="tenant_flush", partition_key=tenant, tags={TENANT_TAG: tenant, TRIGGER_TAG: "sensor"}
            )
            for tenant in tenants
        ]
    return [
        dg.RunRequest(
            job_name="fleet_flush",
            run_config={"ops": {"flush_fleet": {"config": {"tenants": list(tenants[place::runs])}}}},
            tags={TRIGGER_TAG: "sensor"},
        )
        for place in range(runs)
    ]


def _partition_changes(
    known: set[str], registered: set[str]
) -> list[dg.AddDynamicPartitionsRequest | dg.DeleteDynamicPartitionsRequest]:
    """The differences alone, in chunks."""
    added, gone = sorted(registered - known), sorted(known - registered)
    return [
        *(tenants_partitions.build_add_request(chunk) for chunk in _chunks(added)),
        *(tenants_partitions.build_delete_request(chunk) for chunk in _chunks(gone)),
    ]


def _chunks(names: list[str]) -> list[list[str]]:
    return [names[begin : begin + PARTITIONS_CHUNK] for begin in range(0, len(names), PARTITIONS_CHUNK)]


def _metadata(report: FlushReport, run_id: str) -> dict[str, Any]:
    query = (
        "```sql\nSELECT delivered_at, batch_key, row_ids FROM outbox.training_ledger\n"
        f"WHERE run_id = '{run_id}' ORDER BY delivered_at;\n```"
    )
    firsts = [entry.first_id for entry in report.tenants if entry.first_id is not None]
    lasts = [entry.last_id for entry in report.tenants if entry.last_id is not None]
    metadata: dict[str, Any] = {
        "rows": report.rows,
        "batches": report.batches,
        "rejected": report.dead_letters,
        **({"first id": min(firsts), "last id": max(lasts)} if firsts and len(report.tenants) == 1 else {}),
        "seconds": round(report.seconds, 3),
        "ledger query": MetadataValue.md(query),
    }
    if len(report.tenants) == 1:
        return {**metadata, "ended": ending_words(report.tenants[0])}
    records = [
        dg.TableRecord(
            {
                "tenant": entry.tenant.name,
                "ended": ending_words(entry),
                "rows": entry.rows,
                "batches": entry.batches,
                "rejected": entry.dead_letters,
                "first id": "" if entry.first_id is None else str(entry.first_id),
                "last id": "" if entry.last_id is None else str(entry.last_id),
                "seconds": round(entry.seconds, 3),
            }
        )
        for entry in sorted(report.tenants, key=lambda entry: entry.ending is not Ending.FAILED)[:_TABLE_ROWS]
    ]
    metadata["tenants"] = len(report.tenants)
    metadata["by tenant"] = MetadataValue.table(records)
    return metadata
