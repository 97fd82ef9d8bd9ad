"""Bad rows become dead letters with their reason; the good ones of their batch go out."""

import math
from collections.abc import Callable
from uuid import UUID

import grpc
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine

from outbox_pipelines.ml_service import training_pb2
from outbox_pipelines.settings import Settings, load_settings
from outbox_pipelines.tenants.registry import Tenant
from outbox_pipelines.training.delivery import Delivered, deliver
from outbox_pipelines.training.grpc_sink import GrpcSink
from outbox_pipelines.training.outcome import Ending
from outbox_pipelines.training.sink import Batch, BatchRefused, OutboxRow, ServiceUnwell, Verdict
from tests.outboxes import dead_letters, enqueue, flush, ledger_ids, new_tenant, waiting_ids
from tests.scripted_service import ScriptedService, refuse

TENANT = Tenant(UUID(int=1), "t", "t", paused=False)


def test_three_poison_rows_of_a_hundred_are_found_within_the_bound(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, rows=100)
    service.answer = refuse([7, 37, 99])
    report = flush(engine, settings, tenant)
    good = [row_id for row_id in range(1, 101) if row_id not in {7, 37, 99}]
    assert ledger_ids(engine, tenant) == good
    reasons = dead_letters(engine, tenant)
    assert sorted(reasons) == [7, 37, 99]
    assert all("INVALID_ARGUMENT: some row is bad" in reason for reason in reasons.values())
    assert waiting_ids(engine, tenant) == []
    # Seven clean batches, and three with one bad row of ten each.
    assert len(service.calls) <= 7 + 3 * (1 + 2 * math.ceil(math.log2(10)))
    assert (report.rows, report.dead_letters, report.failed) == (97, 3, [])


def test_a_batch_of_nothing_but_poison_is_ten_dead_letters(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, rows=10)
    service.answer = refuse(range(1, 11))
    report = flush(engine, settings, tenant)
    assert sorted(dead_letters(engine, tenant)) == list(range(1, 11))
    assert ledger_ids(engine, tenant) == []
    assert report.tenants[0].ending is Ending.EMPTIED
    assert len(service.calls) == 19


def test_rejected_ids_cost_no_further_call(engine: Engine, settings: Settings, service: ScriptedService) -> None:
    tenant = new_tenant(engine, rows=20)
    service.answer = refuse([3, 4, 15], with_ids=True)
    flush(engine, settings, tenant)
    assert len(service.calls) == 2
    assert dead_letters(engine, tenant) == {3: "no label", 4: "no label", 15: "no label"}
    assert ledger_ids(engine, tenant) == [n for n in range(1, 21) if n not in {3, 4, 15}]


def test_a_service_that_fails_while_a_batch_is_halved_kills_no_row(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, rows=10)
    poison = refuse([8])

    def answer(
        request: training_pb2.TrainBatchRequest, context: grpc.ServicerContext
    ) -> training_pb2.TrainBatchResponse:
        if len(service.calls) == 4:
            context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
        return poison(request, context)

    service.answer = answer
    report = flush(engine, settings, tenant)
    # Whole, left half (delivered), right half, its left half: unavailable.
    assert service.calls[1][1] == [1, 2, 3, 4, 5]
    assert ledger_ids(engine, tenant) == [1, 2, 3, 4, 5]
    assert waiting_ids(engine, tenant) == [6, 7, 8, 9, 10]
    assert dead_letters(engine, tenant) == {}
    assert report.tenants[0].ending is Ending.FAILED


@given(size=st.integers(1, 64), data=st.data())
def test_halving_delivers_all_good_rows_in_order_within_the_bound(size: int, data: st.DataObject) -> None:
    bad = data.draw(st.sets(st.integers(1, size)))
    calls: list[list[int]] = []

    class Judge(GrpcSink):
        def __init__(self) -> None:
            """No channel: nothing is sent."""

        def send(self, batch: Batch) -> Verdict:
            calls.append(batch.row_ids)
            if bad & set(batch.row_ids):
                raise BatchRefused("bad")
            return Verdict()

    batch = Batch(TENANT.tenant_id, [OutboxRow(row_id, "{}") for row_id in range(1, size + 1)])
    delivered: list[int] = []
    dead: list[int] = []
    for call in deliver(Judge(), batch):
        if isinstance(call.delivered, Delivered):
            delivered += call.delivered.row_ids
        dead += [letter.row_id for letter in call.dead]
    assert delivered == [row_id for row_id in range(1, size + 1) if row_id not in bad]
    assert dead == sorted(bad)
    assert len(calls) <= 1 + 2 * len(bad) * math.ceil(math.log2(size)) if size > 1 else len(calls) == 1


def test_ten_rows_of_600_kb_are_split_by_size(
    engine: Engine, make_settings: Callable[..., Settings], service: ScriptedService
) -> None:
    tenant = new_tenant(engine)
    enqueue(engine, tenant, [{"text": "x" * 600_000}] * 10)
    report = flush(engine, make_settings(), tenant)
    assert service.ids() == list(range(1, 11))
    assert all(len(ids) <= 6 for _, ids in service.calls)
    assert len(service.calls) <= 4
    assert report.failed == []


def test_a_row_larger_than_a_message_is_a_dead_letter_that_says_its_size(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            f"""INSERT INTO "{tenant.schema}".ml_outbox (example)
                VALUES ('{{"n": 1}}'), (jsonb_build_object('text', repeat('x', 5000000))), ('{{"n": 3}}')"""
        )
    report = flush(engine, settings, tenant)
    assert service.ids() == [1, 3]
    (reason,) = dead_letters(engine, tenant).values()
    assert "5,000,0" in reason
    assert "4,194,304" in reason
    assert (report.rows, report.dead_letters, report.failed) == (2, 1, [])


def test_a_service_with_a_smaller_limit_than_ours_is_found_out_by_halving(
    engine: Engine, make_settings: Callable[..., Settings]
) -> None:
    tenant = new_tenant(engine)
    enqueue(engine, tenant, [{"text": "x" * 300}] * 9 + [{"text": "y" * 5_000}])
    with ScriptedService(max_message_bytes=2_000) as small:
        report = flush(engine, make_settings(ml_target=small.target), tenant)
    assert ledger_ids(engine, tenant) == list(range(1, 10))
    assert "larger than max" in dead_letters(engine, tenant)[10]
    assert report.failed == []


def test_a_quota_is_not_taken_for_a_size_limit(engine: Engine, settings: Settings, service: ScriptedService) -> None:
    tenant = new_tenant(engine, rows=2)
    service.answer = lambda _request, context: context.abort(  # type: ignore[return-value]
        grpc.StatusCode.RESOURCE_EXHAUSTED, "quota of 100 calls used up"
    )
    flush(engine, settings, tenant)
    assert len(service.calls) == 1
    assert dead_letters(engine, tenant) == {}


@given(st.lists(st.text(max_size=300), min_size=1, max_size=8), st.integers(80, 900))
def test_the_size_of_a_call_is_never_told_too_small(texts: list[str], limit: int) -> None:
    rows = [OutboxRow(row_id, text.encode("utf-8", "replace").decode()) for row_id, text in enumerate(texts, 2**62)]
    sink = GrpcSink(load_settings(ml_max_message_bytes=max(limit, 1024)))
    request = training_pb2.TrainBatchRequest(
        tenant=str(TENANT.tenant_id),
        batch_key="0" * 32,
        examples=[training_pb2.Example(id=row.row_id, json=row.example) for row in rows],
    )
    told = sink.call_bytes(rows)
    sink.close()
    assert told >= request.ByteSize()
    if told > sink.max_call_bytes:
        assert told == request.ByteSize()


def test_a_sink_error_in_the_middle_keeps_what_was_judged_before(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, rows=30)

    class Flaky(GrpcSink):
        def send(self, batch: Batch) -> Verdict:
            if batch.row_ids[0] == 11:
                raise ServiceUnwell("resting")
            return super().send(batch)

    flush(engine, settings, tenant, sink=Flaky(settings))
    assert ledger_ids(engine, tenant) == list(range(1, 11))
    assert waiting_ids(engine, tenant) == list(range(11, 31))
    assert len(service.calls) == 1
