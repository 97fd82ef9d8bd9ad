"""What users and rows from elsewhere may get wrong: each has a clear result, and nothing else suffers."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import IntegrityError

from outbox_pipelines import Backoff, InvalidJob, JobContext, JobKind, TableDomain
from outbox_pipelines.database.database import Database
from outbox_pipelines.errors import OutboxError
from outbox_pipelines.jobs.keeper import LeaseKeeper
from outbox_pipelines.jobs.kinds import Kinds
from outbox_pipelines.jobs.look import show_message
from outbox_pipelines.jobs.message import AttemptOutcome, NotClaimed
from outbox_pipelines.jobs.recovery import recover_orphans
from outbox_pipelines.jobs.runner import Report, Runner
from outbox_pipelines.jobs.worker import Worker
from outbox_pipelines.settings import Settings
from tests.jobs.messages import (
    APP_JOBS,
    a_kind,
    do_nothing,
    enqueue,
    enqueue_many,
    ledger,
    make_app_jobs,
    row,
    run,
    value,
)
from tests.outboxes import wait_until


@pytest.fixture
def runner(engine: Engine, settings: Settings) -> Iterator[Runner]:
    """A runner as in a Dagster run."""
    assert settings.database_url is not None
    url = settings.database_url.get_secret_value()
    with LeaseKeeper(engine, url=url, settings=settings, delay=60) as keeper:
        yield Runner(engine, keeper, holder="a run")


def execute(runner: Runner, kind: JobKind, message_id: int) -> Report:
    """Run one message."""
    report = runner.run(kind, message_id, on_progress=lambda _step, _fraction: None)
    assert not isinstance(report, NotClaimed)
    return report


# Rows from elsewhere

UNREADABLE = ['{"n": 1' + "0" * 5000 + "}", '{"a":' * 3000 + "1" + "}" * 3000]


@pytest.mark.parametrize("payload", UNREADABLE, ids=["a number of 5,000 digits", "3,000 levels deep"])
def test_a_payload_that_python_cannot_read_costs_its_own_message_alone(
    engine: Engine, settings: Settings, payload: str
) -> None:
    run(engine, "INSERT INTO outbox.messages (kind, payload) VALUES ('work', CAST(:payload AS jsonb))", payload=payload)
    others = enqueue_many(engine, 20)
    with Database(settings) as database, Worker(database, Kinds([a_kind()]), settings):
        wait_until(lambda: value(engine, "SELECT count(*) FROM outbox.messages WHERE state <> 'Completed'") == 0)
    assert {row(engine, one).outcome for one in others} == {"succeeded"}
    told = value(engine, "SELECT outcome || ': ' || last_error FROM outbox.messages WHERE message_id = 1")
    assert told == "failed: its payload is not a JSON object that Python can read"
    with engine.connect() as connection:
        # Shown as the text that it is.
        assert isinstance(show_message(connection, 1, ui_url="http://dagster").payload, str)


@pytest.mark.parametrize(
    "columns",
    [
        "available_at) VALUES ('work', '-infinity'",
        "available_at) VALUES ('work', '0044-03-15 BC'",
        "available_at) VALUES ('work', 'infinity'",
        "payload) VALUES ('work', '[1]'",
    ],
)
def test_a_row_that_no_handler_could_be_given_is_refused_by_the_table(engine: Engine, columns: str) -> None:
    with pytest.raises(IntegrityError):
        run(engine, f"INSERT INTO outbox.messages (kind, {columns})")


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"run_at": datetime.min.replace(tzinfo=UTC)}, "run_at is in the year 1; allowed are 1971 to 8999"),
        ({"run_at": datetime.max.replace(tzinfo=UTC)}, "run_at is in the year 9999"),
        ({"job_id": True}, "job_id is a bool"),
        ({"job_id": object()}, "job_id is a object"),
    ],
)
def test_a_job_that_would_be_nobodys_is_refused_at_enqueue(engine: Engine, how: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidJob, match=told):
        enqueue(engine, **how)


# Domain jobs


def test_a_message_without_its_jobs_id_is_given_up_with_the_remedy(engine: Engine, runner: Runner) -> None:
    make_app_jobs(engine)
    report = execute(runner, a_kind(domain=APP_JOBS), enqueue(engine))
    assert report.outcome is AttemptOutcome.GIVEN_UP
    assert "flush the session before enqueue_job" in str(report.line)


def test_a_job_id_that_is_written_in_another_way_makes_no_second_execution(engine: Engine, runner: Runner) -> None:
    make_app_jobs(engine)
    run(engine, "INSERT INTO app.jobs (id, status) VALUES (77, 'queued')")
    executed: list[str | None] = []
    kind = a_kind(handler=lambda job: executed.append(job.job_id), domain=APP_JOBS)
    report = execute(runner, kind, enqueue(engine, job_id="077"))
    assert report.outcome is AttemptOutcome.GIVEN_UP
    assert executed == []


def test_a_text_that_is_too_long_for_the_domain_table_is_cut_and_the_status_is_kept(
    engine: Engine, runner: Runner
) -> None:
    run(engine, "CREATE TABLE public.short (id bigint PRIMARY KEY, status text, message varchar(100))")
    run(engine, "INSERT INTO public.short VALUES (1, 'queued')")

    def fail(_job: JobContext) -> None:
        raise ValueError("x" * 500)

    domain = TableDomain("public.short", live=("queued",), failed="failed", message_column="message")
    execute(runner, a_kind(handler=fail, attempts=1, domain=domain), enqueue(engine, job_id="1"))
    assert value(engine, "SELECT status FROM public.short") == "failed"
    assert value(engine, "SELECT message FROM public.short").startswith("given up after 1 attempt")


def test_two_kinds_of_one_table_are_refused_unless_they_say_whose_rows_are_whose(engine: Engine) -> None:
    def kinds(*where: str | None) -> Kinds:
        tables = [TableDomain("app.jobs", live=("queued",), failed="failed", where=one) for one in where]
        return Kinds(JobKind(f"kind_{number}", do_nothing, domain=one) for number, one in enumerate(tables))

    with pytest.raises(OutboxError, match=r"share the domain table 'app.jobs': say with TableDomain\(where=...\)"):
        kinds(None, None)
    make_app_jobs(engine)
    run(engine, "INSERT INTO app.jobs (id, step) VALUES (1, 'a'), (2, 'b'), (3, 'b')")
    assert recover_orphans(engine, kinds("step = 'a'", "step = 'b'").values()).orphans == 3
    assert value(engine, "SELECT string_agg(kind || job_id, ' ' ORDER BY job_id) FROM outbox.messages") == (
        "kind_01 kind_12 kind_13"
    )


def test_a_limit_that_was_lowered_gives_up_with_the_last_error(engine: Engine, runner: Runner) -> None:
    def fail(_job: JobContext) -> None:
        raise ValueError("the printer burns")

    at_once = Backoff(0, 0)
    message_id = enqueue(engine)
    for _ in range(3):
        execute(runner, a_kind(handler=fail, backoff=at_once), message_id)
    report = execute(runner, a_kind(handler=fail, attempts=2, backoff=at_once), message_id)
    assert report.line == "given up after 3 attempts; the last error: ValueError: the printer burns"


# Kinds


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"backoff": 5}, "give a Backoff"),
        ({"domain": "app.jobs"}, "has no method 'standing'"),
        ({"handler": lambda: None}, "handler must take one argument, the JobContext"),
        ({"name": "import"}, "Dagster does not allow that name"),
        ({"name": "config"}, "Dagster does not allow that name"),
    ],
)
def test_a_kind_that_would_fail_later_is_refused_at_load(how: dict[str, Any], told: str) -> None:
    with pytest.raises(OutboxError, match=told):
        JobKind(**{"name": "work", "handler": do_nothing, **how})


# Handlers


def test_a_flood_of_progress_delays_neither_the_timeout_nor_the_end(engine: Engine, runner: Runner) -> None:
    told: list[str] = []

    def flood(job: JobContext) -> None:
        number = 0
        while True:
            number += 1
            job.progress(f"row {number}")

    def slowly(step: str, _fraction: float | None) -> None:
        told.append(step)
        time.sleep(0.02)

    kind = a_kind(handler=flood, timeout=1, attempts=1)
    report = runner.run(kind, enqueue(engine), on_progress=slowly)
    assert isinstance(report, Report)
    assert (
        report.line
        == "given up after 1 attempt; the last error: the attempt took longer than the kind's timeout of 1 s"
    )
    assert report.ran < 10
    assert len(told) < 500


def test_complete_in_called_twice_is_completed_once(engine: Engine, runner: Runner) -> None:
    def handler(job: JobContext) -> None:
        with job.session() as session:
            job.complete_in(session)
            job.complete_in(session)

    message_id = enqueue(engine)
    assert execute(runner, a_kind(handler=handler), message_id).outcome is AttemptOutcome.SUCCEEDED
    assert ledger(engine, message_id) == [(1, 1, "succeeded")]


def test_complete_in_without_a_transaction_is_refused(engine: Engine, runner: Runner) -> None:
    def handler(job: JobContext) -> None:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            job.complete_in(connection)

    message_id = enqueue(engine)
    report = execute(runner, a_kind(handler=handler, attempts=1), message_id)
    assert report.outcome is AttemptOutcome.GIVEN_UP
    assert "complete_in was given a connection in AUTOCOMMIT" in str(report.line)


def test_a_second_interrupt_does_not_cost_the_message_its_end(engine: Engine, runner: Runner) -> None:
    inside = threading.Event()

    def handler(job: JobContext) -> None:
        inside.set()
        while not job.cancelled:
            time.sleep(0.01)
        # Told to stop, it takes a while: long enough for an impatient person.
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)

    message_id = enqueue(engine)
    impatient = threading.Thread(target=lambda: (inside.wait(30), os.kill(os.getpid(), signal.SIGINT)))
    impatient.start()
    with pytest.raises(KeyboardInterrupt):
        runner.run(a_kind(handler=handler), message_id, on_progress=lambda _step, _fraction: None)
    impatient.join()
    assert ledger(engine, message_id) == [(1, 1, "interrupted")]
    assert (row(engine, message_id).state, row(engine, message_id).processing_attempts) == ("Pending", 0)


def test_a_child_that_a_handler_forked_does_not_go_on_as_a_worker(engine: Engine, database_url: str) -> None:
    run(engine, "CREATE TABLE executions (message_id bigint)")
    enqueue_many(engine, 6)
    done = subprocess.run(
        [sys.executable, "-m", "tests.jobs.forking_process", database_url],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["0"] * 6
    assert value(engine, "SELECT count(*) FROM executions") == 6


def test_a_kind_whose_handlers_hold_every_session_takes_none_from_another(engine: Engine, settings: Settings) -> None:
    make_app_jobs(engine)
    run(engine, "INSERT INTO app.jobs (id, status) VALUES (1, 'queued')")
    let_go, holding = threading.Event(), threading.Event()

    def greedy(job: JobContext) -> None:
        sessions = [job.session() for _ in range(3)]
        for session in sessions:
            session.__enter__().execute(text("SELECT 1"))
        holding.set()
        let_go.wait(60)
        for session in sessions:
            session.__exit__(None, None, None)

    enqueue(engine, "greedy")
    kinds = Kinds([a_kind("greedy", greedy, consumers=1), a_kind("modest", domain=APP_JOBS)])
    try:
        with Database(settings) as database, Worker(database, kinds, settings):
            assert holding.wait(30)
            modest = enqueue(engine, "modest", job_id="1")
            wait_until(lambda: row(engine, modest).state == "Completed")
            assert ledger(engine, modest) == [(1, 1, "succeeded")]
            let_go.set()
    finally:
        let_go.set()


def test_a_failure_shows_where_the_handler_raised_and_nothing_of_ours(engine: Engine, runner: Runner) -> None:
    def in_the_handlers_code() -> None:
        raise ValueError("no")

    def handler(_job: JobContext) -> None:
        in_the_handlers_code()

    trace = str(execute(runner, a_kind(handler=handler), enqueue(engine)).trace)
    assert "in handler" in trace
    assert "in in_the_handlers_code" in trace
    assert "execution.py" not in trace
    # What fails before the handler is called was raised nowhere in its code.
    make_app_jobs(engine)
    run(engine, "DROP TABLE app.jobs")
    report = execute(runner, a_kind(domain=APP_JOBS), enqueue(engine, job_id="1"))
    assert report.line == "UndefinedTable (42P01); its text is in the database"
    assert report.trace is None
