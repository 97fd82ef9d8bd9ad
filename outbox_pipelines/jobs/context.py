"""What a handler is given, and what it may raise."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from outbox_pipelines.database.error_text import error_text
from outbox_pipelines.database.session import Transaction, connection_of
from outbox_pipelines.errors import OutboxError
from outbox_pipelines.jobs.domain import Domain
from outbox_pipelines.jobs.message import AttemptOutcome, Claimed, Settlement
from outbox_pipelines.jobs.outbox import ended_as, note_progress, settle
from outbox_pipelines.lease.lease import lost

_logger = logging.getLogger(__name__)

_LONGEST_STEP = 200
_STEP_LOCK_MILLISECONDS = 500

_LEAST_SECONDS_BETWEEN = 0.25
"""Between two writings of the same step's fraction; a handler may call as often as it likes."""


class GiveUp(OutboxError):
    """Raised by a handler when no further attempt can help; its text is for people.

    The message is completed as failed at once, and the domain job marked with the text.
    """


class NoTransaction(OutboxError):
    """There is no transaction that effect and completion could share; nothing was written."""


class JobContext:
    """One attempt at a job, as its handler sees it."""

    def __init__(
        self,
        claimed: Claimed,
        *,
        engine: Engine,
        handlers_engine: Engine | None = None,
        domain: Domain | None,
        holder: str,
        on_progress: Callable[[str, float | None], None],
    ) -> None:
        self.claimed = claimed
        self.completing = False
        """Whether :meth:`complete_in` was called; only the ledger knows whether it was committed."""
        self.heeded = False
        """Whether the handler has been told that it is cancelled."""
        self.progressed_at = float("-inf")
        """When the handler last told of progress (monotonic)."""
        self._engine = engine
        self._handlers_engine = handlers_engine or engine
        self._domain = domain
        self._holder = holder
        self._on_progress = on_progress
        self._cancelled = False
        # Made when a handler waits, which few do: making one costs more than the rest of this object.
        self._awaited: threading.Event | None = None
        self._noted: tuple[str, float | None] | None = None
        self._noted_at = self.progressed_at

    @property
    def message_id(self) -> int:
        """The message's id: the same for each attempt, and so a key for idempotent effects."""
        return self.claimed.message_id

    @property
    def kind(self) -> str:
        """The name of its kind."""
        return self.claimed.kind

    @property
    def job_id(self) -> str | None:
        """The id in the application's own table of jobs, as text."""
        return self.claimed.job_id

    @property
    def payload(self) -> Mapping[str, Any]:
        """What was enqueued."""
        return self.claimed.payload

    @property
    def attempt(self) -> int:
        """1 at the first attempt."""
        return self.claimed.attempt

    @property
    def cancelled(self) -> bool:
        """Whether to stop: the lease is lost, the time is up, or the run or worker is told to end.

        A handler that looks here now and then, and returns or raises when it is true, ends
        cleanly; one that does not is interrupted a second later. Either way the attempt does
        not succeed; what it did outside this database may be done again.
        """
        self.heeded = self.heeded or self._cancelled
        return self._cancelled

    def wait(self, seconds: float) -> bool:
        """Sleep, but no longer than until the job is cancelled; says whether it is."""
        if self._awaited is None:
            self._awaited = threading.Event()
        # In this order, as cancel() has the other one: either it sees the event, or we see that it came.
        if not self._cancelled:
            self._awaited.wait(seconds)
        return self.cancelled

    def progress(self, step: str, fraction: float | None = None) -> None:
        """Tell people how far the work is.

        Args:
            step: what is being done, a few words.
            fraction: how much of all is done, 0 to 1, if known.

        Raises:
            LeaseLost: the job is somebody else's by now, or was cancelled by a person. Let it pass.
            ValueError: for a fraction outside 0 to 1.
        """
        if fraction is not None and not 0 <= fraction <= 1:
            raise ValueError(f"progress: fraction is {fraction!r}; allowed are 0 to 1, or None")
        told = (error_text(step, limit=_LONGEST_STEP), fraction)
        now = time.monotonic()
        same_step = self._noted is not None and self._noted[0] == told[0]
        if same_step and fraction != 1 and now - self._noted_at < _LEAST_SECONDS_BETWEEN:
            return
        self._noted, self._noted_at = told, now
        try:
            with self._engine.begin() as connection:
                ours = note_progress(connection, self.claimed, *told)
        except SQLAlchemyError as error:
            # Only told to people: the work itself goes on.
            _logger.warning("progress of message %s could not be noted: %s", self.message_id, type(error).__name__)
            ours = True
        if ours and not same_step:
            self._note_step(told[0])
        if not ours:
            self.cancel()
            self.heeded = True
            raise lost(self.claimed.lease)
        self.progressed_at = time.monotonic()
        self._on_progress(*told)

    def _note_step(self, step: str) -> None:
        """Show the step in the domain job, in a transaction of its own.

        The handler itself may have that row locked, in a transaction that it has open: then the
        message's row, which heartbeats need, must not be held meanwhile, nor the handler for long.
        """
        if self._domain is None or self.job_id is None:
            return
        try:
            with self._engine.begin() as connection:
                connection.execute(text(f"SET LOCAL lock_timeout = '{_STEP_LOCK_MILLISECONDS}ms'"))
                self._domain.note_step(connection, self.job_id, step)
        except Exception as error:  # a user's adapter or table may do anything; the work itself goes on
            _logger.warning("the step of job %s could not be noted: %s", self.job_id, type(error).__name__)

    @contextmanager
    def session(self) -> Iterator[Session]:
        """A SQLAlchemy session on the outbox's database: commits at the end, rolls back on an error."""
        with Session(self._handlers_engine) as session, session.begin():
            yield session

    def complete_in(self, session: Transaction) -> None:
        """Complete the job in a transaction of the handler's: its effect and this, or neither.

        To be called when the effect has been written, late in the transaction: the message's row
        stays locked until the commit. What follows is the domain job's mark, in the order in which
        whoever cancels a job locks the two. The session must be on the outbox's database.

        Raises:
            LeaseLost: the job is somebody else's by now. Let it pass, so that the effect is rolled back.
            NoTransaction: the connection is in AUTOCOMMIT.
        """
        connection = connection_of(session)
        if getattr(connection.connection.dbapi_connection, "autocommit", False) is True:
            raise NoTransaction(
                "complete_in was given a connection in AUTOCOMMIT: it would complete the job whatever becomes of its "
                "effect; give it a session or connection with a transaction"
            )
        done = settle(connection, [Settlement(self.claimed, AttemptOutcome.SUCCEEDED)], holder=self._holder)
        if not done and self.completing and ended_as(connection, [self.claimed]):
            # Called before in this transaction, or in one that was committed.
            return
        if not done:
            self.cancel()
            self.heeded = True
            raise lost(self.claimed.lease)
        self.completing = True

    def cancel(self) -> None:
        """Set :attr:`cancelled`; called by whoever watches over the attempt."""
        self._cancelled = True
        if self._awaited is not None:
            self._awaited.set()
