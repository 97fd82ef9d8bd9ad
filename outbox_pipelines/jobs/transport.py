"""How messages get to the runner: Dagster's runs, or a worker's queues in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol
from uuid import UUID


@dataclass(frozen=True)
class Served:
    """How a code location or worker serves a kind."""

    kind: str
    consumers: int
    running: int = 0
    prefetched: int = 0
    progress_age: float = 0.0
    """Seconds since it last got on: a job ended or told of progress, or there was nothing to do."""


class Transport(Protocol):
    """Brings due messages to a runner, of each kind as many at a time as it has places.

    Whatever it does, it must end each message that it takes, or leave it where recovery finds
    it: under a lease that ends, or under a publish that times out. One suite of tests holds
    every transport to that.
    """

    def wake(self, kind: str) -> None:
        """There may be something due of that kind: look now, rather than at the next poll."""

    def served(self) -> Sequence[Served]:
        """What is going on, kind by kind."""

    def stop(self) -> None:
        """Take no more, and give back what has not begun."""


@dataclass(frozen=True)
class Published:
    """A message for which a run is asked for."""

    message_id: int

    publish_attempt: int
    """Which publish of the message this is."""

    attempt: int
    """Which attempt at the job its run is going to be."""

    token: UUID
    """Of the publish."""

    @property
    def run_key(self) -> str:
        """Names the run: unique for each publish, since a key blocks for as long as its run's row exists."""
        return f"{self.message_id}:{self.publish_attempt}"


class Fate(Enum):
    """What became of the run for a published message."""

    UNSEEN = auto()
    """There is no such run: not yet, or not any more."""

    ON_ITS_WAY = auto()
    """It exists, and may still claim the message."""

    ENDED = auto()
    """It has ended. A message that it did not claim is not going to be claimed by it."""


class Runs(Protocol):
    """Where runs are asked for and looked up; no transaction is open while it is asked."""

    def fates(self, published: Sequence[Published]) -> Mapping[str, Fate]:
        """What became of each run, by run key."""

    def request(self, published: Sequence[Published]) -> None:
        """Ask for a run each. May fail or be forgotten: what no run came for is published again."""
