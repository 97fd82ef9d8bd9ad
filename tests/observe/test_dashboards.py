"""The dashboard and the alert rules in docs/observability/ name only metrics and labels that there are."""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from sqlalchemy import Engine

from outbox_pipelines.database.progress import note_success
from outbox_pipelines.jobs.message import AttemptOutcome
from outbox_pipelines.jobs.publisher import publish
from outbox_pipelines.observe.metrics import families
from outbox_pipelines.observe.reading import take_reading
from outbox_pipelines.settings import Settings
from outbox_pipelines.training.backlog import Standing, note_reachability
from tests.jobs.messages import a_kind, complete, enqueue
from tests.outboxes import new_tenant
from tests.upkeep.aged import deliver

FOLDER = Path(__file__).parents[2] / "docs" / "observability"
_LABEL = re.compile(r"(\w+)(?:!=|=~|!~|=)\"([^\"]*)\"")


def dashboard() -> list[str]:
    """The queries of its panels."""
    panels: list[dict[str, Any]] = json.loads((FOLDER / "grafana.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def rules() -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.fixture
def known(engine: Engine, settings: Settings) -> dict[str, set[str]]:
    """The labels of every series that there is, by its name, in a system in which everything has happened."""
    acme = new_tenant(engine, "acme", rows=1)
    with engine.begin() as connection:
        note_success(connection, "job_recovery", 1, every=60)
        note_reachability(connection, "ml:1", reachable=True, detail="")
    complete(engine, enqueue(engine))
    enqueue(engine)
    with engine.begin() as connection:
        publish(connection, a_kind())
    take_reading(engine, settings)
    deliver(engine, acme, [1])
    found: dict[str, set[str]] = defaultdict(set)
    for family in families(take_reading(engine, settings)):
        assert family.samples, f"{family.name} has no sample: this test does not see its labels"
        for sample in family.samples:
            found[sample.name] |= set(sample.labels)
    return found


def test_every_metric_and_label_that_is_named_exists(known: dict[str, set[str]]) -> None:
    queries = [*dashboard(), *(rule["expr"] for rule in rules())]
    assert len(queries) > 25
    for query in queries:
        names = re.findall(r"\boutbox_\w+", query)
        assert names, query
        for name in names:
            assert name in known, f"{name} in {query}"
        labels = set().union(*(known[name] for name in names))
        grouped = {label.strip() for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(",")}
        assert grouped | {label for label, _ in _LABEL.findall(query)} <= labels, query


def test_the_values_of_labels_that_are_named_exist() -> None:
    allowed = {
        "outcome": {outcome.value for outcome in AttemptOutcome},
        "standing": {standing.value for standing in Standing},
        "state": {"waiting", "scheduled", "publishing", "published", "processing", "parked", "failed"},
    }
    for query in [*dashboard(), *(rule["expr"] for rule in rules())]:
        for label, values in _LABEL.findall(query):
            assert set(values.split("|")) <= allowed[label], query


def test_what_an_alert_says_of_labels_it_has(known: dict[str, set[str]]) -> None:
    for rule in rules():
        labels = set().union(*(known[name] for name in re.findall(r"\boutbox_\w+", rule["expr"])))
        told = " ".join(rule["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", told)) <= labels, rule["alert"]
        assert {"summary", "description"} <= set(rule["annotations"])


def test_every_metric_is_described_in_the_docs(engine: Engine, settings: Settings) -> None:
    text = (FOLDER.parent / "observability.md").read_text()
    for family in families(take_reading(engine, settings)):
        assert f"`{_name(family)}`" in text, family.name


def _name(family: Metric) -> str:
    if isinstance(family, HistogramMetricFamily):
        return family.name
    return f"{family.name}_total" if family.type == "counter" else family.name
