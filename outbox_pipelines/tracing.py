"""Spans of a trace: begun, made current, carried to others. In a process that does not trace they do nothing.

What a span may say: numbers, ids, names and outcomes, the type of an error. Never a payload, a
parameter, a secret, or an error's own words, which may quote one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Self

from outbox_pipelines import otlp

if TYPE_CHECKING:
    from contextvars import Token

    from opentelemetry import trace
    from opentelemetry.context import Context


class Kind(StrEnum):
    """What a span is to the trace; OpenTelemetry's words."""

    INTERNAL = "INTERNAL"
    """Work of this process."""

    CLIENT = "CLIENT"
    """A call that waits for its answer."""

    SERVER = "SERVER"
    """Answering one."""

    CONSUMER = "CONSUMER"
    """Working on a message that somebody left."""


class Span:
    """A span that is current until its block ends; this one, for processes that do not trace, does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        """An exception that comes out is told by its type alone."""

    def set(self, name: str, value: str | int) -> None:
        """Set an attribute."""

    def fail(self, error_type: str, told: str = "") -> None:
        """Mark it as failed; the first word stays.

        Args:
            error_type: a class's name, or a word of ours.
            told: more of our own words.
        """

    def end(self) -> None:
        """End it early; what comes later changes nothing."""

    def headers(self) -> tuple[tuple[str, str], ...]:
        """The W3C headers that make a call's other side its child."""
        return ()


NO_SPAN = Span()
"""The one that does nothing."""


class _Recorded(Span):
    """A span of OpenTelemetry's."""

    def __init__(self, recorded: trace.Span) -> None:
        self._recorded = recorded
        self._token: Token[Context] | None = None
        self._failed = False

    def __enter__(self) -> Self:
        from opentelemetry import context, trace

        self._token = context.attach(trace.set_span_in_context(self._recorded))
        return self

    def __exit__(
        self, _type: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        from opentelemetry import context

        assert self._token is not None
        context.detach(self._token)
        if error is not None:
            self.fail(type(error).__name__)
        self.end()

    def set(self, name: str, value: str | int) -> None:
        # An ended one would log a warning.
        if self._recorded.is_recording():
            self._recorded.set_attribute(name, value)

    def fail(self, error_type: str, told: str = "") -> None:
        from opentelemetry.trace import Status, StatusCode

        if self._recorded.is_recording() and not self._failed:
            self._failed = True
            self._recorded.set_attribute("error.type", error_type)
            self._recorded.set_status(Status(StatusCode.ERROR, told or error_type))

    def end(self) -> None:
        if self._recorded.is_recording():
            self._recorded.end()

    def headers(self) -> tuple[tuple[str, str], ...]:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, trace.set_span_in_context(self._recorded))
        return tuple(carrier.items())


def is_on() -> bool:
    """Whether this process traces; one cheap look, for what is done thousands of times a second."""
    return otlp.tracer() is not None


def span(
    name: str,
    kind: Kind = Kind.INTERNAL,
    attributes: Mapping[str, str | int] | None = None,
    *,
    carrier: Mapping[str, str] | None = None,
    seconds_ago: float = 0.0,
) -> Span:
    """A span to use as a context manager: the child of the current one.

    Args:
        name: of few, without ids.
        kind: what it is to the trace.
        attributes: known from the start.
        carrier: W3C headers (``traceparent``) of whoever it is the child of instead.
        seconds_ago: when it began.
    """
    tracer = otlp.tracer()
    if tracer is None:
        return NO_SPAN
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    # What is no trace context, another language's mistake for example, makes a trace of its own.
    parent = None if carrier is None else TraceContextTextMapPropagator().extract(carrier, Context())
    began = time.time_ns() - int(seconds_ago * 1e9)
    return _Recorded(tracer.start_span(name, parent, SpanKind[kind.name], attributes, start_time=began))


def current_traceparent() -> str | None:
    """The W3C traceparent of the span that is current here, whoever made it; none without one.

    Asks no variable and imports nothing: an application that traces has OpenTelemetry imported.
    """
    # Not yet there while another thread imports it.
    get_current_span = getattr(sys.modules.get("opentelemetry.trace"), "get_current_span", None)
    if get_current_span is None:
        return None
    current: trace.SpanContext = get_current_span().get_span_context()
    if not current.is_valid:
        return None
    return f"00-{current.trace_id:032x}-{current.span_id:016x}-{current.trace_flags:02x}"
