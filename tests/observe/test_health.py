"""`/health/...`: what a load balancer, an alerting system and a person ask."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine, make_url, text

from outbox_pipelines.database.engine import open_engine
from outbox_pipelines.database.migrate import migrate
from outbox_pipelines.database.progress import all_progress, expect, note_success
from outbox_pipelines.jobs.enqueue import enqueue_job
from outbox_pipelines.settings import load_settings
from outbox_pipelines.tenants.registry import set_paused
from outbox_pipelines.training.backlog import note_reachability
from outbox_pipelines.training.enqueue import enqueue_training
from tests.jobs.messages import enqueue, enqueue_many, let_expire, run, set_state, take
from tests.observe.health_server import HealthServer
from tests.outboxes import new_tenant, wait_until
from tests.upkeep.aged import bury

SECRET = "hunter2"


@pytest.fixture
def health(database_url: str, tmp_path: Path) -> Iterator[HealthServer]:
    with HealthServer(tmp_path / "health.log", database_url) as server:
        yield server


def polled(engine: Engine, task: str = "training_outbox_sensor", *, every: float = 10, seconds_ago: float = 0) -> None:
    """A task that succeeded so long ago."""
    with engine.begin() as connection:
        note_success(connection, task, every=every)
    run(
        engine,
        """
        UPDATE outbox.upkeep SET succeeded_at = clock_timestamp() - make_interval(secs => :ago),
               expected_since = clock_timestamp() - interval '1 year' WHERE task = :task
        """,
        ago=seconds_ago,
        task=task,
    )


# Live and ready


def test_a_database_that_is_not_migrated_is_told_with_the_remedy_until_it_is(
    empty_database_url: str, tmp_path: Path
) -> None:
    with HealthServer(tmp_path / "log", empty_database_url) as server:
        for path in ("/health/ready", "/health/messaging"):
            status, told = server.get(path)
            assert status == 503
            assert told["problems"] == ["the database is not at this version: run `outbox migrate`"]
        assert server.text("/metrics")[0] == 503
        assert server.get("/health/live") == (200, {"status": "live", "problems": []})
        engine = open_engine(load_settings(), empty_database_url, application_name="tests")
        migrate(engine)
        polled(engine)
        engine.dispose()
        wait_until(lambda: server.get("/health/ready")[0] == 200)
        assert server.get("/health/messaging")[0] == server.text("/metrics")[0] == 200


def test_a_database_that_is_away_is_told_without_its_address_or_password(tmp_path: Path) -> None:
    url = f"postgresql://someone:{SECRET}@127.0.0.1:1/somewhere"
    with HealthServer(tmp_path / "log", url) as server:
        for path in ("/health/ready", "/health/messaging", "/metrics"):
            status, _, body = server.text(path)
            assert status == 503
            assert "the database does not answer; the log of the health server says why" in body
            assert not any(word in body for word in (SECRET, "someone", "somewhere", "127.0.0.1"))
        assert server.get("/health/live")[0] == 200
        assert "somewhere" in server.printed
        assert SECRET not in server.printed


@contextmanager
def locked_out(engine: Engine) -> Iterator[None]:
    """Nobody gets into the database inside the block."""
    name = engine.url.database
    settings = load_settings()
    postgres = open_engine(
        settings,
        engine.url.set(database="postgres").render_as_string(hide_password=False),
        application_name="tests",
    )
    with postgres.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        connection.execute(
            text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :n"), {"n": name}
        )
        try:
            yield
        finally:
            connection.exec_driver_sql(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
    postgres.dispose()


def test_a_database_that_goes_away_and_comes_back_is_followed(engine: Engine, health: HealthServer) -> None:
    polled(engine, every=3_600)
    wait_until(lambda: health.get("/health/ready")[0] == 200)
    engine.dispose()
    with locked_out(engine):
        wait_until(lambda: health.get("/health/ready")[0] == 503)
        status, told = health.get("/health/messaging")
        assert status == 503
        assert told["problems"][0].startswith("the database does not answer")
        # What was last known is told with its age, and no metric pretends to be of now.
        assert told["age_seconds"] > 0
        assert health.text("/metrics")[0] == 503
    wait_until(lambda: health.get("/health/ready")[0] == 200)


def test_a_system_in_which_nothing_has_polled_is_not_ready(engine: Engine, health: HealthServer) -> None:
    status, told = health.get("/health/ready")
    assert status == 503
    assert told["problems"] == [
        "nothing has polled or recovered yet: start Dagster's daemon with this code location, or `outbox worker`"
    ]
    polled(engine)
    wait_until(lambda: health.get("/health/ready")[0] == 200)


def test_a_task_that_is_overdue_is_named_with_its_age_and_the_remedy(engine: Engine, health: HealthServer) -> None:
    polled(engine, "training_outbox_sensor", every=10, seconds_ago=3)
    polled(engine, "completed_jobs_retention", every=86_400, seconds_ago=25 * 3_600)
    wait_until(lambda: health.get("/health/ready")[0] == 200)
    polled(engine, "job_recovery", every=60, seconds_ago=300)
    wait_until(lambda: health.get("/health/ready")[0] == 503)
    told = health.get("/health/ready")[1]
    (problem,) = told["problems"]
    assert problem.startswith("job_recovery last succeeded 5 min ago, and is to every 60 s: see that the daemon runs")
    assert told["tasks"]["job_recovery"]["overdue"]
    assert not told["tasks"]["training_outbox_sensor"]["overdue"]


def test_a_task_that_never_succeeds_is_overdue_in_time(engine: Engine, health: HealthServer) -> None:
    with engine.begin() as connection:
        expect(connection, {"makeup_exams_sensor": 10})
    wait_until(lambda: health.get("/health/ready")[0] == 200)
    run(engine, "UPDATE outbox.upkeep SET expected_since = clock_timestamp() - interval '3 minutes'")
    wait_until(lambda: health.get("/health/ready")[0] == 503)
    assert health.get("/health/ready")[1]["problems"][0].startswith(
        "makeup_exams_sensor has not succeeded yet after 3 min, and is to every 10 s"
    )


def test_a_sensor_that_was_turned_off_on_purpose_is_not_overdue(engine: Engine) -> None:
    polled(engine, "makeup_exams_sensor", every=10, seconds_ago=3_600)
    with engine.begin() as connection:
        assert all_progress(connection)["makeup_exams_sensor"].is_overdue
        expect(connection, {"makeup_exams_sensor": 10}, paused=["makeup_exams_sensor"])
        assert not all_progress(connection)["makeup_exams_sensor"].is_overdue
        # Turned on again, it has its time to poll.
        expect(connection, {"makeup_exams_sensor": 10})
        assert not all_progress(connection)["makeup_exams_sensor"].is_overdue


# Messaging


def test_what_waits_is_told_by_kind_and_state_and_by_tenant(engine: Engine, health: HealthServer) -> None:
    enqueue_many(engine, 3, "reports")
    with engine.begin() as connection:
        enqueue_job(connection, "reports", payload={"pupil": SECRET})
    set_state(engine, enqueue(engine, "mails"), "Published")
    new_tenant(engine, "idle")
    acme = new_tenant(engine, "acme", rows=7)
    with engine.begin() as connection:
        enqueue_training(connection, acme.tenant_id, [{"pupil": SECRET}])
    bury(engine, acme, 2, days=0)
    wait_until(lambda: health.get("/health/messaging")[1]["training"]["waiting"] == 8)
    status, _, body = health.text("/health/messaging")
    assert status == 200
    assert SECRET not in body
    told = health.get("/health/messaging")[1]
    assert told["jobs"]["kinds"]["reports"]["waiting"] == 4
    assert told["jobs"]["kinds"]["mails"]["published"] == 1
    assert told["jobs"]["oldest_wait_seconds"] >= 0
    training = told["training"]
    assert (training["tenants"], training["waiting_tenants"], training["dead_letters"]) == (2, 1, 2)
    assert [(line["tenant"], line["waiting"]) for line in training["longest_waiting"]] == [("acme", 8)]
    assert set(told["database"]["dead_tuples"]) == {"messages", "ml_outbox"}


def test_twenty_tenants_are_named_the_longest_waiting_first(engine: Engine, health: HealthServer) -> None:
    for number in range(22):
        tenant = new_tenant(engine, f"t{number:02}", rows=1)
        run(
            engine,
            f'UPDATE "{tenant.schema}".ml_outbox SET created_at = clock_timestamp() - make_interval(secs => :ago)',
            ago=100 - number,
        )
    wait_until(lambda: health.get("/health/messaging")[1]["training"]["waiting"] == 22)
    named = [line["tenant"] for line in health.get("/health/messaging")[1]["training"]["longest_waiting"]]
    assert named == [f"t{number:02}" for number in range(20)]


def test_a_lease_that_nobody_recovers_is_a_problem(engine: Engine, health: HealthServer) -> None:
    message_id = enqueue(engine)
    take(engine, message_id)
    wait_until(lambda: health.get("/health/messaging")[0] == 200)
    let_expire(engine, message_id, seconds_ago=600)
    wait_until(lambda: health.get("/health/messaging")[0] == 503)
    told = health.get("/health/messaging")[1]
    assert told["jobs"]["expired_leases"] == 1
    assert f"message {message_id}" in told["problems"][0]


def test_a_wait_beyond_its_target_is_a_problem_of_whom_it_is(engine: Engine, health: HealthServer) -> None:
    acme = new_tenant(engine, "acme", rows=1)
    enqueue(engine, "reports")
    wait_until(lambda: health.get("/health/messaging")[1]["training"]["waiting"] == 1)
    assert health.get("/health/messaging")[0] == 200
    run(engine, f"UPDATE \"{acme.schema}\".ml_outbox SET created_at = clock_timestamp() - interval '1 hour'")
    run(engine, "UPDATE outbox.messages SET available_at = clock_timestamp() - interval '1 hour'")
    wait_until(lambda: len(health.get("/health/messaging")[1]["problems"]) == 2)
    jobs, training = health.get("/health/messaging")[1]["problems"]
    assert jobs.startswith("1 kind waited longer than the target allows: reports for 60 min (target 5 min)")
    assert training.startswith("1 tenant waited longer than the target allows: acme for 60 min (target 5 min)")


def test_an_unreachable_service_is_a_problem_only_when_rows_wait(engine: Engine, health: HealthServer) -> None:
    with engine.begin() as connection:
        note_reachability(connection, "ml:50051", reachable=False, detail=f"refused {SECRET}")
    acme = new_tenant(engine, "acme")
    wait_until(lambda: health.sample("outbox_ml_service_reachable", target="ml:50051") == 0)
    assert health.get("/health/messaging")[0] == 200
    with engine.begin() as connection:
        enqueue_training(connection, acme.tenant_id, [{"n": 1}])
    wait_until(lambda: health.get("/health/messaging")[0] == 503)
    assert "an ML service is unreachable" in health.text("/health/messaging")[2]
    assert SECRET not in health.text("/health/messaging")[2]


def test_a_paused_or_broken_tenant_is_told_as_it_stands(engine: Engine, health: HealthServer) -> None:
    new_tenant(engine, "paused", rows=1)
    broken = new_tenant(engine, "broken")
    run(engine, f'DROP TABLE "{broken.schema}".ml_outbox')
    with engine.begin() as connection:
        set_paused(connection, "paused", paused=True)
    wait_until(lambda: health.get("/health/messaging")[1]["training"]["unreadable_tenants"] == 1)
    lines = {line["tenant"]: line for line in health.get("/health/messaging")[1]["training"]["longest_waiting"]}
    assert lines["paused"]["standing"] == "paused"
    assert lines["broken"]["standing"] == "broken"
    assert lines["broken"]["waiting"] is None


# The process


def test_it_ends_when_it_is_told_to(health: HealthServer) -> None:
    health.process.terminate()
    assert health.process.wait(20) in {0, -15, 143}


def test_a_port_that_is_taken_is_refused_in_one_line(health: HealthServer, database_url: str) -> None:
    port = str(make_url(health.url).port)
    done = subprocess.run(
        [sys.executable, "-m", "outbox_pipelines.cli", "health-server", "--port", port],
        env={**health._environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"error: cannot listen on 127.0.0.1:{port}: Address already in use "
        "(is another one running? choose one with --port)\n"
    )


def test_it_does_not_import_dagster_or_pandas() -> None:
    code = "import sys, outbox_pipelines.observe.server; print({'dagster', 'pandas', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"


def test_a_look_that_fails_for_any_reason_is_told_and_tried_again(engine: Engine, health: HealthServer) -> None:
    polled(engine, every=3_600)
    wait_until(lambda: health.get("/health/ready")[0] == 200)
    run(engine, "ALTER TABLE outbox.upkeep RENAME TO mislaid")
    wait_until(lambda: health.get("/health/ready")[0] == 503)
    assert "could not be read (ProgrammingError)" in health.text("/health/ready")[2]
    run(engine, "ALTER TABLE outbox.mislaid RENAME TO upkeep")
    wait_until(lambda: health.get("/health/ready")[0] == 200)
