"""Processes are killed, services and databases go away: nothing is lost, nothing is learned twice."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import grpc
import pytest
from sqlalchemy import Engine, text

from outbox_pipelines.database.embedded import EmbeddedServer
from outbox_pipelines.database.engine import open_engine
from outbox_pipelines.database.migrate import migrate
from outbox_pipelines.database.url import render
from outbox_pipelines.ml_service import training_pb2, training_pb2_grpc
from outbox_pipelines.ml_service.model import OnlineModel, parse_example, parse_features
from outbox_pipelines.ml_service.server import MlServer
from outbox_pipelines.settings import Settings, load_settings
from outbox_pipelines.tenants.registry import Tenant
from outbox_pipelines.training.outcome import Ending
from tests.outboxes import enqueue, flush, ledger_ids, new_tenant, status, wait_until, waiting_ids
from tests.scripted_service import ScriptedService, accept


def examples(count: int) -> list[dict[str, object]]:
    """Distinct examples that a model can learn from."""
    return [{"features": {"a": n * 0.37, "b": (n % 7) / 3}, "label": n % 3 == 0} for n in range(count)]


def assert_learned_exactly(server: MlServer, tenant: Tenant, learned: list[dict[str, object]]) -> None:
    """The service's model is bit for bit the one that learned these once, in this order."""
    direct = OnlineModel()
    for example in learned:
        direct.learn(parse_example(json.dumps(example)))
    features = [json.dumps(example["features"]) for example in learned]
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = training_pb2_grpc.TrainingStub(channel)
        answer = stub.Predict(training_pb2.PredictRequest(tenant=str(tenant.tenant_id), features=features))
    assert answer.examples_seen == len(learned)
    expected = [direct.probability(parse_features(one)) for one in features]
    assert [value.hex() for value in answer.probabilities] == [value.hex() for value in expected]


@contextmanager
def flush_process(settings: Settings, tenant: Tenant, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    """`outbox flush` in a process of its own."""
    assert settings.database_url is not None
    process = subprocess.Popen(
        [sys.executable, "-m", "outbox_pipelines.cli", "flush", "--tenant", tenant.name],
        env={
            **os.environ,
            "OUTBOX_DATABASE_URL": settings.database_url.get_secret_value(),
            "OUTBOX_ML_TARGET": settings.ml_target,
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def expire_leases(engine: Engine) -> None:
    """What time does to the lease of a killed process."""
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE outbox.tenants SET lease_expires_at = clock_timestamp() WHERE lease_token IS NOT NULL")
        )


class Relay(ScriptedService):
    """Passes calls on to the reference service, so that a test can act between its answer and ours."""

    def __init__(self, server: MlServer) -> None:
        super().__init__()
        self._channel = grpc.insecure_channel(f"127.0.0.1:{server.port}")
        self._stub = training_pb2_grpc.TrainingStub(self._channel)
        self.after: Callable[[int], None] = lambda _call: None
        self.answer = self._relay

    def _relay(
        self, request: training_pb2.TrainBatchRequest, _context: grpc.ServicerContext
    ) -> training_pb2.TrainBatchResponse:
        response = self._stub.TrainBatch(request)
        self.after(len(self.calls))
        return response

    def stop(self) -> None:
        super().stop()
        self._channel.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MlServer]:
    """The reference ML service."""
    with MlServer(state_dir=tmp_path / "models") as running:
        yield running


@pytest.fixture
def relay(server: MlServer) -> Iterator[Relay]:
    """A service in front of it."""
    with Relay(server) as running:
        yield running


def test_a_process_killed_between_send_and_delete_loses_and_doubles_nothing(
    engine: Engine, make_settings: Callable[..., Settings], server: MlServer, relay: Relay
) -> None:
    settings = make_settings(ml_target=relay.target)
    tenant = new_tenant(engine)
    learned = examples(60)
    enqueue(engine, tenant, learned)
    with flush_process(settings, tenant) as process:
        # The service has learned the third batch; the process dies before it can know.
        relay.after = lambda call: process.send_signal(signal.SIGKILL) if call == 3 else None
        assert process.wait(60) == -signal.SIGKILL
    relay.after = lambda _call: None
    left = waiting_ids(engine, tenant)
    assert set(range(21, 61)) <= set(left)
    taken = flush(engine, settings, tenant)
    assert taken.tenants[0].ending is Ending.TAKEN, "the killed process still holds the lease"
    expire_leases(engine)
    flush(engine, settings, tenant)
    assert waiting_ids(engine, tenant) == []
    assert ledger_ids(engine, tenant) == list(range(1, 61))
    assert len(relay.ids()) > 60, "the third batch was sent again"
    assert_learned_exactly(server, tenant, learned)


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_process_frees_the_lease_at_once(
    engine: Engine, make_settings: Callable[..., Settings], service: ScriptedService, ending: signal.Signals
) -> None:
    tenant = new_tenant(engine, rows=40)
    inside, cut_off = threading.Event(), threading.Event()

    def answer(request: object, context: grpc.ServicerContext) -> object:
        if len(service.calls) == 3:
            context.add_callback(cut_off.set)
            inside.set()
            cut_off.wait(30)
        return accept(request, context)  # type: ignore[arg-type]

    service.answer = answer  # type: ignore[assignment]
    with flush_process(make_settings(), tenant) as process:
        assert inside.wait(60)
        process.send_signal(ending)
        assert process.wait(30) != 0
    assert cut_off.is_set()
    assert status(engine, tenant).lease_holder is None
    assert ledger_ids(engine, tenant) == list(range(1, 21))
    assert waiting_ids(engine, tenant) == list(range(21, 41))


def test_a_service_that_is_down_at_the_start_and_comes_back_gets_everything(
    engine: Engine, make_settings: Callable[..., Settings]
) -> None:
    service = ScriptedService()
    service.start()
    settings = make_settings(ml_target=service.target)
    service.stop()
    tenant = new_tenant(engine, rows=25)
    report = flush(engine, settings, tenant)
    assert report.tenants[0].ending is Ending.FAILED
    assert "UNAVAILABLE" in report.tenants[0].detail
    service.start()
    flush(engine, settings, tenant)
    service.stop()
    assert ledger_ids(engine, tenant) == service.ids() == list(range(1, 26))


def test_a_service_that_goes_down_in_the_middle_and_comes_back_learns_each_row_once(
    engine: Engine, make_settings: Callable[..., Settings], server: MlServer, relay: Relay
) -> None:
    settings = make_settings(ml_target=relay.target)
    tenant = new_tenant(engine)
    learned = examples(80)
    enqueue(engine, tenant, learned)

    def cut(call: int) -> None:
        if call == 4:
            # The answer to this call is lost, though the service has learned.
            threading.Thread(target=relay.stop).start()
            threading.Event().wait(0.5)

    relay.after = cut
    assert flush(engine, settings, tenant).tenants[0].ending is Ending.FAILED
    assert ledger_ids(engine, tenant) == list(range(1, 31))
    with Relay(server) as again:
        flush(engine, make_settings(ml_target=again.target), tenant)
    assert ledger_ids(engine, tenant) == list(range(1, 81))
    assert_learned_exactly(server, tenant, learned)


def test_a_service_slow_to_the_deadline_keeps_the_rows(
    engine: Engine, make_settings: Callable[..., Settings], service: ScriptedService
) -> None:
    tenant = new_tenant(engine, rows=20)
    late = threading.Event()

    def answer(request: object, context: grpc.ServicerContext) -> object:
        if len(service.calls) == 2:
            context.add_callback(late.set)
            late.wait(30)
        return accept(request, context)  # type: ignore[arg-type]

    service.answer = answer  # type: ignore[assignment]
    report = flush(engine, make_settings(ml_deadline_seconds=0.3), tenant)
    assert "DEADLINE_EXCEEDED" in report.tenants[0].detail
    assert waiting_ids(engine, tenant) == list(range(11, 21))
    service.answer = accept
    flush(engine, make_settings(), tenant)
    assert ledger_ids(engine, tenant) == list(range(1, 21))


def test_a_database_restarted_in_the_middle_of_a_drain_loses_nothing(tmp_path: Path, service: ScriptedService) -> None:
    folder = tmp_path / "postgres"
    with EmbeddedServer(folder) as embedded:
        url = render(embedded.url("postgres"))
        settings = load_settings(database_url=url, ml_target=service.target)
        engine = open_engine(settings, url, application_name="tests")
        migrate(engine)
        tenant = new_tenant(engine, rows=400)
        restarted = threading.Event()

        def answer(request: object, context: grpc.ServicerContext) -> object:
            if len(service.calls) == 15:
                embedded.restart()
                restarted.set()
            return accept(request, context)  # type: ignore[arg-type]

        service.answer = answer  # type: ignore[assignment]
        report = flush(engine, settings, tenant)
        assert restarted.is_set()
        assert report.tenants[0].ending is Ending.EMPTIED
        assert ledger_ids(engine, tenant) == list(range(1, 401))
        assert waiting_ids(engine, tenant) == []
        assert service.ids() == list(range(1, 401))
        engine.dispose()


def test_connections_cut_in_the_middle_of_a_drain_are_made_anew(
    engine: Engine, settings: Settings, service: ScriptedService, database_url: str
) -> None:
    tenant = new_tenant(engine, rows=300)
    flush_engine = open_engine(settings, database_url, application_name="victim")

    def answer(request: object, context: grpc.ServicerContext) -> object:
        if len(service.calls) % 8 == 0:
            with engine.begin() as connection:
                connection.execute(
                    text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'victim'")
                )
        return accept(request, context)  # type: ignore[arg-type]

    service.answer = answer  # type: ignore[assignment]
    report = flush(flush_engine, settings, tenant)
    flush_engine.dispose()
    assert report.tenants[0].ending is Ending.EMPTIED
    assert ledger_ids(engine, tenant) == service.ids() == list(range(1, 301))


def test_two_processes_at_once_send_each_row_once(
    engine: Engine, make_settings: Callable[..., Settings], service: ScriptedService
) -> None:
    tenant = new_tenant(engine, rows=500)
    with flush_process(make_settings(), tenant) as first, flush_process(make_settings(), tenant) as second:
        wait_until(lambda: first.poll() is not None and second.poll() is not None, seconds=60)
        assert (first.returncode, second.returncode) == (0, 0)
    assert service.ids() == list(range(1, 501))
    assert ledger_ids(engine, tenant) == list(range(1, 501))


def test_the_tenants_id_is_the_services_name_for_it(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, rows=1)
    flush(engine, settings, tenant)
    assert UUID(service.calls[0][0]) == tenant.tenant_id
