"""A leased table of the tests' own, and what they do with its rows."""

from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Engine, Row, text

from outbox_pipelines.lease.lease import Lease, LeasedTable, Refused, claim

THINGS = LeasedTable("public.things", "id")


def make_things(engine: Engine, *ids: int) -> None:
    """The table, with rows of these ids."""
    with engine.begin() as connection:
        connection.exec_driver_sql("""
            CREATE TABLE public.things (
                id bigint PRIMARY KEY, lease_token uuid, lease_expires_at timestamptz, lease_holder text,
                work text NOT NULL DEFAULT 'untouched', open boolean NOT NULL DEFAULT true
            )
        """)
        connection.execute(text("INSERT INTO things (id) SELECT unnest(:ids)"), {"ids": list(ids)})


def ask_for(engine: Engine, key: int = 1, *, holder: str = "me", seconds: float = 60, **how: Any) -> Lease | Refused:
    """Try to claim a row in a transaction of its own."""
    with engine.begin() as connection:
        answer = claim(connection, THINGS, key, holder=holder, seconds=seconds, **how)
    return answer if isinstance(answer, Refused) else answer[0]


def take(engine: Engine, key: int = 1, *, holder: str = "me", seconds: float = 60, **how: Any) -> Lease:
    """Claim a row that is free."""
    lease = ask_for(engine, key, holder=holder, seconds=seconds, **how)
    assert isinstance(lease, Lease)
    return lease


def let_expire(engine: Engine, *, in_seconds: float = -1) -> None:
    """Move the end of every lease, instead of waiting for it."""
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE things SET lease_expires_at = clock_timestamp() + make_interval(secs => :seconds)"),
            {"seconds": in_seconds},
        )


def row(engine: Engine, key: int = 1) -> Row[Any]:
    """The row as it is, with the seconds until its lease ends."""
    with engine.connect() as connection:
        return read(connection, key)


def read(connection: Connection, key: int) -> Row[Any]:
    """The same on a connection that is already there."""
    return connection.execute(
        text("""
            SELECT *, extract(epoch FROM lease_expires_at - clock_timestamp())::float8 AS seconds_left
            FROM things WHERE id = :id
        """),
        {"id": key},
    ).one()


def token(engine: Engine, key: int = 1) -> UUID | None:
    """Whose the row is."""
    found: UUID | None = row(engine, key).lease_token
    return found


def waiting_for_locks(engine: Engine) -> int:
    """Statements of this database that wait for another transaction."""
    with engine.connect() as connection:
        return int(
            connection.execute(
                text("""
                    SELECT count(*) FROM pg_stat_activity
                    WHERE datname = current_database() AND wait_event_type = 'Lock'
                """)
            ).scalar_one()
        )
