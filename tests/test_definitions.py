"""What the code location shows: every name, description, tag, schedule and partition, as it stands in a file.

A change that a user would see shows in review. Write the file anew with
``OUTBOX_TEST_WRITE_DEFINITIONS=1 python -m pytest tests/test_definitions.py``.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

import outbox_pipelines
from outbox_pipelines import definitions
from outbox_pipelines.definitions import build_definitions, defs
from outbox_pipelines.settings import load_settings
from tests.jobs.messages import a_kind

# Their assets have owners; the oldest Dagster that is supported takes none for these jobs.
_JOBS_OF_ASSETS = {"backlog_snapshot", "daily_retention", "run_history_cleanup"}
_CODE = "dagster/code_references"
_FILE = Path(__file__).with_name("definitions.json")


def visible() -> dict[str, Any]:
    """All that the UI says of the definitions, with one kind of job."""
    settings = load_settings(database_url="postgresql://nobody@nowhere/nothing")
    repository = build_definitions(settings=settings, kinds=[a_kind("report")]).get_repository_def()
    nodes = [repository.asset_graph.get(key) for key in sorted(repository.asset_graph.get_all_asset_keys())]
    return {
        "assets": {node.key.to_user_string(): _asset(node) for node in nodes},
        "checks": {
            f"{spec.asset_key.to_user_string()}: {spec.name}": spec.description
            for key in sorted(repository.asset_graph.asset_check_keys)
            for spec in [repository.asset_graph.get_check_spec(key)]
        },
        "jobs": {job.name: _job(job) for job in sorted(repository.get_all_jobs(), key=lambda job: job.name)},
        "sensors": {
            one.name: {
                "description": one.description,
                "every (s)": one.minimum_interval_seconds,
                "default": one.default_status.value,
                "jobs": sorted(target.job_name for target in one.targets),
            }
            for one in sorted(repository.sensor_defs, key=lambda one: one.name)
        },
        "schedules": {
            one.name: {
                "description": one.description,
                "cron": one.cron_schedule,
                "default": one.default_status.value,
                "job": one.job_name,
            }
            for one in sorted(repository.schedule_defs, key=lambda one: one.name)
        },
    }


def _asset(node: Any) -> dict[str, Any]:
    return {
        "description": node.description,
        "group": node.group_name,
        "owners": list(node.owners),
        "kinds": sorted(tag.removeprefix("dagster/kind/") for tag in node.tags),
        "partitions": str(node.partitions_def) if node.partitions_def else None,
        "backfill": str(node.backfill_policy.policy_type.value) if node.backfill_policy else None,
        "fresh within": str(node.freshness_policy.fail_window) if node.freshness_policy else None,
    }


def _job(job: dg.JobDefinition) -> dict[str, Any]:
    return {
        "description": job.description,
        "tags": dict(sorted(job.tags.items())),
        "run tags": dict(sorted(job.run_tags.items())),
        "owners": list(job.owners or []),
        "partitions": str(job.partitions_def) if job.partitions_def else None,
        "ops": sorted(node.name for node in job.nodes),
    }


def test_the_definitions_are_those_in_the_file() -> None:
    found = visible()
    if os.environ.get("OUTBOX_TEST_WRITE_DEFINITIONS"):
        _FILE.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    assert found == json.loads(_FILE.read_text()), "see the first lines of this test's file"


def test_each_asset_of_the_shipped_code_location_links_to_its_source_and_merged_ones_do_not() -> None:
    for shown, links in ((defs, True), (build_definitions(kinds=[]), False)):
        specs = shown.resolve_all_asset_specs()
        assert {spec.key.to_user_string() for spec in specs} == visible()["assets"].keys()
        assert {_CODE in spec.metadata for spec in specs} == {links}
    for spec in defs.resolve_all_asset_specs():
        (reference,) = spec.metadata[_CODE].code_references
        assert Path(reference.file_path).is_relative_to(Path(outbox_pipelines.__file__).parent)


def test_the_shipped_code_location_holds_all_that_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTBOX_KINDS", raising=False)
    built, shipped = build_definitions().get_repository_def(), definitions._shipped().get_repository_def()
    assert {job.name for job in shipped.get_all_jobs()} == {job.name for job in built.get_all_jobs()}
    assert {one.name for one in shipped.sensor_defs} == {one.name for one in built.sensor_defs}
    assert {one.name for one in shipped.schedule_defs} == {one.name for one in built.schedule_defs}
    assert shipped.asset_graph.asset_check_keys == built.asset_graph.asset_check_keys
    assert shipped.asset_graph.get_all_asset_keys() == built.asset_graph.get_all_asset_keys()


def test_what_few_runs_need_is_not_imported_with_the_code_location() -> None:
    """Every run loads the code location, in a process that may have been forked for it alone."""
    heavy = ("pandas", "numpy", "matplotlib", "pyarrow", "river")
    code = f"import sys, outbox_pipelines.definitions; sys.exit(str([one for one in {heavy} if one in sys.modules]))"
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert found.stderr.strip().endswith("[]"), found.stderr


def test_everything_has_a_description_and_an_owner() -> None:
    found = visible()
    for part, entries in found.items():
        for name, entry in entries.items():
            if name == "__ASSET_JOB":
                continue
            description = entry if isinstance(entry, str) else entry["description"]
            assert description, f"{part}: {name}"
            if isinstance(entry, dict) and name not in _JOBS_OF_ASSETS:
                assert entry.get("owners", ["-"]), f"{part}: {name}"
