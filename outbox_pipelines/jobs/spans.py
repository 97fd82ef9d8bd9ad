"""The spans of a message: its claim and its handler, in the words of the messaging conventions."""

from outbox_pipelines import tracing
from outbox_pipelines.jobs.message import AttemptOutcome, Claimed

_FAILURES = frozenset({AttemptOutcome.FAILED, AttemptOutcome.GIVEN_UP})


def claim_span(kind: str, *, holder: str, seconds_ago: float = 0.0) -> tracing.Span:
    """Claiming messages of a kind.

    Not the parent of their handlers: which trace those belong to is learned with the claim.
    """
    about = {
        "messaging.system": "outbox",
        "messaging.destination.name": kind,
        "messaging.operation.name": "claim",
        "messaging.operation.type": "receive",
        "outbox.holder": holder,
    }
    return tracing.span("outbox claim", tracing.Kind.CLIENT, about, seconds_ago=seconds_ago)


def handler_span(claimed: Claimed, *, holder: str) -> tracing.Span:
    """A message's handler: the child of the span in which it was enqueued.

    A child and not a link, as the conventions allow where messages are worked on one by one: cause
    and effect are in one trace, which is what people look for, and each retry stands beside the first.
    """
    about: dict[str, str | int] = {
        "messaging.system": "outbox",
        "messaging.destination.name": claimed.kind,
        "messaging.operation.name": "handle",
        "messaging.operation.type": "process",
        "messaging.message.id": str(claimed.message_id),
        "outbox.attempt": claimed.attempt,
        "outbox.holder": holder,
    }
    carrier = {} if claimed.trace_context is None else {"traceparent": claimed.trace_context}
    return tracing.span("outbox handler", tracing.Kind.CONSUMER, about, carrier=carrier)


def note_outcome(span: tracing.Span, outcome: AttemptOutcome, error_type: str | None = None) -> None:
    """How the attempt ended; of its error the type alone, since its words are the handler's."""
    span.set("outbox.outcome", outcome)
    if outcome in _FAILURES:
        span.fail(error_type or outcome, outcome)
