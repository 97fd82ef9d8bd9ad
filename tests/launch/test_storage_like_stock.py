"""PooledPostgresStorage answers as Dagster's own PostgreSQL storage does.

Each scenario runs on both, on real servers, with the same ids and times; the answers must be the same,
and be what the test says.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster._core.definitions.asset_checks.asset_check_evaluation import (
    AssetCheckEvaluation,
    AssetCheckEvaluationPlanned,
)
from dagster._core.definitions.data_version import DATA_VERSION_TAG
from dagster._core.errors import DagsterRunAlreadyExists, DagsterSnapshotDoesNotExist
from dagster._core.events import AssetMaterializationPlannedData, StepMaterializationData, StepSuccessData
from dagster._core.execution.api import create_execution_plan
from dagster._core.execution.backfill import BulkActionsFilter, BulkActionStatus, PartitionBackfill
from dagster._core.execution.plan.objects import StepFailureData
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteInstigatorOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.scheduler.instigation import (
    InstigatorState,
    InstigatorStatus,
    InstigatorType,
    ScheduleInstigatorData,
    TickData,
    TickStatus,
)
from dagster._core.snap import JobSnap, snapshot_from_execution_plan
from dagster._daemon.types import DaemonHeartbeat
from dagster._serdes import create_snapshot_id
from sqlalchemy import create_engine, text

from outbox_pipelines.launch.storage import is_pooled
from tests.launch.conftest import made_storage, wait_until

NOON = 1_700_000_000.0

Scenario = Callable[[dg.DagsterInstance], Any]
Both = Callable[[Scenario], Any]


@pytest.fixture(scope="module")
def instances(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[dg.DagsterInstance]]:
    """One instance with Dagster's own storage and one with ours, each with a database of its own."""
    with made_storage(server_url) as stock_url, made_storage(server_url) as pooled_url:
        # Dagster's own storage takes the driver from the URL, and works with psycopg 2 only.
        stock = {"postgres": {"postgres_url": stock_url.replace("postgresql://", "postgresql+psycopg2://")}}
        pooled = {
            "custom": {
                "module": "outbox_pipelines.launch",
                "class": "PooledPostgresStorage",
                "config": {"postgres_url": pooled_url},
            }
        }
        opened = [_open(tmp_path_factory.mktemp("home"), storage) for storage in (stock, pooled)]
        assert [is_pooled(instance) for instance in opened] == [False, True]
        yield opened
        for instance in opened:
            instance.dispose()


def _open(folder: Path, storage: Mapping[str, Any]) -> dg.DagsterInstance:
    no_logs = {"module": "dagster._core.storage.noop_compute_log_manager", "class": "NoOpComputeLogManager"}
    settings = {"storage": storage, "compute_logs": no_logs, "telemetry": {"enabled": False}}
    (folder / "dagster.yaml").write_text(yaml.safe_dump(settings))
    return dg.DagsterInstance.from_config(str(folder))


@pytest.fixture
def both(instances: Sequence[dg.DagsterInstance]) -> Both:
    """Runs a scenario on both storages, which are empty, and gives their common answer."""
    for instance in instances:
        _empty(instance.run_storage.postgres_url)

    def answer(scenario: Scenario) -> Any:
        stock, pooled = (scenario(instance) for instance in instances)
        assert pooled == stock
        return pooled

    return answer


def _empty(url: str) -> None:
    # What tells that the tables are up to date stays.
    kept = "('alembic_version', 'secondary_indexes', 'instance_info')"
    engine = create_engine(url)
    with engine.begin() as connection:
        found = connection.execute(
            text(
                f"SELECT quote_ident(tablename) FROM pg_tables WHERE schemaname = 'public' AND tablename NOT IN {kept}"
            )
        )
        connection.execute(text(f"TRUNCATE {', '.join(found.scalars())} RESTART IDENTITY CASCADE"))
    engine.dispose()


# Runs


def a_run(run_id: str, job: str = "job", **more: Any) -> dg.DagsterRun:
    """A run to put into a storage as it is."""
    return dg.DagsterRun(job_name=job, run_id=run_id, **more)


def ids(runs: Sequence[dg.DagsterRun]) -> list[str]:
    return [run.run_id for run in runs]


def test_a_run_is_read_back_as_it_was_added_until_it_is_deleted(both: Both) -> None:
    run = a_run("r1", tags={"team": "a"}, run_config={"ops": {"x": {"config": {"n": 1}}}})

    def scenario(instance: dg.DagsterInstance) -> Any:
        storage = instance.run_storage
        storage.add_run(run)
        stored, known, unknown = instance.get_run_by_id("r1"), storage.has_run("r1"), storage.has_run("r2")
        with pytest.raises(DagsterRunAlreadyExists):
            storage.add_run(run)
        storage.delete_run("r1")
        return stored, known, unknown, instance.get_run_by_id("r1"), storage.get_run_tags(["team"])

    assert both(scenario) == (run, True, False, None, [])


def test_a_run_of_an_unknown_job_snapshot_is_refused(both: Both) -> None:
    def scenario(instance: dg.DagsterInstance) -> Any:
        with pytest.raises(DagsterSnapshotDoesNotExist):
            instance.run_storage.add_run(a_run("r1", job_snapshot_id="never seen"))
        return instance.get_runs_count()

    assert both(scenario) == 0


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        (dg.RunsFilter(), ["r4", "r3", "r2", "r1"]),
        (dg.RunsFilter(run_ids=["r1", "r3", "unknown"]), ["r3", "r1"]),
        (dg.RunsFilter(job_name="other"), ["r3"]),
        (dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.STARTED]), ["r3", "r2"]),
        (dg.RunsFilter(tags={"team": "a"}), ["r2", "r1"]),
        (dg.RunsFilter(tags={"team": ["a", "b"]}), ["r3", "r2", "r1"]),
        (dg.RunsFilter(tags={"team": "a", "urgent": "yes"}), ["r2"]),
        (dg.RunsFilter(tags={"team": "a"}, statuses=[dg.DagsterRunStatus.SUCCESS]), ["r1"]),
        (dg.RunsFilter(created_after=datetime.fromtimestamp(NOON + 1.5, UTC)), ["r4", "r3"]),
        (dg.RunsFilter(created_before=datetime.fromtimestamp(NOON + 1.5, UTC), tags={"team": "a"}), ["r2", "r1"]),
    ],
)
def test_runs_are_found_by_what_the_filter_names(both: Both, filters: dg.RunsFilter, found: list[str]) -> None:
    def scenario(instance: dg.DagsterInstance) -> Any:
        add_four_runs(instance)
        storage = instance.run_storage
        by_record = [record.dagster_run.run_id for record in storage.get_run_records(filters)]
        return ids(storage.get_runs(filters)), storage.get_run_ids(filters), by_record, storage.get_runs_count(filters)

    assert both(scenario) == (found, found, found, len(found))


def add_four_runs(instance: dg.DagsterInstance) -> None:
    status = dg.DagsterRunStatus
    for n, run in enumerate(
        [
            a_run("r1", status=status.SUCCESS, tags={"team": "a"}),
            a_run("r2", status=status.FAILURE, tags={"team": "a", "urgent": "yes"}),
            a_run("r3", "other", status=status.STARTED, tags={"team": "b"}),
            a_run("r4", status=status.CANCELED),
        ]
    ):
        instance.run_storage.add_historical_run(run, datetime.fromtimestamp(NOON + n, UTC))


def test_runs_come_in_pages_in_either_order(both: Both) -> None:
    def scenario(instance: dg.DagsterInstance) -> Any:
        add_four_runs(instance)
        storage = instance.run_storage
        return (
            ids(storage.get_runs(limit=2)),
            ids(storage.get_runs(cursor="r3", limit=2)),
            ids(storage.get_runs(cursor="r1")),
            ids(storage.get_runs(ascending=True, limit=3)),
            storage.get_run_ids(cursor="r4", limit=1),
            [
                r.dagster_run.run_id
                for r in storage.get_run_records(order_by="create_timestamp", ascending=True, limit=2)
            ],
        )

    assert both(scenario) == (
        ["r4", "r3"],
        ["r2", "r1"],
        [],
        ["r1", "r2", "r3"],
        ["r3"],
        ["r1", "r2"],
    )


def test_an_event_of_a_run_moves_its_status_and_times(both: Both) -> None:
    def scenario(instance: dg.DagsterInstance) -> Any:
        storage = instance.run_storage
        storage.add_run(a_run("r1"))
        seen = []
        for n, kind in enumerate(("PIPELINE_STARTING", "PIPELINE_START", "PIPELINE_SUCCESS")):
            moved = dg.DagsterEvent(kind, "job")
            storage.handle_run_event("r1", moved, datetime.fromtimestamp(NOON + n, UTC))
            [record] = storage.get_run_records(dg.RunsFilter(run_ids=["r1"]))
            seen.append((record.dagster_run.status.value, record.start_time, record.end_time))
        return seen

    assert both(scenario) == [
        ("STARTING", None, None),
        ("STARTED", NOON + 1, None),
        ("SUCCESS", NOON + 1, NOON + 2),
    ]


def test_tags_are_added_to_a_run_and_counted_over_all(both: Both) -> None:
    def scenario(instance: dg.DagsterInstance) -> Any:
        storage = instance.run_storage
        storage.add_run(a_run("r1", tags={"team": "a"}))
        storage.add_run(a_run("r2", tags={"team": "b"}))
        storage.add_run_tags("r1", {"team": "c", "more": "yes"})
        run = instance.get_run_by_id("r1")
        assert run is not None
        return (
            dict(run.tags),
            [(key, sorted(values)) for key, values in storage.get_run_tags(["team", "more"])],
            [(key, sorted(values)) for key, values in storage.get_run_tags(["team"], value_prefix="b")],
            storage.get_run_tag_keys(),
            ids(storage.get_runs(dg.RunsFilter(tags={"team": "c"}))),
            ids(storage.get_runs(dg.RunsFilter(tags={"team": "a"}))),
        )

    assert both(scenario) == (
        {"team": "c", "more": "yes"},
        [("more", ["yes"]), ("team", ["b", "c"])],
        [("team", ["b"])],
        ["more", "team"],
        ["r1"],
        [],
    )


def test_a_run_and_its_re_executions_are_a_group(both: Both) -> None:
    def scenario(instance: dg.DagsterInstance) -> Any:
        storage = instance.run_storage
        storage.add_run(a_run("r1"))
        for child, parent in (("r2", "r1"), ("r3", "r2")):
            lineage = {"dagster/parent_run_id": parent, "dagster/root_run_id": "r1"}
            storage.add_run(a_run(child, root_run_id="r1", parent_run_id=parent, tags=lineage))
        groups = (storage.get_run_group(run_id) for run_id in ("r1", "r3"))
        return [(group[0], sorted(ids(group[1]))) if group else None for group in groups]

    assert both(scenario) == [("r1", ["r1", "r2", "r3"])] * 2


def test_snapshots_are_stored_once_and_read_back(both: Both) -> None:
    @dg.job
    def snapped() -> None:
        dg.op(name="only")(lambda: None)()

    job = JobSnap.from_job_def(snapped)
    job_id = create_snapshot_id(job)
    plan = snapshot_from_execution_plan(create_execution_plan(snapped), job_id)

    def scenario(instance: dg.DagsterInstance) -> Any:
        storage = instance.run_storage
        before = storage.has_job_snapshot(job_id)
        added = [storage.add_job_snapshot(job) for _ in range(2)]
        plan_ids = [storage.add_execution_plan_snapshot(plan) for _ in range(2)]
        storage.add_run(a_run("r1", "snapped", job_snapshot_id=job_id))
        return (
            before,
            added,
            len(set(plan_ids)),
            storage.get_job_snapshot(job_id) == job,
            storage.get_execution_plan_snapshot(plan_ids[0]) == plan,
            ids(storage.get_runs(dg.RunsFilter(snapshot_id=job_id))),
        )

    assert both(scenario) == (False, [job_id, job_id], 1, True, True, ["r1"])


def test_a_daemon_has_one_heartbeat_the_last(both: Both) -> None:
    last = DaemonHeartbeat(NOON + 1, "SENSOR", "second", [])

    def scenario(instance: dg.DagsterInstance) -> Any:
        storage = instance.run_storage
        storage.add_daemon_heartbeat(DaemonHeartbeat(NOON, "SENSOR", "first", []))
        storage.add_daemon_heartbeat(last)
        stored = dict(storage.get_daemon_heartbeats())
        storage.wipe_daemon_heartbeats()
        return stored, dict(storage.get_daemon_heartbeats())

    assert both(scenario) == ({"SENSOR": last}, {})


def test_a_daemons_cursors_are_set_and_replaced(both: Both) -> None:
    def scenario(instance: dg.DagsterInstance) -> Any:
        storage = instance.run_storage
        storage.set_cursor_values({"a": "1", "b": "2"})
        storage.set_cursor_values({"b": "3 with 'quotes' and %s", "c": "4"})
        return storage.get_cursor_values({"a", "b", "unknown"})

    assert both(scenario) == {"a": "1", "b": "3 with 'quotes' and %s"}


def test_backfills_are_stored_filtered_and_updated(both: Both) -> None:
    def backfill(backfill_id: str, status: BulkActionStatus) -> PartitionBackfill:
        orders = [dg.AssetKey("orders")]
        return PartitionBackfill(backfill_id, status, False, {"team": backfill_id}, NOON, asset_selection=orders)

    def scenario(instance: dg.DagsterInstance) -> Any:
        storage = instance.run_storage
        for backfill_id in ("b1", "b2"):
            storage.add_backfill(backfill(backfill_id, BulkActionStatus.REQUESTED))
        storage.update_backfill(backfill("b1", BulkActionStatus.COMPLETED_SUCCESS))

        def found(**filters: Any) -> list[str]:
            return [one.backfill_id for one in storage.get_backfills(BulkActionsFilter(**filters))]

        return (
            found(),
            found(statuses=[BulkActionStatus.REQUESTED]),
            found(tags={"team": "b1"}),
            storage.get_backfill("b1"),
            storage.get_backfill("unknown"),
            storage.get_backfills_count(),
        )

    done = backfill("b1", BulkActionStatus.COMPLETED_SUCCESS)
    assert both(scenario) == (["b2", "b1"], ["b2"], ["b1"], done, None, 2)


# Events


def entry(
    run_id: str, said: str = "", *, at: float = 0.0, kind: str | None = None, data: Any = None, step: str | None = None
) -> dg.EventLogEntry:
    """An event, ``at`` seconds after noon."""
    happened = dg.DagsterEvent(kind, "job", event_specific_data=data, step_key=step) if kind else None
    return dg.EventLogEntry(
        error_info=None,
        level=20,
        user_message=said,
        run_id=run_id,
        timestamp=NOON + at,
        step_key=step,
        job_name="job",
        dagster_event=happened,
    )


def materialized(
    asset: str, run_id: str = "r1", *, at: float = 0.0, partition: str | None = None, version: str | None = None
) -> dg.EventLogEntry:
    """The event of an asset that was materialized."""
    tags = {DATA_VERSION_TAG: version} if version else {}
    data = StepMaterializationData(dg.AssetMaterialization(asset, partition=partition, tags=tags))
    return entry(run_id, at=at, kind="ASSET_MATERIALIZATION", data=data, step=asset)


def said_by(entries: Sequence[dg.EventLogEntry]) -> list[str]:
    return [one.user_message for one in entries]


def test_events_are_read_back_as_they_were_stored(both: Both) -> None:
    stored = [
        entry("r1", "plain, with 'quotes', 100 % and ünïcode"),
        entry("r1", kind="STEP_START", step="s", at=1),
        materialized("orders", at=2, partition="p", version="v1"),
    ]

    def scenario(instance: dg.DagsterInstance) -> Any:
        storage = instance.event_log_storage
        for one in stored:
            storage.store_event(one)
        storage.store_event(entry("other", "of another run"))
        return list(storage.get_logs_for_run("r1")), said_by(storage.get_logs_for_run("other"))

    assert both(scenario) == (stored, ["of another run"])


def test_events_of_a_run_come_in_pages_by_kind_and_backwards(both: Both) -> None:
    def scenario(instance: dg.DagsterInstance) -> Any:
        storage = instance.event_log_storage
        for n in range(5):
            kind = "STEP_START" if n % 2 else None
            storage.store_event(entry("r1", str(n), at=n, kind=kind))
        first = storage.get_records_for_run("r1", limit=2)
        rest = storage.get_records_for_run("r1", cursor=first.cursor)
        return (
            said_by([record.event_log_entry for record in first.records]),
            first.has_more,
            said_by([record.event_log_entry for record in rest.records]),
            rest.has_more,
            [record.storage_id for record in rest.records],
            said_by(storage.get_logs_for_run("r1", of_type=dg.DagsterEventType.STEP_START)),
            said_by(storage.get_logs_for_run("r1", limit=2, ascending=False)),
            storage.get_maximum_record_id(),
            said_by(list(storage.get_logs_for_all_runs_by_log_id(after_cursor=3).values())),
        )

    assert both(scenario) == (
        ["0", "1"],
        True,
        ["2", "3", "4"],
        False,
        [3, 4, 5],
        ["1", "3"],
        ["4", "3"],
        5,
        ["3", "4"],
    )


def test_deleted_events_are_gone_and_others_stay(both: Both) -> None:
    def scenario(instance: dg.DagsterInstance) -> Any:
        storage = instance.event_log_storage
        for run_id in ("r1", "r2"):
            storage.store_event(entry(run_id, run_id))
            storage.store_event(materialized(run_id, run_id))
        storage.delete_events("r1")
        left = [said_by(storage.get_logs_for_run(run_id)) for run_id in ("r1", "r2")]
        return left, sorted(key.to_user_string() for key in storage.all_asset_keys())

    left, _ = both(scenario)
    assert left == [[], ["r2", ""]]


def test_the_statistics_of_a_run_and_of_its_steps(both: Both) -> None:
    def scenario(instance: dg.DagsterInstance) -> Any:
        storage = instance.event_log_storage
        for n, (kind, step, data) in enumerate(
            [
                ("PIPELINE_START", None, None),
                ("STEP_START", "good", None),
                ("STEP_SUCCESS", "good", StepSuccessData(1.0)),
                ("STEP_START", "bad", None),
                ("STEP_FAILURE", "bad", StepFailureData(None, None)),
                ("PIPELINE_FAILURE", None, None),
            ]
        ):
            storage.store_event(entry("r1", at=n, kind=kind, step=step, data=data))
        run = storage.get_stats_for_run("r1")
        steps = storage.get_step_stats_for_run("r1")
        return (
            (run.steps_succeeded, run.steps_failed, run.start_time, run.end_time),
            sorted((step.step_key, step.status.value if step.status else None) for step in steps),
        )

    assert both(scenario) == ((1, 1, NOON, NOON + 5), [("bad", "FAILURE"), ("good", "SUCCESS")])


def test_events_of_all_runs_are_found_by_kind_asset_partition_and_cursor(both: Both) -> None:
    def scenario(instance: dg.DagsterInstance) -> Any:
        storage = instance.event_log_storage
        storage.store_event(entry("r1", kind="PIPELINE_START"))
        for n, (asset, partition) in enumerate([("orders", "p1"), ("orders", "p2"), ("clients", None)]):
            storage.store_event(materialized(asset, at=n, partition=partition))
        first = storage.fetch_materializations(dg.AssetKey("orders"), limit=1, ascending=True)
        second = storage.fetch_materializations(dg.AssetKey("orders"), limit=2, ascending=True, cursor=first.cursor)
        one_partition = dg.AssetRecordsFilter(dg.AssetKey("orders"), asset_partitions=["p2"])
        changes = storage.fetch_run_status_changes(dg.DagsterEventType.RUN_START, limit=5)
        return (
            [(page.records[0].partition_key, page.has_more) for page in (first, second)],
            [record.storage_id for record in storage.fetch_materializations(one_partition, limit=5).records],
            [record.storage_id for record in changes.records],
        )

    assert both(scenario) == ([("p1", True), ("p2", False)], [3], [1])


def test_a_batch_of_events_is_stored_like_single_ones(both: Both) -> None:
    batch = [materialized("orders", at=n, partition=f"p{n}", version=f"v{n}") for n in range(3)]

    def scenario(instance: dg.DagsterInstance) -> Any:
        storage, orders = instance.event_log_storage, dg.AssetKey("orders")
        storage.store_event_batch(batch)
        return (
            list(storage.get_logs_for_run("r1")),
            storage.get_materialized_partitions(orders),
            [dict(tags) for tags in storage.get_event_tags_for_asset(orders, {DATA_VERSION_TAG: "v1"})],
        )

    assert both(scenario) == (batch, {"p0", "p1", "p2"}, [{DATA_VERSION_TAG: "v1"}])


def test_a_watcher_is_told_every_event_after_its_cursor_until_it_stops(both: Both) -> None:
    def scenario(instance: dg.DagsterInstance) -> Any:
        storage = instance.event_log_storage
        storage.store_event(entry("r1", "before"))
        cursor = storage.get_records_for_run("r1").cursor
        heard: dict[str, list[str]] = {"after": [], "all": [], "stopped": []}

        def listener(name: str) -> Callable[[dg.EventLogEntry, str], None]:
            return lambda told, _cursor: heard[name].append(told.user_message)

        listeners = {name: listener(name) for name in heard}
        storage.watch("r1", cursor, listeners["after"])
        storage.watch("r1", None, listeners["all"])
        storage.watch("r2", None, listeners["stopped"])
        storage.end_watch("r2", listeners["stopped"])
        for said in ("one", "two"):
            storage.store_event(entry("r1", said))
            storage.store_event(entry("r2", said))
        wait_until(lambda: len(heard["after"]) == 2 and len(heard["all"]) == 3, "the watchers are told")
        for name in ("after", "all"):
            storage.end_watch("r1", listeners[name])
        watching = "sql-event-watch-run-id-r1"
        wait_until(lambda: watching not in [thread.name for thread in threading.enumerate()], "the watch ends")
        return heard

    assert both(scenario) == {"after": ["one", "two"], "all": ["before", "one", "two"], "stopped": []}


# Assets


def test_assets_are_listed_in_pages_and_by_prefix(both: Both) -> None:
    def scenario(instance: dg.DagsterInstance) -> Any:
        storage = instance.event_log_storage
        for asset in ("a", "b", "c"):
            storage.store_event(materialized(asset))
        nested = StepMaterializationData(dg.AssetMaterialization(dg.AssetKey(["shop", "orders"])))
        storage.store_event(entry("r1", kind="ASSET_MATERIALIZATION", data=nested))

        def listed(**how: Any) -> list[str]:
            return [key.to_user_string() for key in storage.get_asset_keys(**how)]

        after_a = dg.AssetKey("a").to_string()
        return listed(), listed(limit=2), listed(limit=2, cursor=after_a), listed(prefix=["shop"])

    assert both(scenario) == (["a", "b", "c", "shop/orders"], ["a", "b"], ["b", "c"], ["shop/orders"])


def test_what_was_last_of_an_asset_and_of_its_partitions(both: Both) -> None:
    orders = dg.AssetKey("orders")

    def scenario(instance: dg.DagsterInstance) -> Any:
        storage = instance.event_log_storage
        planned = AssetMaterializationPlannedData(orders, partition="p2")
        storage.store_event(entry("r2", kind="ASSET_MATERIALIZATION_PLANNED", data=planned))
        for n, partition in enumerate(["p1", "p2", "p1"]):
            storage.store_event(materialized("orders", at=n, partition=partition, version=f"v{n}"))
        [record] = storage.get_asset_records([orders])
        last = record.asset_entry.last_materialization
        assert last is not None
        kind = dg.DagsterEventType.ASSET_MATERIALIZATION
        return (
            last.timestamp,
            record.asset_entry.last_run_id,
            storage.get_latest_storage_id_by_partition(orders, kind),
            storage.get_latest_tags_by_partition(orders, kind, tag_keys=[DATA_VERSION_TAG]),
            storage.get_materialized_partitions(orders, before_cursor=3),
            [key.to_user_string() for key in storage.get_latest_materialization_events([orders])],
            storage.has_asset_key(orders),
            storage.has_asset_key(dg.AssetKey("unknown")),
        )

    assert both(scenario) == (
        NOON + 2,
        "r1",
        {"p1": 4, "p2": 3},
        {"p1": {DATA_VERSION_TAG: "v2"}, "p2": {DATA_VERSION_TAG: "v1"}},
        {"p1"},
        ["orders"],
        True,
        False,
    )


def test_a_wiped_asset_is_unknown_until_it_is_materialized_again(both: Both) -> None:
    orders = dg.AssetKey("orders")

    def scenario(instance: dg.DagsterInstance) -> Any:
        storage = instance.event_log_storage
        for asset in ("orders", "clients"):
            storage.store_event(materialized(asset, partition="p1"))
        storage.wipe_asset(orders)
        wiped = (
            storage.has_asset_key(orders),
            [key.to_user_string() for key in storage.all_asset_keys()],
            storage.get_materialized_partitions(orders),
        )
        # The wipe happened now; what comes after it must be later.
        storage.store_event(materialized("orders", at=10_000_000_000 - NOON, partition="p2"))
        return *wiped, storage.has_asset_key(orders), storage.get_materialized_partitions(orders)

    assert both(scenario) == (False, ["clients"], set(), True, {"p2"})


def test_an_asset_check_has_its_last_result_and_its_history(both: Both) -> None:
    orders = dg.AssetKey("orders")
    check = dg.AssetCheckKey(orders, "not_empty")

    def scenario(instance: dg.DagsterInstance) -> Any:
        storage = instance.event_log_storage
        for n, passed in enumerate((True, False)):
            run_id = f"r{n}"
            planned = AssetCheckEvaluationPlanned(asset_key=orders, check_name="not_empty")
            storage.store_event(entry(run_id, at=n, kind="ASSET_CHECK_EVALUATION_PLANNED", data=planned))
            done = AssetCheckEvaluation(orders, "not_empty", passed, {})
            storage.store_event(entry(run_id, at=n, kind="ASSET_CHECK_EVALUATION", data=done))
        history = storage.get_asset_check_execution_history(check, limit=5)
        latest = storage.get_latest_asset_check_execution_by_key([check])
        return [(one.run_id, one.status.value) for one in history], latest[check].status.value

    assert both(scenario) == ([("r1", "FAILED"), ("r0", "SUCCEEDED")], "FAILED")


def test_dynamic_partitions_are_added_once_paged_and_deleted(both: Both) -> None:
    def scenario(instance: dg.DagsterInstance) -> Any:
        storage = instance.event_log_storage
        storage.add_dynamic_partitions("days", ["a", "b"])
        storage.add_dynamic_partitions("days", ["b", "c"])
        storage.add_dynamic_partitions("other", ["z"])
        page = storage.get_paginated_dynamic_partitions("days", limit=2, ascending=True)
        rest = storage.get_paginated_dynamic_partitions("days", limit=2, ascending=True, cursor=page.cursor)
        storage.delete_dynamic_partition("days", "b")
        return (
            list(page.results),
            page.has_more,
            list(rest.results),
            list(storage.get_dynamic_partitions("days")),
            storage.has_dynamic_partition("days", "b"),
            storage.has_dynamic_partition("days", "c"),
        )

    assert both(scenario) == (["a", "b"], True, ["c"], ["a", "c"], False, True)


# Concurrency


def test_a_slot_is_claimed_waited_for_and_handed_on(both: Both) -> None:
    def scenario(instance: dg.DagsterInstance) -> Any:
        storage = instance.event_log_storage
        storage.set_concurrency_slots("printer", 1)
        claims = [
            storage.claim_concurrency_slot("printer", run_id, "step", priority).slot_status.value
            for run_id, priority in (("r1", 0), ("r2", 0), ("r3", 5))
        ]
        full = storage.get_concurrency_info("printer")
        storage.free_concurrency_slots_for_run("r1")
        # The more urgent one of those that wait is next.
        next_one = {
            run_id: storage.check_concurrency_claim("printer", run_id, "step").is_assigned for run_id in ("r2", "r3")
        }
        again = storage.claim_concurrency_slot("printer", "r3", "step", 5).slot_status.value
        storage.free_concurrency_slot_for_step("r3", "step")
        last = storage.claim_concurrency_slot("printer", "r2", "step", 0).slot_status.value
        return (
            claims,
            (full.slot_count, full.active_run_ids, full.pending_run_ids),
            next_one,
            again,
            last,
            storage.get_concurrency_run_ids(),
        )

    assert both(scenario) == (
        ["CLAIMED", "BLOCKED", "BLOCKED"],
        (1, {"r1"}, {"r2", "r3"}),
        {"r2": False, "r3": True},
        "CLAIMED",
        "CLAIMED",
        {"r2"},
    )


def test_limits_of_concurrency_are_listed_changed_and_deleted(both: Both) -> None:
    def scenario(instance: dg.DagsterInstance) -> Any:
        storage = instance.event_log_storage
        storage.set_concurrency_slots("printer", 3)
        storage.set_concurrency_slots("scanner", 1)
        storage.set_concurrency_slots("printer", 2)
        storage.delete_concurrency_limit("scanner")
        limits = [(limit.name, limit.limit) for limit in storage.get_pool_limits()]
        return storage.get_concurrency_keys(), limits, storage.get_concurrency_info("printer").slot_count

    assert both(scenario) == ({"printer"}, [("printer", 2)], 2)


# Schedules


def a_schedule(name: str, status: InstigatorStatus = InstigatorStatus.RUNNING) -> InstigatorState:
    """The state of a schedule."""
    repository = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("location"), "repository")
    origin = RemoteInstigatorOrigin(repository, name)
    return InstigatorState(origin, InstigatorType.SCHEDULE, status, ScheduleInstigatorData("@daily", NOON))


def test_the_state_of_a_schedule_is_added_changed_found_and_deleted(both: Both) -> None:
    first, second = a_schedule("first"), a_schedule("second", InstigatorStatus.STOPPED)

    def scenario(instance: dg.DagsterInstance) -> Any:
        storage = instance.schedule_storage
        assert storage is not None
        storage.add_instigator_state(first)
        storage.add_instigator_state(second)
        with pytest.raises(dg.DagsterInvariantViolationError):
            storage.add_instigator_state(first)
        running = [
            s.instigator_name for s in storage.all_instigator_state(instigator_statuses={InstigatorStatus.RUNNING})
        ]
        sensors = list(storage.all_instigator_state(instigator_type=InstigatorType.SENSOR))
        storage.update_instigator_state(first.with_status(InstigatorStatus.STOPPED))
        changed = storage.get_instigator_state(first.instigator_origin_id, first.selector_id)
        storage.delete_instigator_state(second.instigator_origin_id, second.selector_id)
        left = [s.instigator_name for s in storage.all_instigator_state(first.repository_origin_id)]
        return running, sensors, changed, left

    assert both(scenario) == (["first"], [], first.with_status(InstigatorStatus.STOPPED), ["first"])


def test_ticks_are_listed_latest_first_by_time_and_status_and_purged(both: Both) -> None:
    state = a_schedule("first")
    of_it = (state.instigator_origin_id, state.selector_id)

    def scenario(instance: dg.DagsterInstance) -> Any:
        storage = instance.schedule_storage
        assert storage is not None

        def tick(at: float, status: TickStatus) -> TickData:
            return TickData(
                state.instigator_origin_id, "first", state.instigator_type, status, NOON + at, selector_id=of_it[1]
            )

        started = storage.create_tick(tick(0, TickStatus.STARTED))
        storage.create_tick(tick(1, TickStatus.SKIPPED))
        storage.create_tick(tick(2, TickStatus.STARTED))
        done = started._replace(
            tick_data=started.tick_data.with_run_info("r1", "key")._replace(status=TickStatus.SUCCESS)
        )
        storage.update_tick(done)

        def listed(**how: Any) -> list[int]:
            return [one.tick_id for one in storage.get_ticks(*of_it, **how)]

        answers = (
            listed(),
            listed(limit=1),
            listed(statuses=[TickStatus.SKIPPED, TickStatus.SUCCESS]),
            listed(after=NOON + 0.5),
            listed(before=NOON + 1.5),
            storage.get_tick(started.tick_id).tick_data.run_ids,
            {key: [one.tick_id for one in ticks] for key, ticks in storage.get_batch_ticks([of_it[1]], 2).items()},
        )
        storage.purge_ticks(*of_it, before=NOON + 1.5, tick_statuses=[TickStatus.SKIPPED])
        return *answers, listed()

    assert both(scenario) == ([3, 2, 1], [3], [2, 1], [3, 2], [2, 1], ["r1"], {of_it[1]: [3, 2]}, [3, 1])


# All together


def test_a_whole_run_leaves_the_same_events_and_the_same_status(both: Both) -> None:
    @dg.asset(partitions_def=dg.StaticPartitionsDefinition(["p1", "p2"]))
    def orders() -> int:
        return 1

    @dg.asset_check(asset=orders)
    def positive() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=False)

    job = dg.Definitions(
        assets=[orders], asset_checks=[positive], jobs=[dg.define_asset_job("orders_job")]
    ).resolve_job_def("orders_job")

    run_id = "11111111-1111-4111-8111-111111111111"

    def scenario(instance: dg.DagsterInstance) -> Any:
        job.execute_in_process(instance=instance, partition_key="p2", run_id=run_id)
        run = instance.get_run_by_id(run_id)
        assert run is not None
        kinds = [one.dagster_event_type.value for one in instance.all_logs(run_id) if one.dagster_event_type]
        found = instance.get_materialized_partitions(dg.AssetKey("orders"))
        instance.delete_run(run_id)
        left = list(instance.all_logs(run_id)), list(instance.get_runs())
        return run.status.value, run.tags["dagster/partition"], kinds, found, left

    status, partition, kinds, found, left = both(scenario)
    assert (status, partition, found, left) == ("SUCCESS", "p2", {"p2"}, ([], []))
    assert kinds[-1] == "PIPELINE_SUCCESS"
    assert "ASSET_CHECK_EVALUATION" in kinds


def test_a_wiped_instance_is_empty(both: Both) -> None:
    def scenario(instance: dg.DagsterInstance) -> Any:
        add_four_runs(instance)
        instance.event_log_storage.store_event(materialized("orders"))
        instance.wipe()
        return instance.get_runs_count(), list(instance.all_asset_keys()), list(instance.all_logs("r1"))

    assert both(scenario) == (0, [], [])
