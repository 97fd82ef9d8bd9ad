"""A reading as Prometheus metrics. Names and labels are promises: dashboards and alerts name them."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from outbox_pipelines.database.progress import Progress
from outbox_pipelines.database.totals import BUCKETS
from outbox_pipelines.jobs.publisher import PUBLISHED
from outbox_pipelines.observe.reading import Reading, TenantWaiting
from outbox_pipelines.training.backlog import Standing
from outbox_pipelines.upkeep.snapshot import KindCounts
from outbox_pipelines.upkeep.totals import CALLED, DELIVERED, OTHER_TENANTS, PROCESSED, Total, Totals

_STATES = ("waiting", "scheduled", "publishing", "published", "processing", "parked", "failed")


def render(reading: Reading, accept: str = "") -> tuple[bytes, str]:
    """The metrics as text, and the text's content type.

    Args:
        reading: of the database.
        accept: the request's Accept header; a scraper may ask for OpenMetrics.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(families(reading)))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def families(reading: Reading) -> list[Metric]:
    """All metrics of a reading."""
    return [
        *_jobs_done(reading.totals),
        *_rows_delivered(reading.totals),
        *_jobs_waiting(reading.kinds),
        *_rows_waiting(reading.tenants),
        *_upkeep(reading.tasks.values()),
        *_database(reading),
    ]


class _Collector:
    def __init__(self, collected: Sequence[Metric]) -> None:
        self._collected = collected

    def collect(self) -> Iterable[Metric]:
        return self._collected


def _jobs_done(totals: Totals) -> Iterable[Metric]:
    published = CounterMetricFamily(
        "outbox_jobs_published", "Jobs handed to a Dagster run, those that were handed again too.", labels=["kind"]
    )
    publishing = HistogramMetricFamily(
        "outbox_job_publish_seconds", "Seconds from when a job was due until it was handed to a run.", labels=["kind"]
    )
    processed = CounterMetricFamily(
        "outbox_jobs_processed", "Attempts that ended, in runs and workers.", labels=["kind", "outcome"]
    )
    processing = HistogramMetricFamily(
        "outbox_job_processing_seconds", "Seconds that an attempt ran, whatever its outcome.", labels=["kind"]
    )
    by_kind: dict[str, Total] = defaultdict(Total)
    for (metric, label, outcome), total in sorted(totals.items()):
        if metric == PUBLISHED:
            published.add_metric([label], total.count)
            _add_histogram(publishing, [label], total)
        elif metric == PROCESSED:
            processed.add_metric([label, outcome], total.count)
            by_kind[label] += total
    for kind, total in by_kind.items():
        _add_histogram(processing, [kind], total)
    return published, publishing, processed, processing


def _rows_delivered(totals: Totals) -> Iterable[Metric]:
    delivered = CounterMetricFamily(
        "outbox_training_rows_delivered",
        f'Training rows delivered. Tenants beyond OUTBOX_METRICS_TENANTS are one, "{OTHER_TENANTS}".',
        labels=["tenant"],
    )
    calls = HistogramMetricFamily(
        "outbox_training_call_seconds", "Seconds that a TrainBatch call took which delivered rows.", labels=[]
    )
    for (metric, label, _), total in sorted(totals.items()):
        if metric == DELIVERED:
            delivered.add_metric([label], total.count)
    _add_histogram(calls, [], totals.get((CALLED, "", ""), Total()))
    return delivered, calls


def _add_histogram(family: HistogramMetricFamily, labels: Sequence[str], total: Total) -> None:
    buckets, so_far = [], 0
    for bound, count in zip((*map(str, BUCKETS), "+Inf"), total.buckets, strict=True):
        so_far += count
        buckets.append((bound, so_far))
    family.add_metric(labels, buckets, total.seconds)


def _jobs_waiting(kinds: Sequence[KindCounts]) -> Iterable[Metric]:
    backlog = GaugeMetricFamily(
        "outbox_job_backlog",
        "Jobs that are not completed, by state (parked ones are also waiting), and failed ones that are kept.",
        labels=["kind", "state"],
    )
    expired = GaugeMetricFamily(
        "outbox_job_expired_leases", "Jobs whose lease has ended and that nobody has taken back.", labels=["kind"]
    )
    oldest = GaugeMetricFamily(
        "outbox_job_oldest_wait_seconds", "Seconds since the oldest waiting job was due; 0: none.", labels=["kind"]
    )
    for kind in kinds:
        for state in _STATES:
            backlog.add_metric([kind.kind, state], getattr(kind, state))
        expired.add_metric([kind.kind], kind.expired_leases)
        oldest.add_metric([kind.kind], kind.oldest_wait_seconds or 0.0)
    return backlog, expired, oldest


def _rows_waiting(tenants: Sequence[TenantWaiting]) -> Iterable[Metric]:
    waiting = GaugeMetricFamily("outbox_training_backlog_rows", "Training rows that wait.", labels=["tenant"])
    dead = GaugeMetricFamily("outbox_training_dead_letters", "Dead letters that are kept.", labels=["tenant"])
    oldest = GaugeMetricFamily(
        "outbox_training_oldest_wait_seconds",
        "Seconds since the oldest waiting row was written; 0: none waits.",
        labels=["tenant"],
    )
    standings = GaugeMetricFamily("outbox_training_tenants", "Tenants by how they stand.", labels=["standing"])
    folded = GaugeMetricFamily(
        "outbox_metrics_folded_tenants", f'Tenants that share the series "{OTHER_TENANTS}".', labels=[]
    )
    rows: dict[str, int] = defaultdict(int)
    letters: dict[str, int] = defaultdict(int)
    waits: dict[str, float] = defaultdict(float)
    for tenant in tenants:
        if tenant.label:
            rows[tenant.label] += tenant.waiting or 0
            letters[tenant.label] += tenant.dead_letters or 0
            waits[tenant.label] = max(waits[tenant.label], tenant.oldest_wait_seconds or 0.0)
    for label in rows:
        waiting.add_metric([label], rows[label])
        dead.add_metric([label], letters[label])
        oldest.add_metric([label], waits[label])
    for standing in Standing:
        standings.add_metric([standing.value], sum(tenant.standing is standing for tenant in tenants))
    folded.add_metric([], sum(tenant.label == OTHER_TENANTS for tenant in tenants))
    return waiting, dead, oldest, standings, folded


def _upkeep(tasks: Iterable[Progress]) -> Iterable[Metric]:
    cleaned = CounterMetricFamily(
        "outbox_upkeep_rows", "Rows that a task dealt with: purged, recovered, pruned.", labels=["task"]
    )
    age = GaugeMetricFamily("outbox_task_age_seconds", "Seconds since a task last succeeded.", labels=["task"])
    overdue = GaugeMetricFamily(
        "outbox_task_overdue", "1 when a task has not succeeded for too long and is not paused.", labels=["task"]
    )
    for task in tasks:
        cleaned.add_metric([task.task], task.rows_total)
        age.add_metric([task.task], task.age_seconds)
        overdue.add_metric([task.task], int(task.is_overdue))
    return cleaned, age, overdue


def _database(reading: Reading) -> Iterable[Metric]:
    reachable = GaugeMetricFamily(
        "outbox_ml_service_reachable", "Whether a sensor last found an ML service reachable.", labels=["target"]
    )
    for target, is_reachable in reading.ml_services.items():
        reachable.add_metric([target], int(is_reachable))
    dead = GaugeMetricFamily(
        "outbox_database_dead_tuples", "Rows that vacuum has not taken away yet.", labels=["table"]
    )
    for table, tuples in reading.dead_tuples.items():
        dead.add_metric([table], tuples)
    return (
        reachable,
        dead,
        GaugeMetricFamily(
            "outbox_database_oldest_transaction_seconds",
            "Seconds that the longest open transaction has been open, of those that the role may see.",
            value=reading.oldest_transaction_seconds,
        ),
        GaugeMetricFamily("outbox_messaging_problems", "What /health/messaging calls wrong.", len(reading.problems)),
        GaugeMetricFamily("outbox_reading_seconds", "Seconds that this look at the database took.", reading.seconds),
        GaugeMetricFamily(
            "outbox_reading_timestamp_seconds",
            "When this look at the database was taken, by its clock.",
            reading.taken_at.timestamp(),
        ),
    )
