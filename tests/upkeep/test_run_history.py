"""Dagster's own tables do not grow for ever, and the ledgers answer for runs that are gone."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster import DagsterRunStatus
from dagster._core.test_utils import create_run_for_test
from sqlalchemy import Engine, create_engine, text

from outbox_pipelines.database.url import dagster_storage_url
from outbox_pipelines.definitions import build_definitions
from outbox_pipelines.settings import Settings
from outbox_pipelines.upkeep.run_history_pipeline import NAME, prune
from tests.command_line import Run, succeeded
from tests.jobs.messages import a_kind, value
from tests.launch.conftest import made_storage
from tests.outboxes import new_tenant
from tests.upkeep.aged import complete, deliver

JOBS = ["tenant_flush", "work"]


class History:
    """A Dagster instance on PostgreSQL, with runs of any age."""

    def __init__(self, instance: dg.DagsterInstance, url: str) -> None:
        self.instance = instance
        self._engine = create_engine(dagster_storage_url(url))

    def add(
        self,
        *,
        days: float,
        job: str = "tenant_flush",
        status: DagsterRunStatus = DagsterRunStatus.SUCCESS,
        count: int = 1,
    ) -> list[str]:
        """Runs that ended so many days ago, each with an event."""
        ids = []
        for _ in range(count):
            run = create_run_for_test(self.instance, job_name=job, status=status)
            self.instance.report_engine_event("something happened", run)
            ids.append(run.run_id)
        with self._engine.begin() as connection:
            connection.execute(
                text("""UPDATE runs SET update_timestamp = now() AT TIME ZONE 'UTC' - make_interval(secs => :age)
                        WHERE run_id = ANY (:ids)"""),
                {"age": days * 86_400, "ids": ids},
            )
        return ids

    def there(self) -> set[str]:
        """Runs that are left."""
        return {run.run_id for run in self.instance.get_runs()}

    def events(self) -> set[str]:
        """Runs of which there are events."""
        with self._engine.connect() as connection:
            return set(connection.execute(text("SELECT DISTINCT run_id FROM event_logs")).scalars())

    def tags(self) -> int:
        with self._engine.connect() as connection:
            return int(connection.execute(text("SELECT count(*) FROM run_tags")).scalar_one())

    def close(self) -> None:
        self._engine.dispose()


@pytest.fixture
def dagster(server_url: str, tmp_path: Path) -> Iterator[History]:
    with made_storage(server_url) as url:
        storage = {
            "module": "outbox_pipelines.launch",
            "class": "PooledPostgresStorage",
            "config": {"postgres_url": url},
        }
        (tmp_path / "dagster.yaml").write_text(
            yaml.safe_dump({"storage": {"custom": storage}, "telemetry": {"enabled": False}})
        )
        with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
            made = History(instance, url)
            yield made
            made.close()
            for part in (instance.run_storage, instance.event_log_storage, instance.schedule_storage):
                part._engine.dispose()  # type: ignore[union-attr]


def prune_all(dagster: History, engine: Engine, **how: Any) -> Any:
    return prune(
        dagster.instance, engine, JOBS, **{"days": 7, "failed_days": 30, "snapshot_days": 30, "most": 10_000, **how}
    )


def test_finished_runs_go_at_their_age_with_their_events_and_others_stay(dagster: History, engine: Engine) -> None:
    old = dagster.add(days=8, count=3) + dagster.add(days=9, job="work")
    failed = dagster.add(days=31, status=DagsterRunStatus.FAILURE)
    failed += dagster.add(days=31, status=DagsterRunStatus.CANCELED)
    stay = dagster.add(days=6)
    stay += dagster.add(days=29, status=DagsterRunStatus.FAILURE)
    stay += dagster.add(days=40, status=DagsterRunStatus.STARTED)
    stay += dagster.add(days=40, status=DagsterRunStatus.STARTING)
    stay += dagster.add(days=40, job="somebody_elses")
    done = prune_all(dagster, engine)
    assert (done.runs, done.kept) == (len(old + failed), 0)
    assert dagster.there() == set(stay) == dagster.events()


def test_a_week_of_runs_is_pruned_in_batches(dagster: History, engine: Engine) -> None:
    dagster.add(days=8, count=230)
    young = dagster.add(days=1, count=5)
    assert prune_all(dagster, engine, most=150).runs == 150
    assert prune_all(dagster, engine).runs == 80
    assert dagster.there() == set(young)
    assert dagster.tags() == 0


def test_runs_that_hold_materializations_are_kept_and_do_not_stop_those_after_them(
    dagster: History, engine: Engine
) -> None:
    @dg.asset
    def thing() -> None: ...

    result = dg.materialize([thing], instance=dagster.instance)
    with dagster._engine.begin() as connection:
        connection.execute(
            text("UPDATE runs SET pipeline_name = 'work', update_timestamp = '2020-01-01' WHERE run_id = :id"),
            {"id": result.run_id},
        )
        body = connection.execute(text("SELECT run_body FROM runs")).scalar_one()
        assert json.loads(body)
    dagster.add(days=8, job="work", count=150)
    done = prune_all(dagster, engine)
    assert (done.runs, done.kept) == (150, 1)
    assert dagster.there() == {result.run_id}
    assert dagster.instance.get_latest_materialization_event(dg.AssetKey("thing")) is not None


def test_old_snapshots_go_with_their_checks_but_for_the_last_of_each_asset(dagster: History, engine: Engine) -> None:
    for name in ("training_backlog", "job_backlog"):

        @dg.asset(name=name, check_specs=[dg.AssetCheckSpec("fine", asset=name)])
        def backlog() -> dg.MaterializeResult:  # type: ignore[type-arg]
            return dg.MaterializeResult(check_results=[dg.AssetCheckResult(passed=True)])

        runs = [dg.materialize([backlog], instance=dagster.instance).run_id for _ in range(3)]
        with dagster._engine.begin() as connection:
            connection.execute(
                text("""UPDATE runs SET pipeline_name = 'backlog_snapshot',
                               update_timestamp = now() AT TIME ZONE 'UTC' - make_interval(days => :age)
                        WHERE run_id = ANY (:ids)"""),
                # Of one asset all are old: nobody looked for a month.
                [{"age": age, "ids": [run]} for run, age in zip(runs, (32, 31, 31), strict=True)],
            )
    checks = text("SELECT count(*), count(DISTINCT run_id) FROM asset_check_executions")
    with dagster._engine.connect() as connection:
        assert tuple(connection.execute(checks).one()) == (6, 6)
    done = prune_all(dagster, engine)
    assert (done.runs, done.kept) == (4, 2)
    assert len(dagster.there()) == 2
    assert dagster.there() == dagster.events()
    with dagster._engine.connect() as connection:
        assert tuple(connection.execute(checks).one()) == (2, 2)
    for name in ("training_backlog", "job_backlog"):
        assert dagster.instance.get_latest_materialization_event(dg.AssetKey(name)) is not None
    assert prune_all(dagster, engine).runs == 0


def test_the_ledgers_name_a_pruned_run_and_say_that_it_is(dagster: History, engine: Engine, outbox: Run) -> None:
    (run_id,) = dagster.add(days=8)
    tenant = new_tenant(engine)
    deliver(engine, tenant, [1, 2], run_id=run_id)
    complete(engine, 1, days=1)
    told = succeeded(outbox("audit", "--tenant", "acme", "--row", "1"))
    assert f"by run {run_id} in batch" in told
    prune_all(dagster, engine)
    told = succeeded(outbox("audit", "--tenant", "acme", "--row", "1"))
    assert f"by run {run_id} (pruned from Dagster's history) in batch" in told
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO outbox.pruned_runs (run_id) VALUES ('run')"))
    shown = succeeded(outbox("jobs", "show", "1"))
    assert "by run\n     pruned from Dagster's history" in shown
    assert "/runs/run" not in shown


def test_the_asset_shows_what_went_and_the_bytes_before_and_after(
    dagster: History, engine: Engine, make_settings: Callable[..., Settings]
) -> None:
    dagster.add(days=3, count=4)
    dagster.add(days=3, job="work")
    definitions = build_definitions(settings=make_settings(run_retention_days=2), kinds=[a_kind()])
    result = definitions.resolve_job_def("run_history_cleanup").execute_in_process(instance=dagster.instance)
    assert result.success
    (event,) = result.asset_materializations_for_node(NAME)
    shown = {name: one.value for name, one in event.metadata.items()}
    assert (shown["runs pruned"], shown["old runs kept"]) == (5, 0)
    assert shown["bytes before"] > 0
    assert shown["bytes after"] > 0
    assert value(engine, "SELECT rows_total FROM outbox.upkeep WHERE task = :task", task=NAME) == 5
