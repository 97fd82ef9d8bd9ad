"""Short words for what tests do with outboxes."""

import time
from collections.abc import Callable, Iterable
from typing import Any

from sqlalchemy import Engine, text

from outbox_pipelines.database.quoting import driver_identifier
from outbox_pipelines.settings import Settings
from outbox_pipelines.tenants.registry import Tenant, TenantStatus, add_tenant, list_tenants
from outbox_pipelines.training.enqueue import enqueue_training
from outbox_pipelines.training.flusher import Flusher, FlushReport
from outbox_pipelines.training.grpc_sink import GrpcSink
from outbox_pipelines.training.sink import Sink


def new_tenant(engine: Engine, name: str = "acme", *, rows: int = 0, schema: str | None = None) -> Tenant:
    """Register a tenant, with that many rows."""
    with engine.begin() as connection:
        tenant = add_tenant(connection, name, schema=schema)
    if rows:
        enqueue(engine, tenant, ({"n": number} for number in range(rows)))
    return tenant


def enqueue(engine: Engine, tenant: Tenant, examples: Iterable[dict[str, Any]]) -> list[int]:
    """Enqueue examples in a transaction of their own."""
    with engine.begin() as connection:
        return enqueue_training(connection, tenant, examples)


def waiting_ids(engine: Engine, tenant: Tenant) -> list[int]:
    """Ids in the outbox."""
    return _column(engine, f"SELECT id FROM {driver_identifier(tenant.schema)}.ml_outbox ORDER BY id")


def dead_letters(engine: Engine, tenant: Tenant) -> dict[int, str]:
    """Dead ids and their reasons."""
    with engine.connect() as connection:
        rows = connection.exec_driver_sql(f"SELECT id, reason FROM {driver_identifier(tenant.schema)}.ml_outbox_dead")
        return dict(iter(rows))


def ledger_ids(engine: Engine, tenant: Tenant) -> list[int]:
    """Ids in the ledger, repeats included, sorted."""
    with engine.connect() as connection:
        ids = connection.execute(
            text("SELECT unnest(row_ids) FROM outbox.training_ledger WHERE tenant_id = :id"), {"id": tenant.tenant_id}
        )
        return sorted(ids.scalars())


def status(engine: Engine, tenant: Tenant) -> TenantStatus:
    """The tenant's line in the registry."""
    with engine.connect() as connection:
        return next(entry for entry in list_tenants(connection) if entry.tenant.tenant_id == tenant.tenant_id)


def flush(
    engine: Engine, settings: Settings, *tenants: Tenant, sink: Sink | None = None, run_id: str = "test-run", **how: Any
) -> FlushReport:
    """Flush tenants in this process."""
    used = sink or GrpcSink(settings)
    try:
        return Flusher(engine, used, settings, run_id=run_id).flush(tenants, **how)
    finally:
        used.close()


def wait_until(condition: Callable[[], object], *, seconds: float = 30.0) -> None:
    """Wait for a condition; fails the test when it does not come."""
    ends_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends_at, f"did not happen within {seconds} s"
        time.sleep(0.01)


def _column(engine: Engine, statement: str) -> list[int]:
    with engine.connect() as connection:
        return list(connection.exec_driver_sql(statement).scalars())
