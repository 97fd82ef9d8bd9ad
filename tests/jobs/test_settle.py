"""How claims end: each under its token, with one line in the ledger, and whatever the error's text is."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as examples_of
from hypothesis import strategies as st
from sqlalchemy import Engine, text

from outbox_pipelines.database.error_text import error_text
from outbox_pipelines.jobs.message import AttemptOutcome, Claimed, Settlement
from outbox_pipelines.jobs.outbox import ended_as, expire, expire_dead, note_progress, settle
from tests.jobs.messages import (
    end,
    enqueue,
    enqueue_many,
    ledger,
    ledger_rows,
    let_expire,
    row,
    rows,
    states,
    take,
    take_due,
)
from tests.lease.leased_things import waiting_for_locks
from tests.outboxes import wait_until

FINAL = {
    AttemptOutcome.SUCCEEDED: "succeeded",
    AttemptOutcome.GIVEN_UP: "failed",
    AttemptOutcome.CANCELLED: "cancelled",
}


def with_another_token(claimed: Claimed) -> Claimed:
    """A claim of the same message that is not ours."""
    return replace(claimed, lease=replace(claimed.lease, token=uuid4()))


def test_an_end_for_good_completes_the_message_and_frees_it(engine: Engine) -> None:
    for outcome, final in FINAL.items():
        claimed = take(engine, enqueue(engine), holder="run 5")
        assert end(engine, claimed, outcome, "why", holder="run 5")
        found = row(engine, claimed.message_id)
        assert (found.state, found.outcome, found.last_error) == ("Completed", final, "why")
        assert found.completed_at >= found.claimed_at
        assert (found.lease_token, found.lease_expires_at, found.lease_holder) == (None, None, None)
        assert (found.processing_attempts, found.claims) == (1, 1)
        (line,) = ledger_rows(engine, claimed.message_id)
        assert (line.claim, line.attempt, line.run_id, line.outcome, line.error) == (1, 1, "run 5", outcome, "why")
        assert line.started_at == found.claimed_at <= line.finished_at


def test_a_failure_waits_for_its_delay_and_counts(engine: Engine) -> None:
    claimed = take(engine, enqueue(engine))
    assert end(engine, claimed, AttemptOutcome.FAILED, "no", delay=120)
    found = row(engine, claimed.message_id)
    assert (found.state, found.outcome, found.completed_at, found.last_error) == ("Pending", None, None, "no")
    assert 110 < found.due_in <= 120
    assert (found.lease_token, found.processing_attempts) == (None, 1)
    assert ledger(engine, claimed.message_id) == [(1, 1, "failed")]


def test_five_interruptions_do_not_count_and_are_due_at_once(engine: Engine) -> None:
    message_id = enqueue(engine)
    for claim in range(1, 6):
        claimed = take(engine, message_id)
        assert (claimed.attempt, claimed.claim) == (1, claim)
        assert end(engine, claimed, AttemptOutcome.INTERRUPTED, "stopped", delay=500)
        assert row(engine, message_id).due_in <= 0
    assert ledger(engine, message_id) == [(claim, 1, "interrupted") for claim in range(1, 6)]
    claimed = take(engine, message_id)
    assert end(engine, claimed, AttemptOutcome.FAILED)
    assert row(engine, message_id).processing_attempts == 1
    assert ledger(engine, message_id)[5:] == [(6, 1, "failed")]


def test_attempts_count_up_over_failures_and_losses(engine: Engine) -> None:
    message_id = enqueue(engine)
    end(engine, take(engine, message_id), AttemptOutcome.FAILED)
    take(engine, message_id)
    let_expire(engine)
    assert end(engine, take(engine, message_id), AttemptOutcome.INTERRUPTED)
    assert end(engine, take(engine, message_id), AttemptOutcome.GIVEN_UP)
    assert ledger(engine, message_id) == [(1, 1, "failed"), (2, 2, "lost"), (3, 3, "interrupted"), (4, 3, "given up")]


def test_many_claims_are_ended_in_one_statement_each_in_its_way(engine: Engine) -> None:
    enqueue_many(engine, 7)
    claims = take_due(engine)
    outcomes = [*FINAL, AttemptOutcome.FAILED, AttemptOutcome.INTERRUPTED]
    foreign = with_another_token(claims[5])
    settlements = [Settlement(one, outcome, str(outcome)) for one, outcome in zip(claims, outcomes, strict=False)]
    with engine.begin() as connection:
        done = settle(connection, [*settlements, Settlement(foreign, AttemptOutcome.SUCCEEDED)], holder="me")
    assert done == {one.message_id for one in claims[:5]}
    found = rows(engine, "SELECT state, outcome, last_error FROM outbox.messages ORDER BY message_id")
    assert [tuple(one) for one in found] == [
        ("Completed", "succeeded", "succeeded"),
        ("Completed", "failed", "given up"),
        ("Completed", "cancelled", "cancelled"),
        ("Pending", None, "failed"),
        ("Pending", None, "interrupted"),
        ("Processing", None, None),
        ("Processing", None, None),
    ]
    with engine.connect() as connection:
        assert ended_as(connection, claims) == dict(zip(sorted(done), outcomes, strict=True))
        assert ended_as(connection, []) == {}


def test_an_end_under_a_foreign_token_writes_nothing_not_even_in_the_ledger(engine: Engine) -> None:
    claimed = take(engine, enqueue(engine))
    foreign = with_another_token(claimed)
    before = row(engine, claimed.message_id)
    for outcome in AttemptOutcome:
        assert not end(engine, foreign, outcome, "x")
    after = row(engine, claimed.message_id)
    assert (after.state, after.lease_token, after.lease_expires_at) == (
        "Processing",
        before.lease_token,
        before.lease_expires_at,
    )
    assert ledger(engine, claimed.message_id) == []


def test_a_claim_is_ended_once(engine: Engine) -> None:
    claimed = take(engine, enqueue(engine))
    assert end(engine, claimed)
    assert not end(engine, claimed, AttemptOutcome.GIVEN_UP)
    assert row(engine, claimed.message_id).outcome == "succeeded"
    assert ledger(engine, claimed.message_id) == [(1, 1, "succeeded")]


def test_an_end_is_dropped_with_its_transaction(engine: Engine) -> None:
    claimed = take(engine, enqueue(engine))
    with engine.connect() as connection:
        settle(connection, [Settlement(claimed, AttemptOutcome.SUCCEEDED)], holder="me")
        connection.rollback()
    assert row(engine, claimed.message_id).state == "Processing"
    assert ledger(engine, claimed.message_id) == []


def test_the_ledger_says_how_each_claim_ended(engine: Engine) -> None:
    message_id = enqueue(engine)
    first = take(engine, message_id)
    end(engine, first, AttemptOutcome.FAILED)
    second = take(engine, message_id)
    with engine.connect() as connection:
        assert ended_as(connection, [first]) == {message_id: AttemptOutcome.FAILED}
        assert ended_as(connection, [second]) == {}


def test_progress_is_noted_under_the_token_only(engine: Engine) -> None:
    claimed = take(engine, enqueue(engine))
    with engine.begin() as connection:
        assert note_progress(connection, claimed, "half way", 0.5)
    found = row(engine, claimed.message_id)
    assert (found.step, found.fraction) == ("half way", 0.5)
    end(engine, claimed)
    with engine.begin() as connection:
        assert not note_progress(connection, claimed, "too late", None)
    assert row(engine, claimed.message_id).step == "half way"


# Error texts


@pytest.fixture
def failing(engine: Engine) -> Claimed:
    """A claimed message, to be ended in transactions that are rolled back."""
    return take(engine, enqueue(engine))


@examples_of(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    told=st.one_of(
        st.text(st.characters(exclude_categories=()), max_size=40),
        st.builds(
            lambda head, fill, length: head + fill * length,
            st.text(st.characters(exclude_categories=()), max_size=4),
            st.sampled_from(["😀", "é", "\x00", "\ud83d", "x"]),
            st.integers(1_985, 2_010),
        ),
    )
)
@example(told="\x00" * 2_000)
@example(told="x" * 1_999 + "😀")
@example(told="😀" * 2_001)
@example(told="\ude00" + "😀" * 3_000)
@example(told='{NULL,"a\\",\'} %s :x')
def test_an_error_of_any_text_can_be_stored_whole_or_visibly_cut(engine: Engine, failing: Claimed, told: str) -> None:
    with engine.connect() as connection:
        assert settle(connection, [Settlement(failing, AttemptOutcome.FAILED, told)], holder="me")
        query = "SELECT last_error, (SELECT error FROM outbox.job_attempts) FROM outbox.messages"
        stored, line = connection.execute(text(query)).one()
        connection.rollback()
    assert stored == line == error_text(told)
    assert len(stored) <= 2_000
    if len(told) > 2_000:
        assert stored.endswith("(cut)")
    else:
        assert [was for was, now in zip(told, stored, strict=True) if was != now and now != "\ufffd"] == []


# Lost claims


def test_an_ended_lease_is_given_up_with_its_line_in_the_ledger_and_is_due_at_once(engine: Engine) -> None:
    ended, running = enqueue_many(engine, 2)
    take(engine, ended, holder="worker 1")
    take(engine, running)
    let_expire(engine, ended)
    with engine.begin() as connection:
        assert expire(connection) == [ended]
        assert expire(connection) == []
    found = row(engine, ended)
    assert (found.state, found.lease_token, found.lease_holder) == ("Pending", None, None)
    assert (found.processing_attempts, found.lost_leases) == (1, 1)
    assert found.due_in <= 0
    (line,) = ledger_rows(engine, ended)
    assert (line.claim, line.attempt, line.run_id, line.outcome) == (1, 1, "worker 1", "lost")
    assert line.error == found.last_error
    assert states(engine)[running] == "Processing"
    assert ledger(engine, running) == []


def test_a_worker_that_is_known_to_be_dead_loses_its_claims_before_their_leases_end(engine: Engine) -> None:
    dead_ids, taken_over, alive = enqueue_many(engine, 2), enqueue(engine), enqueue(engine)
    dead = [take(engine, message_id) for message_id in [*dead_ids, taken_over]]
    let_expire(engine, taken_over)
    second = take(engine, taken_over)
    take(engine, alive)
    with engine.begin() as connection:
        assert sorted(expire_dead(connection, [one.lease for one in dead])) == dead_ids
        assert expire_dead(connection, []) == []
    assert [row(engine, message_id).last_error for message_id in dead_ids] == ["the worker's process died"] * 2
    assert row(engine, taken_over).lease_token == second.lease.token
    assert states(engine)[alive] == "Processing"


def test_a_message_that_its_worker_ends_at_that_moment_is_not_recovered(engine: Engine) -> None:
    claimed = take(engine, enqueue(engine))
    let_expire(engine)
    with engine.begin() as ending:
        settle(ending, [Settlement(claimed, AttemptOutcome.SUCCEEDED)], holder="me")
        with engine.begin() as connection:
            assert expire(connection) == []
    assert ledger(engine, claimed.message_id) == [(1, 1, "succeeded")]


def test_an_end_that_waits_for_a_recovery_finds_the_lease_lost(engine: Engine) -> None:
    claimed = take(engine, enqueue(engine))
    let_expire(engine)
    with ThreadPoolExecutor(1) as threads:
        with engine.begin() as recovering:
            expire(recovering)
            ending = threads.submit(end, engine, claimed)
            wait_until(lambda: waiting_for_locks(engine) == 1)
        assert not ending.result()
    assert ledger(engine, claimed.message_id) == [(1, 1, "lost")]
    assert states(engine)[claimed.message_id] == "Pending"
