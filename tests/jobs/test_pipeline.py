"""What Dagster shows and starts for jobs: the sensors' requests and reasons, the runs and their results."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dagster as dg
import psycopg
import pytest
from dagster import DagsterRunStatus
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import RegisteredCodeLocationOrigin, RemoteInstigatorOrigin, RemoteRepositoryOrigin
from dagster._core.scheduler.instigation import InstigatorState, InstigatorStatus
from sqlalchemy import Engine, event, text
from sqlalchemy.pool import Pool

from outbox_pipelines import Backoff, JobContext, JobKind, build_definitions, enqueue_job
from outbox_pipelines.database.progress import Progress, all_progress
from outbox_pipelines.errors import OutboxError
from outbox_pipelines.jobs.actions import cancel
from outbox_pipelines.jobs.kinds import Kinds
from outbox_pipelines.jobs.look import show_message
from outbox_pipelines.settings import Settings
from tests.jobs.location import Location
from tests.jobs.messages import let_expire, take
from tests.outboxes import wait_until

Locate = Callable[..., Location]


@pytest.fixture
def locate(settings: Settings, instance: dg.DagsterInstance) -> Locate:
    """Makes code locations on the test's database and instance."""
    return lambda *kinds: Location(settings, instance, *kinds)


def add(engine: Engine, kind: str = "report", **job: Any) -> int:
    """Enqueue a job in a transaction of its own."""
    with engine.begin() as connection:
        return enqueue_job(connection, kind, **job).message_id


def message(engine: Engine, message_id: int) -> Any:
    """The message's row."""
    with engine.connect() as connection:
        return connection.execute(
            text("SELECT * FROM outbox.messages WHERE message_id = :id"), {"id": message_id}
        ).one()


def metadata(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    """The op's metadata, from its output or its failure."""
    for happened in result.all_events:
        if happened.event_type_value == "STEP_OUTPUT":
            return {key: value.value for key, value in happened.step_output_data.metadata.items()}
        if happened.event_type_value == "STEP_FAILURE":
            user = happened.step_failure_data.user_failure_data
            assert user is not None
            return {key: value.value for key, value in user.metadata.items()}
    raise AssertionError("no output and no failure")


def failure(result: dg.ExecuteInProcessResult) -> str:
    """The failed run's line."""
    (failed,) = [one for one in result.all_events if one.event_type_value == "STEP_FAILURE"]
    user = failed.step_failure_data.user_failure_data
    assert user is not None
    return user.description or ""


def logged(instance: dg.DagsterInstance, run_id: str) -> list[str]:
    """What the run's log says, in order."""
    return [entry.user_message for entry in instance.all_logs(run_id) if entry.dagster_event is None]


def skipped(result: dg.SensorResult) -> str:
    """The skip reason."""
    assert result.skip_reason is not None
    return result.skip_reason.skip_message or ""


def fail(_job: JobContext) -> None:
    raise RuntimeError("the printer is out of paper")


def do_nothing(_job: JobContext) -> None:
    """A job that is done at once."""


def test_each_kind_has_a_job_a_sensor_and_its_number_of_places(locate: Locate, engine: Engine) -> None:
    location = locate(JobKind("report", do_nothing, consumers=3), JobKind("letter", do_nothing))
    for kind in ("report", "letter"):
        sensor = location.definitions.get_sensor_def(f"{kind}_sensor")
        assert sensor.minimum_interval_seconds == 10
        assert sensor.default_status is dg.DefaultSensorStatus.RUNNING
        assert sensor.job_name == kind
        assert [node.name for node in location.definitions.get_job_def(kind).graph.nodes] == ["run_background_job"]
    for _ in range(5):
        add(engine, "report")
    assert len(location.poll("report")) == 3
    assert location.poll("report") == []
    assert skipped(location.tick("report_sensor")) == "2 jobs due; 3 of 3 places taken"
    assert skipped(location.tick("letter_sensor")) == "no job is due"


def test_recovery_runs_every_minute_starts_no_run_and_says_what_it_did(locate: Locate, engine: Engine) -> None:
    location = locate(JobKind("report", do_nothing))
    sensor = location.definitions.get_sensor_def("job_recovery_sensor")
    assert sensor.minimum_interval_seconds == 60
    assert sensor.default_status is dg.DefaultSensorStatus.RUNNING
    assert skipped(location.tick("job_recovery_sensor")) == "nothing to recover"
    add(engine, "unheard_of")
    lost = add(engine)
    with engine.begin() as connection:
        connection.execute(
            text("""
                UPDATE outbox.messages SET state = 'Processing', lease_token = gen_random_uuid(), lease_holder = 'x',
                       lease_expires_at = now() - interval '1 s', claims = 1, processing_attempts = 1,
                       claimed_at = now() WHERE message_id = :id
            """),
            {"id": lost},
        )
    result = location.tick("job_recovery_sensor")
    assert skipped(result) == "1 lost lease recovered; 1 message parked: nobody has registered their kind"
    assert not result.run_requests


def test_a_job_is_claimed_run_and_finished_in_a_run_that_tells_of_it(
    locate: Locate, engine: Engine, instance: dg.DagsterInstance
) -> None:
    seen: list[tuple[str | None, Any, int]] = []

    def handler(job: JobContext) -> None:
        job.progress("printing", 0.25)
        job.progress("binding")
        seen.append((job.job_id, job.payload, job.attempt))

    location = locate(JobKind("report", handler))
    message_id = add(engine, job_id="77", payload={"pages": 3})
    (request,) = location.poll("report")
    assert request.tags == {"outbox/kind": "report", "outbox/message": str(message_id), "outbox/attempt": "1"}
    assert request.run_key == f"{message_id}:1"
    result = location.execute("report", request)
    assert result.success
    assert seen == [("77", {"pages": 3}, 1)]
    told = metadata(result)
    assert (told["message"], told["job"], told["attempt"], told["outcome"]) == (message_id, "77", 1, "succeeded")
    assert told["lease renewals"] == 0
    assert told["waited (s)"] >= 0
    assert told["ran (s)"] >= 0
    lines = logged(instance, result.run_id)
    assert lines[:2] == ["printing (25%)", "binding"]
    row = message(engine, message_id)
    assert (row.state, row.outcome, row.step, row.lease_token) == ("Completed", "succeeded", "binding", None)
    with engine.connect() as connection:
        ledger = connection.execute(text("SELECT run_id, outcome, attempt FROM outbox.job_attempts")).all()
    assert [tuple(line) for line in ledger] == [(result.run_id, "succeeded", 1)]


def test_a_failing_job_is_a_failed_run_that_says_what_whose_and_what_next(locate: Locate, engine: Engine) -> None:
    location = locate(JobKind("report", fail, attempts=2, backoff=Backoff(first=0, maximum=0)))
    message_id = add(engine, job_id="77")
    (first,) = location.serve("report")
    assert failure(first) == (
        f"report, message {message_id} (job 77): attempt 1 failed: RuntimeError: the printer is out of paper; "
        "it is tried again in 0 s at the earliest"
    )
    (second,) = location.serve("report")
    assert failure(second) == (
        f"report, message {message_id} (job 77): given up after 2 attempts; the last error: RuntimeError: the "
        f"printer is out of paper; put it back with `outbox jobs retry {message_id}`"
    )
    assert metadata(second)["outcome"] == "given up"
    assert location.poll("report") == []
    assert message(engine, message_id).outcome == "failed"


def test_the_next_attempt_has_another_run_key_though_the_failed_run_is_there(locate: Locate, engine: Engine) -> None:
    location = locate(JobKind("report", fail, backoff=Backoff(first=0, maximum=0)))
    add(engine)
    keys = []
    for _ in range(3):
        (request,) = location.poll("report")
        keys.append(request.run_key)
        location.execute("report", request)
    assert len(set(keys)) == 3


def test_a_stale_or_repeated_run_does_nothing_and_ends_well(locate: Locate, engine: Engine) -> None:
    executed: list[int] = []
    location = locate(JobKind("report", lambda job: executed.append(job.message_id)))
    message_id = add(engine)
    (request,) = location.poll("report")
    assert location.execute("report", request).success
    again = location.execute("report", request)
    assert again.success
    assert metadata(again)["outcome"] == "nothing to do"
    assert metadata(again)["reason"] == f"message {message_id} is completed already (succeeded): nothing to do"
    assert executed == [message_id]
    unknown = location.execute("report", dg.RunRequest(run_config=config(message_id + 99)))
    assert unknown.success
    assert "does not exist" in metadata(unknown)["reason"]


def config(message_id: int) -> dict[str, Any]:
    """A run's configuration, as a person writes it in the launchpad."""
    return {"ops": {"run_background_job": {"config": {"message": message_id}}}}


def test_a_run_for_a_message_that_is_not_due_or_held_says_until_when(locate: Locate, engine: Engine) -> None:
    location = locate(JobKind("report", do_nothing), JobKind("letter", do_nothing))
    message_id = add(engine)
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox.messages SET available_at = now() + interval '1 hour'"))
    early = location.execute("report", dg.RunRequest(run_config=config(message_id)))
    assert early.success
    assert "is not due until" in metadata(early)["reason"]
    other = location.execute("letter", dg.RunRequest(run_config=config(message_id)))
    assert "is of another kind" in metadata(other)["reason"]
    with engine.begin() as connection:
        connection.execute(
            text("""
                UPDATE outbox.messages SET state = 'Processing', lease_token = gen_random_uuid(),
                       lease_holder = 'somebody', lease_expires_at = now() + interval '1 minute'
            """)
        )
    held = location.execute("report", dg.RunRequest(run_config=config(message_id)))
    assert held.success
    assert "is being processed by somebody, whose lease runs until" in metadata(held)["reason"]


def test_a_job_cancelled_while_it_runs_ends_its_run_well_and_says_so(locate: Locate, engine: Engine) -> None:
    def handler(job: JobContext) -> None:
        with engine.begin() as connection:
            cancel(connection, Kinds(), job.message_id)
        job.progress("too late")

    location = locate(JobKind("report", handler))
    message_id = add(engine)
    (result,) = location.serve("report")
    assert result.success
    assert metadata(result)["outcome"] == "lost"
    assert metadata(result)["error"] == "the message was cancelled"
    assert message(engine, message_id).outcome == "cancelled"


def test_a_run_that_ended_without_claiming_has_its_message_published_again(
    locate: Locate, engine: Engine, instance: dg.DagsterInstance
) -> None:
    location = locate(JobKind("report", do_nothing))
    message_id = add(engine)
    (request,) = location.poll("report")
    run = dg.DagsterRun(
        job_name="report",
        status=DagsterRunStatus.STARTED,
        tags={"dagster/run_key": str(request.run_key), **request.tags},
    )
    instance.add_run(run)
    assert location.poll("report") == []
    assert message(engine, message_id).state == "Published"
    instance.report_run_failed(run)
    assert skipped(location.tick("report_sensor")) == "no job is due; 1 publish taken back"
    row = message(engine, message_id)
    assert row.state == "Pending"
    assert "ended without claiming it" in row.last_error
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox.messages SET available_at = now()"))
    (again,) = location.poll("report")
    assert again.run_key != request.run_key


def test_two_daemons_that_execute_one_run_have_its_handler_called_once(locate: Locate, engine: Engine) -> None:
    inside, executed = threading.Barrier(2, timeout=60), []

    def handler(job: JobContext) -> None:
        executed.append(job.message_id)
        inside.wait()

    location = locate(JobKind("report", handler))
    message_id = add(engine)
    (request,) = location.poll("report")
    with ThreadPoolExecutor(1) as daemon:
        first = daemon.submit(location.execute, "report", request)
        wait_until(lambda: executed)
        second = location.execute("report", request)
        inside.wait()
        assert first.result().success
    assert second.success
    assert "is being processed by" in metadata(second)["reason"]
    assert executed == [message_id]


def test_the_ledger_answers_for_runs_that_were_pruned_and_nothing_is_run_again(
    locate: Locate, engine: Engine, instance: dg.DagsterInstance
) -> None:
    location = locate(JobKind("report", do_nothing))
    message_id = add(engine)
    (result,) = location.serve("report")
    instance.delete_run(result.run_id)
    with engine.connect() as connection:
        (attempt,) = show_message(connection, message_id, ui_url="http://dagster").attempts
    assert (attempt.run_id, attempt.outcome) == (result.run_id, "succeeded")
    assert location.poll("report") == []


def test_many_runs_in_a_row_open_a_bounded_number_of_database_sessions(locate: Locate, engine: Engine) -> None:
    location = locate(JobKind("report", do_nothing))
    # The tests' own engine has the connections that it needs.
    add(engine)
    opened: list[object] = []

    def count(connection: Any, _record: object) -> None:
        # Dagster's own storage is SQLite here.
        if isinstance(connection, psycopg.Connection):
            opened.append(connection)

    event.listen(Pool, "connect", count)
    try:
        for _ in range(20):
            add(engine)
            assert all(result.success for result in location.serve("report"))
    finally:
        event.remove(Pool, "connect", count)
    # One engine for the process, and a run needs two of its connections at a time at most.
    assert 1 <= len(opened) <= 2


def test_a_run_that_is_said_to_be_running_and_has_not_claimed_is_not_believed_for_ever(
    locate: Locate, engine: Engine, instance: dg.DagsterInstance
) -> None:
    location = locate(JobKind("report", do_nothing))
    add(engine)
    (request,) = location.poll("report")
    tags = {"dagster/run_key": str(request.run_key), **request.tags}
    instance.add_run(dg.DagsterRun(job_name="report", status=DagsterRunStatus.STARTED, tags=tags))
    assert skipped(location.tick("report_sensor")) == "no job is due; 1 of 2 places taken"
    with instance.run_storage.connect() as connection:  # type: ignore[attr-defined]
        connection.execute(text("UPDATE runs SET update_timestamp = '2001-01-01 00:00:00.000000'"))
    assert skipped(location.tick("report_sensor")) == "no job is due; 1 publish taken back"


def test_turning_a_sensor_off_or_a_higher_priority_takes_effect_at_the_next_poll(
    locate: Locate, engine: Engine
) -> None:
    location = locate(JobKind("report", do_nothing, consumers=1))
    first, _usual, urgent = add(engine), add(engine), add(engine, priority=5)
    (request,) = location.poll("report")
    assert request.tags["outbox/message"] == str(urgent)
    location.execute("report", request)
    (request,) = location.poll("report")
    assert request.tags["outbox/message"] == str(first)


def test_kinds_are_refused_at_load_with_the_remedy(settings: Settings) -> None:
    with pytest.raises(OutboxError, match="'report' is registered twice: give one of them another name"):
        build_definitions(kinds=[JobKind("report", fail), JobKind("report", fail)], settings=settings)
    with pytest.raises(OutboxError, match="consumers=17; allowed are 1 to 16"):
        JobKind("report", fail, consumers=17)
    with pytest.raises(OutboxError, match="lease=9; allowed are 10 s"):
        JobKind("report", fail, lease=9)


def test_no_payload_reaches_dagsters_storage(locate: Locate, engine: Engine, instance: dg.DagsterInstance) -> None:
    def handler(job: JobContext) -> None:
        with job.session() as session:
            # A database error quotes the statement's parameters and the row.
            session.execute(text("SELECT CAST(:value AS integer)"), {"value": job.payload["secret"]})

    location = locate(JobKind("report", handler))
    message_id = add(engine, payload={"secret": "hunter2-of-the-payload"})
    (result,) = location.serve("report")
    assert not result.success
    kept = [str(entry) for entry in instance.all_logs(result.run_id)]
    run = instance.get_run_by_id(result.run_id)
    assert "hunter2" not in str(run) + "".join(kept)
    assert message(engine, message_id).state == "Pending"


# Progress, for health


def progress(engine: Engine) -> dict[str, Progress]:
    with engine.connect() as connection:
        return all_progress(connection)


def test_each_tick_that_ends_well_is_noted_and_those_that_are_to_come_are_expected(
    locate: Locate, engine: Engine
) -> None:
    location = locate(JobKind("report", do_nothing), JobKind("letter", do_nothing))
    location.tick("report_sensor")
    assert {name: task.every_seconds for name, task in progress(engine).items()} == {"report_sensor": 10}
    location.tick("job_recovery_sensor")
    found = progress(engine)
    assert {name: task.every_seconds for name, task in found.items()} == {
        "report_sensor": 10,
        "letter_sensor": 10,
        "job_recovery_sensor": 60,
        "job_recovery": 60,
    }
    assert found["letter_sensor"].succeeded_at is None
    assert found["report_sensor"].succeeded_at is not None


def test_a_sensor_turned_off_in_the_ui_is_known_as_paused_until_it_polls_again(
    locate: Locate, engine: Engine, instance: dg.DagsterInstance
) -> None:
    location = locate(JobKind("report", do_nothing))
    origin = RemoteInstigatorOrigin(
        RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("outbox_pipelines"), "__repository__"), "report_sensor"
    )
    instance.add_instigator_state(InstigatorState(origin, InstigatorType.SENSOR, InstigatorStatus.STOPPED, None))
    location.tick("job_recovery_sensor")
    assert {name for name, task in progress(engine).items() if task.paused} == {"report_sensor"}
    location.tick("report_sensor")
    assert not progress(engine)["report_sensor"].paused


def test_what_a_recovery_brought_back_is_counted(locate: Locate, engine: Engine) -> None:
    location = locate(JobKind("report", do_nothing))
    take(engine, add(engine), kind="report")
    let_expire(engine)
    location.tick("job_recovery_sensor")
    assert progress(engine)["job_recovery"].rows_total == 1


def test_a_kind_that_nobody_serves_any_more_is_expected_no_more(locate: Locate, engine: Engine) -> None:
    locate(JobKind("report", do_nothing), JobKind("letter", do_nothing)).tick("job_recovery_sensor")
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox.job_servers SET seen_at = seen_at - interval '2 days'"))
    locate(JobKind("report", do_nothing)).tick("job_recovery_sensor")
    found = progress(engine)
    assert found["letter_sensor"].every_seconds is None
    assert found["report_sensor"].every_seconds == 10
