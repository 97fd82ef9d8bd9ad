"""What became of a message, in words: a run's log, its failure line, a sensor's skip reason."""

from outbox_pipelines.jobs.kinds import JobKind
from outbox_pipelines.jobs.message import AttemptOutcome, NotClaimed, Refusal
from outbox_pipelines.jobs.publisher import Polled
from outbox_pipelines.jobs.runner import Report
from outbox_pipelines.wording import counted


def not_claimed_line(refused: NotClaimed) -> str:
    """Why a run has nothing to do."""
    message = f"message {refused.message_id}"
    if refused.why is Refusal.UNKNOWN:
        return f"{message} does not exist (any more): nothing to do"
    if refused.why is Refusal.OTHER_KIND:
        return f"{message} is of another kind: nothing to do"
    if refused.why is Refusal.COMPLETED:
        return f"{message} is completed already ({refused.outcome}): nothing to do"
    until = f"{refused.until:%H:%M:%S} UTC" if refused.until is not None else "soon"
    if refused.why is Refusal.HELD:
        return (
            f"{message} is being processed by {refused.holder}, whose lease runs until {until} "
            f"({refused.seconds_left:.0f} s): nothing to do"
        )
    return f"{message} is not due until {until}: nothing to do; the sensor opens a run for it then"


def report_line(kind: str, report: Report) -> str:
    """What came of an attempt: what, whose, what next."""
    message = f"{kind}, message {report.claimed.message_id}"
    if report.claimed.job_id is not None:
        message += f" (job {report.claimed.job_id})"
    attempt = f"{message}: attempt {report.claimed.attempt}"
    if report.outcome is AttemptOutcome.FAILED:
        return f"{attempt} failed: {report.line}; it is tried again in {report.delay:.0f} s at the earliest"
    if report.outcome is AttemptOutcome.GIVEN_UP:
        return f"{message}: {report.line}; put it back with `outbox jobs retry {report.claimed.message_id}`"
    if report.outcome is AttemptOutcome.LOST:
        return f"{attempt} lost its lease and wrote nothing: {report.line}"
    if report.outcome is AttemptOutcome.SUCCEEDED:
        return f"{attempt} succeeded after {report.ran:.1f} s"
    return f"{attempt} was {report.outcome}: {report.line}"


def polled_line(kind: JobKind, polled: Polled, *, due: int, in_flight: int) -> str:
    """Why a poll of a kind opened no run, as facts."""
    facts = [f"{counted(due, 'job')} due" if due else "no job is due"]
    if in_flight:
        facts.append(f"{in_flight} of {counted(kind.consumers, 'place')} taken")
    if polled.taken_back:
        facts.append(f"{counted(polled.taken_back, 'publish')} taken back")
    return "; ".join(facts)
