"""A worker's lane: one kind's queue in memory, its consumers, and the pump that feeds them."""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from uuid import UUID, uuid4

from sqlalchemy import Connection, Engine

from outbox_pipelines.database.error_text import first_line
from outbox_pipelines.jobs import outbox
from outbox_pipelines.jobs.execution import Ended, Execution, Stop
from outbox_pipelines.jobs.keeper import LeaseKeeper
from outbox_pipelines.jobs.kinds import JobKind
from outbox_pipelines.jobs.message import AttemptOutcome, Care, Claimed, Settlement
from outbox_pipelines.jobs.runner import is_locked, settle_with_domain
from outbox_pipelines.jobs.transport import Served
from outbox_pipelines.lease.lease import Lease

_logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0


class Lane:
    """Takes messages of one kind in batches, has them worked on, and ends them in batches.

    Kinds share nothing that one could hold up for another: each has its own lane, with its own
    threads, connection and queue.

    Args:
        kind: whose messages.
        consumers: threads that call handlers.
        prefetch: messages claimed ahead of the consumers.
        poll_seconds: between two looks when nothing was due and nobody woke us.
        engine: for claiming and settling.
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
        handlers_engine: Engine,
        keeper: LeaseKeeper,
        holder: str,
    ) -> None:
        self.kind = kind
        self._consumers = consumers
        self._prefetch = prefetch
        self._poll_seconds = poll_seconds
        self._engine = engine
        self._handlers_engine = handlers_engine
        self._keeper = keeper
        self._holder = holder
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._pump_wanted = threading.Condition(self._lock)
        # With the lock held:
        self._queue: deque[Claimed] = deque()
        self._running: dict[Lease, Execution] = {}
        self._ended: list[Ended] = []
        self._woken = True
        self._stopping = False
        self._progressed_at = time.monotonic()
        # The pump's own:
        self._more = True
        self._looked_at = 0.0
        self._unsure: UUID | None = None
        self._pump = threading.Thread(target=self._pump_until_done, name=f"pump-{kind.name}", daemon=True)

    def start(self) -> None:
        """Begin to claim."""
        self._pump.start()
        for _ in range(self._consumers):
            self._start_consumer()

    def wake(self) -> None:
        """There may be something due."""
        with self._lock:
            self._woken = True
            self._pump_wanted.notify()

    def stop(self) -> None:
        """Claim no more, and give back what waits in memory; running handlers go on."""
        with self._lock:
            self._stopping = True
            self._ended += [_given_back(claimed) for claimed in self._queue]
            self._queue.clear()
            self._work.notify_all()
            self._pump_wanted.notify()

    def interrupt(self) -> None:
        """Stop the running handlers; their messages are given back."""
        with self._lock:
            running = list(self._running.values())
        for execution in running:
            execution.stop(Stop.INTERRUPTED)

    def is_done(self) -> bool:
        """Whether all is ended and written, after :meth:`stop`."""
        return not self._pump.is_alive()

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
                    engine=self._handlers_engine,
                    keeper=self._keeper,
                    holder=self._holder,
                )
                self._running[claimed.lease] = execution
                if self._has_room():
                    self._pump_wanted.notify()
                return execution

    def _finish(self, execution: Execution, ended: Ended) -> None:
        with self._lock:
            self._running.pop(execution.claimed.lease, None)
            self._ended.append(ended)
            self._progressed_at = time.monotonic()
            if execution.claimed.care is not Care.NONE:
                # Others like it may have been left for this place.
                self._woken = True
            self._pump_wanted.notify()

    def _lose(self, lease: Lease) -> None:
        with self._lock:
            execution = self._running.get(lease)
            waiting = [claimed for claimed in self._queue if claimed.lease == lease]
            for claimed in waiting:
                self._queue.remove(claimed)
        if execution is not None:
            execution.stop(Stop.LOST)

    # The pump

    def _pump_until_done(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        ended: list[Ended] = []
        while True:
            with self._lock:
                while not (ended or self._ended or self._may_claim() or self._is_over()):
                    # Without room there is nothing to look for: whoever makes some notifies.
                    self._pump_wanted.wait(self._until_poll() if self._has_room() else None)
                ended += self._ended
                self._ended = []
                if self._is_over() and not ended:
                    return
                claim = self._may_claim()
                if claim:
                    self._woken = False
            try:
                self._turn(ended, claim=claim)
            except Exception as error:  # without its pump the kind would stand still for good
                # Nothing is forgotten: what ended is settled, and what a claim took is found, when it works again.
                reason = first_line(getattr(error, "orig", None) or error)
                _logger.warning("kind %s: settling and claiming failed: %s", self.kind.name, reason)
                with self._lock:
                    self._woken = True
                if is_locked(error):
                    ended = self._end_each(ended)
                    continue
                time.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
                continue
            pause = _FIRST_PAUSE_SECONDS
            ended = []

    def _end_each(self, ended: Sequence[Ended]) -> list[Ended]:
        """End each in a transaction of its own, and leave those whose rows stay locked to their leases.

        Such a row may be locked by a handler that was left to itself in the middle of a
        transaction; the others must not wait for it.
        """
        again = []
        for one in ended:
            try:
                self._turn([one], claim=False)
            except Exception as error:  # as in the pump
                if is_locked(error):
                    self._keeper.drop([one.claimed.lease])
                    _tell(self.kind, one, lost=True)
                else:
                    again.append(one)
        return again

    def _is_over(self) -> bool:
        return self._stopping and not self._running and not self._queue and not self._ended

    def _has_room(self) -> bool:
        if self._stopping or len(self._queue) > self._prefetch // 2:
            return False
        return bool(self._queue or self._prefetch) or len(self._running) < self._consumers

    def _may_claim(self) -> bool:
        return self._has_room() and (self._woken or self._more or self._until_poll() <= 0)

    def _until_poll(self) -> float:
        return self._looked_at + self._poll_seconds - time.monotonic()

    def _turn(self, ended: Sequence[Ended], *, claim: bool) -> None:
        """One transaction: end what has ended, and claim what comes next."""
        settlements = [one.settlement for one in ended if one.settlement is not None]
        with self._lock:
            free = max(0, self._consumers - len(self._running))
            limit = free + self._prefetch - len(self._queue)
            busy_alone = any(one.claimed.care is Care.ALONE for one in self._running.values()) or any(
                one.care is Care.ALONE for one in self._queue
            )
        asked_at = time.monotonic()
        taken: list[Claimed] = []
        with self._engine.begin() as connection:
            done = settle_with_domain(connection, self.kind, settlements, holder=self._holder) if settlements else set()
            missing = [one.claimed for one in settlements if one.claimed.message_id not in done]
            known = outbox.ended_as(connection, missing) if missing else {}
            if claim and limit > 0:
                taken = self._claim(connection, limit=limit, ready=free, alone=not busy_alone)
        self._unsure = None
        self._keeper.drop([one.claimed.lease for one in ended])
        for one in ended:
            _tell(self.kind, one, lost=one.claimed in missing and known.get(one.claimed.message_id) is not one.outcome)
        if claim:
            self._looked_at = asked_at
            self._more = len(taken) >= limit > 0
            self._take(taken, asked_at)

    def _claim(self, connection: Connection, *, limit: int, ready: int, alone: bool) -> list[Claimed]:
        kind = self.kind
        if self._unsure is not None:
            found = outbox.claimed_under(connection, kind.name, token=self._unsure, seconds=kind.lease)
            if found:
                return found
        self._unsure = uuid4()
        return outbox.claim_due(
            connection,
            kind.name,
            limit=limit,
            ready=ready,
            alone=alone,
            attempts=kind.attempts,
            holder=self._holder,
            seconds=kind.lease,
            token=self._unsure,
        )

    def _take(self, taken: Sequence[Claimed], asked_at: float) -> None:
        self._keeper.hold(
            [claimed.lease for claimed in taken],
            timeout=self.kind.timeout,
            asked_at=asked_at,
            on_lost=self._lose,
        )
        with self._lock:
            if not taken and not self._running:
                # Nothing to do is also getting on.
                self._progressed_at = time.monotonic()
            if self._stopping:
                self._ended += [_given_back(claimed) for claimed in taken]
                return
            self._queue.extendleft(claimed for claimed in reversed(taken) if claimed.care is not Care.NONE)
            self._queue.extend(claimed for claimed in taken if claimed.care is Care.NONE)
            self._work.notify(len(taken))


def _given_back(claimed: Claimed) -> Ended:
    settlement = Settlement(claimed, AttemptOutcome.INTERRUPTED, "given back before it began: the worker was stopped")
    return Ended(claimed, AttemptOutcome.INTERRUPTED, 0.0, settlement)


def _tell(kind: JobKind, ended: Ended, *, lost: bool) -> None:
    told = f"kind {kind.name}, message {ended.claimed.message_id}, attempt {ended.claimed.attempt}"
    if lost or ended.outcome is AttemptOutcome.LOST:
        _logger.warning("%s: the lease was lost; nothing was written", told)
    elif ended.outcome in {AttemptOutcome.FAILED, AttemptOutcome.GIVEN_UP}:
        _logger.warning("%s: %s: %s\n%s", told, ended.outcome, ended.line, ended.trace or "")
    elif _logger.isEnabledFor(logging.DEBUG):
        _logger.debug("%s: %s after %.3f s", told, ended.outcome, ended.ran)
