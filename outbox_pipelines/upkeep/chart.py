"""A picture of a backlog over the last day."""

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Imported where it is used: every run loads the code location, and few need it.
    import pandas as pd


_COLORS = 24
_DOTS = 12
"""Snapshots up to which each is seen as a dot."""


def draw(history: "pd.DataFrame", *, title: str) -> bytes:
    """How much waited, and the oldest for how long, as a PNG.

    Args:
        history: see :func:`~outbox_pipelines.upkeep.snapshot.history`.
        title: above the picture.
    """
    # Imported here: it takes half a second, and only these assets need it.
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(8, 3.2), layout="constrained", dpi=90)
    above, below = figure.subplots(2, 1, sharex=True)
    times = history["taken_at"]
    marker = "o" if len(history) <= _DOTS else ""
    above.set_title(title, fontsize=10, loc="left")
    for axes, values, label, color in (
        (above, history["waiting"], "waiting", "#3b6ea8"),
        (below, history["oldest_wait_seconds"].astype(float).fillna(0.0), "oldest wait (s)", "#b5532a"),
    ):
        axes.fill_between(times, values, step="post", alpha=0.25, color=color, linewidth=0)
        # Dots: a single snapshot is seen as well.
        axes.step(times, values, where="post", color=color, linewidth=1.2, marker=marker, markersize=3)
        axes.set_ylabel(label, fontsize=8)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    locator = AutoDateLocator(tz="UTC")  # type: ignore[no-untyped-call]
    below.xaxis.set_major_locator(locator)
    below.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz="UTC"))  # type: ignore[no-untyped-call]
    below.set_xlabel("UTC", fontsize=8)
    drawn, picture = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    # A third of the size: every materialization keeps one in Dagster's event log.
    Image.open(drawn).convert("RGB").quantize(_COLORS).save(picture, format="png", optimize=True)
    return picture.getvalue()
