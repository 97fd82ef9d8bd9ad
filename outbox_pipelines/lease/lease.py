"""One lease for everything that may have one worker at a time: tenants and messages.

A lease is a token and an expiry on a row. Whoever holds the token may write; all others
may not, whatever they believe. Every instant comes from the database's clock.

All locking SQL of this package's leases is in this module. Why it is safe, in READ
COMMITTED: each statement finds its row by key and locks it by updating it. When two
statements meet on a row, the second waits and then checks its own condition again on the
row as the first left it. A claim after a claim therefore finds a foreign token that has
not expired, and any write after a takeover finds a token that is not its own; both change
nothing. ``clock_timestamp()`` rather than ``now()``: the waiting itself must count.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import Connection, Row, text

from outbox_pipelines.errors import OutboxError


class LeaseLost(OutboxError):
    """The row is leased under another token, or under none: nothing was written."""


@dataclass(frozen=True)
class LeasedTable:
    """A table whose rows are leased.

    It has the columns ``lease_token uuid``, ``lease_expires_at timestamptz`` and
    ``lease_holder text``.
    """

    name: str
    """Qualified with its schema, as it stands in SQL."""

    key: str
    """The column that identifies a row."""

    key_type: str = "bigint"
    """That column's type in SQL."""


@dataclass(frozen=True)
class Lease:
    """A claim on one row. It may be lost at any time; only the database knows."""

    table: LeasedTable
    key: Any
    token: UUID
    seconds: float
    """How long it lasts from each claim or renewal."""

    def __hash__(self) -> int:
        # Leases are looked up several times for each job, and two on one row are seldom together.
        return hash(self.key)


@dataclass(frozen=True)
class Refused:
    """A claim that was not granted."""

    holder: str | None
    """Who holds the lease; none when nobody does, and the row is not eligible or not there."""

    seconds_left: float | None
    """When to come back: the rest of the holder's lease, at least 1 s and at most one lease."""


def claim(
    connection: Connection,
    table: LeasedTable,
    key: Any,
    *,
    holder: str,
    seconds: float,
    token: UUID | None = None,
    only_if: str = "true",
    also_set: str = "",
    returning: str = "true AS claimed",
    parameters: Mapping[str, object] | None = None,
) -> tuple[Lease, Row[Any]] | Refused:
    """Take the lease on a row when it is free or has expired.

    Args:
        connection: the caller commits.
        table: where the row is.
        key: which row.
        holder: shown to people, for example a run's id; decides nothing.
        seconds: how long the lease lasts.
        token: give the same one to repeat a claim whose outcome is unknown.
        only_if: a further SQL condition on the row.
        also_set: SQL assignments of other columns, made with the claim.
        returning: SQL expressions of the claimed row to return.
        parameters: those that the given SQL names.
    """
    lease = Lease(table, key, token or uuid4(), seconds)
    row = connection.execute(
        text(f"""
            UPDATE {table.name}
            SET lease_token = :token,
                lease_expires_at = clock_timestamp() + make_interval(secs => :seconds),
                lease_holder = :holder {"," if also_set else ""} {also_set}
            WHERE {table.key} = :key
              AND (lease_token IS NULL OR lease_expires_at <= clock_timestamp() OR lease_token = :token)
              AND ({only_if})
            RETURNING {returning}
        """),
        {**(parameters or {}), "token": lease.token, "seconds": seconds, "holder": holder, "key": key},
    ).one_or_none()
    return _refusal(connection, lease) if row is None else (lease, row)


def _refusal(connection: Connection, lease: Lease) -> Refused:
    row = connection.execute(
        text(f"""
            SELECT lease_holder,
                   extract(epoch FROM lease_expires_at - clock_timestamp())::float8 AS seconds_left
            FROM {lease.table.name}
            WHERE {lease.table.key} = :key AND lease_expires_at > clock_timestamp()
        """),
        {"key": lease.key},
    ).one_or_none()
    if row is None:
        return Refused(None, None)
    return Refused(row.lease_holder, min(max(row.seconds_left, 1.0), lease.seconds))


@dataclass(frozen=True)
class Renewal:
    """What a renewal of several leases found."""

    renewed: set[Lease]
    lost: set[Lease]
    """Neither renewed nor lost are those whose rows another transaction had locked."""


def renew(connection: Connection, leases: Iterable[Lease]) -> Renewal:
    """Extend leases of one table, each by its own length.

    Rows that others have locked are skipped, so that one of them does not cost the leases on
    all the others; whether they are still ours is read without a lock.
    """
    # One claim may have taken several rows under one token.
    held = {(lease.key, lease.token): lease for lease in leases}
    if not held:
        return Renewal(set(), set())
    table = next(iter(held.values())).table
    pairs = f"unnest(CAST(:keys AS {table.key_type}[]), CAST(:tokens AS uuid[]))"
    renewed = connection.execute(
        text(f"""
            WITH mine AS (
                SELECT leased.{table.key} AS key, held.seconds
                FROM unnest(CAST(:keys AS {table.key_type}[]), CAST(:tokens AS uuid[]), CAST(:seconds AS float8[]))
                     AS held (key, token, seconds)
                JOIN {table.name} AS leased
                  ON leased.{table.key} = held.key AND leased.lease_token = held.token
                FOR UPDATE OF leased SKIP LOCKED
            )
            UPDATE {table.name} AS leased
            SET lease_expires_at = clock_timestamp() + make_interval(secs => mine.seconds)
            FROM mine WHERE leased.{table.key} = mine.key
            RETURNING leased.{table.key}, leased.lease_token
        """),
        {
            "keys": [key for key, _ in held],
            "tokens": [token for _, token in held],
            # psycopg refuses a list of whole numbers and others.
            "seconds": [float(lease.seconds) for lease in held.values()],
        },
    )
    kept = {held[key, token] for key, token in renewed}
    unsure = [lease for lease in held.values() if lease not in kept]
    still_ours: set[Lease] = set()
    if unsure:
        found = connection.execute(
            text(f"""
                SELECT leased.{table.key}, leased.lease_token FROM {pairs} AS held (key, token)
                JOIN {table.name} AS leased ON leased.{table.key} = held.key AND leased.lease_token = held.token
            """),
            {"keys": [lease.key for lease in unsure], "tokens": [lease.token for lease in unsure]},
        )
        still_ours = {held[key, token] for key, token in found}
    return Renewal(renewed=kept, lost=set(unsure) - still_ours)


def release(
    connection: Connection,
    lease: Lease,
    *,
    also_set: str = "",
    parameters: Mapping[str, object] | None = None,
) -> None:
    """Give the lease back, changing other columns of the row with it.

    Raises:
        LeaseLost: the row is somebody else's now; nothing was changed.
    """
    done = connection.execute(
        text(f"""
            UPDATE {lease.table.name}
            SET lease_token = NULL, lease_expires_at = NULL, lease_holder = NULL {"," if also_set else ""} {also_set}
            WHERE {lease.table.key} = :lease_key AND lease_token = :lease_token
        """),
        {**(parameters or {}), "lease_key": lease.key, "lease_token": lease.token},
    )
    if done.rowcount == 0:
        raise lost(lease)


def fence(table: LeasedTable, *, returning: str) -> str:
    """A statement for a CTE that renews the lease, and returns a row only while it is held.

    A write that says ``WHERE EXISTS (SELECT FROM held)`` happens in the same transaction as
    the renewal or not at all: a taker waits for the renewed row until that transaction ends.
    For ``exec_driver_sql``, with the parameters of :func:`fence_parameters`.
    """
    return f"""
        UPDATE {table.name}
        SET lease_expires_at = clock_timestamp() + make_interval(secs => %(lease_seconds)s)
        WHERE {table.key} = %(lease_key)s AND lease_token = %(lease_token)s
        RETURNING {returning}
    """


def fence_parameters(lease: Lease) -> dict[str, object]:
    """The parameters that :func:`fence` needs."""
    return {"lease_seconds": lease.seconds, "lease_key": lease.key, "lease_token": lease.token}


def lost(lease: Lease) -> LeaseLost:
    """The error for a write that found another token, or none, on the row."""
    return LeaseLost(
        f"the lease on {lease.table.name} {lease.key} is no longer ours: it expired and was taken over, "
        "or the row was removed; nothing was written"
    )
