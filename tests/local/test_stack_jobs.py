"""Background jobs as a user of Dagster meets them: real daemon, sensors, webserver and run processes."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox_pipelines import enqueue_job
from outbox_pipelines.local.stack import Stack
from tests.local.conftest import PATIENCE, ask
from tests.outboxes import wait_until

# With the other tests of the stack on one worker.
pytestmark = [pytest.mark.xdist_group("stack"), pytest.mark.timeout(300)]


class Job:
    """A job of kind ``waiting_job``, or of another kind, and what is known of it."""

    def __init__(self, engine: Engine, folder: Path, kind: str = "waiting_job") -> None:
        self._engine = engine
        self._pid = folder / "pid"
        self._until = folder / "until"
        with engine.begin() as connection:
            payload = {"pid": str(self._pid), "until": str(self._until)}
            self.message_id = enqueue_job(connection, kind, payload=payload).message_id

    @property
    def row(self) -> Any:
        """The message."""
        with self._engine.connect() as connection:
            query = text("SELECT * FROM outbox.messages WHERE message_id = :id")
            return connection.execute(query, {"id": self.message_id}).one()

    @property
    def ledger(self) -> list[tuple[str, str]]:
        """Its ended claims: run and outcome."""
        with self._engine.connect() as connection:
            query = text("SELECT run_id, outcome FROM outbox.job_attempts WHERE message_id = :id ORDER BY claim")
            return [(row.run_id, row.outcome) for row in connection.execute(query, {"id": self.message_id})]

    def wait_until_it_runs(self, *, claim: int = 1) -> str:
        """Wait until that claim's handler is at work; gives the run's id."""
        wait_until(lambda: self.row.claims == claim and self.row.step == "halfway", seconds=PATIENCE)
        return str(self.row.lease_holder)

    @property
    def pid(self) -> int:
        """The process of its handler."""
        return int(self._pid.read_text())

    def let_end(self) -> None:
        """Let its handler, this one and later ones, return."""
        self._until.touch()


def run(stack: Stack, run_id: str) -> dict[str, Any]:
    """A run, its tags and its log."""
    query = """
        query Run($id: ID!) { runOrError(runId: $id) { ... on Run {
          id status jobName tags { key value }
          eventConnection(limit: 1000) { events { __typename ... on MessageEvent { message }
            ... on ExecutionStepFailureEvent { error { message } } } }
        } } }"""
    return dict(ask(stack, query, id=run_id)["runOrError"])


def log(stack: Stack, run_id: str) -> list[str]:
    """What the run's log says so far."""
    return [event.get("message", "") for event in run(stack, run_id)["eventConnection"]["events"]]


def test_a_job_is_run_after_a_poll_and_tells_of_its_progress_as_it_happens(
    stack: Stack, engine: Engine, tmp_path: Path
) -> None:
    job = Job(engine, tmp_path)
    run_id = job.wait_until_it_runs()
    wait_until(lambda: "halfway (50%)" in log(stack, run_id), seconds=PATIENCE)
    assert run(stack, run_id)["status"] == "STARTED"
    job.let_end()
    wait_until(lambda: run(stack, run_id)["status"] == "SUCCESS", seconds=PATIENCE)
    tags = {tag["key"]: tag["value"] for tag in run(stack, run_id)["tags"]}
    assert (tags["outbox/kind"], tags["outbox/message"], tags["outbox/attempt"]) == (
        "waiting_job",
        str(job.message_id),
        "1",
    )
    assert (job.row.state, job.row.outcome, job.row.step) == ("Completed", "succeeded", "ending")
    assert job.ledger == [(run_id, "succeeded")]

    # Once more from the UI: nothing is done twice.
    again = ask(
        stack,
        """mutation Again($id: String!) { launchRunReexecution(reexecutionParams: {
            parentRunId: $id, strategy: ALL_STEPS}) { __typename ... on LaunchRunSuccess { run { id } } } }""",
        id=run_id,
    )["launchRunReexecution"]
    assert again["__typename"] == "LaunchRunSuccess", again
    repeated = again["run"]["id"]
    wait_until(lambda: run(stack, repeated)["status"] == "SUCCESS", seconds=PATIENCE)
    assert any("is completed already (succeeded): nothing to do" in line for line in log(stack, repeated))
    assert job.ledger == [(run_id, "succeeded")]


def test_terminating_a_run_gives_its_job_back_at_once_and_does_not_count(
    stack: Stack, engine: Engine, tmp_path: Path
) -> None:
    job = Job(engine, tmp_path)
    first = job.wait_until_it_runs()
    stop = """mutation Stop($id: String!) { terminateRun(runId: $id) { __typename } }"""
    assert ask(stack, stop, id=first)["terminateRun"]["__typename"] == "TerminateRunSuccess"
    # Well before the lease of 120 s ends.
    wait_until(lambda: job.ledger == [(first, "interrupted")], seconds=30)
    job.let_end()
    wait_until(lambda: job.row.state == "Completed", seconds=PATIENCE)
    assert job.row.processing_attempts == 1
    assert [outcome for _, outcome in job.ledger] == ["interrupted", "succeeded"]
    assert run(stack, first)["status"] == "CANCELED"


def test_a_run_whose_process_is_killed_is_given_back_at_once_and_done_again(
    stack: Stack, engine: Engine, tmp_path: Path
) -> None:
    job = Job(engine, tmp_path)
    first = job.wait_until_it_runs()
    os.kill(job.pid, signal.SIGKILL)
    # By its keeper, or by the stub that stands in for it: well before the lease of 120 s ends.
    wait_until(lambda: job.ledger == [(first, "lost")], seconds=30)
    second = job.wait_until_it_runs(claim=2)
    assert second != first
    job.let_end()
    wait_until(lambda: job.row.state == "Completed", seconds=PATIENCE)
    assert job.ledger == [(first, "lost"), (second, "succeeded")]


def test_a_job_that_fails_has_a_failed_run_for_each_attempt_and_is_given_up(
    stack: Stack, engine: Engine, tmp_path: Path
) -> None:
    job = Job(engine, tmp_path, "failing_job")
    wait_until(lambda: job.row.state == "Completed", seconds=PATIENCE)
    (first, first_outcome), (second, second_outcome) = job.ledger
    assert (first_outcome, second_outcome, job.row.outcome) == ("failed", "given up", "failed")
    for run_id, told in ((first, "attempt 1 failed: ValueError"), (second, "given up after 2 attempts")):
        wait_until(lambda run_id=run_id: run(stack, run_id)["status"] == "FAILURE", seconds=PATIENCE)
        (message,) = [
            event["error"]["message"]
            for event in run(stack, run_id)["eventConnection"]["events"]
            if event["__typename"] == "ExecutionStepFailureEvent"
        ]
        assert f"failing_job, message {job.message_id}: {told}" in message
