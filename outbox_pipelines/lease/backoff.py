"""How long to wait after a failure."""

import random


def backoff_seconds(failures: int, *, first: float, maximum: float) -> float:
    """Seconds to wait after the given number of failures in a row (1 or more).

    Doubles from ``first`` up to ``maximum``, less up to a quarter at random, so that those
    who failed together do not come back together.
    """
    exponent = min(max(failures, 1) - 1, 64)
    return min(first * 2.0**exponent, maximum) * random.uniform(0.75, 1.0)
