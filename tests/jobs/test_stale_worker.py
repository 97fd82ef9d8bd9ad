"""A worker that lost its lease: whatever it writes touches nothing, on another host or the same."""

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from outbox_pipelines.jobs.context import JobContext
from outbox_pipelines.jobs.message import AttemptOutcome, Claimed
from outbox_pipelines.jobs.outbox import expire, note_progress
from outbox_pipelines.lease.lease import LeaseLost, renew
from tests.jobs.messages import (
    APP_JOBS,
    add_app_jobs,
    app_job,
    end,
    enqueue,
    ledger,
    let_expire,
    make_app_jobs,
    row,
    take,
    take_due,
)


@pytest.mark.parametrize("holders", [("host a", "host b"), ("one host", "one host")], ids=["two hosts", "one host"])
@pytest.mark.parametrize("how", ["by id", "by a batch"])
def test_a_worker_that_lost_its_lease_changes_nothing(engine: Engine, holders: tuple[str, str], how: str) -> None:
    message_id = enqueue(engine)
    first = take(engine, message_id, holder=holders[0])
    let_expire(engine)
    if how == "by id":
        second = take(engine, message_id, holder=holders[1])
    else:
        with engine.begin() as connection:
            assert expire(connection) == [message_id]
        (second,) = take_due(engine, holder=holders[1])
    before = row(engine, message_id)

    for outcome in AttemptOutcome:
        assert not end(engine, first, outcome, "too late", holder=holders[0])
    with engine.begin() as connection:
        renewal = renew(connection, [first.lease])
        assert (renewal.renewed, renewal.lost) == (set(), {first.lease})
        assert not note_progress(connection, first, "still at it", 0.5)

    after = row(engine, message_id)
    assert (after.state, after.lease_token, after.lease_holder) == ("Processing", second.lease.token, holders[1])
    assert (after.lease_expires_at, after.last_error, after.step) == (before.lease_expires_at, None, None)
    assert ledger(engine, message_id) == [(1, 1, "lost")]
    assert end(engine, second)
    assert row(engine, message_id).outcome == "succeeded"
    assert ledger(engine, message_id) == [(1, 1, "lost"), (2, 2, "succeeded")]
    assert not end(engine, first)


def test_the_effect_of_a_stale_worker_is_rolled_back_and_that_of_the_new_one_is_there_once(engine: Engine) -> None:
    make_app_jobs(engine)
    (job,) = add_app_jobs(engine)
    message_id = enqueue(engine, job_id=job)

    def finish(claimed: Claimed) -> None:
        context = JobContext(claimed, engine=engine, domain=APP_JOBS, holder="me", on_progress=lambda _s, _f: None)
        with Session(engine) as session, session.begin():
            session.execute(text("UPDATE app.jobs SET status = 'done', message = coalesce(message, '') || 'once'"))
            context.complete_in(session)

    first = take(engine, message_id)
    let_expire(engine)
    second = take(engine, message_id)
    with pytest.raises(LeaseLost):
        finish(first)
    assert app_job(engine, job) == ("queued", None)
    finish(second)
    with pytest.raises(LeaseLost):
        finish(second)
    assert app_job(engine, job) == ("done", "once")


def test_a_lease_that_ended_is_still_the_workers_until_somebody_takes_it(engine: Engine) -> None:
    claimed = take(engine, enqueue(engine))
    let_expire(engine)
    assert end(engine, claimed)
    assert ledger(engine, claimed.message_id) == [(1, 1, "succeeded")]
