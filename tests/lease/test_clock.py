"""A worker's wrong clock changes nothing: every instant is the database's."""

import datetime as datetime_module
import time
from collections.abc import Callable, Iterator, Sequence
from uuid import uuid4

import pytest
from sqlalchemy import Engine, text

from outbox_pipelines.lease.heartbeat import Heartbeat
from outbox_pipelines.lease.lease import Lease, Refused, renew
from outbox_pipelines.settings import Settings
from outbox_pipelines.tenants.registry import Problem
from outbox_pipelines.training import outbox
from outbox_pipelines.training.backlog import Standing, look
from outbox_pipelines.training.outcome import Ending
from outbox_pipelines.training.sink import Batch, Health, OutboxRow, Verdict
from tests.lease.leased_things import ask_for, let_expire, make_things, row, take
from tests.outboxes import flush, ledger_ids, new_tenant, waiting_ids

TEN_MINUTES = 600.0

SetClock = Callable[[float], None]


@pytest.fixture
def set_clock(engine: Engine) -> Iterator[SetClock]:
    """Sets this process's wall clock off by some seconds, once the other fixtures are there and until they go."""
    true_time, true_datetime = time.time, datetime_module.datetime

    with pytest.MonkeyPatch.context() as patch:

        def set_off(seconds: float) -> None:
            class WrongDatetime(true_datetime):  # type: ignore[valid-type,misc]
                @classmethod
                def now(cls, tz: datetime_module.tzinfo | None = None) -> datetime_module.datetime:
                    return true_datetime.now(tz) + datetime_module.timedelta(seconds=seconds)

            patch.setattr(time, "time", lambda: true_time() + seconds)
            patch.setattr(datetime_module, "datetime", WrongDatetime)

        yield set_off


@pytest.fixture(params=[TEN_MINUTES, -TEN_MINUTES])
def wrong_clock(set_clock: SetClock, request: pytest.FixtureRequest) -> Iterator[None]:
    """All clocks of this process are ten minutes off."""
    true_monotonic = time.monotonic
    set_clock(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: true_monotonic() + request.param)
        yield


class AcceptingSink:
    """Accepts everything, without a deadline of its own; ``on_call`` happens during each call."""

    target = "the tests' own sink"
    max_call_bytes = 10**6

    def __init__(self, on_call: Callable[[], object] = lambda: None) -> None:
        self._on_call = on_call

    def call_bytes(self, rows: Sequence[OutboxRow]) -> int:
        return sum(len(row.example) for row in rows)

    def send(self, batch: Batch) -> Verdict:
        assert batch.rows
        self._on_call()
        return Verdict()

    def probe(self) -> Health:
        return Health(reachable=True, detail="")

    def close(self) -> None:
        pass


@pytest.mark.usefixtures("wrong_clock")
def test_no_lease_is_taken_early_or_held_too_long(engine: Engine) -> None:
    make_things(engine, 1)
    lease = take(engine, holder="first", seconds=60)
    assert 50 < row(engine).seconds_left <= 60
    refused = ask_for(engine, holder="second", seconds=60)
    assert isinstance(refused, Refused)
    assert refused.seconds_left is not None
    assert 50 < refused.seconds_left <= 60
    let_expire(engine, in_seconds=10)
    assert isinstance(ask_for(engine, holder="second", seconds=60), Refused)
    with engine.begin() as connection:
        assert renew(connection, [lease]).renewed == {lease}
    assert 50 < row(engine).seconds_left <= 60
    let_expire(engine)
    assert isinstance(ask_for(engine, holder="second", seconds=60), Lease)


@pytest.mark.usefixtures("wrong_clock")
def test_a_heartbeat_reports_no_loss_because_of_the_clock(engine: Engine) -> None:
    make_things(engine, 1)
    lease, losses = take(engine, seconds=60), []
    heartbeat = Heartbeat(engine, lease_seconds=60)
    heartbeat.hold(lease, lambda: losses.append(lease), asked_at=time.monotonic())
    let_expire(engine, in_seconds=1)
    heartbeat.beat()
    assert losses == []
    assert heartbeat.is_sure(lease)
    assert row(engine).seconds_left > 50


@pytest.mark.usefixtures("wrong_clock")
def test_a_backoff_ends_by_the_databases_clock(engine: Engine) -> None:
    tenant = new_tenant(engine, rows=1)
    with engine.begin() as connection:
        claimed = outbox.claim_tenant(connection, tenant, holder="run", seconds=60, token=uuid4())
        assert isinstance(claimed, outbox.ClaimedTenant)
    assert look(engine).tenants[0].standing is Standing.LEASED
    with engine.begin() as connection:
        outbox.release_failed(connection, claimed.lease, outbox.Failure(Problem.UNWELL, "no", "no", 1, 60))
    assert look(engine).tenants[0].standing is Standing.BACKING_OFF
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox.tenants SET next_attempt_at = clock_timestamp() - interval '1 s'"))
    assert look(engine).tenants[0].standing is Standing.DUE


@pytest.mark.usefixtures("wrong_clock")
def test_a_flush_respects_a_running_lease_and_takes_over_an_ended_one(engine: Engine, settings: Settings) -> None:
    tenant = new_tenant(engine, rows=250)
    with engine.begin() as connection:
        outbox.claim_tenant(connection, tenant, holder="other", seconds=120, token=uuid4())
    report = flush(engine, settings, tenant, sink=AcceptingSink())
    assert report.tenants[0].ending is Ending.TAKEN
    assert waiting_ids(engine, tenant) == list(range(1, 251))
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox.tenants SET lease_expires_at = clock_timestamp()"))
    report = flush(engine, settings, tenant, sink=AcceptingSink())
    assert report.tenants[0].ending is Ending.EMPTIED
    assert 0 <= report.seconds < 60
    assert ledger_ids(engine, tenant) == list(range(1, 251))


@pytest.mark.parametrize("step", [TEN_MINUTES, -TEN_MINUTES])
def test_a_clock_that_steps_during_a_run_changes_nothing(
    engine: Engine, settings: Settings, set_clock: SetClock, step: float
) -> None:
    tenant = new_tenant(engine, rows=250)
    calls: list[int] = []

    def step_once() -> None:
        calls.append(len(calls))
        if len(calls) == 3:
            set_clock(step)

    report = flush(engine, settings, tenant, sink=AcceptingSink(step_once))
    assert report.tenants[0].ending is Ending.EMPTIED
    assert 0 <= report.seconds < 60
    assert ledger_ids(engine, tenant) == list(range(1, 251))
    with engine.connect() as connection:
        off = text("SELECT max(abs(extract(epoch FROM clock_timestamp() - delivered_at))) FROM outbox.training_ledger")
        assert connection.execute(off).scalar_one() < 60
