"""How the launcher is spoken to: one line of JSON each way over a Unix socket that only its user may open."""

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outbox_pipelines.errors import OutboxError

LONGEST_LINE = 4 * 1024 * 1024
"""Bytes of a request at most; a run's is about 4 KB."""


class LauncherSilent(OutboxError):
    """Nobody answers at the launcher's socket."""


def ask(socket_path: Path, question: Mapping[str, Any], *, seconds: float = 10.0) -> dict[str, Any]:
    """Send one question to the launcher and return its answer.

    Args:
        seconds: to wait for connection and answer.

    Raises:
        LauncherSilent: when there is no launcher, or it does not answer in time. It may have
            heard the question all the same.
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(seconds)
            connection.connect(str(socket_path))
            connection.sendall(json.dumps(question).encode() + b"\n")
            answer = b""
            while not answer.endswith(b"\n"):
                more = connection.recv(65536)
                if not more:
                    raise LauncherSilent(f"the launcher at {socket_path} ended in the middle of an answer")
                answer += more
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise LauncherSilent(f"no launcher answers at {socket_path} ({reason})") from error
    return dict(json.loads(answer))
