"""The whole product as a user runs it: shipped dagster.yaml, real daemon, sensor and webserver."""

import threading
from typing import Any

import grpc
import pytest
from sqlalchemy import Engine, text

from outbox_pipelines.database.engine import open_engine
from outbox_pipelines.local.demo_checks import CheckResults, execute_checks
from outbox_pipelines.local.stack import STORAGE_VARIABLE, Stack
from outbox_pipelines.settings import load_settings
from outbox_pipelines.tenants.registry import set_paused
from tests.jobs.messages import run
from tests.local.conftest import PATIENCE, ask
from tests.outboxes import enqueue, ledger_ids, new_tenant, status, wait_until, waiting_ids
from tests.scripted_service import ScriptedService, accept
from tests.upkeep.aged import deliver

# One stack for all tests here, so they stay on one worker.
pytestmark = [pytest.mark.xdist_group("stack"), pytest.mark.timeout(300)]


def runs_of(stack: Stack, tenant: str) -> list[dict[str, Any]]:
    """The runs of a tenant, newest first."""
    query = """
        query Runs($tenant: String!) {
          runsOrError(filter: {tags: [{key: "outbox/tenant", value: $tenant}]}) {
            ... on Runs { results {
              id status jobName tags { key value }
              eventConnection(limit: 1000) { events { __typename
                ... on StepEvent { stepKey }
                ... on ExecutionStepFailureEvent { error { message } }
                ... on ExecutionStepOutputEvent { metadataEntries { label ... on IntMetadataEntry { intValue } } }
              } }
            } }
          }
        }"""
    return list(ask(stack, query, tenant=tenant)["runsOrError"]["results"])


def finished(stack: Stack, tenant: str, status_name: str) -> dict[str, Any] | None:
    """The tenant's newest run when it has ended so."""
    runs = runs_of(stack, tenant)
    return runs[0] if runs and runs[0]["status"] == status_name else None


def test_the_sensor_delivers_new_rows_in_a_run_that_graphql_shows(
    stack: Stack, engine: Engine, ml: ScriptedService
) -> None:
    tenant = new_tenant(engine, "by-sensor", rows=42)
    wait_until(lambda: finished(stack, "by-sensor", "SUCCESS"), seconds=PATIENCE)
    (run,) = runs_of(stack, "by-sensor")
    assert run["jobName"] == "tenant_flush"
    tags = {tag["key"]: tag["value"] for tag in run["tags"]}
    assert tags["outbox/trigger"] == "sensor"
    assert tags["dagster/partition"] == "by-sensor"
    told = {
        entry["label"]: entry.get("intValue")
        for event in run["eventConnection"]["events"]
        for entry in event.get("metadataEntries", [])
    }
    assert (told["rows"], told["batches"], told["first id"], told["last id"]) == (42, 5, 1, 42)
    assert ml.ids(tenant.tenant_id) == list(range(1, 43))
    with engine.connect() as connection:
        runs = connection.execute(
            text("SELECT DISTINCT run_id FROM outbox.training_ledger WHERE tenant_id = :id"), {"id": tenant.tenant_id}
        ).scalars()
        assert list(runs) == [run["id"]]


def test_a_backfill_over_two_tenants_drains_just_those_two(stack: Stack, engine: Engine) -> None:
    names = ["backfill-a", "backfill-b", "left-alone"]
    # Known to the sensor as partitions, and kept from it by their backoff.
    tenants = [new_tenant(engine, name) for name in names]
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE outbox.tenants SET next_attempt_at = now() + interval '1 day' WHERE name = ANY (:names)"),
            {"names": names},
        )
    for tenant in tenants:
        enqueue(engine, tenant, [{"n": 1}] * 5)
    partitions = """{ pipelineOrError(params: {
        repositoryLocationName: "outbox_pipelines", repositoryName: "__repository__",
        pipelineName: "tenant_flush"}) { ... on Pipeline { partitionKeysOrError { partitionKeys } } } }"""
    wait_until(
        lambda: set(names) <= set(ask(stack, partitions)["pipelineOrError"]["partitionKeysOrError"]["partitionKeys"]),
        seconds=PATIENCE,
    )
    launch = """
        mutation Launch($names: [String!]) {
          launchPartitionBackfill(backfillParams: {
            selector: {partitionSetName: "tenant_flush_partition_set", repositorySelector: {
              repositoryLocationName: "outbox_pipelines", repositoryName: "__repository__"}},
            partitionNames: $names
          }) { __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } }
        }"""
    answer = ask(stack, launch, names=names[:2])["launchPartitionBackfill"]
    assert answer["__typename"] == "LaunchBackfillSuccess", answer
    wait_until(lambda: not waiting_ids(engine, tenants[0]) and not waiting_ids(engine, tenants[1]), seconds=PATIENCE)
    assert waiting_ids(engine, tenants[2]) == [1, 2, 3, 4, 5]
    wait_until(lambda: finished(stack, "backfill-a", "SUCCESS"), seconds=PATIENCE)
    assert runs_of(stack, "left-alone") == []


def test_a_failed_delivery_is_a_failed_run_whose_error_says_what_whose_and_what_next(
    stack: Stack, engine: Engine, ml: ScriptedService
) -> None:
    ml.answer = lambda _request, context: context.abort(grpc.StatusCode.UNAVAILABLE, "resting")  # type: ignore[return-value]
    tenant = new_tenant(engine, "failing", rows=3)
    wait_until(lambda: finished(stack, "failing", "FAILURE"), seconds=PATIENCE)
    with engine.begin() as connection:
        set_paused(connection, "failing", paused=True)
    (message,) = [
        event["error"]["message"]
        for event in runs_of(stack, "failing")[0]["eventConnection"]["events"]
        if event["__typename"] == "ExecutionStepFailureEvent"
    ]
    assert "tenant failing: rows stay:" in message
    assert "answered UNAVAILABLE; next attempt in" in message
    assert waiting_ids(engine, tenant) == [1, 2, 3]


def test_terminating_a_run_cancels_its_call_frees_the_lease_and_stays_canceled(
    stack: Stack, engine: Engine, ml: ScriptedService
) -> None:
    inside, cut_off = threading.Event(), threading.Event()

    def answer(request: object, context: grpc.ServicerContext) -> object:
        if request.examples[0].id == 11:  # type: ignore[attr-defined]
            context.add_callback(cut_off.set)
            inside.set()
            cut_off.wait(60)
        return accept(request, context)  # type: ignore[arg-type]

    ml.answer = answer  # type: ignore[assignment]
    tenant = new_tenant(engine, "terminated", rows=30)
    assert inside.wait(PATIENCE)
    with engine.begin() as connection:
        set_paused(connection, "terminated", paused=True)
    run_id = runs_of(stack, "terminated")[0]["id"]
    terminate = """mutation Stop($id: String!) { terminateRun(runId: $id) { __typename } }"""
    assert ask(stack, terminate, id=run_id)["terminateRun"]["__typename"] == "TerminateRunSuccess"
    assert cut_off.wait(PATIENCE)
    wait_until(lambda: finished(stack, "terminated", "CANCELED"), seconds=PATIENCE)
    assert status(engine, tenant).lease_holder is None
    assert ledger_ids(engine, tenant) == list(range(1, 11))
    assert waiting_ids(engine, tenant) == list(range(11, 31))
    # The daemon's monitoring and event loop have had time to think otherwise.
    ticks = "{ instance { daemonHealth { allDaemonStatuses { healthy } } } }"
    ask(stack, ticks)
    assert runs_of(stack, "terminated")[0]["status"] == "CANCELED"


def test_dagsters_own_tables_are_in_a_database_beside_the_outboxes(stack: Stack, engine: Engine) -> None:
    with engine.connect() as connection:
        assert connection.execute(text("SELECT to_regclass('public.runs')")).scalar_one() is None
    beside = open_engine(load_settings(), stack.environment[STORAGE_VARIABLE], application_name="tests")
    assert beside.url.database == f"{engine.url.database}_dagster"
    with beside.connect() as connection:
        assert connection.execute(text("SELECT to_regclass('public.runs')")).scalar_one() == "runs"
    beside.dispose()


def test_the_demo_counts_the_checks_that_passed_and_tells_what_one_says_that_did_not(
    stack: Stack, engine: Engine
) -> None:
    def about(results: CheckResults) -> list[str]:
        return [flaw for flaw in results.flaws if "reconciliation" in flaw]

    before = execute_checks(stack)
    assert about(before) == []
    # Others may fail for what other tests have left waiting here.
    assert before.passed + len(before.flaws) == 12
    tenant = new_tenant(engine, "sent-twice")
    for _ in range(2):
        deliver(engine, tenant, [7])
    (flaw,) = about(execute_checks(stack))
    assert flaw.startswith("check reconciliation of training_backlog: 1 row delivered twice (sent-twice: 1)")
    run(engine, "DELETE FROM outbox.training_ledger WHERE tenant_id = :tenant", tenant=tenant.tenant_id)
