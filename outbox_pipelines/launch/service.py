"""The launcher's process from its start: what an instance's settings say of it, and serving them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outbox_pipelines.errors import OutboxError
from outbox_pipelines.launch.folder import Folder
from outbox_pipelines.launch.internals import InstanceRef, check_release, serialize_value
from outbox_pipelines.launch.launcher import WarmRunLauncher
from outbox_pipelines.launch.options import Options
from outbox_pipelines.launch.protocol import ask
from outbox_pipelines.launch.rehearsal import rehearse
from outbox_pipelines.launch.worker import keep_events_off_stderr
from outbox_pipelines.launch.zygote import LauncherRuns, Zygote, preload

_WAIT_SECONDS = 0.5


class NoLauncher(OutboxError):
    """The instance's settings name no warm launcher, or there is no instance."""


@dataclass(frozen=True)
class Service:
    """The launcher of one instance."""

    options: Options
    folder: Folder
    instance_ref: str

    def ask(self, what: str) -> dict[str, Any]:
        """Ask the process that serves the instance now.

        Raises:
            LauncherSilent: when there is none.
        """
        return ask(self.folder.socket_path, {"ask": what})


def service_of(instance_dir: str | None) -> Service:
    """The launcher that an instance's settings name.

    Args:
        instance_dir: the folder with dagster.yaml.

    Raises:
        NoLauncher: naming what is missing, and the remedy.
        OutboxError: for settings that cannot be used, or an untested Dagster.
    """
    if not instance_dir:
        raise NoLauncher("DAGSTER_HOME is not set: set it to the folder with dagster.yaml")
    settings = Path(instance_dir) / "dagster.yaml"
    if not settings.is_file():
        raise NoLauncher(f"{settings}: there is no such file; set DAGSTER_HOME to the folder with dagster.yaml")
    ref = InstanceRef.from_dir(str(Path(instance_dir).absolute()))
    launcher = ref.run_launcher
    if not isinstance(launcher, WarmRunLauncher):
        raise NoLauncher(
            f"{settings} does not name WarmRunLauncher as run_launcher, so no run would come here; add\n"
            "run_launcher:\n  module: outbox_pipelines.launch\n  class: WarmRunLauncher"
        )
    options = launcher.options
    check_release(allow_untested=options.allow_untested_dagster)
    return Service(options, Folder(options.folder_of(ref.local_artifact_storage.base_dir)), serialize_value(ref))


def serve(
    service: Service,
    *,
    until_idle: bool = False,
    say: Callable[[str], None] = lambda _text: None,
) -> None:
    """Serve the instance's runs until a signal ends it.

    Args:
        until_idle: end when no run came for ``idle_exit_seconds``, and at once when another launcher
            serves the instance; without it, wait for the other's end and take its place.
        say: told when the launcher waits, and when it is ready.
    """
    preload(service.options.preload)
    if not service.options.print_events:
        keep_events_off_stderr()
    zygote = _first_in_line(service, until_idle=until_idle, say=say)
    zygote.serve(rehearse(service.instance_ref), on_ready=lambda: say(f"ready, in {service.folder.path}"))


def _first_in_line(service: Service, *, until_idle: bool, say: Callable[[str], None]) -> Zygote:
    told = False
    while True:
        try:
            return Zygote(service.folder, service.options, service.instance_ref, ends_when_idle=until_idle)
        except LauncherRuns as other:
            if until_idle:
                raise
            if not told:
                say(f"{other}; waiting to take its place (outbox launcher drain lets it end)")
                told = True
            time.sleep(_WAIT_SECONDS)
