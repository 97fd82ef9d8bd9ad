"""Upkeep in Dagster: what a materialization does and shows, what the schedules ask for, what the checks say."""

import base64
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from sqlalchemy import Engine

from outbox_pipelines.definitions import build_definitions
from outbox_pipelines.settings import Settings
from tests.jobs.messages import enqueue_many, run, value
from tests.outboxes import new_tenant
from tests.upkeep.aged import bury, complete, completed, days_ago, deliver

MakeSettings = Callable[..., Settings]

_START, _END = "dagster/asset_partition_range_start", "dagster/asset_partition_range_end"


class Upkeep:
    """The definitions against one instance."""

    def __init__(self, settings: Settings, instance: dg.DagsterInstance) -> None:
        self.definitions = build_definitions(settings=settings)
        self.instance = instance

    def purge(self, asset: str, first: str, last: str | None = None) -> dg.ExecuteInProcessResult:
        """Materialize days of a retention asset in one run, as a backfill does."""
        return self.definitions.resolve_job_def("daily_retention").execute_in_process(
            instance=self.instance,
            asset_selection=[dg.AssetKey(asset)],
            tags={_START: first, _END: last or first},
            raise_on_error=False,
        )

    def snapshot(self) -> dg.ExecuteInProcessResult:
        """Materialize and check both backlogs."""
        return self.definitions.resolve_job_def("backlog_snapshot").execute_in_process(instance=self.instance)

    def materialized(self, asset: str) -> dict[str, dict[str, Any]]:
        """The metadata of an asset's materializations by partition, the latest counts."""
        found: dict[str, dict[str, Any]] = {}
        records = self.instance.fetch_materializations(dg.AssetKey(asset), limit=1000).records
        for record in reversed(records):
            event = record.asset_materialization
            assert event is not None
            found[event.partition or ""] = {name: one.value for name, one in event.metadata.items()}
        return found

    def tick(self, schedule: str) -> Any:
        """What a schedule asks for."""
        definition = self.definitions.resolve_schedule_def(schedule)
        context = dg.build_schedule_context(instance=self.instance)
        return definition.evaluate_tick(context)


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture
def upkeep(engine: Engine, settings: Settings, instance: dg.DagsterInstance) -> Upkeep:
    return Upkeep(settings, instance)


# Retention


def test_a_range_of_days_is_one_run_with_a_result_for_each_day(engine: Engine, upkeep: Upkeep) -> None:
    complete(engine, 3, days=22)
    complete(engine, 1_100, days=20)
    complete(engine, 5, days=3)
    days = [days_ago(engine, number).isoformat() for number in (22, 21, 20)]
    result = upkeep.purge("completed_jobs_retention", days[0], days[-1])
    assert result.success
    found = upkeep.materialized("completed_jobs_retention")
    assert [found[day]["rows deleted"] for day in days] == [3, 0, 1_100]
    assert found[days[2]]["batches"] == 3
    assert found[days[2]]["rows left locked"] == 0
    assert found[days[2]]["seconds"] >= 0
    assert found[days[0]]["oldest row left"] is not None
    assert "oldest row left" not in found[days[2]]
    assert completed(engine) == 5


def test_a_young_day_fails_with_one_clear_line(engine: Engine, upkeep: Upkeep) -> None:
    complete(engine, 5, days=3)
    day = days_ago(engine, 3).isoformat()
    result = upkeep.purge("completed_jobs_retention", day)
    assert not result.success
    (failure,) = [event for event in result.all_events if event.is_step_failure]
    data = failure.step_failure_data
    assert data.user_failure_data is not None
    assert data.user_failure_data.description is not None
    assert data.user_failure_data.description.startswith(
        f"completed_jobs_retention, {day}: completed messages are kept for 14 days (OUTBOX_COMPLETED_RETENTION_DAYS)"
    )
    assert completed(engine) == 5


def test_an_archive_is_named_with_its_checksum(
    engine: Engine, make_settings: MakeSettings, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    upkeep = Upkeep(make_settings(archive_dir=tmp_path / "archive"), instance)
    complete(engine, 3, days=20)
    day = days_ago(engine, 20).isoformat()
    assert upkeep.purge("completed_jobs_retention", day).success
    found = upkeep.materialized("completed_jobs_retention")[day]
    assert found["archive"] == str(tmp_path / "archive" / "completed_jobs_retention" / f"{day}.parquet")
    assert len(found["archive sha256"]) == 64
    assert Path(found["archive"]).exists()


def test_dead_letters_and_ledgers_are_assets_of_their_own(engine: Engine, upkeep: Upkeep) -> None:
    bury(engine, new_tenant(engine), 4, days=100)
    complete(engine, 2, days=100)
    day = days_ago(engine, 100).isoformat()
    for asset, rows in (
        ("training_dead_letters_retention", 4),
        ("job_ledger_retention", 2),
    ):
        assert upkeep.purge(asset, day).success
        assert upkeep.materialized(asset)[day]["rows deleted"] == rows
    assert upkeep.purge("training_ledger_retention", days_ago(engine, 400).isoformat()).success


def test_the_daily_schedule_asks_for_every_day_that_is_old_enough_and_has_rows(engine: Engine, upkeep: Upkeep) -> None:
    complete(engine, 1, days=19)
    complete(engine, 1, days=2)
    (request,) = upkeep.tick("daily_retention_schedule").run_requests
    assert request.asset_selection == [dg.AssetKey("completed_jobs_retention")]
    first, last = days_ago(engine, 19).isoformat(), days_ago(engine, 15).isoformat()
    assert (request.tags[_START], request.tags[_END]) == (first, last)
    assert upkeep.purge("completed_jobs_retention", first, last).success
    assert len(upkeep.materialized("completed_jobs_retention")) == 5
    tick = upkeep.tick("daily_retention_schedule")
    assert not tick.run_requests
    assert tick.skip_message == (
        "nothing is older than it is kept: completed messages 14 days, job ledger lines 90 days, "
        "training ledger lines 365 days, dead letters 90 days"
    )


def test_the_daily_schedule_forgets_old_snapshots(engine: Engine, upkeep: Upkeep) -> None:
    upkeep.snapshot()
    run(engine, "UPDATE outbox.job_backlog SET taken_at = taken_at - interval '31 days'")
    upkeep.tick("daily_retention_schedule")
    assert value(engine, "SELECT count(*) FROM outbox.job_backlog") == 0
    assert value(engine, "SELECT count(*) FROM outbox.training_backlog") == 1


# Backlog


def test_a_snapshot_shows_numbers_a_table_and_a_picture(engine: Engine, upkeep: Upkeep) -> None:
    new_tenant(engine, "acme", rows=7)
    enqueue_many(engine, 3)
    assert upkeep.snapshot().success
    found = upkeep.materialized("training_backlog")[""]
    assert found["waiting"] == 7
    assert found["dead letters"] == 0
    (record,) = found["by tenant"].records
    assert (record.data["tenant"], record.data["standing"], record.data["waiting"]) == ("acme", "due", 7.0)
    assert "tenant id" not in record.data
    picture = found["last 24 hours"].partition("base64,")[2].rstrip(")")
    assert base64.b64decode(picture).startswith(b"\x89PNG")
    assert len(picture) < 16_000
    jobs = upkeep.materialized("job_backlog")[""]
    assert (jobs["waiting"], jobs["processing"], jobs["oldest wait (s)"] < 60) == (3, 0, True)


def test_the_numbers_that_are_plotted_are_there_each_time(engine: Engine, upkeep: Upkeep) -> None:
    upkeep.snapshot()
    empty = upkeep.materialized("job_backlog")[""]
    enqueue_many(engine, 3)
    upkeep.snapshot()
    full = upkeep.materialized("job_backlog")[""]
    assert {"waiting", "oldest wait (s)", "processing", "expired leases", "failed"} <= empty.keys() & full.keys()
    assert empty["oldest wait (s)"] == 0
    assert {"arrival rate (1/s)", "drain rate (1/s)"} <= full.keys() - empty.keys(), "there was nothing to compare with"


def results(result: dg.ExecuteInProcessResult) -> dict[tuple[str, str], dg.AssetCheckEvaluation]:
    """What each check said, by asset and name."""
    return {(one.asset_key.to_user_string(), one.check_name): one for one in result.get_asset_check_evaluations()}


def test_each_snapshot_is_checked(engine: Engine, upkeep: Upkeep) -> None:
    found = results(upkeep.snapshot())
    assert {name for name, one in found.items() if one.passed} == {
        ("training_backlog", "oldest_wait"),
        ("training_backlog", "no_new_dead_letters"),
        ("training_backlog", "keeps_up"),
        ("training_backlog", "reconciliation"),
        ("job_backlog", "oldest_wait"),
        ("job_backlog", "expired_leases"),
        ("job_backlog", "no_new_failures"),
        ("job_backlog", "keeps_up"),
        ("completed_jobs_retention", "retention_keeps_up"),
        ("job_ledger_retention", "retention_keeps_up"),
        ("training_ledger_retention", "retention_keeps_up"),
        ("training_dead_letters_retention", "retention_keeps_up"),
    }


def test_what_no_purge_took_is_told_of_with_each_snapshot(engine: Engine, upkeep: Upkeep) -> None:
    tenant = new_tenant(engine, "acme")
    complete(engine, 1, days=17)
    deliver(engine, tenant, [1], days=368)
    found = {name: one for name, one in results(upkeep.snapshot()).items() if not one.passed}
    assert found.keys() == {
        ("completed_jobs_retention", "retention_keeps_up"),
        ("training_ledger_retention", "retention_keeps_up"),
    }
    told = found["training_ledger_retention", "retention_keeps_up"].description
    assert told is not None
    assert told.startswith("the oldest training ledger line is 368.")


def test_a_check_that_fails_says_what_whose_and_what_to_do(engine: Engine, upkeep: Upkeep) -> None:
    tenant = new_tenant(engine, "acme", rows=7)
    run(engine, f"UPDATE \"{tenant.schema}\".ml_outbox SET created_at = created_at - interval '1 hour'")
    found = results(upkeep.snapshot())["training_backlog", "oldest_wait"]
    assert not found.passed
    assert found.severity is dg.AssetCheckSeverity.ERROR
    assert found.description is not None
    assert found.description.startswith(
        "1 tenant waited longer than the target allows: acme for 60 min (target 5 min); `outbox tenants list` says why"
    )
    assert found.metadata["late"].value == 1


def test_the_retention_is_checked_when_it_is_materialized(engine: Engine, upkeep: Upkeep) -> None:
    complete(engine, 1, days=30)
    complete(engine, 1, days=20)
    day = days_ago(engine, 20).isoformat()
    found = results(upkeep.purge("completed_jobs_retention", day))
    (result,) = found.values()
    assert not result.passed
    assert result.description is not None
    assert "backfill the days of completed_jobs_retention" in result.description
    assert timedelta(days=29) < timedelta(days=float(result.metadata["oldest (days)"].value)) < timedelta(days=31)  # type: ignore[arg-type]
