"""One attempt: the handler is called, watched, stopped when it must be, and its end is judged."""

import ctypes
import inspect
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

import psycopg
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError, StatementError

from outbox_pipelines import tracing
from outbox_pipelines.database.error_text import error_text, first_line
from outbox_pipelines.database.steps import persistently
from outbox_pipelines.jobs.context import GiveUp, JobContext
from outbox_pipelines.jobs.domain import Standing
from outbox_pipelines.jobs.keeper import LeaseKeeper
from outbox_pipelines.jobs.kinds import JobKind
from outbox_pipelines.jobs.message import AttemptOutcome, Claimed, Settlement
from outbox_pipelines.jobs.outbox import ended_as, last_attempt
from outbox_pipelines.jobs.spans import handler_span, note_outcome
from outbox_pipelines.lease.lease import LeaseLost
from outbox_pipelines.wording import counted

_logger = logging.getLogger(__name__)

HEED_SECONDS = 1.0
"""How long a handler has to notice that it is cancelled, before it is interrupted."""

ABANDON_SECONDS = 2.0
"""How long an interrupted handler may take to end, before nobody waits for it any more."""

_LEASE_LOOK_SECONDS = 1.0

_UNJUDGED_SECONDS = 60.0
_FRAMES_KEPT = 20

_WAITED_SECONDS = 1.0
"""How long a claim may wait in memory before it is looked at again when its turn comes."""


class Stop(StrEnum):
    """Why a handler is stopped."""

    LOST = "lease lost"
    """The lease is somebody else's, or may be: nothing more is written."""

    TIMED_OUT = "timed out"
    """The kind's timeout has passed."""

    INTERRUPTED = "interrupted"
    """The run was terminated, or the worker told to stop."""


class HandlerStopped(BaseException):
    """Raised inside a handler that did not notice that it is cancelled."""


@dataclass(frozen=True)
class Ended:
    """How an attempt ended."""

    claimed: Claimed
    outcome: AttemptOutcome

    ran: float
    """Seconds that the handler ran."""

    settlement: Settlement | None
    """What is still to be written; none when the lease is lost, or the handler has completed the job itself."""

    error: str | None = None
    """For the table: the text of the error at the bottom of its causes."""

    line: str | None = None
    """For runs and logs: its first line, without what a database error quotes."""

    trace: str | None = None
    """Where the handler raised: its frames, without the error's text."""


class Execution:
    """An attempt under way: :meth:`run` in the handler's thread, :meth:`watch` from another.

    Args:
        kind: of the job.
        claimed: the message.
        engine: for our own statements, which handlers cannot use up.
        handlers_engine: for the handler's sessions; the same when not given.
        keeper: holds the lease.
        holder: who we are, for the ledger.
        on_progress: told of the handler's progress, in the handler's thread.
    """

    def __init__(
        self,
        kind: JobKind,
        claimed: Claimed,
        *,
        engine: Engine,
        handlers_engine: Engine | None = None,
        keeper: LeaseKeeper,
        holder: str,
        on_progress: Callable[[str, float | None], None] = lambda _step, _fraction: None,
    ) -> None:
        self.claimed = claimed
        self._kind = kind
        self._engine = engine
        self._keeper = keeper
        self._holder = holder
        self._span = tracing.NO_SPAN
        self._context = JobContext(
            claimed,
            engine=engine,
            handlers_engine=handlers_engine,
            domain=kind.domain,
            holder=holder,
            on_progress=on_progress,
        )
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._why: Stop | None = None
        self._stopped_at = 0.0
        self._raised = False
        self._ended = False
        self._began_at = time.monotonic()
        self._looked_at = self._began_at

    @property
    def progressed_at(self) -> float:
        """When the handler began or last told of progress (monotonic)."""
        # Kept there, since a context that knew its execution would make a circle, which only the garbage collector
        # takes apart: for each job.
        return max(self._began_at, self._context.progressed_at)

    def run(self) -> Ended | None:
        """Call the handler; none when nobody waits for its end any more (see :meth:`abandon`)."""
        self._began_at = self._looked_at = time.monotonic()
        try:
            ended = self._without_handler()
            if ended is None:
                ended = self._traced() if tracing.is_on() else self._with_handler()
        except BaseException as error:  # whatever a handler, its classes or its database raise is told
            ended = replace(self._judge_safely(error), trace=_frames(error))
        return ended if self._end() else None

    def watch(self) -> bool:
        """Stop the handler when it is time to; to be called a few times a second.

        Returns:
            Whether to go on waiting; otherwise the attempt is to be abandoned.
        """
        now = time.monotonic()
        if self._why is None:
            if now >= self._began_at + self._kind.timeout:
                self.stop(Stop.TIMED_OUT)
            elif now >= self._looked_at + _LEASE_LOOK_SECONDS:
                self._looked_at = now
                if not self._keeper.is_held(self.claimed.lease):
                    self.stop(Stop.LOST)
            return True
        if now < self._stopped_at + HEED_SECONDS:
            return True
        self._raise_inside()
        return now < self._stopped_at + HEED_SECONDS + ABANDON_SECONDS

    def stop(self, why: Stop) -> None:
        """Tell the handler to stop; the first reason stays."""
        with self._lock:
            if self._why is None:
                self._why, self._stopped_at = why, time.monotonic()
        self._context.cancel()

    def abandon(self) -> Ended | None:
        """Wait no longer: the end as the reason for stopping has it; none when it has ended by itself."""
        if not self._end():
            return None
        _logger.warning(
            "kind %s: the handler of message %s does not end and is left to itself",
            self._kind.name,
            self.claimed.message_id,
        )
        ended = self._stopped_end()
        note_outcome(self._span, ended.outcome)
        self._span.end()
        return ended

    def _end(self) -> bool:
        with self._lock:
            first, self._ended = not self._ended, True
            return first

    # The handler

    def _without_handler(self) -> Ended | None:
        if not self._keeper.is_held(self.claimed.lease, known_for=_WAITED_SECONDS):
            # Cancelled, for example, while it waited in memory.
            return self._lost()
        if self.claimed.attempt > self._kind.attempts:
            return self._settled(AttemptOutcome.GIVEN_UP, self._reason_for_no_more())
        try:
            readable = isinstance(self.claimed.payload, dict)
        except (ValueError, RecursionError):
            readable = False
        if not readable:
            return self._settled(AttemptOutcome.GIVEN_UP, "its payload is not a JSON object that Python can read")
        domain, job_id = self._kind.domain, self.claimed.job_id
        if domain is None:
            return None
        if job_id is None:
            return self._settled(
                AttemptOutcome.GIVEN_UP,
                "it has no job_id, though its kind has a domain table: flush the session before enqueue_job, so that "
                "the domain job has its id",
            )
        with self._engine.begin() as connection:
            standing = domain.standing(connection, job_id)
        if standing is Standing.MISSING:
            told = f"there is no job with the id {job_id!r} in the domain table, written as the table writes it"
            return self._settled(AttemptOutcome.GIVEN_UP, told)
        if standing is Standing.CANCELLED:
            return self._settled(AttemptOutcome.CANCELLED, "its domain job was cancelled")
        if standing is Standing.SUCCEEDED:
            return self._settled(AttemptOutcome.SUCCEEDED)
        return None

    def _reason_for_no_more(self) -> str:
        with self._engine.connect() as connection:
            outcome, error = last_attempt(connection, self.claimed.message_id)
        attempts = f"given up after {counted(self.claimed.attempt - 1, 'attempt')}"
        if outcome is AttemptOutcome.FAILED:
            # The limit was lowered meanwhile.
            return f"{attempts}; the last error: {error}"
        return f"{attempts}: the last one's worker died or lost its lease"

    def _traced(self) -> Ended:
        """The handler in a span, which is current for what it does, and tells how the attempt was judged."""
        with handler_span(self.claimed, holder=self._holder) as self._span:
            error_type = None
            try:
                ended = self._with_handler()
            except BaseException as error:  # as in run
                ended = replace(self._judge_safely(error), trace=_frames(error))
                error_type = type(error).__name__
            note_outcome(self._span, ended.outcome, error_type)
            return ended

    def _with_handler(self) -> Ended:
        process = os.getpid()
        try:
            with self._lock:
                self._thread = threading.get_ident()
            try:
                returned = self._kind.handler(self._context)
            finally:
                self._leave()
        finally:
            if os.getpid() != process:
                # A child that the handler forked and that came back here: it is no worker.
                os._exit(0)
            # Again, should the interruption have come just there; it comes once.
            self._leave()
        return self._judge_return(returned)

    def _leave(self) -> None:
        if self._thread is None:
            return
        with self._lock:
            if self._raised and self._thread is not None:
                # One that was sent and has not arrived must not arrive in our own code.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), None)
            self._thread = None

    def _raise_inside(self) -> None:
        with self._lock:
            if self._raised or self._thread is None:
                return
            self._raised = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(HandlerStopped))

    # The judgement

    def _judge_return(self, returned: object) -> Ended:
        completed = self._completed()
        if completed is not None:
            return completed
        if self._context.completing:
            return self._failed("complete_in was called, but its transaction was not committed")
        if self._why is not None and (self._context.heeded or self._raised):
            return self._stopped_end()
        if returned is None:
            return self._settled(AttemptOutcome.SUCCEEDED)
        if inspect.isawaitable(returned) or inspect.isgenerator(returned):
            what = "a coroutine" if inspect.isawaitable(returned) else "a generator"
            if inspect.iscoroutine(returned):
                returned.close()
            return self._settled(
                AttemptOutcome.GIVEN_UP, f"the handler returned {what}, whose code did not run: call it to its end"
            )
        _logger.warning(
            "kind %s: the handler returned a %s, which is ignored; it succeeds by returning and fails by raising",
            self._kind.name,
            type(returned).__name__,
        )
        return self._settled(AttemptOutcome.SUCCEEDED)

    def _judge_safely(self, error: BaseException) -> Ended:
        try:
            return self._judge(error)
        except Exception as fault:  # an attempt must end, whatever a kind's backoff or an error's class does
            _logger.exception("kind %s: a failed attempt could not be judged", self._kind.name)
            told = f"the attempt failed, and judging it failed too: {type(fault).__name__}"
            return self._settled(AttemptOutcome.FAILED, told, delay=_UNJUDGED_SECONDS)

    def _judge(self, error: BaseException) -> Ended:
        completed = self._completed()
        if completed is not None:
            return completed
        if self._why is not None and (self._context.heeded or self._raised):
            return self._stopped_end()
        if isinstance(error, LeaseLost):
            return self._lost()
        if isinstance(error, GiveUp):
            return self._settled(AttemptOutcome.GIVEN_UP, error_text(error), line=first_line(error))
        cause, seen = error, {id(error)}
        while cause.__cause__ is not None and id(cause.__cause__) not in seen:
            # `raise error from error` makes a circle.
            cause = cause.__cause__
            seen.add(id(cause))
        name = type(cause).__name__
        text = error_text(cause)
        return self._failed(text if text == name else f"{name}: {text}", line=_shown(cause))

    def _stopped_end(self) -> Ended:
        if self._why is Stop.LOST:
            return self._lost()
        if self._why is Stop.TIMED_OUT:
            return self._failed(f"the attempt took longer than the kind's timeout of {self._kind.timeout:g} s")
        return self._settled(AttemptOutcome.INTERRUPTED, "the run was terminated, or the worker told to stop")

    def _completed(self) -> Ended | None:
        """The end, when the handler has completed the job in a transaction of its own."""
        if not self._context.completing:
            return None

        def ask() -> AttemptOutcome | None:
            with self._engine.connect() as connection:
                return ended_as(connection, [self.claimed]).get(self.claimed.message_id)

        try:
            known = persistently(ask, retry_seconds=self.claimed.lease.seconds, give_up=threading.Event())
        except SQLAlchemyError:
            # Nobody can tell whether it is completed, so nothing is written; if not, its lease ends.
            return self._lost()
        if known is not AttemptOutcome.SUCCEEDED:
            return None
        return Ended(self.claimed, AttemptOutcome.SUCCEEDED, self._ran(), settlement=None)

    def _failed(self, error: str, *, line: str | None = None) -> Ended:
        attempt, limit = self.claimed.attempt, self._kind.attempts
        if attempt < limit:
            return self._settled(AttemptOutcome.FAILED, error, line=line, delay=self._kind.backoff.seconds(attempt))
        reason = f"given up after {counted(limit, 'attempt')}; the last error: "
        return self._settled(AttemptOutcome.GIVEN_UP, reason + error, line=reason + (line or error))

    def _settled(
        self, outcome: AttemptOutcome, error: str | None = None, *, line: str | None = None, delay: float = 0.0
    ) -> Ended:
        kept = None if error is None else error_text(error)
        settlement = Settlement(self.claimed, outcome, kept, delay, told=line or kept)
        return Ended(self.claimed, outcome, self._ran(), settlement, kept, line or kept)

    def _lost(self) -> Ended:
        return Ended(self.claimed, AttemptOutcome.LOST, self._ran(), settlement=None)

    def _ran(self) -> float:
        return time.monotonic() - self._began_at


def _frames(error: BaseException) -> str | None:
    """Where a handler raised: its own frames, not ours around it; none for what failed before it was called."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [place for place, frame in enumerate(frames) if frame.filename == __file__]
    inside = frames[max(ours) + 1 :] if ours and frames[max(ours)].name == "_with_handler" else []
    return "".join(traceback.format_list(inside[:_FRAMES_KEPT])) or None


def _shown(cause: BaseException) -> str:
    """An error's line for runs and logs. What a database says may quote a row or a parameter."""
    name = type(cause).__name__
    driver_error = cause.orig if isinstance(cause, StatementError) else cause
    # Of any driver: psycopg2 says pgcode.
    state = getattr(driver_error, "sqlstate", None) or getattr(driver_error, "pgcode", None)
    if isinstance(cause, StatementError) or isinstance(driver_error, psycopg.Error) or isinstance(state, str):
        return f"{type(driver_error or cause).__name__}{f' ({state})' if state else ''}; its text is in the database"
    line = first_line(cause)
    return line if line == name else f"{name}: {line}"
