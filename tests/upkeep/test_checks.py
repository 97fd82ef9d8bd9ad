"""What is said of a backlog, with the numbers and the remedy."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pandas as pd
import pytest
from sqlalchemy import Engine

from outbox_pipelines.upkeep import checks
from outbox_pipelines.upkeep.checks import Finding, Severity
from tests.jobs.messages import enqueue, let_expire, run, take

NOW = datetime(2026, 5, 1, tzinfo=UTC)


def oldest_wait(**waits: float) -> Finding:
    return checks.oldest_wait(waits, "tenant", targets={}, default=300, remedy="do something")


# The oldest wait


def test_nobody_waits_too_long() -> None:
    found = oldest_wait(acme=12.0, idle=0.0)
    assert found.passed
    assert found.text == "the oldest wait is 12 s, within every target"
    assert found.numbers == {"oldest wait (s)": 12.0, "late": 0}
    assert oldest_wait().passed


def test_who_waits_too_long_is_named_the_worst_first() -> None:
    found = oldest_wait(acme=400.0, busy=301.0, fine=300.0)
    assert not found.passed
    assert found.severity is Severity.WARN
    assert found.text == (
        "2 tenants waited longer than the target allows: acme for 6 min (target 5 min), busy for 5 min (target 5 min); "
        "do something"
    )
    assert found.numbers == {"oldest wait (s)": 400.0, "late": 2}


def test_three_times_the_target_is_an_error() -> None:
    assert oldest_wait(acme=899.0).severity is Severity.WARN
    assert oldest_wait(acme=900.0).severity is Severity.ERROR


def test_a_group_has_a_target_of_its_own_and_the_first_that_fits_counts() -> None:
    waits = {"vip-1": 70.0, "vip-slow": 70.0, "acme": 70.0}
    targets = {"vip-slow": 3600.0, "vip-*": 60.0}
    found = checks.oldest_wait(waits, "tenant", targets=targets, default=300, remedy="do something")
    assert found.text.startswith("1 tenant waited longer than the target allows: vip-1 for 70 s (target 60 s);")


def test_a_thousand_late_tenants_are_counted_and_five_are_named() -> None:
    found = oldest_wait(**{f"t{number}": 1000.0 for number in range(1000)})
    assert found.text.startswith("1,000 tenants waited")
    assert found.text.count("target 5 min") == 5
    assert "and 995 more; do something" in found.text


# Leases


def test_a_lease_that_ended_long_ago_says_that_nobody_recovers(engine: Engine) -> None:
    held = take(engine, enqueue(engine))
    with engine.connect() as connection:
        assert checks.expired_leases(connection, older_than=120).passed
    let_expire(engine, held.message_id, seconds_ago=100)
    with engine.connect() as connection:
        found = checks.expired_leases(connection, older_than=120)
    assert found.passed
    assert found.text == "no lease ended more than 2 min ago"
    let_expire(engine, held.message_id, seconds_ago=600)
    with engine.connect() as connection:
        found = checks.expired_leases(connection, older_than=120)
    assert (found.passed, found.severity) == (False, Severity.ERROR)
    assert found.text.startswith(
        f"1 lease ended up to 10 min ago and nobody took the jobs back (the first is message {held.message_id}): "
        "turn job_recovery_sensor on"
    )
    assert found.numbers["expired leases"] == 1


# New dead letters


def test_new_dead_letters_are_told_of_with_whose_they_are() -> None:
    rows = pd.DataFrame({"tenant": ["a", "b", "c"], "died": [0, 7, 2]})
    found = checks.nothing_new_died(rows, "tenant", died="died", noun="dead letter", remedy="look")
    assert (found.passed, found.text) == (False, "9 new dead letters (b: 7, c: 2); look")
    assert found.numbers == {"new dead letters": 9}
    found = checks.nothing_new_died(rows.head(1), "tenant", died="died", noun="dead letter", remedy="look")
    assert (found.passed, found.text) == (True, "no new dead letter since the last look")


# Growth


def looks(engine: Engine, *counts: tuple[int, int, int], minutes: float = 5) -> None:
    """The history: waiting, arrived, drained, at looks some minutes apart, the last just now."""
    for place, (waiting, arrived, drained) in enumerate(counts):
        run(
            engine,
            """INSERT INTO outbox.job_backlog (taken_at, kind, waiting, scheduled, publishing, published, processing,
                                               parked, expired_leases, failed, gave_up, arrived, drained, seconds)
               VALUES (clock_timestamp() - make_interval(secs => :ago), '', :waiting, 0, 0, 0, 0, 0, 0, 0, 0,
                       :arrived, :drained, :seconds)""",
            ago=(len(counts) - 1 - place) * minutes * 60,
            waiting=waiting,
            arrived=arrived,
            drained=drained,
            seconds=minutes * 60,
        )


def keeps_up(engine: Engine) -> Finding:
    with engine.connect() as connection:
        return checks.keeps_up(connection, "job_backlog", remedy="add consumers")


def test_an_hour_in_which_less_left_than_came_is_told_of(engine: Engine) -> None:
    looks(engine, *[(number * 10 if number != 6 else 0, 30, 20) for number in range(1, 12)])
    found = keeps_up(engine)
    assert (found.passed, found.severity) == (False, Severity.WARN)
    assert found.text == "in 55 min 330 came and 220 left: 110 wait, and the backlog grows; add consumers"
    assert found.numbers == {"arrived": 330, "drained": 220, "hours": 0.92}


def test_a_backlog_that_grew_at_every_look_is_an_error(engine: Engine) -> None:
    looks(engine, *[(number * 10, 30, 20) for number in range(1, 12)])
    assert keeps_up(engine).severity is Severity.ERROR


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        ([(5, 30, 30)] * 11, "as many left as came"),
        ([(5, 30, 30)] * 10 + [(0, 30, 20)], "nothing waits now"),
        ([(5, 30, 0)] * 3, "too early"),
        ([], "no snapshot"),
    ],
)
def test_a_backlog_that_does_not_grow_is_no_finding(
    engine: Engine, counts: list[tuple[int, int, int]], why: str
) -> None:
    looks(engine, *counts)
    assert keeps_up(engine).passed, why


def test_what_was_more_than_an_hour_ago_counts_no_more(engine: Engine) -> None:
    looks(engine, *([(100, 100, 0)] * 5 + [(5, 10, 20)] * 12), minutes=5.1)
    found = keeps_up(engine)
    assert found.passed
    assert found.numbers["arrived"] == 120


# Retention


@pytest.mark.parametrize(("days", "passed"), [(None, True), (13.0, True), (15.9, True), (16.1, False)])
def test_what_is_kept_for_two_days_too_long_is_told_of(days: float | None, passed: bool) -> None:
    oldest: Any = None if days is None else NOW - timedelta(days=days)
    found = checks.retention_keeps_up(oldest, NOW, days=14, noun="completed message", remedy="purge it")
    assert found.passed is passed
    if days is None:
        assert found.text == "completed messages are kept for 14 days; none is that old"
    if not passed:
        assert found.text == ("the oldest completed message is 16.1 days old, and they are kept for 14 days: purge it")
