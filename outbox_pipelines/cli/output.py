"""What the commands share: the database, and how they print."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import typer

from outbox_pipelines.errors import OutboxError

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def example(*lines: str) -> str:
    """A command's examples, for its help."""
    return "\b\nExample:\n" + "\n".join(f"  $ {line}" for line in lines)


@contextmanager
def opened_database(*, migrated: bool = True) -> Iterator[Any]:
    """The engine of the database that the settings name; its refusals become one line."""
    from sqlalchemy.exc import DBAPIError

    from outbox_pipelines.database.database import Database
    from outbox_pipelines.database.engine import describe, explained
    from outbox_pipelines.database.error_text import first_line
    from outbox_pipelines.settings import load_settings

    with Database(load_settings(), application_name="outbox") as database:
        engine = database.migrated_engine() if migrated else database.engine
        try:
            with explained(engine):
                yield engine
        except DBAPIError as error:
            raise OutboxError(f"{describe(engine)} refused: {first_line(error.orig)}") from error


def show(as_json: bool, data: object, text: str) -> None:
    """Print data as JSON, or the text for people."""
    typer.echo(json.dumps(_plain(data), indent=2) if as_json else text)


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, UUID | Path):
        return str(value)
    if isinstance(value, datetime):
        return value.isoformat()
    return value


def show_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], empty: str) -> None:
    """Columns as wide as they need: a schema's name is there to be copied."""
    if not rows:
        typer.echo(empty)
        return
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def local_time(instant: datetime) -> str:
    """An instant in this machine's time zone, to the second."""
    return instant.astimezone().isoformat(" ", "seconds")
