"""The flusher's promises: every committed row once, in order, and the ledger to show it."""

import threading
from collections.abc import Callable

import grpc
import pytest
from sqlalchemy import Engine, text

from outbox_pipelines.settings import Settings
from outbox_pipelines.tenants.registry import Problem, remove_tenant, set_paused
from outbox_pipelines.training.grpc_sink import GrpcSink
from outbox_pipelines.training.outcome import Ending
from outbox_pipelines.training.sink import Batch, Verdict
from tests.outboxes import dead_letters, enqueue, flush, ledger_ids, new_tenant, status, wait_until, waiting_ids
from tests.scripted_service import ScriptedService, accept

MakeSettings = Callable[..., Settings]


def test_rows_go_out_in_id_order_and_the_ledger_lists_each_once(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, rows=257)
    report = flush(engine, settings, tenant)
    assert service.ids() == list(range(1, 258))
    assert [len(ids) for _, ids in service.calls][:3] == [10, 10, 10]
    assert waiting_ids(engine, tenant) == []
    assert ledger_ids(engine, tenant) == list(range(1, 258))
    entry = report.tenants[0]
    assert (entry.ending, entry.rows, entry.first_id, entry.last_id) == (Ending.EMPTIED, 257, 1, 257)
    assert entry.batches == 26


def test_a_second_flush_finds_nothing_and_ends_well(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, rows=5)
    flush(engine, settings, tenant)
    again = flush(engine, settings, tenant)
    assert (again.rows, again.failed) == (0, [])
    assert len(service.calls) == 1


def test_a_lower_id_that_commits_late_is_sent_too(engine: Engine, settings: Settings, service: ScriptedService) -> None:
    tenant = new_tenant(engine)
    insert = text(f"""INSERT INTO "{tenant.schema}".ml_outbox (example) VALUES ('{{}}') RETURNING id""")
    with engine.connect() as first:
        low = first.execute(insert).scalar_one()
        with engine.begin() as second:
            high = second.execute(insert).scalar_one()
        flush(engine, settings, tenant)
        assert service.ids() == [high]
        first.commit()
    flush(engine, settings, tenant)
    assert low < high
    assert service.ids() == [high, low]
    assert ledger_ids(engine, tenant) == [low, high]


def test_two_flushes_at_once_send_each_row_once(engine: Engine, settings: Settings, service: ScriptedService) -> None:
    tenant = new_tenant(engine, rows=300)
    inside, go_on = threading.Event(), threading.Event()

    def hold(request: object, context: object) -> object:
        inside.set()
        assert go_on.wait(30)
        return accept(request, context)  # type: ignore[arg-type]

    service.answer = hold  # type: ignore[assignment]
    first = threading.Thread(target=flush, args=(engine, settings, tenant), kwargs={"run_id": "first"})
    first.start()
    assert inside.wait(30)
    second = flush(engine, settings, tenant, run_id="second")
    assert second.tenants[0].ending is Ending.TAKEN
    assert "run first holds the lease" in second.tenants[0].detail
    go_on.set()
    first.join()
    assert service.ids() == list(range(1, 301))


def test_a_flush_that_lost_its_lease_deletes_nothing(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, rows=10)

    def steal(request: object, context: object) -> object:
        with engine.begin() as connection:
            connection.execute(
                text("""UPDATE outbox.tenants SET lease_token = gen_random_uuid(), lease_holder = 'thief',
                        lease_expires_at = clock_timestamp() + interval '1 minute'""")
            )
        return accept(request, context)  # type: ignore[arg-type]

    service.answer = steal  # type: ignore[assignment]
    report = flush(engine, settings, tenant)
    assert report.tenants[0].ending is Ending.LEASE_LOST
    assert report.tenants[0].rows == 0
    assert waiting_ids(engine, tenant) == list(range(1, 11))
    assert ledger_ids(engine, tenant) == []
    assert status(engine, tenant).lease_holder == "thief"


def test_the_lease_is_free_when_a_flush_has_ended(engine: Engine, settings: Settings, service: ScriptedService) -> None:
    well, ill = new_tenant(engine, "well", rows=1), new_tenant(engine, "ill", rows=1)

    def answer(request: object, context: grpc.ServicerContext) -> object:
        if request.tenant == str(ill.tenant_id):  # type: ignore[attr-defined]
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        return accept(request, context)  # type: ignore[arg-type]

    service.answer = answer  # type: ignore[assignment]
    flush(engine, settings, well, ill)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(lease_token) FROM outbox.tenants")).scalar_one() == 0


def test_pausing_takes_effect_at_the_next_turn(
    engine: Engine, make_settings: MakeSettings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, rows=200)
    settings = make_settings(max_rows_per_turn=10)

    def pause(request: object, context: object) -> object:
        with engine.begin() as connection:
            set_paused(connection, tenant.name, paused=True)
        # Longer than the flag is believed, as a turn of a slow service is.
        threading.Event().wait(0.6)
        return accept(request, context)  # type: ignore[arg-type]

    service.answer = pause  # type: ignore[assignment]
    report = flush(engine, settings, tenant)
    assert report.tenants[0].ending is Ending.PAUSED
    assert service.ids() == list(range(1, 11))
    assert ledger_ids(engine, tenant) == list(range(1, 11))
    assert flush(engine, settings, tenant).tenants[0].ending is Ending.TAKEN
    with engine.begin() as connection:
        set_paused(connection, tenant.name, paused=False)
    service.answer = accept
    flush(engine, settings, tenant)
    assert waiting_ids(engine, tenant) == []


def test_one_turn_each_when_asked(engine: Engine, make_settings: MakeSettings, service: ScriptedService) -> None:
    tenant = new_tenant(engine, rows=250)
    report = flush(engine, make_settings(), tenant, max_turns=1)
    assert report.tenants[0].ending is Ending.TURNS_TAKEN
    assert ledger_ids(engine, tenant) == list(range(1, 101))


def test_a_spent_budget_ends_after_every_tenant_had_a_turn(
    engine: Engine, make_settings: MakeSettings, service: ScriptedService
) -> None:
    settings = make_settings(tenants_in_parallel=1)
    tenants = [new_tenant(engine, name, rows=150) for name in ("a", "b", "c")]
    report = flush(engine, settings, *tenants, budget_seconds=0)
    assert {entry.ending for entry in report.tenants} == {Ending.BUDGET_SPENT}
    assert [entry.rows for entry in report.tenants] == [100, 100, 100]


def test_turns_go_round_robin(engine: Engine, make_settings: MakeSettings, service: ScriptedService) -> None:
    settings = make_settings(tenants_in_parallel=1, max_rows_per_turn=10)
    tenants = [new_tenant(engine, name, rows=30) for name in ("a", "b")]
    flush(engine, settings, *tenants)
    a, b = (str(tenant.tenant_id) for tenant in tenants)
    assert [name for name, _ in service.calls] == [a, b, a, b, a, b]


def test_one_tenants_flood_or_hanging_calls_hold_up_no_other(
    engine: Engine, make_settings: MakeSettings, service: ScriptedService
) -> None:
    settings = make_settings(budget_seconds=1, ml_deadline_seconds=2, tenants_in_parallel=4)
    flood, hanging = new_tenant(engine, "flood"), new_tenant(engine, "hanging", rows=1)
    with engine.begin() as connection:
        connection.execute(
            text(f"""INSERT INTO "{flood.schema}".ml_outbox (example) SELECT '{{}}' FROM generate_series(1, 100000)""")
        )
    small = [new_tenant(engine, f"small-{number}", rows=1) for number in range(24)]
    release = threading.Event()

    def answer(request: object, context: grpc.ServicerContext) -> object:
        if request.tenant == str(hanging.tenant_id):  # type: ignore[attr-defined]
            release.wait(30)
        return accept(request, context)  # type: ignore[arg-type]

    service.answer = answer  # type: ignore[assignment]
    report = flush(engine, settings, flood, hanging, *small)
    release.set()
    assert all(ledger_ids(engine, tenant) == [1] for tenant in small)
    by_name = {entry.tenant.name: entry for entry in report.tenants}
    assert by_name["flood"].ending is Ending.BUDGET_SPENT
    assert by_name["hanging"].ending is Ending.FAILED
    assert "DEADLINE_EXCEEDED" in by_name["hanging"].detail
    assert waiting_ids(engine, hanging) == [1]


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ],
)
def test_an_unwell_service_keeps_the_rows_and_never_bisects(
    engine: Engine, settings: Settings, service: ScriptedService, code: grpc.StatusCode
) -> None:
    tenant = new_tenant(engine, rows=100)

    def answer(request: object, context: grpc.ServicerContext) -> object:
        if len(service.calls) == 4:
            context.abort(code, "quota or trouble")
        return accept(request, context)  # type: ignore[arg-type]

    service.answer = answer  # type: ignore[assignment]
    report = flush(engine, settings, tenant)
    assert len(service.calls) == 4
    assert waiting_ids(engine, tenant) == list(range(31, 101))
    assert ledger_ids(engine, tenant) == list(range(1, 31))
    assert dead_letters(engine, tenant) == {}
    entry = report.tenants[0]
    assert (entry.ending, entry.problem, entry.rows) == (Ending.FAILED, Problem.UNWELL, 30)
    assert code.name in entry.detail
    assert "next attempt in" in entry.detail
    found = status(engine, tenant)
    assert (found.problem, found.failure_count) == (Problem.UNWELL, 1)
    assert found.next_attempt_at is not None
    with engine.connect() as connection:
        told = connection.exec_driver_sql(f'SELECT id, attempts FROM "{tenant.schema}".ml_outbox WHERE attempts > 0')
        assert told.all() == [(row_id, 1) for row_id in range(31, 41)]


@pytest.mark.parametrize(
    "code",
    [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED],
)
def test_a_service_that_refuses_us_costs_no_row(
    engine: Engine, settings: Settings, service: ScriptedService, code: grpc.StatusCode
) -> None:
    tenant = new_tenant(engine, rows=20)
    service.answer = lambda _request, context: context.abort(code, "who are you")  # type: ignore[assignment,return-value]
    report = flush(engine, settings, tenant)
    assert len(service.calls) == 1
    assert waiting_ids(engine, tenant) == list(range(1, 21))
    assert dead_letters(engine, tenant) == {}
    assert report.tenants[0].problem is Problem.MISCONFIGURED
    assert "check" in report.tenants[0].detail


def test_backoff_doubles_while_nothing_gets_through_and_ends_with_success(
    engine: Engine, make_settings: MakeSettings, service: ScriptedService
) -> None:
    settings = make_settings(backoff_first_seconds=10, backoff_max_seconds=40)
    tenant = new_tenant(engine, rows=1)
    service.answer = lambda _request, context: context.abort(grpc.StatusCode.UNAVAILABLE, "")  # type: ignore[assignment,return-value]
    waits = []
    for _ in range(4):
        flush(engine, settings, tenant)
        with engine.connect() as connection:
            waits.append(
                connection.execute(
                    text("SELECT extract(epoch FROM next_attempt_at - clock_timestamp())::float8 FROM outbox.tenants")
                ).scalar_one()
            )
    for wait, longest in zip(waits, [10, 20, 40, 40], strict=True):
        assert longest * 0.7 < wait <= longest
    assert status(engine, tenant).failure_count == 4
    service.answer = accept
    flush(engine, settings, tenant)
    found = status(engine, tenant)
    assert (found.failure_count, found.problem, found.next_attempt_at, found.last_error) == (0, None, None, None)


def test_rows_that_the_service_left_without_an_answer_stay(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, rows=10)

    def answer(request: object, context: object) -> object:
        response = accept(request, context)  # type: ignore[arg-type]
        response.accepted.remove(4)
        return response

    service.answer = answer  # type: ignore[assignment]
    report = flush(engine, settings, tenant)
    assert "left 1 of 10 rows" in report.tenants[0].detail
    assert waiting_ids(engine, tenant) == list(range(1, 11))


def test_whatever_a_sink_raises_the_rows_stay_and_the_others_flow(engine: Engine, settings: Settings) -> None:
    tenants = [new_tenant(engine, name, rows=5) for name in ("odd", "even")]

    class OddSink(GrpcSink):
        def send(self, batch: Batch) -> Verdict:
            if batch.tenant_id == tenants[0].tenant_id:
                raise ZeroDivisionError("a user's mistake")
            return super().send(batch)

    report = flush(engine, settings, *tenants, sink=OddSink(settings))
    assert waiting_ids(engine, tenants[0]) == [1, 2, 3, 4, 5]
    assert waiting_ids(engine, tenants[1]) == []
    assert "failed with ZeroDivisionError" in report.failed[0].detail
    assert status(engine, tenants[0]).last_error_details == "a user's mistake"


def test_cancelling_cancels_the_call_and_frees_the_lease_at_once(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, rows=100)
    inside, cut_off = threading.Event(), threading.Event()

    def answer(request: object, context: grpc.ServicerContext) -> object:
        if len(service.calls) < 3:
            return accept(request, context)  # type: ignore[arg-type]
        context.add_callback(cut_off.set)
        inside.set()
        assert cut_off.wait(30)
        return accept(request, context)  # type: ignore[arg-type]

    service.answer = answer  # type: ignore[assignment]
    sink = GrpcSink(settings)
    from outbox_pipelines.training.flusher import Flusher

    flusher = Flusher(engine, sink, settings, run_id="cancelled")
    reports = []
    thread = threading.Thread(target=lambda: reports.append(flusher.flush([tenant])))
    thread.start()
    assert inside.wait(30)
    flusher.cancel()
    thread.join(10)
    assert cut_off.wait(10), "the call goes on"
    assert reports[0].tenants[0].ending is Ending.CANCELLED
    assert ledger_ids(engine, tenant) == list(range(1, 21))
    assert waiting_ids(engine, tenant) == list(range(21, 101))
    found = status(engine, tenant)
    assert (found.lease_holder, found.failure_count) == (None, 0)


def test_a_tenant_removed_during_its_flush_loses_no_row(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, rows=10)

    def remove(request: object, context: object) -> object:
        with engine.begin() as connection:
            remove_tenant(connection, tenant.name, force=True)
        return accept(request, context)  # type: ignore[arg-type]

    service.answer = remove  # type: ignore[assignment]
    report = flush(engine, settings, tenant)
    assert report.tenants[0].ending is Ending.LEASE_LOST
    assert waiting_ids(engine, tenant) == list(range(1, 11))


def test_a_schema_dropped_before_the_run_is_told_and_holds_up_no_other(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    gone, there = new_tenant(engine, "gone", rows=1), new_tenant(engine, "there", rows=1)
    with engine.begin() as connection:
        connection.exec_driver_sql(f'DROP SCHEMA "{gone.schema}" CASCADE')
    report = flush(engine, settings, gone, there)
    assert ledger_ids(engine, there) == [1]
    assert [entry.tenant.name for entry in report.failed] == ["gone"]
    found = status(engine, gone)
    assert found.problem is Problem.BROKEN
    assert "does not exist; restore it, make missing tables anew" in (found.last_error or "")
    assert found.next_attempt_at is not None


def test_slow_calls_are_settled_one_behind(engine: Engine, settings: Settings, service: ScriptedService) -> None:
    tenant = new_tenant(engine, rows=30)
    third = threading.Event()
    go_on = threading.Event()

    def answer(request: object, context: object) -> object:
        threading.Event().wait(0.1)
        if len(service.calls) == 3:
            third.set()
            assert go_on.wait(30)
        return accept(request, context)  # type: ignore[arg-type]

    service.answer = answer  # type: ignore[assignment]
    thread = threading.Thread(target=flush, args=(engine, settings, tenant))
    thread.start()
    assert third.wait(30)
    wait_until(lambda: ledger_ids(engine, tenant) == list(range(1, 21)))
    assert waiting_ids(engine, tenant) == list(range(21, 31))
    go_on.set()
    thread.join()
    assert waiting_ids(engine, tenant) == []


def test_rows_enqueued_during_a_flush_are_not_lost(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, rows=150)

    def answer(request: object, context: object) -> object:
        if len(service.calls) % 5 == 0 and len(service.calls) < 50:
            enqueue(engine, tenant, [{"late": True}] * 7)
        return accept(request, context)  # type: ignore[arg-type]

    service.answer = answer  # type: ignore[assignment]
    flush(engine, settings, tenant)
    flush(engine, settings, tenant)
    assert waiting_ids(engine, tenant) == []
    assert sorted(service.ids()) == ledger_ids(engine, tenant)
    assert len(set(service.ids())) == len(service.ids()) > 150
