"""Repairs from the UI: dead letters of a tenant, given-up jobs of a day; with a dry run."""

from collections.abc import Iterator
from typing import Any

import dagster as dg
import pytest
from sqlalchemy import Engine

from outbox_pipelines.definitions import build_definitions
from outbox_pipelines.settings import Settings
from tests.jobs.messages import a_kind, enqueue, ledger, rows, run, states
from tests.outboxes import dead_letters, new_tenant, waiting_ids
from tests.upkeep.aged import bury, complete, days_ago


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


class Redrive:
    """The two jobs against one instance."""

    def __init__(self, settings: Settings, instance: dg.DagsterInstance) -> None:
        self._definitions = build_definitions(settings=settings, kinds=[a_kind()])
        self._instance = instance

    def of_tenant(self, name: str, **config: Any) -> dg.ExecuteInProcessResult:
        self._instance.add_dynamic_partitions("tenants", [name])
        return self._execute("dead_letter_redrive", "redrive_dead_letters", name, config)

    def of_day(self, day: str, **config: Any) -> dg.ExecuteInProcessResult:
        return self._execute("failed_jobs_redrive", "redrive_failed_jobs", day, config)

    def _execute(self, job: str, op: str, partition: str, config: dict[str, Any]) -> dg.ExecuteInProcessResult:
        return self._definitions.resolve_job_def(job).execute_in_process(
            instance=self._instance,
            partition_key=partition,
            run_config={"ops": {op: {"config": config}}},
            raise_on_error=False,
        )


@pytest.fixture
def repair(settings: Settings, instance: dg.DagsterInstance) -> Redrive:
    return Redrive(settings, instance)


def metadata(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    (output,) = [one for one in result.all_events if one.event_type_value == "STEP_OUTPUT"]
    return {name: one.value for name, one in output.step_output_data.metadata.items()}


# Dead letters


def test_all_dead_letters_of_the_tenant_go_back_and_of_no_other(engine: Engine, repair: Redrive) -> None:
    acme, other = new_tenant(engine, "acme"), new_tenant(engine, "other")
    bury(engine, acme, 1_200, days=1)
    bury(engine, other, 2, days=1)
    result = repair.of_tenant("acme")
    assert result.success
    assert metadata(result)["moved"] == 1_200
    assert waiting_ids(engine, acme) == list(range(1, 1_201))
    assert (len(dead_letters(engine, acme)), len(dead_letters(engine, other))) == (0, 2)


def test_a_dry_run_lists_what_would_move_without_what_a_service_said_of_it(engine: Engine, repair: Redrive) -> None:
    tenant = new_tenant(engine, "acme")
    bury(engine, tenant, 3, days=1)
    run(engine, f"UPDATE \"{tenant.schema}\".ml_outbox_dead SET reason = 'secret words'")
    result = repair.of_tenant("acme", dry_run=True)
    found = metadata(result)
    assert found["would move"] == 3
    assert [record.data["id"] for record in found["dead letters"].records] == ["3", "2", "1"]
    assert "secret" not in str(found)
    assert len(dead_letters(engine, tenant)) == 3


def test_no_more_move_than_the_config_says_the_oldest_ids_first(engine: Engine, repair: Redrive) -> None:
    tenant = new_tenant(engine, "acme")
    bury(engine, tenant, 5, days=1)
    assert metadata(repair.of_tenant("acme", most=2))["moved"] == 2
    assert waiting_ids(engine, tenant) == [1, 2]


def test_a_tenant_that_was_removed_fails_with_one_line(repair: Redrive) -> None:
    result = repair.of_tenant("gone")
    (failed,) = [one for one in result.all_events if one.event_type_value == "STEP_FAILURE"]
    user = failed.step_failure_data.user_failure_data
    assert user is not None
    assert user.description is not None
    assert user.description.startswith("no tenant 'gone' is registered")


# Jobs


def test_jobs_that_were_given_up_on_the_day_are_due_again_with_their_ids_and_history(
    engine: Engine, repair: Redrive
) -> None:
    complete(engine, 2, days=3, outcome="failed")
    complete(engine, 1, days=4, outcome="failed")
    complete(engine, 1, days=3)
    result = repair.of_day(days_ago(engine, 3).isoformat())
    assert result.success
    assert metadata(result)["moved"] == 2
    assert states(engine) == {1: "Pending", 2: "Pending", 3: "Completed", 4: "Completed"}
    (row,) = rows(engine, "SELECT * FROM outbox.messages WHERE message_id = 1")
    assert (row.outcome, row.processing_attempts, row.last_error) == (None, 0, None)
    assert ledger(engine, 1) == [(1, 1, "succeeded")]


def test_a_dry_run_lists_the_jobs_and_moves_none(engine: Engine, repair: Redrive) -> None:
    complete(engine, 2, days=3, outcome="failed")
    found = metadata(repair.of_day(days_ago(engine, 3).isoformat(), dry_run=True))
    assert found["would move"] == 2
    assert [record.data for record in found["jobs"].records] == [
        {"id": "1", "kind": "work", "job": "1"},
        {"id": "2", "kind": "work", "job": "2"},
    ]
    assert set(states(engine).values()) == {"Completed"}


def test_only_jobs_of_the_kind_that_is_named_move(engine: Engine, repair: Redrive) -> None:
    complete(engine, 1, days=3, outcome="failed")
    complete(engine, 1, days=3, outcome="failed", kind="other")
    assert metadata(repair.of_day(days_ago(engine, 3).isoformat(), kind="other"))["moved"] == 1
    assert states(engine) == {1: "Completed", 2: "Pending"}


def test_a_job_that_cannot_be_put_back_is_told_of_and_the_others_are(engine: Engine, repair: Redrive) -> None:
    complete(engine, 2, days=3, outcome="failed")
    run(engine, "UPDATE outbox.messages SET unique_key = 'one' WHERE message_id = 1")
    enqueue(engine, unique_key="one")
    found = metadata(repair.of_day(days_ago(engine, 3).isoformat()))
    assert (found["moved"], found["not moved"]) == (1, 1)
    assert states(engine) == {1: "Completed", 2: "Pending", 3: "Pending"}
