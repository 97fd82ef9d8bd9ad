"""The runner of one message: claim, execute under the lease, settle. What a Dagster run does."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from uuid import UUID, uuid4

import psycopg
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from outbox_pipelines.database.error_text import first_line
from outbox_pipelines.database.steps import is_passing, persistently
from outbox_pipelines.jobs import outbox
from outbox_pipelines.jobs.execution import Ended, Execution, Stop
from outbox_pipelines.jobs.keeper import LeaseKeeper
from outbox_pipelines.jobs.kinds import JobKind
from outbox_pipelines.jobs.message import AttemptOutcome, Claimed, NotClaimed, Outcome, Settlement
from outbox_pipelines.jobs.outbox import settle
from outbox_pipelines.jobs.spans import claim_span

_logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_WAKE_SECONDS = 0.2
"""How often the waiting thread returns to Python, where an interrupt can reach it."""

_CLAIM_RETRY_SECONDS = 30.0
_INTERRUPTS_BORNE = 10
_WORDS_KEPT = 50


@dataclass(frozen=True)
class Report:
    """What came of a claimed message."""

    claimed: Claimed
    outcome: AttemptOutcome

    ran: float
    """Seconds that the handler ran."""

    renewals: int
    """How often the lease was renewed meanwhile."""

    line: str | None = None
    """One line for people: the error, or why the lease is lost."""

    delay: float = 0.0
    """Seconds until the next attempt, after a failure."""

    trace: str | None = None
    """Where the handler raised."""


class Runner:
    """Runs one message at a time, in threads of this process.

    Args:
        engine: the database.
        keeper: of this process; started and ended by the caller.
        holder: who runs, for the ledger and as the leases' holder: a Dagster run's id.
    """

    def __init__(self, engine: Engine, keeper: LeaseKeeper, *, holder: str) -> None:
        self._engine = engine
        self._keeper = keeper
        self._holder = holder

    def run(
        self, kind: JobKind, message_id: int, *, on_progress: Callable[[str, float | None], None]
    ) -> Report | NotClaimed:
        """Claim a message, call its handler, and write how it ended.

        The handler runs in a thread of its own, so that an interrupt of the calling thread
        (Ctrl-C, Dagster's termination) reaches us at once: it stops the handler, releases the
        message without counting the attempt, and is raised again.

        Args:
            kind: the message's kind.
            message_id: which message.
            on_progress: called in this thread with the handler's step and fraction.
        """
        token, asked_at = uuid4(), time.monotonic()

        def take() -> Claimed | NotClaimed:
            with self._engine.begin() as connection:
                return outbox.claim_message(
                    connection, message_id, kind=kind.name, holder=self._holder, seconds=kind.lease, token=token
                )

        try:
            with claim_span(kind.name, holder=self._holder) as span:
                span.set("messaging.message.id", str(message_id))
                claimed = persistently(take, retry_seconds=_CLAIM_RETRY_SECONDS, give_up=threading.Event())
                span.set("outbox.outcome", claimed.why if isinstance(claimed, NotClaimed) else "claimed")
            if isinstance(claimed, NotClaimed):
                return claimed
            handler = _HandlerThread(kind, claimed, engine=self._engine, keeper=self._keeper, holder=self._holder)
        except BaseException as error:
            if not isinstance(error, Exception):
                # An interrupt, perhaps just when the claim was committed.
                self._give_back(kind, token)
            raise
        try:
            try:
                self._keeper.hold(
                    [claimed.lease],
                    timeout=kind.timeout,
                    asked_at=asked_at,
                    on_lost=lambda _lease: handler.execution.stop(Stop.LOST),
                )
                ended = self._wait(handler, on_progress)
            except BaseException:  # whatever it was: the message is free before it goes on its way
                handler.execution.stop(Stop.INTERRUPTED)
                _to_the_end(lambda: self._settle(kind, handler.stopped or self._wait_for_stop(handler)))
                raise
            # An interrupt in the middle of writing: what has ended is not to be done again.
            return _to_the_end(lambda: self._settle(kind, ended))
        finally:
            # What could not be written is left to the lease, which nobody renews any more.
            self._keeper.drop([claimed.lease])

    def _give_back(self, kind: JobKind, token: UUID) -> None:
        with self._engine.begin() as connection:
            taken = outbox.claimed_under(connection, kind.name, token=token, seconds=kind.lease)
            ends = [Settlement(claimed, AttemptOutcome.INTERRUPTED, "the run was terminated") for claimed in taken]
            settle(connection, ends, holder=self._holder)

    def _wait(self, handler: "_HandlerThread", on_progress: Callable[[str, float | None], None]) -> Ended:
        handler.start()
        while True:
            over = handler.done.wait(_WAKE_SECONDS)
            waits_on = True
            # Telling may be slow: time-out, lease and keeper are looked after between any two words.
            while handler.progress and waits_on:
                on_progress(*handler.progress.popleft())
                self._keeper.tick()
                waits_on = over or handler.execution.watch()
            self._keeper.tick()
            if over and handler.ended is not None:
                return handler.ended
            if not (waits_on and handler.execution.watch()):
                return self._abandoned(handler)

    def _wait_for_stop(self, handler: "_HandlerThread") -> Ended:
        while not handler.done.wait(_WAKE_SECONDS):
            self._keeper.tick()
            if not handler.execution.watch():
                return self._abandoned(handler)
        assert handler.ended is not None
        return handler.ended

    def _abandoned(self, handler: "_HandlerThread") -> Ended:
        handler.stopped = handler.execution.abandon()
        if handler.stopped is not None:
            return handler.stopped
        # It ended by itself just now.
        handler.done.wait()
        assert handler.ended is not None
        return handler.ended

    def _settle(self, kind: JobKind, ended: Ended) -> Report:
        renewals = self._keeper.renewals(ended.claimed.lease)

        def report(outcome: AttemptOutcome, line: str | None) -> Report:
            delay = ended.settlement.delay if ended.settlement is not None else 0.0
            return Report(ended.claimed, outcome, ended.ran, renewals, line, delay, ended.trace)

        settlement = ended.settlement
        if settlement is None:
            if ended.outcome is AttemptOutcome.LOST:
                return report(AttemptOutcome.LOST, self._why_lost(ended.claimed))
            return report(ended.outcome, ended.line)

        def end() -> AttemptOutcome | None:
            # The keeper must not take us for frozen while the database is away.
            self._keeper.tick()
            with self._engine.begin() as connection:
                if settle_with_domain(connection, kind, [settlement], holder=self._holder):
                    return ended.outcome
                # Perhaps an earlier try was committed, and only its answer lost.
                return outbox.ended_as(connection, [ended.claimed]).get(ended.claimed.message_id)

        outcome = persistently(end, retry_seconds=ended.claimed.lease.seconds, give_up=threading.Event())
        if outcome is not ended.outcome:
            return report(AttemptOutcome.LOST, self._why_lost(ended.claimed))
        return report(outcome, ended.line)

    def _why_lost(self, claimed: Claimed) -> str:
        if self._keeper.waits_for_answer():
            return "the database has been silent for as long as the lease ran"
        try:
            with self._engine.connect() as connection:
                row = connection.execute(
                    text("SELECT state, outcome, lease_holder, last_error FROM outbox.messages WHERE message_id = :id"),
                    {"id": claimed.message_id},
                ).one_or_none()
        except SQLAlchemyError as error:
            return f"the database could not be reached for as long as the lease ran ({type(error).__name__})"
        if row is None:
            return "the message was removed"
        if row.outcome == Outcome.CANCELLED:
            return "the message was cancelled"
        if row.outcome is not None:
            return f"another worker took over and completed it ({row.outcome})"
        if row.lease_holder not in {None, self._holder}:
            return f"another worker took over ({row.lease_holder})"
        return "the lease ended before it could be renewed; the message is tried again"


class _HandlerThread:
    """Runs an execution in a thread that does not keep the process from ending."""

    def __init__(self, kind: JobKind, claimed: Claimed, *, engine: Engine, keeper: LeaseKeeper, holder: str) -> None:
        self.done = threading.Event()
        self.ended: Ended | None = None
        self.stopped: Ended | None = None
        """Its end, where it was abandoned."""
        # Of a flood the latest words: what is told late is of no use.
        self.progress: deque[tuple[str, float | None]] = deque(maxlen=_WORDS_KEPT)
        self.execution = Execution(
            kind,
            claimed,
            engine=engine,
            keeper=keeper,
            holder=holder,
            on_progress=lambda step, fraction: self.progress.append((step, fraction)),
        )
        self._thread = threading.Thread(target=self._run, name="job-handler", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def _run(self) -> None:
        self.ended = self.execution.run()
        if self.ended is not None:
            self.done.set()


def _to_the_end(act: Callable[[], Result]) -> Result:
    """Do something that may be repeated, and raise what interrupted it afterwards: a second Ctrl-C
    must not cost the message's end."""
    interrupt: BaseException | None = None
    for _ in range(_INTERRUPTS_BORNE):
        try:
            result = act()
        except Exception:
            raise
        except BaseException as another:
            interrupt = another
        else:
            if interrupt is not None:
                raise interrupt
            return result
    assert interrupt is not None
    raise interrupt


def settle_with_domain(
    connection: Connection, kind: JobKind, settlements: Sequence[Settlement], *, holder: str
) -> set[int]:
    """Settle claims of a kind, and close the domain jobs of those that are given up or cancelled.

    In one transaction. A domain job that cannot be closed does not keep its message from ending:
    the message says so.

    Returns:
        The ids of the messages that were ours.
    """
    done = settle(connection, settlements, holder=holder)
    for one in settlements:
        claimed = one.claimed
        if closes_domain_job(kind, one) and claimed.message_id in done:
            assert claimed.job_id is not None
            if one.outcome is AttemptOutcome.GIVEN_UP:
                told = one.told or one.error
                close_domain_job(connection, kind, claimed.message_id, claimed.job_id, Outcome.FAILED, told)
            else:
                close_domain_job(connection, kind, claimed.message_id, claimed.job_id, Outcome.CANCELLED, one.error)
    return done


def closes_domain_job(kind: JobKind, ends: Settlement) -> bool:
    """Whether a domain job is closed with the message: a second statement in the transaction that settles it."""
    if kind.domain is None or ends.claimed.job_id is None:
        return False
    return ends.outcome is AttemptOutcome.GIVEN_UP or ends.outcome is AttemptOutcome.CANCELLED


def is_locked(error: Exception) -> bool:
    """Whether a row or table was locked for longer than ``OUTBOX_LOCK_TIMEOUT``."""
    return isinstance(getattr(error, "orig", None), psycopg.errors.LockNotAvailable)


def close_domain_job(
    connection: Connection, kind: JobKind, message_id: int, job_id: str, outcome: Outcome, message: str | None
) -> None:
    """Mark a domain job failed or cancelled, with a message for people.

    Raises:
        DBAPIError: when the connection is lost, or the domain job locked for too long.
    """
    assert kind.domain is not None
    try:
        with connection.begin_nested():
            kind.domain.close(connection, job_id, outcome, message or str(outcome))
    except Exception as error:  # a user's adapter or table may do anything; the message must not be stuck for it
        if connection.invalidated or is_locked(error) or (isinstance(error, DBAPIError) and is_passing(error)):
            # Tried again with the whole transaction, or when the lease has ended: it is not the table's fault.
            raise
        told = f"; its domain job could not be marked: {first_line(getattr(error, 'orig', None) or error)}"
        _logger.warning("kind %s, message %s%s", kind.name, message_id, told)
        connection.execute(
            text(
                "UPDATE outbox.messages SET last_error = left(coalesce(last_error, '') || :told, 2000) "
                "WHERE message_id = :id AND state = 'Completed'"
            ),
            {"told": told, "id": message_id},
        )
