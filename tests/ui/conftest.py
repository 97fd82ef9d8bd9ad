"""A running stack as `outbox dev` starts it, and a real browser that looks at its pages.

The browser is the system's Chromium (Debian's package ``chromium``), driven by Playwright; none is downloaded, and
without one these tests are skipped. They find things by their text and role, as a person does, and wait for them.

With ``OUTBOX_TEST_SCREENSHOTS=docs/images`` the tests also write the pictures of the README, which is what
``make screenshots`` does.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, ViewportSize, expect, sync_playwright
from sqlalchemy import Engine

from outbox_pipelines.local.stack import Stack
from outbox_pipelines.tenants.registry import Tenant
from outbox_pipelines.upkeep.snapshot import ALL_TENANTS
from tests.jobs.messages import run
from tests.local.conftest import started_stack
from tests.outboxes import enqueue, new_tenant
from tests.scripted_service import ScriptedService, accept

PATIENCE = 120.0
"""Seconds for what takes some polls and starts of runs, on a machine that has other things to do."""

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_SIZE = ViewportSize(width=1400, height=900)
_COLORS = 256

_WITHOUT_FOLDER = """folder => {
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(folder, '.venv');
}"""
"""Stack traces name folders of the machine, which are nobody's business."""

Screenshot = Callable[[str], None]
"""Writes the page as a picture of that name, if pictures are wanted."""


@pytest.fixture(scope="session")
def chromium() -> str:
    """Where the browser is."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip(f"no Chromium on this machine (none of {', '.join(_NAMES)}): apt-get install chromium")
    return found


@pytest.fixture(scope="session")
def browser(chromium: str) -> Iterator[Browser]:
    """One browser for all tests."""
    # What a container has not: a sandbox for root, a graphics card, enough shared memory.
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def ml() -> Iterator[ScriptedService]:
    """The ML service that the stack's runs call."""
    with ScriptedService() as running:
        yield running


@pytest.fixture(scope="session")
def stack(
    chromium: str, server_url: str, ml: ScriptedService, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """Launcher, webserver, daemon and code server, with the sample kinds of jobs."""
    kinds = "outbox_pipelines.academic.kinds:KINDS"
    with started_stack(server_url, ml, tmp_path_factory.mktemp("home"), "outbox_ui", kinds) as running:
        yield running


@pytest.fixture
def engine(stack: Stack) -> Engine:
    """The stack's database."""
    return stack.database.engine


@pytest.fixture(autouse=True)
def _accepting(ml: ScriptedService) -> Iterator[None]:
    yield
    ml.answer = accept


@pytest.fixture
def page(browser: Browser, stack: Stack) -> Iterator[Page]:
    """A fresh page, without what an earlier one left in the browser; addresses are relative to the UI's."""
    expect.set_options(timeout=PATIENCE * 1000)
    with browser.new_context(base_url=stack.ui_url, viewport=_SIZE, locale="en-GB", timezone_id="UTC") as context:
        context.set_default_timeout(PATIENCE * 1000)
        yield context.new_page()


@pytest.fixture
def screenshot(page: Page) -> Screenshot:
    """See :data:`Screenshot`."""
    folder = os.environ.get("OUTBOX_TEST_SCREENSHOTS")

    def write(name: str) -> None:
        if folder:
            # A pointer that hovers over something would colour it.
            page.mouse.move(0, 0)
            picture = Image.open(BytesIO(_still(page))).convert("RGB")
            # A page has few colours; the rare ones among them, such as that of a failure, are kept.
            picture.quantize(_COLORS, Image.Quantize.MAXCOVERAGE).save(Path(folder) / f"{name}.png", optimize=True)

    return write


def _still(page: Page) -> bytes:
    """The page once it has drawn everything: two pictures in a row are the same, or many were taken."""
    last = b""
    for _ in range(20):
        page.evaluate(_WITHOUT_FOLDER, sys.prefix)
        now = page.screenshot(animations="disabled")
        if now == last:
            break
        last = now
        page.wait_for_timeout(500)
    return last


def kept_from_the_sensor(engine: Engine, name: str, *, rows: int, minutes: int = 0) -> Tenant:
    """A tenant whose rows, that many minutes old, the sensor leaves alone: it backs off until tomorrow."""
    tenant = new_tenant(engine, name)
    run(engine, "UPDATE outbox.tenants SET next_attempt_at = now() + interval '1 day' WHERE name = :name", name=name)
    enqueue(engine, tenant, ({"n": number} for number in range(rows)))
    run(
        engine,
        f'UPDATE "{tenant.schema}".ml_outbox SET created_at = created_at - make_interval(mins => :minutes)',
        minutes=minutes,
    )
    return tenant


def note_a_day_of_snapshots(engine: Engine) -> None:
    """A history of the training backlog: two waves that came and went."""
    run(
        engine,
        """
        INSERT INTO outbox.training_backlog (taken_at, tenant_id, waiting, oldest_wait_seconds, in_flight,
                                             dead_letters, died, arrived, drained, seconds)
        SELECT clock_timestamp() - make_interval(mins => 5 * n), :all, 40 * wave, 20 + 240 * wave, 0, 0, 0, 90, 150, 300
        FROM generate_series(2, 287) AS n, LATERAL (SELECT abs(sin(n / 46.0)) ^ 3 AS wave) AS shape
        """,
        all=ALL_TENANTS,
    )
