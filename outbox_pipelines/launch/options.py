"""The launcher's settings, as run_launcher's config in dagster.yaml gives them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from outbox_pipelines.errors import OutboxError
from outbox_pipelines.launch.folder import default_folder
from outbox_pipelines.launch.internals import (
    Array,
    BoolSource,
    Field,
    IntSource,
    Noneable,
    Permissive,
    StringSource,
    UserConfigSchema,
)

MODE_TAG = "warm-runs/mode"
"""A run's or job's tag that chooses how it is executed."""


_STARTING_PER_CORE = 3
"""Half of a small run's time is waiting for the database's disk."""


class InvalidOptions(OutboxError):
    """run_launcher's config in dagster.yaml has a value that cannot be used."""


class Mode(StrEnum):
    """How a run is executed."""

    FORK = "fork"
    """In a process of its own, forked from one that has imported Dagster."""

    REUSE = "reuse"
    """In a process that executed other runs of the same code before and keeps what they left in memory."""

    STOCK = "stock"
    """By Dagster's own launcher: a new process that imports everything."""


@dataclass(frozen=True)
class Options:
    """The launcher's settings; see :data:`SCHEMA` for their meaning."""

    mode: Mode = Mode.FORK
    job_modes: Mapping[str, Mode] = field(default_factory=dict)
    max_workers: int = 64
    max_starting: int = 6
    runs_per_process: int = 50
    max_memory_mb: int = 0
    idle_worker_seconds: int = 60
    kill_grace_seconds: int = 30
    autostart: bool = True
    idle_exit_seconds: int = 900
    start_seconds: int = 30
    preload: tuple[str, ...] = ()
    print_events: bool = False
    discard_output: bool = False
    folder: str | None = None
    allow_untested_dagster: bool = False

    def mode_of(self, job_name: str, tags: Mapping[str, str]) -> Mode:
        """How to execute a run: its tag decides, then the job's setting, then the default.

        Raises:
            InvalidOptions: for a tag whose value is no mode.
        """
        if MODE_TAG in tags:
            return _mode(tags[MODE_TAG], f"tag {MODE_TAG}")
        return self.job_modes.get(job_name, self.mode)

    def folder_of(self, instance_root: str) -> Path:
        """The launcher's private folder for an instance."""
        return Path(self.folder).expanduser() if self.folder else default_folder(instance_root)


_BOUNDS = {
    "max_workers": (1, 10_000),
    "max_starting": (1, 1_000),
    "runs_per_process": (1, 1_000_000),
    "max_memory_mb": (0, 16 * 1024 * 1024),
    "idle_worker_seconds": (0, 86_400),
    "kill_grace_seconds": (0, 86_400),
    "idle_exit_seconds": (0, 30 * 86_400),
    "start_seconds": (0, 600),
}

SCHEMA: UserConfigSchema = {
    "mode": Field(
        StringSource,
        is_required=False,
        default_value=Mode.FORK.value,
        description="How runs are executed: fork (a process each) or reuse (a process for many runs of the same code).",
    ),
    "job_modes": Field(
        Permissive(),  # type: ignore[no-untyped-call]
        is_required=False,
        default_value={},
        description="Modes of jobs by name, fork, reuse or stock; a run's tag warm-runs/mode wins over it.",
    ),
    "max_workers": Field(
        IntSource,
        is_required=False,
        default_value=Options.max_workers,
        description="Worker processes at a time. Not below max_concurrent_runs: a run that waits here has been "
        "launched for Dagster, which fails it after its start timeout.",
    ),
    "max_starting": Field(
        Noneable(IntSource),
        is_required=False,
        default_value=None,
        description="Workers at a time in their first two seconds; three for each core when not given. It keeps a "
        "burst of short runs from hindering itself, and never lets a long run hold back another.",
    ),
    "runs_per_process": Field(
        IntSource,
        is_required=False,
        default_value=Options.runs_per_process,
        description="Runs that a process executes in mode reuse before it is replaced.",
    ),
    "max_memory_mb": Field(
        IntSource,
        is_required=False,
        default_value=0,
        description="Megabytes of data that a worker may hold (RLIMIT_DATA, Linux); beyond, an allocation fails with "
        "MemoryError. 0: no bound.",
    ),
    "idle_worker_seconds": Field(
        IntSource,
        is_required=False,
        default_value=Options.idle_worker_seconds,
        description="Seconds that a process in mode reuse waits for its next run.",
    ),
    "kill_grace_seconds": Field(
        IntSource,
        is_required=False,
        default_value=Options.kill_grace_seconds,
        description="Seconds between the request to cancel a run and the killing of its process.",
    ),
    "autostart": Field(
        BoolSource,
        is_required=False,
        default_value=True,
        description="Start the launcher's process when a run needs it and it does not run.",
    ),
    "idle_exit_seconds": Field(
        IntSource,
        is_required=False,
        default_value=Options.idle_exit_seconds,
        description="Seconds without a run after which a process that was started so ends.",
    ),
    "start_seconds": Field(
        IntSource,
        is_required=False,
        default_value=Options.start_seconds,
        description="Seconds to wait for the launcher's process before a run goes to Dagster's own launcher.",
    ),
    "preload": Field(
        Array(StringSource),
        is_required=False,
        default_value=[],
        description="Modules of libraries to import once instead of in each run. They are read again only when the "
        "launcher starts again, so no module that you edit, and none that starts threads or opens connections.",
    ),
    "print_events": Field(
        BoolSource,
        is_required=False,
        default_value=False,
        description="Write each run's events to the launcher's stderr too, as Dagster's own run workers do. They are "
        "in the event log in any case; writing them twice takes a twelfth of a small run's time.",
    ),
    "discard_output": Field(
        BoolSource,
        is_required=False,
        default_value=False,
        description="Throw away what runs print; otherwise it goes to the launcher's stderr.",
    ),
    "folder": Field(
        Noneable(StringSource),
        is_required=False,
        default_value=None,
        description="Private folder for the launcher's socket and locks; warm_runs beside the instance's files when "
        "not given. On a local disk, with access for its owner alone.",
    ),
    "allow_untested_dagster": Field(
        BoolSource,
        is_required=False,
        default_value=False,
        description="Run with a release of Dagster that this launcher was not tested with.",
    ),
}
"""The config in dagster.yaml."""


def read_options(config: Mapping[str, Any]) -> Options:
    """The options from the validated config.

    Raises:
        InvalidOptions: naming the setting, its value and what is allowed.
    """
    for name, (low, high) in _BOUNDS.items():
        value = config.get(name)
        if value is not None and not low <= value <= high:
            raise InvalidOptions(f"run_launcher's {name} is {value}: it must be from {low} to {high}")
    values = dict(config)
    if values.get("max_starting") is None:
        values["max_starting"] = _STARTING_PER_CORE * (os.cpu_count() or 2)
    values["mode"] = _mode(config.get("mode", Mode.FORK), "mode")
    if values["mode"] is Mode.STOCK:
        raise InvalidOptions(
            "run_launcher's mode is stock: take run_launcher out of dagster.yaml, which gives Dagster's own launcher"
        )
    values["job_modes"] = {
        job: _mode(mode, f"job_modes for {job}") for job, mode in (config.get("job_modes") or {}).items()
    }
    values["preload"] = tuple(config.get("preload") or ())
    return Options(**values)


def _mode(value: str, where: str) -> Mode:
    try:
        return Mode(value)
    except ValueError:
        raise InvalidOptions(f"run_launcher's {where} is {value!r}: it must be one of {', '.join(Mode)}") from None
