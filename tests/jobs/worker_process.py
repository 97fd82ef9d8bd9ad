"""A worker, or a run of one message, in a process of its own: what its handlers do stands in the payloads.

Started by :func:`process`. A payload is a list of acts under ``"do"``, each a word and what it needs; each
execution is noted in ``app.executions`` first, and its end after.
"""

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import Engine, text

from outbox_pipelines.database.database import Database
from outbox_pipelines.database.engine import open_engine
from outbox_pipelines.jobs.context import JobContext
from outbox_pipelines.jobs.keeper import LeaseKeeper
from outbox_pipelines.jobs.kinds import Backoff, JobKind, Kinds
from outbox_pipelines.jobs.runner import Runner
from outbox_pipelines.jobs.worker import Worker
from outbox_pipelines.settings import load_settings
from tests.jobs.messages import APP_JOBS, run

NO_PAUSE = Backoff(first=0.0, maximum=0.0)


def make_executions(engine: Engine) -> None:
    """The append-only table that the handlers write to."""
    run(engine, "CREATE SCHEMA IF NOT EXISTS app")
    run(
        engine,
        """
        CREATE TABLE app.executions (
            message_id bigint NOT NULL, attempt integer NOT NULL, pid integer NOT NULL,
            event text NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp()
        )
        """,
    )


@contextmanager
def process(
    database_url: str, role: str, *kinds: dict[str, Any], message: int = 0, **environment: object
) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that serves kinds (``role="work"``) or runs one message (``role="run"``); killed at the end."""
    started = subprocess.Popen(
        [sys.executable, "-m", "tests.jobs.worker_process", role, json.dumps(kinds), str(message)],
        env={
            **os.environ,
            "OUTBOX_DATABASE_URL": database_url,
            **{f"OUTBOX_{name.upper()}": str(value) for name, value in environment.items()},
        },
        cwd=Path(__file__).parents[2],
    )
    try:
        yield started
    finally:
        # Its keeper ends soon after it, when it has given back what it held.
        keepers = psutil.Process(started.pid).children() if started.poll() is None else []
        started.kill()
        started.wait()
        psutil.wait_procs(keepers, timeout=10)


def act(job: JobContext) -> None:
    """The handler of all kinds here."""
    _note(job, "begun")
    for word, *needs in job.payload.get("do", []):
        _ACTS[word](job, *needs)
    _note(job, "ended")


def _note(job: JobContext, event: str) -> None:
    with job.session() as session:
        session.execute(
            text("INSERT INTO app.executions (message_id, attempt, pid, event) VALUES (:id, :attempt, :pid, :event)"),
            {"id": job.message_id, "attempt": job.attempt, "pid": os.getpid(), "event": event},
        )


def _burn(_job: JobContext, seconds: float) -> None:
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        pass


def _freeze(_job: JobContext, seconds: float) -> None:
    # Called through PyDLL, the C function keeps Python's lock.
    ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))


def _die(_job: JobContext) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail(_job: JobContext) -> None:
    raise RuntimeError("told to fail")


def _wait(job: JobContext, path: str) -> None:
    """Until the file is there, or until told to stop, which is heeded."""
    while not Path(path).exists():
        if job.wait(0.01):
            return


def _insist(_job: JobContext, path: str) -> None:
    """Until the file is there, in short sleeps, whatever else happens."""
    while not Path(path).exists():
        time.sleep(0.01)


def _sleep(_job: JobContext, seconds: float) -> None:
    time.sleep(seconds)


def _fork(_job: JobContext, path: str) -> None:
    """A child that lives on, with all that this process had open."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    written = Path(f"{path}.new")
    written.write_text(str(child))
    written.rename(path)


def _complete(job: JobContext, and_then: str) -> None:
    """An effect and the completion in one transaction."""
    with job.session() as session:
        session.execute(text("INSERT INTO app.effects VALUES (:id)"), {"id": job.message_id})
        job.complete_in(session)
        if and_then == "die before":
            _die(job)
    if and_then == "die after":
        _die(job)


def _span(_job: JobContext, name: str) -> None:
    """A span of the handler's own, made as handlers do."""
    from opentelemetry import trace

    with trace.get_tracer("handler").start_as_current_span(name):
        pass


_ACTS: dict[str, Any] = {
    "burn": _burn,
    "freeze": _freeze,
    "die": _die,
    "fail": _fail,
    "wait": _wait,
    "insist": _insist,
    "sleep": _sleep,
    "fork": _fork,
    "complete": _complete,
    "span": _span,
}


def _kind(described: dict[str, Any]) -> JobKind:
    described = {"lease": 10.0, "backoff": NO_PAUSE, **described}
    if described.pop("with_domain", False):
        described["domain"] = APP_JOBS
    return JobKind(handler=act, **described)


def main() -> None:
    """Serve until SIGTERM, or run one message."""
    logging.basicConfig(level=logging.WARNING)
    role, kinds = sys.argv[1], Kinds(_kind(one) for one in json.loads(sys.argv[2]))
    settings = load_settings()
    assert settings.database_url is not None
    if role == "work":
        told = threading.Event()
        signal.signal(signal.SIGTERM, lambda _number, _frame: told.set())
        with Database(settings) as database, Worker(database, kinds, settings):
            told.wait()
        return
    url = settings.database_url.get_secret_value()
    engine = open_engine(settings, url, application_name="test runner")
    (kind,) = kinds.values()
    delay = 2.0 if role == "short run" else 0.0
    with LeaseKeeper(engine, url=url, settings=settings, delay=delay) as keeper:
        report = Runner(engine, keeper, holder=f"run-{os.getpid()}").run(
            kind, int(sys.argv[3]), on_progress=lambda _step, _fraction: None
        )
    sys.stdout.write(f"{report}\n")
    engine.dispose()


if __name__ == "__main__":
    main()
