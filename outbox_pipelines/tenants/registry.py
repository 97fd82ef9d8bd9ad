"""The tenants this installation serves: who they are, where their rows live, how they fare."""

import re
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from uuid import UUID, uuid4

from sqlalchemy import Connection, Row, text
from sqlalchemy.exc import IntegrityError

from outbox_pipelines.database.migrate import migrate_tenant
from outbox_pipelines.database.quoting import check_schema_name, driver_identifier, quote_identifier
from outbox_pipelines.errors import OutboxError

MAX_NAME_LENGTH = 100

MISSING_REMEDY = (
    "restore it, make missing tables anew with `outbox migrate`, "
    "or take the tenant out with `outbox tenants remove` and add it anew"
)
"""What helps when a tenant's schema or a table in it is missing."""


class UnknownTenant(OutboxError):
    """No tenant of that name or id is registered."""


class InvalidTenant(OutboxError):
    """The tenant cannot be registered as asked; the text says why."""


class TenantHasRows(OutboxError):
    """The tenant's outbox still holds rows."""


class Problem(StrEnum):
    """Why a tenant's last delivery failed."""

    UNWELL = "unwell"
    """The service did not answer, or said that it cannot now."""

    MISCONFIGURED = "misconfigured"
    """The service refused us: credentials, permission, or no such method."""

    BROKEN = "broken"
    """The tenant's schema, or a table in it, is missing."""


@dataclass(frozen=True)
class Tenant:
    """A registered tenant."""

    tenant_id: UUID
    name: str
    """For people: unique, the partition key in Dagster."""

    schema: str
    """The PostgreSQL schema that holds its outbox."""

    paused: bool


@dataclass(frozen=True)
class TenantStatus:
    """A tenant and how its deliveries fare."""

    tenant: Tenant
    lease_holder: str | None
    """The run that holds the lease, while it has not ended."""

    failure_count: int
    """Failed turns since the last one that delivered."""

    failing_since: datetime | None
    next_attempt_at: datetime | None
    problem: Problem | None
    last_error: str | None
    """In our words."""

    last_error_details: str | None
    """With the service's own words, which may hold a payload."""


# A comma, brackets and quotes have a meaning where Dagster's UI takes a list of partitions.
_FORBIDDEN_IN_NAMES = re.compile(r'[\x00-\x1f\x7f,"\[\]*\ud800-\udfff]|\.\.\.')

_COLUMNS = "tenant_id, name, schema_name, paused"


def add_tenant(
    connection: Connection, name: str, *, schema: str | None = None, tenant_id: UUID | None = None
) -> Tenant:
    """Register a tenant and make its outbox, in the caller's transaction.

    Args:
        connection: inside a transaction that the caller commits.
        name: 1 to 100 characters; unique.
        schema: where the outbox lives; made when missing, used when it is the
            application's. ``tenant_<32 hex digits>`` when not given.
        tenant_id: the application's own id of the tenant; a random one when not given.

    Raises:
        InvalidTenant: for a name or schema that is taken or not allowed.
        InvalidSchemaName: for a schema that cannot exist.
    """
    if not 1 <= len(name) <= MAX_NAME_LENGTH or name != name.strip() or _FORBIDDEN_IN_NAMES.search(name):
        raise InvalidTenant(
            f"a tenant cannot be called {name!r}: allowed are 1 to {MAX_NAME_LENGTH} characters without "
            "control characters, commas, double quotes, brackets, asterisks or '...', and no space at the ends"
        )
    identity = tenant_id or uuid4()
    schema_name = check_schema_name(f"tenant_{identity.hex}" if schema is None else schema)
    tenant = Tenant(identity, name, schema_name, paused=False)
    try:
        with connection.begin_nested():
            connection.execute(
                text("INSERT INTO outbox.tenants (tenant_id, name, schema_name) VALUES (:id, :name, :schema)"),
                {"id": identity, "name": name, "schema": schema_name},
            )
    except IntegrityError as error:
        taken = next(
            what
            for constraint, what in {
                "tenants_name_key": f"the name {name!r}",
                "tenants_schema_name_key": f"the schema {schema_name!r}",
                "tenants_pkey": f"the id {identity}",
            }.items()
            if constraint in str(error.orig)
        )
        raise InvalidTenant(f"{taken} belongs to a registered tenant; see `outbox tenants list`") from None
    # Looked up first: CREATE SCHEMA IF NOT EXISTS wants the right to create even where nothing is made.
    exists = text("SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = :schema)")
    if not connection.execute(exists, {"schema": schema_name}).scalar_one():
        connection.exec_driver_sql(f"CREATE SCHEMA IF NOT EXISTS {driver_identifier(schema_name)}")
    migrate_tenant(connection, schema_name)
    return tenant


def get_tenant(connection: Connection, tenant: "str | UUID | Tenant") -> Tenant:
    """Find a tenant by name or id.

    Raises:
        UnknownTenant: naming it and the command that lists those there are.
    """
    if isinstance(tenant, Tenant):
        return tenant
    row = None
    # A name that cannot be stored is nobody's; asking for it would be an error of its own.
    if isinstance(tenant, UUID) or not _FORBIDDEN_IN_NAMES.search(tenant):
        column = "tenant_id" if isinstance(tenant, UUID) else "name"
        row = connection.execute(
            text(f"SELECT {_COLUMNS} FROM outbox.tenants WHERE {column} = :value"), {"value": tenant}
        ).one_or_none()
    if row is None:
        raise UnknownTenant(
            f"no tenant {str(tenant)!r} is registered: see `outbox tenants list`, "
            f"or register it with `outbox tenants add {tenant}`"
        )
    return _tenant(row)


def list_tenants(connection: Connection) -> list[TenantStatus]:
    """All tenants by name, with how they fare."""
    rows = connection.execute(
        text(f"""
            SELECT {_COLUMNS}, failure_count, failing_since, next_attempt_at, problem, last_error, last_error_details,
                   CASE WHEN lease_expires_at > clock_timestamp() THEN lease_holder END AS lease_holder
            FROM outbox.tenants ORDER BY name
        """)
    )
    return [
        TenantStatus(
            tenant=_tenant(row),
            lease_holder=row.lease_holder,
            failure_count=row.failure_count,
            failing_since=row.failing_since,
            next_attempt_at=row.next_attempt_at,
            problem=Problem(row.problem) if row.problem else None,
            last_error=row.last_error,
            last_error_details=row.last_error_details,
        )
        for row in rows
    ]


def set_paused(connection: Connection, name: str, *, paused: bool) -> Tenant:
    """Pause or resume a tenant; a running flush notices before its next turn.

    Resuming also ends a backoff, since somebody has just looked at it.
    """
    row = connection.execute(
        text(f"""
            UPDATE outbox.tenants
            SET paused = :paused, next_attempt_at = CASE WHEN :paused THEN next_attempt_at END
            WHERE name = :name RETURNING {_COLUMNS}
        """),
        {"name": name, "paused": paused},
    ).one_or_none()
    return get_tenant(connection, name) if row is None else _tenant(row)


def remove_tenant(connection: Connection, name: str, *, drop_schema: bool = False, force: bool = False) -> Tenant:
    """Take a tenant out of the registry; the ledger keeps what was delivered.

    Args:
        connection: inside a transaction that the caller commits.
        name: the tenant's.
        drop_schema: also drop its schema with everything in it.
        force: even when its outbox still holds rows.

    Raises:
        UnknownTenant: when there is none.
        TenantHasRows: unless forced; nothing was changed.
    """
    tenant = get_tenant(connection, name)
    # The outbox first, then the registry's line: the order in which a flush locks them, too.
    if not force and _has_rows(connection, tenant, lock=drop_schema):
        raise TenantHasRows(
            f"tenant {name!r} still has rows in its outbox: flush them (`outbox flush --tenant {name}`), "
            "or remove it with --force"
        )
    # A flush in flight loses its lease with this line and can delete nothing more.
    connection.execute(text("DELETE FROM outbox.tenants WHERE tenant_id = :id"), {"id": tenant.tenant_id})
    if drop_schema:
        connection.exec_driver_sql(f"DROP SCHEMA IF EXISTS {driver_identifier(tenant.schema)} CASCADE")
    return tenant


def _has_rows(connection: Connection, tenant: Tenant, *, lock: bool) -> bool:
    name = {"table": f"{quote_identifier(tenant.schema)}.ml_outbox"}
    if not connection.execute(text("SELECT to_regclass(:table) IS NOT NULL"), name).scalar_one():
        return False
    table = f"{driver_identifier(tenant.schema)}.ml_outbox"
    if lock:
        # Waits for those who are enqueueing now: a row that they commit is seen, not dropped.
        connection.exec_driver_sql(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
    return bool(connection.exec_driver_sql(f"SELECT EXISTS (SELECT 1 FROM {table})").scalar_one())


def _tenant(row: "Row[tuple[UUID, str, str, bool]]") -> Tenant:
    return Tenant(row.tenant_id, row.name, row.schema_name, row.paused)
