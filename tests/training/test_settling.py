"""What was delivered is settled and what was claimed is given back: through locks, cuts, interrupts and hangs."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import psycopg
import pytest
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.engine import ExceptionContext

from outbox_pipelines.database.engine import open_engine
from outbox_pipelines.database.quoting import driver_identifier
from outbox_pipelines.lease import heartbeat as heartbeat_module
from outbox_pipelines.settings import Settings
from outbox_pipelines.tenants.registry import Tenant
from outbox_pipelines.training import drain as drain_module
from outbox_pipelines.training import flusher as flusher_module
from outbox_pipelines.training.flusher import Flusher, FlushReport
from outbox_pipelines.training.grpc_sink import GrpcSink
from outbox_pipelines.training.outcome import Ending, TenantReport
from tests.outboxes import enqueue, flush, ledger_ids, new_tenant, status, wait_until, waiting_ids
from tests.scripted_service import ScriptedService, accept

MakeSettings = Callable[..., Settings]
OpenFlushEngine = Callable[[Settings], Engine]

LOCK_TIMED_OUT = "55P03"


@pytest.fixture
def open_flush_engine(database_url: str) -> Iterator[OpenFlushEngine]:
    """Makes engines of the flushes' own: their errors can be watched and their connections cut."""
    engines: list[Engine] = []

    def make(settings: Settings) -> Engine:
        engines.append(open_engine(settings, database_url, application_name="flush"))
        return engines[-1]

    yield make
    for engine in engines:
        engine.dispose()


@pytest.fixture
def holder(engine: Engine) -> Iterator[Connection]:
    """Another application's transaction, which holds locks until it is rolled back."""
    with engine.connect() as connection:
        yield connection


def lock_outbox(holder: Connection, tenant: Tenant, mode: str = "EXCLUSIVE") -> None:
    """Lock a tenant's outbox: in this mode it can be read and not be written."""
    holder.exec_driver_sql(f"LOCK TABLE {driver_identifier(tenant.schema)}.ml_outbox IN {mode} MODE")


def lock_registry_row(holder: Connection, tenant: Tenant) -> None:
    """Lock a tenant's line in the registry, where its lease is."""
    holder.execute(text("SELECT FROM outbox.tenants WHERE tenant_id = :id FOR UPDATE"), {"id": tenant.tenant_id}).one()


def cut_connections(engine: Engine) -> None:
    """What a restarted pooler or a firewall does to the flushes' connections."""
    with engine.begin() as connection:
        connection.execute(
            text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'flush'")
        )


class LockTimeouts:
    """The lock time-outs that an engine meets; runs ``then`` at each."""

    def __init__(self, engine: Engine, then: Callable[[], object] = lambda: None) -> None:
        self.statements: list[str] = []
        self.happened = threading.Event()
        self._then = then
        event.listen(engine, "handle_error", self._note)

    def _note(self, context: ExceptionContext) -> None:
        if getattr(context.original_exception, "sqlstate", None) == LOCK_TIMED_OUT:
            self.statements.append(context.statement or "")
            self._then()
            self.happened.set()


class Flushing:
    """A flush in a thread of its own, to be cancelled."""

    def __init__(self, engine: Engine, settings: Settings, *tenants: Tenant) -> None:
        self._sink = GrpcSink(settings)
        self._flusher = Flusher(engine, self._sink, settings, run_id="cancelled")
        self._reports: list[FlushReport] = []
        self._thread = threading.Thread(target=lambda: self._reports.append(self._flusher.flush(tenants)))
        self._thread.start()

    def cancel(self) -> list[TenantReport]:
        """Cancel and wait for the end."""
        self._flusher.cancel()
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self._reports[0].tenants


def assert_each_row_was_sent_and_settled_once(
    engine: Engine, service: ScriptedService, tenant: Tenant, rows: int
) -> None:
    expected = list(range(1, rows + 1))
    assert service.ids(tenant.tenant_id) == expected
    assert ledger_ids(engine, tenant) == expected
    assert waiting_ids(engine, tenant) == []


# Locks


@pytest.mark.parametrize("locked", [lock_outbox, lock_registry_row])
def test_what_a_lock_kept_from_being_settled_is_settled_before_the_lease_is_given_back(
    engine: Engine,
    make_settings: MakeSettings,
    service: ScriptedService,
    open_flush_engine: OpenFlushEngine,
    holder: Connection,
    locked: Callable[[Connection, Tenant], None],
) -> None:
    settings = make_settings(lock_timeout=0.3)
    tenant = new_tenant(engine, rows=10)
    flush_engine = open_flush_engine(settings)
    timeouts = LockTimeouts(flush_engine, then=holder.rollback)

    def answer(request: Any, context: Any) -> Any:
        locked(holder, tenant)
        return accept(request, context)

    service.answer = answer
    report = flush(flush_engine, settings, tenant)
    assert len(timeouts.statements) == 1
    assert report.rows == 10
    assert status(engine, tenant).lease_holder is None
    service.answer = accept
    flush(engine, settings, tenant)
    assert_each_row_was_sent_and_settled_once(engine, service, tenant, 10)


def test_a_lock_met_between_two_calls_of_a_turn_costs_no_delivery(
    engine: Engine,
    make_settings: MakeSettings,
    service: ScriptedService,
    open_flush_engine: OpenFlushEngine,
    holder: Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Every call counts as slow: its rows are settled while the next calls are in flight.
    monkeypatch.setattr(drain_module, "_SLOW_CALL_SECONDS", -1.0)
    settings = make_settings(lock_timeout=0.3)
    tenant = new_tenant(engine, rows=100)
    flush_engine = open_flush_engine(settings)
    timeouts = LockTimeouts(flush_engine, then=holder.rollback)

    def answer(request: Any, context: Any) -> Any:
        if len(service.calls) == 2:
            lock_outbox(holder, tenant)
        if len(service.calls) > 2:
            timeouts.happened.wait(0.1)
        return accept(request, context)

    service.answer = answer
    report = flush(flush_engine, settings, tenant).tenants[0]
    assert len(timeouts.statements) == 1
    # The turn ends there, or it was over when the time-out came.
    assert report.ending in {Ending.FAILED, Ending.EMPTIED}
    assert ledger_ids(engine, tenant) == service.ids()
    assert report.rows == len(service.ids())
    assert status(engine, tenant).lease_holder is None
    service.answer = accept
    flush(engine, settings, tenant)
    assert_each_row_was_sent_and_settled_once(engine, service, tenant, 100)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED])
def test_what_was_delivered_before_the_service_failed_is_settled_though_a_lock_is_in_the_way(
    engine: Engine,
    make_settings: MakeSettings,
    service: ScriptedService,
    open_flush_engine: OpenFlushEngine,
    holder: Connection,
    monkeypatch: pytest.MonkeyPatch,
    code: grpc.StatusCode,
) -> None:
    # No call counts as slow: nothing is settled before the failure.
    monkeypatch.setattr(drain_module, "_SLOW_CALL_SECONDS", 60.0)
    settings = make_settings(lock_timeout=0.3)
    tenant = new_tenant(engine, rows=30)
    flush_engine = open_flush_engine(settings)
    timeouts = LockTimeouts(flush_engine, then=holder.rollback)

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        if len(service.calls) == 3:
            lock_outbox(holder, tenant)
            context.abort(code, "not now")
        return accept(request, context)

    service.answer = answer
    report = flush(flush_engine, settings, tenant).tenants[0]
    assert len(timeouts.statements) == 1
    assert (report.ending, report.rows) == (Ending.FAILED, 20)
    assert code.name in report.detail
    assert ledger_ids(engine, tenant) == list(range(1, 21))
    assert waiting_ids(engine, tenant) == list(range(21, 31))
    assert status(engine, tenant).lease_holder is None


def test_a_flush_at_its_end_settles_once_more_what_a_lock_kept_from_it_and_ends_well(
    engine: Engine,
    make_settings: MakeSettings,
    service: ScriptedService,
    open_flush_engine: OpenFlushEngine,
    holder: Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The only call counts as slow: its rows are being settled when the turn is over.
    monkeypatch.setattr(drain_module, "_SLOW_CALL_SECONDS", -1.0)
    settings = make_settings(lock_timeout=0.3, max_rows_per_turn=10)
    tenant = new_tenant(engine, rows=20)
    flush_engine = open_flush_engine(settings)
    timeouts = LockTimeouts(flush_engine, then=holder.rollback)

    def answer(request: Any, context: Any) -> Any:
        lock_outbox(holder, tenant)
        return accept(request, context)

    service.answer = answer
    report = flush(flush_engine, settings, tenant, max_turns=1).tenants[0]
    assert len(timeouts.statements) == 1
    assert (report.ending, report.rows, report.problem) == (Ending.TURNS_TAKEN, 10, None)
    assert status(engine, tenant).lease_holder is None
    assert ledger_ids(engine, tenant) == list(range(1, 11))
    assert waiting_ids(engine, tenant) == list(range(11, 21))


def test_a_locked_outbox_is_tried_once_and_keeps_the_database_thread_from_nobody(
    engine: Engine,
    make_settings: MakeSettings,
    service: ScriptedService,
    open_flush_engine: OpenFlushEngine,
    holder: Connection,
) -> None:
    # The smallest pool: one connection for all steps, one for the heartbeat.
    settings = make_settings(lock_timeout=0.3, pool_size=2)
    locked, free = new_tenant(engine, "locked", rows=1), new_tenant(engine, "free", rows=1)
    flush_engine = open_flush_engine(settings)
    timeouts = LockTimeouts(flush_engine)
    lock_outbox(holder, locked, "ACCESS EXCLUSIVE")
    report = flush(flush_engine, settings, locked, free)
    assert [entry.ending for entry in report.tenants] == [Ending.FAILED, Ending.EMPTIED]
    assert len(timeouts.statements) == 1
    assert report.tenants[0].detail.startswith("the database failed: canceling statement due to lock timeout")
    holder.rollback()
    assert status(engine, locked).lease_holder is None
    assert waiting_ids(engine, locked) == [1]
    assert ledger_ids(engine, free) == [1]


def test_one_locked_line_of_the_registry_costs_no_other_tenant_its_lease(
    engine: Engine,
    make_settings: MakeSettings,
    service: ScriptedService,
    open_flush_engine: OpenFlushEngine,
    holder: Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeat_module, "SHORTEST_INTERVAL_SECONDS", 0.1)
    # Shorter than the settings allow, since the test waits for longer than a lease.
    settings = make_settings(lock_timeout=0.3).model_copy(update={"lease_seconds": 1.0})
    locked, free = new_tenant(engine, "locked", rows=1), new_tenant(engine, "free", rows=20)
    is_locked, is_done = threading.Event(), threading.Event()

    def lease_ends_at() -> float:
        with engine.connect() as connection:
            ends_at: float = connection.execute(
                text("SELECT extract(epoch FROM lease_expires_at)::float8 FROM outbox.tenants WHERE name = 'free'")
            ).scalar_one()
        return ends_at

    def answer(request: Any, context: Any) -> Any:
        if request.tenant == str(locked.tenant_id):
            lock_registry_row(holder, locked)
            is_locked.set()
            assert is_done.wait(20)
            holder.rollback()
        elif len(service.ids(free.tenant_id)) == 10:
            assert is_locked.wait(20)
            first = lease_ends_at()
            # One call outlasts the lease: only the heartbeat renews it meanwhile.
            wait_until(lambda: lease_ends_at() > first + settings.lease_seconds, seconds=5)
        else:
            is_done.set()
        return accept(request, context)

    service.answer = answer
    report = flush(open_flush_engine(settings), settings, locked, free)
    is_done.set()
    assert report.tenants[1].ending is Ending.EMPTIED
    assert_each_row_was_sent_and_settled_once(engine, service, free, 20)


# Renewals that hang


class HungRenewals:
    """From the first call on, no lease can be renewed; the second call outlasts the lease."""

    lease_seconds = 1.0

    def __init__(self, service: ScriptedService, holder: Connection, *, and_then: str = "SELECT 1") -> None:
        self._service = service
        self._holder = holder
        self._and_then = and_then
        self._is_free = threading.Event()
        self.called_while_unsure = False

    def answer(self, request: Any, context: Any) -> Any:
        """Hang the registry at the first call and free it a second after the end of the second."""
        if len(self._service.calls) == 1:
            self._holder.exec_driver_sql("LOCK TABLE outbox.tenants IN EXCLUSIVE MODE")
        elif len(self._service.calls) == 2:
            time.sleep(self.lease_seconds + 0.1)
            threading.Timer(1.0, self._free).start()
        elif not self._is_free.is_set():
            self.called_while_unsure = True
        return accept(request, context)

    def _free(self) -> None:
        self._holder.exec_driver_sql(self._and_then)
        self._is_free.set()
        self._holder.commit()


STEAL = """
    UPDATE outbox.tenants SET lease_token = gen_random_uuid(), lease_holder = 'thief',
                              lease_expires_at = clock_timestamp() + interval '1 hour'
"""


@pytest.fixture
def unsure(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A lease shorter than the settings allow, since the test waits for longer than one."""
    monkeypatch.setattr(heartbeat_module, "SHORTEST_INTERVAL_SECONDS", 0.1)
    return settings.model_copy(update={"lease_seconds": HungRenewals.lease_seconds})


def test_a_drain_whose_lease_cannot_be_renewed_makes_no_call_until_the_database_has_confirmed_it(
    engine: Engine, unsure: Settings, service: ScriptedService, open_flush_engine: OpenFlushEngine, holder: Connection
) -> None:
    tenant = new_tenant(engine, rows=100)
    hung = HungRenewals(service, holder)
    service.answer = hung.answer
    report = flush(open_flush_engine(unsure), unsure, tenant)
    assert not hung.called_while_unsure
    assert report.tenants[0].ending is Ending.EMPTIED
    assert_each_row_was_sent_and_settled_once(engine, service, tenant, 100)


def test_a_drain_that_learns_that_its_lease_was_taken_meanwhile_makes_no_further_call(
    engine: Engine, unsure: Settings, service: ScriptedService, open_flush_engine: OpenFlushEngine, holder: Connection
) -> None:
    tenant = new_tenant(engine, rows=100)
    service.answer = HungRenewals(service, holder, and_then=STEAL).answer
    report = flush(open_flush_engine(unsure), unsure, tenant)
    assert report.tenants[0].ending is Ending.LEASE_LOST
    assert service.ids() == list(range(1, 21))
    assert waiting_ids(engine, tenant) == list(range(1, 101))
    assert status(engine, tenant).lease_holder == "thief"


def test_a_drain_that_cannot_ask_whether_its_lease_is_still_its_own_makes_no_further_call(
    engine: Engine, unsure: Settings, service: ScriptedService, open_flush_engine: OpenFlushEngine, holder: Connection
) -> None:
    impatient = unsure.model_copy(update={"lock_timeout": 0.2})
    tenant = new_tenant(engine, rows=100)

    def answer(request: Any, context: Any) -> Any:
        if len(service.calls) == 1:
            holder.exec_driver_sql("LOCK TABLE outbox.tenants IN EXCLUSIVE MODE")
        else:
            time.sleep(HungRenewals.lease_seconds + 0.1)
        return accept(request, context)

    service.answer = answer
    report = flush(open_flush_engine(impatient), impatient, tenant)
    assert report.tenants[0].ending is Ending.LEASE_LOST
    assert "another run may have it" in report.tenants[0].detail
    assert service.ids() == list(range(1, 21))


def test_what_was_delivered_before_a_lease_became_unsure_is_settled_when_nobody_took_it(
    engine: Engine,
    unsure: Settings,
    service: ScriptedService,
    open_flush_engine: OpenFlushEngine,
    holder: Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The first call's rows are being settled, in vain, when the second call is answered.
    monkeypatch.setattr(drain_module, "_SLOW_CALL_SECONDS", -1.0)
    tenant = new_tenant(engine, rows=100)
    service.answer = HungRenewals(service, holder).answer
    flush(open_flush_engine(unsure), unsure, tenant)
    assert_each_row_was_sent_and_settled_once(engine, service, tenant, 100)


# Cancelling


def test_a_flush_cancelled_after_its_connections_were_cut_settles_and_frees_every_lease(
    engine: Engine, settings: Settings, service: ScriptedService, open_flush_engine: OpenFlushEngine
) -> None:
    tenants = [new_tenant(engine, f"t{number}", rows=100) for number in range(4)]
    hanging, go_on = threading.Semaphore(0), threading.Event()

    def answer(request: Any, context: Any) -> Any:
        if len(service.ids(request.tenant)) > 30:
            hanging.release()
            go_on.wait(20)
        return accept(request, context)

    service.answer = answer
    flushing = Flushing(open_flush_engine(settings), settings, *tenants)
    for _ in tenants:
        assert hanging.acquire(timeout=20)
    cut_connections(engine)
    reports = flushing.cancel()
    go_on.set()
    assert [report.ending for report in reports] == [Ending.CANCELLED] * 4
    assert [report.rows for report in reports] == [30] * 4
    for tenant in tenants:
        assert status(engine, tenant).lease_holder is None
        assert ledger_ids(engine, tenant) == list(range(1, 31))
        assert waiting_ids(engine, tenant) == list(range(31, 101))


def test_a_flush_cancelled_while_settling_meets_a_lock_settles_once_more(
    engine: Engine,
    make_settings: MakeSettings,
    service: ScriptedService,
    open_flush_engine: OpenFlushEngine,
    holder: Connection,
) -> None:
    settings = make_settings(lock_timeout=0.3)
    tenant = new_tenant(engine, rows=100)
    flush_engine = open_flush_engine(settings)
    timeouts = LockTimeouts(flush_engine, then=holder.rollback)
    inside, go_on = threading.Event(), threading.Event()

    def answer(request: Any, context: Any) -> Any:
        if len(service.calls) == 3:
            lock_outbox(holder, tenant)
            inside.set()
            go_on.wait(20)
        return accept(request, context)

    service.answer = answer
    flushing = Flushing(flush_engine, settings, tenant)
    assert inside.wait(20)
    (report,) = flushing.cancel()
    go_on.set()
    assert len(timeouts.statements) == 1
    assert status(engine, tenant).lease_holder is None
    assert report.rows == 20
    assert ledger_ids(engine, tenant) == list(range(1, 21))
    assert waiting_ids(engine, tenant) == list(range(21, 101))


@pytest.mark.parametrize("moment", ["while the calls are handed out", "while they are waited for"])
def test_an_interrupt_at_any_moment_cancels_the_flush(
    engine: Engine,
    settings: Settings,
    service: ScriptedService,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    tenant = new_tenant(engine, rows=50)
    were_cut_off: list[bool] = []

    def hang(request: Any, context: grpc.ServicerContext) -> Any:
        cut_off = threading.Event()
        context.add_callback(cut_off.set)
        were_cut_off.append(cut_off.wait(3))
        return accept(request, context)

    service.answer = hang

    class Interrupted(ThreadPoolExecutor):
        def submit(self, *arguments: Any, **named: Any) -> Any:
            super().submit(*arguments, **named)
            raise KeyboardInterrupt

    def interrupted(*_arguments: Any, **_named: Any) -> Any:
        wait_until(lambda: service.calls)
        raise KeyboardInterrupt

    if moment == "while they are waited for":
        monkeypatch.setattr(flusher_module, "wait", interrupted)
    else:
        monkeypatch.setattr(flusher_module, "ThreadPoolExecutor", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        flush(engine, settings, tenant)
    assert len(service.calls) <= 1
    wait_until(lambda: len(were_cut_off) == len(service.calls))
    assert all(were_cut_off)
    assert status(engine, tenant).lease_holder is None
    assert waiting_ids(engine, tenant) == list(range(1, 51))
    assert ledger_ids(engine, tenant) == []


# Endings


@pytest.mark.parametrize("expected", [Ending.EMPTIED, Ending.FAILED])
def test_a_release_whose_answer_was_lost_is_repeated_and_counts_as_done(
    engine: Engine,
    settings: Settings,
    service: ScriptedService,
    open_flush_engine: OpenFlushEngine,
    expected: Ending,
) -> None:
    tenant = new_tenant(engine, rows=3)
    flush_engine = open_flush_engine(settings)
    releases: list[str] = []

    def lose_the_answer(_connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        if "lease_token = NULL" in statement:
            releases.append(statement)
            if len(releases) == 1:
                raise psycopg.OperationalError("the connection is lost")

    event.listen(flush_engine, "after_cursor_execute", lose_the_answer)
    if expected is Ending.FAILED:
        service.answer = lambda _request, context: context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
    report = flush(flush_engine, settings, tenant)
    assert len(releases) == 2
    assert report.tenants[0].ending is expected
    found = status(engine, tenant)
    assert (found.lease_holder, found.failure_count) == (None, 0 if expected is Ending.EMPTIED else 1)


def test_a_paused_tenant_is_told_as_paused_though_a_dead_runs_lease_is_still_noted(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, rows=1)
    with engine.begin() as connection:
        connection.execute(
            text("""
                UPDATE outbox.tenants SET paused = true, lease_token = gen_random_uuid(), lease_holder = 'dead run',
                       lease_expires_at = clock_timestamp() - interval '1 day'
            """)
        )
    report = flush(engine, settings, tenant).tenants[0]
    assert report.ending is Ending.TAKEN
    assert "paused" in report.detail
    assert "dead run" not in report.detail
    assert service.calls == []


def test_rows_committed_during_the_last_turn_are_sent_before_the_outbox_counts_as_emptied(
    engine: Engine, settings: Settings, service: ScriptedService, open_flush_engine: OpenFlushEngine
) -> None:
    tenant = new_tenant(engine, rows=10)
    flush_engine = open_flush_engine(settings)
    reads: list[str] = []

    def count_reads(_connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        if "SELECT id, example" in statement:
            reads.append(statement)

    event.listen(flush_engine, "after_cursor_execute", count_reads)

    def answer(request: Any, context: Any) -> Any:
        if len(service.calls) == 1:
            # The turn's own rows were read, and so were those of the next: none.
            wait_until(lambda: len(reads) == 2)
            enqueue(engine, tenant, [{"late": True}])
        return accept(request, context)

    service.answer = answer
    report = flush(flush_engine, settings, tenant)
    assert report.tenants[0].ending is Ending.EMPTIED
    assert_each_row_was_sent_and_settled_once(engine, service, tenant, 11)
