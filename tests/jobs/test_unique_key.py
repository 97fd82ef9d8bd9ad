"""Unique keys: one live message of a kind for each, whoever enqueues at the same time."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import OperationalError

from outbox_pipelines.jobs.enqueue import EnqueuedJob, InvalidJob, NewJob, enqueue_job, enqueue_jobs
from outbox_pipelines.jobs.message import AttemptOutcome
from outbox_pipelines.lease.lease import renew
from tests.jobs.messages import KIND, complete, end, enqueue, enqueue_many, row, run, set_state, states, take, value
from tests.lease.leased_things import waiting_for_locks
from tests.outboxes import wait_until


def put(engine: Engine, key: str = "k", kind: str = KIND, **how: object) -> EnqueuedJob:
    """Enqueue under a key, in a transaction of its own."""
    with engine.begin() as connection:
        return enqueue_job(connection, kind, unique_key=key, **how)  # type: ignore[arg-type]


def test_a_second_job_finds_the_first_in_any_live_state_and_leaves_it_as_it_is(engine: Engine) -> None:
    first = put(engine, payload={"n": 1})
    assert first.is_new
    for state in ("Pending", "Publishing", "Published", "Processing"):
        set_state(engine, first.message_id, state)
        before = row(engine, first.message_id)[:-2]
        assert put(engine, payload={"n": 2}, priority=5) == EnqueuedJob(first.message_id, False)
        assert row(engine, first.message_id)[:-2] == before
    assert len(states(engine)) == 1


def test_a_key_counts_within_its_kind_only(engine: Engine) -> None:
    made = [put(engine, "k", kind) for kind in ("a", "b", "a")]
    assert [one.is_new for one in made] == [True, True, False]
    assert made[0].message_id == made[2].message_id != made[1].message_id


def test_a_key_is_free_again_once_its_message_is_completed(engine: Engine) -> None:
    first = put(engine)
    complete(engine, first.message_id)
    second = put(engine)
    assert second.is_new
    assert second.message_id != first.message_id
    assert put(engine) == EnqueuedJob(second.message_id, False)


def test_a_job_that_waits_to_be_tried_again_keeps_its_key(engine: Engine) -> None:
    first = put(engine)
    end(engine, take(engine, first.message_id), AttemptOutcome.FAILED, "no")
    assert put(engine) == EnqueuedJob(first.message_id, False)


def test_within_one_call_the_later_ones_of_a_key_find_the_first(engine: Engine) -> None:
    there = put(engine, "there").message_id
    jobs = [NewJob(n, unique_key=key) for n, key in enumerate(["a", None, "there", "a", None, "b", "a", "there"])]
    with engine.begin() as connection:
        made = enqueue_jobs(connection, KIND, jobs)
    assert [one.is_new for one in made] == [True, True, False, False, True, True, False, False]
    a, b = made[0].message_id, made[5].message_id
    assert [one.message_id for one in made] == [
        a,
        made[1].message_id,
        there,
        a,
        made[4].message_id,
        b,
        a,
        there,
    ]
    assert [row(engine, message_id).job_id for message_id in (a, made[1].message_id, made[4].message_id, b)] == [
        "0",
        "1",
        "4",
        "5",
    ]


@pytest.mark.parametrize("commits", [True, False])
def test_of_two_transactions_at_once_the_second_waits_and_sees_how_the_first_ended(
    engine: Engine, commits: bool
) -> None:
    with ThreadPoolExecutor(1) as threads, engine.connect() as connection:
        first = enqueue_job(connection, KIND, unique_key="k")
        asked = threads.submit(put, engine)
        wait_until(lambda: waiting_for_locks(engine) == 1)
        if commits:
            connection.commit()
        else:
            connection.rollback()
        second = asked.result()
    assert second.is_new is not commits
    assert (second.message_id == first.message_id) is commits
    assert len(states(engine)) == 1


def test_finding_a_message_locks_nothing_until_the_caller_commits(engine: Engine) -> None:
    claimed = take(engine, put(engine).message_id)
    with engine.begin() as connection:
        enqueue_job(connection, KIND, unique_key="k")
        with engine.begin() as worker:
            assert renew(worker, [claimed.lease]).renewed == {claimed.lease}


def test_a_message_whose_row_is_locked_is_found_without_waiting(engine: Engine) -> None:
    first = put(engine)
    with engine.begin() as locking:
        locking.exec_driver_sql("SELECT FROM outbox.messages FOR UPDATE")
        assert put(engine) == EnqueuedJob(first.message_id, False)


def test_of_sixteen_at_once_one_is_new_and_all_get_its_id(engine: Engine) -> None:
    start = threading.Barrier(16)

    def one(_: int) -> EnqueuedJob:
        start.wait(20)
        return put(engine)

    with ThreadPoolExecutor(16) as threads:
        made = list(threads.map(one, range(16)))
    assert sum(one.is_new for one in made) == 1
    assert len({one.message_id for one in made}) == 1


class CompletedBetween:
    """Completes every live message whenever a connection is about to look for one that has its key."""

    def __init__(self, engine: Engine, *, times: int) -> None:
        self._engine = engine
        self._left = times
        self.done = 0

    def __call__(self, _connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        if statement.lstrip().startswith("SELECT") and "unique_key" in statement and self._left:
            self._left -= 1
            self.done += run(
                self._engine,
                """
                UPDATE outbox.messages SET state = 'Completed', outcome = 'succeeded', completed_at = now()
                WHERE state <> 'Completed'
                """,
            )


@pytest.mark.parametrize("times", [1, 3])
def test_a_key_that_is_completed_while_we_look_for_it_is_ours_to_use(engine: Engine, times: int) -> None:
    put(engine)
    between = CompletedBetween(engine, times=times)
    with engine.connect() as connection, connection.begin():
        event.listen(connection, "before_cursor_execute", between)
        made = enqueue_jobs(connection, KIND, [NewJob(1), NewJob(2, unique_key="k"), NewJob(3, unique_key="k")])
    assert between.done == 1
    assert [one.is_new for one in made] == [True, True, False]
    assert made[1].message_id == made[2].message_id
    assert [row(engine, one.message_id).job_id for one in made] == ["1", "2", "2"]
    assert sorted(states(engine).values()) == ["Completed", "Pending", "Pending"]


def test_the_order_of_keyless_jobs_survives_such_a_race(engine: Engine) -> None:
    put(engine)
    with engine.connect() as connection, connection.begin():
        event.listen(connection, "before_cursor_execute", CompletedBetween(engine, times=1))
        made = enqueue_jobs(connection, KIND, [NewJob(1, unique_key="k"), *(NewJob(n) for n in range(2, 6))])
    assert [row(engine, one.message_id).job_id for one in made] == ["1", "2", "3", "4", "5"]


def test_keys_that_others_take_and_end_all_the_time_are_given_up_with_a_word(engine: Engine) -> None:
    """Somebody else makes and completes the message between each two of our statements."""
    put(engine)

    def hide(_connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        if statement.lstrip().startswith("SELECT") and "unique_key" in statement:
            run(engine, "UPDATE outbox.messages SET unique_key = 'hidden'")
        elif statement.lstrip().startswith("INSERT"):
            run(engine, "UPDATE outbox.messages SET unique_key = 'k'")

    with engine.connect() as connection, connection.begin():
        event.listen(connection, "before_cursor_execute", hide)
        with pytest.raises(InvalidJob, match="completed faster than they can be enqueued; try again"):
            enqueue_job(connection, KIND, unique_key="k")


def test_two_bulk_calls_with_the_same_keys_in_another_order_end_without_waiting_for_each_other_forever(
    engine: Engine,
) -> None:
    keys = [f"key {number}" for number in range(500)]
    start = threading.Barrier(2)

    def call(order: list[str]) -> int:
        start.wait(20)
        with engine.begin() as connection:
            return sum(one.is_new for one in enqueue_jobs(connection, KIND, [NewJob(unique_key=key) for key in order]))

    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(call, keys), threads.submit(call, keys[::-1])]
        made = []
        for one in both:
            try:
                made.append(one.result())
            except OperationalError as error:
                # PostgreSQL ends one of two that wait for each other; its caller tries again.
                assert "deadlock" in str(error)  # noqa: PT017
    assert 500 in made
    assert value(engine, "SELECT count(*) FROM outbox.messages") == 500
    assert value(engine, "SELECT count(DISTINCT unique_key) FROM outbox.messages") == 500


def test_jobs_without_a_key_are_never_one(engine: Engine) -> None:
    assert len(set(enqueue_many(engine, 3))) == 3
    assert enqueue(engine) not in enqueue_many(engine, 2)
