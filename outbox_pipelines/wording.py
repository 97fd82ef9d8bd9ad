"""Numbers and durations as people read them, the same everywhere."""

from datetime import timedelta


def counted(count: int, noun: str) -> str:
    """``1 row``, ``4,210 rows``, ``3 batches``."""
    plural = f"{noun}es" if noun.endswith(("ch", "sh")) else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def spoken(duration: timedelta) -> str:
    """A duration in its larger unit: ``42 s``, ``7 min``, ``3 h``, ``2 days``."""
    seconds = max(int(duration.total_seconds()), 0)
    if seconds < 120:
        return f"{seconds} s"
    if seconds < 7200:
        return f"{seconds // 60} min"
    if seconds < 172_800:
        return f"{seconds // 3600} h"
    return f"{seconds // 86_400} days"


def spoken_seconds(seconds: float) -> str:
    """The same of a number of seconds."""
    return spoken(timedelta(seconds=seconds))
