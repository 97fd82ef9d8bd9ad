"""``outbox launcher ...``: the process that executes Dagster's runs."""

import os
from typing import Any

import typer

from outbox_pipelines.cli.output import AsJson, example, show
from outbox_pipelines.wording import counted

launcher_app = typer.Typer(
    help="Execute Dagster's runs in warm processes; DAGSTER_HOME names the instance.",
    invoke_without_command=True,
    epilog=example("DAGSTER_HOME=/srv/dagster outbox launcher", "outbox launcher status", "outbox launcher drain"),
)


@launcher_app.callback()
def launcher(context: typer.Context) -> None:
    """Execute the runs of the instance in DAGSTER_HOME, in warm processes, until it is interrupted."""
    if context.invoked_subcommand is not None:
        return
    from outbox_pipelines.launch.__main__ import log_to_stderr
    from outbox_pipelines.launch.service import serve

    log_to_stderr()
    serve(_service(), say=lambda text: typer.echo(f"launcher: {text}", err=True))


@launcher_app.command("status", epilog=example("outbox launcher status --json"))
def status(as_json: AsJson = False) -> None:
    """Say what the launcher is at. Exits with 1 when none runs."""
    answer = _service().ask("status")
    counts = f"{len(answer['running'])} running, {len(answer['waiting'])} waiting"
    counts += f", {counted(answer['idle_workers'], 'idle worker')}"
    lines = [f"launcher {answer['pid']} ({answer['python']}): {counted(answer['started'], 'run')} started, {counts}"]
    lines += [
        f"  run {run['run_id']} in process {run['pid']}"
        + (", left by a launcher before" if run["seconds"] is None else f" for {run['seconds']} s")
        for run in answer["running"]
    ]
    lines += [f"  run {run_id} waits" for run_id in answer["waiting"]]
    show(as_json, answer, "\n".join(lines))


@launcher_app.command("drain", epilog=example("outbox launcher drain", "outbox launcher"))
def drain(as_json: AsJson = False) -> None:
    """Let the launcher end with its running runs, and another take its place at once."""
    answer = _service().ask("drain")
    show(
        as_json,
        answer,
        f"the launcher takes no more runs and ends after {counted(len(answer['runs']), 'run')}; start another now",
    )


def _service() -> Any:
    from outbox_pipelines.launch.service import service_of

    return service_of(os.environ.get("DAGSTER_HOME"))
