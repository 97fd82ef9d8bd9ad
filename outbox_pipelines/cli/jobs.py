"""``outbox jobs ...`` and ``outbox worker``."""

import json
import logging
import signal
import threading
from datetime import datetime
from typing import Annotated, Any

import typer

from outbox_pipelines.cli.output import AsJson, example, local_time, opened_database, show, show_table
from outbox_pipelines.errors import OutboxError
from outbox_pipelines.jobs.message import Outcome, State
from outbox_pipelines.wording import counted

jobs_app = typer.Typer(help="Enqueue, list, cancel and retry background jobs.", no_args_is_help=True)

Ids = Annotated[list[int], typer.Argument(metavar="ID...", min=1, help="Ids of messages, from `outbox jobs list`.")]


@jobs_app.command(
    "enqueue",
    epilog=example(
        "outbox jobs enqueue automatic_timetable --job-id 77",
        """outbox jobs enqueue report --payload '{"pages": 3}' --priority 5 --run-at 2030-01-31T08:00+01:00""",
    ),
)
def enqueue(
    kind: Annotated[str, typer.Argument(help="The name of its kind.")],
    job_id: Annotated[str | None, typer.Option(help="The id in the application's own table of jobs.")] = None,
    payload: Annotated[str, typer.Option(help="A JSON object for the handler.", metavar="JSON")] = "{}",
    run_at: Annotated[
        str | None,
        typer.Option(help="Not before; this machine's time zone if none is given.", metavar="TIME"),
    ] = None,
    priority: Annotated[int, typer.Option(help="The larger go first.")] = 0,
    unique_key: Annotated[str | None, typer.Option(help="No second live job of the kind with this key.")] = None,
    as_json: AsJson = False,
) -> None:
    """Enqueue a job, as an application does in its own transaction."""
    from outbox_pipelines.jobs.enqueue import enqueue_job
    from outbox_pipelines.jobs.look import list_servers

    try:
        decoded = json.loads(payload)
    except ValueError as error:
        raise OutboxError(f"--payload is not JSON: {error}; nothing was enqueued") from None
    try:
        instant = None if run_at is None else datetime.fromisoformat(run_at).astimezone()
    except ValueError:
        raise OutboxError(f"--run-at {run_at!r} is not a time such as 2030-01-31T08:00+01:00") from None
    with opened_database() as engine, engine.begin() as connection:
        enqueued = enqueue_job(
            connection, kind, job_id=job_id, payload=decoded, run_at=instant, priority=priority, unique_key=unique_key
        )
        known = kind in {server.kind for server in list_servers(connection)}
    if not known:
        typer.echo(f"no code location or worker has registered the kind {kind!r} yet: the job waits for one", err=True)
    found = "" if enqueued.is_new else f" (there already, with the unique key {unique_key!r})"
    show(as_json, enqueued, f"message {enqueued.message_id} of kind {kind}{found}")


@jobs_app.command(
    "list",
    epilog=example("outbox jobs list", "outbox jobs list --outcome failed --json", "outbox jobs list --job-id 77"),
)
def list_(
    kind: Annotated[str | None, typer.Option(help="Of this kind only.")] = None,
    state: Annotated[list[State] | None, typer.Option(help="In this state; may be repeated.")] = None,
    outcome: Annotated[Outcome | None, typer.Option(help="Completed with this outcome, the latest first.")] = None,
    job_id: Annotated[str | None, typer.Option(help="Of this domain job, whatever their state.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List messages, newest first: the live ones unless told otherwise."""
    from outbox_pipelines.jobs.look import LIVE, list_messages

    with opened_database() as engine, engine.connect() as connection:
        lines = list_messages(connection, kind=kind, states=state or LIVE, outcome=outcome, job_id=job_id, limit=limit)
    if as_json:
        show(True, lines, "")
        return
    rows = [
        (
            str(line.message_id),
            line.kind,
            line.job_id or "",
            _state(line),
            str(line.attempts),
            _waiting(line.waiting_seconds),
            _progress(line),
            (line.last_error or "").partition("\n")[0][:80],
        )
        for line in lines
    ]
    show_table(("id", "kind", "job", "state", "attempts", "waiting", "progress", "last error"), rows, "no such message")


@jobs_app.command("show", epilog=example("outbox jobs show 123", "outbox jobs show 123 --json"))
def show_(
    message_id: Annotated[int, typer.Argument(metavar="ID", min=1, help="The message's id.")], as_json: AsJson = False
) -> None:
    """Show a message and every attempt: which run, when, how it ended, and the run's address in the UI."""
    from outbox_pipelines.jobs.look import show_message
    from outbox_pipelines.settings import load_settings

    with opened_database() as engine, engine.connect() as connection:
        history = show_message(connection, message_id, ui_url=load_settings().ui_url)
    message = history.message
    facts = [
        ("kind", message.kind),
        ("job", message.job_id),
        ("state", _state(message)),
        ("payload", json.dumps(history.payload, ensure_ascii=False)),
        ("priority", str(message.priority)),
        ("unique key", history.unique_key),
        ("created", local_time(message.created_at)),
        ("due", local_time(message.available_at)),
        ("completed", None if history.completed_at is None else local_time(history.completed_at)),
        ("held by", history.lease_holder),
        ("lease until", None if history.lease_expires_at is None else local_time(history.lease_expires_at)),
        ("progress", _progress(message)),
        ("last error", message.last_error),
    ]
    lines = [f"message {message_id}"] + [f"  {name:<12}{value}" for name, value in facts if value]
    lines.append(f"{counted(len(history.attempts), 'attempt')}:" if history.attempts else "no attempt so far")
    for attempt in history.attempts:
        ended = "" if attempt.finished_at is None else f", ended {local_time(attempt.finished_at)}"
        lines.append(
            f"  {attempt.attempt}. {attempt.outcome or 'under way'}: began {local_time(attempt.started_at)}{ended}, "
            f"by {attempt.run_id}"
        )
        lines += [f"     {attempt.run_url}"] if attempt.run_url else []
        lines += ["     pruned from Dagster's history"] if attempt.run_pruned else []
        lines += [f"     {line}" for line in (attempt.error or "").splitlines()]
    show(as_json, history, "\n".join(lines))


@jobs_app.command("cancel", epilog=example("outbox jobs cancel 123", "outbox jobs cancel 123 124 125"))
def cancel(ids: Ids, as_json: AsJson = False) -> None:
    """Cancel messages; one that is being processed is taken from its worker."""
    from outbox_pipelines.jobs import actions

    _act(ids, actions.cancel, "cancelled", as_json)


@jobs_app.command("retry", epilog=example("outbox jobs retry 123"))
def retry(ids: Ids, as_json: AsJson = False) -> None:
    """Make messages due now: failed and cancelled ones with all their attempts anew."""
    from outbox_pipelines.jobs import actions

    _act(ids, actions.retry, "due now", as_json)


@jobs_app.command("servers", epilog=example("outbox jobs servers"))
def servers(as_json: AsJson = False) -> None:
    """List who serves which kind, and how long ago it last got on: alive is not yet working."""
    from outbox_pipelines.jobs.look import list_servers

    with opened_database() as engine, engine.connect() as connection:
        lines = list_servers(connection)
    rows = [
        (
            line.kind,
            line.server,
            str(line.consumers),
            str(line.running),
            str(line.prefetched),
            f"{line.progress_age:.0f} s ago",
            f"{line.seen_age:.0f} s ago",
        )
        for line in lines
    ]
    head = ("kind", "server", "consumers", "running", "in memory", "got on", "seen")
    if as_json:
        show(True, lines, "")
    else:
        show_table(head, rows, "nobody serves any kind: start `outbox dev` or `outbox worker` with OUTBOX_KINDS set")


def worker(
    kind: Annotated[list[str] | None, typer.Option(help="A kind to serve; may be repeated. All if none.")] = None,
    consumers: Annotated[int | None, typer.Option(min=1, max=16, help="Jobs of a kind at a time.")] = None,
) -> None:
    """Run background jobs without Dagster, until it is told to stop (Ctrl-C, SIGTERM).

    Then running jobs have OUTBOX_WORKER_GRACE_SECONDS to end; the rest is given back. A second signal ends the
    grace. The kinds are those that OUTBOX_KINDS names.
    """
    from outbox_pipelines.database.database import Database
    from outbox_pipelines.database.engine import describe
    from outbox_pipelines.jobs.kinds import load_kinds
    from outbox_pipelines.jobs.worker import Worker, chosen
    from outbox_pipelines.settings import load_settings

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    settings = load_settings()
    kinds = chosen(load_kinds(settings.kinds), kind or [])
    if not kinds:
        raise OutboxError("there is nothing to serve: name your job kinds with OUTBOX_KINDS=module:attribute")
    told = threading.Event()
    again = threading.Event()

    def end(_signal: int, _frame: object) -> None:
        (again if told.is_set() else told).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    with Database(settings, application_name="outbox worker") as database:
        where = describe(database.migrated_engine())
        with Worker(database, kinds, settings, consumers=consumers) as running:
            serves = ", ".join(f"{one.name} ({consumers or one.consumers})" for one in kinds.values())
            typer.echo(f"{running.name} serves {serves} on {where}")
            _wait(told)
            typer.echo(f"stopping: running jobs have {settings.worker_grace_seconds:g} s to end …")
            running.stop(cut_short=again)
    typer.echo("stopped")


def _wait(told: threading.Event) -> None:
    # In short steps: a signal's handler runs when the main thread returns to Python.
    while not told.wait(0.5):
        pass


def _act(ids: list[int], act: Any, done: str, as_json: bool) -> None:
    """Act on each message in a transaction of its own; tell of those that it was not possible for."""
    from sqlalchemy.exc import DBAPIError

    from outbox_pipelines.database.error_text import first_line
    from outbox_pipelines.jobs.kinds import load_kinds
    from outbox_pipelines.jobs.look import show_message
    from outbox_pipelines.settings import load_settings

    settings = load_settings()
    kinds = load_kinds(settings.kinds)
    results, refusals = [], []
    with opened_database() as engine:
        for message_id in dict.fromkeys(ids):
            try:
                with engine.begin() as connection:
                    before = act(connection, kinds, message_id)
                    message = show_message(connection, message_id, ui_url=settings.ui_url).message
            except OutboxError as error:
                refusals.append(str(error))
                continue
            except DBAPIError as error:
                # The others are done all the same, and told.
                refusals.append(f"message {message_id}: {first_line(error.orig)}")
                continue
            results.append(
                {"message_id": message_id, "was": before, "state": message.state, "outcome": message.outcome}
            )
            if message.job_id is not None and message.kind not in kinds:
                typer.echo(
                    f"message {message_id}: its domain job {message.job_id} was not touched, since OUTBOX_KINDS does "
                    f"not name the kind {message.kind!r} here",
                    err=True,
                )
    show(as_json, results, "\n".join(f"message {one['message_id']} is {done} (was {one['was']})" for one in results))
    if refusals:
        raise OutboxError("; ".join(refusals))


def _state(line: Any) -> str:
    if line.outcome is not None:
        return f"{line.state}: {line.outcome}"
    return f"{line.state} (parked)" if line.parked else str(line.state)


def _waiting(seconds: float | None) -> str:
    from outbox_pipelines.wording import spoken_seconds

    return "" if seconds is None else spoken_seconds(seconds)


def _progress(line: Any) -> str:
    if line.step is None:
        return ""
    return line.step if line.fraction is None else f"{line.step} ({line.fraction:.0%})"
