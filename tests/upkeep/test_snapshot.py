"""What waits, for how long, and whether it grows."""

import math
from datetime import timedelta
from typing import Any

import pandas as pd
import pytest
from sqlalchemy import Engine, event

from outbox_pipelines.settings import Settings
from outbox_pipelines.upkeep.snapshot import (
    JOB_COLUMNS,
    Snapshot,
    forget_history,
    history,
    latest,
    take_jobs,
    take_training,
)
from tests.jobs.messages import end, enqueue_many, let_expire, rows, run, set_state, take, value
from tests.jobs.messages import enqueue as enqueue_job
from tests.outboxes import enqueue, flush, new_tenant
from tests.scripted_service import ScriptedService
from tests.upkeep.aged import bury, complete


def line(snapshot: Snapshot, name: str) -> dict[str, Any]:
    """Of one tenant or kind, without what is not a number."""
    column = "tenant" if "tenant" in snapshot.rows else "kind"
    (found,) = snapshot.rows[snapshot.rows[column] == name].to_dict("records")
    return {key: value for key, value in found.items() if not (isinstance(value, float) and math.isnan(value))}


def an_earlier_look(engine: Engine, table: str, *, seconds: float) -> None:
    """Move the last snapshot into the past."""
    run(
        engine,
        f"""UPDATE outbox.{table} SET taken_at = taken_at - make_interval(secs => :seconds)
            WHERE taken_at = (SELECT max(taken_at) FROM outbox.{table})""",
        seconds=seconds,
    )


# Training


def test_each_tenants_rows_dead_letters_and_oldest_wait_are_counted(engine: Engine) -> None:
    acme, _empty = new_tenant(engine, "acme", rows=12), new_tenant(engine, "empty")
    busy = new_tenant(engine, "busy", rows=3)
    bury(engine, acme, 2, days=1)
    run(engine, f"UPDATE \"{acme.schema}\".ml_outbox SET created_at = created_at - interval '100 seconds' WHERE id = 1")
    run(
        engine,
        """UPDATE outbox.tenants SET lease_token = gen_random_uuid(), lease_expires_at = now() + interval '1 minute'
           WHERE tenant_id = :id""",
        id=busy.tenant_id,
    )
    snapshot = take_training(engine)
    assert list(snapshot.rows["tenant"]) == ["acme", "busy"]
    found = line(snapshot, "acme")
    assert (found["standing"], found["waiting"], found["dead_letters"], found["in_flight"]) == ("due", 12, 2, 0)
    assert 100 <= found["oldest_wait_seconds"] < 160
    assert line(snapshot, "busy")["in_flight"] == 1
    total = snapshot.total
    assert (total["waiting"], total["dead_letters"], total["in_flight"]) == (15, 2, 1)
    assert total["oldest_wait_seconds"] == found["oldest_wait_seconds"]


def test_the_first_snapshot_says_nothing_of_rates(engine: Engine) -> None:
    new_tenant(engine, "acme", rows=2)
    snapshot = take_training(engine)
    assert snapshot.seconds is None
    assert not {"arrived", "drained", "arrival_rate", "drain_rate", "seconds_to_drain"} & line(snapshot, "acme").keys()


def test_what_came_and_what_left_since_the_last_snapshot_give_the_rates(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, "acme", rows=30)
    take_training(engine)
    an_earlier_look(engine, "training_backlog", seconds=100)
    run(engine, "UPDATE outbox.training_ledger SET delivered_at = now()")
    flush(engine, settings, tenant, max_turns=1)
    enqueue(engine, tenant, ({"n": number} for number in range(50)))
    bury(engine, tenant, 4, days=0)
    snapshot = take_training(engine)
    found = line(snapshot, "acme")
    # 30 + 54 came (4 of which died), 30 were delivered, 4 died: 50 are left.
    assert (found["arrived"], found["drained"], found["died"], found["waiting"]) == (54, 34, 4, 50)
    assert snapshot.seconds == pytest.approx(100, abs=30)
    assert found["arrival_rate"] == pytest.approx(54 / snapshot.seconds)
    assert found["drain_rate"] == pytest.approx(34 / snapshot.seconds)
    assert "seconds_to_drain" not in found, "it grows"


def test_the_time_to_drain_comes_from_the_difference_of_the_rates(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, "acme", rows=300)
    new_tenant(engine, "done", rows=5)
    take_training(engine)
    an_earlier_look(engine, "training_backlog", seconds=10)
    flush(engine, settings, tenant, max_turns=1)
    snapshot = take_training(engine)
    assert snapshot.seconds is not None
    # 100 of 300 left.
    assert line(snapshot, "acme")["seconds_to_drain"] == pytest.approx(2 * snapshot.seconds)


def test_a_tenant_that_has_nothing_any_more_is_left_out_and_drained_its_rows(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, "acme", rows=7)
    take_training(engine)
    flush(engine, settings, tenant)
    second = take_training(engine)
    assert line(second, "acme")["drained"] == 7
    assert line(second, "acme")["seconds_to_drain"] == 0
    third = take_training(engine)
    assert third.rows.empty
    assert third.total["waiting"] == 0
    assert third.total["seconds_to_drain"] == 0


def test_an_outbox_that_is_locked_just_now_has_not_become_empty(engine: Engine) -> None:
    tenant = new_tenant(engine, "acme", rows=7)
    take_training(engine)
    with engine.connect() as other, other.begin():
        other.exec_driver_sql(f'LOCK TABLE "{tenant.schema}".ml_outbox IN ACCESS EXCLUSIVE MODE')
        snapshot = take_training(engine)
    found = line(snapshot, "acme")
    assert (found["standing"], found["waiting"], found["arrived"], found["drained"]) == ("unreadable", 7, 0, 0)


def test_a_snapshot_is_noted_and_found_again(engine: Engine) -> None:
    new_tenant(engine, "acme", rows=7)
    with engine.connect() as connection:
        assert latest(connection, "training_backlog") is None
    snapshot = take_training(engine)
    with engine.connect() as connection:
        again = latest(connection, "training_backlog")
        past = history(connection, "training_backlog", hours=1)
    assert again is not None
    assert list(again["tenant"]) == ["acme"]
    assert list(again["waiting"]) == [7]
    assert list(past["waiting"]) == [7]
    assert past["taken_at"][0] == snapshot.taken_at


def test_snapshots_of_ten_thousand_tenants_take_a_bounded_number_of_statements(engine: Engine) -> None:
    """Told by 1,100 tenants: what is added for 500 more is the same each time."""
    statements: list[str] = []
    event.listen(engine, "after_cursor_execute", lambda *args: statements.append(str(args[2])))

    def cost_of(tenants: int) -> int:
        have = int(value(engine, "SELECT count(*) FROM outbox.tenants"))
        with engine.begin() as connection:
            connection.exec_driver_sql(
                f"""
                DO $$ BEGIN FOR n IN {have + 1}..{tenants} LOOP
                    INSERT INTO outbox.tenants (tenant_id, name, schema_name)
                    VALUES (gen_random_uuid(), 't' || n, 't' || n);
                END LOOP; END $$
                """
            )
        statements.clear()
        take_training(engine)
        return len(statements)

    assert cost_of(1_100) - cost_of(600) <= 8 < cost_of(100)
    assert cost_of(100) < 30


# Jobs


def test_jobs_are_counted_by_kind_and_state(engine: Engine) -> None:
    enqueue_many(engine, 4, "a")
    enqueue_job(engine, "a", run_at=None)
    run(engine, "UPDATE outbox.messages SET available_at = now() + interval '1 hour' WHERE message_id = 5")
    run(engine, "UPDATE outbox.messages SET available_at = now() - interval '90 seconds' WHERE message_id = 1")
    set_state(engine, 3, "Published")
    set_state(engine, 4, "Publishing")
    held = take(engine, enqueue_job(engine, "b"), kind="b")
    let_expire(engine, held.message_id)
    run(engine, "UPDATE outbox.messages SET parked = true WHERE message_id = 2")
    complete(engine, 3, days=1, kind="b", outcome="failed")
    complete(engine, 3, days=1, kind="c")
    snapshot = take_jobs(engine)
    assert list(snapshot.rows["kind"]) == ["a", "b"]
    a, b = line(snapshot, "a"), line(snapshot, "b")
    assert [a[name] for name in JOB_COLUMNS[:9]] == [2, 1, 1, 1, 0, 1, 0, 0, 0]
    assert [b[name] for name in JOB_COLUMNS[:9]] == [0, 0, 0, 0, 1, 0, 1, 3, 0]
    assert 90 <= a["oldest_wait_seconds"] < 150
    assert "oldest_wait_seconds" not in b
    assert [snapshot.total[name] for name in JOB_COLUMNS[:9]] == [2, 1, 1, 1, 1, 1, 1, 3, 0]


def test_what_waits_for_later_does_not_wait_yet(engine: Engine) -> None:
    enqueue_many(engine, 1, "a")
    run(engine, "UPDATE outbox.messages SET available_at = now() + interval '1 hour'")
    snapshot = take_jobs(engine)
    assert "oldest_wait_seconds" not in line(snapshot, "a")
    assert math.isnan(snapshot.total["oldest_wait_seconds"])


def test_a_registered_kind_without_messages_is_shown(engine: Engine) -> None:
    run(engine, "INSERT INTO outbox.job_servers (kind, server, consumers) VALUES ('quiet', 'w', 2)")
    assert line(take_jobs(engine), "quiet")["waiting"] == 0


def test_jobs_that_came_and_ended_give_the_rates(engine: Engine) -> None:
    enqueue_many(engine, 10, "work")
    take_jobs(engine)
    an_earlier_look(engine, "job_backlog", seconds=50)
    for message_id in (1, 2, 3, 4):
        assert end(engine, take(engine, message_id))
    enqueue_many(engine, 2, "work")
    snapshot = take_jobs(engine)
    found = line(snapshot, "work")
    assert (found["arrived"], found["drained"], found["gave_up"]) == (2, 4, 0)
    assert snapshot.seconds is not None
    assert found["drain_rate"] == pytest.approx(4 / snapshot.seconds)
    assert found["seconds_to_drain"] == pytest.approx(8 / (2 / snapshot.seconds))


def test_jobs_given_up_since_the_last_snapshot_are_counted_once(engine: Engine) -> None:
    take_jobs(engine)
    run(
        engine,
        """INSERT INTO outbox.messages (kind, state, outcome, completed_at)
           VALUES ('work', 'Completed', 'failed', clock_timestamp())""",
    )
    assert line(take_jobs(engine), "work")["gave_up"] == 1
    again = line(take_jobs(engine), "work")
    assert (again["gave_up"], again["failed"]) == (0, 1)


def test_history_is_kept_for_its_days(engine: Engine) -> None:
    for days in (40, 20, 0):
        take_jobs(engine)
        an_earlier_look(engine, "job_backlog", seconds=days * 86_400)
    with engine.begin() as connection:
        assert forget_history(connection, days=30) == 1
        assert len(history(connection, "job_backlog", hours=24 * 365)) == 2
        assert len(history(connection, "job_backlog", hours=24)) == 1
    assert isinstance(history(engine.connect(), "job_backlog", hours=1), pd.DataFrame)
    assert timedelta(days=19) < value(engine, "SELECT now() - min(taken_at) FROM outbox.job_backlog")


def test_nobody_waits_for_a_snapshot(engine: Engine) -> None:
    """No lock is taken that a writer would notice."""
    locks: list[str] = []

    def look(connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if "outbox.messages" in statement and "pg_locks" not in statement:
            found = connection.exec_driver_sql(
                """SELECT DISTINCT mode FROM pg_locks
                   WHERE relation = 'outbox.messages'::regclass AND pid = pg_backend_pid()"""
            )
            locks.extend(found.scalars())

    enqueue_many(engine, 3, "work")
    event.listen(engine, "after_cursor_execute", look)
    take_jobs(engine)
    assert set(locks) == {"AccessShareLock"}
    assert rows(engine, "SELECT 1")
