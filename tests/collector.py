"""A real OTLP collector: a gRPC server that keeps the spans it is sent."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.outboxes import wait_until


@dataclass(frozen=True)
class Collected:
    """A span as it arrived."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty for the first of a trace."""

    attributes: dict[str, Any]
    failed: bool
    told: str
    """The description of its status."""

    service: str


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span; use it as a context manager."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: list[trace_service_pb2.ExportTraceServiceRequest] = []

    @property
    def environment(self) -> dict[str, str]:
        """What has a process send its spans here, and soon."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self._port}", "OTEL_BSP_SCHEDULE_DELAY": "50"}

    @property
    def spans(self) -> list[Collected]:
        """All that came so far."""
        with self._lock:
            requests = list(self._requests)
        return [
            _collected(span, part.resource.attributes)
            for request in requests
            for part in request.resource_spans
            for scope in part.scope_spans
            for span in scope.spans
        ]

    @property
    def everything(self) -> bytes:
        """All bytes of all of them."""
        with self._lock:
            return b"".join(request.SerializeToString() for request in self._requests)

    def named(self, name: str, *, count: int = 1) -> list[Collected]:
        """The spans of a name, when so many have come."""
        wait_until(lambda: sum(span.name == name for span in self.spans) >= count)
        found = [span for span in self.spans if span.name == name]
        assert len(found) == count, found
        return found

    def Export(  # noqa: N802  # gRPC's name
        self, request: trace_service_pb2.ExportTraceServiceRequest, _context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Keep them."""
        with self._lock:
            self._requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def __enter__(self) -> Self:
        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self._server.stop(0).wait()


def _collected(span: Span, resource: Any) -> Collected:
    return Collected(
        span.name,
        Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        _values(span.attributes),
        span.status.code == Status.STATUS_CODE_ERROR,
        span.status.message,
        _values(resource).get("service.name", ""),
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
