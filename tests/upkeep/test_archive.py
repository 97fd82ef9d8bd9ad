"""What is deleted stands in a file first, whole and read back."""

import hashlib
import json
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pyarrow.parquet
import pytest
from sqlalchemy import Engine

from outbox_pipelines.upkeep import archive as archive_module
from outbox_pipelines.upkeep.archive import Archived, ArchiveFailed, archive
from outbox_pipelines.upkeep.purge import COMPLETED_JOBS, DELIVERIES, Purged, purge
from tests.jobs.messages import run, value
from tests.outboxes import new_tenant
from tests.upkeep.aged import complete, completed, days_ago, deliver

MODES = {"folder": 0o700, "file": 0o600}


def keep(engine: Engine, folder: Path, day: date) -> Archived | None:
    return archive(engine, COMPLETED_JOBS, folder, day, since=begin(day), before=begin(day) + timedelta(days=1))


def begin(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


def purge_kept(engine: Engine, kept: Archived, day: date) -> Purged:
    keys, before = kept.key_chunks(), begin(day) + timedelta(days=1)
    return purge(engine, COMPLETED_JOBS, since=begin(day), before=before, pause=0, keys=keys)


def test_the_file_holds_every_column_of_the_days_rows_and_no_others(engine: Engine, tmp_path: Path) -> None:
    complete(engine, 3, days=20, outcome="failed")
    complete(engine, 2, days=21)
    day = days_ago(engine, 20)
    kept = keep(engine, tmp_path / "jobs", day)
    assert kept is not None
    assert kept.path == tmp_path / "jobs" / f"{day}.parquet"
    assert kept.rows == 3
    assert kept.sha256 == hashlib.sha256(kept.path.read_bytes()).hexdigest()
    table = pyarrow.parquet.read_table(kept.path)
    columns = value(
        engine,
        """SELECT array_agg(column_name::text ORDER BY ordinal_position) FROM information_schema.columns
           WHERE table_schema = 'outbox' AND table_name = 'messages'""",
    )
    assert table.column_names == columns
    rows = table.to_pylist()
    assert [json.loads(row["payload"]) for row in rows] == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert {row["last_error"] for row in rows} == {"no"}
    assert all(row["completed_at"].astimezone(UTC).date() == day for row in rows)
    assert [keys for chunk in kept.key_chunks() for keys in chunk] == [(row["message_id"],) for row in rows]


def test_only_its_owner_may_read_it_and_no_draft_is_left(engine: Engine, tmp_path: Path) -> None:
    complete(engine, 1, days=20)
    kept = keep(engine, tmp_path / "jobs", days_ago(engine, 20))
    assert kept is not None
    assert kept.path.parent.stat().st_mode & 0o777 == MODES["folder"]
    assert kept.path.stat().st_mode & 0o777 == MODES["file"]
    assert list(kept.path.parent.iterdir()) == [kept.path]


def test_a_day_without_rows_gets_no_file(engine: Engine, tmp_path: Path) -> None:
    assert keep(engine, tmp_path, days_ago(engine, 20)) is None
    assert list(tmp_path.iterdir()) == []


def test_a_purge_that_was_cut_off_goes_on_with_the_same_file(engine: Engine, tmp_path: Path) -> None:
    complete(engine, 1_200, days=20)
    day = days_ago(engine, 20)
    first = keep(engine, tmp_path, day)
    assert first is not None
    run(engine, "DELETE FROM outbox.messages WHERE message_id % 2 = 0")
    again = keep(engine, tmp_path, day)
    assert again == first
    done = purge(
        engine,
        COMPLETED_JOBS,
        since=begin(day),
        before=begin(day) + timedelta(days=1),
        pause=0,
        keys=again.key_chunks(),
    )
    assert done.rows == 600
    assert completed(engine) == 0
    assert keep(engine, tmp_path, day) == first, "what is only in the file stays there"


def test_rows_that_are_not_in_the_file_yet_are_added(engine: Engine, tmp_path: Path) -> None:
    complete(engine, 5, days=20)
    day = days_ago(engine, 20)
    keep(engine, tmp_path, day)
    run(engine, "DELETE FROM outbox.messages WHERE message_id = 1")
    complete(engine, 4, days=20)
    kept = keep(engine, tmp_path, day)
    assert kept is not None
    assert kept.rows == 9
    ids = pyarrow.parquet.read_table(kept.path).column("message_id").to_pylist()
    assert len(set(ids)) == 9


def test_nothing_is_deleted_that_is_not_in_the_file(engine: Engine, tmp_path: Path) -> None:
    complete(engine, 5, days=20)
    day = days_ago(engine, 20)
    kept = keep(engine, tmp_path, day)
    assert kept is not None
    complete(engine, 4, days=20)
    done = purge_kept(engine, kept, day)
    assert (done.rows, done.left) == (5, 4)


def test_what_is_read_back_otherwise_than_written_is_not_put_in_place(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(engine, 5, days=20)
    read = archive_module._tables
    monkeypatch.setattr(archive_module, "_tables", lambda *args: (table.slice(1) for table in read(*args)))
    with pytest.raises(ArchiveFailed, match=r"what was read back is not what was written; no row was deleted"):
        keep(engine, tmp_path, days_ago(engine, 20))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_archive_is_told_of_and_stays(engine: Engine, tmp_path: Path) -> None:
    complete(engine, 5, days=20)
    day = days_ago(engine, 20)
    (tmp_path / f"{day}.parquet").write_text("not parquet")
    with pytest.raises(ArchiveFailed, match=r"is not an archive that can be read .* no row was deleted"):
        keep(engine, tmp_path, day)
    assert (tmp_path / f"{day}.parquet").read_text() == "not parquet"


def test_a_folder_that_cannot_be_written_is_told_of_with_the_remedy(engine: Engine, tmp_path: Path) -> None:
    complete(engine, 5, days=20)
    (tmp_path / "file").touch()
    with pytest.raises(
        ArchiveFailed, match=r"cannot be written \(Not a directory\).*set OUTBOX_ARCHIVE_DIR to another"
    ):
        keep(engine, tmp_path / "file" / "jobs", days_ago(engine, 20))


def test_a_full_disk_is_told_of_and_leaves_no_draft(engine: Engine, tmp_path: Path) -> None:
    complete(engine, 5, days=20)
    day = days_ago(engine, 20)
    with pytest.MonkeyPatch.context() as patch:

        def full(_handle: int) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(archive_module.os, "fsync", full)
        with pytest.raises(ArchiveFailed, match=r"No space left on device.*make room"):
            keep(engine, tmp_path, day)
    assert list(tmp_path.iterdir()) == []
    assert keep(engine, tmp_path, day) is not None


def test_ids_that_are_lists_and_uuids_are_kept_too(engine: Engine, tmp_path: Path) -> None:
    tenant = new_tenant(engine)
    deliver(engine, tenant, [3, 4, 5], days=400)
    now: datetime = value(engine, "SELECT clock_timestamp()")
    kept = archive(engine, DELIVERIES, tmp_path, date(2024, 1, 1), since=None, before=now)
    assert kept is not None
    (row,) = pyarrow.parquet.read_table(kept.path).to_pylist()
    assert (row["row_ids"], row["tenant_id"]) == ([3, 4, 5], str(tenant.tenant_id))
    done = purge(engine, DELIVERIES, since=None, before=now, pause=0, keys=kept.key_chunks())
    assert done.rows == 1
