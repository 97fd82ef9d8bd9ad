"""Drain transactional outboxes in PostgreSQL with Dagster, with proof.

The names below are the public API. They are loaded when first used: an application that
only enqueues does not import Dagster.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from outbox_pipelines.definitions import build_definitions
    from outbox_pipelines.training.enqueue import InvalidExample, copy_training, enqueue_training

__all__ = ["InvalidExample", "build_definitions", "copy_training", "enqueue_training"]

_HOMES = {
    "InvalidExample": "outbox_pipelines.training.enqueue",
    "build_definitions": "outbox_pipelines.definitions",
    "copy_training": "outbox_pipelines.training.enqueue",
    "enqueue_training": "outbox_pipelines.training.enqueue",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
