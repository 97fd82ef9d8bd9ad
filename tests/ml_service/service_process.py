"""The service as a process of its own, to be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

_SERVE = """
import sys
from pathlib import Path
from outbox_pipelines.ml_service.server import serve
{sabotage}
serve(state_dir=Path(sys.argv[1]), on_ready=lambda port: print(port, flush=True))
print("stopped", flush=True)
"""

#: Dies at the nth rename of a state file, before it or after it.
DIE_AT_RENAME = """
import os, signal
rename, left = os.replace, {nth}
def replace(source, target):
    global left
    left -= 1
    if left == 0 and {before}: os.kill(os.getpid(), signal.SIGKILL)
    rename(source, target)
    if left == 0: os.kill(os.getpid(), signal.SIGKILL)
os.replace = replace
"""


class ServiceProcess:
    """Runs `serve` until told to stop. `port` is known once it answers calls."""

    def __init__(self, state_dir: Path, sabotage: str = "") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE.format(sabotage=sabotage), str(state_dir)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": "random"},
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self.port = int(self._output.readline())

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def ended(self) -> tuple[int, str]:
        """Waits for its end; the exit code (negative: the signal) and what it still said."""
        code = self._process.wait(30)
        return code, self._output.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()
