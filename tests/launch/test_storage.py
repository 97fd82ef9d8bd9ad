"""PooledPostgresStorage on real PostgreSQL: how it opens, its sessions, losses of the server, forks, commands."""

import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster._check import CheckError
from dagster._core.definitions.data_version import DATA_VERSION_TAG
from dagster._core.events import EngineEventData, StepMaterializationData
from dagster._core.execution.plan.outputs import StepOutputData, StepOutputHandle
from dagster._core.test_utils import create_run_for_test
from dagster_postgres.utils import DagsterPostgresException
from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import OperationalError, ProgrammingError

from outbox_pipelines.database.embedded import EmbeddedServer
from outbox_pipelines.database.url import InvalidDatabaseUrl, dagster_storage_url, render
from outbox_pipelines.launch import pool as pool_module
from outbox_pipelines.launch import storage as storage_module
from outbox_pipelines.launch.pool import rolled_back
from outbox_pipelines.launch.storage import PooledPostgresStorage, events_together, is_pooled
from tests.launch.conftest import made_storage, wait_until

_numbers = count(1)
KNOWS_TOKENS = pytest.mark.skipif(
    find_spec("dagster_postgres.auth") is None, reason="this release of dagster-postgres knows no token providers"
)
NEVER = 3600
"""Seconds of idling that no test reaches."""


class Database:
    """A database with Dagster's tables, and what the server says of its sessions."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._engine = create_engine(dagster_storage_url(url), isolation_level="AUTOCOMMIT")
        self._opened: list[PooledPostgresStorage] = []

    def ask(self, statement: str, **values: Any) -> list[Any]:
        """The rows of a statement, on a session that no storage has."""
        with self._engine.connect() as connection:
            done = connection.execute(text(statement), values)
            return list(done) if done.returns_rows else []

    def named(self, name: str) -> str:
        """The URL for sessions that are called ``name``, and so for a pool of their own."""
        return render(make_url(self.url).update_query_dict({"application_name": name}))

    def open(self, name: str, **config: Any) -> PooledPostgresStorage:
        """A storage whose sessions are called ``name``."""
        config = {"ping_after_idle_seconds": NEVER, "should_autocreate_tables": False, **config}
        opened = PooledPostgresStorage({"postgres_url": self.named(name), **config})
        self._opened.append(opened)
        return opened

    def sessions(self, name: str) -> set[int]:
        """The process ids of the sessions that are called ``name``."""
        found = self.ask("SELECT pid FROM pg_stat_activity WHERE application_name = :name", name=name)
        return {row.pid for row in found}

    def end_sessions(self, name: str) -> None:
        """End these sessions on the server's side, and wait until they are gone."""
        self.ask("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = :name", name=name)
        wait_until(lambda: not self.sessions(name), "the sessions end")

    def close(self) -> None:
        """End the sessions of all storages that were opened here."""
        for opened in self._opened:
            engine_of(opened).dispose()
        self._engine.dispose()


@pytest.fixture(scope="module")
def database(server_url: str) -> Iterator[Database]:
    """One database for all tests that look at sessions."""
    with made_storage(server_url) as url:
        PooledPostgresStorage({"postgres_url": url})
        made = Database(url)
        yield made
        made.close()


@pytest.fixture
def name() -> str:
    """A name for the test's sessions."""
    return f"test_{os.getpid()}_{next(_numbers)}"


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dagster's attempts to connect follow each other at once."""
    monkeypatch.setattr("dagster_postgres.utils.calculate_delay", lambda *_, **__: 0)


def engine_of(opened: PooledPostgresStorage) -> Engine:
    """The engine of a storage, which its three parts share."""
    [engine] = {part._engine for part in parts(opened)}
    assert isinstance(engine, Engine)
    return engine


def parts(opened: PooledPostgresStorage) -> list[Any]:
    """The storages of runs, events and schedules."""
    return [opened.run_storage, opened.event_log_storage, opened.schedule_storage]


def pid(connection: Connection) -> int:
    """The server's process for a session."""
    found = connection.connection.driver_connection
    assert found is not None
    return int(found.info.backend_pid)


def use(opened: PooledPostgresStorage) -> int:
    """Use a storage once, and give the session that it took."""
    with opened.run_storage.connect() as connection:
        connection.execute(text("SELECT 'used'"))
        return pid(connection)


@contextmanager
def held(opened: PooledPostgresStorage, number: int) -> Iterator[list[Connection]]:
    """Hold that many sessions of the pool at the same time."""
    engine = engine_of(opened)
    with ExitStack() as stack:
        yield [stack.enter_context(engine.connect()) for _ in range(number)]


def from_yaml(folder: Path, config: Mapping[str, Any]) -> dg.DagsterInstance:
    """The instance of a dagster.yaml with our storage and this configuration of it."""
    storage = {"module": "outbox_pipelines.launch", "class": "PooledPostgresStorage", "config": dict(config)}
    no_logs = {"module": "dagster._core.storage.noop_compute_log_manager", "class": "NoOpComputeLogManager"}
    settings = {"storage": {"custom": storage}, "compute_logs": no_logs, "telemetry": {"enabled": False}}
    (folder / "dagster.yaml").write_text(yaml.safe_dump(settings))
    return dg.DagsterInstance.from_config(str(folder))


# How it opens


def as_postgres_db(url: str, **more: Any) -> dict[str, Any]:
    """The configuration ``postgres_db`` for a URL."""
    parsed = make_url(url)
    return {
        "username": parsed.username or "",
        "password": parsed.password or "not asked for",
        "hostname": parsed.host or "",
        "db_name": parsed.database,
        "port": parsed.port or 5432,
        "params": dict(parsed.query),
        **more,
    }


FORMS: dict[str, Callable[[str], dict[str, Any]]] = {
    "postgres_url": lambda url: {"postgres_url": url},
    "postgres_url from the environment": lambda _url: {"postgres_url": {"env": "STORAGE_URL"}},
    "postgres://": lambda url: {"postgres_url": url.replace("postgresql://", "postgres://")},
    "+psycopg": lambda url: {"postgres_url": url.replace("postgresql://", "postgresql+psycopg://")},
    "+psycopg2": lambda url: {"postgres_url": url.replace("postgresql://", "postgresql+psycopg2://")},
    "postgres_db": lambda url: {"postgres_db": as_postgres_db(url)},
    "postgres_db from the environment": lambda url: {"postgres_db": as_postgres_db(url, db_name={"env": "STORAGE_DB"})},
    "postgres_db with a scheme": lambda url: {"postgres_db": as_postgres_db(url, scheme="postgresql+psycopg")},
    "without making tables": lambda url: {"postgres_url": url, "should_autocreate_tables": False},
    "with a pool's settings": lambda url: {"postgres_url": url, "pool_size": 1, "pool_overflow": {"env": "OVERFLOW"}},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_dagster_postgres_configuration_opens_in_dagster_yaml(
    database: Database, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    url = database.named(name)
    monkeypatch.setenv("STORAGE_URL", url)
    monkeypatch.setenv("STORAGE_DB", str(make_url(url).database))
    monkeypatch.setenv("OVERFLOW", "1")

    with from_yaml(tmp_path, FORMS[form](url)) as instance:
        run = create_run_for_test(instance)
        assert instance.get_run_by_id(run.run_id) == run
        assert is_pooled(instance)
        assert instance.run_storage._engine.dialect.driver == "psycopg2"
        # The URL's parameters arrived, and every statement went through the one session.
        assert len(database.sessions(name)) == 1
        instance.run_storage._engine.dispose()


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({}, "exactly one of `postgres_url` or `postgres_db`"),
        ({"postgres_url": "postgresql://host/db", "postgres_db": {}}, "exactly one of `postgres_url` or `postgres_db`"),
        pytest.param(
            {"postgres_url": "postgresql://host/db", "auth_provider": {"gcp_wif": {}}},
            "auth_provider cannot be used",
            marks=KNOWS_TOKENS,
        ),
    ],
)
def test_a_configuration_that_dagster_postgres_refuses_is_refused_in_its_words(
    tmp_path: Path, config: dict[str, Any], complaint: str
) -> None:
    if "postgres_db" in config:
        config = {**config, "postgres_db": as_postgres_db("postgresql://user@host/db")}
    with pytest.raises(CheckError, match=complaint):
        from_yaml(tmp_path, config)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:S3CRET@host:port/db",
        "mysql://user:S3CRET@host/db",
        "postgresql://user:S3CRET@more@host/db",
        "postgresql://user:S3CRET@host",
        "user:S3CRET@host/db",
    ],
)
def test_an_invalid_url_is_refused_without_its_password(tmp_path: Path, url: str) -> None:
    with pytest.raises(InvalidDatabaseUrl, match=r"postgres_url in dagster\.yaml") as refused:
        from_yaml(tmp_path, {"postgres_url": url})
    assert "S3CRET" not in "".join(traceback.format_exception_only(refused.value))
    assert refused.value.__cause__ is None


def test_a_server_that_is_away_is_told_without_the_password(no_pauses: None) -> None:
    away = {"postgres_url": "postgresql://user:S3CRET@127.0.0.1:1/db?connect_timeout=2"}
    with pytest.raises(DagsterPostgresException) as told:
        PooledPostgresStorage(away)
    assert "S3CRET" not in "".join(traceback.format_exception(told.value))


@KNOWS_TOKENS
def test_a_token_provider_gives_the_password_of_every_session(
    database: Database, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = ModuleType("azure.identity")
    token = SimpleNamespace(token="t0ken", expires_on=time.time() + 10_000)
    identity.DefaultAzureCredential = lambda: SimpleNamespace(get_token=lambda _scope: token)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "azure", ModuleType("azure"))
    monkeypatch.setitem(sys.modules, "azure.identity", identity)

    config = {"postgres_db": as_postgres_db(database.named(name)), "auth_provider": {"azure_wif": {}}}
    with from_yaml(tmp_path, config) as instance:
        for part in (instance.run_storage, instance.event_log_storage, instance.schedule_storage):
            with part.connect() if hasattr(part, "connect") else part._connect() as connection:
                assert connection.connection.driver_connection.info.password == "t0ken"
        instance.run_storage._engine.dispose()


def test_settings_of_the_socket_in_the_url_win_over_ours(database: Database, name: str) -> None:
    url = render(make_url(database.named(name)).update_query_dict({"keepalives_idle": "7"}))
    opened = PooledPostgresStorage({"postgres_url": url, "should_autocreate_tables": False})
    with opened.run_storage.connect() as connection:
        used = connection.connection.driver_connection.info.dsn_parameters  # type: ignore[union-attr]
    engine_of(opened).dispose()
    assert (used["keepalives_idle"], used["keepalives_count"], used["tcp_user_timeout"]) == ("7", "3", "60000")


def test_tables_are_made_in_a_fresh_database_unless_told_not_to(server_url: str) -> None:
    with made_storage(server_url) as url:
        fresh = Database(url)

        def tables() -> set[str]:
            return {row.tablename for row in fresh.ask("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")}

        without = fresh.open("without")
        with pytest.raises(ProgrammingError, match="does not exist"):
            without.run_storage.get_run_ids()
        assert tables() == set()

        made = fresh.open("with", should_autocreate_tables=True)
        assert {"runs", "event_logs", "instigators", "kvs", "concurrency_slots"} <= tables()
        for part in parts(made):
            now, newest = part.alembic_version()
            assert now == newest
        fresh.close()


# Its sessions


def test_runs_events_and_schedules_share_one_session(database: Database, name: str) -> None:
    opened = database.open(name)
    opened.run_storage.get_run_ids()
    opened.event_log_storage.get_maximum_record_id()
    list(opened.schedule_storage.all_instigator_state())
    assert len(database.sessions(name)) == 1


def test_two_instances_of_a_process_share_sessions_and_two_databases_do_not(
    database: Database, server_url: str, name: str
) -> None:
    first, second = database.open(name), database.open(name)
    assert use(first) == use(second)
    assert engine_of(first) is engine_of(second)
    assert engine_of(first) is not engine_of(database.open(name, pool_size=1))
    with made_storage(server_url) as url:
        other = Database(url)
        assert engine_of(other.open(name)) is not engine_of(first)
        other.close()


def test_many_threads_never_have_more_sessions_than_the_pool_and_all_are_served(database: Database, name: str) -> None:
    opened = database.open(name, pool_size=2, pool_overflow=1)
    begin, ended = threading.Barrier(13), threading.Event()
    seen: list[int] = []

    def hammer(n: int) -> None:
        begin.wait()
        for turn in range(10):
            opened.run_storage.set_cursor_values({f"{name}-{n}-{turn}": "x"})
            opened.event_log_storage.get_maximum_record_id()

    def look() -> None:
        while not ended.is_set():
            seen.append(len(database.sessions(name)))

    threads = [threading.Thread(target=hammer, args=(n,)) for n in range(12)]
    looker = threading.Thread(target=look)
    for thread in (*threads, looker):
        thread.start()
    begin.wait()
    for thread in threads:
        thread.join()
    ended.set()
    looker.join()

    assert 1 <= max(seen) <= 3
    written = database.ask("SELECT count(*) FROM kvs WHERE key LIKE :prefix", prefix=f"{name}-%")
    assert written[0][0] == 120
    # Those beyond pool_size are closed after use.
    wait_until(lambda: len(database.sessions(name)) <= 2, "the overflow is closed")


def test_a_caller_beyond_the_pool_waits_and_is_served(database: Database, name: str) -> None:
    opened = database.open(name, pool_size=1, pool_overflow=1)
    served = threading.Event()

    def call() -> None:
        use(opened)
        served.set()

    with held(opened, 2):
        caller = threading.Thread(target=call)
        caller.start()
        assert not served.wait(0.3)
        assert len(database.sessions(name)) == 2
    caller.join()
    assert served.is_set()


def test_a_caller_that_waits_in_vain_gets_dagsters_error(database: Database, name: str, no_pauses: None) -> None:
    opened = database.open(name, pool_size=1, pool_overflow=0, pool_timeout_seconds=0)
    with held(opened, 1), ThreadPoolExecutor(1) as other:
        refused = other.submit(opened.run_storage.get_run_ids)
        with pytest.raises(DagsterPostgresException, match="too many retries"):
            refused.result()
    assert opened.run_storage.get_cursor_values({name}) == {}


def test_a_process_that_became_quiet_uses_one_session_only(database: Database, name: str) -> None:
    opened = database.open(name)
    with held(opened, 3):
        pass
    assert len({use(opened) for _ in range(6)}) == 1


def test_a_transaction_that_failed_leaves_nothing_to_the_next_user_of_its_session(
    database: Database, name: str
) -> None:
    opened = database.open(name, pool_size=1, pool_overflow=0)
    with suppress(ZeroDivisionError), opened.event_log_storage.index_transaction() as connection:
        connection.execute(text("INSERT INTO kvs (key, value) VALUES (:key, 'x')"), {"key": f"{name} undone"})
        session = pid(connection)
        _ = 1 / 0
    with opened.event_log_storage.index_transaction() as connection:
        connection.execute(text("INSERT INTO kvs (key, value) VALUES (:key, 'x')"), {"key": f"{name} kept"})
    opened.run_storage.set_cursor_values({f"{name} plain": "x"})

    found = database.ask("SELECT key FROM kvs WHERE key LIKE :prefix ORDER BY key", prefix=f"{name} %")
    assert [row.key for row in found] == [f"{name} kept", f"{name} plain"]
    assert database.ask("SELECT state FROM pg_stat_activity WHERE pid = :pid", pid=session) == [("idle",)]


def last_statement(database: Database, session: int) -> str:
    """What the server was told last on this session."""
    [row] = database.ask("SELECT query FROM pg_stat_activity WHERE pid = :pid", pid=session)
    return str(row.query)


def test_a_busy_session_is_not_pinged(database: Database, name: str) -> None:
    opened = database.open(name)
    use(opened)
    with opened.run_storage.connect() as connection:
        assert "used" in last_statement(database, pid(connection))


def test_a_session_that_idled_is_pinged_and_kept(database: Database, name: str) -> None:
    opened = database.open(name, ping_after_idle_seconds=1)
    session = use(opened)
    time.sleep(1.1)
    with opened.run_storage.connect() as connection:
        assert pid(connection) == session
        assert "used" not in last_statement(database, session)


def materialized(asset: str, run_id: str, partition: str | None = None) -> dg.EventLogEntry:
    """The event of an asset that was materialized, for which Dagster begins a transaction of its own."""
    tags = {DATA_VERSION_TAG: "v1"}
    data = StepMaterializationData(dg.AssetMaterialization(asset, partition=partition, tags=tags))
    happened = dg.DagsterEvent("ASSET_MATERIALIZATION", "job", event_specific_data=data)
    return dg.EventLogEntry(None, 20, "", run_id, time.time(), dagster_event=happened)


def test_threads_that_need_a_second_session_while_they_hold_one_do_not_wait_for_each_other(
    database: Database, name: str
) -> None:
    opened = database.open(name, pool_size=2, pool_overflow=0, pool_timeout_seconds=0)
    both_hold = threading.Barrier(2)

    def nested() -> dict[str, str]:
        with opened.run_storage.connect():
            both_hold.wait()
            return dict(opened.run_storage.get_cursor_values({"none"}))

    with ThreadPoolExecutor(2) as threads:
        assert [call.result() for call in [threads.submit(nested) for _ in range(2)]] == [{}, {}]
    wait_until(lambda: len(database.sessions(name)) == 2, "the second sessions are closed after use")
    # A thread that gave its connection back is one of the pool's callers again.
    assert use(opened) in database.sessions(name)


def test_asset_events_with_tags_go_through_a_pool_of_one_and_look_beside_it_for_the_first_only(
    database: Database, name: str
) -> None:
    opened = database.open(name, pool_size=1, pool_overflow=0, pool_timeout_seconds=0)
    events, orders = opened.event_log_storage, dg.AssetKey(name)
    beside: list[Any] = []
    event.listen(events._unpooled, "connect", lambda made, _record: beside.append(made))
    events.store_event(materialized(name, name, "p1"))
    looks = len(beside)
    for partition in ("p2", "p3"):
        events.store_event(materialized(name, name, partition))
    assert len(beside) == looks
    assert events.get_materialized_partitions(orders) == {"p1", "p2", "p3"}
    assert len(events.get_event_tags_for_asset(orders)) == 3


def test_a_pool_of_size_0_keeps_no_session(database: Database, name: str) -> None:
    opened = database.open(name, pool_size=0)
    use(opened)
    opened.event_log_storage.store_event(materialized(name, name))
    wait_until(lambda: not database.sessions(name), "all sessions are closed")


# Losses


@pytest.fixture
def no_complaint(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing is logged as a retry or an error."""
    yield
    assert [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


def test_sessions_that_the_server_ended_are_replaced_without_an_error(
    database: Database, name: str, no_complaint: None
) -> None:
    opened = database.open(name)
    with held(opened, 3):
        before = database.sessions(name)
    database.end_sessions(name)
    with held(opened, 3) as connections:
        for connection in connections:
            connection.execute(text("SELECT 1"))
        assert len(database.sessions(name)) == 3
    assert not before & database.sessions(name)


def test_a_loss_that_the_socket_does_not_tell_is_found_by_the_ping(
    database: Database, name: str, no_complaint: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_has_something_to_read", lambda _connection: False)
    opened = database.open(name, ping_after_idle_seconds=0)
    with held(opened, 3):
        pass
    database.end_sessions(name)
    opened.run_storage.get_run_ids()
    assert len(database.sessions(name)) == 1


def test_when_one_session_is_found_dead_those_that_idled_beside_it_are_replaced_too(
    database: Database, name: str, no_complaint: None
) -> None:
    opened = database.open(name)
    with held(opened, 2) as connections:
        # The one that is returned last is used next.
        kept, ended = pid(connections[1]), pid(connections[0])
    assert use(opened) == ended
    database.ask("SELECT pg_terminate_backend(:pid)", pid=ended)
    wait_until(lambda: ended not in database.sessions(name), "the session ends")
    with held(opened, 2) as connections:
        assert not {kept, ended} & {pid(connection) for connection in connections}


def test_a_session_that_was_closed_on_this_side_is_replaced(database: Database, name: str, no_complaint: None) -> None:
    opened = database.open(name)
    with opened.run_storage.connect() as connection:
        ours = connection.connection.driver_connection
    assert ours is not None
    ours.close()
    opened.run_storage.get_run_ids()


def test_a_restart_of_the_server_is_noticed_without_an_error(
    tmp_path_factory: pytest.TempPathFactory, no_complaint: None
) -> None:
    with EmbeddedServer(tmp_path_factory.mktemp("server") / "postgres", options={"fsync": "off"}) as server:
        opened = PooledPostgresStorage(
            {"postgres_url": render(server.url("postgres")), "ping_after_idle_seconds": NEVER}
        )
        opened.run_storage.set_cursor_values({"a": "before"})
        with held(opened, 3):
            pass
        server.restart()
        assert opened.run_storage.get_cursor_values({"a"}) == {"a": "before"}
        with held(opened, 3) as connections:
            for connection in connections:
                connection.execute(text("SELECT 1"))
        engine_of(opened).dispose()


# Forks


FORKING = """
import json, os, signal, sys, threading
from sqlalchemy import create_engine, text
from outbox_pipelines.launch import pool
from outbox_pipelines.launch.storage import PooledPostgresStorage
from outbox_pipelines.database.url import dagster_storage_url

opened = PooledPostgresStorage({"postgres_url": sys.argv[1], "should_autocreate_tables": False})
said = {}

def pid(connection):
    return connection.connection.driver_connection.info.backend_pid

def use(parts=opened):
    with parts.run_storage.connect() as connection:
        connection.execute(text("SELECT 1"))
        return pid(connection)

def fork(act):
    # What act says in a child, which ends as a process of Python does.
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # One that hangs does not stay behind.
        signal.alarm(60)
        os.close(reading)
        with os.fdopen(writing, "w") as out:
            json.dump(act(), out)
        sys.exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        told = json.load(answer)
    assert os.waitpid(child, 0)[1] == 0
    return told

def still_open(pids):
    engine = create_engine(dagster_storage_url(sys.argv[2]))
    with engine.connect() as connection:
        found = connection.execute(text("SELECT pid FROM pg_stat_activity WHERE pid = ANY(:pids)"), {"pids": pids})
        found = sorted(found.scalars())
    engine.dispose()
    return found == sorted(pids)
"""


def forking(database: Database, name: str, code: str) -> dict[str, Any]:
    """Run code in a process of its own, with the names of FORKING; gives what it put into ``said``."""
    script = f"{FORKING}\n{code}\nprint(json.dumps(said))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, database.named(name), database.url],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_a_fork_and_its_fork_have_sessions_of_their_own_and_leave_the_parents_alone(
    database: Database, name: str
) -> None:
    said = forking(
        database,
        name,
        """
said["parent"] = use()
said["child"], said["grandchild"], said["child after"] = fork(lambda: [use(), fork(use), use()])
said["kept"] = still_open([said["parent"]])
said["parent after"] = use()
""",
    )
    assert len({said["parent"], said["child"], said["grandchild"]}) == 3
    assert said["child after"] == said["child"]
    assert said["kept"]
    assert said["parent after"] == said["parent"]


def test_a_fork_while_other_threads_are_at_work_does_not_touch_their_sessions(database: Database, name: str) -> None:
    said = forking(
        database,
        name,
        """
holds, go_on = threading.Semaphore(0), threading.Event()
held = []

def work(n):
    # In the middle of a transaction.
    with opened.event_log_storage.index_transaction() as connection:
        connection.execute(text("INSERT INTO kvs (key, value) VALUES (:key, 'x')"), {"key": f"{sys.argv[1][-20:]} {n}"})
        held.append(pid(connection))
        holds.release()
        go_on.wait()

def lock():
    # As a thread does that makes an engine at this moment.
    with pool._lock:
        holds.release()
        go_on.wait()

def child():
    other = PooledPostgresStorage({"postgres_url": sys.argv[1], "pool_size": 1, "should_autocreate_tables": False})
    return [use(), use(other)]

threads = [threading.Thread(target=work, args=(n,)) for n in range(2)] + [threading.Thread(target=lock)]
for thread in threads:
    thread.start()
for _ in threads:
    holds.acquire()
said["child"] = fork(child)
said["held"] = held
said["kept"] = still_open(held)
go_on.set()
for thread in threads:
    thread.join()
said["written"] = len(opened.run_storage.get_cursor_values({f"{sys.argv[1][-20:]} {n}" for n in range(2)}))
""",
    )
    assert len(set(said["child"]) | set(said["held"])) == 4
    assert said["kept"]
    assert said["written"] == 2


def test_processes_that_open_a_fresh_database_at_once_all_find_its_tables(server_url: str, name: str) -> None:
    with made_storage(server_url) as url:
        fresh = Database(url)
        forking(
            fresh,
            name,
            """
waiting, begin = os.pipe()

def child():
    signal.alarm(60)
    os.close(begin)
    os.read(waiting, 1)
    mine = PooledPostgresStorage({"postgres_url": sys.argv[1]})
    mine.run_storage.set_cursor_values({str(os.getpid()): "seen"})
    mine.run_storage.get_daemon_heartbeats()
    mine.event_log_storage.get_concurrency_keys()
    list(mine.schedule_storage.all_instigator_state())

children = []
for _ in range(5):
    children.append(os.fork())
    if children[-1] == 0:
        child()
        sys.exit(0)
# All begin when nobody can write any more.
os.close(begin)
said["ends"] = [os.waitpid(one, 0)[1] for one in children]
assert said["ends"] == [0] * 5
""",
        )
        assert len(fresh.ask("SELECT * FROM alembic_version")) == 1
        assert len(fresh.ask("SELECT * FROM kvs")) == 5
        fresh.close()


# Commands


def dagster(home: Path, *arguments: str) -> str:
    """What Dagster's command says."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "dagster", *arguments],
        env={**os.environ, "DAGSTER_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_dagster_instance_info_and_migrate_work_on_an_older_schema(server_url: str, tmp_path: Path) -> None:
    with made_storage(server_url) as url:
        with from_yaml(tmp_path, {"postgres_url": url}) as instance:
            newest = instance.run_storage.alembic_version()[1]
            instance.run_storage._engine.dispose()
        older = Database(url)
        # As it was two revisions ago, before an index and this column.
        older.ask("UPDATE alembic_version SET version_num = '16e3655b4d9b'")
        older.ask("ALTER TABLE concurrency_limits DROP COLUMN using_default_limit")
        assert older.ask("SELECT 1 FROM pg_indexes WHERE indexname = 'idx_run_tags_run_id'") == []

        assert dagster(tmp_path, "instance", "info").count("current: 16e3655b4d9b") == 3
        dagster(tmp_path, "instance", "migrate")

        assert [row.version_num for row in older.ask("SELECT version_num FROM alembic_version")] == [newest]
        assert older.ask("SELECT 1 FROM pg_indexes WHERE indexname = 'idx_run_tags_run_id'") == [(1,)]
        assert older.ask("SELECT using_default_limit FROM concurrency_limits") == []
        older.close()


# The webserver


def webserver(opened: PooledPostgresStorage, *, timeout: int = 10_000, recycle: int = -1, overflow: int = 5) -> None:
    """What dagster-webserver does with each storage."""
    for part in parts(opened):
        part.optimize_for_webserver(statement_timeout=timeout, pool_recycle=recycle, max_overflow=overflow)


def test_the_webservers_timeout_applies_to_the_one_pool_that_the_storages_still_share(
    database: Database, name: str
) -> None:
    opened = database.open(name)
    before = use(opened)
    webserver(opened, timeout=50)
    for part in parts(opened):
        with part._connect() if hasattr(part, "_connect") else part.connect() as connection:
            with pytest.raises(OperationalError, match="statement timeout"):
                connection.execute(text("SELECT pg_sleep(60)"))
            session = pid(connection)
    # Of the pool before, no session is left.
    wait_until(lambda: database.sessions(name) == {session}, "one session is left")
    assert session != before
    assert engine_of(opened) is engine_of(opened)


@pytest.mark.parametrize(("timeout", "shown"), [(0, "0"), (1500, "1500ms")])
def test_the_webservers_timeout_wins_over_options_in_the_url_which_stay(
    database: Database, name: str, timeout: int, shown: str
) -> None:
    options = "-c statement_timeout=7000 -c work_mem=5MB"
    url = render(make_url(database.named(name)).update_query_dict({"options": options}))
    opened = PooledPostgresStorage({"postgres_url": url, "should_autocreate_tables": False})
    webserver(opened, timeout=timeout)
    with opened.run_storage.connect() as connection:
        values = [connection.scalar(text(f"SHOW {setting}")) for setting in ("statement_timeout", "work_mem")]
    engine_of(opened).dispose()
    assert values == [shown, "5MB"]


def test_the_webservers_limits_on_age_and_number_apply(database: Database, name: str) -> None:
    opened = database.open(name, pool_size=1, pool_overflow=0)
    webserver(opened, recycle=0, overflow=1)
    assert use(opened) != use(opened)
    with held(opened, 2):
        assert len(database.sessions(name)) == 2


# What is undone


def rows(database: Database) -> Counter[str]:
    """The number of rows of each of Dagster's tables."""
    tables = database.ask("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    return Counter({row.tablename: database.ask(f'SELECT count(*) FROM "{row.tablename}"')[0][0] for row in tables})


def test_what_is_written_inside_rolled_back_is_seen_there_and_nowhere_else(database: Database, name: str) -> None:
    opened = database.open(name)
    use(opened)
    before = rows(database)
    with rolled_back():
        opened.run_storage.set_cursor_values({"first": "x"})
        opened.run_storage.add_run(dg.DagsterRun("job", run_id=name, tags={"a": "b"}))
        opened.event_log_storage.store_event(materialized("undone", name))
        opened.event_log_storage.set_concurrency_slots("undone", 2)
        opened.run_storage.set_cursor_values({"last": "x"})
        assert opened.run_storage.get_cursor_values({"first", "last"}) == {"first": "x", "last": "x"}
        assert opened.event_log_storage.has_asset_key(dg.AssetKey("undone"))
        assert rows(database) == before
    assert rows(database) == before

    opened.run_storage.set_cursor_values({f"{name} after": "x"})
    opened.event_log_storage.store_event(materialized(f"{name} after", name))
    assert database.ask("SELECT value FROM kvs WHERE key = :key", key=f"{name} after") == [("x",)]
    assert sum((rows(database) - before).values()) >= 3


def test_an_error_inside_rolled_back_undoes_as_well(database: Database, name: str) -> None:
    opened = database.open(name)
    with suppress(ZeroDivisionError), rolled_back():
        opened.run_storage.set_cursor_values({f"{name} inside": "x"})
        with opened.event_log_storage.index_transaction() as connection:
            connection.execute(text("SELECT 1"))
            _ = 1 / 0
    opened.run_storage.set_cursor_values({f"{name} after": "x"})
    found = database.ask("SELECT key FROM kvs WHERE key LIKE :prefix", prefix=f"{name} %")
    assert [row.key for row in found] == [f"{name} after"]


def test_a_whole_run_inside_rolled_back_leaves_no_row(database: Database, name: str, tmp_path: Path) -> None:
    @dg.asset
    def undone() -> None: ...

    with from_yaml(tmp_path, {"postgres_url": database.named(name)}) as instance:
        before = rows(database)
        with rolled_back():
            assert dg.materialize([undone], instance=instance).success
            assert instance.get_runs_count() >= 1
        assert rows(database) == before
        instance.run_storage._engine.dispose()


# Events that wait for the next one


def an_event(run_id: str, kind: dg.DagsterEventType, message: str) -> dg.EventLogEntry:
    """An event as Dagster logs it."""
    data: Any = EngineEventData() if kind in ENGINE_EVENTS else None
    if kind is dg.DagsterEventType.STEP_OUTPUT:
        data = StepOutputData(StepOutputHandle("step", "result"))
    told = dg.DagsterEvent(kind.value, "job", message=message, event_specific_data=data)
    return dg.EventLogEntry(None, 10, "", run_id, time.time(), dagster_event=told)


ENGINE_EVENTS = {dg.DagsterEventType.ENGINE_EVENT, dg.DagsterEventType.RESOURCE_INIT_SUCCESS}
EXECUTING = (dg.DagsterEventType.ENGINE_EVENT, "Executing steps in process (pid: 1)")
READY = (dg.DagsterEventType.RESOURCE_INIT_SUCCESS, "Finished initialization of resources [io_manager].")
START = (dg.DagsterEventType.STEP_START, "Started execution of step.")
NOTHING = (dg.DagsterEventType.STEP_OUTPUT, 'Yielded output "result" of type "Nothing". (Type check passed).')
OUTPUT = (dg.DagsterEventType.STEP_OUTPUT, 'Yielded output "result" of type "Any". (Type check passed).')
OTHER = (dg.DagsterEventType.ENGINE_EVENT, "Launching subprocess for step.")


def stored(database: Database, run_id: str) -> list[str]:
    """The messages that others find in the run's log, in its order."""
    rows = database.ask("SELECT event FROM event_logs WHERE run_id = :run ORDER BY id", run=run_id)
    return [json.loads(row.event)["dagster_event"]["message"] for row in rows]


def test_an_event_that_is_followed_at_once_is_stored_with_the_next_one_in_their_order(
    database: Database, name: str
) -> None:
    events = database.open(name).event_log_storage
    with events_together():
        for kind, message in (EXECUTING, READY):
            events.store_event(an_event(name, kind, message))
        assert stored(database, name) == []
        events.store_event(an_event(name, *START))
        assert stored(database, name) == [EXECUTING[1], READY[1], START[1]]
        events.store_event(an_event(name, *NOTHING))
    assert stored(database, name)[3:] == []
    events.store_event(an_event(name, *OTHER))
    assert stored(database, name)[3:] == [NOTHING[1], OTHER[1]]


@pytest.mark.parametrize("told", [OUTPUT, OTHER, START], ids=["an output", "another executor", "a step's begin"])
def test_an_event_that_may_be_the_last_for_long_does_not_wait(
    database: Database, name: str, told: tuple[dg.DagsterEventType, str]
) -> None:
    events = database.open(name).event_log_storage
    with events_together():
        events.store_event(an_event(name, *told))
        assert stored(database, name) == [told[1]]


def test_outside_of_a_run_no_event_waits(database: Database, name: str) -> None:
    events = database.open(name).event_log_storage
    events.store_event(an_event(name, *EXECUTING))
    assert stored(database, name) == [EXECUTING[1]]


def test_who_asks_the_storage_itself_finds_what_waited(database: Database, name: str) -> None:
    events = database.open(name).event_log_storage
    with events_together():
        events.store_event(an_event(name, *EXECUTING))
        assert [entry.message for entry in events.get_logs_for_run(name)] == [EXECUTING[1]]


def test_an_event_about_an_asset_comes_after_what_waited(database: Database, name: str) -> None:
    events = database.open(name).event_log_storage
    with events_together():
        events.store_event(an_event(name, *EXECUTING))
        events.store_event(materialized(name, name))
    rows = database.ask("SELECT dagster_event_type AS type FROM event_logs WHERE run_id = :run ORDER BY id", run=name)
    assert [row.type for row in rows] == ["ENGINE_EVENT", "ASSET_MATERIALIZATION"]


def test_what_waits_is_told_by_the_process_that_heard_it_and_by_none_of_its_forks(
    database: Database, name: str
) -> None:
    events = database.open(name).event_log_storage
    with events_together():
        events.store_event(an_event(name, *EXECUTING))
        child = os.fork()
        if not child:
            with suppress(BaseException):
                events.store_event(an_event(name, *OTHER))
            os._exit(0)
        os.waitpid(child, 0)
        events.store_event(an_event(name, *START))
    assert stored(database, name) == [OTHER[1], EXECUTING[1], START[1]]


def test_what_waited_is_not_lost_when_the_storage_is_away_for_a_moment(
    database: Database, name: str, no_pauses: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = database.open(name).event_log_storage
    with events_together():
        events.store_event(an_event(name, *EXECUTING))
        with monkeypatch.context() as patch:
            nowhere = create_engine("postgresql+psycopg2://127.0.0.1:1/nothing")
            patch.setattr(storage_module._Pooled, "_engine", property(lambda _self: nowhere))
            with pytest.raises(DagsterPostgresException):
                events.store_event(an_event(name, *START))
        events.store_event(an_event(name, *OTHER))
    assert stored(database, name) == [EXECUTING[1], OTHER[1]]
