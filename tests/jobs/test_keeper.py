"""The lease is kept whatever the handler does to its process, and given back when the process dies."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from sqlalchemy import Engine

from outbox_pipelines.database.engine import open_engine
from outbox_pipelines.jobs.context import JobContext
from outbox_pipelines.jobs.keeper import LeaseKeeper
from outbox_pipelines.jobs.kinds import Kinds
from outbox_pipelines.jobs.message import MESSAGES, AttemptOutcome, NotClaimed, Refusal
from outbox_pipelines.jobs.recovery import recover
from outbox_pipelines.jobs.runner import Report, Runner
from outbox_pipelines.lease.lease import Lease
from outbox_pipelines.settings import Settings
from tests.jobs.messages import a_kind, ask_for, end, enqueue, ledger, ledger_rows, row, rows, run, take, value
from tests.jobs.silent_proxy import SilentProxy
from tests.jobs.worker_process import make_executions, process
from tests.outboxes import wait_until

KEEPERS = "FROM pg_stat_activity WHERE application_name = 'outbox lease keeper' AND datname = current_database()"


@pytest.fixture(autouse=True)
def _executions(engine: Engine) -> None:
    make_executions(engine)


@pytest.fixture
def keeper(engine: Engine, settings: Settings, database_url: str) -> Iterator[LeaseKeeper]:
    """This process's keeper."""
    with LeaseKeeper(engine, url=database_url, settings=settings) as keeper:
        yield keeper


class Hold:
    """A message held by a runner in a thread of this process, until its handler is let go."""

    def __init__(self, engine: Engine, keeper: LeaseKeeper, message_id: int, *, lease: float = 10) -> None:
        self.begun, self.let_go = threading.Event(), threading.Event()
        self.stopped_at: float | None = None
        self.report: Report | NotClaimed | None = None
        self._runner = Runner(engine, keeper, holder="holder")
        self._message_id = message_id
        self._lease = lease
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self.begun.wait(30)

    def _run(self) -> None:
        kind = a_kind(handler=self._handle, lease=self._lease)
        self.report = self._runner.run(kind, self._message_id, on_progress=lambda _step, _fraction: None)

    def _handle(self, job: JobContext) -> None:
        self.begun.set()
        while not self.let_go.is_set():
            if job.wait(0.02):
                self.stopped_at = time.monotonic()
                return

    def end(self) -> Report:
        """Let the handler return; what came of it."""
        self.let_go.set()
        self.thread.join(60)
        assert isinstance(self.report, Report)
        return self.report


def executions(engine: Engine, event: str = "begun") -> list[int]:
    """The messages whose handlers began, or ended, once for each time."""
    found = rows(engine, "SELECT message_id FROM app.executions WHERE event = :event ORDER BY at", event=event)
    return [one.message_id for one in found]


def assert_held(engine: Engine, message_id: int) -> None:
    """Nobody else can have it."""
    refused = ask_for(engine, message_id)
    assert isinstance(refused, NotClaimed), f"message {message_id} could be claimed from its holder"
    assert refused.why is Refusal.HELD


def until_held_no_more_than(
    engine: Engine, message_id: int, condition: Callable[[], object], *, seconds: float = 30.0
) -> None:
    """Wait for a condition, while somebody else tries to get the message all the time."""

    def look() -> bool:
        assert_held(engine, message_id)
        return bool(condition())

    wait_until(look, seconds=seconds)


def test_a_handler_that_computes_for_three_leases_in_python_or_in_c_keeps_its_lease_and_runs_once(
    engine: Engine, database_url: str
) -> None:
    messages = [enqueue(engine, payload={"do": [[word, 31]]}) for word in ("burn", "freeze")]
    processes = [process(database_url, "run", {"name": "work"}, message=message_id) for message_id in messages]
    with processes[0] as burning, processes[1] as frozen:
        wait_until(lambda: len(executions(engine)) == 2)

        def over() -> bool:
            for message_id in set(messages) - set(executions(engine, "ended")):
                refused = ask_for(engine, message_id)
                if isinstance(refused, NotClaimed) and refused.why is Refusal.COMPLETED:
                    continue
                assert isinstance(refused, NotClaimed), f"message {message_id} could be claimed from its holder"
            assert recover(engine, Kinds(), publish_timeout=60).lost_leases == 0
            time.sleep(0.05)
            return burning.poll() is not None and frozen.poll() is not None

        wait_until(over, seconds=90)
        assert (burning.returncode, frozen.returncode) == (0, 0)
    assert sorted(executions(engine)) == sorted(executions(engine, "ended")) == messages
    for message_id in messages:
        assert ledger(engine, message_id) == [(1, 1, "succeeded")]


def test_one_heartbeat_that_fails_is_made_up_for_before_the_lease_ends(engine: Engine, keeper: LeaseKeeper) -> None:
    message_id = enqueue(engine)
    hold = Hold(engine, keeper, message_id)
    with engine.connect() as lock, lock.begin():
        lock.exec_driver_sql("LOCK TABLE outbox.messages IN ACCESS EXCLUSIVE MODE")
        wait_until(lambda: value(engine, f"SELECT count(*) {KEEPERS} AND wait_event_type = 'Lock'") == 1)
        assert value(engine, f"SELECT count(pg_terminate_backend(pid)) {KEEPERS}") >= 1
        wait_until(lambda: value(engine, f"SELECT count(*) {KEEPERS}") == 0)
    # The next regular one would come when the lease ends.
    wait_until(lambda: row(engine, message_id).seconds_left > 9, seconds=4)
    assert_held(engine, message_id)
    report = hold.end()
    assert report.outcome is AttemptOutcome.SUCCEEDED
    assert ledger(engine, message_id) == [(1, 1, "succeeded")]


@pytest.mark.parametrize("how", ["silent", "gone"])
def test_a_worker_cut_off_for_longer_than_its_lease_stops_its_work_and_cannot_complete_it(
    engine: Engine, settings: Settings, database_url: str, how: str
) -> None:
    message_id = enqueue(engine)
    with SilentProxy(database_url) as proxy:
        cut_off = open_engine(settings, proxy.url, application_name="cut off")
        with LeaseKeeper(cut_off, url=proxy.url, settings=settings) as keeper:
            began_at = time.monotonic()
            hold = Hold(cut_off, keeper, message_id)
            (proxy.fall_silent if how == "silent" else proxy.go_away)()
            wait_until(lambda: not isinstance(ask_for(engine, message_id, holder="heir"), NotClaimed), seconds=20)
            assert 9 < time.monotonic() - began_at < 13
            hold.thread.join(20)
            assert not hold.thread.is_alive(), "the runner waits for the database, maybe forever"
            assert isinstance(hold.report, Report)
            assert hold.report.outcome is AttemptOutcome.LOST
            assert hold.stopped_at is not None
            assert hold.stopped_at - began_at < 18
            proxy.speak()
    assert row(engine, message_id).lease_holder == "heir"
    assert ledger(engine, message_id) == [(1, 1, "lost")]
    cut_off.dispose()


def test_a_keeper_that_is_killed_is_started_again_before_the_lease_ends(engine: Engine, keeper: LeaseKeeper) -> None:
    message_id = enqueue(engine)
    hold = Hold(engine, keeper, message_id, lease=20)
    first = keeper.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    expired = row(engine, message_id).lease_expires_at
    until_held_no_more_than(engine, message_id, lambda: row(engine, message_id).lease_expires_at > expired)
    assert keeper.pid not in {None, first}
    assert hold.end().outcome is AttemptOutcome.SUCCEEDED


def test_a_keeper_that_stands_still_is_replaced_and_does_not_stop_its_worker(
    engine: Engine, keeper: LeaseKeeper
) -> None:
    first = keeper.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    # More than a pipe holds.
    leases = [Lease(MESSAGES, number, uuid4(), 60.0) for number in range(2_000)]
    began_at = time.monotonic()
    for lease in leases:
        keeper.hold([lease], timeout=60, asked_at=time.monotonic(), on_lost=lambda _lease: None)
    assert time.monotonic() - began_at < 15
    wait_until(lambda: keeper.pid != first)
    keeper.drop(leases)


def test_a_lease_that_may_have_run_out_is_asked_about(engine: Engine, keeper: LeaseKeeper) -> None:
    claimed = take(engine, enqueue(engine), seconds=10)
    long_ago = time.monotonic() - 100
    keeper.hold([claimed.lease], timeout=60, asked_at=long_ago, on_lost=lambda _lease: None)
    with engine.connect() as own, own.begin():
        own.exec_driver_sql("SELECT FROM outbox.messages FOR UPDATE")
        # No heartbeat gets through, and nobody else does.
        assert keeper.is_held(claimed.lease)
    assert keeper.is_held(claimed.lease)
    assert end(engine, claimed)
    again = Lease(MESSAGES, claimed.message_id, claimed.lease.token, 10)
    keeper.hold([again], timeout=60, asked_at=long_ago, on_lost=lambda _lease: None)
    assert not keeper.is_held(again)


def test_a_worker_is_told_of_a_lease_that_is_somebody_elses(engine: Engine, keeper: LeaseKeeper) -> None:
    claimed = take(engine, enqueue(engine), seconds=10)
    told: list[Lease] = []
    run(engine, "UPDATE outbox.messages SET lease_token = gen_random_uuid()")
    # The first heartbeat of a lease that is as old as this is due at once.
    keeper.hold([claimed.lease], timeout=60, asked_at=time.monotonic() - 6, on_lost=told.append)
    wait_until(lambda: told)
    assert told == [claimed.lease]
    assert not keeper.is_held(claimed.lease)


@pytest.mark.parametrize("forks", [False, True], ids=["alone", "with a child that holds its pipe"])
def test_claims_of_a_killed_worker_are_given_back_long_before_their_leases_end(
    engine: Engine, database_url: str, tmp_path: Path, forks: bool
) -> None:
    child = tmp_path / "child"
    do: list[list[str]] = [["fork", str(child)]] if forks else []
    first = enqueue(engine, payload={"do": [*do, ["wait", str(tmp_path / "never")]]})
    waiting = [enqueue(engine) for _ in range(5)]
    with process(database_url, "work", {"name": "work", "lease": 600.0, "consumers": 1}) as worker:
        wait_until(lambda: executions(engine) == [first] and (child.exists() or not forks))
        wait_until(lambda: value(engine, "SELECT count(*) FROM outbox.messages WHERE state = 'Processing'") == 6)
        left = psutil.Process(worker.pid).children(recursive=True)
        worker.kill()
        wait_until(
            lambda: value(engine, "SELECT count(*) FROM outbox.messages WHERE state = 'Pending'") == 6, seconds=10
        )
    if forks:
        os.kill(int(child.read_text()), signal.SIGKILL)
    for message_id in [first, *waiting]:
        (line,) = ledger_rows(engine, message_id)
        assert (line.outcome, line.error) == ("lost", "the worker's process died")
        assert row(engine, message_id).due_in <= 0
    psutil.wait_procs(left, timeout=10)
    assert not [one for one in left if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_a_worker_that_stands_still_beyond_its_timeout_is_killed_and_its_claim_given_back(
    engine: Engine, database_url: str, tmp_path: Path
) -> None:
    kind = {"lease": 600.0, "timeout": 0.5, "consumers": 1}
    frozen = enqueue(engine, "frozen", payload={"do": [["freeze", 120]]})
    stopped = enqueue(engine, "stopped", payload={"do": [["sleep", 120]]})
    with (
        process(database_url, "work", {"name": "frozen", **kind}) as first,
        process(database_url, "work", {"name": "stopped", **kind}) as second,
    ):
        wait_until(lambda: sorted(executions(engine)) == [frozen, stopped])
        second.send_signal(signal.SIGSTOP)
        assert first.wait(40) == second.wait(40) == -signal.SIGKILL
        wait_until(lambda: {row(engine, one).state for one in (frozen, stopped)} == {"Pending"}, seconds=10)
    assert ledger(engine, frozen) == [(1, 1, "lost")]


def test_a_short_job_never_starts_the_full_keeper(engine: Engine, settings: Settings, database_url: str) -> None:
    seen: list[list[str]] = []
    with LeaseKeeper(engine, url=database_url, settings=settings, delay=60) as keeper:
        assert keeper.pid is not None
        stub = psutil.Process(keeper.pid)
        wait_until(lambda: stub.cmdline() != psutil.Process().cmdline())
        kind = a_kind(handler=lambda _job: seen.append(stub.cmdline()))
        report = Runner(engine, keeper, holder="run").run(kind, enqueue(engine), on_progress=lambda *_: None)
    assert isinstance(report, Report)
    assert report.outcome is AttemptOutcome.SUCCEEDED
    assert any(part.endswith("keeper_stub.py") for part in seen[0])
    assert not stub.is_running()


def test_the_stub_becomes_the_keeper_in_time_for_the_first_heartbeat(
    engine: Engine, settings: Settings, database_url: str
) -> None:
    message_id = enqueue(engine)
    # As late as the first heartbeat is due: it comes at once then.
    with LeaseKeeper(engine, url=database_url, settings=settings, delay=5) as keeper:
        hold = Hold(engine, keeper, message_id)
        until_held_no_more_than(engine, message_id, lambda: row(engine, message_id).seconds_left < 9)
        until_held_no_more_than(engine, message_id, lambda: row(engine, message_id).seconds_left > 9)
        assert hold.end().outcome is AttemptOutcome.SUCCEEDED


@contextmanager
def begun(engine: Engine, database_url: str, role: str, do: list[list[str]]) -> Iterator["subprocess.Popen[bytes]"]:
    """A process whose handler has begun."""
    message_id = enqueue(engine, payload={"do": do})
    with process(database_url, role, {"name": "work"}, message=message_id) as started:
        wait_until(lambda: executions(engine) == [message_id])
        yield started


def test_nothing_is_left_running_after_a_worker_has_ended(engine: Engine, database_url: str) -> None:
    with begun(engine, database_url, "work", []) as worker:
        left = psutil.Process(worker.pid).children(recursive=True)
        assert left
        wait_until(lambda: executions(engine, "ended"))
        began_at = time.monotonic()
        worker.terminate()
        assert worker.wait(30) == 0
        assert time.monotonic() - began_at < 4, "a worker with nothing to do ends at once"
    assert not [one for one in left if one.is_running()]


def test_nothing_is_left_running_after_a_worker_was_killed_that_had_a_stub(
    engine: Engine, database_url: str, tmp_path: Path
) -> None:
    child = tmp_path / "child"
    do = [["fork", str(child)], ["wait", str(tmp_path / "never")]]
    with begun(engine, database_url, "short run", do) as worker:
        wait_until(child.exists)
        (stub,) = [one for one in psutil.Process(worker.pid).children() if one.pid != int(child.read_text())]
        worker.kill()
        wait_until(lambda: not stub.is_running() or stub.status() == psutil.STATUS_ZOMBIE)
    os.kill(int(child.read_text()), signal.SIGKILL)


def test_a_keeper_that_is_closed_with_a_claim_in_hand_ends_and_harms_nobody(
    engine: Engine, settings: Settings, database_url: str
) -> None:
    message_id = enqueue(engine)
    claimed = take(engine, message_id)
    with LeaseKeeper(engine, url=database_url, settings=settings) as keeper:
        keeper.hold([claimed.lease], timeout=0.1, asked_at=time.monotonic(), on_lost=lambda _lease: None)
        assert keeper.pid is not None
        process_of_keeper = psutil.Process(keeper.pid)
    # Sooner than it takes this process, which tells it nothing any more, for frozen.
    wait_until(lambda: process_of_keeper.status() == psutil.STATUS_ZOMBIE if process_of_keeper.is_running() else True)
    # The worker lives, so the claim is its own until the lease ends.
    assert row(engine, message_id).state == "Processing"
