"""A picture of a backlog over the last day."""

import io

import pandas as pd


def draw(history: pd.DataFrame, *, title: str) -> bytes:
    """How much waited, and the oldest for how long, as a PNG.

    Args:
        history: see :func:`~outbox_pipelines.upkeep.snapshot.history`.
        title: above the picture.
    """
    # Imported here: it takes half a second, and only these assets need it.
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained", dpi=90)
    above, below = figure.subplots(2, 1, sharex=True)
    times = history["taken_at"]
    above.set_title(title, fontsize=10, loc="left")
    for axes, values, label, color in (
        (above, history["waiting"], "waiting", "#3b6ea8"),
        (below, history["oldest_wait_seconds"].astype(float).fillna(0.0), "oldest wait (s)", "#b5532a"),
    ):
        axes.fill_between(times, values, step="post", alpha=0.25, color=color, linewidth=0)
        # Dots: a single snapshot is seen as well.
        axes.step(times, values, where="post", color=color, linewidth=1.2, marker="o", markersize=2.5)
        axes.set_ylabel(label, fontsize=8)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    locator = AutoDateLocator(tz="UTC")  # type: ignore[no-untyped-call]
    below.xaxis.set_major_locator(locator)
    below.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz="UTC"))  # type: ignore[no-untyped-call]
    below.set_xlabel("UTC", fontsize=8)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", pil_kwargs={"optimize": True})
    return picture.getvalue()
