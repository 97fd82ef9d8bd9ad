"""What a reading says of health, as JSON: nothing in it is secret, of a payload, or of a person."""

from typing import Any

from outbox_pipelines.database.progress import Progress
from outbox_pipelines.observe.reading import Reading
from outbox_pipelines.wording import spoken_seconds

_TENANTS_NAMED = 20


def readiness(reading: Reading) -> tuple[list[str], dict[str, Any]]:
    """What is not done as it should be, and every task's progress.

    Progress, not that processes live: a task counts that has succeeded lately.
    """
    expected = [task for task in reading.tasks.values() if task.every_seconds is not None]
    problems = [_overdue(task) for task in expected if task.is_overdue]
    if not expected:
        problems = [
            "nothing has polled or recovered yet: start Dagster's daemon with this code location, or `outbox worker`"
        ]
    return problems, {
        task.task: {
            "succeeded_at": None if task.succeeded_at is None else task.succeeded_at.isoformat(),
            "age_seconds": round(task.age_seconds, 1),
            "every_seconds": task.every_seconds,
            "paused": task.paused,
            "overdue": task.is_overdue,
        }
        for task in expected
    }


def _overdue(task: Progress) -> str:
    since = "has not succeeded yet" if task.succeeded_at is None else "last succeeded"
    every = spoken_seconds(task.every_seconds or 0.0)
    ago = spoken_seconds(task.age_seconds)
    told = f"{since} after {ago}" if task.succeeded_at is None else f"{since} {ago} ago"
    return f"{task.task} {told}, and is to every {every}: see that the daemon runs, and its last tick or run"


def messaging(reading: Reading) -> dict[str, Any]:
    """What waits, of whom and for how long."""
    rows = [tenant.waiting or 0 for tenant in reading.tenants]
    due = [kind.oldest_wait_seconds or 0.0 for kind in reading.kinds]
    waits = [tenant.oldest_wait_seconds or 0.0 for tenant in reading.tenants]
    worst = sorted(reading.tenants, key=lambda tenant: (-(tenant.oldest_wait_seconds or 0.0), -(tenant.waiting or 0)))
    return {
        "problems": list(reading.problems),
        "jobs": {
            "oldest_wait_seconds": round(max(due, default=0.0), 1),
            "expired_leases": sum(kind.expired_leases for kind in reading.kinds),
            "failed": sum(kind.failed for kind in reading.kinds),
            "kinds": {
                kind.kind: {
                    "waiting": kind.waiting,
                    "scheduled": kind.scheduled,
                    "publishing": kind.publishing,
                    "published": kind.published,
                    "processing": kind.processing,
                    "parked": kind.parked,
                    "failed": kind.failed,
                    "expired_leases": kind.expired_leases,
                    "oldest_wait_seconds": round(kind.oldest_wait_seconds or 0.0, 1),
                }
                for kind in reading.kinds
            },
        },
        "training": {
            "tenants": len(reading.tenants),
            "waiting": sum(rows),
            "waiting_tenants": sum(bool(count) for count in rows),
            "oldest_wait_seconds": round(max(waits, default=0.0), 1),
            "dead_letters": sum(tenant.dead_letters or 0 for tenant in reading.tenants),
            "unreadable_tenants": sum(tenant.waiting is None for tenant in reading.tenants),
            "longest_waiting": [
                {
                    "tenant": tenant.name,
                    "standing": tenant.standing.value,
                    "waiting": tenant.waiting,
                    "oldest_wait_seconds": round(tenant.oldest_wait_seconds or 0.0, 1),
                    "dead_letters": tenant.dead_letters,
                }
                for tenant in worst[:_TENANTS_NAMED]
                if tenant.waiting is None or tenant.waiting or tenant.dead_letters
            ],
        },
        "database": {
            "dead_tuples": dict(reading.dead_tuples),
            "oldest_transaction_seconds": round(reading.oldest_transaction_seconds, 1),
        },
    }
