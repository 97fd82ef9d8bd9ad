"""Enqueueing: what is accepted comes back as it was, what is not is refused by its place and writes nothing."""

import datetime
import decimal
import json
import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as examples_of
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from outbox_pipelines.database.url import dagster_storage_url
from outbox_pipelines.tenants.registry import Tenant, UnknownTenant
from outbox_pipelines.training.enqueue import InvalidExample, copy_training, enqueue_training
from tests.outboxes import enqueue, new_tenant

Put = Callable[[Connection, Tenant | str, Any], object]
"""Either way to put examples in."""

both_ways = pytest.mark.parametrize("put", [enqueue_training, copy_training])

NASTY: list[dict[str, Any]] = [
    {},
    {"": ""},
    {"n": None, "t": True, "f": False, "i": -1, "x": 1.5, "l": [], "o": {}},
    {"text": 'tab\t newline\n return\r quote" backslash\\ end \\. \\N \\x41 \b\f\x01\x7f'},
    {"the text": "\\u0000", "more of it": "\\\\u0000", "u0000": "u0000\\"},
    {"ü": "日本 😀 \u2028 \ufffd \ufffe"},
    {"%s": "%(x)s {0} :name $1", "'": "';--"},
    {"big": 2**100, "small": 5e-324, "large": 1.7976931348623157e308, "zero": 0.0},
    {"nested": {"list": [[1, [2, {"deep": [3]}]], None]}},
    {"tuple": (1, 2)},
    {"longest key of all" * 500: "x" * 100_000},
]


@pytest.fixture
def tenant(engine: Engine) -> Tenant:
    """A tenant whose schema's name needs quoting."""
    return new_tenant(engine, schema='tenant_x"y%')


@pytest.fixture
def psycopg2_engine(database_url: str) -> Iterator[Engine]:
    """An application's engine with the other driver."""
    engine = create_engine(dagster_storage_url(database_url))
    yield engine
    engine.dispose()


def stored(connection: Connection) -> list[tuple[int, str]]:
    """The outbox as text, by id."""
    rows = connection.exec_driver_sql('SELECT id, example::text FROM "tenant_x""y%%".ml_outbox ORDER BY id')
    return [(row[0], row[1]) for row in rows]


def committed(engine: Engine) -> list[Any]:
    """The examples that other connections see, parsed."""
    with engine.connect() as connection:
        return [json.loads(value) for _, value in stored(connection)]


def exact(value: str) -> object:
    """JSON text, parsed so that numbers are compared by their value and nothing is rounded."""
    return json.loads(value, parse_float=decimal.Decimal, parse_int=decimal.Decimal)


def nested(levels: int, innermost: object = 1) -> dict[str, object]:
    """An example of so many lists within each other."""
    value = innermost
    for _ in range(levels):
        value = [value]
    return {"nested": value}


def with_cycle() -> dict[str, object]:
    value: dict[str, object] = {}
    value["itself"] = value
    return value


def test_ids_come_back_in_the_order_of_the_examples(engine: Engine, tenant: Tenant) -> None:
    first = enqueue(engine, tenant, ({"n": number} for number in range(500)))
    second = enqueue(engine, tenant, [{"n": number} for number in range(500, 510)])
    assert first == sorted(first)
    assert second == sorted(second)
    with engine.connect() as connection:
        assert [(row_id, json.loads(value)["n"]) for row_id, value in stored(connection)] == list(
            zip(first + second, range(510), strict=True)
        )


def test_rows_are_dropped_with_the_callers_transaction(engine: Engine, tenant: Tenant) -> None:
    def fail_after_enqueueing() -> None:
        with engine.begin() as connection:
            enqueue_training(connection, tenant, [{"n": 3}])
            raise ZeroDivisionError

    with engine.connect() as connection:
        enqueue_training(connection, tenant, [{"n": 1}])
        assert len(stored(connection)) == 1
        connection.rollback()
    with Session(engine) as session:
        enqueue_training(session, tenant, [{"n": 2}])
        session.rollback()
    with pytest.raises(ZeroDivisionError):
        fail_after_enqueueing()
    assert committed(engine) == []


def test_a_savepoint_that_is_rolled_back_drops_its_rows_only(engine: Engine, tenant: Tenant) -> None:
    with engine.begin() as connection:
        enqueue_training(connection, tenant, [{"kept": True}])
        with connection.begin_nested() as savepoint:
            enqueue_training(connection, tenant, [{"kept": False}])
            savepoint.rollback()
    assert committed(engine) == [{"kept": True}]


@both_ways
def test_rows_are_kept_with_the_callers_commit_whatever_it_holds(engine: Engine, tenant: Tenant, put: Put) -> None:
    with engine.connect() as connection:
        put(connection, tenant, [{"by": "connection"}])
        connection.commit()
    with engine.connect() as connection, connection.begin():
        put(connection, "acme", [{"by": "begun connection"}])
    with Session(engine) as session:
        put(session, tenant, [{"by": "session"}])  # type: ignore[arg-type]
        session.commit()
    scoped = scoped_session(sessionmaker(engine))
    put(scoped, tenant, [{"by": "scoped session"}])  # type: ignore[arg-type]
    scoped.commit()
    scoped.remove()
    assert [row["by"] for row in committed(engine)] == ["connection", "begun connection", "session", "scoped session"]


def test_the_applications_own_writes_and_the_rows_commit_together(engine: Engine, tenant: Tenant) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE essays (title text)")
    for end in (Session.rollback, Session.commit):
        with Session(engine) as session:
            session.execute(text("INSERT INTO essays VALUES ('On Outboxes')"))
            enqueue_training(session, "acme", [{"words": 12}])
            end(session)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM essays")).scalar_one() == 1
    assert committed(engine) == [{"words": 12}]


@pytest.mark.parametrize("wanted", ["name", "id", "tenant"])
def test_the_tenant_is_named_by_name_by_id_or_by_itself(engine: Engine, tenant: Tenant, wanted: str) -> None:
    given_as: Any = {"name": tenant.name, "id": tenant.tenant_id, "tenant": tenant}[wanted]
    with engine.begin() as connection:
        assert enqueue_training(connection, given_as, [{}]) == [1]


@both_ways
@pytest.mark.parametrize("unknown", ["nobody", uuid.UUID(int=0)])
def test_an_unknown_tenant_is_told_even_without_examples(engine: Engine, put: Put, unknown: Any) -> None:
    either: list[list[dict[str, Any]]] = [[{}], []]
    for examples in either:
        with engine.begin() as connection, pytest.raises(UnknownTenant, match=f"no tenant '{unknown}' is registered"):
            put(connection, unknown, examples)


def test_nothing_is_no_rows(engine: Engine, tenant: Tenant) -> None:
    with engine.begin() as connection:
        assert enqueue_training(connection, tenant, []) == []
        assert enqueue_training(connection, tenant, iter(())) == []
        assert copy_training(connection, tenant, []) == 0
    assert committed(engine) == []


def test_psycopg2_works_too(engine: Engine, psycopg2_engine: Engine, tenant: Tenant) -> None:
    assert enqueue(psycopg2_engine, tenant, NASTY) == list(range(1, len(NASTY) + 1))
    with engine.connect() as connection:
        for wanted, (_, value) in zip(NASTY, stored(connection), strict=True):
            assert exact(value) == exact(json.dumps(wanted))
    with psycopg2_engine.connect() as connection:
        enqueue_training(connection, tenant, [{"dropped": True}])
        connection.rollback()
    with pytest.raises(InvalidExample, match="NUL"):
        enqueue(psycopg2_engine, tenant, [{"a": "\x00"}])
    assert len(committed(engine)) == len(NASTY)


def test_copying_needs_psycopg_3_and_says_so(psycopg2_engine: Engine, engine: Engine, tenant: Tenant) -> None:
    with (
        psycopg2_engine.begin() as connection,
        pytest.raises(InvalidExample, match=r"needs an engine with psycopg 3 \(postgresql\+psycopg://\)"),
    ):
        copy_training(connection, tenant, [{}])
    assert committed(engine) == []


def test_both_ways_store_the_same(engine: Engine, tenant: Tenant) -> None:
    with engine.begin() as connection:
        assert len(enqueue_training(connection, tenant, NASTY)) == len(NASTY)
        assert copy_training(connection, tenant, iter(NASTY)) == len(NASTY)
        texts = [value for _, value in stored(connection)]
    assert texts[: len(NASTY)] == texts[len(NASTY) :]
    for wanted, value in zip(NASTY, texts, strict=False):
        assert exact(value) == exact(json.dumps(wanted))


def test_copied_rows_are_dropped_with_the_callers_transaction(engine: Engine, tenant: Tenant) -> None:
    with engine.connect() as connection:
        assert copy_training(connection, tenant, [{"n": 1}] * 1000) == 1000
        connection.rollback()
    assert committed(engine) == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


@both_ways
@examples_of(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=st.dictionaries(st.text(max_size=10), json_values, max_size=5))
@example({"a": "\\u0000"})
@example({"a": 1e23, "b": 2**64, "c": -0.0, "d": 5e-324})
def test_whatever_is_accepted_comes_back_equal_and_the_rest_is_refused(
    engine: Engine, tenant: Tenant, put: Put, value: dict[str, Any]
) -> None:
    refused = ""
    with engine.connect() as connection:
        try:
            put(connection, tenant, [value])
        except InvalidExample as error:
            refused = str(error)
        else:
            ((_, kept),) = stored(connection)
            assert exact(kept) == exact(json.dumps(value, allow_nan=False))
        connection.rollback()
    if refused:
        assert refused.startswith("example 0 cannot be stored: ")
        told = json.dumps(value)
        assert any(sign in told for sign in ("\\u0000", "\\ud", "NaN", "Infinity"))


class Unlisted(Mapping[str, Any]):
    """A mapping that is no dict."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content

    def __getitem__(self, key: str) -> Any:
        return self._content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)


def test_any_mapping_is_an_example(engine: Engine, tenant: Tenant) -> None:
    enqueue(engine, tenant, [MappingProxyType({"a": 1}), Unlisted({"a": 2})])  # type: ignore[list-item]
    assert committed(engine) == [{"a": 1}, {"a": 2}]


BAD: dict[str, tuple[str, list[Any]]] = {
    "holds NUL": (
        "the character NUL",
        [
            *({"a": "\x00"}, {"\x00": 1}, {"a": [{"b": ["x", "y\x00z"]}]}, {"a": {"b\x00": 1}}),
            *({"a": "\\u0000 and \x00"}, {"a": ("\x00",)}, nested(100, "\x00")),
        ],
    ),
    "holds a lone surrogate": (
        "half of a surrogate pair",
        [{"a": "\ud800"}, {"a": "\udfff\ud800"}, {"\udc00": 1}, {"a": {"b": ["\ud83d"]}}],
    ),
    "holds no finite number": ("NaN or infinite", [{"a": math.nan}, {"a": [math.inf]}, {"a": {"b": -math.inf}}]),
    "is deep": (
        "nested too deeply|Circular|NUL",
        [nested(100_000), nested(100_000, "\x00"), nested(900, "\x00"), with_cycle()],
    ),
    "is no object": ("it is a (NoneType|list|str|int|bytes), and must be a JSON object", [None, [1], "text", 7, b"{}"]),
    "has a value of another kind": (
        "a value is a (datetime|Decimal|UUID|bytes|set), which JSON cannot say",
        [
            {"a": value}
            for value in (
                *(datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), decimal.Decimal("1.5"), [uuid.UUID(int=0)]),
                *(b"bytes", {1, 2}),
            )
        ],
    ),
    "has a key of another kind": (
        "a key is a (int|NoneType|tuple), and must be a text",
        [{1: "a", "1": "b"}, {"a": {None: 1}}, {("a", "b"): 1}],
    ),
    "holds too long a number": ("digits", [{"a": 10**5000}]),
}


@both_ways
@pytest.mark.parametrize("kind", BAD)
def test_an_example_that_cannot_be_stored_is_told_by_its_place_and_nothing_is_written(
    engine: Engine, tenant: Tenant, put: Put, kind: str
) -> None:
    flaw, examples = BAD[kind]
    for bad in examples:
        told = rf"^example 2 cannot be stored: .*({flaw})"
        with pytest.raises(InvalidExample, match=told), engine.begin() as connection:
            put(connection, tenant, [{"good": 1}, {"good": 2}, bad, {"good": 3}])
        assert committed(engine) == []


@both_ways
@pytest.mark.parametrize("not_a_list", [{"a": 1}, "text", b"bytes", Unlisted({})])
def test_one_object_or_a_text_instead_of_a_list_is_refused(
    engine: Engine, tenant: Tenant, put: Put, not_a_list: Any
) -> None:
    with (
        pytest.raises(InvalidExample, match=f"must be a list of JSON objects, not one {type(not_a_list).__name__}"),
        engine.begin() as connection,
    ):
        put(connection, tenant, not_a_list)
    assert committed(engine) == []


def test_after_a_refusal_the_transaction_goes_on_without_any_of_the_examples(engine: Engine, tenant: Tenant) -> None:
    with engine.begin() as connection:
        enqueue_training(connection, tenant, [{"before": 1}])
        with pytest.raises(InvalidExample):
            enqueue_training(connection, tenant, [{"good": 1}, {"bad": "\x00"}])
        enqueue_training(connection, tenant, [{"after": 1}])
    assert committed(engine) == [{"before": 1}, {"after": 1}]


def test_after_a_refused_copy_nothing_of_the_transaction_is_kept(engine: Engine, tenant: Tenant) -> None:
    with engine.connect() as connection:
        enqueue_training(connection, tenant, [{"before": 1}])
        with pytest.raises(InvalidExample, match=r"^example 1 "):
            copy_training(connection, tenant, [{"good": 1}, {"bad": "\x00"}])
        connection.commit()
    assert committed(engine) == []


def test_a_source_of_examples_that_fails_writes_nothing(engine: Engine, tenant: Tenant) -> None:
    def source() -> Iterable[dict[str, Any]]:
        yield {"good": 1}
        raise OSError("the file ended early")

    for put in (enqueue_training, copy_training):
        with pytest.raises(OSError, match="ended early"), engine.begin() as connection:
            put(connection, tenant, source())
    assert committed(engine) == []


@both_ways
def test_an_example_that_is_too_large_is_told_with_its_size_the_limit_and_the_setting(
    engine: Engine, tenant: Tenant, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBOX_MAX_EXAMPLE_BYTES", "2000")
    # {"a":"..."} takes 8 bytes beside the text, and ü two.
    fits, too_large = {"a": "ü" * 996}, {"a": "ü" * 996 + "x"}
    told = r"example 1 .*it is 2,001 bytes of JSON, more than the 2,000 allowed \(OUTBOX_MAX_EXAMPLE_BYTES\)"
    with pytest.raises(InvalidExample, match=told), engine.begin() as connection:
        put(connection, tenant, [fits, too_large])
    assert committed(engine) == []
    with engine.begin() as connection:
        put(connection, tenant, [fits])
    assert committed(engine) == [fits]


def test_the_limit_can_be_given_with_the_call(engine: Engine, tenant: Tenant) -> None:
    with engine.begin() as connection:
        for put in (enqueue_training, copy_training):
            with (
                pytest.raises(InvalidExample, match="9 bytes of JSON, more than the 8 allowed"),
                connection.begin_nested(),
            ):
                put(connection, tenant, [{"a": "b"}], max_bytes=8)
            put(connection, tenant, [{"a": "b"}], max_bytes=9)
    assert committed(engine) == [{"a": "b"}] * 2


def test_plain_sql_works_too(engine: Engine, tenant: Tenant) -> None:
    insert = text("""INSERT INTO "tenant_x""y%".ml_outbox (example) VALUES ('{"by": "hand"}') RETURNING *""")
    with engine.begin() as connection:
        row = connection.execute(insert).one()
        assert (row.id, row.attempts, row.last_error) == (1, 0, None)
        assert row.created_at.tzinfo is not None
    assert committed(engine) == [{"by": "hand"}]


@pytest.mark.parametrize("value", ["1", '"text"', "[]", "null", "true"])
def test_plain_sql_cannot_store_what_is_no_object(engine: Engine, tenant: Tenant, value: str) -> None:
    insert = text("""INSERT INTO "tenant_x""y%".ml_outbox (example) VALUES (CAST(:value AS jsonb))""")
    with pytest.raises(IntegrityError, match="ml_outbox_example_is_an_object"), engine.begin() as connection:
        connection.execute(insert, {"value": value})
    assert committed(engine) == []


def test_a_database_error_does_not_quote_the_examples(engine: Engine, psycopg2_engine: Engine, tenant: Tenant) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql('ALTER TABLE "tenant_x""y%%".ml_outbox ADD CHECK (id < 0)')
    with pytest.raises(IntegrityError) as raised:
        enqueue(psycopg2_engine, tenant, [{"secret": "hunter2"}])
    assert "[SQL parameters hidden" in str(raised.value)
    assert "[parameters:" not in str(raised.value)
