"""What is kept for how long: the days that may be purged, and the purge of a day."""

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from outbox_pipelines.database.progress import all_progress
from outbox_pipelines.settings import InvalidSettings, Settings
from outbox_pipelines.upkeep.archive import ArchiveFailed
from outbox_pipelines.upkeep.retention import (
    FIRST_DAY,
    PurgedDay,
    Retention,
    TooYoung,
    due_days,
    newest_day,
    purge_days,
    retentions,
)
from tests.jobs.messages import run
from tests.outboxes import dead_letters, new_tenant
from tests.upkeep.aged import attempts, bury, complete, completed, days_ago, deliver, deliveries

MakeSettings = Callable[..., Settings]


def retention_of(settings: Settings, name: str = "completed_jobs_retention") -> Retention:
    return next(one for one in retentions(settings) if one.name == name)


def purge_them(engine: Engine, retention: Retention, *days: date, archive_dir: Path | None = None) -> list[PurgedDay]:
    done: list[PurgedDay] = []
    purge_days(engine, retention, days, pause=0, archive_dir=archive_dir, on_day=done.append)
    return done


def test_a_day_is_purged_and_the_others_are_not(engine: Engine, settings: Settings) -> None:
    for day in (20, 21, 22):
        complete(engine, 10, days=day)
    (done,) = purge_them(engine, retention_of(settings), days_ago(engine, 21))
    assert (done.day, done.purged.rows, done.purged.batches) == (days_ago(engine, 21), 10, 1)
    assert completed(engine) == 20
    assert done.oldest_left is not None
    assert done.oldest_left.astimezone(UTC).date() == days_ago(engine, 22)


def test_days_are_purged_from_the_oldest_on_and_each_is_told_of(engine: Engine, settings: Settings) -> None:
    for day, count in ((20, 1), (21, 2), (22, 3)):
        complete(engine, count, days=day)
    done = purge_them(engine, retention_of(settings), *(days_ago(engine, day) for day in (20, 21, 22)))
    assert [one.purged.rows for one in done] == [3, 2, 1]
    assert done[-1].oldest_left is None
    with engine.connect() as connection:
        progress = all_progress(connection)["completed_jobs_retention"]
    assert progress.rows_total == 6
    assert progress.age_seconds is not None
    assert progress.age_seconds < 60


def test_a_young_day_is_refused_and_nothing_is_deleted(engine: Engine, settings: Settings) -> None:
    complete(engine, 5, days=20)
    complete(engine, 5, days=10)
    young = days_ago(engine, 10)
    with pytest.raises(TooYoung) as refused:
        purge_them(engine, retention_of(settings), days_ago(engine, 20), young)
    assert str(refused.value) == (
        f"{young}: completed messages are kept for 14 days (OUTBOX_COMPLETED_RETENTION_DAYS), so nothing was deleted; "
        f"the newest day that may be purged is {days_ago(engine, 15)}, and {young} may be from "
        f"{young + timedelta(days=15)}"
    )
    assert completed(engine) == 10


def test_the_newest_day_is_one_all_of_which_is_old_enough(engine: Engine, make_settings: MakeSettings) -> None:
    retention = retention_of(make_settings(completed_retention_days=3.5))
    with engine.connect() as connection:
        newest = newest_day(connection, retention)
        now: datetime = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
    end = datetime(newest.year, newest.month, newest.day, tzinfo=UTC) + timedelta(days=1)
    assert end <= now - timedelta(days=3.5) < end + timedelta(days=1)


def test_what_is_older_than_the_first_day_goes_with_it(engine: Engine, settings: Settings) -> None:
    complete(engine, 4, days=20)
    run(engine, "UPDATE outbox.messages SET completed_at = '2019-05-05' WHERE job_id <> '1'")
    assert due_days(engine, retention_of(settings)) == (FIRST_DAY, days_ago(engine, 15))
    (done,) = purge_them(engine, retention_of(settings), FIRST_DAY)
    assert done.purged.rows == 3


def test_the_days_that_are_due_begin_with_the_oldest_row_and_are_none_when_nothing_is_old(
    engine: Engine, settings: Settings
) -> None:
    retention = retention_of(settings)
    complete(engine, 1, days=14)
    complete(engine, 1, days=2)
    assert due_days(engine, retention) is None
    complete(engine, 1, days=17)
    assert due_days(engine, retention) == (days_ago(engine, 17), days_ago(engine, 15))


def test_the_ledgers_have_ages_of_their_own(engine: Engine, settings: Settings) -> None:
    tenant = new_tenant(engine)
    complete(engine, 2, days=100)
    complete(engine, 2, days=50)
    deliver(engine, tenant, [1, 2], days=400, run_id="old")
    deliver(engine, tenant, [3], days=100, run_id="young")
    (done,) = purge_them(engine, retention_of(settings, "job_ledger_retention"), days_ago(engine, 100))
    assert (done.purged.rows, attempts(engine)) == (2, 2)
    purge_them(engine, retention_of(settings, "training_ledger_retention"), days_ago(engine, 400))
    assert deliveries(engine) == ["young"]


def test_dead_letters_of_all_tenants_go_by_the_day_on_which_they_died(engine: Engine, settings: Settings) -> None:
    tenants = [
        new_tenant(engine, name, schema=schema) for name, schema in (("a", 'odd"%name'), ("b", None), ("c", None))
    ]
    bury(engine, tenants[0], 3, days=100)
    bury(engine, tenants[1], 2, days=101)
    bury(engine, tenants[1], 4, days=1)
    retention = retention_of(settings, "training_dead_letters_retention")
    due = due_days(engine, retention)
    assert due == (days_ago(engine, 101), days_ago(engine, 91))
    days = [due[0] + timedelta(days=number) for number in range((due[1] - due[0]).days + 1)]
    done = purge_them(engine, retention, *days)
    assert [one.purged.rows for one in done[:3]] == [2, 3, 0]
    assert [len(dead_letters(engine, tenant)) for tenant in tenants] == [0, 4, 0]
    assert due_days(engine, retention) is None


def test_a_tenant_whose_schema_is_gone_is_nobody_elses_trouble(engine: Engine, settings: Settings) -> None:
    gone, there = new_tenant(engine, "gone", schema="gone"), new_tenant(engine, "there")
    bury(engine, gone, 1, days=100)
    bury(engine, there, 1, days=100)
    run(engine, "DROP SCHEMA gone CASCADE")
    (done,) = purge_them(engine, retention_of(settings, "training_dead_letters_retention"), days_ago(engine, 100))
    assert done.purged.rows == 1


def test_what_is_archived_is_deleted_and_each_tenant_has_its_own_file(
    engine: Engine, settings: Settings, tmp_path: Path
) -> None:
    complete(engine, 600, days=20)
    (done,) = purge_them(engine, retention_of(settings), days_ago(engine, 20), archive_dir=tmp_path)
    assert (done.purged.rows, completed(engine)) == (600, 0)
    (kept,) = done.archives
    assert kept.path == tmp_path / "completed_jobs_retention" / f"{days_ago(engine, 20)}.parquet"
    assert kept.rows == 600
    tenants = [new_tenant(engine, name) for name in ("a", "b")]
    for tenant in tenants:
        bury(engine, tenant, 2, days=100)
    retention = retention_of(settings, "training_dead_letters_retention")
    (done,) = purge_them(engine, retention, days_ago(engine, 100), archive_dir=tmp_path)
    assert {one.path.parent.name for one in done.archives} == {str(tenant.tenant_id) for tenant in tenants}


def test_an_archive_that_fails_leaves_every_row(engine: Engine, settings: Settings, tmp_path: Path) -> None:
    complete(engine, 5, days=20)
    (tmp_path / "completed_jobs_retention").touch()
    with pytest.raises(ArchiveFailed):
        purge_them(engine, retention_of(settings), days_ago(engine, 20), archive_dir=tmp_path)
    assert completed(engine) == 5


def test_a_ledger_that_would_not_outlive_its_jobs_is_refused(make_settings: MakeSettings) -> None:
    with pytest.raises(InvalidSettings, match="the ledger outlives the jobs"):
        make_settings(completed_retention_days=30, job_ledger_retention_days=10)
