"""The tracer of this process: the host application's, or one that sends with OTLP over gRPC.

OpenTelemetry is imported only where ``OTEL_EXPORTER_OTLP_ENDPOINT`` is set, and only when the first
span is begun: the connection and the thread that sends are made after every fork of ours, in the
process that uses them.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

_logger = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_SCOPE = "outbox_pipelines"

_CLOSE_SECONDS = 2.0
"""How long the end of a process waits for its last spans to be taken."""


def tracer() -> Tracer | None:
    """What begins spans; none when this process does not trace. Decided once, and cheap from then on."""
    return _tracer if _decided else _decide()


class _Ending:
    """Ends a provider within a time limit, which its own end does not take.

    The thread waits from the start: Python begins none any more while a process ends.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._told = threading.Event()
        self._done = threading.Event()
        threading.Thread(target=self._wait, name="last-spans", daemon=True).start()

    def _wait(self) -> None:
        self._told.wait()
        self._provider.shutdown()
        self._done.set()

    def end(self, seconds: float) -> None:
        """Send what is left."""
        self._told.set()
        self._done.wait(seconds)


# Whether, and with what: decided once in each process.

_lock = threading.Lock()
_decided = False
_tracer: Tracer | None = None
_ending: _Ending | None = None
"""Of the provider that this process has made; none when the host application's is used."""

_made_global: TracerProvider | None = None
"""The global one if it is of our making: perhaps before a fork, or closed since. OpenTelemetry replaces none."""


def _decide() -> Tracer | None:
    global _decided, _tracer
    with _lock:
        if not _decided:
            _tracer = _make_tracer() if _is_wanted() else None
            _decided = True
        return _tracer


def _is_wanted() -> bool:
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    return any(os.environ.get(name, "").strip() for name in _ENDPOINTS)


def _make_tracer() -> Tracer | None:
    try:
        from opentelemetry import trace

        provider = trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider) or provider is _made_global:
            provider = _make_provider()
        return provider.get_tracer(_SCOPE)
    except ImportError as error:
        missing = error.name or "a module"
        _logger.warning("no spans are made: %s is missing; pip install 'outbox-pipelines[otel]'", missing)
    except Exception as error:  # whatever a variable of OpenTelemetry's may say: work does not fail for its spans
        # By its type alone: the text may quote a header, and so a secret.
        _logger.warning("no spans are made: %s; look at the OTEL_ variables", type(error).__name__)
    return None


def _make_provider() -> TracerProvider:
    global _ending, _made_global
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()
    if str(resource.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "outbox-pipelines"}))
    # At its own end it would wait for half a minute for a collector that is away.
    made = TracerProvider(resource=resource, shutdown_on_exit=False)
    made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        # For the spans that handlers make themselves.
        trace.set_tracer_provider(made)
        _made_global = made
    _ending = _Ending(made)
    return made


def close() -> None:
    """Send what is left, within two seconds, and decide anew at the next span; done at the end of a process."""
    global _decided, _tracer, _ending
    with _lock:
        ending = _ending
        _decided, _tracer, _ending = False, None, None
    if ending is not None:
        ending.end(_CLOSE_SECONDS)


def _forget_after_fork() -> None:
    # A child makes its own: the parent's connection is the parent's, and its spans are the parent's to send.
    global _lock, _decided, _tracer, _ending
    _lock = threading.Lock()
    _decided, _tracer, _ending = False, None, None


atexit.register(close)
os.register_at_fork(after_in_child=_forget_after_fork)
