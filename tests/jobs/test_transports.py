"""What every transport keeps: Dagster's runs and a worker's queues, held to the same promises."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import dagster as dg
import pytest
from sqlalchemy import Engine, text

from outbox_pipelines import Backoff, GiveUp, JobContext, JobKind, LeaseLost
from outbox_pipelines.database.database import Database
from outbox_pipelines.jobs.actions import cancel, retry
from outbox_pipelines.jobs.keeper import LeaseKeeper
from outbox_pipelines.jobs.kinds import Kinds
from outbox_pipelines.jobs.pipeline import RunTransport
from outbox_pipelines.jobs.recovery import recover
from outbox_pipelines.jobs.runner import Runner
from outbox_pipelines.jobs.transport import Transport
from outbox_pipelines.jobs.worker import Worker
from outbox_pipelines.settings import Settings
from tests.jobs.messages import APP_JOBS, enqueue, ledger, make_app_jobs, row, run, value
from tests.outboxes import wait_until

AT_ONCE = Backoff(first=0, maximum=0)
PATIENCE = 60.0


class Serving(Protocol):
    """A transport at work, until the block is left."""

    transport: Transport

    def __enter__(self) -> "Serving": ...

    def __exit__(self, *_: object) -> None: ...


class ByWorker:
    """A worker of this process."""

    def __init__(self, database: Database, settings: Settings, kinds: list[JobKind], _folder: Path) -> None:
        self.transport = Worker(database, Kinds(kinds), settings)

    def __enter__(self) -> "ByWorker":
        self.transport.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.transport.stop(grace_seconds=0)


class ByRuns:
    """Dagster's runs: ticks one after another, and what each run's op does in a thread of its own.

    Not whole runs, of which Dagster executes one at a time in a process: they are tested where
    the whole stack runs.
    """

    def __init__(self, database: Database, settings: Settings, kinds: list[JobKind], folder: Path) -> None:
        self._instance = dg.instance_for_test(temp_dir=str(folder))
        self._settings = settings
        self._kinds = Kinds(kinds)
        self._database = database
        self._over = threading.Event()
        self._runs = ThreadPoolExecutor(8)

    def __enter__(self) -> "ByRuns":
        instance = self._instance.__enter__()
        self.transport = RunTransport(self._database.engine, instance, self._kinds, self._settings)
        self._daemon = threading.Thread(target=self._tick)
        self._daemon.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._daemon.join()
        self._runs.shutdown()
        self._instance.__exit__(None, None, None)

    def _tick(self) -> None:
        while not self._over.wait(0.05):
            for kind in self._kinds:
                self.transport.wake(kind)
            requests, self.transport.requests[:] = list(self.transport.requests), []
            for request in requests:
                self._runs.submit(self._run, request)

    def _run(self, request: dg.RunRequest) -> None:
        engine, run_id = self._database.engine, str(uuid4())
        kind = self._kinds[request.tags["outbox/kind"]]
        message_id = request.run_config["ops"]["run_background_job"]["config"]["message"]
        with LeaseKeeper(engine, url=self._database.url, settings=self._settings, delay=2.0) as keeper:
            Runner(engine, keeper, holder=run_id).run(kind, message_id, on_progress=lambda _step, _fraction: None)


Serve = Callable[..., Serving]


@pytest.fixture(params=[ByWorker, ByRuns], ids=["worker", "runs"])
def serve(request: pytest.FixtureRequest, make_settings: Callable[..., Settings], tmp_path: Path) -> Iterator[Serve]:
    """Makes a transport that serves kinds."""
    settings = make_settings(worker_poll_seconds=0.05, pool_size=16)
    with Database(settings) as database:
        yield lambda *kinds: request.param(database, settings, list(kinds), tmp_path)


def completed(engine: Engine, *messages: int) -> bool:
    """Whether all of them are over."""
    return all(row(engine, message_id).state == "Completed" for message_id in messages)


def wait_completed(engine: Engine, *messages: int) -> None:
    """Wait until all of them are over."""
    wait_until(lambda: completed(engine, *messages), seconds=PATIENCE)


def outcomes(engine: Engine, message_id: int) -> list[str]:
    """How its claims ended."""
    return [outcome for _claim, _attempt, outcome in ledger(engine, message_id)]


def test_each_job_is_executed_once_with_what_was_enqueued(serve: Serve, engine: Engine) -> None:
    seen: list[tuple[int, str | None, Any, int]] = []
    kind = JobKind("work", lambda job: seen.append((job.message_id, job.job_id, job.payload, job.attempt)))
    messages = [enqueue(engine, job_id=str(number), payload={"n": number}) for number in range(6)]
    with serve(kind):
        wait_completed(engine, *messages)
    assert sorted(seen) == [(message, str(n), {"n": n}, 1) for n, message in enumerate(messages)]
    assert [outcomes(engine, message) for message in messages] == [["succeeded"]] * 6


def test_a_job_that_fails_is_tried_again_and_given_up_after_its_last_attempt(serve: Serve, engine: Engine) -> None:
    make_app_jobs(engine)
    run(engine, "INSERT INTO app.jobs (id, status) VALUES (7, 'queued')")
    attempts: list[int] = []

    def handler(job: JobContext) -> None:
        attempts.append(job.attempt)
        raise ValueError("no")

    message = enqueue(engine, job_id="7")
    with serve(JobKind("work", handler, attempts=3, backoff=AT_ONCE, domain=APP_JOBS)):
        wait_completed(engine, message)
    assert attempts == [1, 2, 3]
    assert outcomes(engine, message) == ["failed", "failed", "given up"]
    assert row(engine, message).outcome == "failed"
    told = "given up after 3 attempts; the last error: ValueError: no"
    assert row(engine, message).last_error == told
    assert value(engine, "SELECT status || ': ' || message FROM app.jobs WHERE id = 7") == f"failed: {told}"


def test_a_handler_that_gives_up_has_no_further_attempt(serve: Serve, engine: Engine) -> None:
    def handler(_job: JobContext) -> None:
        raise GiveUp("the term is over")

    message = enqueue(engine)
    with serve(JobKind("work", handler)):
        wait_completed(engine, message)
    assert outcomes(engine, message) == ["given up"]
    assert row(engine, message).last_error == "the term is over"


def test_no_more_of_a_kind_run_at_a_time_than_it_has_consumers(serve: Serve, engine: Engine) -> None:
    lock, now, most, enough = threading.Lock(), [0], [0], threading.Event()

    def handler(_job: JobContext) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
            if now[0] == 3:
                enough.set()
        # All three places are used at once before any is given back.
        enough.wait(PATIENCE)
        time.sleep(0.05)
        with lock:
            now[0] -= 1

    messages = [enqueue(engine) for _ in range(8)]
    with serve(JobKind("work", handler, consumers=3)):
        wait_completed(engine, *messages)
    assert most == [3]


def test_the_urgent_go_first_then_the_older_and_none_before_its_time(serve: Serve, engine: Engine) -> None:
    order: list[str] = []
    later = datetime.now(UTC) + timedelta(days=1)
    messages = [
        enqueue(engine, payload={"name": name}, priority=priority)
        for name, priority in (("first", 0), ("second", 0), ("urgent", 9), ("whenever", -1))
    ]
    early = enqueue(engine, payload={"name": "early"}, run_at=later, priority=99)
    with serve(JobKind("work", lambda job: order.append(job.payload["name"]), consumers=1)):
        wait_completed(engine, *messages)
        with engine.begin() as connection:
            retry(connection, Kinds(), early)
        wait_completed(engine, early)
    assert order == ["urgent", "first", "second", "whenever", "early"]


def test_kinds_never_wait_for_each_other_and_unknown_ones_are_parked(serve: Serve, engine: Engine) -> None:
    begun, release = threading.Event(), threading.Event()

    def block(_job: JobContext) -> None:
        begun.set()
        release.wait(PATIENCE)

    unknown = enqueue(engine, "unheard_of")
    blocking = [enqueue(engine, "slow") for _ in range(3)]
    slow, quick = JobKind("slow", block, consumers=1), JobKind("quick", lambda _job: None)
    try:
        with serve(slow, quick):
            assert begun.wait(PATIENCE)
            wait_completed(engine, *(enqueue(engine, "quick") for _ in range(5)))
            assert not completed(engine, blocking[0])
            release.set()
            wait_completed(engine, *blocking)
    finally:
        release.set()
    recover(engine, Kinds([slow, quick]), publish_timeout=120)
    assert (row(engine, unknown).state, row(engine, unknown).parked) == ("Pending", True)
    with serve(JobKind("unheard_of", lambda _job: None)):
        wait_completed(engine, unknown)


def test_a_job_whose_lease_was_taken_writes_nothing_and_the_taker_does_it(serve: Serve, engine: Engine) -> None:
    refused: list[bool] = []

    def handler(job: JobContext) -> None:
        if job.attempt > 1:
            return
        # As if it had been away for longer than its lease, and recovered.
        run(engine, "UPDATE outbox.messages SET lease_expires_at = now() - interval '1 s'")
        recover(engine, Kinds(), publish_timeout=120)
        try:
            with job.session() as session:
                session.execute(text("CREATE TABLE effect_of_the_stale (id integer)"))
                job.complete_in(session)
        except LeaseLost:
            refused.append(True)
            raise

    message = enqueue(engine)
    with serve(JobKind("work", handler)):
        wait_completed(engine, message)
    assert refused == [True]
    assert outcomes(engine, message) == ["lost", "succeeded"]
    assert value(engine, "SELECT to_regclass('public.effect_of_the_stale')") is None


def test_effect_and_completion_are_one_transaction(serve: Serve, engine: Engine) -> None:
    run(engine, "CREATE TABLE effects (message_id bigint, attempt integer)")

    def handler(job: JobContext) -> None:
        with job.session() as session:
            session.execute(
                text("INSERT INTO effects VALUES (:id, :attempt)"), {"id": job.message_id, "attempt": job.attempt}
            )
            job.complete_in(session)
            if job.attempt == 1:
                raise OSError("just before the commit")

    message = enqueue(engine)
    with serve(JobKind("work", handler, backoff=AT_ONCE)):
        wait_completed(engine, message)
    assert outcomes(engine, message) == ["failed", "succeeded"]
    assert value(engine, "SELECT string_agg(message_id || '/' || attempt, ', ') FROM effects") == f"{message}/2"


def test_a_job_that_is_cancelled_is_told_and_nothing_more_is_written(serve: Serve, engine: Engine) -> None:
    def handler(job: JobContext) -> None:
        with engine.begin() as connection:
            cancel(connection, Kinds(), job.message_id)
        job.progress("a step that nobody wants")

    cancelled_waiting = enqueue(engine)
    with engine.begin() as connection:
        cancel(connection, Kinds(), cancelled_waiting)
    message = enqueue(engine)
    with serve(JobKind("work", handler)) as serving:
        wait_completed(engine, message)
        # Its consumer is free again.
        wait_until(lambda: [one.running for one in serving.transport.served()] == [0], seconds=PATIENCE)
    assert (row(engine, message).outcome, row(engine, message).step) == ("cancelled", None)
    assert outcomes(engine, message) == ["cancelled"]
    assert outcomes(engine, cancelled_waiting) == []


def test_progress_is_in_the_table_while_the_handler_works(serve: Serve, engine: Engine) -> None:
    release = threading.Event()

    def handler(job: JobContext) -> None:
        job.progress("placing lectures", 0.5)
        release.wait(PATIENCE)

    message = enqueue(engine)
    try:
        with serve(JobKind("work", handler)) as serving:
            wait_until(lambda: row(engine, message).step == "placing lectures", seconds=PATIENCE)
            assert row(engine, message).fraction == 0.5
            assert [(one.kind, one.consumers, one.running) for one in serving.transport.served()] == [("work", 2, 1)]
            release.set()
            wait_completed(engine, message)
    finally:
        release.set()


def test_a_stopped_transport_takes_no_more(serve: Serve, engine: Engine) -> None:
    first = enqueue(engine)
    with serve(JobKind("work", lambda _job: None)) as serving:
        wait_completed(engine, first)
        serving.transport.stop()
        late = enqueue(engine)
        serving.transport.wake("work")
    assert (row(engine, late).state, row(engine, late).claims) == ("Pending", 0)
