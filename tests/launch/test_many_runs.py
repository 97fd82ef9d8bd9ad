"""A thousand runs in a row leave nothing behind."""

from collections.abc import Callable

import dagster as dg
import psutil
import pytest
from dagster._core.workspace.load_target import WorkspaceLoadTarget
from sqlalchemy import create_engine, text

from outbox_pipelines.database.url import dagster_storage_url
from tests.launch.conftest import Home, Runs, opened, wait_until

RUNS = 1000
_AT_ONCE = 50
_TAGS = {"of": "a thousand runs"}


@pytest.mark.timeout(900)
def test_a_thousand_runs_in_a_row_keep_memory_descriptors_and_sessions_flat(
    make_home: Callable[..., Home], code_server: WorkspaceLoadTarget
) -> None:
    home = make_home()
    launcher = psutil.Process(home.start_launcher().pid)
    sessions = _sessions(home)
    with opened(home, code_server) as runs:
        _execute(runs, RUNS // 10)
        before = _what_it_holds(launcher, home)
        _execute(runs, RUNS - RUNS // 10)
        after = _what_it_holds(launcher, home)
        assert runs.instance.get_runs_count(dg.RunsFilter(statuses=[dg.DagsterRunStatus.SUCCESS], tags=_TAGS)) == RUNS
    (memory, sessions_at_once, *counts), (memory_before, sessions_at_once_before, *counts_before) = after, before
    assert counts == counts_before
    # The pool of this process may have grown by what it asks side by side.
    assert sessions_at_once <= sessions_at_once_before + 3
    # One run more of memory for each thousand would be some 100 MB.
    assert memory - memory_before < 10 * 1024 * 1024
    # A session for each run's process, one for what is asked beside it at a time, and those of this process.
    assert _sessions(home) - sessions <= 2 * RUNS
    assert list((home.path / "warm_runs" / "running").iterdir()) == []
    assert list((home.path / "warm_runs" / "waiting").iterdir()) == []


def _execute(runs: Runs, count: int) -> None:
    left: list[str] = []
    for _ in range(count):
        left.append(runs.launch("say", tags=_TAGS))
        if len(left) >= _AT_ONCE:
            wait_until(lambda: not runs.home.status()["waiting"], "the launcher has started them")
            left = []
    wait_until(lambda: not runs.home.status()["running"] and not runs.home.status()["waiting"], "all have ended")


def _what_it_holds(launcher: psutil.Process, home: Home) -> tuple[int, int, int, int]:
    """Memory of the launcher's process, the server's sessions of the moment, its descriptors and children."""
    wait_until(lambda: not launcher.children(recursive=True), "the workers have ended")
    with create_engine(dagster_storage_url(home.storage_url)).connect() as connection:
        query = """SELECT count(*) FROM pg_stat_activity
                   WHERE datname = current_database() AND backend_type = 'client backend'"""
        sessions = connection.execute(text(query)).scalar_one()
    return launcher.memory_info().rss, int(sessions), launcher.num_fds(), len(launcher.children())


def _sessions(home: Home) -> int:
    """Sessions that the server has opened for Dagster's database."""
    with create_engine(dagster_storage_url(home.storage_url)).connect() as connection:
        return int(
            connection.execute(
                text("SELECT sessions FROM pg_stat_database WHERE datname = current_database()")
            ).scalar_one()
        )
