"""The command ``outbox``, run as a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable

Run = Callable[..., "subprocess.CompletedProcess[str]"]

# Ends with 9 when a command has imported what it should not have.
_WITHOUT_DAGSTER = """
import sys
from outbox_pipelines.cli import main
try:
    main()
except SystemExit as end:
    foreign = sorted(name for name in sys.modules if name.split(".")[0] in {"dagster", "pandas", "river"})
    sys.exit(9 if foreign else end.code)
"""


def run_outbox(environment: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run ``outbox`` in this environment, and see that it does not import Dagster."""
    return subprocess.run(
        [sys.executable, "-c", _WITHOUT_DAGSTER, *arguments],
        env={**os.environ, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def succeeded(done: "subprocess.CompletedProcess[str]") -> str:
    """What a command that must succeed printed."""
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(done: "subprocess.CompletedProcess[str]", code: int = 1) -> str:
    """The one line on standard error, without a traceback."""
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr
