"""Claiming one message: who may, and who is refused, why, and when to come back."""

import datetime as datetime_module
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
from sqlalchemy import Engine, text

from outbox_pipelines.jobs.message import AttemptOutcome, Claimed, NotClaimed, Refusal, Settlement
from outbox_pipelines.jobs.outbox import claim_message, note_progress, settle
from tests.jobs.messages import (
    KIND,
    ask_for,
    end,
    enqueue,
    ledger,
    ledger_rows,
    let_expire,
    make_due,
    row,
    run,
    set_state,
    take,
    take_due,
)
from tests.lease.leased_things import waiting_for_locks
from tests.outboxes import wait_until


def refused(engine: Engine, message_id: int, **how: object) -> NotClaimed:
    """The refusal of a claim."""
    answer = ask_for(engine, message_id, **how)  # type: ignore[arg-type]
    assert isinstance(answer, NotClaimed)
    return answer


# Who may claim


def test_a_claim_shows_its_holder_and_takes_what_belongs_to_the_claim(engine: Engine) -> None:
    message_id = enqueue(engine, job_id=7, payload={"a": [1]})
    run(engine, "UPDATE outbox.messages SET last_error = 'e', parked = true, step = 's', fraction = 0.5")
    token = uuid4()
    claimed = take(engine, message_id, holder="run 5", seconds=30, token=token)
    assert (claimed.message_id, claimed.kind, claimed.job_id, claimed.payload) == (message_id, KIND, "7", {"a": [1]})
    assert (claimed.attempt, claimed.claim, claimed.lease.token, claimed.lease.seconds) == (1, 1, token, 30)
    found = row(engine, message_id)
    assert (found.state, found.lease_token, found.lease_holder) == ("Processing", token, "run 5")
    assert 25 < found.seconds_left <= 30
    assert (found.last_error, found.parked, found.step, found.fraction) == (None, False, None, None)
    assert (found.processing_attempts, found.claims) == (1, 1)


def test_a_message_that_nobody_works_on_can_be_claimed(engine: Engine) -> None:
    for state in ("Pending", "Publishing", "Published"):
        message_id = enqueue(engine)
        set_state(engine, message_id, state)
        assert take(engine, message_id).attempt == 1
        found = row(engine, message_id)
        assert (found.state, found.publish_token) == ("Processing", None)


def test_a_message_that_waits_is_not_claimed_before_its_time(engine: Engine) -> None:
    message_id = enqueue(engine)
    for seconds, told in ((90.0, 90.0), (0.2, 1.0)):
        run(engine, f"UPDATE outbox.messages SET available_at = clock_timestamp() + interval '{seconds} seconds'")
        refusal = refused(engine, message_id)
        assert (refusal.why, refusal.until) == (Refusal.NOT_DUE, row(engine, message_id).available_at)
        assert refusal.seconds_left is not None
        assert told - 5 < refusal.seconds_left <= told
        assert refusal.seconds_left >= 1
        assert take_due(engine) == []
    make_due(engine)
    assert take(engine, message_id).waited >= 1


def test_a_message_that_is_held_is_refused_with_its_holder_and_the_rest_of_the_lease(engine: Engine) -> None:
    message_id = enqueue(engine)
    take(engine, message_id, holder="run 5", seconds=60)
    refusal = refused(engine, message_id)
    assert (refusal.why, refusal.holder) == (Refusal.HELD, "run 5")
    assert refusal.until == row(engine, message_id).lease_expires_at
    assert refusal.seconds_left is not None
    assert 50 < refusal.seconds_left <= 60


def test_whoever_is_refused_comes_back_after_a_second_at_least_and_one_lease_at_most(engine: Engine) -> None:
    message_id = enqueue(engine)
    take(engine, message_id)
    let_expire(engine, seconds_ago=-0.3)
    assert refused(engine, message_id).seconds_left == 1
    # By a kind whose lease was longer once.
    let_expire(engine, seconds_ago=-3_600)
    assert refused(engine, message_id, seconds=60).seconds_left == 60


def test_a_message_that_is_over_is_refused_with_its_outcome(engine: Engine) -> None:
    for outcome, final in (
        (AttemptOutcome.SUCCEEDED, "succeeded"),
        (AttemptOutcome.GIVEN_UP, "failed"),
        (AttemptOutcome.CANCELLED, "cancelled"),
    ):
        message_id = enqueue(engine)
        end(engine, take(engine, message_id), outcome)
        refusal = refused(engine, message_id)
        assert (refusal.why, refusal.outcome, refusal.seconds_left) == (Refusal.COMPLETED, final, None)


def test_an_unknown_message_and_one_of_another_kind_are_told_apart(engine: Engine) -> None:
    message_id = enqueue(engine, "other")
    assert refused(engine, 12345).why is Refusal.UNKNOWN
    assert refused(engine, message_id, kind=KIND).why is Refusal.OTHER_KIND
    assert row(engine, message_id).state == "Pending"


def test_an_expired_lease_is_taken_over_and_the_lost_attempt_is_in_the_ledger(engine: Engine) -> None:
    message_id = enqueue(engine)
    take(engine, message_id, holder="run 1")
    let_expire(engine)
    second = take(engine, message_id, holder="run 2")
    assert (second.attempt, second.claim) == (2, 2)
    (lost,) = ledger_rows(engine, message_id)
    assert (lost.claim, lost.attempt, lost.run_id, lost.outcome) == (1, 1, "run 1", "lost")
    assert "lease ended" in lost.error
    assert lost.started_at <= lost.finished_at
    assert row(engine, message_id).lost_leases == 1


def test_a_claim_that_waited_for_a_stale_worker_leaves_no_gap_in_the_ledger(engine: Engine) -> None:
    message_id = enqueue(engine)
    first = take(engine, message_id)
    let_expire(engine)
    with ThreadPoolExecutor(1) as threads:
        with engine.begin() as connection:
            assert note_progress(connection, first, "half way", 0.5)
            asked = threads.submit(take, engine, message_id)
            wait_until(lambda: waiting_for_locks(engine) == 1)
        assert asked.result().claim == 2
    assert ledger(engine, message_id) == [(1, 1, "lost")]
    assert row(engine, message_id).lost_leases == 1


def test_a_lease_that_ends_while_a_claim_waits_for_its_row_leaves_no_gap_either(engine: Engine) -> None:
    message_id = enqueue(engine)
    with ThreadPoolExecutor(1) as threads:
        with engine.begin() as connection:
            claim_message(connection, message_id, kind=KIND, holder="first", seconds=0.2, token=uuid4())
            asked = threads.submit(ask_for, engine, message_id)
            wait_until(lambda: waiting_for_locks(engine) == 1)
            ended = text("SELECT lease_expires_at <= clock_timestamp() FROM outbox.messages")
            wait_until(lambda: connection.execute(ended).scalar_one())
        answer = asked.result()
    assert isinstance(answer, NotClaimed)
    assert (answer.why, answer.holder, answer.seconds_left) == (Refusal.HELD, "first", 1)
    assert take(engine, message_id).claim == 2
    assert ledger(engine, message_id) == [(1, 1, "lost")]


def test_of_eight_that_claim_at_once_one_wins(engine: Engine) -> None:
    message_id = enqueue(engine)
    with ThreadPoolExecutor(8) as threads:
        with engine.begin() as connection:
            connection.execute(text("SELECT FROM outbox.messages FOR UPDATE"))
            asked = [threads.submit(ask_for, engine, message_id, holder=f"run {n}") for n in range(8)]
            wait_until(lambda: waiting_for_locks(engine) == 8)
        answers = [one.result() for one in asked]
    (winner,) = [one for one in answers if isinstance(one, Claimed)]
    assert row(engine, message_id).lease_token == winner.lease.token
    assert {one.why for one in answers if isinstance(one, NotClaimed)} == {Refusal.HELD}
    assert row(engine, message_id).processing_attempts == 1


# The same claim again


def test_a_claim_that_is_repeated_with_its_token_counts_once(engine: Engine) -> None:
    message_id, token = enqueue(engine), uuid4()
    first = take(engine, message_id, token=token)
    claimed_at = row(engine, message_id).claimed_at
    let_expire(engine, seconds_ago=-5)
    again = take(engine, message_id, token=token)
    assert (again.attempt, again.claim, again.lease.token) == (first.attempt, first.claim, token)
    found = row(engine, message_id)
    assert (found.processing_attempts, found.claims, found.claimed_at) == (1, 1, claimed_at)
    assert found.seconds_left > 50
    assert end(engine, again)
    assert ledger(engine, message_id) == [(1, 1, "succeeded")]


def test_a_claim_that_is_repeated_after_its_lease_ended_is_another(engine: Engine) -> None:
    message_id, token = enqueue(engine), uuid4()
    take(engine, message_id, token=token)
    let_expire(engine)
    assert take(engine, message_id, token=token).claim == 2
    assert ledger(engine, message_id) == [(1, 1, "lost")]


def test_a_claim_is_dropped_with_its_transaction(engine: Engine) -> None:
    message_id = enqueue(engine)
    with engine.connect() as connection:
        claim_message(connection, message_id, kind=KIND, holder="me", seconds=60, token=uuid4())
        connection.rollback()
    found = row(engine, message_id)
    assert (found.state, found.claims, found.processing_attempts) == ("Pending", 0, 0)


# The clock


@pytest.fixture(params=[600.0, -600.0], ids=["ahead", "behind"])
def wrong_clock(engine: Engine, request: pytest.FixtureRequest) -> Iterator[None]:
    """All clocks of this process are ten minutes off."""
    off, wall, monotonic, true_datetime = request.param, time.time, time.monotonic, datetime_module.datetime

    class WrongDatetime(true_datetime):  # type: ignore[valid-type,misc]
        @classmethod
        def now(cls, tz: datetime_module.tzinfo | None = None) -> datetime_module.datetime:
            return true_datetime.now(tz) + datetime_module.timedelta(seconds=off)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: wall() + off)
        patch.setattr(time, "monotonic", lambda: monotonic() + off)
        patch.setattr(datetime_module, "datetime", WrongDatetime)
        yield


@pytest.mark.usefixtures("wrong_clock")
def test_a_workers_wrong_clock_claims_nothing_early_and_takes_nothing_from_others(engine: Engine) -> None:
    message_id = enqueue(engine)
    first = take(engine, message_id)
    assert 50 < row(engine, message_id).seconds_left <= 60
    assert refused(engine, message_id).why is Refusal.HELD
    with engine.begin() as connection:
        assert settle(connection, [Settlement(first, AttemptOutcome.FAILED, "no", 90.0)], holder="me")
    assert 80 < row(engine, message_id).due_in <= 90
    assert refused(engine, message_id).why is Refusal.NOT_DUE
    assert take_due(engine) == []
    make_due(engine)
    (second,) = take_due(engine)
    assert 1 <= second.waited < 30
    found = row(engine, message_id)
    assert 50 < found.seconds_left <= 60
    assert abs((found.claimed_at - found.created_at).total_seconds()) < 60
