"""Leases: one holder at a time, and one that lost its lease can change nothing."""

import threading
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
from sqlalchemy import Engine, text

from outbox_pipelines.lease.lease import (
    Lease,
    LeasedTable,
    LeaseLost,
    Refused,
    Renewal,
    claim,
    fence,
    fence_parameters,
    lost,
    release,
    renew,
)
from outbox_pipelines.tenants.registry import Problem
from outbox_pipelines.training import outbox
from outbox_pipelines.training.delivery import DeadLetter, Delivered
from tests.lease.leased_things import THINGS, ask_for, let_expire, make_things, row, take, token, waiting_for_locks
from tests.outboxes import dead_letters, ledger_ids, new_tenant, status, wait_until, waiting_ids


def fenced_write(engine: Engine, lease: Lease) -> int:
    """Write something under the fence; says how many rows were written."""
    with engine.begin() as connection:
        done = connection.exec_driver_sql(
            f"""
            WITH held AS ({fence(THINGS, returning="id")})
            INSERT INTO written SELECT id FROM held WHERE EXISTS (SELECT FROM held)
            """,
            fence_parameters(lease),
        )
        return done.rowcount


def test_a_free_row_is_claimed_and_shows_its_holder(engine: Engine) -> None:
    make_things(engine, 1)
    with engine.begin() as connection:
        answer = claim(connection, THINGS, 1, holder="run 7", seconds=60, returning="work, id AS number")
    assert not isinstance(answer, Refused)
    lease, returned = answer
    assert (returned.work, returned.number) == ("untouched", 1)
    found = row(engine)
    assert (found.lease_token, found.lease_holder) == (lease.token, "run 7")
    assert 50 < found.seconds_left <= 60


def test_of_sixteen_that_claim_at_once_exactly_one_wins(engine: Engine) -> None:
    make_things(engine, 1)
    with ThreadPoolExecutor(16) as threads:
        with engine.begin() as connection:
            # All sixteen have begun and wait for the row when it is set free.
            connection.exec_driver_sql("SELECT FROM things FOR UPDATE")
            asked = [threads.submit(ask_for, engine, 1, holder=f"run {n}", seconds=60) for n in range(16)]
            wait_until(lambda: waiting_for_locks(engine) == 16)
        answers = [future.result() for future in asked]
    (winner,) = [answer for answer in answers if isinstance(answer, Lease)]
    assert token(engine) == winner.token
    holder = row(engine).lease_holder
    assert holder == f"run {answers.index(winner)}"
    refusals = [answer for answer in answers if isinstance(answer, Refused)]
    assert len(refusals) == 15
    for refused in refusals:
        assert refused.holder == holder
        assert refused.seconds_left is not None
        assert 1 <= refused.seconds_left <= 60


def test_two_that_claim_different_rows_do_not_wait_for_each_other(engine: Engine) -> None:
    make_things(engine, 1, 2)
    with engine.begin() as connection:
        claim(connection, THINGS, 1, holder="a", seconds=60)
        take(engine, 2, holder="b")


def test_every_claim_has_a_token_of_its_own_even_by_the_same_holder(engine: Engine) -> None:
    make_things(engine, 1)
    first = take(engine, holder="same host")
    let_expire(engine)
    assert take(engine, holder="same host").token != first.token


def test_a_lease_is_refused_until_it_ends_and_taken_over_afterwards(engine: Engine) -> None:
    make_things(engine, 1)
    first = take(engine, holder="first")
    assert isinstance(ask_for(engine, holder="second"), Refused)
    let_expire(engine)
    second = take(engine, holder="second")
    assert token(engine) == second.token != first.token
    assert row(engine).lease_holder == "second"


def test_a_claim_that_waited_until_the_other_lease_ended_is_granted(engine: Engine) -> None:
    make_things(engine, 1)
    with ThreadPoolExecutor(1) as threads:
        with engine.begin() as connection:
            claim(connection, THINGS, 1, holder="first", seconds=0.3)
            asked = threads.submit(ask_for, engine, 1, holder="second")
            wait_until(lambda: waiting_for_locks(engine) == 1)
            ended = text("SELECT lease_expires_at <= clock_timestamp() FROM things")
            wait_until(lambda: connection.execute(ended).scalar_one())
        # By the clock at the start of its transaction the first lease still ran.
        assert isinstance(asked.result(), Lease)


def test_a_claim_is_repeatable_with_the_same_token(engine: Engine) -> None:
    make_things(engine, 1)
    mine = uuid4()
    first = take(engine, token=mine, seconds=60)
    let_expire(engine, in_seconds=5)
    assert take(engine, token=mine, seconds=60) == first
    assert row(engine).seconds_left > 50
    assert isinstance(ask_for(engine), Refused)


@pytest.mark.parametrize(("rest", "expected"), [(0.9, 1.0), (20, 20), (60, 60), (3600, 60)])
def test_who_is_refused_is_told_to_come_back_after_the_rest_of_the_lease_between_1_s_and_one_lease(
    engine: Engine, rest: float, expected: float
) -> None:
    make_things(engine, 1)
    take(engine, holder="first")
    let_expire(engine, in_seconds=rest)
    refused = ask_for(engine, holder="second", seconds=60)
    assert isinstance(refused, Refused)
    assert refused.holder == "first"
    assert refused.seconds_left is not None
    assert expected - 10 < refused.seconds_left <= expected
    assert refused.seconds_left >= 1


def test_a_row_that_is_not_eligible_or_not_there_is_refused_without_a_holder(engine: Engine) -> None:
    make_things(engine, 1)
    assert ask_for(engine, only_if="NOT open") == Refused(None, None)
    assert ask_for(engine, 2) == Refused(None, None)
    assert token(engine) is None


def test_a_row_that_is_not_eligible_is_not_said_to_be_held_by_a_lease_that_ended(engine: Engine) -> None:
    make_things(engine, 1)
    take(engine, holder="died last week")
    let_expire(engine, in_seconds=-600_000)
    assert ask_for(engine, only_if="NOT open") == Refused(None, None)


def test_a_stale_holder_can_neither_renew_nor_release_nor_write(engine: Engine) -> None:
    make_things(engine, 1)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE written (id bigint)")
    stale = take(engine, holder="same host")
    assert fenced_write(engine, stale) == 1
    let_expire(engine)
    second = take(engine, holder="same host")
    before = row(engine)
    with engine.begin() as connection:
        assert renew(connection, [stale]) == Renewal(renewed=set(), lost={stale})
        with pytest.raises(LeaseLost, match=r"the lease on public\.things 1 is no longer ours.*nothing was written"):
            release(connection, stale, also_set="work = 'stale'")
    assert fenced_write(engine, stale) == 0
    after = row(engine)
    assert (after.lease_token, after.lease_expires_at, after.work) == (
        second.token,
        before.lease_expires_at,
        "untouched",
    )
    assert fenced_write(engine, second) == 1


def test_a_write_under_the_fence_and_a_takeover_do_not_cross(engine: Engine) -> None:
    make_things(engine, 1)
    stale = take(engine, holder="first")
    let_expire(engine)
    with ThreadPoolExecutor(1) as threads:
        with engine.begin() as connection:
            # The lease has ended, but the write began before anybody took over: it renews it.
            connection.exec_driver_sql(fence(THINGS, returning="id"), fence_parameters(stale)).one()
            asked = threads.submit(ask_for, engine, 1, holder="second")
            wait_until(lambda: waiting_for_locks(engine) == 1)
        assert isinstance(asked.result(), Refused)
    assert token(engine) == stale.token


def test_a_lease_that_ended_but_was_not_taken_is_kept_by_renewing(engine: Engine) -> None:
    make_things(engine, 1)
    lease = take(engine)
    let_expire(engine)
    with engine.begin() as connection:
        assert renew(connection, [lease]) == Renewal(renewed={lease}, lost=set())
    assert isinstance(ask_for(engine, holder="second"), Refused)


def test_renewing_extends_each_by_its_own_length_and_names_those_that_are_lost(engine: Engine) -> None:
    make_things(engine, 1, 2, 3, 2**40)
    short, stolen, freed = (take(engine, key, seconds=30) for key in (1, 2, 3))
    long = take(engine, 2**40, seconds=600)
    let_expire(engine)
    take(engine, 2)
    with engine.begin() as connection:
        release(connection, freed)
        assert renew(connection, [short, stolen, freed, long]) == Renewal({short, long}, {stolen, freed})
        assert renew(connection, []) == Renewal(set(), set())
    assert 20 < row(engine, 1).seconds_left <= 30
    assert 590 < row(engine, 2**40).seconds_left <= 600
    assert token(engine, 3) is None


def test_renewing_skips_a_row_that_somebody_has_locked_without_calling_it_lost(engine: Engine) -> None:
    make_things(engine, 1, 2, 3)
    free, locked, stolen = (take(engine, key) for key in (1, 2, 3))
    let_expire(engine)
    take(engine, 3)
    with engine.begin() as other:
        other.exec_driver_sql("SELECT FROM things WHERE id IN (2, 3) FOR UPDATE")
        with engine.begin() as connection:
            assert renew(connection, [free, locked, stolen]) == Renewal({free}, {stolen})
    with engine.begin() as connection:
        assert renew(connection, [locked]) == Renewal({locked}, set())


def test_keys_of_text_are_renewed_too(engine: Engine) -> None:
    table = LeasedTable("public.named", "name", "text")
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TABLE named (name text, lease_token uuid, lease_expires_at timestamptz, lease_holder text)"
        )
        connection.exec_driver_sql("INSERT INTO named (name) VALUES ('a')")
        claimed = claim(connection, table, "a", holder="me", seconds=60)
        assert not isinstance(claimed, Refused)
        assert renew(connection, [claimed[0]]).renewed == {claimed[0]}


def test_a_token_is_of_one_row_only(engine: Engine) -> None:
    make_things(engine, 1, 2)
    one, other = take(engine, 1), take(engine, 2)
    crossed = Lease(THINGS, 1, other.token, 60)
    with engine.begin() as connection:
        assert renew(connection, [crossed]).renewed == set()
        with pytest.raises(LeaseLost):
            release(connection, crossed)
    assert (token(engine, 1), token(engine, 2)) == (one.token, other.token)


def test_a_released_row_is_free_at_once_and_changed_in_the_same_step(engine: Engine) -> None:
    make_things(engine, 1)
    lease = take(engine)
    with engine.begin() as connection:
        release(connection, lease, also_set="work = :work", parameters={"work": "done"})
    found = row(engine)
    assert (found.lease_token, found.lease_expires_at, found.lease_holder, found.work) == (None, None, None, "done")
    with engine.begin() as connection, pytest.raises(LeaseLost):
        release(connection, lease)
    take(engine, holder="next")


def test_a_row_that_was_removed_is_lost(engine: Engine) -> None:
    make_things(engine, 1)
    lease = take(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM things")
        assert renew(connection, [lease]) == Renewal(set(), {lease})
        with pytest.raises(LeaseLost, match="or the row was removed"):
            release(connection, lease)
    assert "public.things 1" in str(lost(lease))


def test_a_claim_goes_with_the_callers_transaction(engine: Engine) -> None:
    make_things(engine, 1)
    with engine.connect() as connection:
        claim(connection, THINGS, 1, holder="me", seconds=60)
        connection.rollback()
    assert token(engine) is None


def test_many_claims_renewals_and_releases_at_once_never_let_two_in(engine: Engine) -> None:
    make_things(engine, 1)
    inside, entered = threading.Lock(), []

    def work(number: int) -> None:
        while True:
            lease = ask_for(engine, holder=f"run {number}")
            if isinstance(lease, Lease):
                break
        assert inside.acquire(blocking=False), "two hold the lease"
        entered.append(number)
        with engine.begin() as connection:
            assert renew(connection, [lease]).lost == set()
        inside.release()
        with engine.begin() as connection:
            release(connection, lease)

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(work, number) for number in range(24)]:
            done.result()
    assert sorted(entered) == list(range(24))


def test_a_stale_run_settles_nothing_and_releases_nothing(engine: Engine) -> None:
    tenant = new_tenant(engine, rows=4)
    stale, current = uuid4(), uuid4()
    with engine.begin() as connection:
        first = outbox.claim_tenant(connection, tenant, holder="stale", seconds=60, token=stale)
        assert isinstance(first, outbox.ClaimedTenant)
        connection.execute(text("UPDATE outbox.tenants SET lease_expires_at = clock_timestamp()"))
        second = outbox.claim_tenant(connection, tenant, holder="current", seconds=60, token=current)
        assert isinstance(second, outbox.ClaimedTenant)
    work = outbox.Unsettled(
        delivered=[Delivered(uuid4(), "key", [1, 2], 0.1)],
        dead=[DeadLetter(3, "bad")],
        failed_ids=[4],
        failure="unwell",
    )
    with engine.begin() as connection:
        with pytest.raises(LeaseLost):
            outbox.settle(connection, first.lease, tenant, work, run_id="stale")
        with pytest.raises(LeaseLost):
            outbox.release_well(connection, first.lease)
        with pytest.raises(LeaseLost):
            outbox.release_failed(connection, first.lease, outbox.Failure(Problem.UNWELL, "no", "no", 9, 9))
    assert waiting_ids(engine, tenant) == [1, 2, 3, 4]
    assert (ledger_ids(engine, tenant), dead_letters(engine, tenant)) == ([], {})
    found = status(engine, tenant)
    assert (found.lease_holder, found.failure_count, found.last_error) == ("current", 0, None)
    with engine.connect() as connection:
        attempts = f'SELECT max(attempts) FROM "{tenant.schema}".ml_outbox'
        assert connection.exec_driver_sql(attempts).scalar_one() == 0


def test_settling_twice_when_the_first_outcome_is_unknown_changes_nothing_more(engine: Engine) -> None:
    tenant = new_tenant(engine, rows=3)
    work = outbox.Unsettled(delivered=[Delivered(uuid4(), "key", [1, 2], 0.1)], dead=[DeadLetter(3, "bad\x00")])
    with engine.begin() as connection:
        claimed = outbox.claim_tenant(connection, tenant, holder="run", seconds=60, token=uuid4())
    assert isinstance(claimed, outbox.ClaimedTenant)
    for _ in range(2):
        with engine.begin() as connection:
            assert outbox.settle(connection, claimed.lease, tenant, work, run_id="run") is False
        assert ledger_ids(engine, tenant) == [1, 2]
        assert dead_letters(engine, tenant) == {3: "bad\ufffd"}
        assert waiting_ids(engine, tenant) == []
