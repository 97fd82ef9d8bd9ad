"""A tenant's schema may have any name that PostgreSQL can store, and is served like the others."""

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from sqlalchemy import Engine, text

from outbox_pipelines.database.migrate import migrate
from outbox_pipelines.database.quoting import (
    InvalidSchemaName,
    check_schema_name,
    driver_identifier,
    quote_identifier,
)
from outbox_pipelines.ml_service import training_pb2
from outbox_pipelines.settings import Settings
from outbox_pipelines.tenants.registry import add_tenant, list_tenants, remove_tenant
from outbox_pipelines.training.backlog import Standing, count_waiting, look
from outbox_pipelines.training.enqueue import copy_training, enqueue_training
from outbox_pipelines.training.outbox import count_rows, read_rows
from tests.outboxes import dead_letters, enqueue, flush, ledger_ids, new_tenant, waiting_ids
from tests.scripted_service import ScriptedService

ODD = [
    *("tenant_A", "tenant_a-b", 'tenant_x"y', "100%", "%s", "%(schema)s", "a:b", ":name", "a.b", "{table}", "[x]"),
    *("it's", "semi;colon --", "/*", "\\", "new\nline", "line_end\n", "select", "public", "$1", '"', "__[SCHEMA_x]"),
    *("x" * 63, "ü" * 31, "日本" * 10, "😀"),
]

names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1, max_size=40).filter(
    lambda name: (
        len(name.encode()) <= 63 and not name.startswith("pg_") and name not in {"information_schema", "outbox"}
    )
)


@pytest.mark.parametrize("schema", ODD)
def test_a_tenant_of_any_schema_is_served_from_its_first_day_to_its_last(
    engine: Engine, settings: Settings, service: ScriptedService, schema: str
) -> None:
    tenant, neighbour = new_tenant(engine, schema=schema), new_tenant(engine, "neighbour", rows=1)
    assert migrate(engine) == 0
    assert enqueue(engine, tenant, [{"place": 0}, {"place": 1, "bad": True}]) == [1, 2]
    with engine.begin() as connection:
        assert copy_training(connection, tenant, [{"place": 2}]) == 1
    backlog = look(engine)
    assert [(entry.tenant.name, entry.standing) for entry in backlog.tenants] == [
        ("acme", Standing.DUE),
        ("neighbour", Standing.DUE),
    ]
    assert str(count_waiting(engine, backlog.waiting)) == "4 rows of 2 tenants"
    service.answer = lambda request, _context: training_pb2.TrainBatchResponse(
        rejected=[training_pb2.Rejection(id=example.id) for example in request.examples if "bad" in example.json]
    )
    flush(engine, settings, tenant, neighbour)
    assert service.ids(tenant.tenant_id) == [1, 2, 3]
    assert ledger_ids(engine, tenant) == [1, 3]
    assert list(dead_letters(engine, tenant)) == [2]
    assert waiting_ids(engine, tenant) == []
    with engine.begin() as connection:
        remove_tenant(connection, tenant.name, drop_schema=True)
    assert [entry.tenant.name for entry in look(engine).tenants] == ["neighbour"]
    with engine.connect() as connection:
        left = text("SELECT count(*) FROM pg_namespace WHERE nspname = :schema")
        assert connection.execute(left, {"schema": schema}).scalar_one() == 0


def test_names_that_are_nearly_the_same_are_different_tenants(
    engine: Engine, settings: Settings, service: ScriptedService
) -> None:
    schemas = ["tenant_a", "tenant_A", "TENANT_A", '"tenant_a"', "tenant_a ", "x" * 63, "x" * 62]
    tenants = [new_tenant(engine, f"number {number}", schema=schema) for number, schema in enumerate(schemas)]
    for number, tenant in enumerate(tenants):
        enqueue(engine, tenant, [{}] * number)
    with engine.connect() as connection:
        assert [count_rows(connection, tenant) for tenant in tenants] == list(range(len(schemas)))
    flush(engine, settings, *tenants)
    assert [len(service.ids(tenant.tenant_id)) for tenant in tenants] == list(range(len(schemas)))


@examples(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names)
def test_any_possible_name_is_made_filled_and_read(engine: Engine, schema: str) -> None:
    with engine.connect() as connection:
        tenant = add_tenant(connection, "acme", schema=schema)
        (row_id,) = enqueue_training(connection, tenant, [{"schema": schema}])
        read = read_rows(connection, tenant, limit=10, max_bytes=1000, except_ids=[])
        assert [row.row_id for row in read] == [row_id]
        assert list_tenants(connection)[0].tenant == tenant
        # PostgreSQL agrees on how the name is written and quoted.
        assert (
            connection.execute(
                text("SELECT nspname FROM pg_namespace WHERE oid = to_regnamespace(:quoted)"),
                {"quoted": quote_identifier(schema)},
            ).scalar_one()
            == schema
        )
        connection.rollback()


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ("", "is empty"),
        ("a\x00b", "holds a character that PostgreSQL cannot store"),
        ("a\ud800", "holds a character that PostgreSQL cannot store"),
        ("x" * 64, "is 64 bytes long"),
        ("ü" * 32, "is 64 bytes long"),
        ("😀" * 16, "is 64 bytes long"),
        ("pg_", "is reserved"),
        ("pg_temp", "is reserved"),
        ("pg_catalog", "is reserved"),
        ("information_schema", "is reserved"),
        ("outbox", "is reserved"),
    ],
)
def test_an_impossible_name_is_refused_with_what_is_allowed(schema: str, problem: str) -> None:
    with pytest.raises(InvalidSchemaName, match=rf"cannot be called .* it {problem}\. Allowed are 1 to 63 bytes"):
        check_schema_name(schema)


def test_a_possible_name_is_given_back_as_it_is() -> None:
    for schema in ODD:
        assert check_schema_name(schema) == schema


def test_quoting_doubles_quotes_and_for_the_driver_percents() -> None:
    assert quote_identifier('a"b%') == '"a""b%"'
    assert driver_identifier('a"b%') == '"a""b%%"'
