"""With a million completed messages beside the few that are alive, each hot statement finds its rows by its index.

The statements are those that the functions really send, and are planned twice: for their
parameters, and without knowing them, as the server does for a statement that comes again and again.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import Connection, Engine, event, text

from outbox_pipelines.database.engine import open_engine
from outbox_pipelines.database.migrate import migrate
from outbox_pipelines.jobs import outbox
from outbox_pipelines.jobs.enqueue import enqueue_job
from outbox_pipelines.jobs.kinds import Kinds
from outbox_pipelines.jobs.message import MESSAGES, AttemptOutcome, Claimed, Settlement
from outbox_pipelines.jobs.publisher import Publisher, confirm, publish, take_back
from outbox_pipelines.jobs.recovery import recover, recover_orphans
from outbox_pipelines.jobs.transport import Published
from outbox_pipelines.lease.lease import Lease, renew
from outbox_pipelines.settings import load_settings
from outbox_pipelines.upkeep.snapshot import count_jobs
from tests.conftest import made_database
from tests.jobs.messages import APP_JOBS, KIND, a_kind, make_app_jobs, rows, run, value
from tests.jobs.test_publisher import MemoryRuns

FILL = """
    INSERT INTO outbox.messages (kind, job_id, state, outcome, unique_key, available_at, completed_at, claims)
    SELECT CASE n % 3 WHEN 0 THEN 'other' ELSE 'work' END, n::text, 'Completed',
           CASE WHEN n % 1000 = 0 THEN 'failed' ELSE 'succeeded' END, CASE WHEN n % 2 = 0 THEN 'key ' || n END,
           now() - n * interval '2 seconds', now() - n * interval '2 seconds', 1
    FROM generate_series(1, 1000000) AS n;
    INSERT INTO outbox.messages (kind, job_id, unique_key, priority, available_at, parked)
    SELECT CASE n % 5 WHEN 0 THEN 'other' WHEN 1 THEN 'unknown' ELSE 'work' END, (2000000 + n)::text,
           'live ' || n, n % 3, now() + (n - 5000) * interval '1 second', n % 50 = 1
    FROM generate_series(1, 10000) AS n;
    INSERT INTO outbox.messages (kind, state, publish_token, published_at, publish_attempts)
    SELECT 'work', CASE n % 2 WHEN 0 THEN 'Publishing' ELSE 'Published' END, gen_random_uuid(),
           now() - n * interval '1 minute', 1
    FROM generate_series(1, 10) AS n;
    INSERT INTO outbox.messages (kind, state, lease_token, lease_expires_at, claimed_at, claims, lease_holder)
    SELECT 'work', 'Processing', gen_random_uuid(), now() + (n - 50) * interval '1 minute', now(), 1, 'w'
    FROM generate_series(1, 100) AS n;
    INSERT INTO outbox.job_attempts (message_id, claim, attempt, run_id, outcome, started_at)
    SELECT n, 1, 1, 'w', 'succeeded', now() FROM generate_series(1, 100000) AS n;
    INSERT INTO app.jobs (status) SELECT CASE WHEN n % 1000 = 0 THEN 'queued' ELSE 'done' END
    FROM generate_series(1, 50000) AS n;
    INSERT INTO outbox.job_servers (kind, server, consumers) VALUES ('work', 'w', 2), ('other', 'w', 2);
"""


@pytest.fixture(scope="module")
def full(server_url: str) -> Iterator[Engine]:
    """A database with a million messages that are over and some ten thousand that are not."""
    with made_database(server_url, f"outbox_full_{os.getpid()}") as url:
        engine = open_engine(load_settings(statement_timeout=120), url, application_name="tests")
        migrate(engine)
        make_app_jobs(engine)
        with engine.begin() as connection:
            # The indexes are made when the rows are there, which is faster, from what the migration made.
            made = connection.execute(
                text("SELECT indexname, indexdef FROM pg_indexes WHERE tablename = 'messages' AND indexname !~ 'pkey'")
            ).all()
            for index in made:
                connection.exec_driver_sql(f"DROP INDEX outbox.{index.indexname}")
            connection.exec_driver_sql("SET LOCAL session_replication_role = replica")
            for statement in FILL.split(";")[:-1]:
                connection.exec_driver_sql(statement.replace("%", "%%"))
            for index in made:
                connection.exec_driver_sql(index.indexdef)
        run(engine, "ANALYZE")
        yield engine
        engine.dispose()


@dataclass
class Plan:
    """What the server means to do for a statement, as far as it concerns the messages."""

    statement: str
    indexes: set[str] = field(default_factory=set)
    arbiters: set[str] = field(default_factory=set)
    scans: list[str] = field(default_factory=list)
    """Nodes that read the whole table, or a whole index."""

    sorts: bool = False
    """Whether rows are sorted before they are locked, instead of being found in their order."""

    cost: float = 0.0
    """Of the dearest step of its plans, in the planner's units. It counts what EXPLAIN does not show."""

    def read(self, node: Any, *, locking: bool = False) -> None:
        self.cost = max(self.cost, node["Total Cost"])
        self.sorts = self.sorts or (locking and node["Node Type"] == "Sort")
        self.arbiters |= set(node.get("Conflict Arbiter Indexes", []))
        name = node.get("Index Name", "")
        if name.startswith("messages_"):
            self.indexes.add(name)
            if "Index Cond" not in node and name in WHOLE:
                self.scans.append(f"{node['Node Type']} of all of {name}")
        if node.get("Relation Name") == "messages" and node["Node Type"] == "Seq Scan":
            self.scans.append("Seq Scan")
        for below in node.get("Plans", []):
            self.read(below, locking=locking or node["Node Type"] == "LockRows")


WHOLE = {"messages_pkey", "messages_completed", "messages_job"}
"""The indexes that hold all of the million."""

MANY_SCANS = 200_000.0
"""What reading the whole table a few times costs, as a step does that is repeated and hidden."""


class RolledBack:
    """Stands for an engine: everything happens in one transaction that is rolled back."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        with self._connection.begin_nested():
            yield self._connection

    connect = begin


Act = Callable[[Connection], object]


def plans(engine: Engine, act: Act) -> list[Plan]:
    """The plans of all statements that something sends; what it does is undone."""
    sent: list[tuple[str, Any]] = []

    def note(_connection: Connection, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
        sent.append((statement, parameters))

    with engine.connect() as connection:
        event.listen(connection, "before_cursor_execute", note)
        act(connection)
        event.remove(connection, "before_cursor_execute", note)
        connection.rollback()
        made = []
        for statement, parameters in sent:
            if not re.match(r"\s*(WITH|SELECT|UPDATE|INSERT|DELETE)", statement):
                continue
            plan = Plan(statement)
            plan.read(explained(connection, "EXPLAIN (FORMAT JSON) " + statement, parameters))
            if (connection.dialect.server_version_info or (0,)) >= (16,):
                generic = "EXPLAIN (FORMAT JSON, GENERIC_PLAN) " + as_prepared(statement)
                plan.read(explained(connection, generic, None))
            made.append(plan)
        return made


def explained(connection: Connection, statement: str, parameters: Any) -> Any:
    """The plan's tree."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    return driver.execute(statement, parameters, prepare=False).fetchall()[0][0][0]["Plan"]


def as_prepared(statement: str) -> str:
    """The statement with numbers for its parameters, as the driver prepares it."""
    names: list[str] = []

    def number(found: "re.Match[str]") -> str:
        if found[1] not in names:
            names.append(found[1])
        return f"${names.index(found[1]) + 1}"

    return re.sub(r"%\((\w+)\)s", number, statement).replace("%%", "%")


TOKEN = uuid4()
PENDING = 1_000_050
PUBLISHING = 1_010_002
PROCESSING = 1_010_015
CLAIM = Claimed(Lease(MESSAGES, PROCESSING, TOKEN, 60.0), KIND, None, {}, 1, 1, 0.0)
ONE = Published(PUBLISHING, 1, 1, TOKEN)


def claim_by_id(connection: Connection) -> object:
    return [
        outbox.claim_message(connection, message_id, kind=KIND, holder="me", seconds=60, token=uuid4())
        for message_id in (PENDING, PUBLISHING, PROCESSING, 1)
    ]


def claim_due(connection: Connection) -> object:
    how: dict[str, Any] = {"limit": 50, "ready": 2, "alone": True, "attempts": 5, "holder": "me", "seconds": 60}
    return outbox.claim_due(connection, KIND, token=uuid4(), **how)


def settle(connection: Connection) -> object:
    return outbox.settle(connection, [Settlement(CLAIM, one) for one in AttemptOutcome], holder="me")


def look_up(connection: Connection) -> object:
    return enqueue_job(connection, KIND, unique_key="live 2")


def recover_all(connection: Connection) -> object:
    kinds = Kinds([a_kind(), a_kind("other")])
    return recover(cast("Engine", RolledBack(connection)), kinds, publish_timeout=120, also_published=True)


def orphans(connection: Connection) -> object:
    return recover_orphans(cast("Engine", RolledBack(connection)), [a_kind(domain=APP_JOBS)])


def poll(connection: Connection) -> object:
    return Publisher(cast("Engine", RolledBack(connection)), MemoryRuns(), timeout=120).poll(a_kind(consumers=16))


def purge(connection: Connection) -> object:
    """What retention does: the oldest that are over, a few hundred at a time."""
    return connection.execute(
        text("""
            DELETE FROM outbox.messages WHERE message_id = ANY (ARRAY(
                SELECT message_id FROM outbox.messages
                WHERE state = 'Completed' AND completed_at < now() - interval '14 days'
                ORDER BY completed_at LIMIT 500 FOR UPDATE SKIP LOCKED
            ))
        """)
    )


def snapshot(connection: Connection) -> object:
    """What backlog snapshots and health ask every few seconds."""
    return count_jobs(connection, since=connection.execute(text("SELECT now() - interval '5 minutes'")).scalar_one())


HOT: dict[str, tuple[Act, list[set[str]]]] = {
    "claim what is due": (claim_due, [{"messages_due", "messages_pkey"}]),
    "claim one": (claim_by_id, [{"messages_pkey"}] * 2),
    "settle": (settle, [{"messages_pkey"}]),
    "renew": (lambda connection: renew(connection, [CLAIM.lease]), [{"messages_pkey"}]),
    "note progress": (lambda connection: outbox.note_progress(connection, CLAIM, "s", 0.5), [{"messages_pkey"}]),
    "find a claim by its token": (
        lambda connection: outbox.claimed_under(connection, KIND, token=TOKEN, seconds=60),
        [{"messages_in_flight"}],
    ),
    "expire": (outbox.expire, [{"messages_in_flight", "messages_pkey"}]),
    "expire a dead worker's": (lambda connection: outbox.expire_dead(connection, [CLAIM.lease]), [{"messages_pkey"}]),
    "publish": (
        lambda connection: publish(connection, a_kind(consumers=16)),
        [{"messages_due", "messages_in_flight", "messages_pkey"}],
    ),
    "confirm": (lambda connection: confirm(connection, [ONE]), [{"messages_pkey"}]),
    "take back": (lambda connection: take_back(connection, ONE, "no", lost=1), [{"messages_pkey"}]),
    "look for fates": (poll, [{"messages_in_flight"}]),
    "look up a key": (look_up, [{"messages_unique_key"}]),
    "find orphans": (orphans, [{"messages_job"}]),
    "recover": (
        recover_all,
        [
            {"messages_in_flight", "messages_pkey"},
            {"messages_in_flight", "messages_pkey"},
            {"messages_parked", "messages_pkey"},
            {"messages_due", "messages_pkey"},
        ],
    ),
    "snapshot": (
        snapshot,
        [{"messages_due", "messages_in_flight", "messages_completed", "messages_not_succeeded", "messages_parked"}],
    ),
    "purge": (purge, [{"messages_completed", "messages_pkey"}]),
}


@pytest.mark.parametrize("what", HOT)
def test_a_hot_statement_uses_its_index_and_reads_no_whole_table(full: Engine, what: str) -> None:
    act, wanted = HOT[what]
    made = [plan for plan in plans(full, act) if plan.indexes or plan.scans]
    for plan in made:
        assert plan.scans == [], plan.statement
        assert plan.cost < MANY_SCANS, plan.statement
    for indexes in wanted:
        assert any(indexes <= plan.indexes for plan in made), [plan.indexes for plan in made]


@pytest.mark.parametrize("what", ["claim what is due", "publish"])
def test_the_most_urgent_are_read_in_their_order_and_not_sorted(full: Engine, what: str) -> None:
    (plan,) = [plan for plan in plans(full, HOT[what][0]) if "messages_due" in plan.indexes]
    assert not plan.sorts


def test_a_unique_key_is_decided_by_its_index(full: Engine) -> None:
    assert {"messages_unique_key"} in [plan.arbiters for plan in plans(full, look_up)]


def test_what_these_plans_are_made_for_is_really_there(full: Engine) -> None:
    (scan,) = plans(full, lambda connection: connection.execute(text("SELECT min(created_at) FROM outbox.messages")))
    assert scan.scans
    assert MANY_SCANS / 20 < scan.cost < MANY_SCANS
    assert value(full, "SELECT count(*) FROM outbox.messages WHERE state = 'Completed'") == 1_000_000
    assert value(full, "SELECT count(*) FROM outbox.messages WHERE state = 'Pending'") == 10_000
    for message_id, state in ((PENDING, "Pending"), (PUBLISHING, "Publishing"), (PROCESSING, "Processing")):
        (found,) = rows(full, "SELECT state, kind FROM outbox.messages WHERE message_id = :id", id=message_id)
        assert found.state == state
