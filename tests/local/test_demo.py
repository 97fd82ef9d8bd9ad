"""The demonstration proves itself, without a terminal and on a machine whose usual ports are taken."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.outboxes import wait_until

# With the other stack on one worker: two at once would only wait for each other's imports.
pytestmark = [pytest.mark.xdist_group("stack"), pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _usual_ports_taken() -> Iterator[None]:
    with ExitStack() as stack:
        for port in (3000, 50051):
            taken = stack.enter_context(socket.socket())
            # Connections that ended a moment ago do not keep the port.
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                taken.bind(("127.0.0.1", port))
            except OSError:
                continue  # somebody else has taken it: as good
            taken.listen()
        yield


@contextmanager
def outbox(folder: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """An ``outbox`` command in a folder of its own, with its embedded server; leaves nothing running."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OUTBOX_", "DAGSTER_"))}
    process = subprocess.Popen(
        [sys.executable, "-m", "outbox_pipelines.cli", *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def left_behind(folder: Path) -> list[str]:
    """Processes that still work in the folder."""
    found = []
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if str(folder) in command and process.pid != os.getpid():
            found.append(command)
    return found


def test_the_demo_ends_by_itself_with_a_proof(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with outbox(tmp_path, "demo", "--once", "--json") as process:
        out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    proof = json.loads(out)
    seconds = proof.pop("seconds")
    assert proof == {
        "tenants": 5,
        "enqueued": 1252,
        "delivered": 1250,
        "dead_lettered": 2,
        "pending": 0,
        "duplicates": 0,
        "runs": 5,
        "jobs": 12,
        "jobs_succeeded": 10,
        "jobs_given_up": 2,
        "job_attempts": 20,
        "checks_passed": 12,
        "verified": True,
    }
    assert seconds > 0
    assert "webserver: port 3000 is taken, using" in err
    assert "ml-service: port 50051 is taken, using" in err
    wait_until(lambda: not left_behind(tmp_path))


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_dev_stops_everything_with_one_signal(tmp_path: Path, ending: signal.Signals) -> None:
    tmp_path.chmod(0o755)
    with outbox(tmp_path, "dev") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ready: http"):
                break
        assert left_behind(tmp_path)
        process.send_signal(ending)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert out.rstrip().endswith("stopped")
    wait_until(lambda: not left_behind(tmp_path))
