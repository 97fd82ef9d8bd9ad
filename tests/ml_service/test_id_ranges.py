from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_pipelines.ml_service.id_ranges import IdRanges

# Close together, so that ranges meet and merge; far out, so that the int64 limits are tried too.
IDS = st.lists(st.integers(-20, 40) | st.sampled_from([-(2**63), 2**63 - 2, 2**63 - 1]), max_size=80)


@given(IDS)
def test_id_ranges_hold_what_a_plain_set_holds(numbers: list[int]) -> None:
    ids = IdRanges()
    plain: set[int] = set()
    for number in numbers:
        assert ids.add(number) is (number not in plain)
        plain.add(number)
        assert len(ids) == len(plain)
    assert {n for n in range(-25, 46) if n in ids} == {n for n in plain if -25 <= n < 46}
    assert all(number in ids for number in plain)


@given(IDS)
def test_ranges_are_sorted_and_never_touch(numbers: list[int]) -> None:
    ids = IdRanges()
    for number in numbers:
        ids.add(number)
    ranges = ids.ranges()
    assert all(first <= last for first, last in ranges)
    assert all(last + 1 < first for (_, last), (first, _) in pairwise(ranges))


@given(IDS, st.randoms(use_true_random=False))
def test_the_order_of_arrival_leaves_no_trace(numbers: list[int], chance: random.Random) -> None:
    in_order, shuffled = IdRanges(), IdRanges()
    for number in sorted(numbers):
        in_order.add(number)
    for number in chance.sample(numbers, len(numbers)):
        shuffled.add(number)
    assert shuffled.ranges() == in_order.ranges()
    assert IdRanges(in_order.ranges()).ranges() == in_order.ranges()
    assert len(IdRanges(in_order.ranges())) == len(in_order)


@pytest.mark.parametrize("ranges", [[(5, 4)], [(1, 3), (3, 5)], [(1, 3), (4, 5)], [(7, 9), (1, 2)]])
def test_ranges_that_no_set_would_give_are_refused(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="sorted, disjoint"):
        IdRanges(ranges)


def test_a_million_ids_in_order_take_one_range() -> None:
    ids = IdRanges()
    for number in range(1_000_000):
        ids.add(number)
    assert ids.ranges() == [(0, 999_999)]
