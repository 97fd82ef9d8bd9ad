"""What the upkeep assets show of themselves in Dagster: numbers, tables, a picture."""

from base64 import b64encode
from math import isnan
from typing import TYPE_CHECKING, Any

import dagster as dg
from dagster import MetadataValue
from sqlalchemy import Engine

from outbox_pipelines.upkeep.chart import draw
from outbox_pipelines.upkeep.retention import PurgedDay
from outbox_pipelines.upkeep.snapshot import Snapshot, history

if TYPE_CHECKING:
    # Imported where it is used: every run loads the code location, and few need it.
    import pandas as pd

_TABLE_ROWS = 100
_CHART_HOURS = 24.0


def purge_metadata(day: PurgedDay) -> dict[str, Any]:
    """Of a day's purge."""
    return {
        "rows deleted": day.purged.rows,
        "batches": day.purged.batches,
        "rows left locked": day.purged.left,
        "seconds": round(day.purged.seconds, 3),
        **({"oldest row left": MetadataValue.timestamp(day.oldest_left)} if day.oldest_left is not None else {}),
        **({"archive": MetadataValue.path(str(day.archives[0].path))} if len(day.archives) == 1 else {}),
        **({"archive sha256": day.archives[0].sha256} if len(day.archives) == 1 else {}),
        **({"archives": _archives_table(day)} if len(day.archives) > 1 else {}),
    }


def _archives_table(day: PurgedDay) -> MetadataValue:
    return MetadataValue.table(
        [
            dg.TableRecord({"path": str(one.path), "rows": one.rows, "sha256": one.sha256})
            for one in day.archives[:_TABLE_ROWS]
        ]
    )


def backlog_metadata(engine: Engine, name: str, snapshot: Snapshot) -> dict[str, Any]:
    """Of a snapshot: numbers that the UI plots over time, the worst lines, the last day as a picture."""
    with engine.connect() as connection:
        past = history(connection, name, hours=_CHART_HOURS)
    picture = b64encode(draw(past, title=f"{name}, the last {_CHART_HOURS:g} h")).decode()
    each = "tenant" if name == "training_backlog" else "kind"
    numbers = {_label(column): round(float(value), 3) for column, value in snapshot.total.items() if not isnan(value)}
    worst = snapshot.rows.sort_values("oldest_wait_seconds", ascending=False, na_position="last")
    return {
        # In the order in which somebody looks; nothing waits when there is no oldest wait.
        "waiting": numbers["waiting"],
        "oldest wait (s)": numbers.get("oldest wait (s)", 0.0),
        "last 24 hours": MetadataValue.md(f"![waiting and oldest wait](data:image/png;base64,{picture})"),
        f"by {each}": _table(worst.drop(columns="tenant_id", errors="ignore").head(_TABLE_ROWS)),
        f"{each}s shown": f"{min(len(worst), _TABLE_ROWS):,} of {len(worst):,}, those that wait longest first",
        **numbers,
    }


def _table(frame: "pd.DataFrame") -> MetadataValue:
    numeric = {column for column in frame.columns if frame[column].dtype.kind in "if"}
    schema = dg.TableSchema(
        [dg.TableColumn(_label(column), "float" if column in numeric else "string") for column in frame.columns]
    )
    records = [
        dg.TableRecord({_label(column): _cell(value) for column, value in line.items()})
        for line in frame.to_dict("records")
    ]
    return MetadataValue.table(records, schema)


def _cell(value: Any) -> str | float:
    if isinstance(value, float):
        return "" if isnan(value) else round(value, 3)
    return str(value)


_LABELS = {
    "oldest_wait_seconds": "oldest wait (s)",
    "arrival_rate": "arrival rate (1/s)",
    "drain_rate": "drain rate (1/s)",
    "seconds_to_drain": "time to drain (s)",
    "died": "new dead letters",
    "gave_up": "newly given up",
}


def _label(column: object) -> str:
    return _LABELS.get(str(column), str(column).replace("_", " "))
