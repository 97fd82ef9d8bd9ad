"""The wait after a failure: doubling, bounded, and not the same for all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_pipelines.lease.backoff import backoff_seconds

firsts = st.floats(0.1, 3600)


@given(st.integers(-5, 10**6), firsts, st.floats(0.1, 86_400))
def test_the_wait_is_within_a_quarter_below_the_doubled_and_capped_one(
    failures: int, first: float, maximum: float
) -> None:
    full = maximum if failures > 64 else min(first * 2 ** max(failures - 1, 0), maximum)
    wait = backoff_seconds(failures, first=first, maximum=maximum)
    assert full * 0.75 <= wait <= full


@pytest.fixture
def no_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest wait each time."""
    monkeypatch.setattr("random.uniform", lambda _low, high: high)


@pytest.mark.usefixtures("no_jitter")
def test_the_wait_doubles_from_the_first_up_to_the_maximum() -> None:
    assert [backoff_seconds(failures, first=10, maximum=300) for failures in range(1, 9)] == [
        *(10, 20, 40, 80, 160),
        *(300, 300, 300),
    ]


@pytest.mark.usefixtures("no_jitter")
def test_no_number_of_failures_is_too_many() -> None:
    assert backoff_seconds(10**9, first=0.1, maximum=86_400) == 86_400
    assert backoff_seconds(0, first=10, maximum=300) == 10


def test_those_who_failed_together_do_not_come_back_together() -> None:
    waits = {backoff_seconds(3, first=10, maximum=300) for _ in range(100)}
    assert len(waits) > 50
    assert max(waits) - min(waits) > 3
