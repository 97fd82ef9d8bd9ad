"""``outbox dead-letters ...``"""

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from outbox_pipelines.cli.output import AsJson, example, local_time, opened_database, show, show_table
from outbox_pipelines.errors import OutboxError
from outbox_pipelines.wording import counted

_Act = Callable[[Any, Any, Sequence[int]], list[int]]

dead_letters_app = typer.Typer(help="Look at training dead letters, put them back, discard them.", no_args_is_help=True)

TenantName = Annotated[str, typer.Option("--tenant", help="The tenant's name.", metavar="NAME")]
Ids = Annotated[list[int] | None, typer.Argument(metavar="[ID]...", help="Ids of rows.")]
All = Annotated[bool, typer.Option("--all", help="Every dead letter of the tenant.")]


@dead_letters_app.command("list", epilog=example("outbox dead-letters list --tenant acme"))
def list_(
    tenant: TenantName,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="At most so many.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List a tenant's dead letters with their reasons, the latest first."""
    from outbox_pipelines.tenants.registry import get_tenant
    from outbox_pipelines.training.dead_letters import list_dead_letters

    with opened_database() as engine, engine.connect() as connection:
        letters = list_dead_letters(connection, get_tenant(connection, tenant), limit=limit)
    if as_json:
        show(True, letters, "")
        return
    rows = [
        (str(one.row_id), local_time(one.died_at), str(one.attempts), one.reason.partition("\n")[0][:100])
        for one in letters
    ]
    show_table(("id", "taken out", "attempts", "reason"), rows, f"tenant {tenant} has no dead letter")


@dead_letters_app.command("show", epilog=example("outbox dead-letters show --tenant acme 123"))
def show_(
    tenant: TenantName,
    row_id: Annotated[int, typer.Argument(metavar="ID", min=1, max=2**63 - 1, help="The row's id.")],
    as_json: AsJson = False,
) -> None:
    """Show a dead letter with its example."""
    from outbox_pipelines.tenants.registry import get_tenant
    from outbox_pipelines.training.dead_letters import show_dead_letter

    with opened_database() as engine, engine.connect() as connection:
        letter, payload = show_dead_letter(connection, get_tenant(connection, tenant), row_id)
    lines = [
        f"row {letter.row_id} of tenant {tenant}",
        f"  reason      {letter.reason}",
        f"  written     {local_time(letter.created_at)}",
        f"  taken out   {local_time(letter.died_at)} by run {letter.run_id}",
        f"  attempts    {letter.attempts}",
        f"  example     {json.dumps(payload, ensure_ascii=False)}",
    ]
    show(as_json, {"letter": letter, "example": payload}, "\n".join(lines))


@dead_letters_app.command(
    "redrive",
    epilog=example(
        "outbox dead-letters redrive --tenant acme 123 124", "outbox dead-letters redrive --tenant acme --all --dry-run"
    ),
)
def redrive(
    tenant: TenantName,
    ids: Ids = None,
    all_of_them: All = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would move.")] = False,
    as_json: AsJson = False,
) -> None:
    """Put dead letters back into the outbox; they keep their ids and are sent with the next flush."""
    from outbox_pipelines.training import dead_letters

    _move(tenant, ids, all_of_them, dry_run, as_json, dead_letters.redrive, "put back")


@dead_letters_app.command("discard", epilog=example("outbox dead-letters discard --tenant acme 123"))
def discard(
    tenant: TenantName,
    ids: Ids = None,
    all_of_them: All = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete dead letters for good."""
    from outbox_pipelines.training import dead_letters

    _move(tenant, ids, all_of_them, dry_run, as_json, dead_letters.discard, "discarded")


def _move(
    name: str, ids: list[int] | None, all_of_them: bool, dry_run: bool, as_json: bool, act: _Act, done: str
) -> None:
    from outbox_pipelines.tenants.registry import get_tenant
    from outbox_pipelines.training.dead_letters import MOVED_AT_ONCE, oldest_ids, require_all

    if bool(ids) == all_of_them:
        raise OutboxError("name ids, or give --all (not both)")
    moved: list[int] = []
    with opened_database() as engine:
        with engine.connect() as connection:
            tenant = get_tenant(connection, name)
            asked = sorted(set(ids or oldest_ids(connection, tenant, limit=10_000_000)))
        if dry_run:
            show(
                as_json,
                {"would move": asked},
                f"tenant {name}: {counted(len(asked), 'dead letter')} would be {done}; nothing was changed",
            )
            return
        # Those that a person named go together, or none of them does.
        size = len(asked) if ids else MOVED_AT_ONCE
        for begin in range(0, len(asked), size or 1):
            with engine.begin() as connection:
                moved += act(connection, tenant, asked[begin : begin + size])
                if ids:
                    require_all(tenant, asked, moved)
    show(as_json, {"moved": moved}, f"tenant {name}: {counted(len(moved), 'dead letter')} {done}")
