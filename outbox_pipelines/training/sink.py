"""Where batches go: the protocol that a destination fulfils, and what it may answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple, Protocol
from uuid import UUID

from outbox_pipelines.errors import OutboxError


class OutboxRow(NamedTuple):
    """A row of a tenant's outbox. (A tuple: many are made, and a dataclass is slower to make.)"""

    row_id: int
    example: str
    """A JSON object, as text."""


@dataclass(frozen=True)
class Batch:
    """Rows of one tenant that travel in one call."""

    tenant_id: UUID
    rows: Sequence[OutboxRow]

    @cached_property
    def row_ids(self) -> list[int]:
        """The rows' ids in their order."""
        return [row.row_id for row in self.rows]

    @cached_property
    def key(self) -> str:
        """32 hex digits; the same rows of the same tenant always give the same key."""
        digest = blake2b(self.tenant_id.bytes, digest_size=16)
        digest.update(",".join(map(str, self.row_ids)).encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class Verdict:
    """A batch was judged: all its rows but the rejected ones are delivered."""

    rejected: dict[int, str] = field(default_factory=dict)
    """Row id to reason, for rows that can never be accepted."""


@dataclass(frozen=True)
class Health:
    """What a probe of the destination found."""

    reachable: bool
    detail: str
    """A fact for people, without secrets."""


class SinkError(OutboxError):
    """The destination did not judge a batch.

    Args:
        told: a line for logs and for Dagster: what happened and what to do, in our words.
        details: the destination's own words. It may have put a payload into them, so they go
            into the database only, where the payload is.
    """

    def __init__(self, told: str, details: str = "") -> None:
        super().__init__(f"{told}: {details}" if details else told)
        self.told = told


class BatchRefused(SinkError):
    """Some row of the batch is bad, and the destination did not say which."""


class ServiceUnwell(SinkError):
    """The destination cannot take rows now; they stay, and somebody comes back later."""


class Misconfigured(SinkError):
    """The destination refuses us, not our rows: a person must change a setting."""


class SinkClosed(OutboxError):
    """The call was cancelled because the sink was closed."""


class Sink(Protocol):
    """A destination for batches.

    One is made in the process that uses it, for one flush, and used from several threads.
    An exception of any other kind than those named here counts as :class:`ServiceUnwell`.
    """

    @property
    def target(self) -> str:
        """The destination's address for people."""
        ...

    @property
    def max_call_bytes(self) -> int:
        """How large one call may be, as :meth:`call_bytes` counts."""
        ...

    def call_bytes(self, rows: Sequence[OutboxRow]) -> int:
        """The serialized size of a call with these rows.

        While that is below the limit, an upper bound that also is may be given instead.
        """
        ...

    def send(self, batch: Batch) -> Verdict:
        """Carry a batch over. No transaction is open meanwhile.

        Raises:
            BatchRefused: judged no row; smaller batches will be tried.
            ServiceUnwell: judged no row; they will be tried later.
            Misconfigured: judged no row; a person must act.
            SinkClosed: :meth:`close` was called meanwhile.
        """
        ...

    def probe(self) -> Health:
        """Ask whether the destination is there, in about a second; raises nothing."""
        ...

    def close(self) -> None:
        """Cancel the calls in flight and free what the sink holds; may be called twice."""
        ...


SinkFactory = Callable[[], Sink]
"""Makes a sink in the process, and for the flush, that will use it."""
