"""Tenants that go and tenants that come into a schema that is there: other people's transactions and rights count."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.exc import OperationalError, ProgrammingError

from outbox_pipelines.database.engine import open_engine
from outbox_pipelines.database.quoting import driver_identifier
from outbox_pipelines.settings import Settings
from outbox_pipelines.tenants.registry import Tenant, TenantHasRows, add_tenant, list_tenants, remove_tenant
from outbox_pipelines.training.enqueue import enqueue_training
from tests.outboxes import enqueue, flush, ledger_ids, new_tenant, wait_until, waiting_ids
from tests.scripted_service import ScriptedService, accept

MakeSettings = Callable[..., Settings]


def blocked(engine: Engine, count: int = 1) -> bool:
    """Whether so many statements of this database wait for another transaction."""
    with engine.connect() as connection:
        found = connection.execute(
            text("""
                SELECT count(*) FROM pg_stat_activity
                WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0
            """)
        )
        return bool(found.scalar_one() >= count)


def registered(engine: Engine) -> list[str]:
    """The names in the registry."""
    with engine.connect() as connection:
        return [entry.tenant.name for entry in list_tenants(connection)]


def has_outbox(engine: Engine, tenant: Tenant) -> bool:
    """Whether the tenant's table is there."""
    with engine.connect() as connection:
        found = connection.execute(
            text("SELECT to_regclass(:name)"), {"name": f"{driver_identifier(tenant.schema)}.ml_outbox"}
        )
        return found.scalar_one() is not None


class Removal:
    """A removal with its schema, in a thread of its own."""

    def __init__(self, engine: Engine, tenant: Tenant, *, force: bool = False) -> None:
        self.errors: list[Exception] = []
        self._engine = engine
        self._tenant = tenant
        self._force = force
        self._thread = threading.Thread(target=self._remove)
        self._thread.start()

    def _remove(self) -> None:
        try:
            with self._engine.begin() as connection:
                remove_tenant(connection, self._tenant.name, drop_schema=True, force=self._force)
        except Exception as error:
            self.errors.append(error)

    def wait(self) -> list[Exception]:
        """Wait for its end, and give what it failed with."""
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.errors


# Going


def test_a_removal_waits_for_everyone_who_is_enqueueing_and_refuses_when_one_commits(engine: Engine) -> None:
    tenant = new_tenant(engine)
    with engine.connect() as first, engine.connect() as second:
        enqueue_training(first, tenant, [{"n": 1}])
        enqueue_training(second, tenant, [{"n": 2}])
        removal = Removal(engine, tenant)
        wait_until(lambda: blocked(engine))
        first.rollback()
        assert blocked(engine)
        second.commit()
    (error,) = removal.wait()
    assert isinstance(error, TenantHasRows)
    assert registered(engine) == ["acme"]
    assert waiting_ids(engine, tenant) == [2]


def test_a_removal_goes_through_when_those_who_were_enqueueing_roll_back(engine: Engine) -> None:
    tenant = new_tenant(engine)
    with engine.connect() as application:
        enqueue_training(application, tenant, [{"n": 1}])
        removal = Removal(engine, tenant)
        wait_until(lambda: blocked(engine))
        application.rollback()
    assert removal.wait() == []
    assert registered(engine) == []
    assert not has_outbox(engine, tenant)


def test_who_enqueues_during_a_removal_is_told_or_keeps_the_row_but_never_loses_it(engine: Engine) -> None:
    tenant = new_tenant(engine)
    outcomes: list[object] = []

    def enqueue_late() -> None:
        try:
            outcomes.append(enqueue(engine, tenant, [{"late": True}]))
        except Exception as error:
            outcomes.append(error)

    with engine.connect() as application:
        enqueue_training(application, tenant, [{"n": 1}])
        removal = Removal(engine, tenant)
        wait_until(lambda: blocked(engine))
        late = threading.Thread(target=enqueue_late)
        late.start()
        wait_until(lambda: blocked(engine, 2))
        application.rollback()
    assert removal.wait() == []
    late.join(30)
    (outcome,) = outcomes
    assert isinstance(outcome, ProgrammingError)
    assert "does not exist" in str(outcome)


def test_a_removal_that_waits_in_vain_changes_nothing(
    engine: Engine, make_settings: MakeSettings, database_url: str
) -> None:
    tenant = new_tenant(engine)
    impatient = open_engine(make_settings(lock_timeout=0.2), database_url, application_name="tests")
    with engine.connect() as application:
        enqueue_training(application, tenant, [{"n": 1}])
        (error,) = Removal(impatient, tenant).wait()
        application.commit()
    impatient.dispose()
    assert isinstance(error, OperationalError)
    assert "lock timeout" in str(error)
    assert registered(engine) == ["acme"]
    assert waiting_ids(engine, tenant) == [1]


def test_a_removal_with_force_drops_what_those_who_were_enqueueing_commit(engine: Engine) -> None:
    tenant = new_tenant(engine)
    with engine.connect() as application:
        enqueue_training(application, tenant, [{"n": 1}])
        removal = Removal(engine, tenant, force=True)
        wait_until(lambda: blocked(engine))
        application.commit()
    assert removal.wait() == []
    assert not has_outbox(engine, tenant)


def test_a_removal_that_meets_a_flush_settling_is_refused_and_costs_no_delivery(
    engine: Engine, settings: Settings, service: ScriptedService, database_url: str
) -> None:
    tenant = new_tenant(engine, rows=10)
    remover = open_engine(settings, database_url, application_name="remover")
    inside, go_on = threading.Event(), threading.Event()

    def let_it_settle(_connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        # The outbox is the removal's now, and the line in the registry not yet.
        if statement.startswith("LOCK TABLE"):
            go_on.set()
            wait_until(lambda: blocked(engine))

    event.listen(remover, "after_cursor_execute", let_it_settle)

    def answer(request: Any, context: Any) -> Any:
        inside.set()
        assert go_on.wait(20)
        return accept(request, context)

    service.answer = answer
    flushing = threading.Thread(target=flush, args=(engine, settings, tenant))
    flushing.start()
    assert inside.wait(20)
    (error,) = Removal(remover, tenant).wait()
    flushing.join(30)
    remover.dispose()
    # Both lock the outbox first: one waits, and there is no deadlock.
    assert isinstance(error, TenantHasRows)
    assert registered(engine) == ["acme"]
    assert service.ids() == ledger_ids(engine, tenant) == list(range(1, 11))
    assert waiting_ids(engine, tenant) == []


# Coming


@pytest.fixture
def application(engine: Engine) -> Iterator[str]:
    """A role that owns a schema ``app`` and may use the registry, but not create schemas."""
    role = f'"application of {engine.url.database}"'
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {role}")
        connection.exec_driver_sql(f"CREATE SCHEMA app AUTHORIZATION {role}")
        connection.exec_driver_sql(f"GRANT USAGE ON SCHEMA outbox TO {role}")
        connection.exec_driver_sql(f"GRANT ALL ON ALL TABLES IN SCHEMA outbox TO {role}")
    yield role
    with engine.begin() as connection:
        connection.exec_driver_sql(f"DROP OWNED BY {role} CASCADE")
        connection.exec_driver_sql(f"DROP ROLE {role}")


def test_a_tenant_is_added_to_a_schema_that_is_there_without_the_right_to_create_one(
    engine: Engine, settings: Settings, service: ScriptedService, application: str
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(f"SET LOCAL ROLE {application}")
        tenant = add_tenant(connection, "acme", schema="app")
    enqueue(engine, tenant, [{"n": 1}])
    flush(engine, settings, tenant)
    assert ledger_ids(engine, tenant) == [1]


def test_a_tenant_whose_schema_may_not_be_made_is_not_registered(engine: Engine, application: str) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql(f"SET LOCAL ROLE {application}")
        with pytest.raises(ProgrammingError, match="permission denied for database"):
            add_tenant(connection, "acme", schema="another")
    assert registered(engine) == []


@pytest.mark.parametrize("own", [None, {"lock_timeout": "1234ms", "statement_timeout": "5678ms"}])
def test_adding_a_tenant_keeps_the_callers_timeouts(engine: Engine, own: dict[str, str] | None) -> None:
    def timeouts(connection: Connection) -> dict[str, str]:
        return {
            name: connection.exec_driver_sql(f"SHOW {name}").scalar_one()
            for name in ("lock_timeout", "statement_timeout")
        }

    with engine.begin() as connection:
        usual = timeouts(connection)
    with engine.begin() as connection:
        for name, value in (own or {}).items():
            connection.exec_driver_sql(f"SET LOCAL {name} = '{value}'")
        add_tenant(connection, "acme")
        assert timeouts(connection) == (own or usual)
    with engine.begin() as connection:
        assert timeouts(connection) == usual
