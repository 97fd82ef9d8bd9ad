"""Counters that count each line of a ledger once and never fall."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Connection, Engine, text

from outbox_pipelines.database.totals import BUCKETS, bucket_sql
from outbox_pipelines.jobs.publisher import PUBLISHED, publish
from outbox_pipelines.tenants.registry import remove_tenant
from outbox_pipelines.upkeep.totals import (
    CALLED,
    DELIVERED,
    OTHER_TENANTS,
    PROCESSED,
    UNKNOWN_KIND,
    Total,
    Totals,
    read_totals,
    roll_up,
)
from tests.jobs.messages import KIND, a_kind, complete, enqueue, enqueue_many, run, value
from tests.outboxes import new_tenant, wait_until
from tests.upkeep import aged

SUCCEEDED = (PROCESSED, KIND, "succeeded")
NOTHING = Total()


def totals(engine: Engine) -> Totals:
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection, connection.begin():
        return read_totals(connection)


def count(engine: Engine, metric: str, label: str = "", outcome: str = "") -> int:
    return totals(engine).get((metric, label, outcome), NOTHING).count


def rolled_up(engine: Engine) -> int:
    """What stands in the table itself."""
    return int(value(engine, "SELECT coalesce(sum(count), 0) FROM outbox.totals"))


def roll_up_all(engine: Engine, *, tenants: int = 100) -> None:
    """Until nothing is left in the ledgers that is not in the totals: other tests' transactions may delay it."""
    now = value(engine, "SELECT clock_timestamp()")

    def reached() -> bool:
        roll_up(engine, tenants=tenants)
        return value(engine, "SELECT min(coalesce(until, '1970-01-01')) FROM outbox.totals_reached") > now

    wait_until(reached, seconds=60)


def attempt(connection: Connection, message_id: int, *, kind: str | None = KIND, seconds: float = 0.0) -> None:
    """A line as a finished attempt writes it, in a transaction that has written before."""
    connection.execute(text("SELECT pg_current_xact_id()"))
    connection.execute(
        text("""
            INSERT INTO outbox.job_attempts (message_id, kind, claim, attempt, run_id, outcome, started_at)
            VALUES (:id, :kind, 1, 1, 'run', 'succeeded', clock_timestamp() - make_interval(secs => :seconds))
        """),
        {"id": message_id, "kind": kind, "seconds": seconds},
    )


def test_a_line_counts_once_before_and_after_it_is_rolled_up(engine: Engine) -> None:
    complete(engine, enqueue(engine))
    assert count(engine, *SUCCEEDED) == 1
    assert rolled_up(engine) == 0
    roll_up_all(engine)
    assert rolled_up(engine) == 1
    assert count(engine, *SUCCEEDED) == 1
    complete(engine, enqueue(engine))
    assert count(engine, *SUCCEEDED) == 2


def test_what_the_ledger_has_lost_to_the_purge_still_counts(engine: Engine) -> None:
    complete(engine, enqueue(engine))
    roll_up_all(engine)
    run(engine, "DELETE FROM outbox.job_attempts")
    roll_up_all(engine)
    assert count(engine, *SUCCEEDED) == 1


def test_a_line_that_is_committed_long_after_it_was_written_is_not_missed(engine: Engine) -> None:
    with engine.connect() as late, late.begin():
        attempt(late, 1)
        with engine.begin() as quick:
            attempt(quick, 2)
        for _ in range(3):
            roll_up(engine, tenants=10)
        assert count(engine, *SUCCEEDED) == 1
    assert count(engine, *SUCCEEDED) == 2
    roll_up_all(engine)
    assert count(engine, *SUCCEEDED) == rolled_up(engine) == 2


def test_however_writers_commit_and_readers_look_no_count_falls_and_none_is_lost(engine: Engine) -> None:
    done, each, writers = threading.Event(), 60, 4

    def write(number: int) -> None:
        chance = random.Random(number)
        for place in range(each):
            with engine.connect() as connection:
                transaction = connection.begin()
                attempt(connection, number * each + place)
                # Some wait with their commit, and others pass them by.
                if chance.random() < 0.3:
                    connection.execute(text("SELECT pg_sleep(0.03)"))
                transaction.commit()

    def keep_rolling() -> None:
        while not done.is_set():
            roll_up(engine, tenants=10)

    with ThreadPoolExecutor(writers + 2) as threads:
        writing = [threads.submit(write, number) for number in range(writers)]
        rolling = [threads.submit(keep_rolling) for _ in range(2)]
        last = 0
        while not all(one.done() for one in writing):
            now = count(engine, *SUCCEEDED)
            assert now >= last
            last = now
        done.set()
        for one in [*writing, *rolling]:
            one.result()
    assert count(engine, *SUCCEEDED) == each * writers
    roll_up_all(engine)
    assert count(engine, *SUCCEEDED) == rolled_up(engine) == each * writers


def test_a_ledger_of_many_days_is_rolled_up_day_by_day(engine: Engine) -> None:
    for days in (1, 5, 9):
        aged.complete(engine, 3, days=days)
    roll_up_all(engine)
    # These are from before the ledger knew kinds.
    assert count(engine, PROCESSED, UNKNOWN_KIND, "succeeded") == rolled_up(engine) == 9


def test_attempts_count_by_kind_and_outcome_with_the_seconds_that_they_ran(engine: Engine) -> None:
    with engine.begin() as connection:
        attempt(connection, 1, seconds=0.001)
        attempt(connection, 2, seconds=40)
        attempt(connection, 3, kind="other", seconds=3_600)
    found = totals(engine)
    assert found[SUCCEEDED].count == 2
    assert found[SUCCEEDED].seconds == pytest.approx(40, abs=1)
    assert found[SUCCEEDED].buckets == [int(place in {0, BUCKETS.index(60.0)}) for place in range(len(BUCKETS) + 1)]
    assert found[PROCESSED, "other", "succeeded"].buckets[-1] == 1


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [(-5.0, 0), (0.0, 0), (0.005, 0), (0.0051, 1), (0.01, 1), (1.0, 7), (1800.0, 14), (1800.1, 15), (1e9, 15)],
)
def test_a_bucket_counts_what_is_at_most_its_bound(engine: Engine, seconds: float, bucket: int) -> None:
    assert value(engine, f"SELECT {bucket_sql('CAST(:seconds AS float8)')}", seconds=seconds) == bucket


def test_publishes_count_by_kind_with_how_long_their_jobs_had_been_due(engine: Engine) -> None:
    enqueue_many(engine, 3)
    run(engine, "UPDATE outbox.messages SET available_at = clock_timestamp() - interval '20 seconds'")
    with engine.begin() as connection:
        publish(connection, a_kind(consumers=2))
    found = totals(engine)[PUBLISHED, KIND, ""]
    assert (found.count, found.buckets[BUCKETS.index(30.0)]) == (2, 2)
    assert found.seconds == pytest.approx(40, abs=10)
    # A publish that is rolled back did not happen.
    run(engine, "UPDATE outbox.messages SET state = 'Pending', publish_token = NULL")
    with engine.connect() as connection:
        publish(connection, a_kind(consumers=2))
    assert count(engine, PUBLISHED, KIND) == 2


def test_delivered_rows_count_by_tenant_and_calls_by_their_seconds(engine: Engine) -> None:
    acme, beta = new_tenant(engine, "acme"), new_tenant(engine, "beta")
    roll_up(engine, tenants=10)
    aged.deliver(engine, acme, [1, 2, 3])
    aged.deliver(engine, beta, [7])
    assert (count(engine, DELIVERED, "acme"), count(engine, DELIVERED, "beta"), count(engine, CALLED)) == (3, 1, 2)
    roll_up_all(engine)
    assert (count(engine, DELIVERED, "acme"), count(engine, DELIVERED, "beta"), count(engine, CALLED)) == (3, 1, 2)


def test_tenants_beyond_the_cap_share_one_series_and_keep_it(engine: Engine) -> None:
    tenants = [new_tenant(engine, name) for name in ("first", "second", "third", "fourth")]
    roll_up(engine, tenants=2)
    for tenant in tenants:
        aged.deliver(engine, tenant, [1])
    assert {key[1]: total.count for key, total in totals(engine).items() if key[0] == DELIVERED} == {
        "first": 1,
        "second": 1,
        OTHER_TENANTS: 2,
    }
    # Neither a place that becomes free nor a larger cap takes rows out of a series.
    with engine.begin() as connection:
        remove_tenant(connection, "first", drop_schema=True, force=True)
    roll_up_all(engine, tenants=50)
    aged.deliver(engine, tenants[3], [2])
    assert count(engine, DELIVERED, "first") == 1
    assert count(engine, DELIVERED, OTHER_TENANTS) == 3


def test_rows_of_a_tenant_count_in_one_series_alone_even_when_it_is_new(engine: Engine) -> None:
    roll_up(engine, tenants=10)
    acme = new_tenant(engine, "acme")
    aged.deliver(engine, acme, [1, 2])
    # It has no series yet, and is in no other one.
    assert not any(key[0] == DELIVERED for key in totals(engine))
    roll_up(engine, tenants=10)
    assert count(engine, DELIVERED, "acme") == 2


def test_a_tenant_that_is_registered_no_more_still_counts(engine: Engine) -> None:
    gone = new_tenant(engine, "gone")
    aged.deliver(engine, gone, [1])
    with engine.begin() as connection:
        remove_tenant(connection, "gone", drop_schema=True, force=True)
    roll_up_all(engine)
    assert count(engine, DELIVERED, OTHER_TENANTS) == 1
