"""Behind a pooler that lends one connection to everybody, no tenant ever meets another's rows."""

import json
import os
import pwd
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import grpc
import pytest
from sqlalchemy import Engine, make_url, text
from sqlalchemy.exc import DBAPIError

from outbox_pipelines.database.engine import explained, open_engine
from outbox_pipelines.database.migrate import migrate, require_migrated
from outbox_pipelines.database.quoting import driver_identifier
from outbox_pipelines.database.url import render
from outbox_pipelines.lease.heartbeat import Heartbeat
from outbox_pipelines.ml_service import training_pb2
from outbox_pipelines.settings import Pooler, Settings, load_settings
from outbox_pipelines.tenants.registry import Tenant, remove_tenant
from outbox_pipelines.training import outbox
from outbox_pipelines.training.backlog import Standing, count_waiting, look
from outbox_pipelines.training.enqueue import copy_training, enqueue_training
from outbox_pipelines.training.grpc_sink import GrpcSink
from outbox_pipelines.training.outcome import Ending
from outbox_pipelines.training.sink import Batch, Verdict
from tests.outboxes import enqueue, flush, ledger_ids, new_tenant, status, wait_until, waiting_ids
from tests.scripted_service import ScriptedService, accept

PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

NO_PGBOUNCER = "the program pgbouncer (Debian package pgbouncer) is not installed"

needs_pgbouncer = pytest.mark.skipif(PGBOUNCER is None, reason=NO_PGBOUNCER)

CONFIGURATION = """
[databases]
* = {target}

[pgbouncer]
pool_mode = transaction
default_pool_size = 1
max_client_conn = 200
listen_port = 6432
unix_socket_dir = {folder}
auth_type = any
logfile = {folder}/pgbouncer.log
"""


@pytest.fixture(scope="module")
def pooler(server_url: str) -> Iterator[Path]:
    """The socket folder of a PgBouncer in front of the test server: one connection for each database."""
    assert PGBOUNCER is not None
    folder = Path(tempfile.mkdtemp(prefix="outbox-pooler-", dir="/tmp"))
    configuration = folder / "pgbouncer.ini"
    configuration.write_text(CONFIGURATION.format(target=_target(server_url), folder=folder))
    account = _account(server_url)
    if account is not None:
        for path in (folder, configuration):
            os.chown(path, account.pw_uid, account.pw_gid)
    process = subprocess.Popen(
        [PGBOUNCER, "-q", configuration],
        user=account.pw_uid if account else None,
        group=account.pw_gid if account else None,
        extra_groups=[] if account else None,
    )
    try:
        wait_until(lambda: (folder / ".s.PGSQL.6432").exists() or process.poll() is not None)
        assert process.poll() is None, (folder / "pgbouncer.log").read_text()
        yield folder
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(folder)


def _target(server_url: str) -> str:
    """The server in PgBouncer's words."""
    url = make_url(server_url)
    host = url.host or str(url.query["host"])
    parts = {"host": host, "port": url.port or 5432, "user": url.username, "password": url.password}
    return " ".join(f"{key}={value}" for key, value in parts.items() if value)


def _account(server_url: str) -> pwd.struct_passwd | None:
    """Who runs PgBouncer when we are root: the server's account, to whom its socket is open."""
    if os.geteuid() != 0:
        return None
    sockets = make_url(server_url).query.get("host")
    return pwd.getpwuid(Path(str(sockets)).stat().st_uid) if sockets else pwd.getpwnam("nobody")


def through(pooler: Path, database_url: str) -> str:
    """The way to a database through the pooler."""
    url = make_url(database_url).set(host=None, port=None, query={"host": str(pooler), "port": "6432"})
    return render(url)


class Narrow:
    """A way to the database on which every transaction runs on the connection of the one before it."""

    def __init__(self, settings: Settings, pool_size: int) -> None:
        self.settings = settings
        self._pool_size = pool_size
        self.engine = self.open()

    def open(self) -> Engine:
        """An engine, as each process has one."""
        assert self.settings.database_url is not None
        url = self.settings.database_url.get_secret_value()
        return open_engine(self.settings, url, application_name="narrow", pool_size=self._pool_size)


@pytest.fixture(params=["pgbouncer", "pool of one"])
def narrow(request: pytest.FixtureRequest, database_url: str, service: ScriptedService) -> Iterator[Narrow]:
    """PgBouncer with one connection for all, or a pool of one connection for each process."""
    if request.param == "pool of one":
        narrow = Narrow(load_settings(database_url=database_url, ml_target=service.target, pool_size=2), pool_size=1)
    elif PGBOUNCER is None:
        pytest.skip(NO_PGBOUNCER)
    else:
        url = through(request.getfixturevalue("pooler"), database_url)
        settings = load_settings(database_url=url, ml_target=service.target, database_pooler=Pooler.TRANSACTION)
        narrow = Narrow(settings, pool_size=settings.pool_size)
    yield narrow
    narrow.engine.dispose()


class Strangers:
    """Lets the service look into every row that it is sent, and remembers rows that came under a foreign name."""

    def __init__(self, service: ScriptedService) -> None:
        self.found: list[tuple[str, str]] = []
        service.answer = self._answer

    def _answer(
        self, request: training_pb2.TrainBatchRequest, context: grpc.ServicerContext
    ) -> training_pb2.TrainBatchResponse:
        for row in request.examples:
            if json.loads(row.json)["owner"] != request.tenant:
                self.found.append((request.tenant, row.json))
        return accept(request, context)


class FailingSink(GrpcSink):
    """Delivers so many batches and then breaks, as a user's sink may."""

    def __init__(self, settings: Settings, *, after: int) -> None:
        super().__init__(settings)
        self._left = after

    def send(self, batch: Batch) -> Verdict:
        self._left -= 1
        if self._left < 0:
            raise ZeroDivisionError("a user's mistake")
        return super().send(batch)


def own_rows(tenant: Tenant, count: int) -> list[dict[str, object]]:
    """Rows that say whose they are."""
    return [{"owner": str(tenant.tenant_id), "n": number} for number in range(count)]


def test_all_clients_share_one_server_connection(narrow: Narrow, engine: Engine) -> None:
    def backend() -> int:
        with narrow.engine.begin() as connection:
            return int(connection.execute(text("SELECT pg_backend_pid()")).scalar_one())

    with ThreadPoolExecutor(8) as threads:
        pids = {asked.result() for asked in [threads.submit(backend) for _ in range(32)]}
    assert len(pids) == 1


def test_two_tenants_in_turn_with_a_failure_between_meet_no_foreign_row(
    narrow: Narrow, engine: Engine, service: ScriptedService
) -> None:
    strangers = Strangers(service)
    first, second = new_tenant(narrow.engine, "first"), new_tenant(narrow.engine, "second")
    for tenant in (first, second):
        enqueue(narrow.engine, tenant, own_rows(tenant, 35))
    report = flush(narrow.engine, narrow.settings, first, sink=FailingSink(narrow.settings, after=2))
    assert report.tenants[0].ending is Ending.FAILED
    assert waiting_ids(engine, first) == list(range(21, 36))
    assert waiting_ids(engine, second) == list(range(1, 36))
    flush(narrow.engine, narrow.settings, second)
    assert waiting_ids(engine, second) == []
    assert waiting_ids(engine, first) == list(range(21, 36))
    flush(narrow.engine, narrow.settings, first)
    for tenant in (first, second):
        assert waiting_ids(engine, tenant) == []
        assert service.ids(tenant.tenant_id) == ledger_ids(engine, tenant) == list(range(1, 36))
    assert strangers.found == []


def test_a_transaction_that_failed_leaves_nothing_for_the_next_tenant(
    narrow: Narrow, engine: Engine, service: ScriptedService
) -> None:
    strangers = Strangers(service)
    gone, there = new_tenant(narrow.engine, "gone"), new_tenant(narrow.engine, "there")
    enqueue(narrow.engine, there, own_rows(there, 5))
    with narrow.engine.begin() as connection:
        connection.exec_driver_sql(f"DROP SCHEMA {driver_identifier(gone.schema)} CASCADE")
    with pytest.raises(DBAPIError):
        enqueue(narrow.engine, gone, own_rows(gone, 1))
    assert [entry.ending for entry in flush(narrow.engine, narrow.settings, gone, there).tenants] == [
        Ending.FAILED,
        Ending.EMPTIED,
    ]
    assert waiting_ids(engine, there) == []
    assert strangers.found == []


def test_interleaved_flushes_looks_and_enqueues_meet_no_foreign_row_and_lose_none(
    narrow: Narrow, engine: Engine, service: ScriptedService
) -> None:
    strangers = Strangers(service)
    tenants = [new_tenant(narrow.engine, f"tenant {number}") for number in range(6)]
    together = threading.Barrier(4)

    def flush_some(chosen: list[Tenant], run_id: str) -> None:
        engine = narrow.open()
        together.wait(30)
        for _ in range(3):
            assert flush(engine, narrow.settings, *chosen, run_id=run_id).failed == []
        engine.dispose()

    def enqueue_some() -> None:
        together.wait(30)
        for _ in range(4):
            for tenant in tenants:
                enqueue(narrow.engine, tenant, own_rows(tenant, 10))
            look(narrow.engine)

    with ThreadPoolExecutor(4) as threads:
        # Some tenants are wanted by two runs at once, some by one.
        works = [threads.submit(flush_some, tenants[begin : begin + 3], f"run {begin}") for begin in (0, 2, 3)]
        works.append(threads.submit(enqueue_some))
        for work in works:
            work.result()
    flush(narrow.engine, narrow.settings, *tenants)
    assert strangers.found == []
    for tenant in tenants:
        assert waiting_ids(engine, tenant) == []
        assert ledger_ids(engine, tenant) == list(range(1, 41))
        assert sorted(service.ids(tenant.tenant_id)) == list(range(1, 41))
        assert status(engine, tenant).lease_holder is None


def test_a_tenants_whole_life_goes_through(narrow: Narrow, engine: Engine, service: ScriptedService) -> None:
    tenant, other = new_tenant(narrow.engine, schema='tenant_x"y%'), new_tenant(narrow.engine, "other", rows=1)
    with narrow.engine.begin() as connection:
        assert enqueue_training(connection, "acme", [{"n": 1}]) == [1]
        assert copy_training(connection, tenant, [{"n": 2}]) == 1
    with narrow.engine.connect() as connection:
        enqueue_training(connection, tenant, [{"n": 3}])
        connection.rollback()
    backlog = look(narrow.engine)
    assert [entry.standing for entry in backlog.tenants] == [Standing.DUE, Standing.DUE]
    assert str(count_waiting(narrow.engine, backlog.waiting)) == "3 rows of 2 tenants"
    flush(narrow.engine, narrow.settings, tenant, other)
    with narrow.engine.begin() as connection:
        remove_tenant(connection, "acme", drop_schema=True)
    assert [entry.tenant.name for entry in look(narrow.engine).tenants] == ["other"]
    assert ledger_ids(engine, tenant) == [1, 2]


@needs_pgbouncer
def test_migrations_go_through_also_several_at_once(pooler: Path, empty_database_url: str) -> None:
    settings = load_settings(database_pooler=Pooler.TRANSACTION)
    engine = open_engine(settings, through(pooler, empty_database_url), application_name="tests")
    with ThreadPoolExecutor(3) as threads:
        assert sorted(done.result() for done in [threads.submit(migrate, engine) for _ in range(3)]) == [0, 0, 1]
    require_migrated(engine)
    new_tenant(engine, schema='tenant_x"y%')
    assert migrate(engine) == 0
    engine.dispose()


@needs_pgbouncer
def test_nothing_of_a_transaction_stays_in_the_lent_connection(pooler: Path, engine: Engine, database_url: str) -> None:
    settings = load_settings(database_pooler=Pooler.TRANSACTION, statement_timeout=7, lock_timeout=3)
    first, second = (
        open_engine(settings, through(pooler, database_url), application_name=name) for name in ("first", "second")
    )
    tenant = new_tenant(first)
    asked = text("""
        SELECT current_setting('search_path'), current_setting('statement_timeout'),
               (SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'),
               (SELECT count(*) FROM pg_prepared_statements)
    """)
    for _ in range(10):
        with first.begin() as connection:
            outbox.count_rows(connection, tenant)
    # The plain connection of another client: PgBouncer gives it what the last one used.
    with explained(second), second.connect() as connection:
        driver = connection.connection.driver_connection
        assert driver is not None
        driver.autocommit = True
        path, timeout, locks, prepared = driver.execute(str(asked)).fetchone()
        driver.autocommit = False
    assert (path, timeout != "7s", locks, prepared) == ('"$user", public', True, 0, 0)
    for opened in (first, second):
        opened.dispose()


@needs_pgbouncer
def test_a_lease_is_claimed_and_kept_alive_through_it(pooler: Path, engine: Engine, database_url: str) -> None:
    settings = load_settings(database_pooler=Pooler.TRANSACTION)
    behind = open_engine(settings, through(pooler, database_url), application_name="tests")
    tenant = new_tenant(behind)
    with behind.begin() as connection:
        claimed = outbox.claim_tenant(connection, tenant, holder="run", seconds=60, token=uuid4())
    assert isinstance(claimed, outbox.ClaimedTenant)
    lost: list[str] = []
    heartbeat = Heartbeat(behind, lease_seconds=60)
    heartbeat.hold(claimed.lease, lambda: lost.append("lost"), asked_at=time.monotonic() - 3600)
    assert not heartbeat.is_sure(claimed.lease)
    heartbeat.beat()
    assert heartbeat.is_sure(claimed.lease)
    assert lost == []
    behind.dispose()
