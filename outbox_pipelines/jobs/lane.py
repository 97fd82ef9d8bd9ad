"""A worker's lane: one kind's queue in memory, its consumers, and the threads that feed them and write their ends."""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from uuid import UUID, uuid4

from sqlalchemy import Engine

from outbox_pipelines import tracing
from outbox_pipelines.database.error_text import first_line
from outbox_pipelines.jobs import outbox
from outbox_pipelines.jobs.execution import Ended, Execution, Stop
from outbox_pipelines.jobs.keeper import LeaseKeeper
from outbox_pipelines.jobs.kinds import JobKind
from outbox_pipelines.jobs.message import AttemptOutcome, Care, Claimed, Settlement
from outbox_pipelines.jobs.runner import closes_domain_job, is_locked, settle_with_domain
from outbox_pipelines.jobs.spans import claim_span
from outbox_pipelines.jobs.transport import Served
from outbox_pipelines.lease.lease import Lease

_logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0

SETTLERS = 2
"""Threads that write ends: one at a time, in batches as large as they come, unless it takes long."""

_LONG_SECONDS = 0.05
"""How long ends wait for the one that writes, a lock or a slow commit for example, before the other writes them."""


class Lane:
    """Takes messages of one kind in batches, has them worked on, and ends them in batches.

    Kinds share nothing that one could hold up for another: each has its own lane, with its own
    threads, connections and queue. Claiming and settling have a thread each, so that neither
    waits for the other's commit.

    Args:
        kind: whose messages.
        consumers: threads that call handlers.
        prefetch: messages claimed ahead of the consumers.
        poll_seconds: between two looks when nothing was due and nobody woke us.
        engine: for claiming and settling; nobody else's.
        statements: the same, for transactions that are one statement each.
        attempts_engine: for what a handler's attempt needs besides.
        handlers_engine: for the handlers' own sessions.
        keeper: of this process.
        holder: of this process.
    """

    def __init__(
        self,
        kind: JobKind,
        *,
        consumers: int,
        prefetch: int,
        poll_seconds: float,
        engine: Engine,
        statements: Engine,
        attempts_engine: Engine,
        handlers_engine: Engine,
        keeper: LeaseKeeper,
        holder: str,
    ) -> None:
        self.kind = kind
        self._consumers = consumers
        self._prefetch = prefetch
        self._poll_seconds = poll_seconds
        self._engine = engine
        self._statements = statements
        self._attempts_engine = attempts_engine
        self._handlers_engine = handlers_engine
        self._keeper = keeper
        self._holder = holder
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._endings = threading.Condition(self._lock)
        # With the lock held:
        self._queue: deque[Claimed] = deque()
        self._running: dict[Lease, Execution] = {}
        self._ended: list[Ended] = []
        self._settling = 0
        self._claiming = False
        self._woken = True
        self._more = True
        self._looked_at = 0.0
        self._stopping = False
        self._progressed_at = time.monotonic()
        # The claimer's own: the token of a claim whose outcome is unknown.
        self._unsure: UUID | None = None
        self._claimer = threading.Thread(target=self._claim_until_stopped, name=f"claim-{kind.name}", daemon=True)
        self._settlers = [
            threading.Thread(target=self._settle_until_done, name=f"settle-{kind.name}", daemon=True)
            for _ in range(SETTLERS)
        ]

    def start(self) -> None:
        """Begin to claim."""
        self._claimer.start()
        for settler in self._settlers:
            settler.start()
        for _ in range(self._consumers):
            self._start_consumer()

    def wake(self) -> None:
        """There may be something due."""
        with self._lock:
            self._woken = True
            self._room.notify()

    def stop(self) -> None:
        """Claim no more, and give back what waits in memory; running handlers go on."""
        with self._lock:
            self._stopping = True
            self._ended += [_given_back(claimed) for claimed in self._queue]
            self._queue.clear()
            self._work.notify_all()
            self._room.notify()
            self._endings.notify_all()

    def interrupt(self) -> None:
        """Stop the running handlers; their messages are given back."""
        with self._lock:
            running = list(self._running.values())
        for execution in running:
            execution.stop(Stop.INTERRUPTED)

    def is_done(self) -> bool:
        """Whether all is ended and written, after :meth:`stop`."""
        return not any(thread.is_alive() for thread in (self._claimer, *self._settlers))

    def watch(self) -> None:
        """Stop handlers whose time is up or whose lease is lost; to be called a few times a second."""
        with self._lock:
            running = list(self._running.values())
        for execution in running:
            if not execution.watch() and (ended := execution.abandon()) is not None:
                self._finish(execution, ended)
                # Its thread may never come back.
                self._start_consumer()

    def served(self) -> Served:
        """What is going on here."""
        with self._lock:
            told = [execution.progressed_at for execution in self._running.values()]
            age = time.monotonic() - max([self._progressed_at, *told])
            return Served(self.kind.name, self._consumers, len(self._running), len(self._queue), age)

    # The consumers

    def _start_consumer(self) -> None:
        threading.Thread(target=self._consume, name=f"consumer-{self.kind.name}", daemon=True).start()

    def _consume(self) -> None:
        while (execution := self._next()) is not None:
            ended = execution.run()
            if ended is None:
                # Abandoned: another consumer has our place.
                return
            self._finish(execution, ended)

    def _next(self) -> Execution | None:
        with self._lock:
            while True:
                while not self._queue:
                    if self._stopping:
                        return None
                    self._work.wait()
                claimed = self._queue.popleft()
                execution = Execution(
                    self.kind,
                    claimed,
                    engine=self._attempts_engine,
                    handlers_engine=self._handlers_engine,
                    keeper=self._keeper,
                    holder=self._holder,
                )
                self._running[claimed.lease] = execution
                if self._has_room():
                    self._room.notify()
                return execution

    def _finish(self, execution: Execution, ended: Ended) -> None:
        with self._lock:
            self._running.pop(execution.claimed.lease, None)
            if not self._ended:
                # Whoever comes for it takes those that follow, too.
                self._endings.notify()
            self._ended.append(ended)
            self._progressed_at = time.monotonic()
            if execution.claimed.care is not Care.NONE:
                # Others like it may have been left for this place.
                self._woken = True
            if self._woken or not self._queue:
                self._room.notify()

    def _lose(self, lease: Lease) -> None:
        with self._lock:
            execution = self._running.get(lease)
            waiting = [claimed for claimed in self._queue if claimed.lease == lease]
            for claimed in waiting:
                self._queue.remove(claimed)
        if execution is not None:
            execution.stop(Stop.LOST)

    # The claimer

    def _claim_until_stopped(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while True:
            with self._lock:
                while not (self._may_claim() or self._stopping):
                    # Without room there is nothing to look for: whoever makes some notifies.
                    self._room.wait(self._until_poll() if self._has_room() else None)
                if self._stopping and self._unsure is None:
                    return
                self._claiming, self._woken = True, False
            try:
                self._claim()
                pause = _FIRST_PAUSE_SECONDS
            except Exception as error:  # without its claimer the kind would stand still for good
                self._warn("claiming", error)
                with self._lock:
                    self._woken = True
                    if self._stopping:
                        # What the claim may have taken is left to its lease.
                        self._unsure = None
                time.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
            finally:
                with self._lock:
                    self._claiming = False
                    self._endings.notify_all()

    def _has_room(self) -> bool:
        if len(self._queue) > self._prefetch // 2 or self._unsettled() > 4 * (self._prefetch + self._consumers):
            return False
        return bool(self._queue or self._prefetch) or len(self._running) < self._consumers

    def _may_claim(self) -> bool:
        return not self._stopping and self._has_room() and (self._woken or self._more or self._until_poll() <= 0)

    def _until_poll(self) -> float:
        return self._looked_at + self._poll_seconds - time.monotonic()

    def _claim(self) -> None:
        kind = self.kind
        with self._lock:
            free = max(0, self._consumers - len(self._running))
            limit = free + self._prefetch - len(self._queue)
            busy_alone = any(one.claimed.care is Care.ALONE for one in self._running.values()) or any(
                one.care is Care.ALONE for one in self._queue
            )
        asked_at = time.monotonic()
        taken: list[Claimed] = []
        with self._statements.begin() as connection:
            if self._unsure is not None:
                taken = outbox.claimed_under(connection, kind.name, token=self._unsure, seconds=kind.lease)
            if not taken and limit > 0 and not self._stopping:
                self._unsure = uuid4()
                taken = outbox.claim_due(
                    connection,
                    kind.name,
                    limit=limit,
                    ready=free,
                    alone=not busy_alone,
                    attempts=kind.attempts,
                    holder=self._holder,
                    seconds=kind.lease,
                    token=self._unsure,
                )
        self._unsure = None
        if taken and tracing.is_on():
            # Afterwards: looks that found nothing would make a span a second.
            with claim_span(kind.name, holder=self._holder, seconds_ago=time.monotonic() - asked_at) as span:
                span.set("messaging.batch.message_count", len(taken))
        self._keeper.hold(
            [claimed.lease for claimed in taken], timeout=kind.timeout, asked_at=asked_at, on_lost=self._lose
        )
        with self._lock:
            self._looked_at = asked_at
            self._more = len(taken) >= limit > 0
            if not taken and not self._running:
                # Nothing to do is also getting on.
                self._progressed_at = time.monotonic()
            if self._stopping:
                self._ended += [_given_back(claimed) for claimed in taken]
                return
            self._queue.extendleft(claimed for claimed in reversed(taken) if claimed.care is not Care.NONE)
            self._queue.extend(claimed for claimed in taken if claimed.care is Care.NONE)
            self._work.notify(len(taken))

    # The settler

    def _settle_until_done(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        ended: list[Ended] = []
        while True:
            with self._lock:
                waited = False
                while not (ended or self._is_over() or (self._ended and (waited or not self._settling))):
                    waited = not self._endings.wait(_LONG_SECONDS if self._ended else None)
                self._settling += len(self._ended)
                ended += self._ended
                self._ended = []
                if self._is_over():
                    self._endings.notify_all()
            if not ended:
                return
            before = len(ended)
            try:
                self._settle(ended)
                pause = _FIRST_PAUSE_SECONDS
                ended = []
            except Exception as error:  # without its settler the kind would stand still for good
                # Nothing is forgotten: it is settled when that works again.
                self._warn("settling", error)
                if is_locked(error):
                    ended = self._settle_each(ended)
                else:
                    time.sleep(pause)
                    pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
            with self._lock:
                self._settling -= before - len(ended)
                self._room.notify()

    def _settle_each(self, ended: Sequence[Ended]) -> list[Ended]:
        """End each in a transaction of its own, and leave those whose rows stay locked to their leases.

        Such a row may be locked by a handler that was left to itself in the middle of a
        transaction; the others must not wait for it.
        """
        again = []
        for one in ended:
            try:
                self._settle([one])
            except Exception as error:  # as above
                if is_locked(error):
                    self._keeper.drop([one.claimed.lease])
                    _tell(self.kind, one, lost=True)
                else:
                    again.append(one)
        return again

    def _settle(self, ended: Sequence[Ended]) -> None:
        """Write how these ended: all, or none."""
        settlements = [one.settlement for one in ended if one.settlement is not None]
        missing: list[Claimed] = []
        known: dict[int, AttemptOutcome] = {}
        if settlements:
            alone = not any(closes_domain_job(self.kind, one) for one in settlements)
            with (self._statements if alone else self._engine).begin() as connection:
                done = settle_with_domain(connection, self.kind, settlements, holder=self._holder)
                missing = [one.claimed for one in settlements if one.claimed.message_id not in done]
                known = outbox.ended_as(connection, missing) if missing else {}
        self._keeper.drop([one.claimed.lease for one in ended])
        for one in ended:
            _tell(self.kind, one, lost=one.claimed in missing and known.get(one.claimed.message_id) is not one.outcome)

    def _unsettled(self) -> int:
        return len(self._ended) + self._settling

    def _is_over(self) -> bool:
        return self._stopping and not (self._running or self._queue or self._ended or self._claiming)

    def _warn(self, what: str, error: Exception) -> None:
        reason = first_line(getattr(error, "orig", None) or error)
        _logger.warning("kind %s: %s failed and is tried again: %s", self.kind.name, what, reason)


def _given_back(claimed: Claimed) -> Ended:
    settlement = Settlement(claimed, AttemptOutcome.INTERRUPTED, "given back before it began: the worker was stopped")
    return Ended(claimed, AttemptOutcome.INTERRUPTED, 0.0, settlement)


def _tell(kind: JobKind, ended: Ended, *, lost: bool) -> None:
    if ended.outcome is AttemptOutcome.SUCCEEDED and not lost and not _logger.isEnabledFor(logging.DEBUG):
        return
    told = f"kind {kind.name}, message {ended.claimed.message_id}, attempt {ended.claimed.attempt}"
    if lost or ended.outcome is AttemptOutcome.LOST:
        _logger.warning("%s: the lease was lost; nothing was written", told)
    elif ended.outcome in {AttemptOutcome.FAILED, AttemptOutcome.GIVEN_UP}:
        what = "failed: " if ended.outcome is AttemptOutcome.FAILED else ""
        _logger.warning("%s: %s%s%s", told, what, ended.line, f"\n{ended.trace.rstrip()}" if ended.trace else "")
    else:
        _logger.debug("%s: %s after %.3f s", told, ended.outcome, ended.ran)
