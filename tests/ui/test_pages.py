"""What a person sees and clicks in Dagster's UI, in a real browser."""

import re

import grpc
import pytest
from playwright.sync_api import Locator, Page, expect
from sqlalchemy import Engine

from outbox_pipelines.local.stack import Stack
from outbox_pipelines.ml_service import training_pb2
from tests.jobs.messages import rows
from tests.local.conftest import ask
from tests.outboxes import enqueue, ledger_ids, new_tenant, status, wait_until, waiting_ids
from tests.scripted_service import ScriptedService, accept
from tests.ui.conftest import PATIENCE, Screenshot, kept_from_the_sensor, note_a_day_of_snapshots

# With the other stacks on one worker: two at once would only wait for each other's imports.
pytestmark = [pytest.mark.xdist_group("stack"), pytest.mark.timeout(600)]

JOBS = {
    "automatic_timetable",
    "backlog_snapshot",
    "daily_retention",
    "dead_letter_redrive",
    "failed_jobs_redrive",
    "fleet_flush",
    "makeup_exams",
    "run_history_cleanup",
    "tenant_flush",
    "timetable_publishing",
}
SENSORS_AND_SCHEDULES = {
    "automatic_timetable_sensor",
    "backlog_snapshot_schedule",
    "daily_retention_schedule",
    "job_recovery_sensor",
    "makeup_exams_sensor",
    "run_history_schedule",
    "timetable_publishing_sensor",
    "training_outbox_sensor",
}


def word(name: str) -> re.Pattern[str]:
    """The name alone, among the names of icons that the UI puts beside it."""
    return re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")


def test_the_overview_lists_jobs_and_sensors(page: Page, screenshot: Screenshot) -> None:
    page.goto("/")
    menu = page.get_by_role("navigation")
    menu.get_by_role("link", name="Jobs").click()
    for name in JOBS:
        expect(page.get_by_role("link", name=word(name))).to_be_visible()
    menu.get_by_role("link", name="Automation").click()
    for name in SENSORS_AND_SCHEDULES:
        expect(page.get_by_role("link", name=word(name))).to_be_visible()
    # All are on by default.
    expect(page.get_by_role("checkbox", checked=True)).to_have_count(len(SENSORS_AND_SCHEDULES))
    screenshot("automation")


def test_a_backfill_over_two_tenants_launched_by_clicking_drains_just_those_two(
    page: Page, stack: Stack, engine: Engine, screenshot: Screenshot
) -> None:
    names = ("lakeview", "oakwood", "southfield")
    lakeview, oakwood, southfield = (kept_from_the_sensor(engine, name, rows=25) for name in names)
    wait_until(lambda: set(names) <= known_tenants(stack), seconds=PATIENCE)
    page.goto("/locations/outbox_pipelines/jobs/tenant_flush/partitions")
    page.get_by_role("button", name="Launch backfill").click()
    dialog = page.get_by_role("dialog").filter(has_text="Launch tenant_flush backfill")
    choose(dialog, {"lakeview", "southfield"}, of=known_tenants(stack))
    screenshot("backfill")
    dialog.get_by_role("button", name="Submit 2 runs").click()
    wait_until(lambda: not waiting_ids(engine, lakeview) and not waiting_ids(engine, southfield), seconds=PATIENCE)
    assert ledger_ids(engine, lakeview) == ledger_ids(engine, southfield) == list(range(1, 26))
    page.goto("/runs?view=backfills")
    page.get_by_role("link", name=re.compile("^run_with_subruns ")).click()
    expect(page.get_by_text("2 partitions")).to_be_visible()
    expect(page.get_by_text("100% completed")).to_be_visible()
    assert waiting_ids(engine, oakwood) == list(range(1, 26))
    assert ledger_ids(engine, oakwood) == []


def known_tenants(stack: Stack) -> set[str]:
    """The partitions that the sensor has made."""
    query = """{ pipelineOrError(params: {
        repositoryLocationName: "outbox_pipelines", repositoryName: "__repository__",
        pipelineName: "tenant_flush"}) { ... on Pipeline { partitionKeysOrError { partitionKeys } } } }"""
    return set(ask(stack, query)["pipelineOrError"]["partitionKeysOrError"]["partitionKeys"])


def choose(dialog: Locator, wanted: set[str], *, of: set[str]) -> None:
    """Select just these in a dialog of partitions, whatever it proposes."""
    dialog.get_by_role("img", name="expand_more").click()
    for name in of:
        item = dialog.get_by_role("menuitem", name=word(name))
        box = item.get_by_role("checkbox")
        if box.is_checked() != (name in wanted):
            item.click()
        expect(box).to_be_checked(checked=name in wanted)
    dialog.get_by_role("img", name="expand_less").click()


def test_a_failed_run_shows_what_failed_whose_and_what_next(
    page: Page, engine: Engine, ml: ScriptedService, screenshot: Screenshot
) -> None:
    hillside = new_tenant(engine, "hillside")

    def answer(
        request: training_pb2.TrainBatchRequest, context: grpc.ServicerContext
    ) -> training_pb2.TrainBatchResponse:
        if request.tenant == str(hillside.tenant_id):
            context.abort(grpc.StatusCode.UNAVAILABLE, "the model is being loaded")
        return accept(request, context)

    ml.answer = answer
    enqueue(engine, hillside, [{"n": 1}] * 40)
    wait_until(lambda: status(engine, hillside).failure_count, seconds=PATIENCE)
    page.goto("/runs")
    filter_by_tag(page, "outbox/tenant: hillside")
    page.get_by_role("tab", name="Failed").click()
    page.get_by_role("link", name="View", exact=True).first.click()
    line = re.compile(r"tenant hillside: rows stay: ml-service \S+ answered UNAVAILABLE; next attempt in \d+ s")
    expect(page.get_by_text(line).last).to_be_visible()
    screenshot("failed-run")
    assert waiting_ids(engine, hillside) == list(range(1, 41))


def test_run_tags_filter_the_runs(page: Page, engine: Engine) -> None:
    for name in ("riverside", "northgate"):
        new_tenant(engine, name, rows=30)
    wait_until(lambda: {"riverside", "northgate"} <= served(engine), seconds=PATIENCE)
    page.goto("/runs")
    for name in ("riverside", "northgate"):
        expect(page.get_by_text(f"outbox/tenant: {name}").first).to_be_visible()
    filter_by_tag(page, "outbox/tenant: riverside")
    expect(page.get_by_text("outbox/tenant: northgate")).to_have_count(0)
    expect(page.get_by_text("outbox/tenant: riverside").first).to_be_visible()


def filter_by_tag(page: Page, tag: str) -> None:
    """Show only runs with this tag, by clicking at one."""
    page.get_by_text(tag, exact=True).first.click()
    page.get_by_role("button", name="Add tag to filter").click()
    key, _, value = tag.partition(": ")
    expect(page.get_by_text(f"{key}={value}")).to_be_visible()


def served(engine: Engine) -> set[str]:
    """Names of the tenants whose rows went out."""
    found = rows(engine, "SELECT DISTINCT name FROM outbox.training_ledger JOIN outbox.tenants USING (tenant_id)")
    return {row.name for row in found}


def test_the_backlog_asset_shows_its_table_and_plot(page: Page, engine: Engine, screenshot: Screenshot) -> None:
    note_a_day_of_snapshots(engine)
    for number, name in enumerate(("ashgrove", "birchwood", "cedarhill")):
        kept_from_the_sensor(engine, name, rows=12 + 7 * number, minutes=3 - number)
    materialize(page, "training_backlog")
    expect(page.get_by_role("row", name=re.compile("^birchwood backing off 19 "))).to_be_visible()
    page.get_by_role("cell", name="by tenant", exact=True).evaluate("cell => cell.scrollIntoView()")
    screenshot("backlog-table")
    page.get_by_text("[Show Markdown]").first.click()
    picture = page.get_by_role("dialog").get_by_role("img", name="waiting and oldest wait")
    expect(picture).to_be_visible()
    assert picture.evaluate("image => image.naturalWidth") > 300
    screenshot("backlog-picture")
    page.get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Plots").click()
    expect(page.get_by_text("oldest wait (s)")).to_be_visible()
    expect(page.locator("canvas").first).to_be_visible()


def test_the_failure_of_an_asset_check_is_visible(page: Page, engine: Engine, screenshot: Screenshot) -> None:
    kept_from_the_sensor(engine, "oldtown", rows=5, minutes=60)
    materialize(page, "training_backlog")
    page.get_by_role("tab", name="Checks").click()
    page.get_by_text("oldest_wait").first.click()
    expect(page.get_by_text("Failed", exact=True).first).to_be_visible()
    expect(page.get_by_text(re.compile(r"oldtown for 6\d min \(target 5 min\)"))).to_be_visible()
    screenshot("failed-check")


def materialize(page: Page, asset: str) -> None:
    """Materialize by clicking, wait until the run and its checks have ended well, and look again."""
    page.goto(f"/assets/{asset}")
    page.get_by_role("button", name="Materialize").first.click()
    page.get_by_role("region", name="Notifications").get_by_role("link", name="View").click()
    expect(page.get_by_text("RUN_SUCCESS")).to_be_visible()
    page.goto(f"/assets/{asset}")
