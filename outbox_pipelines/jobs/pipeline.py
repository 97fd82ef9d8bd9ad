"""The job outbox in Dagster: a job and a sensor for each kind, and the recovery sensor."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg
from dagster import DagsterRunStatus, MetadataValue, RunsFilter
from pydantic import Field
from sqlalchemy import Engine

from outbox_pipelines.database.database import Database
from outbox_pipelines.database.progress import RECOVERY, expect, note_success
from outbox_pipelines.jobs.keeper import LeaseKeeper
from outbox_pipelines.jobs.kinds import JobKind, Kinds
from outbox_pipelines.jobs.message import AttemptOutcome, NotClaimed
from outbox_pipelines.jobs.publisher import Publisher, places, served_by_runs
from outbox_pipelines.jobs.recovery import note_served, recover, recover_orphans, sensor_name
from outbox_pipelines.jobs.report import not_claimed_line, polled_line, report_line
from outbox_pipelines.jobs.runner import Report, Runner
from outbox_pipelines.jobs.transport import Fate, Published, Served
from outbox_pipelines.settings import RUN_START_SECONDS, Settings

KIND_TAG = "outbox/kind"
MESSAGE_TAG = "outbox/message"
ATTEMPT_TAG = "outbox/attempt"
RUN_KEY_TAG = "dagster/run_key"
RECOVERY_SENSOR = "job_recovery_sensor"
SERVER = "dagster"

_KEEPER_DELAY_SECONDS = 2.0
"""Jobs that are over before need no keeper; the first heartbeat is due after 5 s at the earliest."""


class JobConfig(dg.Config):
    """Which message a run is for."""

    message: int = Field(ge=1, description="Id of the message; `outbox jobs list` shows them.")


@dataclass(frozen=True)
class JobPipeline:
    """Makes the definitions of the job outbox for one installation."""

    settings: Settings
    database: Database
    kinds: Kinds
    _orphans_recovered: threading.Event = field(default_factory=threading.Event)

    def definitions(self) -> dg.Definitions:
        """A job and a sensor for each kind; nothing where there are none."""
        if not self.kinds:
            return dg.Definitions()
        op = self._op()
        jobs = {name: self._job(kind, op) for name, kind in self.kinds.items()}
        sensors = [self._sensor(kind, jobs[name]) for name, kind in self.kinds.items()]
        return dg.Definitions(jobs=list(jobs.values()), sensors=[*sensors, self._recovery_sensor()])

    def _op(self) -> dg.OpDefinition:
        @dg.op(
            name="run_background_job",
            description="Claim the message under a lease, call its kind's handler, write how it ended.",
            out=dg.Out(dg.Nothing),
            tags={"dagster/compute_kind": "postgres"},
        )
        def run_background_job(context: dg.OpExecutionContext, config: JobConfig) -> Iterable[dg.Output[None]]:
            yield self._run(context, self.kinds[context.job_name], config.message)

        return run_background_job

    def _job(self, kind: JobKind, op: dg.OpDefinition) -> dg.JobDefinition:
        @dg.graph(
            name=kind.name,
            description=f"Runs one background job of kind {kind.name}: at most {kind.consumers} at a time, "
            f"{kind.attempts} attempts, a lease of {kind.lease:g} s, a timeout of {kind.timeout:g} s.",
        )
        def background_job() -> None:
            op()

        return background_job.to_job(
            executor_def=dg.in_process_executor,
            run_tags={KIND_TAG: kind.name},
            metadata={
                "handler": f"{kind.handler.__module__}.{getattr(kind.handler, '__qualname__', kind.handler)}",
                "ledger": "outbox.job_attempts",
                "guarantees": "docs/guarantees.md",
            },
            owners=[self.settings.owner],
        )

    def _sensor(self, kind: JobKind, job: dg.JobDefinition) -> dg.SensorDefinition:
        def poll(context: dg.SensorEvaluationContext) -> dg.SensorResult:
            return self._poll(context, kind)

        return dg.SensorDefinition(
            name=sensor_name(kind.name),
            description=f"Looks for due jobs of kind {kind.name} and starts a run for each, as places are free. "
            "Turned off, the kind is paused.",
            evaluation_fn=poll,
            job=job,
            minimum_interval_seconds=self.settings.poll_seconds,
            default_status=dg.DefaultSensorStatus.RUNNING,
            owners=[self.settings.owner],
        )

    def _recovery_sensor(self) -> dg.SensorDefinition:
        return dg.SensorDefinition(
            name=RECOVERY_SENSOR,
            description="Brings back lost leases and lost publishes; at start also domain jobs without a message. "
            "Starts no run: its skip reasons say what it did.",
            evaluation_fn=self._recover,
            minimum_interval_seconds=self.settings.recovery_seconds,
            default_status=dg.DefaultSensorStatus.RUNNING,
            owners=[self.settings.owner],
        )

    # The runs

    def _run(self, context: dg.OpExecutionContext, kind: JobKind, message_id: int) -> dg.Output[None]:
        engine = self.database.migrated_engine()

        def tell(step: str, fraction: float | None) -> None:
            context.log.info(step if fraction is None else f"{step} ({fraction:.0%})")

        with LeaseKeeper(engine, url=self.database.url, settings=self.settings, delay=_KEEPER_DELAY_SECONDS) as keeper:
            report = Runner(engine, keeper, holder=context.run_id).run(kind, message_id, on_progress=tell)
        if isinstance(report, NotClaimed):
            line = not_claimed_line(report)
            context.log.info(line)
            return dg.Output(None, metadata={"message": message_id, "outcome": "nothing to do", "reason": line})
        _tag_run(context, report)
        line = report_line(kind.name, report)
        metadata = _metadata(report)
        if report.outcome in {AttemptOutcome.FAILED, AttemptOutcome.GIVEN_UP}:
            if report.trace:
                context.log.info(f"raised in\n{report.trace}")
            raise dg.Failure(line, metadata=metadata, allow_retries=False)
        context.log.info(line)
        return dg.Output(None, metadata=metadata)

    # The sensors

    def _poll(self, context: dg.SensorEvaluationContext, kind: JobKind) -> dg.SensorResult:
        transport = RunTransport(self.database.migrated_engine(), context.instance, {kind.name: kind}, self.settings)
        transport.wake(kind.name)
        with self.database.engine.begin() as connection:
            note_success(connection, sensor_name(kind.name), every=self.settings.poll_seconds)
        if transport.requests:
            return dg.SensorResult(run_requests=transport.requests)
        return dg.SensorResult(skip_reason=transport.skip_reason)

    def _recover(self, context: dg.SensorEvaluationContext) -> dg.SensorResult:
        engine = self.database.migrated_engine()
        with engine.begin() as connection:
            # Before parking: these kinds are registered, whether their sensors are on or off.
            note_served(connection, SERVER, [served_by_runs(connection, kind) for kind in self.kinds.values()])
        done = recover(engine, self.kinds, publish_timeout=self.settings.publish_timeout_seconds)
        if not self._orphans_recovered.is_set():
            # Once in the life of this code server, unless a domain table was not there yet.
            orphans = recover_orphans(engine, self.kinds.values())
            done.orphans, done.problems = orphans.orphans, orphans.problems
            if not orphans.problems:
                self._orphans_recovered.set()
        polls = {sensor_name(name): float(self.settings.poll_seconds) for name in self.kinds}
        every = float(self.settings.recovery_seconds)
        with engine.begin() as connection:
            note_success(connection, RECOVERY, done.lost_leases + done.lost_publishes, every=every)
            expect(connection, {**polls, RECOVERY_SENSOR: every}, paused=_turned_off(context.instance))
            note_success(connection, RECOVERY_SENSOR, every=every)
        return dg.SensorResult(skip_reason=done.words())


class RunTransport:
    """The transport over Dagster's runs: what one tick of a kind's sensor does.

    Args:
        engine: the database.
        instance: where the runs are.
        kinds: what is served.
        settings: how long to believe in what.
    """

    def __init__(
        self, engine: Engine, instance: dg.DagsterInstance, kinds: Mapping[str, JobKind], settings: Settings
    ) -> None:
        self._engine = engine
        self._instance = instance
        self._kinds = kinds
        self._settings = settings
        self._stopped = False
        self.requests: list[dg.RunRequest] = []
        """The runs that are asked for."""
        self.skip_reason = ""
        """Why no more, as facts."""

    def wake(self, kind: str) -> None:
        """See :class:`~outbox_pipelines.jobs.transport.Transport`."""
        if self._stopped:
            return
        timeout = self._settings.publish_timeout_seconds
        believe_for = timedelta(seconds=RUN_START_SECONDS + timeout)
        runs = _Runs(self._instance, kind, self.requests, believe_for=believe_for)
        polled = Publisher(self._engine, runs, timeout=timeout).poll(self._kinds[kind])
        with self._engine.begin() as connection:
            due, in_flight = places(connection, kind)
            note_served(connection, SERVER, [served_by_runs(connection, self._kinds[kind])])
        self.skip_reason = polled_line(self._kinds[kind], polled, due=due, in_flight=in_flight)

    def served(self) -> list[Served]:
        """See :class:`~outbox_pipelines.jobs.transport.Transport`."""
        with self._engine.connect() as connection:
            return [served_by_runs(connection, kind) for kind in self._kinds.values()]

    def stop(self) -> None:
        """See :class:`~outbox_pipelines.jobs.transport.Transport`; what is published waits for its run."""
        self._stopped = True


class _Runs:
    """Dagster's runs of one kind, to the publisher."""

    def __init__(
        self, instance: dg.DagsterInstance, kind: str, requests: list[dg.RunRequest], *, believe_for: timedelta
    ) -> None:
        self._instance = instance
        self._kind = kind
        self._requests = requests
        self._believe_for = believe_for

    def fates(self, published: Sequence[Published]) -> Mapping[str, Fate]:
        """See :class:`~outbox_pipelines.jobs.transport.Runs`."""
        keys = [one.run_key for one in published]
        oldest = datetime.now(UTC) - self._believe_for
        fates: dict[str, Fate] = {}
        for record in self._instance.get_run_records(RunsFilter(job_name=self._kind, tags={RUN_KEY_TAG: keys})):
            run = record.dagster_run
            waits = run.status is DagsterRunStatus.QUEUED
            # To claim is the first thing that a run does: one that has been running for a while and has not is dead,
            # whatever its status says. (If not, it finds the message taken.)
            if waits or (not run.is_finished and record.update_timestamp > oldest):
                fates[run.tags[RUN_KEY_TAG]] = Fate.ON_ITS_WAY
            else:
                fates.setdefault(run.tags[RUN_KEY_TAG], Fate.ENDED)
        return fates

    def request(self, published: Sequence[Published]) -> None:
        """See :class:`~outbox_pipelines.jobs.transport.Runs`."""
        self._requests += [
            dg.RunRequest(
                run_key=one.run_key,
                run_config={"ops": {"run_background_job": {"config": {"message": one.message_id}}}},
                tags={KIND_TAG: self._kind, MESSAGE_TAG: str(one.message_id), ATTEMPT_TAG: str(one.attempt)},
            )
            for one in published
        ]


def _turned_off(instance: dg.DagsterInstance) -> list[str]:
    """Names of the sensors and schedules that somebody has turned off in the UI."""
    return [one.instigator_name for one in instance.all_instigator_state() if one.status.value == "STOPPED"]


def _tag_run(context: dg.OpExecutionContext, report: Report) -> None:
    """A run that a person launched, or that came late, has not the tags that the sensor gives."""
    tags = {MESSAGE_TAG: str(report.claimed.message_id), ATTEMPT_TAG: str(report.claimed.attempt)}
    if any(context.run.tags.get(name) != value for name, value in tags.items()):
        context.instance.add_run_tags(context.run_id, tags)


def _metadata(report: Report) -> dict[str, Any]:
    claimed = report.claimed
    query = (
        "```sql\nSELECT claim, attempt, run_id, outcome, started_at, finished_at, error FROM outbox.job_attempts\n"
        f"WHERE message_id = {claimed.message_id} ORDER BY claim;\n```"
    )
    return {
        "message": claimed.message_id,
        **({"job": claimed.job_id} if claimed.job_id is not None else {}),
        "attempt": claimed.attempt,
        "outcome": str(report.outcome),
        "waited (s)": round(claimed.waited, 3),
        "ran (s)": round(report.ran, 3),
        "lease renewals": report.renewals,
        **({"error": report.line} if report.line is not None else {}),
        "ledger query": MetadataValue.md(query),
    }
