"""Claiming what is due: by priority, then age; past what others have locked; and with the care that is needed."""

import datetime
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, text

from outbox_pipelines.jobs.message import AttemptOutcome, Care
from outbox_pipelines.jobs.outbox import claimed_under
from outbox_pipelines.lease.lease import renew
from tests.jobs.messages import (
    KIND,
    complete,
    end,
    enqueue,
    enqueue_many,
    ledger,
    let_expire,
    make_due,
    row,
    run,
    set_state,
    states,
    take,
    take_due,
)


def ids(engine: Engine, kind: str = KIND, **how: Any) -> list[int]:
    """The ids that a claim takes, in its order."""
    return [claimed.message_id for claimed in take_due(engine, kind, **how)]


def lose(engine: Engine, message_id: int, times: int = 1) -> None:
    """Let so many claims of a message have been lost."""
    run(
        engine,
        "UPDATE outbox.messages SET lost_leases = :n, processing_attempts = :n, claims = :n WHERE message_id = :id",
        n=times,
        id=message_id,
    )


def test_the_most_urgent_are_claimed_first_and_of_one_priority_the_oldest(engine: Engine) -> None:
    long_ago = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)
    late = enqueue(engine, priority=0)
    urgent = enqueue(engine, priority=5)
    old = enqueue(engine, run_at=long_ago + datetime.timedelta(days=1))
    least = enqueue(engine, priority=-1, run_at=long_ago)
    twins = enqueue_many(engine, 2, run_at=long_ago)
    expected = [urgent, *twins, old, late, least]
    assert ids(engine, limit=3) == expected[:3]
    assert ids(engine, limit=3) == expected[3:]
    assert ids(engine) == []


def test_only_messages_of_the_kind_that_wait_and_are_due_are_claimed(engine: Engine) -> None:
    due = enqueue(engine)
    enqueue(engine, "other")
    enqueue(engine, run_at=datetime.datetime(2040, 1, 1, tzinfo=datetime.UTC))
    for state in ("Publishing", "Published", "Processing", "Completed"):
        set_state(engine, enqueue(engine), state)
    # Not even an expired one: recovery gives it back first, with its line in the ledger.
    let_expire(engine)
    before = states(engine)
    (claimed,) = take_due(engine, holder="worker 1", seconds=30)
    assert (claimed.message_id, claimed.attempt, claimed.claim, claimed.care) == (due, 1, 1, Care.NONE)
    assert states(engine) == {**before, due: "Processing"}
    found = row(engine, due)
    assert (found.lease_holder, found.lease_token) == ("worker 1", claimed.lease.token)
    assert 25 < found.seconds_left <= 30


def test_all_of_one_claim_have_its_token_and_are_ended_one_by_one(engine: Engine) -> None:
    enqueue_many(engine, 3)
    token = uuid4()
    claimed = take_due(engine, token=token)
    assert {one.lease.token for one in claimed} == {token}
    assert end(engine, claimed[1])
    assert list(states(engine).values()) == ["Processing", "Completed", "Processing"]


def test_leases_of_kinds_that_say_their_seconds_in_other_types_are_renewed_together(engine: Engine) -> None:
    enqueue(engine, "whole")
    enqueue(engine, "broken")
    one = enqueue(engine, "by id")
    taken = take_due(engine, "whole", seconds=60) + take_due(engine, "broken", seconds=60.5)
    leases = {claimed.lease for claimed in [*taken, take(engine, one, kind="by id", seconds=60)]}
    # As they come to the process that keeps them.
    told = {replace(lease, seconds=json.loads(json.dumps(lease.seconds))) for lease in leases}
    with engine.begin() as connection:
        assert renew(connection, told).renewed == leases


def test_what_another_transaction_has_locked_is_passed_by(engine: Engine) -> None:
    first, second = enqueue_many(engine, 2)
    with engine.begin() as connection:
        connection.execute(text("SELECT FROM outbox.messages WHERE message_id = :id FOR UPDATE"), {"id": first})
        assert ids(engine, limit=1) == [second]
    assert ids(engine) == [first]


def test_claims_at_once_share_the_messages_out(engine: Engine) -> None:
    made = enqueue_many(engine, 400)
    start = threading.Barrier(4)

    def claim_all(_: int) -> list[int]:
        start.wait(20)
        mine: list[int] = []
        while batch := ids(engine, limit=7):
            mine += batch
        return mine

    with ThreadPoolExecutor(4) as threads:
        shares = list(threads.map(claim_all, range(4)))
    assert sorted(message_id for share in shares for message_id in share) == made
    assert {row(engine, message_id).claims for message_id in made[::40]} == {1}


def test_a_claim_whose_answer_was_lost_is_found_by_its_token(engine: Engine) -> None:
    made = enqueue_many(engine, 3)
    token = uuid4()
    taken = take_due(engine, limit=2, token=token)
    with engine.connect() as connection:
        found = claimed_under(connection, KIND, token=token, seconds=60)
        assert claimed_under(connection, "other", token=token, seconds=60) == []
        assert claimed_under(connection, KIND, token=uuid4(), seconds=60) == []
    assert sorted(one.message_id for one in found) == made[:2]
    assert {(one.lease, one.attempt, one.claim) for one in found} == {
        (one.lease, one.attempt, one.claim) for one in taken
    }
    assert {one.care for one in found} == {Care.AT_ONCE}
    complete_first = end(engine, found[0])
    assert complete_first
    with engine.connect() as connection:
        assert [one.message_id for one in claimed_under(connection, KIND, token=token, seconds=60)] == [
            found[1].message_id
        ]


# Care: which claims may wait in a worker's memory


def test_the_care_follows_from_lost_claims_and_the_attempts_that_are_left(engine: Engine) -> None:
    expected = {
        # lost claims, attempts before: care
        (0, 0): Care.NONE,
        (0, 3): Care.NONE,
        (0, 4): Care.AT_ONCE,
        (1, 1): Care.AT_ONCE,
        (1, 4): Care.ALONE,
        (2, 2): Care.ALONE,
        (3, 4): Care.ALONE,
        (0, 9): Care.AT_ONCE,
    }
    for (lost, attempts_before), care in expected.items():
        message_id = enqueue(engine)
        lose(engine, message_id, lost)
        run(
            engine,
            "UPDATE outbox.messages SET processing_attempts = :n WHERE message_id = :id",
            n=attempts_before,
            id=message_id,
        )
        (claimed,) = take_due(engine, attempts=5)
        assert (claimed.message_id, claimed.care) == (message_id, care)
        assert claimed.attempt == attempts_before + 1


def test_a_kind_with_one_attempt_never_waits_in_memory(engine: Engine) -> None:
    enqueue_many(engine, 3)
    assert ids(engine, ready=0, attempts=1) == []
    assert [one.care for one in take_due(engine, ready=2, attempts=1)] == [Care.AT_ONCE] * 2


def test_careful_claims_are_no_more_than_consumers_are_free_and_come_first(engine: Engine) -> None:
    careful = enqueue_many(engine, 3)
    for message_id in careful:
        lose(engine, message_id)
    urgent = enqueue(engine, priority=5)
    others = enqueue_many(engine, 2)
    taken = take_due(engine, ready=2)
    assert [one.message_id for one in taken] == [*careful[:2], urgent, *others]
    assert ids(engine, ready=0) == []
    assert ids(engine, ready=1) == careful[2:]


def test_of_those_that_may_kill_one_at_a_time_is_claimed(engine: Engine) -> None:
    killers = enqueue_many(engine, 3)
    for message_id in killers:
        lose(engine, message_id, 2)
    other = enqueue(engine)
    assert ids(engine, alone=True) == [killers[0], other]
    assert ids(engine, alone=False) == []
    assert ids(engine, alone=True, ready=0) == []
    assert ids(engine, alone=True, ready=1) == killers[1:2]


def test_together_the_careful_ones_are_no_more_than_consumers_are_free(engine: Engine) -> None:
    killer, lost_once = enqueue_many(engine, 2)
    lose(engine, killer, 2)
    lose(engine, lost_once)
    assert ids(engine, ready=1) == [killer]
    assert ids(engine, ready=1, alone=False) == [lost_once]


@pytest.mark.parametrize(("times", "how"), [(2, {"alone": False}), (1, {"ready": 0}), (2, {"ready": 0})])
def test_those_that_must_wait_hold_up_none_of_the_others(engine: Engine, times: int, how: dict[str, Any]) -> None:
    # More of them than a claim takes, and all of them before the rest.
    for message_id in enqueue_many(engine, 20, priority=1):
        lose(engine, message_id, times)
    others = enqueue_many(engine, 3)
    assert ids(engine, limit=3, **how) == others


def test_a_message_that_was_given_back_needs_no_more_care_than_before(engine: Engine) -> None:
    message_id = enqueue(engine)
    for _ in range(7):
        (claimed,) = take_due(engine)
        assert (claimed.attempt, claimed.care) == (1, Care.NONE)
        end(engine, claimed, AttemptOutcome.INTERRUPTED, "stopped")
    assert len(ledger(engine, message_id)) == 7
    make_due(engine)
    complete(engine, message_id)
