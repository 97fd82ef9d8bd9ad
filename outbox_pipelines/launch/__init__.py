"""Warm runs: Dagster runs in a tenth of a second, and its PostgreSQL storage on a pool.

Stands alone: ``dagster.yaml`` names these two classes, and nothing here knows of outboxes.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox_pipelines.launch.launcher import WarmRunLauncher
    from outbox_pipelines.launch.storage import PooledPostgresStorage

__all__ = ["PooledPostgresStorage", "WarmRunLauncher"]


def __getattr__(name: str) -> Any:
    if name == "PooledPostgresStorage":
        from outbox_pipelines.launch.storage import PooledPostgresStorage

        return PooledPostgresStorage
    if name == "WarmRunLauncher":
        from outbox_pipelines.launch.launcher import WarmRunLauncher

        return WarmRunLauncher
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
