"""Migrations: repeatable, safe at once, and never a step back."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from uuid import uuid4

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import ProgrammingError

from outbox_pipelines.database.engine import open_engine
from outbox_pipelines.database.migrate import (
    DatabaseNewer,
    ForeignTable,
    NotMigrated,
    TenantsNotMigrated,
    migrate,
    migrate_tenant,
    require_migrated,
)
from outbox_pipelines.database.quoting import driver_identifier
from outbox_pipelines.settings import load_settings
from outbox_pipelines.tenants.registry import add_tenant
from tests.outboxes import new_tenant, wait_until

CONTROL_TABLES = 15
"""The version's, the registry's and health, the ledgers, messages and servers."""


@pytest.fixture
def empty(empty_database_url: str) -> Iterator[Engine]:
    """An engine on a database without migrations."""
    engine = open_engine(load_settings(), empty_database_url, application_name="tests")
    yield engine
    engine.dispose()


def tables(engine: Engine) -> dict[str, int]:
    """How many tables each schema holds."""
    with engine.connect() as connection:
        rows = connection.execute(
            text("""
                SELECT schemaname, count(*) FROM pg_tables
                WHERE schemaname NOT IN ('pg_catalog', 'information_schema') GROUP BY schemaname
            """)
        )
        return dict(iter(rows))


def register_unmigrated(engine: Engine, *schemas: str) -> None:
    """Tenants as an older version may have left them: registered, with a schema, without our tables."""
    with engine.begin() as connection:
        for schema in schemas:
            connection.execute(
                text("INSERT INTO outbox.tenants (tenant_id, name, schema_name) VALUES (:id, :schema, :schema)"),
                {"id": uuid4(), "schema": schema},
            )
            connection.exec_driver_sql(f"CREATE SCHEMA {driver_identifier(schema)}")


def set_version(engine: Engine, table: str, version: str) -> None:
    """Pretend that another version of the code was here."""
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {table} SET version_num = :version"), {"version": version})


def migrate_in_two_processes(engine: Engine, held_back_by: Connection) -> list[int]:
    """Let two processes migrate, both under way before the lock that holds them back is gone."""
    url = engine.url.render_as_string(hide_password=False)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.database.migrating_process", url], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        wait_until(lambda: waiting(engine) == 2)
        held_back_by.rollback()
        told = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0]
    return sorted(map(int, told))


def waiting(engine: Engine) -> int:
    """Migrating processes that wait for a lock."""
    with engine.connect() as connection:
        return int(
            connection.execute(
                text("""
                    SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
                    AND application_name = 'migrating_process' AND wait_event_type = 'Lock'
                """)
            ).scalar_one()
        )


def test_a_fresh_database_is_migrated_and_a_second_time_changes_nothing(empty: Engine) -> None:
    assert migrate(empty) == 1
    require_migrated(empty)
    before = tables(empty)
    assert before == {"outbox": CONTROL_TABLES}
    assert migrate(empty) == 0
    assert tables(empty) == before


def test_every_tenants_schema_is_migrated(engine: Engine) -> None:
    register_unmigrated(engine, "tenant_A", 'tenant_x"y', "100%")
    assert migrate(engine) == 3
    assert tables(engine) == {"outbox": CONTROL_TABLES, "tenant_A": 3, 'tenant_x"y': 3, "100%": 3}
    assert migrate(engine) == 0


def test_two_processes_on_an_empty_database_migrate_it_once(empty: Engine) -> None:
    with empty.connect() as connection:
        # Both come to the point where the schema is made, and wait: for us, or for each other.
        connection.exec_driver_sql("CREATE SCHEMA outbox")
        assert migrate_in_two_processes(empty, connection) == [0, 1]
    assert tables(empty) == {"outbox": CONTROL_TABLES}


def test_two_processes_with_several_tenants_migrate_each_once(engine: Engine) -> None:
    schemas = [f"tenant_{number}" for number in range(6)]
    register_unmigrated(engine, *schemas)
    with engine.connect() as connection:
        connection.exec_driver_sql("LOCK TABLE outbox.tenants")
        assert sum(migrate_in_two_processes(engine, connection)) == len(schemas)
    assert tables(engine) == {"outbox": CONTROL_TABLES, **dict.fromkeys(schemas, 3)}


def test_threads_that_register_tenants_at_once_do_not_mix_their_schemas(engine: Engine) -> None:
    together = threading.Barrier(8)
    failures = []

    def register(number: int) -> None:
        try:
            with engine.begin() as connection:
                together.wait(30)
                add_tenant(connection, f"tenant {number}", schema=f"tenant_{number}")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=register, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert tables(engine) == {"outbox": CONTROL_TABLES, **{f"tenant_{number}": 3 for number in range(8)}}


def test_a_database_that_is_not_migrated_is_told_with_the_command_that_mends_it(empty: Engine) -> None:
    with pytest.raises(NotMigrated, match=r"is not migrated \(it is empty, .*: run `outbox migrate`"):
        require_migrated(empty)
    assert tables(empty) == {}


def test_a_newer_database_is_refused_and_nothing_is_changed(engine: Engine) -> None:
    register_unmigrated(engine, "tenant_a")
    set_version(engine, "outbox.schema_version", "9999")
    before = tables(engine)
    for act in (migrate, require_migrated):
        with pytest.raises(DatabaseNewer, match=r"schema 'outbox' .* is at version 9999, newer .*: upgrade outbox"):
            act(engine)
    assert tables(engine) == before
    with engine.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM outbox.schema_version")).scalars().all() == ["9999"]


def test_a_tenant_of_a_newer_version_is_told_by_its_schemas_name_and_left_alone(engine: Engine) -> None:
    tenant = new_tenant(engine, schema="tenant_A", rows=3)
    register_unmigrated(engine, "tenant_0", "tenant_z")
    set_version(engine, '"tenant_A".ml_outbox_version', "9999")
    with pytest.raises(TenantsNotMigrated, match=r"1 of 3 tenants .*\n.*schema 'tenant_A' .* is at version 9999"):
        migrate(engine)
    with pytest.raises(DatabaseNewer), engine.begin() as connection:
        migrate_tenant(connection, tenant.schema)
    assert tables(engine) == {"outbox": CONTROL_TABLES, "tenant_A": 3, "tenant_0": 3, "tenant_z": 3}
    with engine.connect() as connection:
        assert connection.execute(text('SELECT version_num FROM "tenant_A".ml_outbox_version')).scalar_one() == "9999"
        assert connection.execute(text('SELECT count(*) FROM "tenant_A".ml_outbox')).scalar_one() == 3


def test_the_messages_do_not_tell_the_password(empty_database_url: str) -> None:
    engine = open_engine(load_settings(), empty_database_url, application_name="tests")
    secret = engine.url.set(password="hunter2")
    engine.dispose()
    engine = open_engine(load_settings(), secret.render_as_string(hide_password=False), application_name="tests")
    with pytest.raises(NotMigrated) as raised:
        require_migrated(engine)
    assert "hunter2" not in str(raised.value)
    engine.dispose()


def test_a_tenant_whose_schema_is_missing_does_not_stop_the_others(engine: Engine) -> None:
    register_unmigrated(engine, "tenant_a", "tenant_b", "tenant_c")
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA tenant_b")
    assert migrate(engine) == 2
    assert tables(engine) == {"outbox": CONTROL_TABLES, "tenant_a": 3, "tenant_c": 3}


def test_a_migration_that_fails_half_way_leaves_nothing(empty: Engine) -> None:
    with empty.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA outbox")
        connection.exec_driver_sql("CREATE TABLE outbox.training_ledger (in_the_way text)")
    with pytest.raises(ProgrammingError, match="already exists"):
        migrate(empty)
    assert tables(empty) == {"outbox": 1}
    with empty.begin() as connection:
        connection.exec_driver_sql("DROP TABLE outbox.training_ledger")
    assert migrate(empty) == 1


def test_a_tenant_that_cannot_be_migrated_is_told_and_stops_nobody(engine: Engine) -> None:
    register_unmigrated(engine, "tenant_a", "tenant_b", "tenant_c")
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE tenant_b.ml_outbox_version (in_the_way text)")
    with pytest.raises(TenantsNotMigrated, match=r"1 of 3 tenants .*\n  tenant_b: column .* does not exist"):
        migrate(engine)
    assert tables(engine) == {"outbox": CONTROL_TABLES, "tenant_a": 3, "tenant_b": 1, "tenant_c": 3}


@pytest.mark.parametrize("name", ["ml_outbox", "ml_outbox_dead"])
def test_a_table_of_the_applications_own_with_our_name_is_refused_and_not_taken_for_ours(
    engine: Engine, name: str
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE SCHEMA shop; CREATE TABLE shop.{name} (of_another_shape text)")
    with pytest.raises(ForeignTable, match=f"'shop' already has a table {name} "), engine.begin() as connection:
        add_tenant(connection, "acme", schema="shop")
    assert tables(engine) == {"outbox": CONTROL_TABLES, "shop": 1}


def test_waiting_for_a_migration_leaves_the_callers_timeouts_as_they_were(engine: Engine) -> None:
    with engine.begin() as connection:
        before = [connection.exec_driver_sql(f"SHOW {name}_timeout").scalar_one() for name in ("lock", "statement")]
        add_tenant(connection, "acme")
        after = [connection.exec_driver_sql(f"SHOW {name}_timeout").scalar_one() for name in ("lock", "statement")]
    assert after == before


def test_a_tenants_schema_goes_with_the_callers_transaction(engine: Engine) -> None:
    with engine.connect() as connection:
        add_tenant(connection, "acme", schema="tenant_a")
        connection.rollback()
    assert tables(engine) == {"outbox": CONTROL_TABLES}


def test_no_lock_is_left_behind(engine: Engine) -> None:
    register_unmigrated(engine, "tenant_a")
    migrate(engine)
    with engine.connect() as connection:
        held = text(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = "
            "(SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        assert connection.execute(held).scalar_one() == 0
