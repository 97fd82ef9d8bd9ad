"""One running stack for all tests of it: real daemon, sensors and webserver, the shipped dagster.yaml."""

import json
import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import Engine

from outbox_pipelines.local.stack import Stack, free_port, running_stack
from outbox_pipelines.settings import load_settings
from tests.conftest import made_database
from tests.scripted_service import ScriptedService, accept

PATIENCE = 120.0
"""Seconds for what takes some polls and starts of runs."""


@pytest.fixture(scope="session")
def ml() -> Iterator[ScriptedService]:
    """The ML service that the stack's runs call."""
    with ScriptedService() as running:
        yield running


@pytest.fixture(scope="session")
def stack(server_url: str, ml: ScriptedService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Launcher, webserver, daemon and code server, with the shipped settings of the instance."""
    with started_stack(server_url, ml, tmp_path_factory.mktemp("home"), "outbox_stack") as running:
        yield running


@contextmanager
def started_stack(
    server_url: str, ml: ScriptedService, home: Path, name: str, kinds: str = "tests.local.stack_kinds:KINDS"
) -> Iterator[Stack]:
    """A stack on databases of its own; afterwards nothing of it is left."""
    name = f"{name}_{os.getpid()}"
    with made_database(server_url, name) as url, made_database(server_url, f"{name}_dagster"):
        settings = load_settings(
            database_url=url,
            ml_target=ml.target,
            home=home,
            poll_seconds=5,
            recovery_seconds=5,
            kinds=kinds,
            ml_deadline_seconds=60,
        )
        with running_stack(settings, say=print, log=lambda _line: None, port=free_port()) as running:
            yield running
            ours = [process for process in psutil.process_iter() if _outbox_home(process) == str(home)]
            assert len(ours) >= len(_PARTS), "the stack's processes are not recognized"
        _, alive = psutil.wait_procs(ours, timeout=10)
        assert alive == [], "processes were left behind"


_PARTS = ("launcher", "code server", "webserver", "daemon")


def _outbox_home(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("OUTBOX_HOME")
    except psutil.Error:
        return None


@pytest.fixture
def engine(stack: Stack) -> Engine:
    """The stack's database."""
    return stack.database.engine


@pytest.fixture(autouse=True)
def _accepting(ml: ScriptedService) -> Iterator[None]:
    yield
    ml.answer = accept


def ask(stack: Stack, query: str, **variables: object) -> dict[str, Any]:
    """Ask the webserver over GraphQL."""
    request = urllib.request.Request(
        f"{stack.ui_url}/graphql",
        json.dumps({"query": query, "variables": variables}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        answer: dict[str, Any] = json.load(response)
    assert "errors" not in answer, answer
    return dict(answer["data"])
