"""While PostgreSQL is away runs go on, and what is to be written is written when it is back."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.workspace.load_target import WorkspaceLoadTarget
from sqlalchemy import create_engine, text

from outbox_pipelines.database.embedded import EmbeddedServer
from outbox_pipelines.database.url import render
from tests.launch.conftest import MakeHome, Runs, made_storage, opened, wait_until, wait_until_gone

pytestmark = pytest.mark.xdist_group("launcher_storage_away")


@dataclass
class Frail:
    """An instance whose server is at the test's mercy."""

    runs: Runs
    server: EmbeddedServer

    @contextmanager
    def away(self) -> Iterator[None]:
        """The server does not run inside the block."""
        self.server.__exit__()
        try:
            assert not self.server.is_running()
            yield
        finally:
            self.server.__enter__()

    def cut_sessions(self) -> None:
        """End every session on Dagster's tables."""
        engine = create_engine(self.server.url("postgres"))
        with engine.connect() as connection:
            ended = connection.execute(
                text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname LIKE 'dagster_%'")
            )
            assert ended.rowcount > 0
        engine.dispose()


@pytest.fixture(scope="module")
def frail(make_shared_home: MakeHome, code_server: WorkspaceLoadTarget) -> Iterator[Frail]:
    """A launcher on a server of its own."""
    # Not in pytest's own folder, which others cannot enter: as root the server's account is one of these others.
    folder = Path(tempfile.mkdtemp(prefix="outbox-tests-"))
    folder.chmod(0o755)
    server = EmbeddedServer(folder / "postgres", options={"fsync": "off"})
    with server:
        server_url = render(server.url("postgres"))
        with made_storage(server_url) as url:
            home = make_shared_home(storage_url=url, kill_grace_seconds=1)
            home.start_launcher()
            with opened(home, code_server) as runs:
                yield Frail(runs, server)
            home.stop()
    shutil.rmtree(folder, ignore_errors=True)


def test_a_run_goes_on_though_its_sessions_are_cut(frail: Frail, tmp_path: Path) -> None:
    run_id = frail.runs.begin("gate", tmp_path)
    frail.cut_sessions()
    (tmp_path / "open").touch()
    assert frail.runs.end_of(run_id) is dg.DagsterRunStatus.SUCCESS, frail.runs.messages(run_id)


def test_a_run_goes_on_though_the_server_restarts(frail: Frail, tmp_path: Path) -> None:
    run_id = frail.runs.begin("gate", tmp_path)
    frail.server.restart()
    (tmp_path / "open").touch()
    assert frail.runs.end_of(run_id) is dg.DagsterRunStatus.SUCCESS, frail.runs.messages(run_id)


def test_a_shared_process_goes_on_though_the_server_restarts_between_its_runs(frail: Frail, tmp_path: Path) -> None:
    pids = []
    for number in range(2):
        run_id = frail.runs.launch("say", op={"folder": str(tmp_path)}, tags={"warm-runs/mode": "reuse"})
        assert frail.runs.end_of(run_id) is dg.DagsterRunStatus.SUCCESS, frail.runs.messages(run_id)
        pids.append(frail.runs.left(run_id, tmp_path)[0])
        wait_until(lambda: not frail.runs.home.status()["running"], "the launcher knows")
        if not number:
            frail.server.restart()
    assert pids[0] == pids[1]


def test_the_end_of_a_killed_worker_is_written_when_the_server_is_back(frail: Frail, tmp_path: Path) -> None:
    log = frail.runs.home.log
    killed, canceled = frail.runs.begin("wait", tmp_path), frail.runs.begin("stubborn", tmp_path)
    assert frail.runs.launcher.terminate(canceled)
    with frail.away():
        os.kill(frail.runs.home.pid_of(killed), signal.SIGKILL)
        wait_until(lambda: log.read_text().count("its end cannot be written yet") >= 2, "it is tried in vain")
    assert frail.runs.end_of(killed, seconds=20) is dg.DagsterRunStatus.FAILURE
    assert "was killed by SIGKILL" in frail.runs.messages(killed)
    assert frail.runs.end_of(canceled, seconds=20) is dg.DagsterRunStatus.CANCELED


def test_a_run_whose_events_meet_a_short_outage_succeeds(frail: Frail, tmp_path: Path) -> None:
    run_id = frail.runs.begin("gate", tmp_path)
    worker = frail.runs.home.pid_of(run_id)
    log = frail.runs.home.log
    with frail.away():
        before = log.stat().st_size
        (tmp_path / "open").touch()
        wait_until(lambda: b"Retrying failed database connection" in log.read_bytes()[before:], "it is tried in vain")
        assert frail.runs.home.folder.is_held(run_id)
    assert frail.runs.end_of(run_id, seconds=30) is dg.DagsterRunStatus.SUCCESS, frail.runs.messages(run_id)
    wait_until_gone(worker)


def test_a_run_that_finds_no_server_as_it_begins_gets_an_end_when_it_is_back(frail: Frail) -> None:
    home = frail.runs.home
    run = frail.runs.create("say")
    with frail.away():
        frail.runs.hand_over(run)
        told = f"run {run.run_id}: its end cannot be written yet"
        wait_until(lambda: told in home.log.read_text(), "it is tried in vain")
    assert frail.runs.end_of(run.run_id, seconds=30) is dg.DagsterRunStatus.FAILURE
    assert "it ended with DagsterPostgresException outside of the run's steps" in frail.runs.messages(run.run_id)


def test_a_launcher_waits_for_the_server_and_then_has_its_rehearsal(frail: Frail) -> None:
    home = frail.runs.home
    os.kill(home.status()["pid"], signal.SIGTERM)
    wait_until(lambda: not home.folder.socket_path.exists(), "the launcher ends")
    with frail.away():
        before = home.log.stat().st_size
        launcher = home.spawn_launcher()
        wait_until(
            lambda: b"waiting for Dagster's storage, which cannot be reached" in home.log.read_bytes()[before:],
            "it says what it waits for",
        )
    home.wait_for(launcher)
    assert b"rehearsal failed" not in home.log.read_bytes()[before:]
    run_id = frail.runs.launch("say")
    assert frail.runs.end_of(run_id) is dg.DagsterRunStatus.SUCCESS, frail.runs.messages(run_id)
