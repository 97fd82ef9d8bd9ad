"""The database that the settings name, opened when it is needed and made where it is missing."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Engine, make_url, text

from outbox_pipelines.database.database import Database, ensure_database
from outbox_pipelines.database.migrate import NotMigrated
from outbox_pipelines.settings import Settings

MakeSettings = Callable[..., Settings]

FORKING = """
import os, sys
from sqlalchemy import text
from outbox_pipelines.database.database import Database
from outbox_pipelines.settings import load_settings

def pid(database):
    with database.engine.connect() as connection:
        return connection.execute(text("SELECT pg_backend_pid()")).scalar_one()

database = Database(load_settings())
before = pid(database)
child = os.fork()
if child == 0:
    os._exit(0 if pid(database) != before else 1)
assert os.waitpid(child, 0)[1] == 0, "the child used its parent's connection"
assert pid(database) == before, "the child closed its parent's connection"
"""


def names(engine: Engine) -> set[str]:
    """The server's databases."""
    with engine.connect() as connection:
        return set(connection.execute(text("SELECT datname FROM pg_database")).scalars())


def test_nothing_is_opened_before_it_is_needed(make_settings: MakeSettings) -> None:
    with Database(make_settings(database_url="postgresql://127.0.0.1:1/away")) as database:
        assert make_url(database.url) == make_url("postgresql+psycopg://127.0.0.1:1/away")


def test_the_url_keeps_its_password(make_settings: MakeSettings) -> None:
    assert "hunter2" in Database(make_settings(database_url="postgres://u:hunter2@h/d")).url


def test_a_migrated_database_is_given_and_another_refused(
    settings: Settings, make_settings: MakeSettings, empty_database_url: str
) -> None:
    with Database(settings) as database, database.migrated_engine().connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM outbox.tenants")).scalar_one() == 0
    with (
        Database(make_settings(database_url=empty_database_url)) as database,
        pytest.raises(NotMigrated, match="run `outbox migrate`"),
    ):
        database.migrated_engine()


def test_closing_closes_the_connections_and_opening_again_works(settings: Settings, engine: Engine) -> None:
    database = Database(settings, application_name="to be closed")
    for _ in range(2):
        with database.engine.connect() as connection:
            assert connection.execute(text("SELECT 1")).scalar_one() == 1
        database.close()
        with engine.connect() as connection:
            left = text("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'to be closed'")
            assert connection.execute(left).scalar_one() == 0


def test_without_a_url_an_embedded_server_is_started_and_stopped(make_settings: MakeSettings, tmp_path: Path) -> None:
    settings = make_settings(database_url=None)
    with Database(settings) as database:
        with database.engine.connect() as connection:
            assert connection.execute(text("SELECT current_database()")).scalar_one() == "outbox"
            data = Path(connection.exec_driver_sql("SHOW data_directory").scalar_one())
        with Database(settings) as same:
            assert same.url == database.url
        assert (data / "postmaster.pid").exists()
    assert not (data / "postmaster.pid").exists()
    if tmp_path not in data.parents:
        # As root the data may lie where pytest does not clean up.
        shutil.rmtree(data.parent)


def test_a_forked_process_uses_connections_of_its_own(database_url: str) -> None:
    environment = {**os.environ, "OUTBOX_DATABASE_URL": database_url}
    subprocess.run([sys.executable, "-c", FORKING], env=environment, check=True, timeout=60)


@pytest.mark.parametrize("name", ["plain", 'with "quotes"', "100% sure", "%s", "a:b"])
def test_a_missing_database_is_made_whatever_its_name(
    settings: Settings, server_url: str, engine: Engine, name: str
) -> None:
    name = f"{name} {make_url(str(engine.url)).database}"
    for _ in range(2):
        ensure_database(settings, server_url, name)
        assert name in names(engine)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        quoted = connection.execute(text("SELECT quote_ident(:name)"), {"name": name}).scalar_one()
        connection.exec_driver_sql(f"DROP DATABASE {quoted.replace('%', '%%')}")


def test_processes_that_make_a_database_at_once_both_succeed(
    settings: Settings, server_url: str, engine: Engine
) -> None:
    name = f"at_once_{make_url(str(engine.url)).database}"
    with ThreadPoolExecutor(4) as threads:
        for made in [threads.submit(ensure_database, settings, server_url, name) for _ in range(4)]:
            made.result()
    assert name in names(engine)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(f'DROP DATABASE "{name}"')
