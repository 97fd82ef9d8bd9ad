"""A set of ids kept as ranges: ids come mostly in order, so millions of them fit in a few numbers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable


class IdRanges:
    """A set of integers as sorted inclusive ranges. Any order of adding gives the same ranges.

    >>> ids = IdRanges()
    >>> [ids.add(7), ids.add(9), ids.add(8), ids.add(8)]
    [True, True, True, False]
    >>> ids.ranges()
    [(7, 9)]

    Raises ValueError when the ranges given are not sorted, disjoint and apart.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        self._count = 0
        for first, last in ranges:
            if first > last or (self._lasts and first <= self._lasts[-1] + 1):
                raise ValueError("id ranges must be sorted, disjoint and apart")
            self._firsts.append(first)
            self._lasts.append(last)
            self._count += last - first + 1

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._firsts, number) - 1
        return at >= 0 and number <= self._lasts[at]

    def __len__(self) -> int:
        """How many ids, not how many ranges."""
        return self._count

    def add(self, number: int) -> bool:
        """Adds an id; False when it was there already."""
        after = bisect_right(self._firsts, number)  # the first range that starts after the id
        before = after - 1
        if before >= 0 and number <= self._lasts[before]:
            return False
        joins_before = before >= 0 and self._lasts[before] == number - 1
        joins_after = after < len(self._firsts) and self._firsts[after] == number + 1
        if joins_before and joins_after:
            self._lasts[before] = self._lasts.pop(after)
            del self._firsts[after]
        elif joins_before:
            self._lasts[before] = number
        elif joins_after:
            self._firsts[after] = number
        else:
            self._firsts.insert(after, number)
            self._lasts.insert(after, number)
        self._count += 1
        return True

    def ranges(self) -> list[tuple[int, int]]:
        """First and last id of each range, ascending."""
        return list(zip(self._firsts, self._lasts, strict=True))
