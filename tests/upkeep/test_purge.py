"""Only what is old enough goes, in small transactions that nobody waits for."""

import os
import signal
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, event, text

from outbox_pipelines.jobs.actions import retry
from outbox_pipelines.jobs.kinds import Kinds
from outbox_pipelines.upkeep.purge import BATCH_ROWS, COMPLETED_JOBS, JOB_ATTEMPTS, Purged, oldest, purge
from tests.jobs.messages import enqueue, enqueue_many, ledger, run, set_state, take, value
from tests.outboxes import wait_until
from tests.upkeep.aged import attempts, complete, completed


def before(engine: Engine, days: float) -> datetime:
    now: datetime = value(engine, "SELECT clock_timestamp()")
    return now - timedelta(days=days)


def purge_old(engine: Engine, *, days: float = 14, pause: float = 0) -> Purged:
    return purge(engine, COMPLETED_JOBS, since=None, before=before(engine, days), pause=pause)


def test_only_completed_messages_older_than_the_retention_go(engine: Engine) -> None:
    complete(engine, 30, days=20)
    complete(engine, 7, days=3)
    held = take(engine, enqueue(engine))
    waiting = enqueue(engine)
    published = enqueue(engine)
    set_state(engine, published, "Published")
    # Old in every respect but their state.
    run(engine, "UPDATE outbox.messages SET created_at = now() - interval '30 days' WHERE state <> 'Completed'")
    run(engine, "UPDATE outbox.messages SET claimed_at = now() - interval '30 days' WHERE state = 'Processing'")
    done = purge_old(engine)
    assert (done.rows, done.left) == (30, 0)
    assert completed(engine) == 7
    left = value(engine, "SELECT array_agg(message_id ORDER BY message_id) FROM outbox.messages WHERE outcome IS NULL")
    assert left == sorted([held.message_id, waiting, published])


def test_no_transaction_deletes_more_than_five_hundred(engine: Engine) -> None:
    complete(engine, 1_234, days=20)
    sizes: list[int] = []
    event.listen(engine, "commit", lambda _connection: sizes.append(0))

    def count(_connection: object, cursor: object, statement: str, *_rest: object) -> None:
        if "DELETE FROM outbox.messages" in statement:
            sizes.append(cursor.rowcount)  # type: ignore[attr-defined]

    event.listen(engine, "after_cursor_execute", count)
    done = purge_old(engine)
    assert (done.rows, done.batches, done.largest_batch) == (1_234, 3, 500)
    # Each deletion is followed by a commit.
    assert [size for size in sizes if size] == [500, 500, 234]
    assert all(sizes[place + 1] == 0 for place, size in enumerate(sizes) if size)


def test_it_pauses_between_two_transactions_and_not_before_the_first(engine: Engine) -> None:
    complete(engine, 1_400, days=20)
    pauses: list[tuple[float, int]] = []
    purge(
        engine,
        COMPLETED_JOBS,
        since=None,
        before=before(engine, 14),
        pause=0.25,
        sleep=lambda seconds: pauses.append((seconds, completed(engine))),
    )
    assert pauses == [(0.25, 900), (0.25, 400)]


def test_a_span_of_time_has_its_begin_and_not_its_end(engine: Engine) -> None:
    midnight = datetime(2026, 3, 2, tzinfo=UTC)
    complete(engine, 3, days=1)
    for place, at in enumerate([midnight, midnight + timedelta(days=1), midnight - timedelta(microseconds=1)]):
        run(engine, "UPDATE outbox.messages SET completed_at = :at WHERE job_id = :id", at=at, id=str(place + 1))
    done = purge(engine, COMPLETED_JOBS, since=midnight, before=midnight + timedelta(days=1), pause=0)
    assert done.rows == 1
    assert value(engine, "SELECT array_agg(job_id ORDER BY job_id) FROM outbox.messages") == ["2", "3"]


def test_a_message_that_is_locked_is_passed_by_and_goes_next_time(engine: Engine) -> None:
    complete(engine, 600, days=20)
    with engine.connect() as other, other.begin():
        other.execute(text("SELECT FROM outbox.messages ORDER BY message_id LIMIT 3 FOR UPDATE"))
        done = purge_old(engine)
        assert (done.rows, done.left) == (597, 3)
    assert purge_old(engine).rows == 3
    assert completed(engine) == 0


def test_a_message_that_was_put_back_between_the_look_and_the_deletion_stays(engine: Engine) -> None:
    complete(engine, 700, days=20, outcome="failed")
    first = int(value(engine, "SELECT min(message_id) FROM outbox.messages"))

    def put_back(seconds: float) -> None:
        rest = int(value(engine, "SELECT max(message_id) FROM outbox.messages"))
        with engine.begin() as connection:
            retry(connection, Kinds(), rest)

    done = purge(engine, COMPLETED_JOBS, since=None, before=before(engine, 14), pause=1, sleep=put_back)
    assert done.rows == 699
    assert value(engine, "SELECT array_agg(state) FROM outbox.messages") == ["Pending"]
    assert value(engine, "SELECT message_id FROM outbox.messages") > first


def test_three_purgers_beside_live_work_never_deadlock_and_purge_each_row_once(engine: Engine) -> None:
    """100,000 old rows, with messages claimed, finished and put back all the while."""
    for day in range(20, 30):
        complete(engine, 10_000, days=day)
    enqueue_many(engine, 200)
    limit = before(engine, 14)
    over = threading.Event()
    failures: list[BaseException] = []
    done: list[Purged] = []
    worked: list[int] = []

    def work() -> None:
        while not over.is_set():
            with engine.begin() as connection:
                found = connection.execute(
                    text("""
                        UPDATE outbox.messages SET state = 'Completed', outcome = 'succeeded', completed_at = now()
                        WHERE message_id IN (SELECT message_id FROM outbox.messages WHERE state = 'Pending'
                                             LIMIT 5 FOR UPDATE SKIP LOCKED)
                    """)
                )
                worked.append(found.rowcount)
            enqueue_many(engine, 5)

    def guarded(function: "object") -> None:
        try:
            function()  # type: ignore[operator]
        except BaseException as error:
            failures.append(error)

    def clean() -> None:
        done.append(purge(engine, COMPLETED_JOBS, since=None, before=limit, pause=0))

    cleaners = [threading.Thread(target=guarded, args=(clean,)) for _ in range(3)]
    worker = threading.Thread(target=guarded, args=(work,))
    for thread in (worker, *cleaners):
        thread.start()
    for thread in cleaners:
        thread.join(120)
        assert not thread.is_alive()
    over.set()
    worker.join(30)
    assert failures == []
    assert sum(one.rows for one in done) == 100_000
    assert max(one.largest_batch for one in done) <= BATCH_ROWS
    assert value(engine, "SELECT count(*) FROM outbox.messages WHERE completed_at < :limit", limit=limit) == 0
    assert sum(worked) > 0
    assert completed(engine) == sum(worked)


_PURGE = """
import sys
from datetime import datetime
from outbox_pipelines.database.engine import open_engine
from outbox_pipelines.settings import load_settings
from outbox_pipelines.upkeep.purge import COMPLETED_JOBS, purge
engine = open_engine(load_settings(), sys.argv[1], application_name="purge")
purge(engine, COMPLETED_JOBS, since=None, before=datetime.fromisoformat(sys.argv[2]), pause=0.05)
"""


def test_a_purge_that_is_killed_has_deleted_whole_batches_and_the_next_goes_on(
    engine: Engine, database_url: str
) -> None:
    complete(engine, 50_000, days=20)
    limit = before(engine, 14)
    process = subprocess.Popen([sys.executable, "-c", _PURGE, database_url, limit.isoformat()])
    wait_until(lambda: completed(engine) < 50_000)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    # Its session may still be at its last statement.
    wait_until(lambda: not value(engine, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'purge'"))
    left = completed(engine)
    assert 0 < left < 50_000
    assert left % BATCH_ROWS == 0
    assert purge(engine, COMPLETED_JOBS, since=None, before=limit, pause=0).rows == left


def test_the_ledger_is_purged_by_its_own_age_and_outlives_the_messages(engine: Engine) -> None:
    complete(engine, 5, days=200)
    complete(engine, 6, days=20)
    fresh = take(engine, enqueue(engine))
    assert purge_old(engine).rows == 11
    assert attempts(engine) == 11
    done = purge(engine, JOB_ATTEMPTS, since=None, before=before(engine, 90), pause=0)
    assert (done.rows, attempts(engine)) == (5, 6)
    assert ledger(engine, fresh.message_id) == []


@pytest.mark.parametrize("aged", [COMPLETED_JOBS, JOB_ATTEMPTS], ids=["messages", "attempts"])
def test_the_oldest_row_is_found_also_among_those_before_an_instant(engine: Engine, aged: object) -> None:
    with engine.connect() as connection:
        assert oldest(connection, COMPLETED_JOBS) is None
    complete(engine, 2, days=5)
    complete(engine, 2, days=9)
    with engine.connect() as connection:
        found = oldest(connection, aged)  # type: ignore[arg-type]
        assert found is not None
        assert found == oldest(connection, aged, before=found + timedelta(seconds=1))  # type: ignore[arg-type]
        assert oldest(connection, aged, before=found) is None  # type: ignore[arg-type]
    assert 8 < (value(engine, "SELECT clock_timestamp()") - found).total_seconds() / 86_400 < 10
