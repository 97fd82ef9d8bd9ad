"""What the benchmarks share: a server, tenants with rows, and a table of results."""

import json
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine

from outbox_pipelines.database.embedded import EmbeddedServer
from outbox_pipelines.database.engine import open_engine
from outbox_pipelines.database.migrate import migrate
from outbox_pipelines.database.url import render
from outbox_pipelines.settings import load_settings
from outbox_pipelines.tenants.registry import Tenant, add_tenant

RESULTS = Path(__file__).parent / "results"
EXAMPLE = """{"features": {"age": 12, "score": 0.5, "weight": 1.25}, "label": true}"""


@contextmanager
def server() -> Iterator[str]:
    """A durable embedded server of its own (fsync on); gives the URL of a migrated database."""
    with TemporaryDirectory(prefix="outbox-bench-") as folder, EmbeddedServer(Path(folder) / "postgres") as embedded:
        url = render(embedded.url("postgres"))
        with engine(url) as opened:
            migrate(opened)
        yield url


@contextmanager
def engine(url: str) -> Iterator[Engine]:
    """An engine like that of a run."""
    opened = open_engine(load_settings(), url, application_name="benchmark")
    yield opened
    opened.dispose()


def tenants(opened: Engine, count: int, prefix: str) -> list[Tenant]:
    """New tenants."""
    with opened.begin() as connection:
        return [add_tenant(connection, f"{prefix}-{number}") for number in range(count)]


def fill(opened: Engine, to_fill: Sequence[Tenant], rows: int) -> None:
    """Empty the outboxes and put that many rows into each."""
    for tenant in to_fill:
        with opened.begin() as connection:
            connection.exec_driver_sql(f'TRUNCATE "{tenant.schema}".ml_outbox')
            connection.exec_driver_sql(
                f'INSERT INTO "{tenant.schema}".ml_outbox (example) '
                "SELECT %(example)s::jsonb FROM generate_series(1, %(rows)s)",
                {"example": EXAMPLE, "rows": rows},
            )
    settle_down(opened)


def settle_down(opened: Engine) -> None:
    """So that no measurement pays for writing back what the filling left."""
    with opened.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("VACUUM ANALYZE")
        connection.exec_driver_sql("CHECKPOINT")


@dataclass
class Results:
    """A table of what was measured, printed and kept as JSON."""

    name: str
    columns: Sequence[str]
    rows: list[list[object]] = field(default_factory=list)

    def add(self, *values: object) -> None:
        """Add a line."""
        self.rows.append(list(values))

    def publish(self) -> None:
        """Print the table and write it to ``benchmarks/results/<name>.json``."""
        table = Table(*self.columns, title=self.name, title_justify="left")
        for row in self.rows:
            table.add_row(*(f"{value:,}" if isinstance(value, int) else str(value) for value in row))
        Console(width=110).print(table)
        RESULTS.mkdir(exist_ok=True)
        machine = {"python": platform.python_version(), "system": platform.system(), "machine": platform.machine()}
        record = {"when": datetime.now(UTC).isoformat(timespec="seconds"), **machine}
        record["rows"] = [dict(zip(self.columns, row, strict=True)) for row in self.rows]  # type: ignore[assignment]
        (RESULTS / f"{self.name}.json").write_text(json.dumps(record, indent=1) + "\n")
