"""Which runs the sensor believes in, and what a run makes of tenants that are broken or gone."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg
import pytest
from dagster import DagsterRunStatus
from sqlalchemy import Engine, text

from outbox_pipelines.database.quoting import driver_identifier
from outbox_pipelines.definitions import build_definitions
from outbox_pipelines.settings import Settings
from tests.outboxes import new_tenant, waiting_ids
from tests.scripted_service import ScriptedService

LONGEST_SECONDS = 180 + 8 + 120
"""How long the default settings let a run take: to start, its budget, its lease."""


@pytest.fixture
def definitions(settings: Settings) -> dg.Definitions:
    """The definitions with default settings."""
    return build_definitions(settings=settings)


def poll(definitions: dg.Definitions, instance: dg.DagsterInstance) -> list[str | None]:
    """Whom the sensor starts runs for."""
    context = dg.build_sensor_context(instance=instance, definitions=definitions)
    result = definitions.get_sensor_def("training_outbox_sensor")(context)
    assert isinstance(result, dg.SensorResult)
    return [request.partition_key for request in result.run_requests or []]


def add_run(
    instance: dg.DagsterInstance,
    status: DagsterRunStatus,
    *,
    created: timedelta,
    started: timedelta | None = None,
) -> None:
    """A run of the tenant's, created and started so long ago."""
    run = instance.add_run(dg.DagsterRun(job_name="tenant_flush", status=status, tags={"outbox/tenant": "acme"}))
    now = datetime.now(UTC).replace(tzinfo=None)
    changed = created if started is None else started
    with instance.run_storage.connect() as connection:  # type: ignore[attr-defined]
        connection.execute(
            text("""
                UPDATE runs SET create_timestamp = :created, update_timestamp = :changed, start_time = :started
                WHERE run_id = :id
            """),
            {
                "created": (now - created).isoformat(sep=" "),
                "changed": (now - changed).isoformat(sep=" "),
                "started": None if started is None else (datetime.now(UTC) - started).timestamp(),
                "id": run.run_id,
            },
        )


def run_fleet(
    definitions: dg.Definitions, instance: dg.DagsterInstance, *names: str, **config: Any
) -> dg.ExecuteInProcessResult:
    """Execute ``fleet_flush`` for tenants."""
    return definitions.get_job_def("fleet_flush").execute_in_process(
        instance=instance,
        run_config={"ops": {"flush_fleet": {"config": {"tenants": list(names), **config}}}},
        raise_on_error=False,
    )


def logged(instance: dg.DagsterInstance, result: dg.ExecuteInProcessResult) -> str:
    """Everything that Dagster keeps of a run."""
    return json.dumps([entry.user_message for entry in instance.all_logs(result.run_id)])


# Runs that are believed


@pytest.mark.parametrize(
    "status", [DagsterRunStatus.STARTING, DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING], ids=str
)
def test_a_run_that_has_been_running_for_longer_than_one_can_is_not_believed(
    engine: Engine, definitions: dg.Definitions, instance: dg.DagsterInstance, status: DagsterRunStatus
) -> None:
    new_tenant(engine, rows=1)
    ago = timedelta(seconds=LONGEST_SECONDS + 10)
    add_run(instance, status, created=ago, started=ago)
    assert poll(definitions, instance) == ["acme"]


@pytest.mark.parametrize(
    "status", [DagsterRunStatus.STARTING, DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING], ids=str
)
def test_a_run_that_may_still_be_running_is_believed(
    engine: Engine, definitions: dg.Definitions, instance: dg.DagsterInstance, status: DagsterRunStatus
) -> None:
    new_tenant(engine, rows=1)
    ago = timedelta(seconds=LONGEST_SECONDS - 60)
    add_run(instance, status, created=ago, started=ago)
    assert poll(definitions, instance) == []


def test_a_queued_run_is_believed_however_long_it_waits(
    engine: Engine, definitions: dg.Definitions, instance: dg.DagsterInstance
) -> None:
    new_tenant(engine, rows=1)
    add_run(instance, DagsterRunStatus.NOT_STARTED, created=timedelta(days=1))
    assert poll(definitions, instance) == []


def test_a_run_that_has_just_started_after_a_long_wait_in_the_queue_is_believed(
    engine: Engine, definitions: dg.Definitions, instance: dg.DagsterInstance
) -> None:
    new_tenant(engine, rows=1)
    add_run(instance, DagsterRunStatus.STARTED, created=timedelta(hours=1), started=timedelta(seconds=5))
    assert poll(definitions, instance) == []


# Tenants that are broken or gone


def test_a_dry_run_counts_the_others_and_tells_what_is_wrong_with_a_broken_tenant(
    engine: Engine, definitions: dg.Definitions, instance: dg.DagsterInstance, service: ScriptedService
) -> None:
    broken, whole = new_tenant(engine, "broken", rows=1), new_tenant(engine, "whole", rows=7)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"DROP SCHEMA {driver_identifier(broken.schema)} CASCADE")
    result = run_fleet(definitions, instance, "broken", "whole", dry_run=True)
    assert result.success
    (output,) = [entry for entry in result.all_events if entry.event_type_value == "STEP_OUTPUT"]
    told = output.step_output_data.metadata
    assert told["rows waiting"].value == 7
    table = told["tenants"]
    assert isinstance(table, dg.TableMetadataValue)
    records = {record.data["tenant"]: record.data for record in table.records}
    assert records["whole"] == {"tenant": "whole", "rows": 7, "error": ""}
    assert "does not exist" in str(records["broken"]["error"])
    assert "dry run: 7 rows waiting; nothing was sent" in logged(instance, result)
    assert service.calls == []
    assert waiting_ids(engine, whole) == list(range(1, 8))


def test_a_tenant_that_is_gone_is_named_and_the_others_are_flushed(
    engine: Engine, definitions: dg.Definitions, instance: dg.DagsterInstance
) -> None:
    tenant = new_tenant(engine, rows=1)
    result = run_fleet(definitions, instance, "acme", "gone")
    assert result.success
    assert "no tenant 'gone' is registered" in logged(instance, result)
    assert waiting_ids(engine, tenant) == []


def test_a_run_of_nobody_who_is_registered_fails_and_says_so(
    engine: Engine, definitions: dg.Definitions, instance: dg.DagsterInstance
) -> None:
    result = run_fleet(definitions, instance, "gone", "away")
    assert not result.success
    assert "no tenant 'gone' is registered" in str(result.get_run_failure_event())
