"""Dagster's own launcher and storage in place of the warm ones: everything still works."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from sqlalchemy import text

from outbox_pipelines import enqueue_job
from outbox_pipelines.local.stack import Stack
from tests.local.conftest import PATIENCE, ask, started_stack
from tests.outboxes import new_tenant, wait_until, waiting_ids
from tests.scripted_service import ScriptedService

# On the worker with the other stack: two at once would be much for a small machine.
pytestmark = [pytest.mark.xdist_group("stack"), pytest.mark.timeout(300), pytest.mark.dagster_process]

SHIPPED = Path(__file__).parents[2] / "dagster_home" / "dagster.yaml"


@pytest.fixture
def stock_stack(
    server_url: str, ml: ScriptedService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stack]:
    """The stack with the shipped settings but for the two."""
    settings = yaml.safe_load(SHIPPED.read_text())
    assert settings.pop("run_launcher")["class"] == "WarmRunLauncher"
    storage = settings.pop("storage")["custom"]
    assert storage["class"] == "PooledPostgresStorage"
    settings["storage"] = {"postgres": storage["config"]}
    home = tmp_path / "dagster_home"
    home.mkdir()
    (home / "dagster.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    with started_stack(server_url, ml, tmp_path / "home", "outbox_stock") as running:
        yield running


def test_without_the_two_settings_rows_leave_and_jobs_are_done_by_stock_dagster(stock_stack: Stack) -> None:
    engine = stock_stack.database.engine
    tenant = new_tenant(engine, "stock", rows=12)
    with engine.begin() as connection:
        message_id = enqueue_job(connection, "failing_job").message_id

    def outcome() -> str | None:
        with engine.connect() as connection:
            query = text("SELECT outcome FROM outbox.messages WHERE message_id = :id")
            return connection.execute(query, {"id": message_id}).scalar_one()

    wait_until(lambda: not waiting_ids(engine, tenant), seconds=PATIENCE)
    wait_until(lambda: outcome() == "failed", seconds=PATIENCE)
    query = "{ runsOrError { ... on Runs { results { status tags { key } } } } instance { runLauncher { name } } }"
    answer = ask(stock_stack, query)
    assert answer["instance"]["runLauncher"]["name"] == "DefaultRunLauncher"
    assert [component.name for component in stock_stack.components] == ["dagster"]
