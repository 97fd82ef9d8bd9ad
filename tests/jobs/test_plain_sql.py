"""Jobs inserted by plain SQL from any language, and who is woken for them."""

import datetime
from collections.abc import Callable

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import IntegrityError

from outbox_pipelines.jobs.enqueue import NewJob, enqueue_job, enqueue_jobs
from outbox_pipelines.jobs.recovery import note_served
from outbox_pipelines.jobs.transport import Served
from tests.jobs.messages import KIND, enqueue, run, states, take_due


def listen_for(engine: Engine, *kinds: str, listening: bool = True) -> None:
    """Note a worker that serves these kinds."""
    with engine.begin() as connection:
        note_served(connection, "worker 1", [Served(kind, 1) for kind in kinds], listening=listening)


def notified(engine: Engine, do: Callable[[], None]) -> list[str]:
    """The kinds that are notified of when something is done, in order."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("LISTEN outbox_jobs"))
        do()
        # Comes after everything that was committed before.
        run(engine, "SELECT pg_notify('outbox_jobs', 'the end')")
        heard: list[str] = []
        for notification in connection.connection.driver_connection.notifies(timeout=10):  # type: ignore[union-attr]
            if notification.payload == "the end":
                break
            heard.append(notification.payload)
        else:
            pytest.fail("the last notification did not come")
        connection.execute(text("UNLISTEN *"))
    return sorted(heard)


def test_a_row_inserted_by_plain_sql_is_a_job_that_is_due(engine: Engine) -> None:
    run(engine, "INSERT INTO outbox.messages (kind) VALUES ('work')")
    run(engine, "INSERT INTO outbox.messages (kind, job_id, payload) VALUES ('work', '7', '{\"a\": 1}')")
    first, second = take_due(engine)
    assert (first.job_id, first.payload) == (None, {})
    assert (second.job_id, second.payload) == ("7", {"a": 1})


def test_a_trace_context_written_by_plain_sql_comes_with_the_claim_and_is_bounded(engine: Engine) -> None:
    context = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    run(engine, "INSERT INTO outbox.messages (kind, trace_context) VALUES ('work', :context)", context=context)
    with pytest.raises(IntegrityError, match="messages_trace_context_check"):
        run(engine, "INSERT INTO outbox.messages (kind, trace_context) VALUES ('work', repeat('x', 101))")
    (claimed,) = take_due(engine)
    assert claimed.trace_context == context


def test_a_role_that_may_only_insert_can_enqueue_by_plain_sql_and_wakes_the_worker(engine: Engine) -> None:
    listen_for(engine, KIND)
    run(engine, "DROP ROLE IF EXISTS school_app")
    run(engine, "CREATE ROLE school_app")
    run(engine, "GRANT USAGE ON SCHEMA outbox TO school_app")
    run(engine, "GRANT INSERT ON outbox.messages TO school_app")

    def insert() -> None:
        with engine.begin() as connection:
            connection.execute(text("SET LOCAL ROLE school_app"))
            connection.execute(text("INSERT INTO outbox.messages (kind) VALUES ('work')"))

    try:
        assert notified(engine, insert) == [KIND]
        assert len(states(engine)) == 1
    finally:
        run(engine, "DROP OWNED BY school_app")
        run(engine, "DROP ROLE school_app")


def test_only_a_worker_that_listens_for_the_kind_is_notified(engine: Engine) -> None:
    listen_for(engine, "heard", "also heard")
    listen_for(engine, "served by a code location", listening=False)
    listen_for(engine, "long gone")
    run(engine, "UPDATE outbox.job_servers SET seen_at = now() - interval '61 seconds' WHERE kind = 'long gone'")

    def do() -> None:
        for kind in ("heard", "also heard", "served by a code location", "long gone", "unknown"):
            enqueue(engine, kind)
        enqueue(engine, "heard", run_at=datetime.datetime(2040, 1, 1, tzinfo=datetime.UTC))

    assert notified(engine, do) == ["also heard", "heard"]


def test_a_thousand_jobs_of_a_call_are_one_notification(engine: Engine) -> None:
    listen_for(engine, "heard")

    def do() -> None:
        with engine.begin() as connection:
            enqueue_jobs(connection, "heard", [NewJob()] * 1_000)

    assert notified(engine, do) == ["heard"]


def test_a_job_that_was_rolled_back_wakes_nobody(engine: Engine) -> None:
    listen_for(engine, "heard")

    def do() -> None:
        with engine.connect() as connection:
            enqueue_job(connection, "heard")
            connection.rollback()

    assert notified(engine, do) == []
