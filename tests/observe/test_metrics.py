"""`/metrics`: what Prometheus scrapes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Engine

from outbox_pipelines.database.progress import note_success
from outbox_pipelines.jobs.message import AttemptOutcome
from outbox_pipelines.observe.metrics import render
from outbox_pipelines.observe.reading import take_reading
from outbox_pipelines.settings import Settings
from outbox_pipelines.tenants.registry import remove_tenant
from tests.jobs.messages import KIND, complete, end, enqueue, run, take
from tests.observe.health_server import HealthServer
from tests.outboxes import flush, new_tenant, wait_until
from tests.scripted_service import ScriptedService
from tests.upkeep.aged import bury, deliver

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(engine: Engine, settings: Settings) -> Samples:
    content, content_type = render(take_reading(engine, settings))
    assert content_type.startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
        for family in text_string_to_metric_families(content.decode())
        for sample in family.samples
    }


def counters(found: Samples) -> Samples:
    return {key: value for key, value in found.items() if key[0].endswith(("_total", "_count", "_sum", "_bucket"))}


@pytest.fixture
def health(database_url: str, tmp_path: Path) -> Iterator[HealthServer]:
    with HealthServer(tmp_path / "health.log", database_url) as server:
        yield server


def test_what_a_short_lived_process_did_is_counted(
    engine: Engine, settings: Settings, service: ScriptedService, health: HealthServer
) -> None:
    acme = new_tenant(engine, "acme", rows=25)
    wait_until(lambda: health.sample("outbox_training_backlog_rows", tenant="acme") == 25)
    assert flush(engine, settings, acme).rows == 25
    complete(engine, enqueue(engine))
    end(engine, take(engine, enqueue(engine)), AttemptOutcome.FAILED, error="no")
    wait_until(lambda: health.sample("outbox_training_rows_delivered_total", tenant="acme") == 25)
    assert health.sample("outbox_training_call_seconds_count") == 3
    assert health.sample("outbox_jobs_processed_total", kind=KIND, outcome="succeeded") == 1
    assert health.sample("outbox_jobs_processed_total", kind=KIND, outcome="failed") == 1
    assert health.sample("outbox_job_processing_seconds_count", kind=KIND) == 2
    assert health.sample("outbox_training_backlog_rows", tenant="acme") == 0
    status, content_type, body = health.text("/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert (status, content_type.split(";")[0]) == (200, "application/openmetrics-text")
    assert body.endswith("# EOF\n")


def test_no_counter_falls_and_nothing_is_negative_whatever_is_purged_or_removed(
    engine: Engine, settings: Settings
) -> None:
    tenants = [new_tenant(engine, name, rows=2) for name in ("acme", "beta")]
    acts: list[Callable[[], object]] = [
        lambda: complete(engine, enqueue(engine)),
        lambda: [deliver(engine, tenant, [7, 8]) for tenant in tenants],
        lambda: run(engine, "DELETE FROM outbox.messages"),
        lambda: bury(engine, tenants[0], 3, days=1),
        lambda: _remove(engine, "beta"),
        lambda: run(engine, "UPDATE outbox.job_attempts SET started_at = finished_at + interval '1 hour'"),
        lambda: note_success_of_purge(engine, 500),
        # As the purge of a ledger does: what is rolled up goes.
        lambda: run(
            engine,
            "DELETE FROM outbox.training_ledger WHERE delivered_at < "
            "(SELECT until FROM outbox.totals_reached WHERE ledger = 'deliveries')",
        ),
        lambda: complete(engine, enqueue(engine, "other")),
    ]
    before: Samples = {}
    for act in acts:
        act()
        now = samples(engine, settings)
        assert all(value >= 0 for value in now.values())
        risen = counters(now)
        # The sum of seconds is of another attempt once its times are changed by hand.
        fallen = {key for key, value in counters(before).items() if risen.get(key, -1) < value and "_sum" not in key[0]}
        assert not {key for key in fallen if not key[0].startswith("outbox_job_processing_seconds_bucket")}
        before = now


def _remove(engine: Engine, name: str) -> None:
    with engine.begin() as connection:
        remove_tenant(connection, name, drop_schema=True, force=True)


def note_success_of_purge(engine: Engine, rows: int) -> None:
    with engine.begin() as connection:
        note_success(connection, "completed_jobs_retention", rows)


def test_the_number_of_series_is_bounded_however_many_tenants_there_are(
    engine: Engine, make_settings: Callable[..., Settings]
) -> None:
    settings = make_settings(metrics_tenants=5)
    tenants = [new_tenant(engine, f"t{number:02}", rows=2) for number in range(30)]
    few = len(samples(engine, make_settings(metrics_tenants=5)))
    for tenant in tenants:
        deliver(engine, tenant, [1, 2])
    found = samples(engine, settings)
    named = {dict(labels)["tenant"] for name, labels in found if name == "outbox_training_backlog_rows"}
    assert named == {"t00", "t01", "t02", "t03", "t04", "_other"}
    assert found["outbox_training_backlog_rows", (("tenant", "_other"),)] == 50
    assert found["outbox_training_rows_delivered_total", (("tenant", "_other"),)] == 50
    assert found["outbox_metrics_folded_tenants", ()] == 25
    # One more for each label that has delivered.
    assert len(found) == few + 6


def test_no_payload_or_reason_is_in_the_metrics(engine: Engine, settings: Settings) -> None:
    end(engine, take(engine, enqueue(engine, payload={"pupil": "hunter2"})), AttemptOutcome.FAILED, error="hunter2")
    content, _ = render(take_reading(engine, settings))
    assert b"hunter2" not in content
