"""The demonstration as a person sees it."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from outbox_pipelines.database.database import Database
from outbox_pipelines.database.migrate import migrate
from outbox_pipelines.local.demo import Proof, Show, TenantCounts, prepare, prove, refuse_foreign_tenants, watch
from outbox_pipelines.local.demo_jobs import KINDS_SETTING, KindCounts, prepare_jobs, refuse_foreign_jobs
from outbox_pipelines.local.stack import Stack, running_stack
from outbox_pipelines.settings import load_settings
from outbox_pipelines.wording import counted


def run_demo(*, once: bool, quiet: bool, port: int | None) -> Proof:
    """Start the stack, enqueue, watch, prove.

    Args:
        once: end after the proof; otherwise the UI stays up until Ctrl-C.
        quiet: print nothing on standard output; progress goes to standard error.
        port: the UI's port.
    """
    console = Console(stderr=quiet, highlight=False)

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    def discard(_line: str) -> None:
        """The processes' lines are in their log files."""

    # The sample kinds, whatever is set: their end states are what is proved.
    settings = load_settings(kinds=KINDS_SETTING)
    with Database(settings) as database:
        migrate(database.engine)
        refuse_foreign_tenants(database.engine)
        refuse_foreign_jobs(database.engine)
    # Its own service, whatever is set: that one's models are what is proved.
    with running_stack(settings, say=say, log=discard, port=port, reference_service=True) as stack:
        began = time.monotonic()
        say("enqueueing 1,250 real training rows and 2 that must be refused, for five tenants …")
        prepared = prepare(stack.database.engine)
        say("enqueueing 12 background jobs of three kinds: slow ones, some that fail twice, some that always fail …")
        jobs = prepare_jobs(stack.database.engine)
        say(f"the sensors poll every {stack.settings.poll_seconds} s; runs appear at {stack.ui_url}/runs")
        with _view(console) as show:
            watch(stack, prepared, jobs, show)
        proof = prove(stack, prepared, jobs, seconds=time.monotonic() - began)
        _tell(proof, say)
        if not once and not proof.flaws:
            _stay(stack, say)
    return proof


def _tell(proof: Proof, say: Callable[[str], None]) -> None:
    say(
        f"{proof.enqueued:,} rows enqueued: {proof.delivered:,} delivered in {counted(proof.runs, 'run')}, "
        f"{counted(proof.dead_lettered, 'dead letter')} (expected), {proof.pending} pending, "
        f"{counted(proof.duplicates, 'duplicate')}"
    )
    say(
        f"{counted(proof.jobs, 'job')} enqueued: {proof.jobs_succeeded} succeeded, {proof.jobs_given_up} given up "
        f"(expected), in {counted(proof.job_attempts, 'attempt')}; {proof.seconds:.1f} s for all"
    )
    if not proof.flaws:
        say(
            "proof: every model trained through the outbox predicts bit for bit like one trained directly; "
            "the ledger lists every id once; the outboxes are empty; every job ended as it must, and the ledger "
            f"lists each attempt; {counted(proof.checks_passed, 'check')} passed"
        )


def _stay(stack: Stack, say: Callable[[str], None]) -> None:
    say(f"look around: {stack.ui_url} (Ctrl-C stops everything)")
    try:
        while True:
            stack.check()
            time.sleep(0.5)
    except KeyboardInterrupt:
        return


@contextmanager
def _view(console: Console) -> Iterator[Show]:
    """Tables that are redrawn on a terminal; elsewhere a line whenever the numbers change."""
    if console.is_terminal and sys.stdin.isatty():
        with Live(console=console, refresh_per_second=4) as live:
            yield lambda counts, kinds: live.update(Group(_tenants_table(counts), _jobs_table(kinds)))
        return
    last: list[str] = []

    def show(counts: list[TenantCounts], kinds: list[KindCounts]) -> None:
        line = (
            "waiting: "
            + ", ".join(f"{entry.name} {entry.waiting}" for entry in counts)
            + "; jobs: "
            + ", ".join(f"{entry.kind} {entry.waiting + entry.running}" for entry in kinds)
        )
        if [line] != last:
            last[:] = [line]
            console.print(line, markup=False, soft_wrap=True)

    yield show


def _tenants_table(counts: list[TenantCounts]) -> Table:
    table = Table("tenant", title="training outboxes", title_justify="left")
    for head in ("waiting", "delivered", "dead letters", "runs"):
        table.add_column(head, justify="right")
    table.add_column("last delivery")
    for entry in counts:
        table.add_row(
            entry.name,
            f"{entry.waiting:,}",
            f"{entry.delivered:,}",
            str(entry.dead_lettered),
            str(entry.runs),
            f"{entry.last_delivery.astimezone():%H:%M:%S}" if entry.last_delivery else "",
        )
    return table


def _jobs_table(kinds: list[KindCounts]) -> Table:
    table = Table(title="job outbox", title_justify="left")
    table.add_column("job kind", no_wrap=True)
    for head in ("wait", "run", "done", "given up", "tries"):
        table.add_column(head, justify="right")
    table.add_column("progress", no_wrap=True)
    for entry in kinds:
        table.add_row(
            entry.kind,
            *(str(number) for number in (entry.waiting, entry.running, entry.succeeded, entry.failed, entry.attempts)),
            entry.step or "",
        )
    return table
