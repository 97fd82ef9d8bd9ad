"""What the service answers, and what is made of it: sizes, quotas, tokens, and words that stay where the payload is."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import grpc
import pytest
from sqlalchemy import Engine

from outbox_pipelines.definitions import build_definitions
from outbox_pipelines.settings import InvalidSettings, Settings
from outbox_pipelines.tenants.registry import Problem
from outbox_pipelines.training.outbox import read_rows
from outbox_pipelines.training.outcome import Ending
from outbox_pipelines.training.report import failure_line, tenant_line
from tests.outboxes import dead_letters, enqueue, flush, ledger_ids, new_tenant, status, waiting_ids
from tests.scripted_service import ScriptedService, accept

MakeSettings = Callable[..., Settings]


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """A Dagster instance with its own storage."""
    no_logs = {"module": "dagster._core.storage.noop_compute_log_manager", "class": "NoOpComputeLogManager"}
    with dg.instance_for_test(temp_dir=str(tmp_path), overrides={"compute_logs": no_logs}) as made:
        yield made


# Sizes


def test_an_answer_larger_than_grpcs_own_limit_is_read_and_its_rows_are_sent_once(
    engine: Engine, make_settings: MakeSettings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, rows=40)

    def answer(request: Any, _context: Any) -> Any:
        response = accept(request, _context)
        for row_id in [row_id for row_id in response.accepted if row_id % 2]:
            response.accepted.remove(row_id)
            response.rejected.add(id=row_id, reason="x" * 300_000)
        assert response.ByteSize() > 4 * 1024 * 1024
        return response

    service.answer = answer
    report = flush(engine, make_settings(batch_size=40), tenant)
    assert len(service.calls) == 1
    assert (report.rows, report.dead_letters, report.failed) == (20, 20, [])
    assert ledger_ids(engine, tenant) == list(range(2, 41, 2))
    reasons = dead_letters(engine, tenant)
    assert sorted(reasons) == list(range(1, 41, 2))
    assert all(len(reason) == 2_000 for reason in reasons.values())


@pytest.mark.parametrize(
    "words",
    [
        "request rate is larger than max 100/s for this tenant",
        "message larger than max allowed by your plan",
        "queue larger than max (100 vs. 90)",
        "message larger than max (unknown vs. 4194304)",
        "",
    ],
)
def test_words_about_a_quota_are_never_taken_for_grpcs_size_limit(
    engine: Engine, settings: Settings, service: ScriptedService, words: str
) -> None:
    tenant = new_tenant(engine, rows=10)
    service.answer = lambda _request, context: context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, words)
    report = flush(engine, settings, tenant).tenants[0]
    assert (report.ending, report.problem) == (Ending.FAILED, Problem.UNWELL)
    assert len(service.calls) == 1
    assert dead_letters(engine, tenant) == {}
    assert waiting_ids(engine, tenant) == list(range(1, 11))


def test_grpcs_own_word_for_its_size_limit_is_a_refusal_of_the_batch_alone(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, rows=4)

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        if len(request.examples) > 1:
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (5000 vs. 2000)"
            )
        return accept(request, context)

    service.answer = answer
    report = flush(engine, settings, tenant)
    assert [ids for _, ids in service.calls] == [[1, 2, 3, 4], [1, 2], [1], [2], [3, 4], [3], [4]]
    assert (report.rows, report.dead_letters) == (4, 0)


def test_no_more_large_rows_are_read_ahead_than_one_call_carries(
    engine: Engine, make_settings: MakeSettings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine)
    enqueue(engine, tenant, [{"text": "x" * 30_000}] * 20)
    settings = make_settings(ml_max_message_bytes=100_000, batch_size=10)
    report = flush(engine, settings, tenant)
    # Four rows begin within 100,000 bytes, three of them fit; 100 rows are allowed.
    assert report.tenants[0].turns == 5
    assert service.ids() == list(range(1, 21))


def test_rows_are_read_until_the_bytes_are_reached_and_the_first_always_is(engine: Engine) -> None:
    tenant = new_tenant(engine)
    # As text in the database: {"t": "..."} takes 9 bytes beside the text, and ü two.
    enqueue(engine, tenant, [{"t": "x" * 991}, {"t": "ü" * 495 + "x"}, {"t": "x" * 991}, {"t": "x"}])

    def ids(max_bytes: int, except_ids: tuple[int, ...] = (), limit: int = 100) -> list[int]:
        with engine.connect() as connection:
            rows = read_rows(connection, tenant, limit=limit, max_bytes=max_bytes, except_ids=except_ids)
        return [row.row_id for row in rows]

    assert ids(1) == [1]
    assert ids(1_000) == [1]
    assert ids(1_001) == ids(2_000) == [1, 2]
    assert ids(2_001) == ids(3_000) == [1, 2, 3]
    assert ids(3_001) == [1, 2, 3, 4]
    assert ids(3_001, limit=2) == [1, 2]
    assert ids(1_001, except_ids=(1, 3)) == [2, 4]


# Words


def test_the_services_words_go_into_the_database_and_nowhere_else(
    engine: Engine,
    make_settings: MakeSettings,
    service: ScriptedService,
    instance: dg.DagsterInstance,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="outbox_pipelines")
    settings = make_settings(backoff_first_seconds=0.1, backoff_max_seconds=0.1)
    tenant = new_tenant(engine)
    enqueue(engine, tenant, [{"name": "private-payload"}])
    service.answer = lambda request, context: context.abort(
        grpc.StatusCode.INTERNAL, f"crashed on {request.examples[0].json}"
    )
    report = flush(engine, settings, tenant)
    assert report.tenants[0].detail.startswith(f"ml-service {service.target} answered INTERNAL; next attempt in")
    for told in (report.tenants[0].detail, failure_line(report), tenant_line(report.tenants[0]), repr(report)):
        assert "private-payload" not in told
    found = status(engine, tenant)
    assert found.last_error == f"ml-service {service.target} answered INTERNAL"
    assert found.last_error_details == (
        f'ml-service {service.target} answered INTERNAL: crashed on {{"name": "private-payload"}}'
    )
    instance.add_dynamic_partitions("tenants", ["acme"])
    job = build_definitions(settings=settings).get_job_def("tenant_flush")
    result = job.execute_in_process(instance=instance, partition_key="acme", raise_on_error=False)
    assert not result.success
    stored = json.dumps([str(record) for record in instance.all_logs(result.run_id)])
    assert "answered INTERNAL" in stored
    assert "private-payload" not in stored
    assert "private-payload" not in caplog.text


def test_a_refused_rows_reason_is_kept_with_the_row_and_not_told_elsewhere(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine)
    enqueue(engine, tenant, [{"name": "private-payload"}])
    service.answer = lambda request, context: context.abort(
        grpc.StatusCode.INVALID_ARGUMENT, f"what is {request.examples[0].json}"
    )
    report = flush(engine, settings, tenant)
    assert "private-payload" in dead_letters(engine, tenant)[1]
    assert "private-payload" not in repr(report)
    assert report.dead_letters == 1


def test_a_failure_of_the_services_own_leaves_its_words_with_the_rows(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, rows=3)
    service.answer = lambda _request, context: context.abort(grpc.StatusCode.UNAVAILABLE, "reboot at noon")
    flush(engine, settings, tenant)
    with engine.connect() as connection:
        told = connection.exec_driver_sql(f'SELECT last_error FROM "{tenant.schema}".ml_outbox').scalars().all()
    assert told == [f"ml-service {service.target} answered UNAVAILABLE: reboot at noon"] * 3


def test_the_details_go_when_deliveries_go_well_again(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, rows=1)
    service.answer = lambda _request, context: context.abort(grpc.StatusCode.UNAVAILABLE, "reboot at noon")
    flush(engine, settings, tenant)
    assert "reboot" in (status(engine, tenant).last_error_details or "")
    service.answer = accept
    flush(engine, settings, tenant)
    assert status(engine, tenant).last_error_details is None


# Tokens


@pytest.mark.parametrize("token", ["hunter2\n", "hunter2\r\n", "\nhunter2", "hunter 2", "hünter2", "hunter2\x00"])
def test_a_token_that_cannot_travel_is_refused_with_the_settings_and_not_shown(
    make_settings: MakeSettings, token: str
) -> None:
    with pytest.raises(InvalidSettings, match="OUTBOX_ML_TOKEN=") as raised:
        make_settings(ml_token=token)
    assert "final newline" in str(raised.value)
    assert token.strip() not in str(raised.value)


def test_a_token_travels_with_every_call(engine: Engine, make_settings: MakeSettings, service: ScriptedService) -> None:
    seen = []

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        seen.append(dict(context.invocation_metadata())["authorization"])
        return accept(request, context)

    service.answer = answer
    flush(engine, make_settings(ml_token="hunter2"), new_tenant(engine, rows=20))
    assert seen == ["Bearer hunter2"] * 2
