"""One look at everything that health and metrics tell of."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, Engine, text

from outbox_pipelines.database.progress import Progress, all_progress
from outbox_pipelines.settings import Settings
from outbox_pipelines.training.backlog import Standing, count_outboxes, look
from outbox_pipelines.upkeep import checks
from outbox_pipelines.upkeep.checks import Finding
from outbox_pipelines.upkeep.snapshot import KindCounts, count_jobs
from outbox_pipelines.upkeep.totals import Totals, read_totals, roll_up, tenant_labels


@dataclass(frozen=True)
class TenantWaiting:
    """A tenant's outbox."""

    name: str
    label: str
    """Its own name in the metrics, or the one that the others share."""

    standing: Standing
    waiting: int | None
    """Rows; unknown for an outbox that cannot be read just now."""

    dead_letters: int | None
    oldest_wait_seconds: float | None


@dataclass(frozen=True)
class Reading:
    """The database at one time; its parts are looked up within a second or so of each other."""

    taken_at: datetime
    """By the database's clock."""

    seconds: float
    """How long the look took."""

    kinds: Sequence[KindCounts]
    tenants: Sequence[TenantWaiting]
    tasks: Mapping[str, Progress]
    totals: Totals
    ml_services: Mapping[str, bool]
    """Whether each was reachable when a sensor last asked, by its address."""

    dead_tuples: Mapping[str, int]
    """Rows that vacuum has not taken away yet: of the messages, and of all tenants' outboxes."""

    oldest_transaction_seconds: float
    """The longest open transaction that this role can see in the database."""

    problems: Sequence[str]
    """What is wrong with the messaging, with the remedy."""


def take_reading(engine: Engine, settings: Settings) -> Reading:
    """Look at everything: some statements, and a few for each 500 tenants."""
    began = time.monotonic()
    roll_up(engine, tenants=settings.metrics_tenants)
    backlog = look(engine)
    counts = count_outboxes(engine, [entry.tenant.schema for entry in backlog.tenants], died_since=None)
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection, connection.begin():
        kinds = count_jobs(connection, since=None)
        labels = tenant_labels(connection)
        totals = read_totals(connection)
    tenants = []
    for entry in backlog.tenants:
        found = counts.get(entry.tenant.schema)
        waited = None if entry.oldest is None else max(0.0, (backlog.asked_at - entry.oldest).total_seconds())
        tenants.append(
            TenantWaiting(
                entry.tenant.name,
                # Registered a moment ago: it has its label at the next look.
                labels.get(entry.tenant.tenant_id, ""),
                entry.standing,
                None if found is None else found.waiting,
                None if found is None else found.dead,
                waited,
            )
        )
    with engine.connect() as connection:
        health = text("SELECT target, reachable FROM outbox.ml_service_health ORDER BY target")
        ml_services = {row.target: bool(row.reachable) for row in connection.execute(health)}
        problems = _problems(connection, settings, kinds, tenants, ml_services)
        return Reading(
            backlog.asked_at,
            time.monotonic() - began,
            kinds,
            tenants,
            all_progress(connection),
            totals,
            ml_services,
            _dead_tuples(connection),
            _oldest_transaction(connection),
            problems,
        )


def _problems(
    connection: Connection,
    settings: Settings,
    kinds: Sequence[KindCounts],
    tenants: Sequence[TenantWaiting],
    ml_services: Mapping[str, bool],
) -> list[str]:
    """The same questions that the checks of the backlog assets ask."""
    findings: list[Finding] = [
        checks.expired_leases(connection, older_than=2.0 * settings.recovery_seconds),
        checks.oldest_wait(
            {kind.kind: kind.oldest_wait_seconds or 0.0 for kind in kinds},
            "kind",
            targets=settings.job_wait_targets,
            default=settings.job_wait_target_seconds,
            remedy=checks.JOB_WAIT_REMEDY,
        ),
        checks.oldest_wait(
            {tenant.name: tenant.oldest_wait_seconds or 0.0 for tenant in tenants},
            "tenant",
            targets=settings.training_wait_targets,
            default=settings.training_wait_target_seconds,
            remedy=checks.TRAINING_WAIT_REMEDY,
        ),
    ]
    problems = [finding.text for finding in findings if not finding.passed]
    # A service that nobody has anything for may be down.
    if any(tenant.oldest_wait_seconds is not None for tenant in tenants):
        problems += [
            "an ML service is unreachable and rows wait; the skip reason of training_outbox_sensor says since when"
            for reachable in ml_services.values()
            if not reachable
        ]
    return problems


def _dead_tuples(connection: Connection) -> dict[str, int]:
    rows = connection.execute(
        text("""
            SELECT relname, sum(pg_stat_get_dead_tuples(class.oid))::bigint
            FROM pg_class AS class JOIN pg_namespace AS space ON space.oid = class.relnamespace
            WHERE class.relkind = 'r' AND (relname = 'ml_outbox' OR (nspname = 'outbox' AND relname = 'messages'))
            GROUP BY relname ORDER BY relname
        """)
    )
    return dict(iter(rows))


def _oldest_transaction(connection: Connection) -> float:
    found = connection.execute(
        text("""
            SELECT coalesce(extract(epoch FROM max(clock_timestamp() - xact_start)), 0)::float8
            FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
        """)
    ).scalar_one()
    return max(0.0, float(found))
