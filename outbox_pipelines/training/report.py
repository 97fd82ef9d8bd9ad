"""What a look and a flush found, in words: skip reasons, log lines, the line of a failed run."""

from collections.abc import Iterable

from outbox_pipelines.tenants.registry import Problem
from outbox_pipelines.training.backlog import Backlog, Standing, TenantBacklog
from outbox_pipelines.training.flusher import FlushReport
from outbox_pipelines.training.outcome import TenantReport
from outbox_pipelines.wording import counted, spoken


def standings(backlog: Backlog) -> str:
    """Why nobody is flushed, as facts."""
    waiting = backlog.waiting
    broken = backlog.standing(Standing.BROKEN)
    if not waiting:
        facts = [f"looked at {counted(len(backlog.tenants), 'tenant')}: no rows wait"]
    else:
        oldest = min(entry.oldest for entry in waiting if entry.oldest is not None)
        facts = [f"{counted(len(waiting), 'tenant')} with rows, the oldest for {spoken(backlog.asked_at - oldest)}"]
        in_flight = [entry for entry in waiting if entry.standing in {Standing.LEASED, Standing.DUE}]
        facts += _counted(len(in_flight), "in flight")
        facts += _counted(len(backlog.standing(Standing.PAUSED)), "paused")
        backing_off = backlog.standing(Standing.BACKING_OFF)
        if backing_off:
            first = min(entry.next_attempt_at for entry in backing_off if entry.next_attempt_at is not None)
            facts.append(f"{len(backing_off):,} back off, the first until {first:%H:%M:%S} UTC")
            facts += _refusals(backing_off)
    facts += _counted(len(broken), "without their schema or a table in it")
    facts += _counted(len(backlog.standing(Standing.UNREADABLE)), "locked or not readable")
    return "; ".join(facts)


def _refusals(entries: Iterable[TenantBacklog]) -> list[str]:
    refused = [entry for entry in entries if entry.problem is Problem.MISCONFIGURED]
    return [f"{refused[0].last_error} ({counted(len(refused), 'tenant')})"] if refused else []


def _counted(count: int, what: str) -> list[str]:
    return [f"{count:,} {what}"] if count else []


def tenant_line(report: TenantReport) -> str:
    """What a flush did for one tenant."""
    line = f"tenant {report.tenant.name}: {report.ending}, {counted(report.rows, 'row')} in "
    line += counted(report.batches, "batch")
    if report.dead_letters:
        line += f", {counted(report.dead_letters, 'dead letter')}"
    return f"{line} ({report.detail})" if report.detail else line


def failure_line(report: FlushReport) -> str:
    """One clear line: what, whose, what next."""
    failed = report.failed
    first = failed[0]
    line = f"tenant {first.tenant.name}: rows stay: {first.detail}"
    if len(report.tenants) == 1:
        return line
    return (
        f"{len(failed):,} of {len(report.tenants):,} tenants failed, {counted(report.rows, 'row')} of the others "
        f"went out; the first: {line}"
    )


def ending_words(report: TenantReport) -> str:
    """How a tenant's flush ended, with the reason where there is one."""
    return f"{report.ending}: {report.detail}" if report.detail else str(report.ending)
