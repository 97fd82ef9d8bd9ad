"""Fixtures: a real PostgreSQL server, a fresh migrated database for each test, a scripted ML service."""

import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, make_url, text

from outbox_pipelines.database.database import ensure_database
from outbox_pipelines.database.embedded import EmbeddedServer
from outbox_pipelines.database.engine import open_engine
from outbox_pipelines.database.migrate import migrate
from outbox_pipelines.database.url import engine_url, render
from outbox_pipelines.settings import Settings, load_settings
from tests.command_line import Run, run_outbox
from tests.scripted_service import ScriptedService

_numbers = count(1)


@pytest.fixture(scope="session", autouse=True)
def _no_settings_from_outside() -> Iterator[None]:
    """A developer's OUTBOX_* and OTEL_* variables decide nothing here."""
    ours = [key for key in os.environ if key.startswith(("OUTBOX_", "OTEL_")) and "TEST" not in key]
    hidden = {key: os.environ.pop(key) for key in ours}
    yield
    os.environ.update(hidden)


@pytest.fixture(scope="session", autouse=True)
def _interrupts_arrive() -> None:
    """A shell starts background jobs with SIGINT ignored; tests of interrupts, and their processes, need it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server to make databases on: the one named by OUTBOX_TEST_DATABASE_URL, or an embedded one."""
    named = os.environ.get("OUTBOX_TEST_DATABASE_URL")
    if named:
        yield render(engine_url(named, variable="OUTBOX_TEST_DATABASE_URL"))
        return
    base = tmp_path_factory.getbasetemp()
    # The workers of one pytest-xdist session share a server: it stops with the last of them. Not in pytest's
    # own folder, which others cannot enter: as root the server's account is one of these others.
    session = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    folder = Path(tempfile.gettempdir()) / f"outbox-tests-{hashlib.sha256(bytes(session)).hexdigest()[:16]}"
    folder.mkdir(mode=0o755, exist_ok=True)
    server = EmbeddedServer(folder / "postgres", options={"fsync": "off", "max_connections": "300"})
    with server:
        yield render(server.url("postgres"))
    if not server.is_running():
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def _template(server_url: str) -> Iterator[str]:
    """A migrated database to copy."""
    with made_database(server_url, f"outbox_template_{os.getpid()}") as url:
        engine = open_engine(load_settings(), url, application_name="tests")
        migrate(engine)
        engine.dispose()
        yield str(make_url(url).database)


@pytest.fixture
def empty_database_url(server_url: str) -> Iterator[str]:
    """The URL of a database without migrations."""
    with made_database(server_url, f"outbox_test_{os.getpid()}_{next(_numbers)}") as url:
        yield url


@pytest.fixture
def database_url(server_url: str, _template: str) -> Iterator[str]:
    """The URL of a fresh migrated database."""
    name = f"outbox_test_{os.getpid()}_{next(_numbers)}"
    _administer(server_url, f'CREATE DATABASE "{name}" TEMPLATE "{_template}"')
    yield render(make_url(server_url).set(database=name))
    _administer(server_url, f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    """An ML service whose answers the test decides; accepts everything until told otherwise."""
    with ScriptedService() as scripted:
        yield scripted


@pytest.fixture
def make_settings(database_url: str, service: ScriptedService, tmp_path: Path) -> Callable[..., Settings]:
    """Settings for the test's database and service, with overrides."""

    def make(**overrides: Any) -> Settings:
        values: dict[str, Any] = {"database_url": database_url, "ml_target": service.target, "home": tmp_path / "home"}
        return load_settings(**{**values, **overrides})

    return make


@pytest.fixture
def settings(make_settings: Callable[..., Settings]) -> Settings:
    """The default settings, for the test's database and service."""
    return make_settings()


@pytest.fixture
def engine(settings: Settings, database_url: str) -> Iterator[Engine]:
    """An engine on the test's database."""
    engine = open_engine(settings, database_url, application_name="tests", pool_size=20)
    yield engine
    engine.dispose()


@pytest.fixture
def outbox(settings: Settings, tmp_path: Path) -> Run:
    """Runs ``outbox`` with the test's database and service."""
    assert settings.database_url is not None
    environment = {
        "OUTBOX_DATABASE_URL": settings.database_url.get_secret_value(),
        "OUTBOX_ML_TARGET": settings.ml_target,
        "OUTBOX_HOME": str(tmp_path / "home"),
    }

    def run(*arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
        return run_outbox({**environment, **more}, *arguments)

    return run


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[Any]:
    """A Dagster instance with its own storage."""
    # Here, since importing it costs seconds that most tests need not pay.
    import dagster as dg

    no_logs = {"module": "dagster._core.storage.noop_compute_log_manager", "class": "NoOpComputeLogManager"}
    with dg.instance_for_test(temp_dir=str(tmp_path), overrides={"compute_logs": no_logs}) as made:
        yield made


class made_database:  # noqa: N801  # reads as a statement: with made_database(...)
    """A database that exists inside the block."""

    def __init__(self, server_url: str, name: str) -> None:
        self._server_url = server_url
        self._name = name

    def __enter__(self) -> str:
        ensure_database(load_settings(), self._server_url, self._name)
        return render(make_url(self._server_url).set(database=self._name))

    def __exit__(self, *_: object) -> None:
        _administer(self._server_url, f'DROP DATABASE IF EXISTS "{self._name}" WITH (FORCE)')


def _administer(server_url: str, statement: str) -> None:
    engine = open_engine(load_settings(), server_url, application_name="tests", pool_size=1)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(statement))
    engine.dispose()
