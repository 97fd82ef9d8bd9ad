"""`outbox worker`: kinds side by side, woken or polling, stopped gracefully, and in company of dying processes."""

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text

from outbox_pipelines.database.database import Database
from outbox_pipelines.database.embedded import EmbeddedServer
from outbox_pipelines.database.engine import open_engine
from outbox_pipelines.database.migrate import migrate
from outbox_pipelines.database.url import render
from outbox_pipelines.jobs.actions import cancel
from outbox_pipelines.jobs.context import GiveUp, JobContext
from outbox_pipelines.jobs.kinds import JobKind, Kinds
from outbox_pipelines.jobs.worker import Worker
from outbox_pipelines.settings import Pooler, Settings, load_settings
from tests.jobs.messages import (
    APP_JOBS,
    KIND,
    a_kind,
    add_app_jobs,
    app_job,
    enqueue,
    enqueue_many,
    ledger,
    let_expire,
    make_app_jobs,
    row,
    rows,
    run,
    states,
    value,
)
from tests.jobs.worker_process import NO_PAUSE, make_executions, process
from tests.outboxes import wait_until

StartWorker = Callable[..., AbstractContextManager[Worker]]

OUTCOMES = "SELECT outcome, count(*) AS times FROM outbox.job_attempts GROUP BY outcome"


@pytest.fixture
def worker(make_settings: Callable[..., Settings]) -> StartWorker:
    """Starts a worker in this process; use it as a context manager."""

    def start(*kinds: JobKind, **overrides: Any) -> Worker:
        settings = make_settings(**{"worker_poll_seconds": 0.1, "worker_grace_seconds": 5, **overrides})
        return Worker(Database(settings), Kinds(kinds), settings)

    return start


def outcomes(engine: Engine) -> dict[str, int]:
    """How often claims ended how."""
    return {one.outcome: one.times for one in rows(engine, OUTCOMES)}


def all_completed(engine: Engine) -> bool:
    """Whether no message is left."""
    return value(engine, "SELECT count(*) FROM outbox.messages WHERE state <> 'Completed'") == 0


# Waking


def listens(engine: Engine) -> bool:
    """Whether a worker is notified of new messages."""
    listening = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE query = 'LISTEN outbox_jobs' AND state = 'idle' AND datname = current_database()"
    )
    return bool(value(engine, listening))


def test_a_notification_wakes_a_worker_that_would_not_look_for_an_hour(engine: Engine, worker: StartWorker) -> None:
    with worker(a_kind(), worker_poll_seconds=3600):
        wait_until(lambda: listens(engine))
        for _ in range(3):
            enqueue(engine)
            wait_until(lambda: all_completed(engine))


def test_what_comes_while_nobody_listens_is_found_when_the_listening_begins_again(
    engine: Engine, worker: StartWorker
) -> None:
    with worker(a_kind(), worker_poll_seconds=3600):
        wait_until(lambda: listens(engine))
        run(engine, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query = 'LISTEN outbox_jobs'")
        wait_until(lambda: not listens(engine))
        enqueue(engine)
        wait_until(lambda: all_completed(engine))


def test_a_worker_that_cannot_listen_polls(engine: Engine, worker: StartWorker) -> None:
    with worker(a_kind(), database_pooler=Pooler.TRANSACTION):
        for _ in range(3):
            enqueue(engine)
            wait_until(lambda: all_completed(engine))
        assert not listens(engine)
        assert not value(engine, "SELECT bool_or(listening) FROM outbox.job_servers")


# Kinds side by side


def test_a_slow_kind_does_not_delay_another(engine: Engine, worker: StartWorker) -> None:
    let_go = threading.Event()

    def wait(_job: JobContext) -> None:
        let_go.wait(120)

    slow = a_kind("slow", wait)
    with worker(slow, a_kind("quick")):
        enqueue_many(engine, 300, "slow")
        quick = enqueue_many(engine, 300, "quick")
        wait_until(lambda: {states(engine)[one] for one in quick} == {"Completed"})
        assert value(engine, "SELECT count(*) FROM outbox.messages WHERE kind = 'slow' AND state = 'Completed'") == 0
        let_go.set()


@pytest.mark.parametrize("prefetch", [0, 1, 200])
def test_a_worker_whose_consumers_are_all_busy_uses_no_processor_time(
    engine: Engine, worker: StartWorker, prefetch: int
) -> None:
    let_go, inside = threading.Event(), threading.Barrier(3, timeout=10)

    def handler(_job: JobContext) -> None:
        if not let_go.is_set():
            inside.wait()
            let_go.wait(30)

    enqueue_many(engine, 250)
    with worker(a_kind(handler=handler), worker_poll_seconds=0.2, worker_prefetch=prefetch):
        inside.wait()
        began_at, used = time.monotonic(), time.process_time()
        wait_until(lambda: time.monotonic() > began_at + 1.5)
        assert time.process_time() - used < 0.75
        let_go.set()
        wait_until(lambda: all_completed(engine))


def test_no_more_handlers_run_at_a_time_than_there_are_consumers(engine: Engine, worker: StartWorker) -> None:
    running, most, lock = 0, 0, threading.Lock()
    all_in = threading.Barrier(3, timeout=10)

    def handler(_job: JobContext) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        all_in.wait()
        with lock:
            running -= 1

    enqueue_many(engine, 30)
    with worker(a_kind(handler=handler, consumers=3)):
        wait_until(lambda: all_completed(engine))
    assert most == 3
    assert outcomes(engine) == {"succeeded": 30}


def test_a_kind_that_nobody_registered_is_parked_with_its_reason_and_flows_once_it_is(
    engine: Engine, worker: StartWorker
) -> None:
    stranger = enqueue(engine, "stranger")
    enqueue_many(engine, 20)
    with worker(a_kind(), recovery_seconds=5):
        wait_until(lambda: row(engine, stranger).parked)
        # Health can tell that somebody recovers, without Dagster.
        wait_until(lambda: rows(engine, "SELECT FROM outbox.upkeep WHERE task = 'job_recovery' AND every_seconds = 5"))
        assert "has registered the kind 'stranger'" in row(engine, stranger).last_error
        enqueue_many(engine, 20)
        wait_until(lambda: Counter(states(engine).values()) == {"Completed": 40, "Pending": 1})
    with worker(a_kind(), a_kind("stranger")):
        wait_until(lambda: all_completed(engine))
    assert not row(engine, stranger).parked
    assert row(engine, stranger).last_error is None


def test_a_kind_whose_domain_table_is_locked_does_not_stop_another(engine: Engine, worker: StartWorker) -> None:
    make_app_jobs(engine)
    with worker(a_kind("bound", domain=APP_JOBS), a_kind("free"), lock_timeout=100):
        job_ids = add_app_jobs(engine, 10)
        with engine.connect() as lock, lock.begin():
            lock.exec_driver_sql("LOCK TABLE app.jobs IN ACCESS EXCLUSIVE MODE")
            bound = [enqueue(engine, "bound", job_id=job_id) for job_id in job_ids]
            free = enqueue_many(engine, 100, "free")
            wait_until(lambda: {states(engine)[one] for one in free} == {"Completed"})
            assert "Completed" not in {states(engine)[one] for one in bound}
        wait_until(lambda: all_completed(engine))
    assert outcomes(engine) == {"succeeded": 110}


def test_a_worker_that_lives_and_does_not_get_on_can_be_seen(engine: Engine, worker: StartWorker) -> None:
    let_go = threading.Event()

    def stuck(_job: JobContext) -> None:
        let_go.wait(60)

    def telling(job: JobContext) -> None:
        while not let_go.wait(0.3):
            job.progress(f"{time.monotonic():.1f}")

    for kind in ("stuck", "telling"):
        enqueue(engine, kind)
    with worker(a_kind("stuck", stuck), a_kind("telling", telling), a_kind("idle")) as serving:
        noted = (
            "SELECT kind, extract(epoch FROM clock_timestamp() - seen_at)::float8 AS seen, "
            "extract(epoch FROM seen_at - progressed_at)::float8 AS age FROM outbox.job_servers WHERE server = :server"
        )
        wait_until(
            lambda: any(one.kind == "stuck" and one.age > 8 for one in rows(engine, noted, server=serving.name)),
            seconds=20,
        )
        found = {one.kind: one for one in rows(engine, noted, server=serving.name)}
        assert all(one.seen < 5 for one in found.values())
        assert found["telling"].age < 3
        assert found["idle"].age < 3
        served = {one.kind: one for one in serving.served()}
        assert served["stuck"].running == 1
        assert served["stuck"].progress_age > 8
        let_go.set()


def test_a_job_cancelled_while_it_waits_in_memory_is_not_executed(engine: Engine, worker: StartWorker) -> None:
    let_go, called = threading.Event(), []

    def handler(job: JobContext) -> None:
        called.append(job.message_id)
        let_go.wait(30)

    kind = a_kind(handler=handler, consumers=1, lease=600.0)
    messages = enqueue_many(engine, 3)
    with worker(kind):
        wait_until(lambda: called and set(states(engine).values()) == {"Processing"})
        with engine.begin() as connection:
            cancel(connection, Kinds([kind]), messages[1])
        cancelled_at = time.monotonic()
        wait_until(lambda: time.monotonic() > cancelled_at + 1.1)
        let_go.set()
        wait_until(lambda: all_completed(engine))
    assert called == [messages[0], messages[2]]
    assert ledger(engine, messages[1]) == [(1, 1, "cancelled")]


# What must not stop a lane


def test_a_handler_that_does_not_end_does_not_keep_its_place(engine: Engine, worker: StartWorker) -> None:
    let_go, called = threading.Event(), []

    def handler(job: JobContext) -> None:
        called.append(job.message_id)
        if job.payload:
            # In C, where no exception reaches it.
            let_go.wait(60)

    stuck = enqueue(engine, payload={"stuck": True})
    others = enqueue_many(engine, 20)
    with worker(a_kind(handler=handler, consumers=1, timeout=2, attempts=1)):
        wait_until(lambda: all_completed(engine))
        let_go.set()
    assert stuck in called
    assert row(engine, stuck).outcome == "failed"
    assert all(ledger(engine, one) == [(1, 1, "succeeded")] for one in others)


class _CutsTheFirstConnection:
    """The application's table, whose first closing loses its connection."""

    def __init__(self) -> None:
        self.cuts = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(APP_JOBS, name)

    def close(self, connection: Connection, *told: Any) -> None:
        self.cuts += 1
        if self.cuts == 1:
            connection.connection.driver_connection.close()  # type: ignore[union-attr]
        APP_JOBS.close(connection, *told)


def test_a_connection_lost_while_domain_jobs_are_marked_stops_no_lane(engine: Engine, worker: StartWorker) -> None:
    make_app_jobs(engine)

    def handler(_job: JobContext) -> None:
        raise GiveUp("no use")

    with worker(a_kind(handler=handler, domain=_CutsTheFirstConnection())):
        job_ids = add_app_jobs(engine, 5)
        for job_id in job_ids:
            enqueue(engine, job_id=job_id)
        wait_until(lambda: all_completed(engine))
    assert {app_job(engine, job_id) for job_id in job_ids} == {("failed", "no use")}
    assert outcomes(engine) == {"given up": 5}


def test_a_worker_goes_on_when_its_tables_were_away_for_a_moment(engine: Engine, worker: StartWorker) -> None:
    let_go, inside = threading.Event(), threading.Event()

    def handler(_job: JobContext) -> None:
        inside.set()
        let_go.wait(30)

    enqueue_many(engine, 10)
    with worker(a_kind(handler=handler)) as serving:
        assert inside.wait(10)
        run(engine, "ALTER TABLE outbox.messages RENAME TO away")
        let_go.set()
        wait_until(lambda: serving.served()[0].running == 0)
        run(engine, "ALTER TABLE outbox.away RENAME TO messages")
        wait_until(lambda: all_completed(engine))
        enqueue(engine)
        wait_until(lambda: all_completed(engine))
    assert outcomes(engine) == {"succeeded": 11}


def test_a_database_restarted_in_the_middle_loses_nothing_and_completes_each_message_once(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "postgres", options={"fsync": "off"}) as embedded:
        url = render(embedded.url("postgres"))
        settings = load_settings(database_url=url, worker_poll_seconds=0.1, home=tmp_path)
        engine = open_engine(settings, url, application_name="tests")
        migrate(engine)
        messages = enqueue_many(engine, 400)
        called: Counter[int] = Counter()
        reached, restarted = threading.Event(), threading.Event()

        def handler(job: JobContext) -> None:
            called[job.message_id] += 1
            if called.total() == 100:
                reached.set()
                restarted.wait(60)
            time.sleep(0.002)

        with Worker(Database(settings), Kinds([a_kind(handler=handler, backoff=NO_PAUSE)]), settings):
            assert reached.wait(30)
            embedded.restart()
            restarted.set()
            wait_until(lambda: all_completed(engine), seconds=60)
            enqueue(engine)
            wait_until(lambda: all_completed(engine))
        assert set(messages) <= set(called)
        assert outcomes(engine)["succeeded"] == 401
        assert value(engine, "SELECT count(*) FROM outbox.messages WHERE outcome = 'succeeded'") == 401
        engine.dispose()


# Stopping


def test_a_stopped_worker_lets_running_jobs_end_and_gives_back_the_waiting_ones_uncounted(
    engine: Engine, database_url: str, tmp_path: Path
) -> None:
    make_executions(engine)
    go = tmp_path / "go"
    running = enqueue(engine, payload={"do": [["insist", str(go)]]})
    waiting = enqueue_many(engine, 5)
    with process(database_url, "work", {"name": "work", "consumers": 1}, worker_grace_seconds=60) as worker:
        wait_until(lambda: Counter(states(engine).values()) == {"Processing": 6})
        wait_until(lambda: rows(engine, "SELECT FROM app.executions"))
        worker.terminate()
        wait_until(lambda: Counter(states(engine).values()) == {"Processing": 1, "Pending": 5})
        assert row(engine, running).state == "Processing"
        assert worker.poll() is None
        enqueue(engine)
        go.touch()
        assert worker.wait(30) == 0
    assert ledger(engine, running) == [(1, 1, "succeeded")]
    for message_id in waiting:
        assert ledger(engine, message_id) == [(1, 1, "interrupted")]
        found = row(engine, message_id)
        assert (found.processing_attempts, found.lost_leases) == (0, 0)
        assert found.due_in <= 0
    assert value(engine, "SELECT count(*) FROM app.executions WHERE event = 'begun'") == 1


def test_a_worker_whose_grace_is_over_interrupts_what_still_runs_uncounted(
    engine: Engine, database_url: str, tmp_path: Path
) -> None:
    make_executions(engine)
    never = str(tmp_path / "never")
    acts = [["wait", never], ["insist", never], ["sleep", 60]]
    messages = [enqueue(engine, payload={"do": [act]}) for act in acts]
    kind = {"name": "work", "consumers": 3, "attempts": 1}
    with process(database_url, "work", kind, worker_grace_seconds=0.2) as worker:
        wait_until(lambda: value(engine, "SELECT count(*) FROM app.executions") == 3)
        began_at = time.monotonic()
        worker.terminate()
        assert worker.wait(30) == 0
        assert time.monotonic() - began_at < 10
    for message_id in messages:
        assert ledger(engine, message_id) == [(1, 1, "interrupted")]
        assert (row(engine, message_id).state, row(engine, message_id).processing_attempts) == ("Pending", 0)


def test_workers_stopped_again_and_again_in_full_flow_lose_and_count_nothing(
    engine: Engine, worker: StartWorker
) -> None:
    called: Counter[int] = Counter()

    def handler(job: JobContext) -> None:
        called[job.message_id] += 1

    def reached(goal: int) -> bool:
        return called.total() >= goal

    messages = enqueue_many(engine, 2_000)
    kind = a_kind(handler=handler, attempts=1)
    for _ in range(2):
        with worker(kind):
            goal = called.total() + 300
            wait_until(partial(reached, goal))
        assert value(engine, "SELECT count(*) FROM outbox.messages WHERE state = 'Processing'") == 0
    with worker(kind):
        wait_until(lambda: all_completed(engine))
    assert called == Counter(messages)
    assert outcomes(engine)["succeeded"] == 2_000
    assert set(outcomes(engine)) <= {"succeeded", "interrupted"}


# Poison


def test_a_job_that_kills_its_process_uses_up_its_own_attempts_and_nobody_elses(
    engine: Engine, database_url: str
) -> None:
    make_executions(engine)
    before, after = enqueue_many(engine, 30), []
    poison = enqueue(engine, payload={"do": [["die"]]})
    after = enqueue_many(engine, 30)
    kind = {"name": "work", "consumers": 2, "attempts": 3}
    deaths = 0
    while not all_completed(engine):
        assert deaths < 8, "one job keeps killing its process"
        with process(database_url, "work", kind, worker_poll_seconds=0.1, recovery_seconds=5) as worker:
            wait_until(lambda: worker.poll() is not None or all_completed(engine))
            deaths += worker.poll() == -signal.SIGKILL
    assert deaths == 3
    assert row(engine, poison).outcome == "failed"
    died = value(engine, "SELECT count(*) FROM app.executions WHERE message_id = :id AND event = 'begun'", id=poison)
    assert died == 3
    for message_id in before + after:
        found = row(engine, message_id)
        assert found.outcome == "succeeded"
        # Once while it waited in memory, once beside it.
        assert found.lost_leases <= 2


def test_a_handler_whose_transaction_does_not_end_holds_up_no_other_job(engine: Engine, worker: StartWorker) -> None:
    make_executions(engine)

    def handler(job: JobContext) -> None:
        if job.payload:
            with job.session() as session:
                job.complete_in(session)
                # In C, and the message's row is locked.
                session.execute(text("SELECT pg_sleep(55)"))

    stuck = enqueue(engine, payload={"stuck": True})
    others = enqueue_many(engine, 20)
    with worker(a_kind(handler=handler, timeout=0.3), lock_timeout=0.5):
        wait_until(lambda: row(engine, stuck).state == "Processing")
        wait_until(lambda: {states(engine)[one] for one in others} == {"Completed"}, seconds=20)
        # Long after it was left to itself.
        wait_until(lambda: value(engine, "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"))
        more = enqueue_many(engine, 20)
        wait_until(lambda: {states(engine)[one] for one in more} == {"Completed"}, seconds=20)
        assert row(engine, stuck).state == "Processing"
        assert ledger(engine, stuck) == []


def test_an_end_whose_row_is_locked_holds_up_no_other_end(engine: Engine, worker: StartWorker) -> None:
    may_end = threading.Event()

    def handler(job: JobContext) -> None:
        if job.payload:
            may_end.wait(20)

    locked = enqueue(engine, payload={"locked": True})
    with worker(a_kind(handler=handler), lock_timeout=30):
        wait_until(lambda: row(engine, locked).state == "Processing")
        with engine.connect() as lock, lock.begin():
            lock.execute(text("SELECT FROM outbox.messages WHERE message_id = :id FOR UPDATE"), {"id": locked})
            may_end.set()
            wait_until(lambda: value(engine, "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"))
            others = enqueue_many(engine, 20)
            wait_until(lambda: {states(engine)[one] for one in others} == {"Completed"})
            assert row(engine, locked).state == "Processing"
        wait_until(lambda: all_completed(engine))


def test_a_worker_gets_over_the_end_of_connections_that_it_used_a_moment_ago(
    engine: Engine, worker: StartWorker
) -> None:
    with worker(a_kind()):
        for _ in range(5):
            messages = enqueue_many(engine, 20)
            wait_until(lambda: all_completed(engine))
            ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = :name"
            assert value(engine, ended, name=f"outbox worker: {KIND}")
            messages += enqueue_many(engine, 20)
            wait_until(lambda: all_completed(engine))
            assert all(ledger(engine, one) == [(1, 1, "succeeded")] for one in messages)


def test_a_domain_job_that_is_locked_for_long_is_marked_when_it_can_be(
    engine: Engine, worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    make_app_jobs(engine)

    def handler(_job: JobContext) -> None:
        raise GiveUp("no use")

    kind = a_kind(handler=handler, domain=APP_JOBS)
    with worker(kind, lock_timeout=0.2, recovery_seconds=5, worker_poll_seconds=0.1):
        locked, free = add_app_jobs(engine, 2)
        with engine.connect() as lock, lock.begin():
            lock.execute(text("SELECT FROM app.jobs WHERE id = :id FOR UPDATE"), {"id": locked})
            messages = [enqueue(engine, job_id=job_id) for job_id in (locked, free)]
            wait_until(lambda: app_job(engine, free)[0] == "failed")
            # Given up while it was locked, and left to its lease.
            wait_until(lambda: f"message {messages[0]}, attempt 1: the lease was lost" in caplog.text, seconds=10)
        let_expire(engine)
        wait_until(lambda: all_completed(engine))
    assert {app_job(engine, job_id) for job_id in (locked, free)} == {("failed", "no use")}
    assert [row(engine, message_id).last_error for message_id in messages] == ["no use", "no use"]
