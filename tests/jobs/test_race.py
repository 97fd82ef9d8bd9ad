"""Many workers at once: each job is done once, and finished once when workers are killed."""

import random
import signal
import subprocess
import threading
from collections import Counter
from contextlib import ExitStack
from functools import partial
from uuid import uuid4

from sqlalchemy import Engine, text

from outbox_pipelines.database.database import Database
from outbox_pipelines.jobs.context import JobContext
from outbox_pipelines.jobs.kinds import Kinds
from outbox_pipelines.jobs.message import AttemptOutcome, Settlement
from outbox_pipelines.jobs.outbox import claim_due, claim_message, settle
from outbox_pipelines.jobs.worker import Worker
from outbox_pipelines.settings import Settings
from tests.jobs.messages import KIND, a_kind, enqueue_many, rows, value
from tests.jobs.worker_process import make_executions, process
from tests.outboxes import wait_until

JOBS = 5_000
WORKERS = 16


def left(engine: Engine) -> int:
    """How many messages are not completed."""
    return int(value(engine, "SELECT count(*) FROM outbox.messages WHERE state <> 'Completed'"))


def serves(engine: Engine, pid: int) -> bool:
    """Whether the worker with that process id has started."""
    server = f"worker-%-{pid}-%"
    return bool(value(engine, "SELECT count(*) FROM outbox.job_servers WHERE server LIKE :server", server=server))


def assert_each_succeeded_once(engine: Engine, messages: list[int]) -> None:
    """By the ledger, and by the messages themselves."""
    succeeded = Counter(
        one.message_id for one in rows(engine, "SELECT message_id FROM outbox.job_attempts WHERE outcome = 'succeeded'")
    )
    assert succeeded == Counter(messages)
    assert value(engine, "SELECT count(*) FROM outbox.messages WHERE outcome = 'succeeded'") == len(messages)


def test_sixteen_claimers_claim_each_message_once(engine: Engine) -> None:
    messages = enqueue_many(engine, JOBS)
    taken: list[int] = []
    begin = threading.Barrier(WORKERS)

    def work(number: int) -> None:
        # Some as a worker does, by urgency; some as runs do, by id.
        ids = random.Random(number).sample(messages, 200) if number % 4 == 0 else []
        with engine.connect() as connection:
            begin.wait()
            while True:
                with connection.begin():
                    if ids:
                        one = claim_message(
                            connection, ids.pop(), kind=KIND, holder=f"{number}", seconds=60, token=uuid4()
                        )
                        claims = [one] if hasattr(one, "lease") else []
                    else:
                        claims = claim_due(
                            connection,
                            KIND,
                            limit=20,
                            ready=20,
                            alone=True,
                            attempts=5,
                            holder=f"{number}",
                            seconds=60,
                            token=uuid4(),
                        )
                        if not claims:
                            return
                taken.extend(one.message_id for one in claims)
                ends = [Settlement(one, AttemptOutcome.SUCCEEDED) for one in claims]  # type: ignore[arg-type]
                with connection.begin():
                    assert len(settle(connection, ends, holder=f"{number}")) == len(ends)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert Counter(taken) == Counter(messages)
    assert_each_succeeded_once(engine, messages)
    assert value(engine, "SELECT count(*) FROM outbox.job_attempts") == JOBS


def test_sixteen_consumers_of_four_workers_execute_each_job_once(engine: Engine, settings: Settings) -> None:
    make_executions(engine)
    called: Counter[int] = Counter()
    lock = threading.Lock()

    def handler(job: JobContext) -> None:
        with lock:
            called[job.message_id] += 1

    messages = enqueue_many(engine, JOBS)
    kinds = Kinds([a_kind(handler=handler, consumers=WORKERS // 4)])
    with ExitStack() as workers:
        for _ in range(4):
            workers.enter_context(Worker(Database(settings), kinds, settings))
        wait_until(lambda: left(engine) == 0, seconds=60)
    assert called == Counter(messages)
    assert_each_succeeded_once(engine, messages)
    assert value(engine, "SELECT count(*) FROM outbox.job_attempts WHERE outcome <> 'interrupted'") == JOBS


def test_each_job_is_finished_once_though_workers_are_killed_at_random(engine: Engine, database_url: str) -> None:
    make_executions(engine)
    messages = enqueue_many(engine, 800)
    kind = {"name": KIND, "consumers": 4, "attempts": 1_000}
    chance = random.Random(7)
    kills = 0
    with ExitStack() as processes:

        def start() -> "subprocess.Popen[bytes]":
            return processes.enter_context(process(database_url, "work", kind, worker_prefetch=30, recovery_seconds=5))

        def begun() -> int:
            return int(value(engine, "SELECT count(*) FROM app.executions"))

        def reached(goal: int) -> bool:
            return begun() >= goal or not left(engine)

        workers = [start(), start()]
        while left(engine):
            goal = begun() + chance.randrange(20, 150)
            wait_until(partial(reached, goal))
            if kills < 5 and left(engine):
                victim = workers.pop(chance.randrange(len(workers)))
                victim.send_signal(signal.SIGKILL)
                kills += 1
                workers.append(start())
        for worker in workers:
            wait_until(partial(serves, engine, worker.pid))
            worker.terminate()
        assert [worker.wait(30) for worker in workers] == [0, 0]
    assert kills >= 3
    assert_each_succeeded_once(engine, messages)
    with engine.connect() as connection:
        unlike = connection.execute(
            text("""
                SELECT message_id, runs, ends FROM (
                    SELECT message_id, count(*) AS runs,
                           (SELECT count(*) FROM outbox.job_attempts AS ledger
                            WHERE ledger.message_id = noted.message_id AND outcome <> 'interrupted') AS ends
                    FROM app.executions AS noted WHERE event = 'begun' GROUP BY message_id
                ) AS counted WHERE runs > ends
            """)
        ).all()
    assert unlike == [], "executed more often than claimed"
    assert value(engine, "SELECT count(DISTINCT message_id) FROM app.executions WHERE event = 'ended'") == 800
    assert value(engine, "SELECT count(*) FROM outbox.job_attempts WHERE outcome = 'lost'") > 0
