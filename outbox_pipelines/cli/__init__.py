"""The command ``outbox``.

Exit codes: 0 done; 1 not done, with a line on standard error that says why; 2 wrong usage;
130 interrupted. Only ``launcher`` imports Dagster: ``dev`` and ``demo`` run it in
processes of its own.
"""

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn
from uuid import UUID, uuid4

import typer

from outbox_pipelines import __version__
from outbox_pipelines.cli.dead_letters import dead_letters_app
from outbox_pipelines.cli.health_server import health_server
from outbox_pipelines.cli.jobs import jobs_app, worker
from outbox_pipelines.cli.launcher import launcher_app
from outbox_pipelines.cli.output import AsJson, example, local_time, opened_database, show, show_table
from outbox_pipelines.errors import OutboxError
from outbox_pipelines.wording import counted

app = typer.Typer(
    help="Drain transactional outboxes in PostgreSQL, with proof.\n\nSettings are OUTBOX_* environment variables.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
tenants_app = typer.Typer(help="Register, list, pause and remove tenants.", no_args_is_help=True)
app.add_typer(tenants_app, name="tenants")
app.add_typer(jobs_app, name="jobs")
app.add_typer(launcher_app, name="launcher")
app.add_typer(dead_letters_app, name="dead-letters")
app.command("health-server", epilog=example("outbox health-server --port 9464"))(health_server)
app.command(epilog=example("outbox worker", "outbox worker --kind automatic_timetable --consumers 4"))(worker)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command(epilog=example("OUTBOX_DATABASE_URL=postgresql://app@db/school outbox migrate"))
def migrate(as_json: AsJson = False) -> None:
    """Create or update the tables: schema "outbox" and every tenant's."""
    from outbox_pipelines.database.engine import describe
    from outbox_pipelines.database.migrate import migrate as migrate_all

    with opened_database(migrated=False) as engine:
        changed = migrate_all(engine)
        where = describe(engine)
    show(as_json, {"changed": changed, "database": where}, f"{where}: {counted(changed, 'schema')} changed")


@tenants_app.command("add", epilog=example("outbox tenants add acme", "outbox tenants add acme --schema school_acme"))
def tenants_add(
    name: str,
    schema: Annotated[str | None, typer.Option(help="Schema of the outbox; made when missing.")] = None,
    tenant_id: Annotated[UUID | None, typer.Option("--id", help="The application's own id of the tenant.")] = None,
    as_json: AsJson = False,
) -> None:
    """Register a tenant and make its outbox."""
    from outbox_pipelines.tenants.registry import add_tenant

    with opened_database() as engine, engine.begin() as connection:
        tenant = add_tenant(connection, name, schema=schema, tenant_id=tenant_id)
    show(as_json, tenant, f"tenant {tenant.name} ({tenant.tenant_id}) in schema {tenant.schema}")


@tenants_app.command("list", epilog=example("outbox tenants list", "outbox tenants list --json"))
def tenants_list(as_json: AsJson = False) -> None:
    """List the tenants, what waits and what is wrong."""
    from outbox_pipelines.training.backlog import look
    from outbox_pipelines.wording import spoken

    with opened_database() as engine:
        backlog = look(engine)
    if as_json:
        show(True, backlog.tenants, "")
        return
    rows = [
        (
            entry.tenant.name,
            entry.tenant.schema,
            str(entry.standing),
            spoken(backlog.asked_at - entry.oldest) if entry.oldest else "",
            entry.last_error or "",
        )
        for entry in backlog.tenants
    ]
    show_table(
        ("tenant", "schema", "standing", "oldest row", "last error"), rows, "no tenant; see `outbox tenants add`"
    )


@tenants_app.command("pause", epilog=example("outbox tenants pause acme"))
def tenants_pause(name: str, as_json: AsJson = False) -> None:
    """Stop flushing a tenant; its rows accumulate."""
    _set_paused(name, True, as_json)


@tenants_app.command("resume", epilog=example("outbox tenants resume acme"))
def tenants_resume(name: str, as_json: AsJson = False) -> None:
    """Flush a tenant again, at once if it was backing off."""
    _set_paused(name, False, as_json)


def _set_paused(name: str, paused: bool, as_json: bool) -> None:
    from outbox_pipelines.tenants.registry import set_paused

    with opened_database() as engine, engine.begin() as connection:
        tenant = set_paused(connection, name, paused=paused)
    show(as_json, tenant, f"tenant {name} is {'paused' if paused else 'active'}")


@tenants_app.command("remove", epilog=example("outbox tenants remove acme --drop-schema"))
def tenants_remove(
    name: str,
    drop_schema: Annotated[bool, typer.Option("--drop-schema", help="Drop its schema and all in it.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Even when rows wait.")] = False,
    as_json: AsJson = False,
) -> None:
    """Take a tenant out of the registry; the ledger stays."""
    from outbox_pipelines.tenants.registry import remove_tenant

    with opened_database() as engine, engine.begin() as connection:
        tenant = remove_tenant(connection, name, drop_schema=drop_schema, force=force)
    kept = "dropped" if drop_schema else "kept"
    show(
        as_json,
        tenant,
        f"tenant {name} is removed; schema {tenant.schema} {kept}. The ledger knows it as {tenant.tenant_id}: "
        "add it with that --id to ask about its rows again",
    )


@app.command(epilog=example("outbox flush --tenant acme", "outbox flush --all --json"))
def flush(
    tenant: Annotated[list[str] | None, typer.Option(help="A tenant; may be repeated.", metavar="NAME")] = None,
    all_tenants: Annotated[bool, typer.Option("--all", help="Every tenant that has rows and is not paused.")] = False,
    max_turns: Annotated[int | None, typer.Option(min=1, metavar="COUNT", help="Turns of each tenant at most.")] = None,
    budget_seconds: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Seconds until no further turn begins.")
    ] = 3600,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count what waits.")] = False,
    as_json: AsJson = False,
) -> None:
    """Deliver rows now, without Dagster, until the outboxes are empty.

    Exits with 1 when a tenant failed; its rows stay.
    """
    if bool(tenant) == all_tenants:
        raise typer.BadParameter("name tenants with --tenant, or give --all (not both)")
    from outbox_pipelines.settings import LOCAL_MODE, TrainMode, load_settings
    from outbox_pipelines.tenants.registry import get_tenant
    from outbox_pipelines.training import outbox
    from outbox_pipelines.training.backlog import Standing, look
    from outbox_pipelines.training.flusher import Flusher
    from outbox_pipelines.training.grpc_sink import GrpcSink

    settings = load_settings()
    with opened_database() as engine:
        with engine.connect() as connection:
            if tenant:
                tenants = [get_tenant(connection, name) for name in dict.fromkeys(tenant)]
            else:
                waiting = look(engine).waiting
                tenants = [entry.tenant for entry in waiting if entry.standing is not Standing.PAUSED]
            if dry_run:
                counts = {found.name: outbox.count_rows(connection, found) for found in tenants}
                lines = [f"{name}: {counted(rows, 'row')}" for name, rows in counts.items()]
                show(as_json, counts, "\n".join(lines) or "no rows wait")
                return
        if settings.train_mode is TrainMode.LOCAL:
            raise OutboxError(f"{LOCAL_MODE}; no row was sent")
        sink = GrpcSink(settings)
        try:
            health = sink.probe()
            if not health.reachable:
                raise OutboxError(f"{sink.target} is unreachable ({health.detail}); no row was touched")
            with _terminate_as_interrupt():
                report = Flusher(engine, sink, settings, run_id=f"flush-{uuid4()}").flush(
                    tenants, max_turns=max_turns, budget_seconds=budget_seconds
                )
        except KeyboardInterrupt:
            typer.echo("interrupted: what was delivered is settled, the other rows stay", err=True)
            raise typer.Exit(130) from None
        finally:
            sink.close()
    lines = [
        f"{entry.tenant.name}: {entry.ending}, {counted(entry.rows, 'row')}, "
        + counted(entry.dead_letters, "dead letter")
        + (f" ({entry.detail})" if entry.detail else "")
        for entry in report.tenants
    ]
    show(as_json, report, "\n".join(lines) or "no rows wait")
    if report.failed:
        raise typer.Exit(1)


@app.command(epilog=example("outbox audit --tenant acme --row 123"))
def audit(
    tenant: Annotated[str, typer.Option(help="The tenant's name.")],
    row: Annotated[int, typer.Option(min=1, max=2**63 - 1, help="The row's id.")],
    as_json: AsJson = False,
) -> None:
    """Say which run delivered a row, when, and in which batch.

    Exits with 1 when nothing is known of the row.
    """
    from outbox_pipelines.tenants.registry import get_tenant
    from outbox_pipelines.training.audit import Fate, trace_row

    with opened_database() as engine, engine.connect() as connection:
        history = trace_row(connection, get_tenant(connection, tenant), row)
    lines = [f"row {row} of tenant {tenant}: {history.fate}"]
    lines += [
        f"  delivered {local_time(line.delivered_at)} by run {line.run_id}{_pruned(line.run_pruned)} "
        f"in batch {line.batch_key} "
        f"({counted(line.rows, 'row')}, ids {line.first_id} to {line.last_id})"
        for line in history.deliveries
    ]
    lines += [f"  {one.how} {local_time(one.removed_at)} by the role {one.removed_by}" for one in history.removals]
    if history.died_at is not None:
        lines.append(f"  taken out {local_time(history.died_at)} by run {history.run_id}: {history.reason}")
    elif history.created_at is not None:
        lines.append(f"  written {local_time(history.created_at)}, {counted(history.attempts, 'failed attempt')}")
        lines += [f"  last failure: {history.reason}"] if history.reason else []
    show(as_json, history, "\n".join(lines))
    if history.fate is Fate.UNKNOWN:
        raise typer.Exit(1)


def _pruned(pruned: bool) -> str:
    return " (pruned from Dagster's history)" if pruned else ""


@app.command("ml-service", epilog=example("outbox ml-service --port 50051 --state-dir ./models"))
def ml_service(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 50051,
    state_dir: Annotated[Path, typer.Option(help="Folder for the models.")] = Path(".outbox/ml-state"),
    token: Annotated[str | None, typer.Option(envvar="OUTBOX_ML_TOKEN", help="Bearer token to demand.")] = None,
    certificate: Annotated[Path | None, typer.Option(help="PEM certificate, for TLS.")] = None,
    private_key: Annotated[Path | None, typer.Option(help="PEM private key.")] = None,
    client_ca: Annotated[Path | None, typer.Option(help="PEM authority of client certificates, for mTLS.")] = None,
) -> None:
    """Run the reference ML service until it is interrupted."""
    from outbox_pipelines.ml_service.model import MissingExtra
    from outbox_pipelines.ml_service.server import CannotListen, serve
    from outbox_pipelines.ml_service.state import StateError
    from outbox_pipelines.ml_service.tls import TlsError

    try:
        serve(
            host=host,
            port=port,
            state_dir=state_dir,
            token=token,
            certificate=certificate,
            private_key=private_key,
            client_ca=client_ca,
            on_ready=lambda bound: typer.echo(f"ml-service listens on {host}:{bound}, models in {state_dir}"),
        )
    except (CannotListen, MissingExtra, StateError, TlsError, ValueError) as error:
        raise OutboxError(str(error)) from error


@app.command(epilog=example("outbox dev", "outbox dev --port 3100"))
def dev(
    port: Annotated[int | None, typer.Option(help="The UI's port; 3000 or a free one if not given.")] = None,
) -> None:
    """Run everything on this machine: database, ML service, Dagster's webserver and daemon.

    One Ctrl-C stops all of it.
    """
    from outbox_pipelines.local.stack import running_stack
    from outbox_pipelines.settings import load_settings

    try:
        with running_stack(load_settings(), say=typer.echo, log=typer.echo, port=port) as stack:
            typer.echo(f"ready: {stack.ui_url} (Ctrl-C stops everything)")
            while True:
                stack.check()
                time.sleep(0.5)
    except KeyboardInterrupt:
        typer.echo("stopped")


@app.command(epilog=example("outbox demo", "outbox demo --once --json"))
def demo(
    once: Annotated[bool, typer.Option("--once", help="End after the proof.")] = False,
    port: Annotated[int | None, typer.Option(help="The UI's port; 3000 or a free one if not given.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show it: five tenants' training rows leave their outboxes in Dagster runs, then the proof.

    Exits with 0 only when the proof holds.
    """
    from outbox_pipelines.local.show import run_demo

    try:
        proof = run_demo(once=once or as_json or not sys.stdout.isatty(), quiet=as_json, port=port)
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps(proof.as_dict()))
    if proof.flaws:
        raise OutboxError("the proof does not hold:\n  " + "\n  ".join(proof.flaws))


def main() -> NoReturn:
    """Run the command line; a user's mistake gives one line, not a traceback."""
    try:
        app()
    except OutboxError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    sys.exit(0)


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM cancels a flush like Ctrl-C: the leases are free when the process ends."""

    def interrupt(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
