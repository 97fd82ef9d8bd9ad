"""All checks, executed in Dagster after the demonstration: what an operator would look at."""

import json
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

from outbox_pipelines.errors import OutboxError
from outbox_pipelines.local.stack import Stack

_JOB = "backlog_snapshot"
_RUN_SECONDS = 120.0
_POLL_SECONDS = 0.3
_ENDED = {"SUCCESS", "FAILURE", "CANCELED"}

_LAUNCH = """
    mutation ($job: String!) {
      launchRun(executionParams: {
        selector: {
          repositoryLocationName: "outbox_pipelines", repositoryName: "__repository__", pipelineName: $job
        },
        runConfigData: {}, mode: "default"
      }) { __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } }
    }
"""
_STATUS = "query ($run: ID!) { runOrError(runId: $run) { ... on Run { status } } }"
_CHECKS = """
    query { assetNodes { assetKey { path } assetChecksOrError { ... on AssetChecks { checks {
      name executionForLatestMaterialization { evaluation { success description } }
    } } } } }
"""


@dataclass(frozen=True)
class CheckResults:
    """What the checks of the last snapshot found."""

    passed: int
    flaws: list[str]
    """Those that did not pass, with what they say."""


def execute_checks(stack: Stack) -> CheckResults:
    """Look at the backlog twice: what the demonstration buried and gave up is new to the first look alone."""
    for _ in range(2):
        _snapshot(stack)
    ends_at = time.monotonic() + _RUN_SECONDS
    while True:
        checks = _checks(stack)
        # The schedule may look at the same time; then its checks are about to be there.
        if checks and all(execution and execution["evaluation"] for execution in checks.values()):
            break
        if time.monotonic() > ends_at:
            raise OutboxError(f"the checks of the assets are not done; see {stack.ui_url}/assets")
        time.sleep(_POLL_SECONDS)
    flaws = [
        f"check {name}: {execution['evaluation']['description']}"
        for name, execution in checks.items()
        if not execution["evaluation"]["success"]
    ]
    return CheckResults(len(checks) - len(flaws), flaws)


def _checks(stack: Stack) -> dict[str, Any]:
    """The last execution of each check, by its name."""
    return {
        f"{check['name']} of {asset}": check["executionForLatestMaterialization"]
        for node in _ask(stack, _CHECKS)["assetNodes"]
        for asset in ["/".join(node["assetKey"]["path"])]
        for check in node["assetChecksOrError"]["checks"]
    }


def _snapshot(stack: Stack) -> None:
    launched = _ask(stack, _LAUNCH, job=_JOB)["launchRun"]
    if launched["__typename"] != "LaunchRunSuccess":
        raise OutboxError(f"{_JOB} could not be launched: {launched.get('message', launched['__typename'])}")
    run_id: str = launched["run"]["runId"]
    ends_at = time.monotonic() + _RUN_SECONDS
    while True:
        status = _ask(stack, _STATUS, run=run_id)["runOrError"].get("status")
        if status in _ENDED:
            break
        stack.check()
        if time.monotonic() > ends_at:
            raise OutboxError(f"run {run_id} of {_JOB} is {status} after {_RUN_SECONDS:.0f} s; see {stack.ui_url}/runs")
        time.sleep(_POLL_SECONDS)
    if status != "SUCCESS":
        raise OutboxError(f"run {run_id} of {_JOB} ended as {status}; see {stack.ui_url}/runs/{run_id}")


def _ask(stack: Stack, query: str, **variables: object) -> Any:
    request = urllib.request.Request(
        f"{stack.ui_url}/graphql",
        data=json.dumps({"query": query, "variables": variables}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        told = json.load(answer)
    if "errors" in told:
        raise OutboxError(f"the webserver refused a query: {told['errors'][0]['message']}")
    return told["data"]
