"""What a message is: its states, how attempts end, and what a claim hands over."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Any, cast

from outbox_pipelines.lease.lease import Lease, LeasedTable

MESSAGES = LeasedTable("outbox.messages", "message_id")

_decode = json.JSONDecoder().raw_decode


class State(StrEnum):
    """Where a message is; the words stand in the table."""

    PENDING = "Pending"
    """Waits until it is due and a place is free."""

    PUBLISHING = "Publishing"
    """A run has been asked for; nobody has seen it yet."""

    PUBLISHED = "Published"
    """Its run exists and has not claimed it yet."""

    PROCESSING = "Processing"
    """Claimed, under a lease."""

    COMPLETED = "Completed"
    """Over; the outcome says how."""


class Outcome(StrEnum):
    """How a completed message ended."""

    SUCCEEDED = "succeeded"
    """Its handler returned, or completed it in a transaction of its own."""

    FAILED = "failed"
    """Given up: the attempts are used up, or nothing can come of another."""

    CANCELLED = "cancelled"
    """By a person, or because its domain job was."""


class AttemptOutcome(StrEnum):
    """How one claim of a message ended; the words stand in the ledger."""

    SUCCEEDED = "succeeded"
    """The handler's work is done."""

    FAILED = "failed"
    """The handler raised, or its time was up; there will be another attempt."""

    GIVEN_UP = "given up"
    """The last attempt failed, or the limit was reached, or the error is for good."""

    INTERRUPTED = "interrupted"
    """Given back by whoever was told to stop; does not count as an attempt."""

    LOST = "lost"
    """The lease ended, or its worker died; counts as an attempt."""

    CANCELLED = "cancelled"
    """The message was cancelled, before or while a handler worked on it."""


class Care(IntEnum):
    """How careful a worker is with a message that others wait beside in its memory.

    A handler may kill its process, and with it every claim that waits or runs there; these count
    as attempts, since nobody knows which had begun.
    """

    NONE = 0
    """May wait in memory, and may be lost there once."""

    AT_ONCE = 1
    """Claimed only for a consumer that is free: a claim of it was lost, or this attempt is its last."""

    ALONE = 2
    """One of these at a time: it may be the one that kills."""


@dataclass(frozen=True)
class Claimed:
    """A message under our lease."""

    lease: Lease
    kind: str
    job_id: str | None
    payload_text: str
    """JSON; decoded message by message, since one that cannot be must not cost the others their claim."""

    attempt: int
    """1 at first. More than the kind's limit: it is to be given up."""

    claim: int
    """Which claim of the message this is; interrupted ones are counted, too."""

    waited: float
    """Seconds from when it was due until the claim, by the database's clock."""

    care: Care = Care.NONE

    trace_context: str | None = None
    """The W3C traceparent of whoever enqueued it."""

    @cached_property
    def payload(self) -> Mapping[str, Any]:
        """What was enqueued.

        Raises:
            ValueError, RecursionError: when Python cannot read what PostgreSQL could store.
        """
        # PostgreSQL writes nothing before and nothing behind the value.
        decoded, _end = _decode(self.payload_text)
        return cast("Mapping[str, Any]", decoded)

    @property
    def message_id(self) -> int:
        """The message's id."""
        return int(self.lease.key)


@dataclass(frozen=True)
class Settlement:
    """How a claim ends, to be written under its token."""

    claimed: Claimed
    outcome: AttemptOutcome
    error: str | None = None
    delay: float = 0.0
    """Seconds until it is due again, after :attr:`AttemptOutcome.FAILED`."""

    told: str | None = None
    """The error as the application's users may read it; :attr:`error` if none."""


class Refusal(StrEnum):
    """Why a message could not be claimed."""

    UNKNOWN = "unknown"
    """There is no such message."""

    OTHER_KIND = "other kind"
    """It is of another kind."""

    COMPLETED = "completed"
    """It is over."""

    HELD = "held"
    """Somebody else holds its lease."""

    NOT_DUE = "not due"
    """It waits for its time, a backoff for example."""


@dataclass(frozen=True)
class NotClaimed:
    """A message that could not be claimed, and when to come back."""

    message_id: int
    why: Refusal
    holder: str | None = None
    outcome: Outcome | None = None
    until: datetime | None = None
    """When the holder's lease ends, or the message is due."""

    seconds_left: float | None = None
    """The same in seconds from now; at least 1, for a lease at most one lease."""
