"""Enqueueing: in the caller's transaction, in order, and nothing that cannot be stored."""

import datetime
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from outbox_pipelines.database.url import dagster_storage_url
from outbox_pipelines.jobs.enqueue import EnqueuedJob, InvalidJob, NewJob, enqueue_job, enqueue_jobs
from tests.jobs.messages import KIND, row, rows, run, states, take_due, value


@pytest.fixture(params=["psycopg", "psycopg2"])
def application(request: pytest.FixtureRequest, engine: Engine, database_url: str) -> Iterator[Engine]:
    """An application's engine; the driver is its own choice."""
    if request.param == "psycopg":
        yield engine
        return
    other = create_engine(dagster_storage_url(database_url))
    yield other
    other.dispose()


NASTY: list[NewJob] = [
    NewJob(),
    NewJob(7),
    NewJob("a:b %s 'c' \"d\" \\ {e,f} NULL ä\n", {"": ""}),
    NewJob(uuid.UUID(int=5), {"n": None, "t": True, "i": -1, "x": 1.5, "l": [1, [2]], "o": {"p": {}}}),
    NewJob("1", {"the text": "\\u0000", "ü": "日本 😀 \u2028 \ufffe", "%s": "%(x)s {0} :name $1", "'": "';--"}),
    NewJob("1", {"big": 2**70, "tuple": (1, 2)}, priority=-32_768),
    NewJob("1", {}, datetime.datetime(2031, 5, 6, 7, 8, 9, 123_456, datetime.UTC), 32_767, "a, {b} \"c\" 'd' :e %s"),
]


def test_whatever_can_be_stored_comes_back_as_it_was_with_either_driver(application: Engine, engine: Engine) -> None:
    kind = "a :kind %s 'of' \"its\" own"
    with application.begin() as connection:
        made = enqueue_jobs(connection, kind, NASTY)
    assert len(made) == len(NASTY)
    for job, one in zip(NASTY, made, strict=True):
        stored = row(engine, one.message_id)
        assert one.is_new
        assert (stored.kind, stored.state, stored.priority) == (kind, "Pending", job.priority)
        assert stored.job_id == (None if job.job_id is None else str(job.job_id))
        assert stored.payload == {key: [1, 2] if key == "tuple" else item for key, item in job.payload.items()}
        assert stored.unique_key == job.unique_key
        if job.run_at is not None:
            assert stored.available_at == job.run_at


def test_a_job_is_due_at_once_unless_told_otherwise(application: Engine, engine: Engine) -> None:
    zone = datetime.timezone(datetime.timedelta(hours=5, minutes=45))
    later = datetime.datetime(2040, 1, 1, tzinfo=zone)
    with application.begin() as connection:
        at_once = enqueue_job(connection, KIND).message_id
        enqueue_job(connection, KIND, run_at=later)
        past = enqueue_job(connection, KIND, run_at=datetime.datetime(1999, 1, 1, tzinfo=datetime.UTC)).message_id
    assert [claimed.message_id for claimed in take_due(engine)] == [past, at_once]
    assert value(engine, "SELECT available_at FROM outbox.messages WHERE state = 'Pending'") == later


def test_jobs_are_kept_with_the_callers_commit_whatever_it_holds(engine: Engine) -> None:
    with engine.connect() as connection:
        enqueue_job(connection, KIND, job_id="connection")
        connection.commit()
    with Session(engine) as session:
        enqueue_job(session, KIND, job_id="session")
        session.commit()
    scoped = scoped_session(sessionmaker(engine))
    enqueue_job(scoped, KIND, job_id="scoped session")
    scoped.commit()
    scoped.remove()
    assert [one.job_id for one in rows(engine, "SELECT job_id FROM outbox.messages ORDER BY message_id")] == [
        "connection",
        "session",
        "scoped session",
    ]


def test_jobs_are_dropped_with_the_callers_transaction(engine: Engine) -> None:
    def fail_after_enqueueing() -> None:
        with Session(engine) as session, session.begin():
            enqueue_job(session, KIND, unique_key="k")
            raise ZeroDivisionError

    with engine.connect() as connection:
        enqueue_jobs(connection, KIND, [NewJob(), NewJob(unique_key="k")])
        assert connection.execute(text("SELECT count(*) FROM outbox.messages")).scalar_one() == 2
        assert states(engine) == {}
        connection.rollback()
    with pytest.raises(ZeroDivisionError):
        fail_after_enqueueing()
    with engine.begin() as connection:
        kept = enqueue_job(connection, KIND).message_id
        with connection.begin_nested() as savepoint:
            enqueue_job(connection, KIND)
            savepoint.rollback()
    assert list(states(engine)) == [kept]


def test_the_ids_come_back_in_the_order_of_the_jobs(application: Engine, engine: Engine) -> None:
    # More than one statement, and keys among them that are there already or come twice.
    jobs = [
        NewJob(number, {"n": number}, unique_key=f"key {number % 4_000}" if number % 3 == 0 else None)
        for number in range(6_001)
    ]
    with application.begin() as connection:
        before = enqueue_job(connection, KIND, job_id=999, unique_key="key 999").message_id
        made = enqueue_jobs(connection, KIND, jobs)
    stored = {one.message_id: one for one in rows(engine, "SELECT * FROM outbox.messages")}
    assert len(stored) == 1 + sum(one.is_new for one in made)
    for job, one in zip(jobs, made, strict=True):
        assert stored[one.message_id].unique_key == job.unique_key
        if one.is_new:
            assert stored[one.message_id].job_id == str(job.job_id)
    assert made[999] == EnqueuedJob(before, False)
    new = [one.message_id for one in made if one.is_new]
    assert new == sorted(new)


def test_no_jobs_are_no_statement(engine: Engine) -> None:
    with engine.begin() as connection:
        assert enqueue_jobs(connection, KIND, []) == []
        assert enqueue_jobs(connection, KIND, iter(())) == []


BAD: list[tuple[str, Any, str]] = [
    ("a list", NewJob(payload=[1]), "its payload: it is a list, and must be a JSON object"),  # type: ignore[arg-type]
    ("a text", NewJob(payload="{}"), "its payload: it is a str"),  # type: ignore[arg-type]
    ("an object", NewJob(payload={"x": object()}), "its payload: a value is a object, which JSON cannot say"),
    ("a date", NewJob(payload={"x": datetime.date(2026, 1, 1)}), "its payload: a value is a date"),
    ("bytes", NewJob(payload={"x": b""}), "its payload: a value is a bytes"),
    ("a number as a key", NewJob(payload={1: 2}), "its payload: a key is a int"),  # type: ignore[dict-item]
    ("NUL", NewJob(payload={"x": ["a\x00b"]}), "its payload: a text or key holds the character NUL"),
    ("NUL in a key", NewJob(payload={"x": {"\x00": 1}}), "its payload: a text or key holds the character NUL"),
    ("half a pair", NewJob(payload={"x": "\ud83d"}), "its payload: a text or key holds half of a surrogate pair"),
    ("NaN", NewJob(payload={"x": float("nan")}), "its payload: a number is NaN or infinite"),
    ("infinite", NewJob(payload={"x": [float("-inf")]}), "its payload: a number is NaN or infinite"),
    (
        "too large",
        NewJob(payload={"x": "é" * 600_000}),
        r"its payload: it is 1,200,008 bytes .*OUTBOX_MAX_PAYLOAD_BYTES",
    ),
    ("job_id NUL", NewJob("a\x00"), "job_id: it holds the character NUL"),
    ("job_id half a pair", NewJob("\udc00"), "job_id: it holds half of a surrogate pair"),
    ("job_id empty", NewJob(""), "job_id must be a text of 1 to 500 characters"),
    ("job_id long", NewJob("x" * 501), "job_id must be a text of 1 to 500 characters"),
    ("key NUL", NewJob(unique_key="\x00"), "unique_key: it holds the character NUL"),
    ("key empty", NewJob(unique_key=""), "unique_key must be a text of 1 to 500 characters"),
    ("key long", NewJob(unique_key="x" * 501), "unique_key must be a text of 1 to 500 characters"),
    ("key a number", NewJob(unique_key=7), "unique_key must be a text"),  # type: ignore[arg-type]
    ("priority high", NewJob(priority=32_768), "priority is 32768; allowed are -32,768 to 32,767"),
    ("priority low", NewJob(priority=-32_769), "priority is -32769; allowed are -32,768 to 32,767"),
    ("priority half", NewJob(priority=1.5), "priority is 1.5, and must be a whole number"),  # type: ignore[arg-type]
    ("priority True", NewJob(priority=True), "priority is True, and must be a whole number"),
    (
        "run_at naive",
        NewJob(run_at=datetime.datetime(2026, 1, 1)),  # noqa: DTZ001
        "run_at is .*, and must be a datetime with a time zone",
    ),
    ("run_at a date", NewJob(run_at=datetime.date(2026, 1, 1)), "run_at is .*, and must be a datetime"),  # type: ignore[arg-type]
    ("run_at a text", NewJob(run_at="2026-01-01T00:00Z"), "run_at is .*, and must be a datetime"),  # type: ignore[arg-type]
    ("no job", {"job_id": 1}, "it is a dict, and must be a NewJob"),
]


def test_what_cannot_be_stored_is_refused_by_its_place_and_nothing_is_written(engine: Engine) -> None:
    for name, bad, told in BAD:
        with engine.begin() as connection:
            with pytest.raises(
                InvalidJob, match=f"^job 2 of kind 'work' cannot be stored: {told}.*no job of this call"
            ):
                enqueue_jobs(connection, KIND, [NewJob(), NewJob(unique_key="k"), bad, NewJob()])
            # The caller's transaction is as good as before.
            assert connection.execute(text("SELECT count(*) FROM outbox.messages")).scalar_one() == 0, name
        if isinstance(bad, NewJob):
            with engine.begin() as connection, pytest.raises(InvalidJob, match="job 0 of kind 'work'"):
                enqueue_job(connection, KIND, **vars(bad))
    assert states(engine) == {}


def test_an_empty_payload_of_another_type_is_refused_too(engine: Engine) -> None:
    empty: list[Any] = [[], "", 0, False, ()]
    for payload in empty:
        with engine.begin() as connection, pytest.raises(InvalidJob, match="its payload: it is a"):
            enqueue_job(connection, KIND, payload=payload)


@pytest.mark.parametrize(
    "kind", ["", "x" * 101, None, 7, "\x00", "a\ud800"], ids=["", "long", "None", "7", "NUL", "half"]
)
def test_an_impossible_kind_is_refused(engine: Engine, kind: Any) -> None:
    with engine.begin() as connection, pytest.raises(InvalidJob, match="kind"):
        enqueue_job(connection, kind)
    assert states(engine) == {}


def test_texts_of_the_greatest_length_are_stored(engine: Engine) -> None:
    with engine.begin() as connection:
        made = enqueue_job(connection, "😀" * 100, job_id="😀" * 500, unique_key="😀" * 500)
        again = enqueue_job(connection, "😀" * 100, job_id="x", unique_key="😀" * 500)
    assert again == EnqueuedJob(made.message_id, False)


def test_an_error_of_the_database_does_not_quote_the_payload(engine: Engine) -> None:
    run(engine, 'ALTER TABLE outbox.messages ADD CHECK (payload <> \'{"name": "secret"}\')')
    with engine.begin() as connection, pytest.raises(Exception, match="violates check constraint") as caught:
        enqueue_job(connection, KIND, payload={"name": "secret"})
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(caught.value)
