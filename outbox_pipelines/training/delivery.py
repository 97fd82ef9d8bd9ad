"""Deliver the rows of one turn: pack batches, call, bisect what was refused."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from uuid import UUID, uuid4

from outbox_pipelines.training.sink import Batch, BatchRefused, OutboxRow, Sink


@dataclass(frozen=True)
class Delivered:
    """A call that succeeded: a line for the ledger."""

    delivery_id: UUID
    """Makes noting it idempotent: a repeated write finds its own line."""

    batch_key: str
    row_ids: list[int]
    """The rows it delivered; not those it rejected."""

    call_seconds: float


@dataclass(frozen=True)
class DeadLetter:
    """A row to be taken out of the flow."""

    row_id: int
    reason: str


@dataclass(frozen=True)
class Call:
    """What one call settled."""

    delivered: Delivered | None
    dead: list[DeadLetter]


def pack(sink: Sink, tenant_id: UUID, rows: Sequence[OutboxRow], batch_size: int) -> Iterator[Batch | DeadLetter]:
    """Cut rows into batches by count and by serialized size, keeping their order.

    A row that is too large by itself is a dead letter that says its size.
    """
    for begin in range(0, len(rows), batch_size):
        yield from _fit(sink, tenant_id, rows[begin : begin + batch_size])


def _fit(sink: Sink, tenant_id: UUID, rows: Sequence[OutboxRow]) -> Iterator[Batch | DeadLetter]:
    size = sink.call_bytes(rows)
    limit = sink.max_call_bytes
    if size <= limit:
        yield Batch(tenant_id, rows)
    elif len(rows) == 1:
        yield DeadLetter(rows[0].row_id, f"the row makes a message of {size:,} bytes; {sink.target} takes {limit:,}")
    else:
        middle = len(rows) // 2
        yield from _fit(sink, tenant_id, rows[:middle])
        yield from _fit(sink, tenant_id, rows[middle:])


def deliver(sink: Sink, batch: Batch) -> Iterator[Call]:
    """Send a batch, halving it as long as it is refused; yields what each call settled.

    For k bad rows of n this makes at most 1 + 2·k·⌈log2 n⌉ calls: only a part that holds a
    bad row is halved, there are at most k of these on each of the ⌈log2 n⌉ levels below the
    whole, and each gives two calls.

    Raises:
        ServiceUnwell, Misconfigured, SinkClosed: from a call; what was yielded before it
            stands, the other rows stay. A part is never dead-lettered for these.
    """
    waiting = [batch]
    while waiting:
        part = waiting.pop()
        began = time.monotonic()
        try:
            verdict = sink.send(part)
        except BatchRefused as refusal:
            if len(part.rows) == 1:
                yield Call(None, [DeadLetter(part.rows[0].row_id, str(refusal))])
                continue
            middle = len(part.rows) // 2
            # The left half is taken first: rows go out in id order.
            waiting.append(Batch(part.tenant_id, part.rows[middle:]))
            waiting.append(Batch(part.tenant_id, part.rows[:middle]))
            continue
        seconds = time.monotonic() - began
        if verdict.rejected:
            accepted = [row_id for row_id in part.row_ids if row_id not in verdict.rejected]
            dead = [
                DeadLetter(row_id, verdict.rejected[row_id]) for row_id in part.row_ids if row_id in verdict.rejected
            ]
        else:
            accepted, dead = part.row_ids, []
        yield Call(Delivered(uuid4(), part.key, accepted, seconds) if accepted else None, dead)
