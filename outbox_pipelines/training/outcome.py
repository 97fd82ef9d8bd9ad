"""How the flush of a tenant ended, and what it did."""

from dataclasses import dataclass
from enum import StrEnum

from outbox_pipelines.tenants.registry import Problem, Tenant


class Ending(StrEnum):
    """How the flush of a tenant ended."""

    EMPTIED = "emptied"
    """No row was left when it was last read."""

    BUDGET_SPENT = "budget spent"
    """Rows may be left; the next poll goes on."""

    TURNS_TAKEN = "turns taken"
    """As many turns as were asked for."""

    TAKEN = "taken"
    """Another run holds the tenant's lease, or the tenant is paused: nothing was done."""

    PAUSED = "paused"
    """Somebody paused the tenant meanwhile."""

    LEASE_LOST = "lease lost"
    """Another run may have taken over, or the tenant was removed; what was not settled is sent again."""

    CANCELLED = "cancelled"
    """The flush was interrupted."""

    FAILED = "failed"
    """See the report's error; the rows stay."""


@dataclass
class TenantReport:
    """What a flush did for one tenant."""

    tenant: Tenant
    ending: Ending = Ending.EMPTIED
    turns: int = 0
    rows: int = 0
    """Rows delivered and settled."""

    batches: int = 0
    """Calls that delivered something."""

    dead_letters: int = 0
    first_id: int | None = None
    last_id: int | None = None
    seconds: float = 0.0
    problem: Problem | None = None
    detail: str = ""
    """For people: the error, or who holds the lease and for how long."""
