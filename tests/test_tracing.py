"""Spans, seen by a real collector: who is whose child, what they say, what they never say, and what they may cost."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from sqlalchemy import Engine

from outbox_pipelines import otlp, tracing
from outbox_pipelines.database.database import Database
from outbox_pipelines.jobs.context import JobContext
from outbox_pipelines.jobs.keeper import LeaseKeeper
from outbox_pipelines.jobs.kinds import Kinds
from outbox_pipelines.jobs.message import AttemptOutcome, NotClaimed
from outbox_pipelines.jobs.runner import Report, Runner
from outbox_pipelines.jobs.worker import Worker
from outbox_pipelines.ml_service import training_pb2
from outbox_pipelines.ml_service.server import MlServer
from outbox_pipelines.settings import Settings
from tests.collector import Collected, Collector
from tests.command_line import Run, succeeded
from tests.jobs.messages import KIND, a_kind, enqueue, enqueue_many, row, run, states, value
from tests.jobs.worker_process import NO_PAUSE, make_executions, process
from tests.ml_service.client import Client
from tests.ml_service.service_process import ServiceProcess
from tests.outboxes import enqueue as enqueue_rows
from tests.outboxes import flush, new_tenant, wait_until, waiting_ids
from tests.scripted_service import ScriptedService

CALL = "outbox_pipelines.v1.Training/TrainBatch"
SECRET = "8d1cf0-nobody-may-read-this"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector, and an environment in which this process and its children send to it."""
    with Collector() as running:
        for name, said in running.environment.items():
            monkeypatch.setenv(name, said)
        otlp.close()
        yield running
        otlp.close()


@pytest.fixture
def application() -> Iterator[Callable[..., Any]]:
    """Spans of an application that traces in its own way: nothing of ours is turned on by them."""
    provider = TracerProvider(shutdown_on_exit=False)
    yield provider.get_tracer("application").start_as_current_span
    provider.shutdown()


def ids(span: Any) -> tuple[str, str]:
    """The trace and the span of an application's span."""
    context = span.get_span_context()
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"


def run_message(
    engine: Engine, settings: Settings, message_id: int, handler: Callable[[JobContext], object], **how: Any
) -> Report | NotClaimed:
    """Run a message in this process, as a Dagster run does."""
    assert settings.database_url is not None
    url = settings.database_url.get_secret_value()
    with LeaseKeeper(engine, url=url, settings=settings) as keeper:
        return Runner(engine, keeper, holder="run 1").run(
            a_kind(handler=handler, backoff=NO_PAUSE, **how), message_id, on_progress=lambda _step, _fraction: None
        )


# Training


def test_a_flush_its_calls_and_the_services_answers_are_one_trace_across_processes(
    engine: Engine, outbox: Run, tmp_path: Path, collector: Collector
) -> None:
    tenant = new_tenant(engine)
    enqueue_rows(engine, tenant, ({"features": {"n": number}, "label": True} for number in range(25)))
    with ServiceProcess(tmp_path / "models") as service:
        succeeded(outbox("flush", "--tenant", "acme", OUTBOX_ML_TARGET=f"127.0.0.1:{service.port}"))
        service.send(signal.SIGTERM)
        assert service.ended()[0] == 0
    (flushed,) = collector.named("outbox flush")
    turns = collector.named("outbox turn", count=2)
    calls = {span.span_id: span for span in collector.named(CALL, count=6) if span.kind == "CLIENT"}
    answers = [span for span in collector.spans if span.name == CALL and span.kind == "SERVER"]
    assert flushed.parent_id == ""
    assert {turn.parent_id for turn in turns} == {flushed.span_id}
    assert {call.parent_id for call in calls.values()} <= {turn.span_id for turn in turns}
    assert sorted(answer.parent_id for answer in answers) == sorted(calls)
    assert {span.trace_id for span in collector.spans} == {flushed.trace_id}
    assert flushed.attributes | {"outbox.run_id": ""} == {
        "outbox.run_id": "",
        "outbox.tenants": 1,
        "outbox.rows": 25,
        "outbox.batches": 3,
        "outbox.dead_letters": 0,
    }
    for span in (*calls.values(), *answers):
        assert span.attributes["rpc.grpc.status_code"] == 0
        assert (span.attributes["rpc.system"], span.attributes["rpc.method"]) == ("grpc", "TrainBatch")
        assert not span.failed
    assert sorted(span.attributes["outbox.rows"] for span in answers) == [5, 10, 10]
    assert {span.service for span in collector.spans} == {"outbox-pipelines"}


def test_a_service_that_is_unwell_is_seen_in_the_call_the_turn_and_the_flush(
    engine: Engine, settings: Settings, service: ScriptedService, collector: Collector
) -> None:
    def refuse(_request: object, context: grpc.ServicerContext) -> training_pb2.TrainBatchResponse:
        context.abort(grpc.StatusCode.UNAVAILABLE, SECRET)
        raise AssertionError

    service.answer = refuse
    good, bad = new_tenant(engine, "good"), new_tenant(engine, "bad", rows=3)
    flush(engine, settings, good, bad)
    (call,) = collector.named(CALL)
    assert call.failed
    assert (call.attributes["rpc.grpc.status_code"], call.attributes["error.type"]) == (14, "UNAVAILABLE")
    turns = {turn.attributes["outbox.tenant"]: turn for turn in collector.named("outbox turn", count=2)}
    assert (turns["bad"].failed, turns["bad"].told, turns["bad"].attributes["outbox.ending"]) == (
        True,
        "unwell",
        "failed",
    )
    assert (turns["good"].failed, turns["good"].attributes["outbox.ending"]) == (False, "emptied")
    (flushed,) = collector.named("outbox flush")
    assert (flushed.failed, flushed.told) == (True, "1 of 2 tenants failed")


def test_a_call_that_the_service_refuses_is_seen_with_its_status_and_without_its_words(
    tmp_path: Path, collector: Collector
) -> None:
    with MlServer(state_dir=tmp_path / "models") as server, Client(server.port) as client:
        with pytest.raises(grpc.RpcError):
            client.predict([SECRET], tenant="")
        with pytest.raises(grpc.RpcError):
            client.predict([SECRET])
    refused = collector.named("outbox_pipelines.v1.Training/Predict", count=2)
    assert sorted((one.attributes["rpc.grpc.status_code"], one.told) for one in refused) == [
        (3, "INVALID_ARGUMENT"),
        (9, "FAILED_PRECONDITION"),
    ]
    assert SECRET.encode() not in collector.everything


# Jobs


def handler_of(collector: Collector, message_id: int) -> Collected:
    """The one span of a message's handler."""
    (found,) = [
        span for span in collector.named("outbox handler") if span.attributes["messaging.message.id"] == str(message_id)
    ]
    return found


@pytest.mark.parametrize("role", ["work", "run"])
def test_a_handler_in_another_process_is_the_child_of_the_span_that_enqueued_its_message(
    engine: Engine, database_url: str, collector: Collector, application: Callable[..., Any], role: str
) -> None:
    make_executions(engine)
    with application("request") as request:
        message_id = enqueue(engine, payload={"do": [["span", "the handler's own"]]})
    with process(database_url, role, {"name": KIND}, message=message_id) as started:
        wait_until(lambda: states(engine)[message_id] == "Completed")
        if role == "work":
            started.send_signal(signal.SIGTERM)
        assert started.wait(30) == 0
    handler = handler_of(collector, message_id)
    assert (handler.trace_id, handler.parent_id) == ids(request)
    assert handler.kind == "CONSUMER"
    assert handler.attributes | {"outbox.holder": ""} == {
        "messaging.system": "outbox",
        "messaging.destination.name": KIND,
        "messaging.operation.name": "handle",
        "messaging.operation.type": "process",
        "messaging.message.id": str(message_id),
        "outbox.attempt": 1,
        "outbox.outcome": "succeeded",
        "outbox.holder": "",
    }
    (own,) = collector.named("the handler's own")
    assert (own.trace_id, own.parent_id) == (handler.trace_id, handler.span_id)
    (claim,) = collector.named("outbox claim")
    assert claim.attributes["outbox.holder"] == handler.attributes["outbox.holder"]
    assert claim.attributes["messaging.destination.name"] == KIND


def test_each_attempt_is_a_child_of_the_same_span_and_tells_how_it_was_judged(
    engine: Engine, settings: Settings, collector: Collector, application: Callable[..., Any]
) -> None:
    def fail_at_first(job: JobContext) -> None:
        if job.attempt < 3:
            raise LookupError(SECRET)

    with application("request") as request:
        message_id = enqueue(engine)
    for _ in range(3):
        run_message(engine, settings, message_id, fail_at_first)
    attempts = collector.named("outbox handler", count=3)
    assert {(span.trace_id, span.parent_id) for span in attempts} == {ids(request)}
    told = [(span.attributes["outbox.attempt"], span.attributes["outbox.outcome"], span.failed) for span in attempts]
    assert sorted(told) == [(1, "failed", True), (2, "failed", True), (3, "succeeded", False)]
    assert {span.attributes["error.type"] for span in attempts if span.failed} == {"LookupError"}


def test_a_message_without_a_context_or_with_nonsense_for_one_has_a_trace_of_its_own(
    engine: Engine, settings: Settings, collector: Collector
) -> None:
    run(engine, "INSERT INTO outbox.messages (kind, trace_context) VALUES ('work', NULL), ('work', 'nonsense')")
    for message_id in sorted(states(engine)):
        report = run_message(engine, settings, message_id, lambda _job: None)
        assert isinstance(report, Report)
        assert report.outcome is AttemptOutcome.SUCCEEDED
    handlers = collector.named("outbox handler", count=2)
    assert [span.parent_id for span in handlers] == ["", ""]
    assert len({span.trace_id for span in handlers}) == 2


def test_another_language_may_write_the_context_itself(
    engine: Engine, settings: Settings, collector: Collector
) -> None:
    run(
        engine,
        "INSERT INTO outbox.messages (kind, trace_context) VALUES "
        "('work', '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01')",
    )
    (message_id,) = states(engine)
    run_message(engine, settings, message_id, lambda _job: None)
    (handler,) = collector.named("outbox handler")
    assert (handler.trace_id, handler.parent_id) == ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")


def test_a_handler_that_is_left_to_itself_is_seen_all_the_same(
    engine: Engine, settings: Settings, collector: Collector
) -> None:
    message_id = enqueue(engine)
    release = threading.Event()

    def insist(_job: JobContext) -> None:
        while not release.is_set():
            try:
                release.wait(0.05)
            except BaseException:
                continue

    try:
        run_message(engine, settings, message_id, insist, timeout=0.5)
        (handler,) = collector.named("outbox handler")
    finally:
        release.set()
    assert (handler.failed, handler.attributes["outbox.outcome"]) == (True, "failed")


def test_a_refused_claim_says_why(engine: Engine, settings: Settings, collector: Collector) -> None:
    assert isinstance(run_message(engine, settings, 123, lambda _job: None), NotClaimed)
    (claim,) = collector.named("outbox claim")
    assert (claim.kind, claim.attributes["outbox.outcome"]) == ("CLIENT", "unknown")


def test_a_worker_tells_of_claims_that_took_something_and_of_each_message(
    engine: Engine, make_settings: Callable[..., Settings], collector: Collector
) -> None:
    settings = make_settings(worker_poll_seconds=0.05)
    with Worker(Database(settings), Kinds([a_kind()]), settings) as running:
        began = time.monotonic()
        # A look that finds nothing.
        wait_until(lambda: time.monotonic() - running.served()[0].progress_age > began)
        enqueue_many(engine, 20)
        wait_until(lambda: set(states(engine).values()) == {"Completed"})
    handlers = collector.named("outbox handler", count=20)
    assert len({span.attributes["messaging.message.id"] for span in handlers}) == 20
    claims = [span for span in collector.spans if span.name == "outbox claim"]
    counts = [span.attributes["messaging.batch.message_count"] for span in claims]
    assert sum(counts) == 20
    assert 0 not in counts


# The enqueuing application


def test_without_a_current_span_nothing_is_stored(engine: Engine) -> None:
    assert row(engine, enqueue(engine)).trace_context is None


def test_the_applications_current_span_is_stored_without_any_variable(
    engine: Engine, application: Callable[..., Any]
) -> None:
    with application("request") as request:
        first, *_ = enqueue_many(engine, 3)
    trace_id, span_id = ids(request)
    flags = request.get_span_context().trace_flags
    stored = value(engine, "SELECT array_agg(DISTINCT trace_context) FROM outbox.messages")
    assert (first, stored) == (1, [f"00-{trace_id}-{span_id}-{flags:02x}"])


# What is never told


def test_no_payload_parameter_token_or_word_of_others_is_in_any_span(
    engine: Engine, make_settings: Callable[..., Settings], service: ScriptedService, collector: Collector
) -> None:
    settings = make_settings(ml_token=f"token-{SECRET}")

    def blame(request: training_pb2.TrainBatchRequest, context: grpc.ServicerContext) -> Any:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"cannot learn {request.examples[0].json}")

    service.answer = blame
    tenant = new_tenant(engine)
    enqueue_rows(engine, tenant, [{"text": SECRET}] * 3)
    assert flush(engine, settings, tenant).dead_letters == 3

    def quote(job: JobContext) -> None:
        with job.session() as session:
            session.connection().exec_driver_sql("SELECT CAST(%s AS integer)", (job.payload["text"],))

    def tell(job: JobContext) -> None:
        job.progress(job.payload["text"])
        raise ValueError(job.payload["text"])

    for handler in (quote, tell):
        run_message(engine, settings, enqueue(engine, payload={"text": SECRET}), handler)
    collector.named("outbox handler", count=2)
    collector.named("outbox flush")
    assert SECRET.encode() not in collector.everything
    assert SECRET in str(row(engine, 1).last_error), "the handler's error quoted it"


def test_an_error_that_comes_out_of_a_span_is_told_by_its_type(collector: Collector) -> None:
    with pytest.raises(ValueError, match=SECRET), tracing.span("broken"):
        raise ValueError(SECRET)
    (broken,) = collector.named("broken")
    assert (broken.failed, broken.told, broken.attributes) == (True, "ValueError", {"error.type": "ValueError"})
    assert SECRET.encode() not in collector.everything


# What it may cost


WITHOUT_OPENTELEMETRY = """
import json, sys, threading
{before}
from outbox_pipelines.database.database import Database
from outbox_pipelines.jobs.kinds import JobKind, Kinds
from outbox_pipelines.jobs.enqueue import enqueue_job
from outbox_pipelines.jobs.worker import Worker
from outbox_pipelines.settings import load_settings
from outbox_pipelines.tenants.registry import get_tenant
from outbox_pipelines.training.flusher import Flusher
from outbox_pipelines.training.grpc_sink import GrpcSink

settings = load_settings(worker_poll_seconds=0.1)
done = threading.Event()
with Database(settings) as database:
    with database.engine.begin() as connection:
        tenant = get_tenant(connection, "acme")
        enqueue_job(connection, "work")
    sink = GrpcSink(settings)
    rows = Flusher(database.engine, sink, settings, run_id="test").flush([tenant]).rows
    sink.close()
    with Worker(database, Kinds([JobKind("work", lambda job: done.set(), lease=10)]), settings):
        assert done.wait(20)
print(rows, sorted(name for name in sys.modules if name.partition(".")[0] == "opentelemetry" and sys.modules[name]))
"""


def flush_and_work(settings: Settings, before: str = "", **environment: str) -> "subprocess.CompletedProcess[str]":
    """A flush and a worker in a process of its own, which says how many rows went and what it imported."""
    assert settings.database_url is not None
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_OPENTELEMETRY.format(before=before)],
        env={
            **os.environ,
            "OUTBOX_DATABASE_URL": settings.database_url.get_secret_value(),
            "OUTBOX_ML_TARGET": settings.ml_target,
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


@pytest.mark.parametrize(
    "environment",
    [{}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"}],
    ids=["no variable", "disabled"],
)
def test_unless_it_is_turned_on_opentelemetry_is_not_imported(
    engine: Engine, settings: Settings, environment: dict[str, str]
) -> None:
    new_tenant(engine, rows=3)
    assert flush_and_work(settings, **environment).stdout == "3 []\n"


def test_without_the_packages_work_is_done_and_one_warning_says_what_to_install(
    engine: Engine, settings: Settings, collector: Collector
) -> None:
    new_tenant(engine, rows=3)
    done = flush_and_work(settings, "sys.modules['opentelemetry'] = None")
    assert done.stdout == "3 []\n"
    assert done.stderr == "no spans are made: opentelemetry is missing; pip install 'outbox-pipelines[otel]'\n"


def test_a_variable_that_cannot_be_used_costs_the_spans_alone_and_is_not_quoted(
    engine: Engine, settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", SECRET)
    otlp.close()
    with caplog.at_level(logging.WARNING):
        assert flush(engine, settings, new_tenant(engine, rows=3)).rows == 3
    otlp.close()
    assert caplog.messages == ["no spans are made: ValueError; look at the OTEL_ variables"]


@contextmanager
def nobody() -> Iterator[int]:
    """A port on which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@contextmanager
def silence() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.mark.parametrize("away", [nobody, silence])
def test_a_collector_that_is_away_neither_fails_nor_holds_up_a_flush_or_a_job(
    engine: Engine,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    away: Callable[[], Any],
) -> None:
    tenant = new_tenant(engine, rows=300)
    message_id = enqueue(engine)
    with away() as port:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        otlp.close()
        assert tracing.is_on()
        began = time.monotonic()
        assert flush(engine, settings, tenant).rows == 300
        report = run_message(engine, settings, message_id, lambda _job: None)
        worked = time.monotonic() - began
        otlp.close()
        ended = time.monotonic() - began - worked
    assert isinstance(report, Report)
    assert report.outcome is AttemptOutcome.SUCCEEDED
    assert waiting_ids(engine, tenant) == []
    # A call that is waited for takes a minute here.
    assert worked < 15
    assert ended < 4


def test_a_process_ends_soon_though_its_collector_is_silent(engine: Engine, outbox: Run) -> None:
    new_tenant(engine, rows=30)
    with silence() as port:
        began = time.monotonic()
        done = outbox(
            "flush",
            "--all",
            OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{port}",
            OTEL_EXPORTER_OTLP_TIMEOUT="60",
        )
        took = time.monotonic() - began
    assert "acme: emptied, 30 rows" in succeeded(done)
    # OpenTelemetry's own end would wait for 30 s.
    assert took < 25


# Processes


FORKING = """
import atexit, os, sys
from opentelemetry import trace
from outbox_pipelines import otlp, tracing

with tracing.span("in the parent"):
    pass
# Over a connection that is open then.
trace.get_tracer_provider().force_flush()
child = os.fork()
if child == 0:
    with tracing.span("in the child"):
        pass
    # As a forked run's process ends.
    atexit._run_exitfuncs()
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_sends_its_own_spans_and_no_others(collector: Collector) -> None:
    subprocess.run([sys.executable, "-c", FORKING], timeout=60, check=True)
    assert sorted(span.name for span in collector.spans) == ["in the child", "in the parent"]


def test_a_forked_process_decides_for_itself_whether_it_traces(collector: Collector) -> None:
    # A run's own variables are set after the fork.
    before = "import os\nendpoint = os.environ.pop('OTEL_EXPORTER_OTLP_ENDPOINT')\n"
    forking = FORKING.replace("trace.get_tracer_provider().force_flush()", "assert not tracing.is_on()")
    in_child = "if child == 0:\n    os.environ['OTEL_EXPORTER_OTLP_ENDPOINT'] = endpoint"
    forking = before + forking.replace("if child == 0:", in_child)
    subprocess.run([sys.executable, "-c", forking], timeout=60, check=True)
    assert [span.name for span in collector.spans] == ["in the child"]


HOSTED = """
import json
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

kept = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(kept))
trace.set_tracer_provider(provider)

from outbox_pipelines import otlp, tracing
with provider.get_tracer("host").start_as_current_span("the host's"), tracing.span("ours"):
    pass
otlp.close()
with tracing.span("ours again"):
    pass
print(json.dumps([[span.name, span.parent is not None] for span in kept.get_finished_spans()]))
"""


def test_an_application_that_has_a_tracer_provider_gets_our_spans_through_it(collector: Collector) -> None:
    done = subprocess.run([sys.executable, "-c", HOSTED], timeout=60, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == [["ours", True], ["the host's", False], ["ours again", False]]
    assert collector.spans == []
