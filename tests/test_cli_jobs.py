"""``outbox jobs`` and ``outbox worker`` as scripts and people meet them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox_pipelines.settings import Settings
from tests.command_line import Run, refused, succeeded
from tests.outboxes import wait_until

KINDS = """
from outbox_pipelines import GiveUp, JobContext, JobKind, TableDomain

def copy(job: JobContext) -> None:
    job.progress("copying", 0.5)
    if job.payload.get("jammed"):
        raise GiveUp("the copier is jammed")
    while job.payload.get("long") and not job.wait(0.1):
        pass

KINDS = [
    JobKind(
        "copy", copy, domain=TableDomain("public.copies", live=("queued",), failed="failed", cancelled="cancelled")
    ),
    JobKind("other", copy),
]
"""


@pytest.fixture
def kinds(tmp_path: Path, engine: Engine) -> dict[str, str]:
    """A project with kinds, and the environment that names it."""
    (tmp_path / "printshop.py").write_text(KINDS)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE public.copies (id bigint PRIMARY KEY, status text)"))
        connection.execute(text("INSERT INTO public.copies VALUES (7, 'finished'), (8, 'queued')"))
    return {"OUTBOX_KINDS": "printshop:KINDS", "PYTHONPATH": str(tmp_path)}


def copy_status(engine: Engine, job_id: int) -> str:
    with engine.connect() as connection:
        return str(connection.execute(text("SELECT status FROM public.copies WHERE id = :id"), {"id": job_id}).scalar())


def shown(outbox: Run, message_id: int) -> dict[str, Any]:
    return dict(json.loads(succeeded(outbox("jobs", "show", str(message_id), "--json"))))


def test_a_job_is_enqueued_listed_cancelled_and_retried(outbox: Run, engine: Engine, kinds: dict[str, str]) -> None:
    done = outbox(
        "jobs", "enqueue", "copy", "--job-id", "8", "--payload", '{"pages": 3}', "--unique-key", "k", "--json"
    )
    assert json.loads(succeeded(done)) == {"message_id": 1, "is_new": True}
    assert "no code location or worker has registered the kind 'copy' yet" in done.stderr
    again = outbox("jobs", "enqueue", "copy", "--unique-key", "k")
    assert succeeded(again) == "message 1 of kind copy (there already, with the unique key 'k')\n"
    (listed,) = json.loads(succeeded(outbox("jobs", "list", "--kind", "copy", "--json")))
    assert (listed["message_id"], listed["job_id"], listed["state"], listed["attempts"]) == (1, "8", "Pending", 0)
    assert "copy" in succeeded(outbox("jobs", "list"))
    assert succeeded(outbox("jobs", "list", "--state", "Completed")) == "no such message\n"
    assert succeeded(outbox("jobs", "cancel", "1", **kinds)) == "message 1 is cancelled (was Pending)\n"
    assert copy_status(engine, 8) == "cancelled"
    assert shown(outbox, 1)["message"]["outcome"] == "cancelled"
    (cancelled,) = json.loads(succeeded(outbox("jobs", "list", "--outcome", "cancelled", "--json")))
    assert cancelled["message_id"] == 1
    assert succeeded(outbox("jobs", "retry", "1", **kinds)) == "message 1 is due now (was Completed)\n"
    assert copy_status(engine, 8) == "queued"
    assert shown(outbox, 1)["message"]["state"] == "Pending"


def test_what_cannot_be_done_is_told_for_each_message_and_the_others_are_done(outbox: Run, engine: Engine) -> None:
    succeeded(outbox("jobs", "enqueue", "copy", "--job-id", "8"))
    done = outbox("jobs", "cancel", "99", "1", "1")
    told = refused(done)
    assert "there is no message 99; see `outbox jobs list`" in told
    assert "its domain job 8 was not touched, since OUTBOX_KINDS does not name the kind 'copy' here" in told
    assert done.stdout == "message 1 is cancelled (was Pending)\n"
    assert "message 1 is completed already (cancelled)" in refused(outbox("jobs", "cancel", "1"))
    assert "there is no message 5" in refused(outbox("jobs", "show", "5"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["copy", "--payload", "{pages}"], "--payload is not JSON: Expecting property name"),
        (["copy", "--payload", "[1]"], "its payload: it is a list, and must be a JSON object (a dict)"),
        (["copy", "--payload", '{"a": "\\u0000"}'], "holds the character NUL"),
        (["copy", "--run-at", "tomorrow"], "--run-at 'tomorrow' is not a time such as"),
        (["copy", "--priority", "99999"], "priority is 99999; allowed are -32,768 to 32,767"),
        (["x" * 101], "a kind's name is 1 to 100 characters long"),
    ],
)
def test_a_job_that_cannot_be_stored_is_told_in_a_line(outbox: Run, arguments: list[str], told: str) -> None:
    assert told in refused(outbox("jobs", "enqueue", *arguments))
    assert succeeded(outbox("jobs", "list")) == "no such message\n"


def test_the_history_shows_every_attempt_with_its_run_and_the_runs_address(outbox: Run, engine: Engine) -> None:
    succeeded(outbox("jobs", "enqueue", "copy"))
    run_id = "3a7d8f0e-9c1b-4a52-8a6e-d1f2b3c4a5e6"
    with engine.begin() as connection:
        connection.execute(
            text("""
                INSERT INTO outbox.job_attempts (message_id, claim, attempt, run_id, outcome, started_at, error)
                VALUES (1, 1, 1, 'worker-host-1-abc', 'lost', now(), 'the worker''s process died'),
                       (1, 2, 2, :run_id, 'failed', now(), E'ValueError: no\\nsecond line')
            """),
            {"run_id": run_id},
        )
    history = json.loads(succeeded(outbox("jobs", "show", "1", "--json", OUTBOX_UI_URL="https://dagster.school/")))
    assert [(one["attempt"], one["run_id"], one["outcome"], one["run_url"]) for one in history["attempts"]] == [
        (1, "worker-host-1-abc", "lost", None),
        (2, run_id, "failed", f"https://dagster.school/runs/{run_id}"),
    ]
    told = succeeded(outbox("jobs", "show", "1"))
    assert "2 attempts:" in told
    assert f"http://127.0.0.1:3000/runs/{run_id}" in told
    assert "     ValueError: no\n     second line" in told


def test_a_worker_without_kinds_or_with_an_unknown_one_says_what_to_name(outbox: Run, kinds: dict[str, str]) -> None:
    assert "name your job kinds with OUTBOX_KINDS=module:attribute" in refused(outbox("worker"))
    assert "no job kind 'paint' is registered here (registered: copy, other)" in refused(
        outbox("worker", "--kind", "paint", **kinds)
    )
    assert "there is no module 'nowhere'" in refused(outbox("worker", OUTBOX_KINDS="nowhere:KINDS"))
    refused(outbox("worker", "--consumers", "17", **kinds), code=2)


def test_a_worker_serves_its_kinds_shows_that_it_gets_on_and_stops_with_sigterm(
    outbox: Run, engine: Engine, settings: Settings, kinds: dict[str, str], tmp_path: Path
) -> None:
    assert settings.database_url is not None
    for payload in ('{"jammed": true}', "{}", '{"long": true}'):
        succeeded(outbox("jobs", "enqueue", "copy", "--job-id", "8", "--payload", payload))
    succeeded(outbox("jobs", "enqueue", "other"))
    environment = {
        **os.environ,
        **kinds,
        "OUTBOX_DATABASE_URL": settings.database_url.get_secret_value(),
        "OUTBOX_WORKER_GRACE_SECONDS": "0.1",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "outbox_pipelines.cli", "worker", "--kind", "copy", "--consumers", "1"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: shown(outbox, 3)["message"]["state"] == "Processing")
        # The worker notes what it does every 10 s.
        wait_until(lambda: json.loads(succeeded(outbox("jobs", "servers", "--json")))[0]["running"] == 1)
        told = succeeded(outbox("jobs", "servers"))
        assert "copy" in told
        assert "s ago" in told
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "serves copy (1) on database" in out
    assert out.rstrip().endswith("stopped")
    assert shown(outbox, 1)["message"]["last_error"] == "the copier is jammed"
    assert copy_status(engine, 8) == "failed"
    assert shown(outbox, 2)["message"]["outcome"] == "succeeded"
    interrupted = shown(outbox, 3)
    assert (interrupted["message"]["state"], interrupted["message"]["attempts"]) == ("Pending", 0)
    assert [one["outcome"] for one in interrupted["attempts"]] == ["interrupted"]
    assert shown(outbox, 4)["message"]["state"] == "Pending"
    assert json.loads(succeeded(outbox("jobs", "servers", "--json")))[0]["consumers"] == 0
