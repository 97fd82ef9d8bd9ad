"""One look at many tenants: one that is locked, unreadable or incomplete hides nobody else's rows."""

import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from sqlalchemy import Engine, event

from outbox_pipelines.database.embedded import EmbeddedServer
from outbox_pipelines.database.engine import open_engine
from outbox_pipelines.database.migrate import migrate
from outbox_pipelines.database.quoting import driver_identifier
from outbox_pipelines.database.url import render
from outbox_pipelines.ml_service import training_pb2
from outbox_pipelines.settings import Settings, load_settings
from outbox_pipelines.tenants.registry import Problem, Tenant
from outbox_pipelines.training import backlog as backlog_module
from outbox_pipelines.training.backlog import Backlog, Standing, count_waiting, look
from tests.outboxes import flush, ledger_ids, new_tenant, status, waiting_ids
from tests.scripted_service import ScriptedService, accept

OUT_OF_SHARED_MEMORY = "53200"


def run(engine: Engine, statement: str) -> None:
    """A statement in a transaction of its own."""
    with engine.begin() as connection:
        connection.exec_driver_sql(statement)


def outbox(tenant: Tenant, table: str = "ml_outbox") -> str:
    """A table of the tenant's, as it stands in SQL."""
    return f"{driver_identifier(tenant.schema)}.{table}"


def standings(backlog: Backlog) -> dict[str, Standing]:
    """Who stands how."""
    return {entry.tenant.name: entry.standing for entry in backlog.tenants}


def reasons(backlog: Backlog) -> dict[str, str | None]:
    """What is told of whom."""
    return {entry.tenant.name: entry.last_error for entry in backlog.tenants}


def rename_column(tenant: Tenant) -> str:
    return f"ALTER TABLE {outbox(tenant)} RENAME COLUMN created_at TO made_at"


@pytest.mark.parametrize(("chunk", "place"), [(1, 2), (2, 1), (2, 2), (2, 4), (3, 2), (3, 3), (500, 0)])
def test_a_locked_tenant_is_told_and_hides_nobody_wherever_it_stands_among_the_chunks(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, chunk: int, place: int
) -> None:
    monkeypatch.setattr(backlog_module, "CHUNK", chunk)
    monkeypatch.setattr(backlog_module, "_LOCK_WAIT_MILLISECONDS", 30)
    tenants = [new_tenant(engine, f"t{number}", rows=1) for number in range(5)]
    expected = {tenant.name: Standing.DUE for tenant in tenants}
    expected[f"t{place}"] = Standing.UNREADABLE
    with engine.connect() as holder:
        holder.exec_driver_sql(f"LOCK TABLE {outbox(tenants[place])} IN ACCESS EXCLUSIVE MODE")
        backlog = look(engine)
        assert standings(backlog) == expected
        assert reasons(backlog)[f"t{place}"] == "canceling statement due to lock timeout"
        assert len(backlog.due) == 4
        assert str(count_waiting(engine, backlog.tenants)) == "at least 4 rows of 4 tenants"
    backlog = look(engine)
    assert len(backlog.due) == 5
    assert str(count_waiting(engine, backlog.waiting)) == "5 rows of 5 tenants"


def test_the_look_waits_for_a_lock_for_a_fifth_of_a_second_whatever_the_setting(
    engine: Engine, settings: Settings
) -> None:
    assert settings.lock_timeout == 10
    locked, _ = new_tenant(engine, "locked", rows=1), new_tenant(engine, "other", rows=1)
    with engine.connect() as holder:
        holder.exec_driver_sql(f"LOCK TABLE {outbox(locked)} IN ACCESS EXCLUSIVE MODE")
        began = time.monotonic()
        assert standings(look(engine)) == {"locked": Standing.UNREADABLE, "other": Standing.DUE}
        # With its chunk; by itself it is given a moment only.
        assert 0.2 <= time.monotonic() - began < 5
    with engine.begin() as connection:
        assert connection.exec_driver_sql("SHOW lock_timeout").scalar_one() == "10s"


def test_a_tenant_that_cannot_be_read_is_told_with_its_reason_and_noted_as_nothing(engine: Engine) -> None:
    odd, _ = new_tenant(engine, "odd", rows=1), new_tenant(engine, "other", rows=1)
    run(engine, rename_column(odd))
    backlog = look(engine)
    assert standings(backlog) == {"odd": Standing.UNREADABLE, "other": Standing.DUE}
    assert reasons(backlog) == {"odd": 'column "created_at" does not exist', "other": None}
    assert [entry.tenant.name for entry in backlog.due] == ["other"]
    found = status(engine, odd)
    assert (found.problem, found.last_error, found.next_attempt_at) == (None, None, None)


def test_troubles_of_every_kind_in_one_chunk_are_told_apart(engine: Engine) -> None:
    names = ("locked", "odd", "without outbox", "without dead letters", "without schema", "fine")
    locked, odd, outless, deathless, gone, _ = (new_tenant(engine, name, rows=1) for name in names)
    run(engine, rename_column(odd))
    run(engine, f"DROP TABLE {outbox(outless)}")
    run(engine, f"DROP TABLE {outbox(deathless, 'ml_outbox_dead')}")
    run(engine, f"DROP SCHEMA {driver_identifier(gone.schema)} CASCADE")
    with engine.connect() as holder:
        holder.exec_driver_sql(f"LOCK TABLE {outbox(locked)} IN ACCESS EXCLUSIVE MODE")
        assert standings(look(engine)) == {
            "locked": Standing.UNREADABLE,
            "odd": Standing.UNREADABLE,
            "without outbox": Standing.BROKEN,
            "without dead letters": Standing.BROKEN,
            "without schema": Standing.BROKEN,
            "fine": Standing.DUE,
        }


def test_a_tenant_without_its_dead_letters_is_broken_and_its_good_rows_are_not_sent_at_every_tick(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, rows=10)
    dead = outbox(tenant, "ml_outbox_dead")
    run(engine, f"ALTER TABLE {dead} RENAME TO hidden")

    def answer(
        request: training_pb2.TrainBatchRequest, context: grpc.ServicerContext
    ) -> training_pb2.TrainBatchResponse:
        response = accept(request, context)
        response.accepted.remove(1)
        response.rejected.add(id=1, reason="bad")
        return response

    service.answer = answer
    for _ in range(3):
        backlog = look(engine)
        assert standings(backlog) == {"acme": Standing.BROKEN}
        for entry in backlog.due:
            flush(engine, settings, entry.tenant)
    assert service.calls == []
    assert status(engine, tenant).problem is Problem.BROKEN
    run(engine, f"ALTER TABLE {outbox(tenant, 'hidden')} RENAME TO ml_outbox_dead")
    backlog = look(engine)
    assert [entry.tenant.name for entry in backlog.due] == ["acme"]
    assert status(engine, tenant).problem is None
    flush(engine, settings, tenant)
    assert service.ids() == list(range(1, 11))
    assert ledger_ids(engine, tenant) == list(range(2, 11))
    assert waiting_ids(engine, tenant) == []


@pytest.mark.parametrize("change", ["broken", "mended"])
def test_a_locked_line_of_the_registry_hides_nobody_and_is_noted_by_a_later_look(
    engine: Engine, make_settings: Callable[..., Settings], database_url: str, change: str
) -> None:
    changed, _ = new_tenant(engine, "changed", rows=1), new_tenant(engine, "other", rows=1)
    expected, problem = (Standing.BROKEN, Problem.BROKEN) if change == "broken" else (Standing.DUE, None)
    run(engine, f"ALTER TABLE {outbox(changed)} RENAME TO hidden")
    if change == "mended":
        look(engine)
        run(engine, f"ALTER TABLE {outbox(changed, 'hidden')} RENAME TO ml_outbox")
    impatient = open_engine(make_settings(lock_timeout=0.3), database_url, application_name="tests")
    try:
        with engine.connect() as holder:
            holder.exec_driver_sql("SELECT FROM outbox.tenants WHERE name = 'changed' FOR UPDATE")
            assert standings(look(impatient)) == {"changed": expected, "other": Standing.DUE}
        look(impatient)
        assert status(engine, changed).problem is problem
    finally:
        impatient.dispose()


@pytest.mark.parametrize(("tenants", "chunks"), [(3, 1), (4, 2), (6, 2), (7, 3)])
def test_each_chunk_is_asked_in_a_transaction_of_its_own(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tenants: int, chunks: int
) -> None:
    monkeypatch.setattr(backlog_module, "CHUNK", 3)
    for number in range(tenants):
        new_tenant(engine, f"t{number}", rows=1)
    seen: list[str] = []
    event.listen(engine, "commit", lambda _connection: seen.append("end"))
    event.listen(
        engine, "before_cursor_execute", lambda *arguments: seen.append("ask") if ".ml_outbox" in arguments[2] else None
    )
    assert len(look(engine).due) == tenants
    assert seen == ["end"] + ["ask", "end"] * chunks


SMALL_SERVER = {
    "fsync": "off",
    "autovacuum": "off",
    # What the size of the lock table follows from: here it holds about 300 locks.
    "max_locks_per_transaction": "10",
    "max_connections": "6",
    "superuser_reserved_connections": "0",
    "max_wal_senders": "0",
    "max_worker_processes": "1",
    "autovacuum_max_workers": "1",
}


def test_a_look_at_more_tenants_than_the_server_has_locks_for_answers_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 200
    with EmbeddedServer(tmp_path / "postgres", options=SMALL_SERVER) as server:
        engine = open_engine(load_settings(), render(server.url("postgres")), application_name="tests", pool_size=2)
        migrate(engine)
        for begin in range(0, count, 10):
            tables = (
                "CREATE TABLE ml_outbox (id bigint PRIMARY KEY, created_at timestamptz) CREATE TABLE ml_outbox_dead ()"
            )
            run(engine, ";".join(f"CREATE SCHEMA s{number} {tables}" for number in range(begin, begin + 10)))
        run(
            engine,
            f"""INSERT INTO outbox.tenants (tenant_id, name, schema_name)
                SELECT gen_random_uuid(), 's' || n, 's' || n FROM generate_series(0, {count - 1}) AS n""",
        )
        states: list[str | None] = []
        event.listen(
            engine,
            "handle_error",
            lambda context: states.append(getattr(context.original_exception, "sqlstate", None)),
        )
        for chunk, errors in ((20, []), (count, [OUT_OF_SHARED_MEMORY])):
            monkeypatch.setattr(backlog_module, "CHUNK", chunk)
            # A chunk that is too large for the server is asked one by one.
            assert len(look(engine).standing(Standing.EMPTY)) == count
            assert states == errors
        engine.dispose()
