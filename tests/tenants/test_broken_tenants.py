"""A tenant whose schema or table is gone is noted once, mended when it is back, and nobody else's trouble."""

from collections.abc import Callable

import pytest
from sqlalchemy import Connection, Engine, event, text

from outbox_pipelines.database.migrate import migrate
from outbox_pipelines.ml_service import training_pb2
from outbox_pipelines.settings import Settings
from outbox_pipelines.tenants.registry import Problem, Tenant, add_tenant, remove_tenant
from outbox_pipelines.training.backlog import Standing, count_waiting, look
from outbox_pipelines.training.outcome import Ending
from tests.outboxes import flush, ledger_ids, new_tenant, status, waiting_ids
from tests.scripted_service import ScriptedService


def standings(engine: Engine) -> dict[str, Standing]:
    """What one look finds."""
    return {entry.tenant.name: entry.standing for entry in look(engine).tenants}


def run(engine: Engine, statement: str) -> None:
    """A statement in a transaction of its own."""
    with engine.begin() as connection:
        connection.exec_driver_sql(statement)


def row_version(engine: Engine, tenant: Tenant) -> tuple[str, str]:
    """Changes whenever the tenant's line in the registry is written."""
    with engine.connect() as connection:
        found = connection.execute(
            text("SELECT xmin::text, ctid::text FROM outbox.tenants WHERE tenant_id = :id"), {"id": tenant.tenant_id}
        ).one()
        return (found[0], found[1])


def drop_schema(tenant: Tenant) -> str:
    return f'DROP SCHEMA "{tenant.schema}" CASCADE'


def drop_table(tenant: Tenant) -> str:
    return f'DROP TABLE "{tenant.schema}".ml_outbox'


def drop_dead_letters(tenant: Tenant) -> str:
    return f'DROP TABLE "{tenant.schema}".ml_outbox_dead'


def hide_table(tenant: Tenant) -> str:
    return f'ALTER TABLE "{tenant.schema}".ml_outbox RENAME TO hidden'


def show_table(tenant: Tenant) -> str:
    return f'ALTER TABLE "{tenant.schema}".hidden RENAME TO ml_outbox'


@pytest.mark.parametrize("damage", [drop_schema, drop_table, drop_dead_letters])
def test_a_missing_schema_or_table_is_noted_once_with_its_reason_and_the_others_are_served(
    engine: Engine, settings: Settings, service: ScriptedService, damage: Callable[[Tenant], str]
) -> None:
    broken, full, empty = (new_tenant(engine, name, rows=rows) for name, rows in (("b", 1), ("f", 2), ("e", 0)))
    run(engine, damage(broken))
    expected = {"b": Standing.BROKEN, "e": Standing.EMPTY, "f": Standing.DUE}
    assert standings(engine) == expected
    noted = status(engine, broken)
    assert noted.problem is Problem.BROKEN
    assert noted.failing_since is not None
    assert f"schema {broken.schema} or a table in it is missing" in (noted.last_error or "")
    written = row_version(engine, broken)
    others = [row_version(engine, tenant) for tenant in (full, empty)]
    for _ in range(3):
        assert standings(engine) == expected
    assert row_version(engine, broken) == written
    assert [row_version(engine, tenant) for tenant in (full, empty)] == others
    flush(engine, settings, full)
    assert ledger_ids(engine, full) == [1, 2]


def test_a_tenant_that_is_broken_is_not_due_and_not_counted(engine: Engine) -> None:
    broken, _ = new_tenant(engine, "broken", rows=1), new_tenant(engine, "other", rows=2)
    run(engine, hide_table(broken))
    backlog = look(engine)
    assert [entry.tenant.name for entry in backlog.due] == ["other"]
    assert [entry.tenant.name for entry in backlog.waiting] == ["other"]
    assert [entry.problem for entry in backlog.standing(Standing.BROKEN)] == [Problem.BROKEN]
    assert str(count_waiting(engine, backlog.tenants)) == "2 rows of 1 tenant"


def test_a_table_that_is_back_is_mended_at_the_next_look_and_due_at_once(engine: Engine, settings: Settings) -> None:
    tenant = new_tenant(engine, rows=1)
    run(engine, hide_table(tenant))
    # A run found it first, and set a time for the next attempt.
    assert flush(engine, settings, tenant).tenants[0].problem is Problem.BROKEN
    assert standings(engine) == {"acme": Standing.BROKEN}
    assert status(engine, tenant).next_attempt_at is not None
    run(engine, show_table(tenant))
    (entry,) = look(engine).tenants
    assert (entry.standing, entry.problem) == (Standing.DUE, None)
    mended = status(engine, tenant)
    assert (mended.problem, mended.failing_since, mended.next_attempt_at, mended.last_error) == (None,) * 4
    written = row_version(engine, tenant)
    assert standings(engine) == {"acme": Standing.DUE}
    assert row_version(engine, tenant) == written


@pytest.mark.parametrize("damage", [drop_schema, drop_table, drop_dead_letters])
def test_a_flush_that_finds_a_tenant_broken_fails_for_it_alone_and_starts_no_storm_of_runs(
    engine: Engine, settings: Settings, service: ScriptedService, damage: Callable[[Tenant], str]
) -> None:
    broken, other = new_tenant(engine, "broken", rows=1), new_tenant(engine, "other", rows=1)
    run(engine, damage(broken))
    service.answer = lambda request, _context: training_pb2.TrainBatchResponse(
        # Only a row that must be buried needs the table of dead letters.
        rejected=[training_pb2.Rejection(id=1)] if request.tenant == str(broken.tenant_id) else []
    )
    report = flush(engine, settings, broken, other)
    assert [entry.ending for entry in report.tenants] == [Ending.FAILED, Ending.EMPTIED]
    assert report.tenants[0].problem is Problem.BROKEN
    found = status(engine, broken)
    assert (found.problem, found.lease_holder, found.failure_count) == (Problem.BROKEN, None, 1)
    with engine.connect() as connection:
        wait = (
            "SELECT extract(epoch FROM next_attempt_at - clock_timestamp()) FROM outbox.tenants WHERE name = 'broken'"
        )
        longest = settings.backoff_max_seconds
        assert longest - 60 < connection.execute(text(wait)).scalar_one() <= longest
    # No look makes it due before its tables are there: no storm of runs.
    assert standings(engine) == {"broken": Standing.BROKEN, "other": Standing.EMPTY}


@pytest.mark.parametrize("damage", [drop_schema, drop_table])
def test_a_schema_dropped_while_the_look_is_under_way_spoils_it_for_nobody(
    engine: Engine, damage: Callable[[Tenant], str]
) -> None:
    doomed, _ = new_tenant(engine, "doomed", rows=1), new_tenant(engine, "other", rows=1)
    dropped: list[Tenant] = []

    def drop_once(_connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        if "FROM pg_class" in statement and not dropped:
            dropped.append(doomed)
            run(engine, damage(doomed))

    event.listen(engine, "after_cursor_execute", drop_once)
    assert standings(engine) == {"doomed": Standing.BROKEN, "other": Standing.DUE}
    assert dropped == [doomed]
    assert status(engine, doomed).problem is Problem.BROKEN


def test_a_schema_dropped_between_look_and_count_is_not_counted(engine: Engine) -> None:
    doomed, _ = new_tenant(engine, "doomed", rows=1), new_tenant(engine, "other", rows=2)
    waiting = look(engine).waiting
    run(engine, drop_schema(doomed))
    assert str(count_waiting(engine, waiting)) == "2 rows of 1 tenant"


@pytest.mark.parametrize("damage", [drop_schema, drop_table, drop_dead_letters])
def test_the_remedy_in_the_recorded_reason_is_one(engine: Engine, damage: Callable[[Tenant], str]) -> None:
    tenant = new_tenant(engine)
    run(engine, damage(tenant))
    standings(engine)
    assert "`outbox tenants remove` and add it anew" in (status(engine, tenant).last_error or "")
    with engine.begin() as connection:
        remove_tenant(connection, tenant.name)
        add_tenant(connection, tenant.name)
    assert standings(engine) == {"acme": Standing.EMPTY}


@pytest.mark.parametrize("damage", [drop_table, drop_dead_letters])
def test_a_tenant_added_anew_in_the_same_schema_has_its_tables(engine: Engine, damage: Callable[[Tenant], str]) -> None:
    tenant = new_tenant(engine, schema="shop")
    run(engine, damage(tenant))
    with engine.begin() as connection:
        remove_tenant(connection, tenant.name)
        add_tenant(connection, tenant.name, schema="shop")
    assert standings(engine) == {"acme": Standing.EMPTY}


@pytest.mark.parametrize(("damage", "expected"), [(drop_table, Standing.EMPTY), (drop_dead_letters, Standing.DUE)])
def test_missing_tables_are_made_anew_by_migrating_and_the_other_keeps_its_rows(
    engine: Engine, damage: Callable[[Tenant], str], expected: Standing
) -> None:
    tenant, other = new_tenant(engine, rows=1), new_tenant(engine, "other", rows=1)
    run(engine, damage(tenant))
    assert migrate(engine) == 1
    assert standings(engine) == {"acme": expected, "other": Standing.DUE}
    assert waiting_ids(engine, other) == [1]


def test_a_table_of_another_shape_is_told_and_spoils_the_look_for_nobody(engine: Engine) -> None:
    odd, _ = new_tenant(engine, "odd", rows=1), new_tenant(engine, "other", rows=1)
    run(engine, f'ALTER TABLE "{odd.schema}".ml_outbox RENAME COLUMN created_at TO made_at')
    assert standings(engine) == {"odd": Standing.UNREADABLE, "other": Standing.DUE}
    told = {entry.tenant.name: entry.last_error for entry in look(engine).tenants}
    assert told == {"odd": 'column "created_at" does not exist', "other": None}


def test_a_table_that_somebody_has_locked_holds_up_nobody(engine: Engine) -> None:
    locked, _ = new_tenant(engine, "locked", rows=1), new_tenant(engine, "other", rows=2)
    with engine.begin() as connection:
        connection.exec_driver_sql(f'LOCK TABLE "{locked.schema}".ml_outbox')
        backlog = look(engine)
        assert {entry.tenant.name: entry.standing for entry in backlog.tenants} == {
            "locked": Standing.UNREADABLE,
            "other": Standing.DUE,
        }
        assert str(count_waiting(engine, backlog.tenants)) == "at least 2 rows of 1 tenant"
    assert standings(engine) == {"locked": Standing.DUE, "other": Standing.DUE}


def test_a_schema_that_we_may_not_read_spoils_the_look_for_nobody(engine: Engine) -> None:
    closed, opened = new_tenant(engine, "closed", rows=1), new_tenant(engine, "open", rows=1)
    role = f'"reader of {engine.url.database}"'
    run(engine, f"CREATE ROLE {role}")
    run(engine, f"GRANT ALL ON SCHEMA outbox TO {role}; GRANT ALL ON ALL TABLES IN SCHEMA outbox TO {role}")
    run(engine, f'GRANT USAGE ON SCHEMA "{opened.schema}" TO {role}')
    run(engine, f'GRANT SELECT ON ALL TABLES IN SCHEMA "{opened.schema}" TO {role}')

    def become_reader(connection: Connection) -> None:
        connection.exec_driver_sql(f"SET LOCAL ROLE {role}")

    event.listen(engine, "begin", become_reader)
    try:
        assert standings(engine) == {"closed": Standing.UNREADABLE, "open": Standing.DUE}
        assert status(engine, closed).problem is None
    finally:
        event.remove(engine, "begin", become_reader)
        run(engine, f"DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.mark.parametrize("chunk", [1, 2, 500])
def test_many_tenants_are_asked_in_chunks_with_the_same_answer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr("outbox_pipelines.training.backlog.CHUNK", chunk)
    tenants = [new_tenant(engine, f"t{number}", rows=number) for number in range(5)]
    run(engine, drop_schema(tenants[3]))
    backlog = look(engine)
    standing = ["empty", "due", "due", "broken", "due"]
    assert [entry.standing for entry in backlog.tenants] == standing
    assert str(count_waiting(engine, backlog.waiting)) == "7 rows of 3 tenants"
