"""One tenant being drained by one flush.

Calls go one after another in id order. While a call is in flight the database works: the
rows of the last turn are settled and those of the next are read, never more than one turn
away from the turn being sent.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from uuid import uuid4

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from outbox_pipelines import tracing
from outbox_pipelines.database.error_text import error_text, first_line
from outbox_pipelines.database.steps import StepThreads
from outbox_pipelines.lease import lease as lease_module
from outbox_pipelines.lease.backoff import backoff_seconds
from outbox_pipelines.lease.heartbeat import Heartbeat
from outbox_pipelines.lease.lease import Lease, LeaseLost, Refused
from outbox_pipelines.settings import Settings
from outbox_pipelines.tenants.registry import MISSING_REMEDY, Problem, Tenant
from outbox_pipelines.training import outbox
from outbox_pipelines.training.delivery import DeadLetter, deliver, pack
from outbox_pipelines.training.outcome import Ending, TenantReport
from outbox_pipelines.training.sink import Batch, Misconfigured, OutboxRow, Sink, SinkClosed, SinkError

_logger = logging.getLogger(__name__)

_SLOW_CALL_SECONDS = 0.05
"""After a call this slow its rows are settled at once: the database has time, and a crash
would send fewer rows again."""

_FLAG_AGE_SECONDS = 0.5
"""How old the knowledge that a tenant is not paused may be when a turn begins."""

_MISSING = frozenset({"42P01", "3F000"})
"""SQLSTATE of undefined_table and invalid_schema_name."""


class TenantDrain:
    """The state of one tenant's flush between its turns; used by one thread at a time."""

    def __init__(
        self,
        tenant: Tenant,
        *,
        sink: Sink,
        settings: Settings,
        run_id: str,
        heartbeat: Heartbeat,
        database: StepThreads,
        cancelled: threading.Event,
    ) -> None:
        self.report = TenantReport(tenant)
        self._tenant = tenant
        self._sink = sink
        self._settings = settings
        self._run_id = run_id
        self._heartbeat = heartbeat
        self._database = database
        self._cancelled = cancelled
        self._claimed: outbox.ClaimedTenant | None = None
        self._began = time.monotonic()
        self._unsettled = outbox.Unsettled()
        self._settling: _Settling | None = None
        self._reading: Future[list[OutboxRow]] | None = None
        self._paused = False
        self._paused_asked_at = 0.0

    def turn(self) -> bool:
        """Send one turn's rows; says whether another turn may follow.

        When it says no, the flush of this tenant has ended and its lease is free.
        """
        with tracing.span("outbox turn", attributes={"outbox.tenant": self._tenant.name}) as span:
            more = self._guarded(self._turn)
            if not more:
                span.set("outbox.ending", self.report.ending)
                if self.report.problem is not None:
                    # A word. The line about it may be the database's, and quote a row.
                    span.fail(self.report.problem)
            return more

    def end(self, ending: Ending) -> None:
        """End between two turns: settle what is open and free the lease."""
        self._guarded(lambda: self._conclude(ending))

    def _guarded(self, work: Callable[[], bool]) -> bool:
        try:
            return work()
        except SinkClosed:
            return self._guarded(lambda: self._conclude(Ending.CANCELLED))
        except LeaseLost as error:
            return self._ended(Ending.LEASE_LOST, str(error))
        except Exception as error:  # ServiceUnwell, the database's, and whatever a user's sink raises: the rows stay
            return self._fail(error)

    def _turn(self) -> bool:
        if self._claimed is None:
            if self._cancelled.is_set():
                return self._ended(Ending.CANCELLED)
            refused = self._claim()
            if refused is not None:
                return self._ended(Ending.TAKEN, _tell(refused))
        rows = self._next_rows()
        if self._cancelled.is_set():
            return self._conclude(Ending.CANCELLED)
        if self._is_paused():
            return self._conclude(Ending.PAUSED)
        if not rows:
            return self._conclude(Ending.EMPTIED)
        self.report.turns += 1
        in_flight = [row.row_id for row in rows] + self._unsettled.gone_ids
        self._settle_behind()
        self._reading = self._read(in_flight)
        for item in pack(self._sink, self._tenant.tenant_id, rows, self._settings.batch_size):
            if isinstance(item, DeadLetter):
                self._unsettled.dead.append(item)
                continue
            if not self._heartbeat.is_sure(self._lease):
                self._make_sure()
            began = time.monotonic()
            self._send(item)
            slow = time.monotonic() - began > _SLOW_CALL_SECONDS
            if slow and (self._settling is None or self._settling.step.done()):
                self._settle_behind()
        return True

    def _send(self, batch: Batch) -> None:
        judged: set[int] = set()
        try:
            for call in deliver(self._sink, batch):
                if call.delivered is not None:
                    self._unsettled.delivered.append(call.delivered)
                    judged.update(call.delivered.row_ids)
                self._unsettled.dead.extend(call.dead)
                judged.update(letter.row_id for letter in call.dead)
        except SinkClosed:
            raise
        except Exception as error:
            self._unsettled.failed_ids = [row_id for row_id in batch.row_ids if row_id not in judged]
            self._unsettled.failure = error_text(error)
            raise

    # Steps of the database; each is one statement and safe to repeat.

    def _claim(self) -> Refused | None:
        asked_at = self._began = time.monotonic()
        token = uuid4()
        claimed = self._database.run(
            lambda connection: outbox.claim_tenant(
                connection, self._tenant, holder=self._run_id, seconds=self._settings.lease_seconds, token=token
            )
        )
        if isinstance(claimed, Refused):
            return claimed
        self._claimed = claimed
        self._paused_asked_at = asked_at
        # Whether it is lost, the drain asks before each call.
        self._heartbeat.hold(claimed.lease, on_lost=lambda: None, asked_at=asked_at)
        return None

    def _next_rows(self) -> list[OutboxRow]:
        if self._reading is not None:
            rows = self._reading.result()
            if rows:
                return rows
            # That was read while the last turn was under way; what was committed since is read now.
            self._settle_all()
        return self._read(except_ids=[]).result()

    def _read(self, except_ids: list[int]) -> Future[list[OutboxRow]]:
        return self._database.submit(
            lambda connection: outbox.read_rows(
                connection,
                self._tenant,
                limit=self._settings.max_rows_per_turn,
                # Of large rows a turn is one message: what is read ahead is held in memory.
                max_bytes=self._sink.max_call_bytes,
                except_ids=except_ids,
            )
        )

    def _settle(self, unsettled: outbox.Unsettled) -> Future[bool]:
        return self._database.submit(
            lambda connection: outbox.settle(connection, self._lease, self._tenant, unsettled, run_id=self._run_id)
        )

    def _settle_behind(self) -> None:
        """Settle what is open while the next call is in flight; at most one such step at a time."""
        self._settled()
        if self._unsettled:
            unsettled, self._unsettled = self._unsettled, outbox.Unsettled()
            self._settling = _Settling(unsettled, self._settle(unsettled), time.monotonic())

    def _settled(self) -> None:
        """Wait for the step that :meth:`_settle_behind` began, and count what it settled."""
        if self._settling is None:
            return
        settling, self._settling = self._settling, None
        try:
            self._paused = settling.step.result()
        except DBAPIError:
            # Still delivered, and still to be settled: forgetting it would send it again.
            self._unsettled = settling.unsettled.put_before(self._unsettled)
            raise
        self._paused_asked_at = settling.asked_at
        self._heartbeat.renewed(self._lease, asked_at=settling.asked_at)
        self._count(settling.unsettled)

    def _settle_all(self) -> None:
        """Settle what is open, trying a second time: a lock may have been in the way."""
        try:
            self._settle_behind()
            self._settled()
        except DBAPIError as error:
            _logger.info("tenant %s: settling once more after %s", self._tenant.name, type(error).__name__)
            self._settle_behind()
            self._settled()

    def _make_sure(self) -> None:
        """Ask the database whether the lease is still ours, which settles what is open as well."""
        try:
            self._settle_all()
            asked_at = time.monotonic()
            self._settle(outbox.Unsettled()).result()
        except SQLAlchemyError as error:
            if _is_missing(error):
                raise
            raise LeaseLost(
                f"tenant {self._tenant.name!r}: the lease could not be kept; another run may have it"
            ) from error
        self._heartbeat.renewed(self._lease, asked_at=asked_at)

    def _is_paused(self) -> bool:
        self._settled()
        if time.monotonic() - self._paused_asked_at > _FLAG_AGE_SECONDS:
            self._paused_asked_at = time.monotonic()
            self._paused = self._settle(outbox.Unsettled()).result()
        return self._paused

    # Endings

    @property
    def _lease(self) -> Lease:
        assert self._claimed is not None
        return self._claimed.lease

    def _conclude(self, ending: Ending) -> bool:
        self._settle_all()
        went_well = ending is Ending.EMPTIED or self.report.rows > 0
        self._release(outbox.release_well if went_well else lease_module.release)
        return self._ended(ending)

    def _release(self, release: Callable[[Connection, Lease], None]) -> None:
        tried = False

        def step(connection: Connection) -> None:
            nonlocal tried
            again, tried = tried, True
            try:
                release(connection, self._lease)
            except LeaseLost:
                if not again:
                    raise
                # The first try, whose answer was lost with its connection, had released it.

        self._database.run(step)

    def _fail(self, error: Exception) -> bool:
        problem, told = self._diagnose(error)
        self.report.problem = problem
        if self._claimed is None:
            return self._ended(Ending.FAILED, told)
        try:
            self._settle_all()
        except LeaseLost as lost:
            return self._ended(Ending.LEASE_LOST, str(lost))
        except SQLAlchemyError as failed:
            # What is not settled is sent again: at least once. The error to tell is the first one.
            _logger.warning("tenant %s: deliveries could not be settled: %s", self._tenant.name, type(failed).__name__)
        # A tenant that got something through begins its backoff anew.
        failures = 1 if self.report.rows else self._claimed.failure_count + 1
        first, longest = self._settings.backoff_first_seconds, self._settings.backoff_max_seconds
        # Only a person can mend what is broken; the sensor sees it when it is.
        wait = longest if problem is Problem.BROKEN else backoff_seconds(failures, first=first, maximum=longest)
        failure = outbox.Failure(problem, told, error_text(error), failures, wait)
        try:
            self._release(lambda connection, lease: outbox.release_failed(connection, lease, failure))
        except LeaseLost as lost:
            return self._ended(Ending.LEASE_LOST, str(lost))
        except SQLAlchemyError:
            # The rows are there for whoever claims the tenant when the lease has run out.
            return self._ended(Ending.FAILED, f"{told}; the lease ends by itself")
        return self._ended(Ending.FAILED, f"{told}; next attempt in {wait:.0f} s")

    def _diagnose(self, error: Exception) -> tuple[Problem, str]:
        """The kind of problem, and a line about it that holds no payload."""
        if isinstance(error, SinkError):
            return (Problem.MISCONFIGURED if isinstance(error, Misconfigured) else Problem.UNWELL), error.told
        if isinstance(error, DBAPIError):
            # The first line alone: PostgreSQL quotes the row in the lines below.
            line = first_line(error.orig)
            if _is_missing(error):
                return Problem.BROKEN, f"{line}; {MISSING_REMEDY}"
            return Problem.UNWELL, f"the database failed: {line}"
        if isinstance(error, SQLAlchemyError):
            return Problem.UNWELL, f"the database failed: {first_line(error)}"
        return Problem.UNWELL, f"{self._sink.target} failed with {type(error).__name__}"

    def _ended(self, ending: Ending, detail: str = "") -> bool:
        if self._claimed is not None:
            self._heartbeat.drop(self._claimed.lease)
        self.report.ending = ending
        self.report.detail = detail
        self.report.seconds = time.monotonic() - self._began
        return False

    def _count(self, settled: outbox.Unsettled) -> None:
        report = self.report
        for line in settled.delivered:
            report.rows += len(line.row_ids)
            report.batches += 1
            report.first_id = line.row_ids[0] if report.first_id is None else min(report.first_id, line.row_ids[0])
            report.last_id = line.row_ids[-1] if report.last_id is None else max(report.last_id, line.row_ids[-1])
        report.dead_letters += len(settled.dead)


@dataclass(frozen=True)
class _Settling:
    """A step that settles, under way."""

    unsettled: outbox.Unsettled
    step: Future[bool]
    asked_at: float


def _is_missing(error: SQLAlchemyError) -> bool:
    return isinstance(error, DBAPIError) and getattr(error.orig, "sqlstate", None) in _MISSING


def _tell(refused: Refused) -> str:
    if refused.seconds_left is None:
        return "the tenant is paused or no longer registered"
    return f"run {refused.holder} holds the lease, for up to {refused.seconds_left:.0f} s more"
