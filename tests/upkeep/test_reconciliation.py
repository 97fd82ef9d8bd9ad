"""Every row that left an outbox is accounted for, once."""

from collections.abc import Callable

import pytest
from sqlalchemy import Engine

from outbox_pipelines.database.migrate import migrate
from outbox_pipelines.database.quoting import quote_identifier
from outbox_pipelines.settings import Settings
from outbox_pipelines.tenants.registry import Tenant
from outbox_pipelines.training.audit import Fate, RowHistory, trace_row
from outbox_pipelines.training.dead_letters import discard, redrive
from outbox_pipelines.upkeep.checks import Severity
from outbox_pipelines.upkeep.reconciliation import forget_removed, reconcile
from tests.jobs.messages import rows, run, value
from tests.outboxes import dead_letters, enqueue, flush, new_tenant, waiting_ids
from tests.scripted_service import ScriptedService, refuse
from tests.upkeep.aged import bury, deliver


def by_hand(engine: Engine, tenant: Tenant, statement: str) -> None:
    run(engine, statement.format(outbox=f"{quote_identifier(tenant.schema)}.ml_outbox"))


def removed(engine: Engine) -> list[tuple[int, str]]:
    return [tuple(row) for row in rows(engine, "SELECT row_id, how FROM outbox.removed_rows ORDER BY row_id, how")]


def history(engine: Engine, tenant: Tenant, row_id: int) -> RowHistory:
    with engine.connect() as connection:
        return trace_row(connection, tenant, row_id)


def test_what_is_delivered_or_buried_is_accounted_for_and_not_noted_as_removed(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    acme = new_tenant(engine, "acme", rows=25)
    service.answer = refuse([3, 11], with_ids=True)
    flush(engine, settings, acme)
    assert waiting_ids(engine, acme) == []
    assert list(dead_letters(engine, acme)) == [3, 11]
    assert removed(engine) == []
    found = reconcile(engine)
    assert found.passed
    assert found.text == "3 calls of the last 60 min compared: each row left once"


def test_rows_deleted_by_hand_are_noted_with_who_did_it(engine: Engine) -> None:
    acme, odd = new_tenant(engine, "acme", rows=3), new_tenant(engine, "odd", rows=2, schema='tenant_x"y:z')
    by_hand(engine, acme, "DELETE FROM {outbox} WHERE id < 3")
    by_hand(engine, odd, "TRUNCATE {outbox}")
    assert removed(engine) == [(1, "deleted"), (1, "truncated"), (2, "deleted"), (2, "truncated")]
    told = history(engine, acme, 2)
    assert told.fate is Fate.REMOVED
    assert [(one.how, one.removed_by) for one in told.removals] == [("deleted", value(engine, "SELECT session_user"))]
    assert history(engine, acme, 3).fate is Fate.WAITING
    found = reconcile(engine)
    assert found.passed
    assert found.text.endswith("each row left once; 4 rows removed by hand, and noted")


def test_whoever_may_delete_from_an_outbox_need_not_be_allowed_anything_else(engine: Engine) -> None:
    acme = new_tenant(engine, "acme", rows=1)
    role = f"app_{acme.tenant_id.hex[:12]}"
    run(engine, f"CREATE ROLE {role}")
    try:
        run(engine, f'GRANT USAGE ON SCHEMA "{acme.schema}" TO {role}')
        run(engine, f'GRANT SELECT, DELETE ON "{acme.schema}".ml_outbox TO {role}')
        with engine.begin() as connection:
            connection.exec_driver_sql(f"SET LOCAL ROLE {role}")
            connection.exec_driver_sql(f'DELETE FROM "{acme.schema}".ml_outbox')
        assert removed(engine) == [(1, "deleted")]
    finally:
        run(engine, f"DROP OWNED BY {role}")
        run(engine, f"DROP ROLE {role}")


def test_a_delete_that_is_rolled_back_is_not_noted(engine: Engine) -> None:
    acme = new_tenant(engine, "acme", rows=1)
    with engine.connect() as connection:
        connection.exec_driver_sql(f'DELETE FROM "{acme.schema}".ml_outbox')
    assert removed(engine) == []


def test_a_discarded_dead_letter_is_noted_and_a_redriven_one_is_not(engine: Engine) -> None:
    acme = new_tenant(engine, "acme")
    bury(engine, acme, 2, days=0)
    with engine.begin() as connection:
        assert discard(connection, acme, [1, 77]) == [1]
        redrive(connection, acme, [2])
    assert removed(engine) == [(1, "discarded")]
    assert history(engine, acme, 1).fate is Fate.REMOVED
    assert history(engine, acme, 2).fate is Fate.WAITING


@pytest.mark.parametrize("older_hours", [0.1, 5.0])
def test_a_row_delivered_twice_is_found_whenever_the_first_time_was(engine: Engine, older_hours: float) -> None:
    acme, beta = new_tenant(engine, "acme"), new_tenant(engine, "beta")
    deliver(engine, acme, [1, 2, 3], days=older_hours / 24)
    deliver(engine, acme, [4, 5], days=0)
    deliver(engine, beta, [2, 3], days=0)
    assert reconcile(engine).passed
    deliver(engine, acme, [3, 6], days=0)
    found = reconcile(engine)
    assert not found.passed
    assert found.severity is Severity.ERROR
    assert found.numbers["rows delivered twice"] == 1
    assert found.text == (
        "1 row delivered twice (acme: 1): somebody put rows back by hand; `outbox audit` shows both deliveries"
    )


def test_a_row_that_was_delivered_and_waits_again_is_found_before_it_is_sent(engine: Engine) -> None:
    acme, beta = new_tenant(engine, "acme", rows=3), new_tenant(engine, "beta", rows=3)
    deliver(engine, beta, [11, 12], days=3)
    deliver(engine, acme, [2, 99], days=3)
    found = reconcile(engine)
    assert not found.passed
    assert found.numbers["rows delivered and waiting"] == 1
    assert found.text.startswith("1 row delivered and waiting again (acme: 1): put back by hand")


@pytest.mark.parametrize(
    "spoil",
    [
        "ALTER TABLE {outbox} DISABLE TRIGGER outbox_note_deleted",
        "DROP TRIGGER outbox_note_truncated ON {outbox}",
    ],
)
def test_an_outbox_that_is_not_watched_is_found_and_can_be_mended(engine: Engine, spoil: str) -> None:
    acme = new_tenant(engine, "acme")
    new_tenant(engine, "beta")
    by_hand(engine, acme, spoil)
    found = reconcile(engine)
    assert not found.passed
    assert found.severity is Severity.WARN
    assert found.text.startswith("1 tenant not watched (acme): a trigger is missing or disabled")
    # As the text says.
    if spoil.startswith("DROP"):
        assert migrate(engine) == 1
    else:
        by_hand(engine, acme, "ALTER TABLE {outbox} ENABLE TRIGGER USER")
    assert reconcile(engine).passed


def test_a_tenant_whose_schema_is_missing_is_none_of_its_concern(engine: Engine) -> None:
    acme = new_tenant(engine, "acme")
    run(engine, f'DROP SCHEMA "{acme.schema}" CASCADE')
    assert reconcile(engine).passed


def test_an_outbox_made_by_an_earlier_version_is_watched_once_it_is_migrated(engine: Engine) -> None:
    acme = new_tenant(engine, "acme", rows=2)
    for name in ("deleted", "truncated"):
        by_hand(engine, acme, f"DROP TRIGGER outbox_note_{name} ON {{outbox}}")
    run(engine, f"UPDATE \"{acme.schema}\".ml_outbox_version SET version_num = '0001'")
    assert not reconcile(engine).passed
    migrate(engine)
    assert reconcile(engine).passed
    assert waiting_ids(engine, acme) == [1, 2]


def test_what_was_removed_is_forgotten_with_the_ledger(engine: Engine) -> None:
    acme = new_tenant(engine, "acme", rows=2)
    by_hand(engine, acme, "DELETE FROM {outbox} WHERE id = 1")
    run(engine, "UPDATE outbox.removed_rows SET removed_at = removed_at - interval '10 days'")
    by_hand(engine, acme, "DELETE FROM {outbox}")
    with engine.begin() as connection:
        forget_removed(connection, days=5)
    assert removed(engine) == [(2, "deleted")]


def test_rows_that_come_and_go_while_it_looks_are_no_flaw(
    engine: Engine, make_settings: Callable[..., Settings], service: ScriptedService
) -> None:
    acme = new_tenant(engine, "acme")
    for _ in range(5):
        enqueue(engine, acme, ({"n": n} for n in range(30)))
        flush(engine, make_settings(batch_size=3), acme)
        assert reconcile(engine).passed
