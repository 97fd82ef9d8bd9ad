"""Drain transactional outboxes in PostgreSQL with Dagster, with proof.

The names below are the public API. They are loaded when first used: an application that
only enqueues does not import Dagster.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from outbox_pipelines.definitions import build_definitions
    from outbox_pipelines.jobs.context import GiveUp, JobContext
    from outbox_pipelines.jobs.domain import Domain, TableDomain
    from outbox_pipelines.jobs.enqueue import InvalidJob, NewJob, enqueue_job, enqueue_jobs
    from outbox_pipelines.jobs.kinds import Backoff, JobKind
    from outbox_pipelines.lease.lease import LeaseLost
    from outbox_pipelines.training.enqueue import InvalidExample, copy_training, enqueue_training

__all__ = [
    "Backoff",
    "Domain",
    "GiveUp",
    "InvalidExample",
    "InvalidJob",
    "JobContext",
    "JobKind",
    "LeaseLost",
    "NewJob",
    "TableDomain",
    "build_definitions",
    "copy_training",
    "enqueue_job",
    "enqueue_jobs",
    "enqueue_training",
]

_HOMES = {
    "Backoff": "outbox_pipelines.jobs.kinds",
    "Domain": "outbox_pipelines.jobs.domain",
    "GiveUp": "outbox_pipelines.jobs.context",
    "InvalidExample": "outbox_pipelines.training.enqueue",
    "InvalidJob": "outbox_pipelines.jobs.enqueue",
    "JobContext": "outbox_pipelines.jobs.context",
    "JobKind": "outbox_pipelines.jobs.kinds",
    "LeaseLost": "outbox_pipelines.lease.lease",
    "NewJob": "outbox_pipelines.jobs.enqueue",
    "TableDomain": "outbox_pipelines.jobs.domain",
    "build_definitions": "outbox_pipelines.definitions",
    "copy_training": "outbox_pipelines.training.enqueue",
    "enqueue_job": "outbox_pipelines.jobs.enqueue",
    "enqueue_jobs": "outbox_pipelines.jobs.enqueue",
    "enqueue_training": "outbox_pipelines.training.enqueue",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
