"""The registry: names are unique and sane, pausing pauses, and removing never loses rows by accident."""

import threading
from collections.abc import Callable
from uuid import uuid4

import pytest
from sqlalchemy import Connection, Engine, text

from outbox_pipelines.database.quoting import InvalidSchemaName
from outbox_pipelines.settings import Settings
from outbox_pipelines.tenants.registry import (
    InvalidTenant,
    Tenant,
    TenantHasRows,
    UnknownTenant,
    add_tenant,
    get_tenant,
    list_tenants,
    remove_tenant,
    set_paused,
)
from outbox_pipelines.training.backlog import Standing, look
from outbox_pipelines.training.enqueue import enqueue_training
from outbox_pipelines.training.outcome import Ending
from tests.outboxes import enqueue, flush, ledger_ids, new_tenant, status, wait_until, waiting_ids
from tests.scripted_service import ScriptedService


def registered(engine: Engine) -> list[str]:
    """The names in the registry."""
    with engine.connect() as connection:
        return [entry.tenant.name for entry in list_tenants(connection)]


def schemas(engine: Engine) -> set[str]:
    """All schemas of the database."""
    with engine.connect() as connection:
        return set(connection.execute(text("SELECT nspname FROM pg_namespace")).scalars())


def remove(engine: Engine, tenant: Tenant, **how: bool) -> Tenant:
    """Remove a tenant in a transaction of its own."""
    with engine.begin() as connection:
        return remove_tenant(connection, tenant.name, **how)


@pytest.mark.parametrize(
    "name",
    [
        *("", " ", " a", "a ", "x" * 101, "a,b", 'a"b', "a[b", "a]b", "a*", "a...b", "a\nb", "a\tb", "a\x00b"),
        *("a\x7fb", "a\ud800b"),
    ],
)
def test_a_name_that_the_ui_or_the_database_could_not_take_is_refused(engine: Engine, name: str) -> None:
    with engine.begin() as connection, pytest.raises(InvalidTenant, match="allowed are 1 to 100 characters"):
        add_tenant(connection, name)
    assert registered(engine) == []


@pytest.mark.parametrize("name", ["a", "x" * 100, "Müller & Söhne", "a.b", "100%", "a:b", "o'neil", "a/b", "日本"])
def test_any_other_name_is_accepted(engine: Engine, name: str) -> None:
    tenant = new_tenant(engine, name, rows=1)
    with engine.connect() as connection:
        assert get_tenant(connection, name) == tenant
    assert tenant.schema == f"tenant_{tenant.tenant_id.hex}"
    assert waiting_ids(engine, tenant) == [1]


def test_a_name_a_schema_or_an_id_that_is_taken_is_told_and_the_transaction_goes_on(engine: Engine) -> None:
    first = new_tenant(engine, "first", schema="tenant_first")
    with engine.begin() as connection:
        with pytest.raises(InvalidTenant, match="the name 'first' belongs to a registered tenant"):
            add_tenant(connection, "first")
        with pytest.raises(InvalidTenant, match="the schema 'tenant_first' belongs"):
            add_tenant(connection, "second", schema="tenant_first")
        with pytest.raises(InvalidTenant, match=f"the id {first.tenant_id} belongs"):
            add_tenant(connection, "second", tenant_id=first.tenant_id)
        add_tenant(connection, "second")
    assert registered(engine) == ["first", "second"]


def test_a_schema_that_cannot_be_a_tenants_registers_nothing(engine: Engine) -> None:
    with engine.begin() as connection, pytest.raises(InvalidSchemaName):
        add_tenant(connection, "acme", schema="outbox")
    assert registered(engine) == []


def test_the_applications_own_schema_and_id_are_used(engine: Engine) -> None:
    identity = uuid4()
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA shop")
        connection.exec_driver_sql("CREATE TABLE shop.orders (id int)")
        tenant = add_tenant(connection, "acme", schema="shop", tenant_id=identity)
    assert tenant == Tenant(identity, "acme", "shop", paused=False)
    assert enqueue(engine, tenant, [{}]) == [1]


def test_a_tenant_is_found_by_name_by_id_and_by_itself(engine: Engine) -> None:
    tenant = new_tenant(engine)
    with engine.connect() as connection:
        for wanted in ("acme", tenant.tenant_id, tenant):
            assert get_tenant(connection, wanted) == tenant


def test_a_tenant_that_is_not_there_is_told_with_the_commands_that_help(engine: Engine) -> None:
    new_tenant(engine)
    acts: list[Callable[[Connection], object]] = [
        lambda connection: get_tenant(connection, "nobody"),
        lambda connection: set_paused(connection, "nobody", paused=True),
        lambda connection: set_paused(connection, "nobody", paused=False),
        lambda connection: remove_tenant(connection, "nobody"),
        lambda connection: remove_tenant(connection, "nobody", force=True, drop_schema=True),
    ]
    for act in acts:
        with engine.begin() as connection, pytest.raises(UnknownTenant, match=r"no tenant 'nobody' .*outbox tenants"):
            act(connection)
    with engine.begin() as connection, pytest.raises(UnknownTenant):
        get_tenant(connection, uuid4())
    assert registered(engine) == ["acme"]


def test_a_paused_tenant_is_not_flushed_until_it_is_resumed(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    paused, other = new_tenant(engine, "paused", rows=1), new_tenant(engine, "other", rows=1)
    with engine.begin() as connection:
        assert set_paused(connection, "paused", paused=True).paused
    assert {entry.tenant.name: entry.standing for entry in look(engine).tenants} == {
        "paused": Standing.PAUSED,
        "other": Standing.DUE,
    }
    report = flush(engine, settings, paused, other)
    assert [entry.ending for entry in report.tenants] == [Ending.TAKEN, Ending.EMPTIED]
    assert waiting_ids(engine, paused) == [1]
    with engine.begin() as connection:
        assert not set_paused(connection, "paused", paused=False).paused
    flush(engine, settings, paused)
    assert waiting_ids(engine, paused) == []


def test_resuming_ends_a_backoff_and_pausing_does_not(engine: Engine) -> None:
    tenant = new_tenant(engine, rows=1)
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox.tenants SET next_attempt_at = clock_timestamp() + interval '1 hour'"))
        set_paused(connection, tenant.name, paused=True)
    assert status(engine, tenant).next_attempt_at is not None
    with engine.begin() as connection:
        set_paused(connection, tenant.name, paused=False)
    assert look(engine).tenants[0].standing is Standing.DUE
    assert status(engine, tenant).next_attempt_at is None


def test_removing_keeps_the_schema_unless_asked_and_the_ledger_always(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    kept, dropped = new_tenant(engine, "kept", rows=1), new_tenant(engine, "dropped", rows=1)
    flush(engine, settings, kept, dropped)
    assert remove(engine, kept) == kept
    assert remove(engine, dropped, drop_schema=True) == dropped
    assert registered(engine) == []
    assert kept.schema in schemas(engine)
    assert dropped.schema not in schemas(engine)
    assert ledger_ids(engine, kept) == ledger_ids(engine, dropped) == [1]


def test_a_tenant_with_rows_is_not_removed_unless_forced(engine: Engine) -> None:
    tenant = new_tenant(engine, rows=2)
    with pytest.raises(TenantHasRows, match=r"outbox flush --tenant acme.*--force"):
        remove(engine, tenant, drop_schema=True)
    assert registered(engine) == ["acme"]
    assert waiting_ids(engine, tenant) == [1, 2]
    remove(engine, tenant, force=True)
    assert registered(engine) == []
    assert waiting_ids(engine, tenant) == [1, 2]


def test_a_refused_removal_changes_nothing_in_a_transaction_that_goes_on(engine: Engine) -> None:
    tenant = new_tenant(engine, rows=1)
    with engine.begin() as connection, pytest.raises(TenantHasRows):
        remove_tenant(connection, tenant.name)
    assert registered(engine) == ["acme"]


def test_rows_of_a_transaction_in_flight_are_not_dropped_with_the_schema(engine: Engine) -> None:
    tenant = new_tenant(engine)
    refusals = []

    def remove_with_schema() -> None:
        try:
            remove(engine, tenant, drop_schema=True)
        except TenantHasRows as error:
            refusals.append(error)

    with engine.connect() as application:
        enqueue_training(application, tenant, [{"paid": True}])
        thread = threading.Thread(target=remove_with_schema)
        thread.start()
        blocked = text("""
            SELECT count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0
        """)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as observer:
            wait_until(lambda: observer.execute(blocked).scalar_one() > 0 or not thread.is_alive())
        application.commit()
    thread.join()
    assert len(refusals) == 1
    assert waiting_ids(engine, tenant) == [1]


def test_a_tenant_whose_schema_is_gone_can_be_removed(engine: Engine) -> None:
    for name, drop_schema in (("first", False), ("second", True)):
        tenant = new_tenant(engine, name)
        with engine.begin() as connection:
            connection.exec_driver_sql(f'DROP SCHEMA "{tenant.schema}" CASCADE')
        remove(engine, tenant, drop_schema=drop_schema)
    assert registered(engine) == []


def test_a_removed_tenant_can_come_back_with_its_rows(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    tenant = new_tenant(engine, schema="tenant_acme", rows=2)
    remove(engine, tenant, force=True)
    again = new_tenant(engine, schema="tenant_acme")
    flush(engine, settings, again)
    assert service.ids(again.tenant_id) == [1, 2]
