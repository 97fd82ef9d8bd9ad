"""Engines: the time-outs are in force, and a server that is away is told in words."""

import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import OperationalError, ProgrammingError

from outbox_pipelines.database.engine import (
    DatabaseUnreachable,
    check_server,
    explained,
    for_single_statements,
    open_engine,
)
from outbox_pipelines.settings import Pooler, Settings, load_settings

MakeSettings = Callable[..., Settings]
TIMEOUTS = {"statement_timeout": 7, "lock_timeout": 1.5}


@contextmanager
def opened(settings: Settings, url: str, **how: Any) -> Iterator[Engine]:
    """An engine for the length of a block."""
    engine = open_engine(settings, url, application_name="the tests' own", **how)
    try:
        yield engine
    finally:
        engine.dispose()


def in_force(connection: Connection) -> tuple[str, ...]:
    """The server's word on what this connection runs under."""
    names = ("statement_timeout", "lock_timeout", "application_name")
    return tuple(connection.exec_driver_sql(f"SHOW {name}").scalar_one() for name in names)


def in_the_session(connection: Connection) -> tuple[str, ...]:
    """The same, past SQLAlchemy and so without a transaction of its making."""
    driver = connection.connection.driver_connection
    assert driver is not None
    told = tuple(driver.execute(f"SHOW {name}").fetchone()[0] for name in ("statement_timeout", "lock_timeout"))
    driver.rollback()
    return told


def closed_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_timeouts_and_name_are_in_force(make_settings: MakeSettings, database_url: str) -> None:
    with opened(make_settings(**TIMEOUTS), database_url) as engine, engine.connect() as connection:
        assert in_force(connection) == ("7s", "1500ms", "the tests' own")
        connection.rollback()
        assert in_the_session(connection) == ("7s", "1500ms")


def test_behind_a_pooler_each_transaction_sets_its_own_timeouts_and_leaves_none_behind(
    make_settings: MakeSettings, database_url: str
) -> None:
    settings = make_settings(**TIMEOUTS, database_pooler=Pooler.TRANSACTION)
    with opened(settings, database_url) as engine, engine.connect() as connection:
        defaults = in_the_session(connection)
        assert defaults != ("7s", "1500ms")
        for end in (connection.commit, connection.rollback):
            assert in_force(connection) == ("7s", "1500ms", "the tests' own")
            end()
            assert in_the_session(connection) == defaults


def ended_in_the_pool(engine: Engine, of_the_server: Engine) -> None:
    """Use a connection, give it back, and have the server end it."""
    with engine.connect() as connection:
        pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
    with of_the_server.connect() as connection:
        assert connection.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid}).scalar_one()


@pytest.mark.parametrize("trusted_seconds", [0.0, 0.001])
def test_a_connection_that_ended_in_the_pool_is_replaced(
    settings: Settings, engine: Engine, database_url: str, trusted_seconds: float
) -> None:
    with opened(settings, database_url, pool_size=1, trusted_seconds=trusted_seconds) as own:
        for _ in range(3):
            ended_in_the_pool(own, engine)
            time.sleep(2 * trusted_seconds)
            with own.connect() as connection:
                assert connection.exec_driver_sql("SELECT 1").scalar_one() == 1


def test_one_that_is_trusted_is_found_dead_when_it_is_used_and_then_replaced(
    settings: Settings, engine: Engine, database_url: str
) -> None:
    with opened(settings, database_url, pool_size=1, trusted_seconds=60.0) as own:
        ended_in_the_pool(own, engine)
        with pytest.raises(OperationalError), own.connect() as connection:
            connection.exec_driver_sql("SELECT 1")
        with own.connect() as connection:
            assert connection.exec_driver_sql("SELECT 1").scalar_one() == 1


@pytest.mark.parametrize("pooler", Pooler)
def test_single_statements_have_the_timeouts_too(
    make_settings: MakeSettings, database_url: str, pooler: Pooler
) -> None:
    settings = make_settings(**TIMEOUTS, database_pooler=pooler)
    with opened(settings, database_url) as engine, for_single_statements(engine, settings).connect() as connection:
        with connection.begin():
            assert in_force(connection)[:2] == ("7s", "1500ms")
            connection.execute(text("INSERT INTO outbox.ml_service_health VALUES ('here', true, 'x')"))
        with engine.connect() as other:
            assert other.execute(text("SELECT count(*) FROM outbox.ml_service_health")).scalar_one() == 1


@pytest.mark.parametrize("pooler", Pooler)
def test_a_lock_that_does_not_come_ends_the_statement(
    make_settings: MakeSettings, database_url: str, pooler: Pooler
) -> None:
    settings = make_settings(lock_timeout=0.1, database_pooler=pooler)
    lock = text("LOCK TABLE outbox.tenants")
    with opened(settings, database_url) as engine, engine.connect() as first, engine.connect() as second:
        first.execute(lock)
        # A fault of the statement, not of the connection: it keeps its own name.
        with pytest.raises(OperationalError, match="lock timeout"), explained(engine):
            second.execute(lock)


@pytest.mark.parametrize(("pooler", "prepared"), [(Pooler.NONE, True), (Pooler.TRANSACTION, False)])
def test_behind_a_pooler_nothing_is_prepared_in_the_session(
    make_settings: MakeSettings, database_url: str, pooler: Pooler, prepared: bool
) -> None:
    settings = make_settings(database_pooler=pooler)
    with opened(settings, database_url) as engine, engine.connect() as connection:
        for number in range(10):
            assert connection.execute(text("SELECT :number"), {"number": number}).scalar_one() == number
        count = connection.exec_driver_sql("SELECT count(*) FROM pg_prepared_statements WHERE NOT from_sql")
        assert bool(count.scalar_one()) is prepared


def test_an_error_does_not_tell_the_parameters(engine: Engine) -> None:
    with engine.connect() as connection, pytest.raises(ProgrammingError) as raised:
        connection.execute(text("SELECT :secret FROM not_there"), {"secret": "hunter2"})
    assert "hunter2" not in f"{raised.value} {raised.value!r} {raised.value.orig}"


def test_a_server_that_is_away_is_told_with_its_address_and_without_the_password() -> None:
    port = closed_port()
    with (
        opened(load_settings(), f"postgresql://someone:hunter2@127.0.0.1:{port}/shop") as engine,
        pytest.raises(DatabaseUnreachable) as raised,
        explained(engine),
    ):
        engine.connect()
    told = str(raised.value)
    assert f"database 'shop' on 127.0.0.1:{port}" in told
    assert "refused" in told
    assert "OUTBOX_DATABASE_URL" in told
    assert "hunter2" not in "".join(traceback.format_exception(raised.value))


def test_a_socket_that_is_away_is_told_with_its_folder() -> None:
    with (
        opened(load_settings(), "postgresql:///shop?host=/not/there") as engine,
        pytest.raises(DatabaseUnreachable, match="database 'shop' on /not/there"),
        explained(engine),
    ):
        engine.connect()


def test_a_database_that_is_not_there_is_told(settings: Settings, database_url: str) -> None:
    missing = database_url.replace("/outbox_test_", "/missing_outbox_test_")
    with (
        opened(settings, missing) as engine,
        pytest.raises(DatabaseUnreachable, match=r'"missing_outbox_test_.*" does not exist'),
        explained(engine),
    ):
        engine.connect()


def test_a_connection_lost_in_the_middle_is_told_and_the_next_one_works(
    settings: Settings, database_url: str, engine: Engine
) -> None:
    with opened(settings, database_url, pool_size=1) as own:
        with own.connect() as connection:
            pid = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
            with engine.begin() as other:
                other.execute(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": pid})
            with pytest.raises(DatabaseUnreachable, match="terminat"), explained(own):
                connection.execute(text("SELECT 1"))
        with explained(own), own.connect() as connection:
            assert connection.execute(text("SELECT 1")).scalar_one() == 1


def test_a_connection_that_died_in_the_pool_is_replaced(settings: Settings, database_url: str, engine: Engine) -> None:
    with opened(settings, database_url, pool_size=1) as own:
        with own.connect() as connection:
            pid = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
        with engine.begin() as other:
            other.execute(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": pid})
        with own.connect() as connection:
            assert connection.execute(text("SELECT pg_backend_pid()")).scalar_one() != pid


def test_a_pool_without_a_free_connection_names_the_setting(make_settings: MakeSettings, database_url: str) -> None:
    with (
        opened(make_settings(connect_timeout=1), database_url, pool_size=1) as engine,
        engine.connect(),
        pytest.raises(DatabaseUnreachable, match="raise OUTBOX_POOL_SIZE"),
        explained(engine),
    ):
        engine.connect()


def test_a_mistake_in_sql_keeps_its_own_error(engine: Engine) -> None:
    with pytest.raises(ProgrammingError), explained(engine), engine.connect() as connection:
        connection.execute(text("SELECT * FROM not_there"))


def test_a_server_that_is_too_old_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine.connect() as connection:
        check_server(connection)
        monkeypatch.setattr(connection.dialect, "server_version_info", (13, 9))
        with pytest.raises(DatabaseUnreachable, match=r"PostgreSQL 13\.9; version 14 or newer"):
            check_server(connection)
