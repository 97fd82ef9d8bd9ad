"""One message, one attempt: what its worker may write, how it ends, and what counts."""

import datetime as datetime_module
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from sqlalchemy import Engine, create_engine, event, text

from outbox_pipelines.jobs.context import GiveUp, JobContext
from outbox_pipelines.jobs.domain import Domain
from outbox_pipelines.jobs.execution import HandlerStopped
from outbox_pipelines.jobs.keeper import LeaseKeeper
from outbox_pipelines.jobs.kinds import Backoff, JobKind, Kinds
from outbox_pipelines.jobs.message import AttemptOutcome, NotClaimed, Refusal
from outbox_pipelines.jobs.recovery import recover
from outbox_pipelines.jobs.runner import Report, Runner
from outbox_pipelines.lease.lease import LeaseLost
from outbox_pipelines.settings import Settings
from tests.jobs.messages import (
    APP_JOBS,
    a_kind,
    add_app_jobs,
    app_job,
    ask_for,
    end,
    enqueue,
    ledger,
    ledger_rows,
    let_expire,
    make_app_jobs,
    make_due,
    row,
    rows,
    run,
    states,
    take,
    value,
)
from tests.jobs.worker_process import NO_PAUSE, make_executions, process
from tests.outboxes import wait_until

TEN_MINUTES = 600.0

RunOne = Callable[..., Report]


@pytest.fixture
def keeper(engine: Engine, settings: Settings, database_url: str) -> Iterator[LeaseKeeper]:
    """This process's keeper; a stub, since nothing here lives until a heartbeat."""
    with LeaseKeeper(engine, url=database_url, settings=settings, delay=60) as keeper:
        yield keeper


@pytest.fixture
def run_one(engine: Engine, keeper: LeaseKeeper) -> RunOne:
    """Runs one message in this thread."""

    def run_one(kind: JobKind, message_id: int, **how: Any) -> Report:
        runner = Runner(engine, keeper, holder=how.pop("holder", "run"))
        report = runner.run(kind, message_id, on_progress=how.pop("on_progress", lambda _step, _fraction: None))
        assert isinstance(report, Report), report
        return report

    return run_one


def raises(error: BaseException) -> Callable[[JobContext], None]:
    """A handler that raises this."""

    def handler(_job: JobContext) -> None:
        raise error

    return handler


def state_of(engine: Engine, message_id: int) -> tuple[str, str | None, int]:
    """State, outcome and attempts."""
    found = row(engine, message_id)
    return found.state, found.outcome, found.processing_attempts


class InThread:
    """A run in a thread, whose handler waits inside until it is told what to do next."""

    def __init__(self, engine: Engine, keeper: LeaseKeeper, message_id: int, *, holder: str, kind: JobKind) -> None:
        self.report: Report | NotClaimed | None = None
        self.error: BaseException | None = None

        def go() -> None:
            try:
                self.report = Runner(engine, keeper, holder=holder).run(kind, message_id, on_progress=lambda *_: None)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=go, daemon=True)
        self.thread.start()

    def end(self) -> Report:
        """What came of it."""
        self.thread.join(30)
        assert isinstance(self.report, Report), (self.report, self.error)
        return self.report


# A stale worker


def test_a_worker_that_lost_its_lease_changes_nothing(engine: Engine, keeper: LeaseKeeper) -> None:
    make_app_jobs(engine)
    (job_id,) = add_app_jobs(engine)
    run(engine, "CREATE TABLE app.effects (message_id bigint)")
    message_id = enqueue(engine, job_id=job_id)
    taken_over, second_inside, first_over = (threading.Event() for _ in range(3))
    contexts: list[JobContext] = []

    def first(job: JobContext) -> None:
        contexts.append(job)
        taken_over.wait(30)
        with pytest.raises(LeaseLost):
            have_effect(job)
        with pytest.raises(LeaseLost):
            job.progress("stale", 0.5)
        raise RuntimeError("and fails")

    def second(job: JobContext) -> None:
        second_inside.set()
        first_over.wait(30)
        with job.session() as session:
            session.execute(text("UPDATE app.jobs SET status = 'done', message = 'by the heir'"))
            job.complete_in(session)

    # On one host, in one process even.
    stale = InThread(engine, keeper, message_id, holder="A", kind=a_kind(handler=first, domain=APP_JOBS))
    wait_until(lambda: contexts)
    let_expire(engine, message_id)
    heir = InThread(engine, keeper, message_id, holder="B", kind=a_kind(handler=second, domain=APP_JOBS))
    assert second_inside.wait(30)
    before = row(engine, message_id)
    taken_over.set()
    report = stale.end()
    assert report.outcome is AttemptOutcome.LOST
    assert report.line == "another worker took over (B)"
    assert not keeper.is_held(contexts[0].claimed.lease)
    assert not end(engine, contexts[0].claimed)
    assert not end(engine, contexts[0].claimed, AttemptOutcome.FAILED)
    after = row(engine, message_id)
    assert (after.state, after.lease_token, after.lease_expires_at, after.step, after.last_error) == (
        before.state,
        before.lease_token,
        before.lease_expires_at,
        None,
        None,
    )
    first_over.set()
    assert heir.end().outcome is AttemptOutcome.SUCCEEDED
    assert app_job(engine, job_id) == ("done", "by the heir")
    assert value(engine, "SELECT count(*) FROM app.effects") == 0
    assert ledger(engine, message_id) == [(1, 1, "lost"), (2, 2, "succeeded")]
    assert [line.run_id for line in ledger_rows(engine, message_id)] == ["A", "B"]


def test_a_message_that_is_not_to_be_had_is_refused_and_its_handler_not_called(
    engine: Engine, keeper: LeaseKeeper
) -> None:
    called: list[JobContext] = []
    runner = Runner(engine, keeper, holder="late")
    held, done = enqueue(engine), enqueue(engine)
    take(engine, held, holder="other")
    end(engine, take(engine, done))
    for message_id, why in ((held, Refusal.HELD), (done, Refusal.COMPLETED), (99, Refusal.UNKNOWN)):
        refused = runner.run(a_kind(handler=called.append), message_id, on_progress=lambda *_: None)
        assert isinstance(refused, NotClaimed)
        assert refused.why is why
    assert called == []


# Processes that die


def test_a_job_killed_in_the_middle_is_recovered_from_its_row_alone(
    engine: Engine, database_url: str, tmp_path: Path
) -> None:
    make_executions(engine)
    message_id = enqueue(engine, payload={"do": [["wait", str(tmp_path / "go")]]})
    with process(database_url, "run", {"name": "work"}, message=message_id) as worker:
        wait_until(lambda: rows(engine, "SELECT FROM app.executions"))
        # The keeper, too: nobody is left that knows of the claim.
        wait_until(lambda: value(engine, "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'test r%'"))
        for child in children(worker.pid):
            os.kill(child, signal.SIGKILL)
        worker.kill()
    assert recover(engine, Kinds(), publish_timeout=60).lost_leases == 0
    assert row(engine, message_id).state == "Processing"
    let_expire(engine, message_id)
    assert recover(engine, Kinds(), publish_timeout=60).lost_leases == 1
    (tmp_path / "go").touch()
    with process(database_url, "run", {"name": "work"}, message=message_id) as worker:
        assert worker.wait(30) == 0
    assert ledger(engine, message_id) == [(1, 1, "lost"), (2, 2, "succeeded")]


def children(pid: int) -> list[int]:
    """Its children's ids."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_handler_that_kills_its_process_runs_as_often_as_attempts_are_allowed_and_fails_once_with_a_reason(
    engine: Engine, database_url: str
) -> None:
    make_executions(engine)
    make_app_jobs(engine)
    (job_id,) = add_app_jobs(engine)
    run(engine, "CREATE TABLE app.changes (status text)")
    run(
        engine,
        """
        CREATE FUNCTION app.note() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN INSERT INTO app.changes VALUES (new.status); RETURN new; END $$
        """,
    )
    run(engine, "CREATE TRIGGER note AFTER UPDATE ON app.jobs FOR EACH ROW EXECUTE FUNCTION app.note()")
    message_id = enqueue(engine, job_id=job_id, payload={"do": [["die"]]})
    kind = {"name": "work", "attempts": 3, "with_domain": True}
    codes = []
    for _ in range(5):
        with process(database_url, "run", kind, message=message_id) as worker:
            codes.append(worker.wait(30))
        wait_until(lambda: row(engine, message_id).state != "Processing", seconds=10)
    assert codes == [-signal.SIGKILL] * 3 + [0, 0]
    assert value(engine, "SELECT count(*) FROM app.executions") == 3
    reason = "given up after 3 attempts: the last one's worker died or lost its lease"
    assert state_of(engine, message_id)[:2] == ("Completed", "failed")
    assert row(engine, message_id).last_error == reason
    assert app_job(engine, job_id) == ("failed", reason)
    assert [one.status for one in rows(engine, "SELECT status FROM app.changes")] == ["failed"]
    assert [outcome for _, _, outcome in ledger(engine, message_id)] == ["lost"] * 3 + ["given up"]


@pytest.mark.parametrize("when", ["die before", "die after"])
def test_an_effect_and_its_completion_are_kept_together_or_not_at_all(
    engine: Engine, database_url: str, when: str
) -> None:
    make_executions(engine)
    run(engine, "CREATE TABLE app.effects (message_id bigint)")
    message_id = enqueue(engine, payload={"do": [["complete", when]]})
    with process(database_url, "run", {"name": "work"}, message=message_id) as worker:
        assert worker.wait(30) == -signal.SIGKILL
    wait_until(lambda: row(engine, message_id).state != "Processing", seconds=10)
    kept = value(engine, "SELECT count(*) FROM app.effects")
    if when == "die before":
        assert (kept, ledger(engine, message_id)) == (0, [(1, 1, "lost")])
    else:
        assert (kept, ledger(engine, message_id)) == (1, [(1, 1, "succeeded")])


# Interrupts


def interrupt_main_thread_when(condition: Callable[[], object]) -> None:
    """Ctrl-C, once the condition comes."""

    def wait_and_interrupt() -> None:
        wait_until(condition)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait_and_interrupt, daemon=True).start()


def test_an_interrupt_gives_the_message_back_at_once_and_does_not_count(engine: Engine, keeper: LeaseKeeper) -> None:
    message_id = enqueue(engine)
    inside = threading.Event()

    def handler(job: JobContext) -> None:
        inside.set()
        while not job.cancelled:
            time.sleep(0.01)

    for claim in range(1, 6):
        inside.clear()
        interrupt_main_thread_when(inside.is_set)
        with pytest.raises(KeyboardInterrupt):
            Runner(engine, keeper, holder="run").run(
                a_kind(handler=handler, attempts=2, lease=600.0), message_id, on_progress=lambda *_: None
            )
        found = row(engine, message_id)
        assert (found.state, found.processing_attempts, found.claims) == ("Pending", 0, claim)
        assert found.due_in <= 0
    assert ledger(engine, message_id) == [(claim, 1, "interrupted") for claim in range(1, 6)]


@pytest.mark.parametrize("handler_sleeps_in", ["python", "c"])
def test_an_interrupt_ends_a_handler_that_does_not_heed_it(
    engine: Engine, keeper: LeaseKeeper, handler_sleeps_in: str
) -> None:
    message_id, inside, let_go = enqueue(engine), threading.Event(), threading.Event()

    def handler(_job: JobContext) -> None:
        inside.set()
        if handler_sleeps_in == "c":
            # One wait in C that no exception reaches.
            let_go.wait(60)
        while not let_go.is_set():
            pass

    began_at = time.monotonic()
    interrupt_main_thread_when(inside.is_set)
    with pytest.raises(KeyboardInterrupt):
        Runner(engine, keeper, holder="run").run(a_kind(handler=handler), message_id, on_progress=lambda *_: None)
    assert time.monotonic() - began_at < 8
    let_go.set()
    assert state_of(engine, message_id) == ("Pending", None, 0)
    assert ledger(engine, message_id) == [(1, 1, "interrupted")]


def test_an_interrupt_just_when_the_claim_is_committed_gives_the_message_back(
    engine: Engine, keeper: LeaseKeeper
) -> None:
    message_id, called = enqueue(engine), threading.Event()

    def interrupt_once(*_: object) -> None:
        # The connection comes back to the pool, and so the claim is committed.
        if row(second, message_id).state == "Processing":
            event.remove(engine, "checkin", interrupt_once)
            raise KeyboardInterrupt

    with second_engine(engine) as second:
        event.listen(engine, "checkin", interrupt_once)
        with pytest.raises(KeyboardInterrupt):
            Runner(engine, keeper, holder="run").run(
                a_kind(handler=lambda _job: called.set()), message_id, on_progress=lambda *_: None
            )
    assert not called.is_set()
    assert state_of(engine, message_id) == ("Pending", None, 0)
    assert ledger(engine, message_id) == [(1, 1, "interrupted")]


class second_engine:  # noqa: N801  # reads as a statement
    """The same database through other connections."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> Engine:
        self._second = create_engine(self._engine.url, use_native_hstore=False)
        return self._second

    def __exit__(self, *_: object) -> None:
        self._second.dispose()


def test_an_interrupt_while_the_end_is_written_does_not_undo_it(engine: Engine, keeper: LeaseKeeper) -> None:
    message_id, calls = enqueue(engine), []

    def handler(_job: JobContext) -> None:
        calls.append(time.monotonic())
        # The end cannot be written before the interrupt has come.
        lock.exec_driver_sql("SELECT FROM outbox.messages FOR UPDATE")
        threading.Thread(target=interrupt_and_unlock, daemon=True).start()

    def interrupt_and_unlock() -> None:
        with second_engine(engine) as second:
            waiting = "SELECT max(query_start) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = :name"
            name = engine.url.database
            wait_until(lambda: value(second, waiting, name=name))
            first = value(second, waiting, name=name)
            os.kill(os.getpid(), signal.SIGINT)
            # That statement is cut off; another may wait already.
            wait_until(lambda: value(second, waiting, name=name) != first)
        lock.rollback()

    with engine.connect() as lock, pytest.raises(KeyboardInterrupt):
        Runner(engine, keeper, holder="run").run(a_kind(handler=handler), message_id, on_progress=lambda *_: None)
    assert len(calls) == 1
    assert state_of(engine, message_id) == ("Completed", "succeeded", 1)


def test_an_error_of_whoever_is_told_of_progress_gives_the_message_back(engine: Engine, keeper: LeaseKeeper) -> None:
    message_id = enqueue(engine)

    def handler(job: JobContext) -> None:
        job.progress("half", 0.5)
        while not job.wait(10):
            continue

    def refuse(_step: str, _fraction: float | None) -> None:
        raise ConnectionError("the run's log cannot be written")

    with pytest.raises(ConnectionError):
        Runner(engine, keeper, holder="run").run(a_kind(handler=handler), message_id, on_progress=refuse)
    assert state_of(engine, message_id) == ("Pending", None, 0)


# Timeouts


@pytest.mark.parametrize("stuck_in", ["python", "c", "heeding"])
def test_the_timeout_ends_a_handler_that_is_stuck(engine: Engine, run_one: RunOne, stuck_in: str) -> None:
    message_id, let_go = enqueue(engine), threading.Event()

    def handler(job: JobContext) -> None:
        if stuck_in == "heeding":
            job.wait(60)
        if stuck_in == "c":
            let_go.wait(60)
        while stuck_in == "python" and not let_go.is_set():
            pass

    began_at = time.monotonic()
    report = run_one(a_kind(handler=handler, timeout=0.3), message_id)
    assert time.monotonic() - began_at < 8
    let_go.set()
    assert report.outcome is AttemptOutcome.FAILED
    assert row(engine, message_id).last_error == "the attempt took longer than the kind's timeout of 0.3 s"
    assert state_of(engine, message_id) == ("Pending", None, 1)
    assert ledger(engine, message_id) == [(1, 1, "failed")]


def test_a_handler_that_was_left_to_itself_cannot_complete_the_job_any_more(engine: Engine, run_one: RunOne) -> None:
    message_id, let_go, tried = enqueue(engine), threading.Event(), threading.Event()
    run(engine, "CREATE SCHEMA app")
    run(engine, "CREATE TABLE app.effects (message_id bigint)")

    def handler(job: JobContext) -> None:
        with suppress(HandlerStopped):
            let_go.wait(60)
        try:
            with job.session() as session:
                session.execute(text("INSERT INTO app.effects VALUES (1)"))
                job.complete_in(session)
        finally:
            tried.set()

    assert run_one(a_kind(handler=handler, timeout=0.1), message_id).outcome is AttemptOutcome.FAILED
    let_go.set()
    assert tried.wait(10)
    assert value(engine, "SELECT count(*) FROM app.effects") == 0
    assert ledger(engine, message_id) == [(1, 1, "failed")]


def test_no_interruption_reaches_the_code_around_a_handler(engine: Engine, run_one: RunOne) -> None:
    # Handlers that end just when they are to be interrupted: each ends one way or the other, none in our code.
    def handler(job: JobContext) -> None:
        ends_at = time.monotonic() + 1.1
        while time.monotonic() < ends_at + job.payload["extra"]:
            pass

    threads = []
    for extra in range(6):
        message_id = enqueue(engine, payload={"extra": extra * 0.04})
        thread = threading.Thread(target=run_one, args=(a_kind(handler=handler, timeout=0.1), message_id), daemon=True)
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join(30)
    outcomes = {one.outcome for one in rows(engine, "SELECT outcome FROM outbox.job_attempts")}
    assert outcomes <= {"succeeded", "failed"}
    assert value(engine, "SELECT count(*) FROM outbox.job_attempts") == 6


# Progress


def test_progress_is_written_for_people_and_told_in_the_calling_thread(engine: Engine, run_one: RunOne) -> None:
    make_app_jobs(engine)
    (job_id,) = add_app_jobs(engine)
    message_id = enqueue(engine, job_id=job_id)
    told: list[tuple[str, float | None, int]] = []
    seen = []

    def handler(job: JobContext) -> None:
        job.progress("reading", 0.0)
        found = row(engine, message_id)
        seen.append((found.step, found.fraction, value(engine, "SELECT step FROM app.jobs")))
        job.progress("writing\x00 \ud800" + "x" * 500)
        found = row(engine, message_id)
        seen.append((found.step, found.fraction, value(engine, "SELECT step FROM app.jobs")))

    report = run_one(
        a_kind(handler=handler, domain=APP_JOBS),
        message_id,
        on_progress=lambda step, fraction: told.append((step, fraction, threading.get_ident())),
    )
    assert report.outcome is AttemptOutcome.SUCCEEDED
    long_step = seen[1][0]
    assert len(long_step) == 200
    assert long_step.startswith("writing\ufffd \ufffdxxx")
    assert seen == [("reading", 0.0, "reading"), (long_step, None, long_step)]
    assert told == [("reading", 0.0, threading.get_ident()), (long_step, None, threading.get_ident())]


def test_a_fraction_outside_its_bounds_is_refused(engine: Engine, run_one: RunOne) -> None:
    def handler(job: JobContext) -> None:
        for wrong in (-0.1, 1.1, float("nan")):
            with pytest.raises(ValueError, match="allowed are 0 to 1"):
                job.progress("wrong", wrong)

    assert run_one(a_kind(handler=handler), enqueue(engine)).outcome is AttemptOutcome.SUCCEEDED


# Completing in the handler's transaction


@pytest.fixture
def count_effects(engine: Engine) -> Callable[[], int]:
    """A table for effects; how many there are."""
    run(engine, "CREATE SCHEMA app")
    run(engine, "CREATE TABLE app.effects (message_id bigint)")
    return lambda: int(value(engine, "SELECT count(*) FROM app.effects"))


def have_effect(job: JobContext, and_then: Callable[[], object] = lambda: None) -> None:
    """An effect and the completion in one transaction."""
    with job.session() as session:
        session.execute(text("INSERT INTO app.effects VALUES (:id)"), {"id": job.message_id})
        job.complete_in(session)
        and_then()


def test_complete_in_commits_effect_and_completion_together(
    engine: Engine, run_one: RunOne, count_effects: Callable[[], int]
) -> None:
    message_id, seen = enqueue(engine), []
    kind = a_kind(
        handler=lambda job: have_effect(job, lambda: seen.append((count_effects(), row(engine, message_id).state)))
    )
    report = run_one(kind, message_id)
    assert seen == [(0, "Processing")]
    assert report.outcome is AttemptOutcome.SUCCEEDED
    assert count_effects() == 1
    assert ledger(engine, message_id) == [(1, 1, "succeeded")]


def test_complete_in_that_is_rolled_back_leaves_neither(
    engine: Engine, run_one: RunOne, count_effects: Callable[[], int]
) -> None:
    message_id = enqueue(engine)

    def fail() -> None:
        raise RuntimeError("no")

    report = run_one(a_kind(handler=lambda job: have_effect(job, fail)), message_id)
    assert report.outcome is AttemptOutcome.FAILED
    assert report.line == "RuntimeError: no"
    assert count_effects() == 0
    assert ledger(engine, message_id) == [(1, 1, "failed")]


def test_a_completed_job_stays_completed_whatever_its_handler_does_then(
    engine: Engine, run_one: RunOne, count_effects: Callable[[], int]
) -> None:
    message_id = enqueue(engine)

    def handler(job: JobContext) -> None:
        have_effect(job)
        raise RuntimeError("too late")

    assert run_one(a_kind(handler=handler), message_id).outcome is AttemptOutcome.SUCCEEDED
    assert (count_effects(), ledger(engine, message_id)) == (1, [(1, 1, "succeeded")])


def test_complete_in_without_a_commit_is_a_failure_that_says_so(
    engine: Engine, run_one: RunOne, count_effects: Callable[[], int]
) -> None:
    message_id = enqueue(engine)

    def handler(job: JobContext) -> None:
        with engine.connect() as connection:
            connection.execute(text("INSERT INTO app.effects VALUES (1)"))
            job.complete_in(connection)

    report = run_one(a_kind(handler=handler), message_id)
    assert (report.outcome, count_effects()) == (AttemptOutcome.FAILED, 0)
    assert row(engine, message_id).last_error == "complete_in was called, but its transaction was not committed"


# Errors


def text_that_raises() -> Exception:
    class Unreadable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    return Unreadable()


def circle() -> Exception:
    error = ValueError("round and round")
    error.__cause__ = error
    return error


def chain() -> Exception:
    outer, inner = RuntimeError("outer"), KeyError("inner")
    outer.__cause__ = ValueError("middle")
    outer.__cause__.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (ValueError("simple"), "ValueError: simple"),
        (ValueError(), "ValueError"),
        (chain(), "KeyError: 'inner'"),
        (circle(), "ValueError: round and round"),
        (text_that_raises(), "Unreadable (its text cannot be read)"),
        (ValueError("nul \x00 half \ud800 whole 😀"), "ValueError: nul \ufffd half \ufffd whole 😀"),
        (SystemExit(3), "SystemExit: 3"),
        (BaseException("base"), "BaseException: base"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (GeneratorExit(), "GeneratorExit"),
        (RecursionError("deep"), "RecursionError: deep"),
    ],
    ids=lambda one: one[:20].encode("unicode_escape").decode() if isinstance(one, str) else type(one).__name__,
)
def test_whatever_a_handler_raises_is_a_failure_with_its_text(
    engine: Engine, run_one: RunOne, error: BaseException, kept: str
) -> None:
    message_id = enqueue(engine)
    report = run_one(a_kind(handler=raises(error)), message_id)
    assert report.outcome is AttemptOutcome.FAILED
    assert row(engine, message_id).last_error.endswith(kept)
    assert ledger(engine, message_id) == [(1, 1, "failed")]
    assert ledger_rows(engine, message_id)[0].error == row(engine, message_id).last_error
    assert report.trace is not None
    assert "in handler" in report.trace


def test_any_error_text_can_be_kept_and_is_cut_at_its_limit(engine: Engine, run_one: RunOne) -> None:
    message_id = enqueue(engine)
    characters = st.characters() | st.sampled_from(["\x00", "\ud800", "\udfff", "😀", "é"])

    @given(st.text(characters, max_size=20), st.integers(1_980, 2_010) | st.just(0), st.sampled_from("x😀\x00"))
    @hypothesis_settings(max_examples=60, deadline=None, phases=[Phase.generate])
    def keeps(begin: str, length: int, filler: str) -> None:
        make_due(engine, message_id)
        run_one(a_kind(handler=raises(ValueError(begin + filler * length)), attempts=1_000), message_id)
        kept = row(engine, message_id).last_error
        assert len(kept) <= 2_000
        assert row(engine, message_id).state == "Pending"
        if length >= 2_000:
            assert kept.endswith("(cut)")

    keeps()


def test_giving_up_ends_the_job_at_once_with_the_reason(engine: Engine, run_one: RunOne) -> None:
    make_app_jobs(engine)
    (job_id,) = add_app_jobs(engine)
    message_id = enqueue(engine, job_id=job_id)
    report = run_one(a_kind(handler=raises(GiveUp("there are no rooms at all")), domain=APP_JOBS), message_id)
    assert report.outcome is AttemptOutcome.GIVEN_UP
    assert state_of(engine, message_id) == ("Completed", "failed", 1)
    assert app_job(engine, job_id) == ("failed", "there are no rooms at all")


async def _a_coroutine() -> None:
    pass


@pytest.mark.parametrize(
    ("returned", "outcome"),
    [
        (lambda: None, AttemptOutcome.SUCCEEDED),
        (lambda: {"a": "value"}, AttemptOutcome.SUCCEEDED),
        (_a_coroutine, AttemptOutcome.GIVEN_UP),
        (lambda: (n for n in range(3)), AttemptOutcome.GIVEN_UP),
    ],
    ids=["nothing", "a value", "a coroutine", "a generator"],
)
def test_what_a_handler_returns_does_not_count_unless_its_code_has_not_run(
    engine: Engine, run_one: RunOne, returned: Callable[[], object], outcome: AttemptOutcome
) -> None:
    message_id = enqueue(engine)
    report = run_one(a_kind(handler=lambda _job: returned()), message_id)
    assert report.outcome is outcome
    if outcome is AttemptOutcome.GIVEN_UP:
        assert "whose code did not run" in row(engine, message_id).last_error


def test_a_failed_job_waits_for_its_backoff_and_is_given_up_at_the_limit(engine: Engine, run_one: RunOne) -> None:
    make_app_jobs(engine)
    (job_id,) = add_app_jobs(engine)
    message_id = enqueue(engine, job_id=job_id)
    kind = a_kind(
        handler=raises(ValueError("no")), attempts=3, backoff=Backoff(first=100.0, maximum=150.0), domain=APP_JOBS
    )
    waits = []
    for _ in range(2):
        report = run_one(kind, message_id)
        found = row(engine, message_id)
        assert abs(found.due_in - report.delay) < 5
        waits.append(report.delay)
        refused = ask_for(engine, message_id)
        assert isinstance(refused, NotClaimed)
        assert refused.why is Refusal.NOT_DUE
        make_due(engine, message_id)
    assert 75 <= waits[0] <= 100
    assert 112.5 <= waits[1] <= 150
    assert run_one(kind, message_id).outcome is AttemptOutcome.GIVEN_UP
    reason = "given up after 3 attempts; the last error: ValueError: no"
    assert row(engine, message_id).last_error == reason
    assert app_job(engine, job_id) == ("failed", reason)
    assert ledger(engine, message_id) == [(1, 1, "failed"), (2, 2, "failed"), (3, 3, "given up")]


# The domain job


@pytest.mark.parametrize(
    ("status", "outcome", "message_outcome"),
    [("done", AttemptOutcome.SUCCEEDED, "succeeded"), ("cancelled", AttemptOutcome.CANCELLED, "cancelled")],
)
def test_a_domain_job_that_is_over_does_not_run_again(
    engine: Engine, run_one: RunOne, status: str, outcome: AttemptOutcome, message_outcome: str
) -> None:
    make_app_jobs(engine)
    (job_id,) = add_app_jobs(engine, status=status)
    message_id, called = enqueue(engine, job_id=job_id), threading.Event()
    report = run_one(a_kind(handler=lambda _job: called.set(), domain=APP_JOBS), message_id)
    assert report.outcome is outcome
    assert row(engine, message_id).outcome == message_outcome
    assert app_job(engine, job_id)[0] == status
    assert not called.is_set()


@pytest.mark.parametrize("job_id", ["12345", "no number"])
def test_a_message_whose_domain_job_is_missing_is_given_up_with_that_reason(
    engine: Engine, run_one: RunOne, job_id: str
) -> None:
    make_app_jobs(engine)
    message_id, called = enqueue(engine, job_id=job_id), threading.Event()
    report = run_one(a_kind(handler=lambda _job: called.set(), domain=APP_JOBS), message_id)
    assert report.outcome is AttemptOutcome.GIVEN_UP
    assert f"there is no job with the id '{job_id}'" in row(engine, message_id).last_error
    assert not called.is_set()


def test_a_domain_table_that_is_dropped_while_giving_up_leaves_no_message_stuck(
    engine: Engine, run_one: RunOne
) -> None:
    make_app_jobs(engine)
    (job_id,) = add_app_jobs(engine)
    message_id = enqueue(engine, job_id=job_id)

    def handler(_job: JobContext) -> None:
        run(engine, "DROP TABLE app.jobs")
        raise GiveUp("no use")

    assert run_one(a_kind(handler=handler, domain=APP_JOBS), message_id).outcome is AttemptOutcome.GIVEN_UP
    found = row(engine, message_id)
    assert (found.state, found.outcome) == ("Completed", "failed")
    assert found.last_error.startswith("no use; its domain job could not be marked: ")
    assert ledger(engine, message_id) == [(1, 1, "given up")]


def test_a_connection_that_is_cut_while_the_domain_job_is_marked_is_made_anew(engine: Engine, run_one: RunOne) -> None:
    make_app_jobs(engine)
    (job_id,) = add_app_jobs(engine)
    message_id = enqueue(engine, job_id=job_id)
    cuts = []

    class CutOnce:
        def __getattr__(self, name: str) -> Any:
            return getattr(APP_JOBS, name)

        def close(self, connection: Any, *told: Any) -> None:
            if not cuts:
                cuts.append(1)
                run(
                    engine,
                    "SELECT pg_terminate_backend(:pid)",
                    pid=connection.connection.driver_connection.info.backend_pid,
                )
            APP_JOBS.close(connection, *told)

    domain: Domain = CutOnce()
    report = run_one(a_kind(handler=raises(GiveUp("no use")), domain=domain), message_id)
    assert report.outcome is AttemptOutcome.GIVEN_UP
    assert app_job(engine, job_id) == ("failed", "no use")
    assert row(engine, message_id).last_error == "no use"


# Clocks


@pytest.mark.parametrize("off", [TEN_MINUTES, -TEN_MINUTES])
@pytest.mark.parametrize("steps", [False, True], ids=["wrong all the time", "steps during the run"])
def test_a_worker_with_a_wrong_clock_claims_nothing_early_and_loses_nothing(
    engine: Engine, keeper: LeaseKeeper, off: float, steps: bool
) -> None:
    true_time, true_datetime = time.time, datetime_module.datetime
    runner = Runner(engine, keeper, holder="run")
    held, message_id, failing, later = (enqueue(engine) for _ in range(4))
    run(
        engine,
        "UPDATE outbox.messages SET available_at = now() + interval '5 minutes' WHERE message_id = :id",
        id=later,
    )
    other = take(engine, held, seconds=300)

    with pytest.MonkeyPatch.context() as patch:

        def set_clock() -> None:
            class WrongDatetime(true_datetime):  # type: ignore[valid-type,misc]
                @classmethod
                def now(cls, tz: datetime_module.tzinfo | None = None) -> datetime_module.datetime:
                    return true_datetime.now(tz) + datetime_module.timedelta(seconds=off)

            patch.setattr(time, "time", lambda: true_time() + off)
            patch.setattr(datetime_module, "datetime", WrongDatetime)

        def handler(job: JobContext) -> None:
            if steps:
                set_clock()
            assert not job.wait(0.5)

        if not steps:
            set_clock()
        report = runner.run(a_kind(handler=handler), message_id, on_progress=lambda *_: None)
        assert isinstance(report, Report)
        assert report.outcome is AttemptOutcome.SUCCEEDED
        assert 0.4 < report.ran < 60
        assert report.claimed.waited < 60
        for one in (held, later):
            refused = runner.run(a_kind(handler=handler, lease=300.0), one, on_progress=lambda *_: None)
            assert isinstance(refused, NotClaimed)
            assert refused.seconds_left is not None
            assert 200 < refused.seconds_left <= 300
        assert recover(engine, Kinds(), publish_timeout=60).lost_leases == 0
        failed = runner.run(a_kind(handler=raises(ValueError("no"))), failing, on_progress=lambda *_: None)
        assert isinstance(failed, Report)
        assert 0 < row(engine, failing).due_in < 60
    assert end(engine, other)


def test_executions_of_many_messages_side_by_side_end_each_once(engine: Engine, keeper: LeaseKeeper) -> None:
    messages = [enqueue(engine) for _ in range(12)]
    runs = [
        InThread(engine, keeper, message_id, holder=f"run {n}", kind=a_kind(backoff=NO_PAUSE))
        for message_id in messages
        for n in range(2)
    ]
    for one in runs:
        one.thread.join(30)
    assert set(states(engine).values()) == {"Completed"}
    assert all(ledger(engine, message_id) == [(1, 1, "succeeded")] for message_id in messages)
