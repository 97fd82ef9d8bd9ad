"""The heartbeat: keeps what can be kept, survives what passes, and reports a loss once."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import pytest
from sqlalchemy import Engine, event, text

from outbox_pipelines.database.engine import open_engine
from outbox_pipelines.lease import heartbeat as module
from outbox_pipelines.lease.heartbeat import Heartbeat, heartbeat_interval
from outbox_pipelines.lease.lease import Lease, Refused, release
from outbox_pipelines.settings import Settings
from tests.lease.leased_things import ask_for, let_expire, make_things, row, take, token, waiting_for_locks
from tests.outboxes import wait_until

MakeSettings = Callable[..., Settings]


class Clock:
    """A monotonic clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The heartbeat's clock in the test's hand."""
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


@pytest.fixture
def away() -> Iterator[Engine]:
    """An engine whose server never answers."""
    engine = open_engine(Settings(), "postgresql:///none?host=/not/there", application_name="tests")
    yield engine
    engine.dispose()


class Losses(list[Lease]):
    """What a heartbeat reported."""

    def watch(self, heartbeat: Heartbeat, *leases: Lease) -> None:
        """Hold leases that were claimed just now."""
        for lease in leases:
            heartbeat.hold(lease, partial(self.append, lease), asked_at=module.time.monotonic())  # type: ignore[attr-defined]


def test_a_beat_renews_everything_that_is_held_and_nothing_else(engine: Engine) -> None:
    make_things(engine, 1, 2, 3, 4)
    held, dropped, longer = take(engine, 1), take(engine, 2), take(engine, 3, seconds=600)
    never = take(engine, 4)
    heartbeat, losses = Heartbeat(engine, lease_seconds=60), Losses()
    losses.watch(heartbeat, held, dropped, longer)
    heartbeat.drop(dropped)
    heartbeat.drop(never)
    let_expire(engine, in_seconds=5)
    heartbeat.beat()
    lefts = [row(engine, key).seconds_left for key in (1, 2, 3, 4)]
    assert 50 < lefts[0] <= 60
    assert 590 < lefts[2] <= 600
    assert lefts[1] <= 5
    assert lefts[3] <= 5
    assert losses == []


def test_a_lost_lease_is_reported_once_and_the_others_are_kept(engine: Engine) -> None:
    make_things(engine, 1, 2, 3)
    kept, stolen, released = (take(engine, key) for key in (1, 2, 3))
    heartbeat, losses = Heartbeat(engine, lease_seconds=60), Losses()
    losses.watch(heartbeat, kept, stolen, released)
    let_expire(engine)
    thief = take(engine, 2, holder="thief")
    with engine.begin() as connection:
        release(connection, released)
    for _ in range(3):
        heartbeat.beat()
    assert sorted(losses, key=lambda lease: lease.key) == [stolen, released]
    assert (token(engine, 1), token(engine, 2), token(engine, 3)) == (kept.token, thief.token, None)
    assert row(engine, 1).seconds_left > 50


def test_a_beat_without_leases_asks_the_database_nothing(away: Engine, caplog: pytest.LogCaptureFixture) -> None:
    Heartbeat(away, lease_seconds=60).beat()
    assert caplog.records == []


def test_a_beat_whose_connection_is_cut_is_survived(
    engine: Engine, settings: Settings, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_things(engine, 1)
    lease, losses = take(engine), Losses()
    own = open_engine(settings, database_url, application_name="heartbeat to be cut")
    heartbeat = Heartbeat(own, lease_seconds=60)
    losses.watch(heartbeat, lease)
    with engine.begin() as connection:
        connection.exec_driver_sql("LOCK TABLE things")
        beat = threading.Thread(target=heartbeat.beat)
        beat.start()
        wait_until(lambda: waiting_for_locks(engine) == 1)
        cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'heartbeat to be cut'"
        connection.execute(text(cut))
        beat.join()
    assert "a heartbeat failed and will be tried again: OperationalError" in caplog.text
    let_expire(engine, in_seconds=5)
    heartbeat.beat()
    assert losses == []
    assert row(engine).seconds_left > 50
    own.dispose()


def test_a_row_that_somebody_has_locked_costs_no_lease(engine: Engine) -> None:
    make_things(engine, 1, 2)
    locked, free = take(engine, 1), take(engine, 2)
    heartbeat, losses = Heartbeat(engine, lease_seconds=60), Losses()
    losses.watch(heartbeat, locked, free)
    let_expire(engine, in_seconds=5)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE things SET work = 'long' WHERE id = 1")
        heartbeat.beat()
    assert losses == []
    assert [row(engine, key).seconds_left > 50 for key in (1, 2)] == [False, True]
    heartbeat.beat()
    assert losses == []
    assert row(engine, 1).seconds_left > 50


def test_a_beat_that_waits_in_vain_for_the_table_is_survived(
    engine: Engine, make_settings: MakeSettings, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_things(engine, 1)
    lease, losses = take(engine), Losses()
    own = open_engine(make_settings(lock_timeout=0.1), database_url, application_name="tests")
    heartbeat = Heartbeat(own, lease_seconds=60)
    losses.watch(heartbeat, lease)
    with engine.begin() as connection:
        connection.exec_driver_sql("LOCK TABLE things")
        heartbeat.beat()
    assert "a heartbeat failed" in caplog.text
    let_expire(engine, in_seconds=5)
    heartbeat.beat()
    assert losses == []
    assert row(engine).seconds_left > 50
    own.dispose()


def test_when_all_beats_fail_a_lease_is_relied_on_for_its_length_and_no_longer(
    engine: Engine, away: Engine, clock: Clock
) -> None:
    make_things(engine, 1, 2)
    short, long = take(engine, 1, seconds=60), take(engine, 2, seconds=600)
    heartbeat, losses = Heartbeat(away, lease_seconds=60), Losses()
    losses.watch(heartbeat, short, long)
    for passed, expected in ((20, [True, True]), (59.9, [True, True]), (60, [False, True]), (600, [False, False])):
        clock.now = 1000 + passed
        heartbeat.beat()
        assert [heartbeat.is_sure(lease) for lease in (short, long)] == expected


def test_a_lease_is_not_relied_on_past_its_length_while_a_beat_hangs(
    engine: Engine, away: Engine, clock: Clock
) -> None:
    make_things(engine, 1)
    lease = take(engine)
    heartbeat, losses = Heartbeat(away, lease_seconds=60), Losses()
    losses.watch(heartbeat, lease)
    seen = []

    @event.listens_for(away, "do_connect")
    def hang(*_: object) -> None:
        seen.append(heartbeat.is_sure(lease))
        clock.now += 45
        seen.append(heartbeat.is_sure(lease))

    clock.now += 20
    heartbeat.beat()
    assert seen == [True, False]


def test_the_length_counts_from_when_the_last_good_renewal_was_asked_for(engine: Engine, clock: Clock) -> None:
    make_things(engine, 1)
    lease = take(engine)
    heartbeat = Heartbeat(engine, lease_seconds=60)
    heartbeat.hold(lease, lambda: None, asked_at=clock.now - 10)
    clock.now += 49
    assert heartbeat.is_sure(lease)
    clock.now += 1
    assert not heartbeat.is_sure(lease)
    heartbeat.beat()
    assert heartbeat.is_sure(lease)
    heartbeat.renewed(lease, asked_at=clock.now + 30)
    # An answer that comes late does not shorten what a later one gave.
    heartbeat.renewed(lease, asked_at=clock.now - 30)
    clock.now += 89
    assert heartbeat.is_sure(lease)
    clock.now += 1
    assert not heartbeat.is_sure(lease)


def test_a_lease_that_is_not_held_or_was_lost_is_not_relied_on(engine: Engine) -> None:
    make_things(engine, 1, 2)
    dropped, stolen = take(engine, 1), take(engine, 2)
    heartbeat, losses = Heartbeat(engine, lease_seconds=60), Losses()
    assert not heartbeat.is_sure(dropped)
    losses.watch(heartbeat, dropped, stolen)
    assert heartbeat.is_sure(dropped)
    heartbeat.drop(dropped)
    let_expire(engine)
    take(engine, 2)
    heartbeat.beat()
    assert not heartbeat.is_sure(dropped)
    assert not heartbeat.is_sure(stolen)


def test_a_lease_is_kept_while_its_work_burns_the_processor_for_longer_than_it_lasts(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHORTEST_INTERVAL_SECONDS", 0.1)
    make_things(engine, 1)
    lease, losses = take(engine, seconds=0.8), Losses()
    ends_at = time.monotonic() + 2.4
    with Heartbeat(engine, lease_seconds=0.3) as heartbeat:
        losses.watch(heartbeat, lease)
        while time.monotonic() < ends_at:
            sum(range(10_000))
        assert isinstance(ask_for(engine, holder="second", seconds=0.8), Refused)
    assert losses == []
    assert token(engine) == lease.token


def test_after_the_block_nothing_is_renewed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHORTEST_INTERVAL_SECONDS", 0.01)
    make_things(engine, 1)
    with Heartbeat(engine, lease_seconds=0.03) as heartbeat:
        heartbeat.hold(take(engine), lambda: None, asked_at=time.monotonic())
        let_expire(engine, in_seconds=5)
        wait_until(lambda: row(engine).seconds_left > 50)
    assert [thread.name for thread in threading.enumerate() if thread.name == "lease-heartbeat"] == []


def test_leaving_does_not_wait_for_the_next_beat(engine: Engine) -> None:
    began = time.monotonic()
    with Heartbeat(engine, lease_seconds=86_400):
        pass
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(("lease", "interval"), [(10, 5), (15, 5), (30, 10), (120, 40)])
def test_beats_come_three_to_a_lease_and_never_closer_than_5_s(lease: float, interval: float) -> None:
    assert heartbeat_interval(lease) == interval
