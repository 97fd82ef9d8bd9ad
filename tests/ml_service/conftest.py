from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox_pipelines.ml_service.server import MlServer

from .client import Client


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def server(state_dir: Path) -> Iterator[MlServer]:
    with MlServer(state_dir=state_dir) as running:
        yield running


@pytest.fixture
def client(server: MlServer) -> Iterator[Client]:
    with Client(server.port) as calling:
        yield calling
