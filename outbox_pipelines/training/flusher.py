"""Flush tenants' outboxes: turns, round robin, side by side, within a time budget."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import dataclass, field

from sqlalchemy import Engine

from outbox_pipelines import tracing
from outbox_pipelines.database.engine import for_single_statements
from outbox_pipelines.database.steps import StepThreads
from outbox_pipelines.lease.heartbeat import Heartbeat
from outbox_pipelines.settings import Settings
from outbox_pipelines.tenants.registry import Tenant
from outbox_pipelines.training.drain import TenantDrain
from outbox_pipelines.training.outcome import Ending, TenantReport
from outbox_pipelines.training.sink import Sink

_WAKE_SECONDS = 0.2
"""How often the waiting thread returns to Python, where an interrupt can reach it."""

_DATABASE_AWAY_SECONDS = 30.0
"""How long a flush waits for a database that is away, if its lease lasts that long."""


@dataclass(frozen=True)
class FlushReport:
    """What a flush did, tenant by tenant."""

    tenants: list[TenantReport] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def rows(self) -> int:
        """Rows delivered."""
        return sum(report.rows for report in self.tenants)

    @property
    def dead_letters(self) -> int:
        """Rows taken out of the flow."""
        return sum(report.dead_letters for report in self.tenants)

    @property
    def batches(self) -> int:
        """Calls that delivered something."""
        return sum(report.batches for report in self.tenants)

    @property
    def failed(self) -> list[TenantReport]:
        """The tenants whose flush ended with an error."""
        return [report for report in self.tenants if report.ending is Ending.FAILED]


class Flusher:
    """Flushes tenants over one sink.

    Args:
        engine: the database; one flush at a time, which uses at most its pool's connections.
        sink: the destination; closed by a cancelled flush, otherwise left to the caller.
        settings: sizes, budgets and times.
        run_id: who delivers, for the ledger and as the leases' holder.
    """

    def __init__(self, engine: Engine, sink: Sink, settings: Settings, *, run_id: str) -> None:
        self._engine = engine
        self._statements = for_single_statements(engine, settings)
        self._sink = sink
        self._settings = settings
        self._run_id = run_id
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """End the flush: cancel the calls in flight, settle what was answered, free the leases."""
        self._cancelled.set()
        self._sink.close()

    def flush(
        self, tenants: Sequence[Tenant], *, max_turns: int | None = None, budget_seconds: float | None = None
    ) -> FlushReport:
        """Take turns round robin until the outboxes are empty or the budget is spent.

        Each tenant gets its first turn whatever the budget, so that none starves behind
        slow ones. An interrupt in the calling thread cancels the flush and is raised again
        after the leases are free.

        Args:
            tenants: whom to flush, most urgent first.
            max_turns: turns of each tenant at most.
            budget_seconds: after this time no further turn begins; the setting's value if none.
        """
        about: dict[str, str | int] = {"outbox.run_id": self._run_id, "outbox.tenants": len(tenants)}
        with tracing.span("outbox flush", attributes=about) as span:
            report = self._flush(tenants, max_turns, budget_seconds)
            span.set("outbox.rows", report.rows)
            span.set("outbox.batches", report.batches)
            span.set("outbox.dead_letters", report.dead_letters)
            if report.failed:
                span.fail("TenantsFailed", f"{len(report.failed)} of {len(tenants)} tenants failed")
            return report

    def _flush(self, tenants: Sequence[Tenant], max_turns: int | None, budget_seconds: float | None) -> FlushReport:
        budget = self._settings.budget_seconds if budget_seconds is None else budget_seconds
        began = time.monotonic()
        workers = max(1, min(len(tenants), self._settings.tenants_in_parallel))
        with (
            Heartbeat(self._engine, lease_seconds=self._settings.lease_seconds) as heartbeat,
            StepThreads(
                self._statements,
                threads=max(1, self._settings.pool_size - 1),
                retry_seconds=min(self._settings.lease_seconds, _DATABASE_AWAY_SECONDS),
                give_up=self._cancelled,
            ) as database,
            ThreadPoolExecutor(workers, "outbox-tenant") as calls,
        ):
            drains = [
                TenantDrain(
                    tenant,
                    sink=self._sink,
                    settings=self._settings,
                    run_id=self._run_id,
                    heartbeat=heartbeat,
                    database=database,
                    cancelled=self._cancelled,
                )
                for tenant in tenants
            ]
            queue = deque(drains)
            try:
                # In the span that is current here.
                rounds = [
                    calls.submit(copy_context().run, self._take_turns, queue, began + budget, max_turns)
                    for _ in range(workers)
                ]
                while wait(rounds, timeout=_WAKE_SECONDS).not_done:
                    pass
            except BaseException:
                # Whatever it was (Ctrl-C, Dagster's termination): nothing unanswered is deleted, and the
                # leases are free before it goes on its way, since leaving the block waits for the threads.
                self.cancel()
                raise
            for done in rounds:
                done.result()
        return FlushReport([drain.report for drain in drains], time.monotonic() - began)

    def _take_turns(self, queue: "deque[TenantDrain]", ends_at: float, max_turns: int | None) -> None:
        while True:
            try:
                drain = queue.popleft()
            except IndexError:
                # Those that others are serving return to the queue for them, not for us.
                return
            if not drain.turn():
                continue
            if max_turns is not None and drain.report.turns >= max_turns:
                drain.end(Ending.TURNS_TAKEN)
            elif time.monotonic() >= ends_at:
                drain.end(Ending.BUDGET_SPENT)
            else:
                queue.append(drain)
