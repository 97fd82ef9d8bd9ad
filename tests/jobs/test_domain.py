"""The application's own table of jobs: whatever it looks like, only live jobs are closed and only ours touched."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Connection, Engine, text

from outbox_pipelines.database.engine import open_engine
from outbox_pipelines.jobs.domain import InvalidDomain, Standing, TableDomain
from outbox_pipelines.jobs.message import Outcome
from outbox_pipelines.settings import load_settings
from tests.conftest import made_database
from tests.jobs.messages import APP_JOBS, add_app_jobs, app_job, make_app_jobs, value
from tests.lease.leased_things import waiting_for_locks
from tests.outboxes import wait_until


@dataclass(frozen=True)
class Table:
    """A table of jobs as an application may have it."""

    id_type: str
    ids: tuple[str, str]
    no_id: str | None
    """Text that is no value of the id's type."""

    status_type: str = "text"
    domain: TableDomain = APP_JOBS
    name: str = "app.jobs"
    """As it stands in SQL."""


ODD = TableDomain(
    'a:pp "x" %s.jo:bs%(id)s "of" \'us\'',
    live=("in : line", "run%ning"),
    failed='fai"led',
    succeeded="do'ne",
    cancelled="can\\celled",
    id_column="the :id %s",
    status_column='st"at%us:x',
    message_column="m%%e:ssage",
    step_column="st:ep'",
)

TABLES = {
    "bigint": Table("bigint", ("1", "2"), "one"),
    "uuid": Table("uuid", (str(uuid4()), str(uuid4())), "1"),
    "text": Table("text", ("a:b%s'\"", "ä\n"), None),
    "enum": Table("bigint", ("1", "2"), "", status_type="app.status"),
    "smallint and varchar": Table("smallint", ("1", "2"), "70000", status_type="varchar(20)"),
    "odd names": Table("bigint", ("1", "2"), "x", domain=ODD, name='"a:pp ""x"" %s"."jo:bs%(id)s ""of"" \'us\'"'),
}
# Each has a table of its own.
TABLES |= {
    name: replace(table, domain=replace(APP_JOBS, table=f"app.jobs_{place}"), name=f"app.jobs_{place}")
    for place, (name, table) in enumerate(TABLES.items())
    if table.domain is APP_JOBS
}


@pytest.fixture(scope="module")
def school(server_url: str) -> Iterator[Engine]:
    """The application's database, with all these tables."""
    with made_database(server_url, f"outbox_domain_{os.getpid()}") as url:
        engine = open_engine(load_settings(), url, application_name="tests")
        for table in TABLES.values():
            make(engine, table)
        yield engine
        engine.dispose()


def make(engine: Engine, table: Table) -> None:
    """Make a table, in its schema."""
    domain = table.domain
    labels = ", ".join(f"'{status}'" for status in ("queued", "running", "failed", "done", "cancelled", "resting"))

    def column(name: str | None) -> str:
        assert name is not None
        return '"' + name.replace('"', '""') + '"'

    with engine.connect() as connection, connection.begin():
        # The driver's own cursor, since text() would take a colon for a parameter.
        cursor = connection.connection.cursor()
        cursor.execute(f"CREATE SCHEMA IF NOT EXISTS {table.name.partition('.')[0]}")
        if table.status_type == "app.status":
            cursor.execute(f"CREATE TYPE app.status AS ENUM ({labels})")
        cursor.execute(f"""
            CREATE TABLE {table.name} ({column(domain.id_column)} {table.id_type} PRIMARY KEY,
                {column(domain.status_column)} {table.status_type} NOT NULL,
                {column(domain.message_column)} text, {column(domain.step_column)} text)
        """)


@pytest.fixture(params=list(TABLES))
def table(request: pytest.FixtureRequest, school: Engine) -> Table:
    """A table with both of its jobs in the first live status."""
    table = TABLES[request.param]
    for job_id in table.ids:
        write(school, table, job_id, table.domain.live[0])
    return table


def write(engine: Engine, table: Table, job_id: str, status: str) -> None:
    """Put a job into a status, without a message."""
    with engine.connect() as connection, connection.begin():
        cursor = connection.connection.cursor()
        status_column = '"' + table.domain.status_column.replace('"', '""').replace("%", "%%") + '"'
        id_column = '"' + table.domain.id_column.replace("%", "%%") + '"'
        name = table.name.replace("%", "%%")
        cursor.execute(f"DELETE FROM {name} WHERE {id_column} = %s", (job_id,))
        cursor.execute(f"INSERT INTO {name} ({id_column}, {status_column}) VALUES (%s, %s)", (job_id, status))


def read(engine: Engine, table: Table, job_id: str) -> tuple[str, str | None, str | None]:
    """A job's status, message and step."""
    with engine.connect() as connection:
        cursor = connection.connection.cursor()
        cursor.execute(f"SELECT * FROM {table.name}")
        found = {str(one[0]): (one[1], one[2], one[3]) for one in cursor.fetchall()}
    return found[job_id]


def test_a_job_is_live_in_any_status_that_is_not_named_final(school: Engine, table: Table) -> None:
    for status in [*table.domain.live, table.domain.failed, "resting"]:
        write(school, table, table.ids[0], status)
        with school.begin() as connection:
            # One that failed and has a message is to be tried again: somebody retried the message.
            assert table.domain.standing(connection, table.ids[0]) is Standing.LIVE


def test_a_job_that_is_done_or_cancelled_says_so(school: Engine, table: Table) -> None:
    write(school, table, table.ids[0], str(table.domain.succeeded))
    write(school, table, table.ids[1], str(table.domain.cancelled))
    with school.begin() as connection:
        assert table.domain.standing(connection, table.ids[0]) is Standing.SUCCEEDED
        assert table.domain.standing(connection, table.ids[1]) is Standing.CANCELLED


def test_a_job_that_is_not_there_or_has_no_possible_id_is_missing(school: Engine, table: Table) -> None:
    absent = str(uuid4()) if table.id_type == "uuid" else "77"
    with school.begin() as connection:
        assert table.domain.standing(connection, absent) is Standing.MISSING
        if table.no_id is not None:
            assert table.domain.standing(connection, table.no_id) is Standing.MISSING
        # The transaction is as good as before.
        assert table.domain.standing(connection, table.ids[0]) is Standing.LIVE


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CANCELLED])
def test_closing_marks_a_live_job_and_no_other(school: Engine, table: Table, outcome: Outcome) -> None:
    closed = table.domain.failed if outcome is Outcome.FAILED else table.domain.cancelled
    for status in table.domain.live:
        write(school, table, table.ids[0], status)
        with school.begin() as connection:
            table.domain.close(connection, table.ids[0], outcome, "of %s :reason 'x' \"y\"")
        assert read(school, table, table.ids[0])[:2] == (closed, "of %s :reason 'x' \"y\"")
        assert read(school, table, table.ids[1])[:2] == (table.domain.live[0], None)


def test_closing_leaves_a_job_that_is_over_as_it_is(school: Engine, table: Table) -> None:
    for status in (table.domain.succeeded, table.domain.cancelled, table.domain.failed):
        write(school, table, table.ids[0], str(status))
        for outcome in (Outcome.FAILED, Outcome.CANCELLED):
            with school.begin() as connection:
                table.domain.close(connection, table.ids[0], outcome, "too late")
        assert read(school, table, table.ids[0])[:2] == (status, None)


def test_a_cancelled_job_is_marked_failed_where_there_is_no_such_status(engine: Engine) -> None:
    domain = replace(make_app_jobs(engine), cancelled=None)
    (job,) = add_app_jobs(engine)
    with engine.begin() as connection:
        domain.close(connection, str(job), Outcome.CANCELLED, "not wanted")
    assert app_job(engine, job) == ("failed", "not wanted")


def test_without_columns_for_them_texts_and_steps_go_nowhere(engine: Engine) -> None:
    domain = replace(make_app_jobs(engine), message_column=None, step_column=None)
    (job,) = add_app_jobs(engine)
    with engine.begin() as connection:
        domain.note_step(connection, str(job), "counting")
        domain.close(connection, str(job), Outcome.FAILED, "a reason")
    assert app_job(engine, job) == ("failed", None)
    assert value(engine, "SELECT step FROM app.jobs") is None
    with engine.begin() as connection:
        domain.reopen(connection, str(job))
    assert app_job(engine, job) == ("queued", None)


def test_reopening_makes_a_closed_job_live_again_without_its_message(school: Engine, table: Table) -> None:
    for outcome in (Outcome.FAILED, Outcome.CANCELLED):
        with school.begin() as connection:
            table.domain.close(connection, table.ids[0], outcome, "a reason")
        with school.begin() as connection:
            table.domain.reopen(connection, table.ids[0])
        assert read(school, table, table.ids[0])[:2] == (table.domain.live[0], None)


def test_reopening_leaves_a_live_job_as_it_is(school: Engine, table: Table) -> None:
    write(school, table, table.ids[0], table.domain.live[1])
    with school.begin() as connection:
        table.domain.reopen(connection, table.ids[0])
    assert read(school, table, table.ids[0])[0] == table.domain.live[1]


def test_reopening_does_not_undo_what_is_done(school: Engine, table: Table) -> None:
    write(school, table, table.ids[0], str(table.domain.succeeded))
    with school.begin() as connection:
        table.domain.reopen(connection, table.ids[0])
    assert read(school, table, table.ids[0])[0] == table.domain.succeeded


def test_a_step_is_shown_on_its_job_alone(school: Engine, table: Table) -> None:
    with school.begin() as connection:
        table.domain.note_step(connection, table.ids[0], "of %s :step")
    assert read(school, table, table.ids[0])[2] == "of %s :step"
    assert read(school, table, table.ids[1])[2] is None


def test_the_live_jobs_are_listed_by_their_ids_as_text(school: Engine, table: Table) -> None:
    def listed(connection: Connection) -> list[Any]:
        live = table.domain.live_jobs()
        return sorted(connection.execute(text(live.sql), live.parameters).scalars())

    with school.connect() as connection:
        assert listed(connection) == sorted(table.ids)
    write(school, table, table.ids[0], table.domain.live[1])
    write(school, table, table.ids[1], table.domain.failed)
    with school.connect() as connection:
        assert listed(connection) == [table.ids[0]]


def test_a_foreign_error_is_not_taken_for_a_missing_job(engine: Engine) -> None:
    with engine.begin() as connection, pytest.raises(Exception, match=r"app\.jobs"):
        APP_JOBS.standing(connection, "1")


def test_what_cannot_be_a_domain_is_refused_with_the_remedy() -> None:
    for name in ("jobs", ".jobs", "app.", "a.b.c", ""):
        with pytest.raises(InvalidDomain, match=r"name it with its schema, as in 'public\.jobs'"):
            TableDomain(name, live=("queued",), failed="failed")
    for live in ((), "queued", ["queued"]):
        with pytest.raises(InvalidDomain, match=r"live must be a tuple of status values"):
            TableDomain("app.jobs", live=live, failed="failed")  # type: ignore[arg-type]
    for final in ({"failed": "queued"}, {"succeeded": "queued"}, {"cancelled": "queued"}):
        with pytest.raises(InvalidDomain, match="'queued' is named both live and final"):
            TableDomain("app.jobs", live=("queued",), **{"failed": "failed", **final})


def test_closing_waits_for_whoever_changes_the_job_and_then_looks_again(engine: Engine) -> None:
    domain = make_app_jobs(engine)
    (job,) = add_app_jobs(engine)

    def close() -> None:
        with engine.begin() as connection:
            domain.close(connection, str(job), Outcome.FAILED, "too late")

    with ThreadPoolExecutor(1) as threads:
        with engine.begin() as finishing:
            finishing.execute(text("UPDATE app.jobs SET status = 'done'"))
            closing = threads.submit(close)
            wait_until(lambda: waiting_for_locks(engine) == 1)
        closing.result()
    assert app_job(engine, job) == ("done", None)
