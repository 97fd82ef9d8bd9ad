"""What Dagster shows and starts: the sensor's requests and reasons, the runs and their results."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import grpc
import pytest
from sqlalchemy import Engine, event, text

from outbox_pipelines.database.progress import all_progress
from outbox_pipelines.definitions import build_definitions
from outbox_pipelines.settings import Settings
from outbox_pipelines.tenants.registry import remove_tenant, set_paused
from tests.outboxes import dead_letters, enqueue, flush, ledger_ids, new_tenant, status, waiting_ids
from tests.scripted_service import ScriptedService

MakeSettings = Callable[..., Settings]


class Pipeline:
    """The definitions, evaluated and executed against one instance as the daemon would."""

    def __init__(self, settings: Settings, instance: dg.DagsterInstance) -> None:
        self.definitions = build_definitions(settings=settings)
        self.instance = instance

    def poll(self) -> dg.SensorResult:
        """Evaluate the sensor once and apply its partition requests."""
        sensor = self.definitions.get_sensor_def("training_outbox_sensor")
        context = dg.build_sensor_context(instance=self.instance, definitions=self.definitions)
        result = sensor(context)
        assert isinstance(result, dg.SensorResult)
        for request in result.dynamic_partitions_requests or []:
            if isinstance(request, dg.AddDynamicPartitionsRequest):
                self.instance.add_dynamic_partitions("tenants", list(request.partition_keys))
            else:
                for key in request.partition_keys:
                    self.instance.delete_dynamic_partition("tenants", key)
        return result

    def run_tenant(self, name: str, **config: Any) -> dg.ExecuteInProcessResult:
        """Execute ``tenant_flush`` for a tenant."""
        return self.definitions.get_job_def("tenant_flush").execute_in_process(
            instance=self.instance,
            partition_key=name,
            run_config={"ops": {"flush_tenant": {"config": config}}},
            raise_on_error=False,
        )

    def run_fleet(self, *names: str) -> dg.ExecuteInProcessResult:
        """Execute ``fleet_flush`` for tenants."""
        return self.definitions.get_job_def("fleet_flush").execute_in_process(
            instance=self.instance,
            run_config={"ops": {"flush_fleet": {"config": {"tenants": list(names)}}}},
            raise_on_error=False,
        )


@pytest.fixture
def pipeline(settings: Settings, instance: dg.DagsterInstance) -> Pipeline:
    """The pipeline with default settings."""
    return Pipeline(settings, instance)


def reason(result: dg.SensorResult) -> str:
    assert result.skip_reason is not None
    return result.skip_reason.skip_message or ""


def metadata(result: dg.ExecuteInProcessResult, step: str = "flush_tenant") -> dict[str, Any]:
    """The step's metadata, from its output or its failure."""
    for happened in result.all_events:
        if happened.step_key == step and happened.event_type_value == "STEP_OUTPUT":
            return {key: value.value for key, value in happened.step_output_data.metadata.items()}
        if happened.step_key == step and happened.event_type_value == "STEP_FAILURE":
            user = happened.step_failure_data.user_failure_data
            assert user is not None
            return {key: getattr(value, "records", value.value) for key, value in user.metadata.items()}
    raise AssertionError("no output and no failure")


def failure(result: dg.ExecuteInProcessResult) -> str:
    (failed,) = [one for one in result.all_events if one.event_type_value == "STEP_FAILURE"]
    user = failed.step_failure_data.user_failure_data
    assert user is not None
    return user.description or ""


def test_the_sensor_polls_every_ten_seconds_and_runs_by_default(pipeline: Pipeline) -> None:
    sensor = pipeline.definitions.get_sensor_def("training_outbox_sensor")
    assert sensor.minimum_interval_seconds == 10
    assert sensor.default_status is dg.DefaultSensorStatus.RUNNING


def test_a_poll_that_ends_well_is_noted_whatever_it_found(engine: Engine, pipeline: Pipeline) -> None:
    pipeline.poll()
    with engine.connect() as connection:
        task = all_progress(connection)["training_outbox_sensor"]
    assert task.every_seconds == 10
    assert task.succeeded_at is not None
    assert not task.is_overdue


def test_each_due_tenant_gets_a_run_the_longest_waiting_first(engine: Engine, pipeline: Pipeline) -> None:
    for name in ("young", "old", "empty"):
        new_tenant(engine, name, rows=0 if name == "empty" else 1)
    with engine.begin() as connection:
        schema = connection.execute(text("SELECT schema_name FROM outbox.tenants WHERE name = 'old'")).scalar_one()
        connection.exec_driver_sql(f"""UPDATE "{schema}".ml_outbox SET created_at = now() - interval '1 hour'""")
    result = pipeline.poll()
    requests = result.run_requests or []
    assert [request.partition_key for request in requests] == ["old", "young"]
    assert {request.job_name for request in requests} == {"tenant_flush"}
    assert requests[0].tags == {"outbox/tenant": "old", "outbox/trigger": "sensor"}
    assert sorted(pipeline.instance.get_dynamic_partitions("tenants")) == ["empty", "old", "young"]


def test_more_due_tenants_than_runs_are_dealt_into_fleet_runs(
    engine: Engine, make_settings: MakeSettings, instance: dg.DagsterInstance
) -> None:
    names = [f"t{number}" for number in range(7)]
    for name in names:
        new_tenant(engine, name, rows=1)
    result = Pipeline(make_settings(runs_per_tick=3), instance).poll()
    requests = result.run_requests or []
    assert [request.job_name for request in requests] == ["fleet_flush"] * 3
    dealt = [request.run_config["ops"]["flush_fleet"]["config"]["tenants"] for request in requests]
    assert sorted(name for hand in dealt for name in hand) == names
    assert sorted(map(len, dealt)) == [2, 2, 3]


def test_partitions_follow_the_registry_by_differences(engine: Engine, pipeline: Pipeline) -> None:
    new_tenant(engine, "stays")
    new_tenant(engine, "goes")
    pipeline.poll()
    assert not pipeline.poll().dynamic_partitions_requests
    with engine.begin() as connection:
        remove_tenant(connection, "goes")
    new_tenant(engine, "comes")
    requests = pipeline.poll().dynamic_partitions_requests or []
    assert [(type(one).__name__, list(one.partition_keys)) for one in requests] == [
        ("AddDynamicPartitionsRequest", ["comes"]),
        ("DeleteDynamicPartitionsRequest", ["goes"]),
    ]


def test_a_tenant_with_a_run_in_flight_gets_no_second_one(engine: Engine, pipeline: Pipeline) -> None:
    for name in ("queued", "in-fleet", "free"):
        new_tenant(engine, name, rows=1)
    pipeline.poll()
    for job, tags, config in (
        ("tenant_flush", {"outbox/tenant": "queued"}, {}),
        ("fleet_flush", {}, {"ops": {"flush_fleet": {"config": {"tenants": ["in-fleet"]}}}}),
    ):
        pipeline.instance.add_run(
            dg.DagsterRun(job_name=job, status=dg.DagsterRunStatus.STARTED, tags=tags, run_config=config)
        )
    assert [request.partition_key for request in pipeline.poll().run_requests or []] == ["free"]
    with engine.begin() as connection:
        set_paused(connection, "free", paused=True)
    assert "2 in flight; 1 paused" in reason(pipeline.poll())


def test_a_sensor_evaluated_twice_sends_each_row_once(
    engine: Engine, pipeline: Pipeline, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, rows=30)
    first, second = pipeline.poll(), pipeline.poll()
    for request in [*(first.run_requests or []), *(second.run_requests or [])]:
        assert request.run_key is None
        assert pipeline.run_tenant(str(request.partition_key)).success
    assert service.ids() == list(range(1, 31))
    assert ledger_ids(engine, tenant) == list(range(1, 31))


def test_a_stale_request_ends_well_with_no_rows(engine: Engine, pipeline: Pipeline, service: ScriptedService) -> None:
    new_tenant(engine, rows=3)
    pipeline.poll()
    assert pipeline.run_tenant("acme").success
    stale = pipeline.run_tenant("acme")
    assert stale.success
    assert metadata(stale)["rows"] == 0
    assert len(service.calls) == 1


def test_a_failed_run_does_not_block_the_next_one(engine: Engine, pipeline: Pipeline, service: ScriptedService) -> None:
    tenant = new_tenant(engine, rows=3)
    pipeline.poll()
    service.answer = lambda _request, context: context.abort(grpc.StatusCode.UNAVAILABLE, "resting")  # type: ignore[return-value]
    assert not pipeline.run_tenant("acme").success
    assert "1 back off, the first until" in reason(pipeline.poll())
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox.tenants SET next_attempt_at = clock_timestamp()"))
    assert [request.partition_key for request in pipeline.poll().run_requests or []] == ["acme"]
    service.answer = ScriptedService().answer
    assert pipeline.run_tenant("acme").success
    assert ledger_ids(engine, tenant) == [1, 2, 3]


def test_a_failed_delivery_is_a_failed_run_with_one_clear_line(
    engine: Engine, pipeline: Pipeline, service: ScriptedService
) -> None:
    new_tenant(engine, rows=15)
    pipeline.poll()

    def answer(request: object, context: grpc.ServicerContext) -> object:
        if len(service.calls) == 2:
            context.abort(grpc.StatusCode.UNAVAILABLE, "resting")
        return ScriptedService().answer(request, context)  # type: ignore[arg-type]

    service.answer = answer  # type: ignore[assignment]
    result = pipeline.run_tenant("acme")
    line = failure(result)
    assert "\n" not in line
    assert line.startswith(f"tenant acme: rows stay: ml-service {service.target} answered UNAVAILABLE; next attempt in")
    assert metadata(result)["rows"] == 10


def test_a_fleet_run_serves_the_others_and_names_the_failed(
    engine: Engine, pipeline: Pipeline, service: ScriptedService
) -> None:
    ill, well = new_tenant(engine, "ill", rows=2), new_tenant(engine, "well", rows=2)

    def answer(request: object, context: grpc.ServicerContext) -> object:
        if request.tenant == str(ill.tenant_id):  # type: ignore[attr-defined]
            context.abort(grpc.StatusCode.UNAVAILABLE, "resting")
        return ScriptedService().answer(request, context)  # type: ignore[arg-type]

    service.answer = answer  # type: ignore[assignment]
    result = pipeline.run_fleet("well", "ill", "removed-meanwhile")
    assert "1 of 2 tenants failed, 2 rows of the others went out; the first: tenant ill:" in failure(result)
    assert ledger_ids(engine, well) == [1, 2]
    table = metadata(result, "flush_fleet")["by tenant"]
    assert [record.data["tenant"] for record in table] == ["ill", "well"]


def test_a_runs_metadata_can_be_read_by_a_person(engine: Engine, pipeline: Pipeline) -> None:
    new_tenant(engine, rows=25)
    pipeline.poll()
    result = pipeline.run_tenant("acme")
    told = metadata(result)
    assert {key: told[key] for key in ("rows", "batches", "rejected", "first id", "last id", "ended")} == {
        "rows": 25,
        "batches": 3,
        "rejected": 0,
        "first id": 1,
        "last id": 25,
        "ended": "emptied",
    }
    query = told["ledger query"].split("```sql")[1].split("```")[0]
    with engine.connect() as connection:
        lines = connection.exec_driver_sql(query).all()
    assert [list(line.row_ids) for line in lines] == [
        list(range(1, 11)),
        list(range(11, 21)),
        list(range(21, 26)),
    ]


def test_a_dry_run_only_counts(engine: Engine, pipeline: Pipeline, service: ScriptedService) -> None:
    tenant = new_tenant(engine, rows=12)
    pipeline.poll()
    result = pipeline.run_tenant("acme", dry_run=True)
    assert metadata(result)["rows waiting"] == 12
    assert service.calls == []
    assert waiting_ids(engine, tenant) == list(range(1, 13))
    assert status(engine, tenant).lease_holder is None


def test_the_launchpad_bounds_what_it_takes(engine: Engine, pipeline: Pipeline) -> None:
    new_tenant(engine, rows=1)
    pipeline.poll()
    assert pipeline.run_tenant("acme", max_turns=1, budget_seconds=0.0).success
    for wrong in ({"max_turns": 0}, {"budget_seconds": -1.0}):
        assert not pipeline.run_tenant("acme", **wrong).success
    assert not pipeline.run_fleet().success


def test_a_tenant_removed_since_the_request_is_named(engine: Engine, pipeline: Pipeline) -> None:
    new_tenant(engine, rows=1)
    pipeline.poll()
    with engine.begin() as connection:
        remove_tenant(connection, "acme", force=True)
    assert "no tenant 'acme' is registered" in failure(pipeline.run_tenant("acme"))


def test_an_unreachable_service_gets_no_runs_and_the_reason_says_since_when(
    engine: Engine, pipeline: Pipeline, service: ScriptedService
) -> None:
    for name in ("a", "b"):
        new_tenant(engine, name, rows=3)
    service.stop()
    first, second = reason(pipeline.poll()), reason(pipeline.poll())
    assert first.startswith(f"ml-service {service.target} unreachable since ")
    assert first.endswith("; 6 rows of 2 tenants wait")
    assert first.split("(")[0] == second.split("(")[0]
    service.start()
    assert len(pipeline.poll().run_requests or []) == 2


def test_tenants_that_back_off_from_an_unreachable_service_are_told_of_it(
    engine: Engine, pipeline: Pipeline, service: ScriptedService
) -> None:
    new_tenant(engine, rows=2)
    pipeline.poll()
    service.stop()
    assert not pipeline.run_tenant("acme").success
    assert "unreachable since" in reason(pipeline.poll())
    service.start()
    assert "1 back off, the first until" in reason(pipeline.poll())


def test_a_service_that_says_not_serving_gets_no_runs(
    engine: Engine, pipeline: Pipeline, service: ScriptedService
) -> None:
    new_tenant(engine, rows=1)
    service.health.enter_graceful_shutdown()
    assert "NOT_SERVING" in reason(pipeline.poll())


def test_the_reason_says_what_to_mend_when_the_service_refuses_us(
    engine: Engine, pipeline: Pipeline, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, rows=1)
    service.answer = lambda _request, context: context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you")  # type: ignore[return-value]
    pipeline.poll()
    pipeline.run_tenant("acme")
    told = reason(pipeline.poll())
    assert "answered UNAUTHENTICATED (check OUTBOX_ML_TOKEN" in told
    assert dead_letters(engine, tenant) == {}


def test_local_mode_lets_the_outbox_accumulate(
    engine: Engine, make_settings: MakeSettings, instance: dg.DagsterInstance
) -> None:
    tenant = new_tenant(engine, rows=4)
    local = Pipeline(make_settings(train_mode="local"), instance)
    assert reason(local.poll()) == "OUTBOX_TRAIN_MODE=local: flushing is off; 4 rows of 1 tenant wait"
    assert failure(local.run_tenant("acme")) == "OUTBOX_TRAIN_MODE=local: flushing is off; no row was sent"
    assert waiting_ids(engine, tenant) == [1, 2, 3, 4]


def test_nothing_waiting_is_said_as_a_fact(engine: Engine, pipeline: Pipeline) -> None:
    new_tenant(engine, "a")
    new_tenant(engine, "b")
    assert reason(pipeline.poll()) == "looked at 2 tenants: no rows wait"


def test_a_broken_tenant_is_skipped_with_its_reason_and_starts_no_storm(engine: Engine, pipeline: Pipeline) -> None:
    broken, _ = new_tenant(engine, "broken", rows=1), new_tenant(engine, "fine", rows=1)
    with engine.begin() as connection:
        connection.exec_driver_sql(f'DROP TABLE "{broken.schema}".ml_outbox')
    for _ in range(3):
        assert [request.partition_key for request in pipeline.poll().run_requests or []] == ["fine"]
    assert "is missing; restore it, make missing tables anew" in (status(engine, broken).last_error or "")
    with engine.begin() as connection:
        set_paused(connection, "fine", paused=True)
    assert "1 without their schema or a table in it" in reason(pipeline.poll())


def test_no_payload_and_no_secret_reaches_dagsters_storage(
    engine: Engine, make_settings: MakeSettings, instance: dg.DagsterInstance, service: ScriptedService, tmp_path: Path
) -> None:
    pipeline = Pipeline(make_settings(ml_token="secret-of-ours"), instance)
    tenant = new_tenant(engine)
    enqueue(engine, tenant, [{"name": "private-payload"}] * 5)
    with engine.begin() as connection:
        # A database error that quotes the row it fails on.
        connection.exec_driver_sql(
            f"""ALTER TABLE "{tenant.schema}".ml_outbox_dead ADD CONSTRAINT none_dies CHECK (id < 0)"""
        )
    pipeline.poll()

    def reject(request: Any, _context: object) -> Any:
        response = ScriptedService().answer(request, None)  # type: ignore[arg-type]
        response.rejected.add(id=response.accepted.pop(), reason="no")
        return response

    service.answer = reject
    result = pipeline.run_tenant("acme")
    assert not result.success
    stored = json.dumps([str(one) for one in instance.all_logs(result.run_id)])
    assert "none_dies" in stored
    for hidden in ("private-payload", "secret-of-ours"):
        assert hidden not in stored
        assert hidden not in json.dumps(dict(result.dagster_run.tags))
        assert hidden not in (status(engine, tenant).last_error or "")


def test_a_run_leaves_no_file_behind(engine: Engine, pipeline: Pipeline, tmp_path: Path) -> None:
    new_tenant(engine, rows=1)
    pipeline.poll()
    result = pipeline.run_tenant("acme")
    assert result.success
    written = [path for path in tmp_path.rglob("*") if path.is_file() and result.run_id in str(path)]
    assert [path.suffix for path in written] == [".db"], "only the event log of Dagster's own test storage"


def test_the_sensor_asks_a_constant_number_of_statements_for_500_tenants(
    engine: Engine, pipeline: Pipeline, database_url: str
) -> None:
    def statements() -> int:
        from outbox_pipelines.training.backlog import look

        seen: list[str] = []
        event.listen(engine, "before_cursor_execute", lambda *arguments: seen.append(arguments[2]))
        look(engine)
        return len(seen)

    def register(count: int) -> None:
        with engine.begin() as connection:
            connection.exec_driver_sql(
                f"""
                DO $$
                DECLARE name text;
                BEGIN
                    FOR place IN 1..{count} LOOP
                        name := 'many_' || gen_random_uuid();
                        EXECUTE format('CREATE SCHEMA %%I', name);
                        EXECUTE format('CREATE TABLE %%I.ml_outbox (id bigint PRIMARY KEY, created_at date)', name);
                        EXECUTE format('CREATE TABLE %%I.ml_outbox_dead (id bigint PRIMARY KEY)', name);
                        INSERT INTO outbox.tenants (tenant_id, name, schema_name)
                        VALUES (gen_random_uuid(), name, name);
                    END LOOP;
                END $$
                """
            )

    register(3)
    few = statements()
    register(490)
    assert statements() == few
    register(20)
    assert statements() <= 2 * few


def test_a_sink_instead_of_a_function_that_makes_one_is_refused(settings: Settings) -> None:
    from tests.memory_sink import MemorySink

    with pytest.raises(TypeError, match="a function that makes a sink"):
        build_definitions(sink=MemorySink(), settings=settings)  # type: ignore[arg-type]


def test_a_users_own_sink_and_definitions_merge(engine: Engine, settings: Settings) -> None:
    from tests.memory_sink import MemorySink

    tenant = new_tenant(engine, rows=3)
    sink = MemorySink()
    merged = dg.Definitions.merge(
        build_definitions(sink=lambda: sink, settings=settings), dg.Definitions(sensors=[], jobs=[])
    )
    with dg.instance_for_test() as instance:
        instance.add_dynamic_partitions("tenants", ["acme"])
        assert merged.get_job_def("tenant_flush").execute_in_process(instance=instance, partition_key="acme").success
    assert [row.row_id for row in sink.rows] == [1, 2, 3]
    assert ledger_ids(engine, tenant) == [1, 2, 3]
    assert flush(engine, settings, tenant, sink=sink).rows == 0
