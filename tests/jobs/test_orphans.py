"""Orphans: each live job of the application's table has one message, whoever starts at the same time."""

import subprocess
import sys
import uuid
from dataclasses import dataclass, replace

from sqlalchemy import Engine, text

from outbox_pipelines.jobs.domain import LiveJobs, TableDomain
from outbox_pipelines.jobs.message import AttemptOutcome, State
from outbox_pipelines.jobs.recovery import Recovered, recover_orphans
from tests.jobs.messages import (
    APP_JOBS,
    KIND,
    a_kind,
    add_app_jobs,
    end,
    enqueue,
    make_app_jobs,
    row,
    rows,
    run,
    set_state,
    take,
    take_due,
    value,
)
from tests.lease.leased_things import waiting_for_locks
from tests.outboxes import wait_until

WITH_DOMAIN = a_kind(domain=APP_JOBS)


@dataclass(frozen=True)
class OddDomain(TableDomain):
    """An adapter of the application's own, whose query finds what it likes."""

    sql: str = ""

    def live_jobs(self) -> LiveJobs:
        return LiveJobs(self.sql, {"wanted": "queued"})


def jobs_with_messages(engine: Engine) -> list[str]:
    """The job of every message, repeats included."""
    return [one.job_id for one in rows(engine, "SELECT job_id FROM outbox.messages ORDER BY job_id::bigint")]


def test_each_live_job_without_a_message_gets_one_that_is_due(engine: Engine) -> None:
    make_app_jobs(engine)
    orphans = add_app_jobs(engine, 2) + add_app_jobs(engine, 1, status="running")
    for status in ("done", "failed", "cancelled", "resting"):
        add_app_jobs(engine, 2, status=status)
    assert recover_orphans(engine, [WITH_DOMAIN]) == Recovered(orphans=3)
    claimed = take_due(engine)
    assert sorted(str(one.job_id) for one in claimed) == [str(job) for job in orphans]
    assert {(one.kind, one.attempt) for one in claimed} == {(KIND, 1)}
    assert [dict(one.payload) for one in claimed] == [{}] * 3


def test_a_job_that_has_a_message_in_any_state_gets_no_other(engine: Engine) -> None:
    make_app_jobs(engine)
    jobs = add_app_jobs(engine, 5)
    made = [enqueue(engine, job_id=job) for job in jobs]
    for message_id, state in zip(made, State, strict=True):
        set_state(engine, message_id, state)
    before = [row(engine, message_id)[:-2] for message_id in made]
    assert recover_orphans(engine, [WITH_DOMAIN]) == Recovered()
    assert [row(engine, message_id)[:-2] for message_id in made] == before
    assert jobs_with_messages(engine) == [str(job) for job in jobs]


def test_a_job_is_an_orphan_of_its_own_kind_only(engine: Engine) -> None:
    make_app_jobs(engine)
    (job,) = add_app_jobs(engine)
    enqueue(engine, "other", job_id=job)
    assert recover_orphans(engine, [WITH_DOMAIN]).orphans == 1
    assert recover_orphans(engine, [a_kind("without_a_domain")]) == Recovered()


def test_a_second_start_finds_nothing_more_to_do(engine: Engine) -> None:
    make_app_jobs(engine)
    add_app_jobs(engine, 5)
    assert recover_orphans(engine, [WITH_DOMAIN]).orphans == 5
    assert recover_orphans(engine, [WITH_DOMAIN]) == Recovered()
    end(engine, take_due(engine)[0], AttemptOutcome.GIVEN_UP)
    assert recover_orphans(engine, [WITH_DOMAIN]) == Recovered()


def test_a_table_that_is_missing_is_told_and_stops_no_other_kind(engine: Engine) -> None:
    make_app_jobs(engine)
    add_app_jobs(engine, 2)

    class Broken(TableDomain):
        def live_jobs(self) -> LiveJobs:
            raise ZeroDivisionError("my own fault")

    kinds = [
        a_kind("lost", domain=replace(APP_JOBS, table="app.no_such_table")),
        a_kind("broken", domain=Broken("app.jobs", live=("queued",), failed="failed")),
        a_kind("odd", domain=OddDomain("app.jobs", live=("queued",), failed="failed", sql="SELECT 1 AS something")),
        WITH_DOMAIN,
    ]
    done = recover_orphans(engine, kinds)
    assert done.orphans == 2
    assert [problem.partition(":")[0] for problem in done.problems] == ["kind lost", "kind broken", "kind odd"]
    assert 'relation "app.no_such_table" does not exist' in done.problems[0]
    assert done.problems[1] == "kind broken: its domain jobs cannot be listed: my own fault"
    assert done.words().startswith("2 orphans given a message; kind lost: ")


def test_a_query_that_names_a_job_twice_or_none_makes_one_message_each(engine: Engine) -> None:
    make_app_jobs(engine)
    add_app_jobs(engine, 2)
    query = """
        SELECT id::text AS job_id FROM app.jobs WHERE status = :wanted
        UNION ALL SELECT id::text FROM app.jobs UNION ALL SELECT NULL
    """
    kind = a_kind(domain=OddDomain("app.jobs", live=("queued",), failed="failed", sql=query))
    assert recover_orphans(engine, [kind]).orphans == 2
    assert recover_orphans(engine, [kind]).orphans == 0
    assert len(jobs_with_messages(engine)) == 2


def test_jobs_with_ids_of_other_types_are_found_again_by_their_text(engine: Engine) -> None:
    run(engine, "CREATE SCHEMA app")
    run(engine, "CREATE TABLE app.jobs (id uuid PRIMARY KEY, status varchar(9) NOT NULL)")
    known, orphan = uuid.uuid4(), uuid.uuid4()
    run(engine, "INSERT INTO app.jobs SELECT unnest(:ids), 'queued'", ids=[known, orphan])
    enqueue(engine, job_id=known)
    kind = a_kind(domain=replace(APP_JOBS, message_column=None, step_column=None))
    assert recover_orphans(engine, [kind]).orphans == 1
    assert value(engine, "SELECT job_id FROM outbox.messages ORDER BY message_id DESC LIMIT 1") == str(orphan)


# Those who start together


def start(url: str) -> "subprocess.Popen[str]":
    """A process that recovers."""
    command = [sys.executable, "-m", "tests.jobs.recovering_process", url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_five_processes_that_start_together_give_a_hundred_orphans_a_hundred_messages(
    engine: Engine, database_url: str
) -> None:
    make_app_jobs(engine)
    orphans = add_app_jobs(engine, 100)
    in_progress = [take(engine, enqueue(engine, job_id=job)) for job in add_app_jobs(engine, 10, status="running")]
    before = [row(engine, claimed.message_id)[:-2] for claimed in in_progress]
    with engine.connect() as locking:
        # All have begun, and wait, before the first may look at the table.
        locking.execute(text("LOCK TABLE app.jobs IN ACCESS EXCLUSIVE MODE"))
        processes = [start(database_url) for _ in range(6)]
        try:
            wait_until(lambda: waiting_for_locks(engine) == 6)
            # One of them dies half-way.
            processes[2].kill()
            processes[2].wait(30)
            locking.rollback()
            told = [one.communicate(timeout=60)[0].strip() for one in processes if one is not processes[2]]
        finally:
            for one in processes:
                one.kill()
                one.wait(30)
    wait_until(lambda: waiting_for_locks(engine) == 0)
    assert sum(int(count) for count in told) == 100
    assert jobs_with_messages(engine)[:100] == [str(job) for job in orphans]
    assert value(engine, "SELECT count(*) FROM outbox.messages") == 110
    assert [row(engine, claimed.message_id)[:-2] for claimed in in_progress] == before
