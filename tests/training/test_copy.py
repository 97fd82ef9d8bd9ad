"""Loading with COPY, and examples that must not change on their way: refused whole, and never quoted in an error."""

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.exc import DBAPIError

from outbox_pipelines.database.quoting import driver_identifier
from outbox_pipelines.tenants.registry import Tenant
from outbox_pipelines.training.enqueue import InvalidExample, copy_training, enqueue_training
from tests.outboxes import new_tenant, waiting_ids

Put = Callable[[Connection, Tenant, Any], object]
"""Either way to put examples in."""

both_ways = pytest.mark.parametrize("put", [enqueue_training, copy_training])

PRIVATE = "private-payload"


@pytest.fixture
def plain_engine(database_url: str) -> Iterator[Engine]:
    """An application's own engine, made without a thought of what errors show."""
    engine = create_engine(database_url.replace("postgresql://", "postgresql+psycopg://"))
    yield engine
    engine.dispose()


def nested(levels: int, innermost: object) -> object:
    """A value in so many lists within each other."""
    value = innermost
    for _ in range(levels):
        value = [value]
    return value


# COPY on a plain connection


def test_rows_copied_on_a_connection_without_a_transaction_are_kept_by_its_commit(
    engine: Engine, plain_engine: Engine
) -> None:
    tenant = new_tenant(engine)
    for application in (engine, plain_engine):
        with application.connect() as connection:
            # The tenant is known: nothing has begun a transaction before the COPY.
            assert not connection.in_transaction()
            assert copy_training(connection, tenant, [{"n": 1}]) == 1
            connection.commit()
    assert waiting_ids(engine, tenant) == [1, 2]


def test_rows_copied_on_a_connection_without_a_transaction_go_without_a_commit(engine: Engine) -> None:
    tenant = new_tenant(engine)
    with engine.connect() as connection:
        copy_training(connection, tenant, [{"n": 1}])
        connection.rollback()
        copy_training(connection, tenant, [{"n": 2}])
    with engine.connect() as connection:
        assert copy_training(connection, tenant, [{"n": 3}]) == 1
        connection.commit()
    assert waiting_ids(engine, tenant) == [3]


def test_copies_and_other_writes_of_a_connection_commit_together(engine: Engine) -> None:
    tenant = new_tenant(engine)
    with engine.connect() as connection:
        copy_training(connection, tenant, [{"n": 1}])
        connection.commit()
        connection.exec_driver_sql("CREATE TABLE public.essays ()")
        copy_training(connection, tenant, [{"n": 2}, {"n": 3}])
        enqueue_training(connection, tenant, [{"n": 4}])
        connection.commit()
    assert waiting_ids(engine, tenant) == [1, 2, 3, 4]


# What would change on its way


@both_ways
@pytest.mark.parametrize(
    "bad",
    [
        pytest.param({1: "a", "1": "b"}, id="two keys that would be one"),
        pytest.param({True: "a"}, id="bool"),
        pytest.param({None: "a"}, id="none"),
        pytest.param({1.5: "a"}, id="float"),
        pytest.param({"a": {"b": [{2: "c"}]}}, id="deep key"),
        pytest.param({"a": nested(150, "\x00")}, id="deep NUL"),
        pytest.param({"a": nested(150, {"\x00": 1})}, id="deep NUL in a key"),
        pytest.param({"a": nested(600, "\x00")}, id="NUL deeper than is allowed"),
        pytest.param({"a": ({"b": "\x00"},)}, id="NUL in a tuple"),
    ],
)
def test_keys_that_are_no_texts_and_a_nul_at_any_depth_are_refused_and_nothing_is_written(
    engine: Engine, put: Put, bad: object
) -> None:
    tenant = new_tenant(engine)
    with engine.connect() as connection:
        with pytest.raises(
            InvalidExample, match=r"^example 1 cannot be stored: .*(must be a text|NUL|nested too deep)"
        ):
            put(connection, tenant, [{"good": 1}, bad])
        connection.rollback()
    assert waiting_ids(engine, tenant) == []


@both_ways
@pytest.mark.parametrize("levels", [100, 900, 5_000])
def test_deep_examples_are_stored_or_refused_as_such(engine: Engine, put: Put, levels: int) -> None:
    tenant = new_tenant(engine)
    refusal = ""
    with engine.connect() as connection:
        try:
            put(connection, tenant, [{"a": nested(levels, 1)}])
            connection.commit()
        except InvalidExample as error:
            refusal = str(error)
    if waiting_ids(engine, tenant):
        assert refusal == ""
        assert levels < 5_000
    else:
        assert "nested too deeply" in refusal
        assert levels > 100


# What an error shows


def table_is_gone(tenant: Tenant) -> str:
    return f"DROP TABLE {driver_identifier(tenant.schema)}.ml_outbox"


def row_is_refused(tenant: Tenant) -> str:
    # PostgreSQL quotes the row that fails in the lines below the first.
    return f"ALTER TABLE {driver_identifier(tenant.schema)}.ml_outbox ADD CONSTRAINT never CHECK (id < 0)"


def ids_come_again(tenant: Tenant) -> str:
    # As after a restore that has forgotten the sequence.
    table = f"{driver_identifier(tenant.schema)}.ml_outbox"
    return f"INSERT INTO {table} (id, example) OVERRIDING SYSTEM VALUE VALUES (1, '{{}}')"


@pytest.mark.parametrize(
    ("put", "damage"),
    [
        (enqueue_training, table_is_gone),
        (copy_training, table_is_gone),
        (enqueue_training, ids_come_again),
        (copy_training, ids_come_again),
        (enqueue_training, row_is_refused),
        (copy_training, row_is_refused),
    ],
)
def test_an_error_of_the_database_quotes_no_example(
    engine: Engine, plain_engine: Engine, put: Put, damage: Callable[[Tenant], str]
) -> None:
    tenant = new_tenant(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql(damage(tenant))
    with plain_engine.connect() as connection, pytest.raises((DBAPIError, psycopg.Error)) as raised:
        put(connection, tenant, [{"name": PRIVATE}])
    logged = "".join(traceback.format_exception(raised.value))
    assert any(words in logged for words in ("does not exist", "violates check", "duplicate key"))
    assert PRIVATE not in logged
