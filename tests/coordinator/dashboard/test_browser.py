"""The page in Debian's Chromium: light, dark and narrow; hostile words; a coordinator that goes and comes.

`ATOLL_PICTURES=1 pytest tests/coordinator/dashboard/test_browser.py` writes the pictures in docs/figures.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.dashboard.access import Listening
from coordinator.dashboard.app import Settings
from tests.coordinator.dashboard.pictured import HOSTILE, PicturedCoordinator, pictured, worker_id
from tests.coordinator.dashboard.serving import ServedPage, served_page
from tests.coordinator.dashboard.test_reader import QUICK
from tests.patience import HUNG_S

CHROMIUM = shutil.which("chromium")
FIGURES = Path(__file__).resolve().parents[3] / "docs" / "figures"
HUNG_MS = HUNG_S * 1000
PAGES = {
    "fleet": "/",
    "job": "/jobs/gpt2-medium-1",
    "replicas": "/jobs/vision-diloco-2",
    "federated": "/jobs/brown-fedavg-4",
    "links": "/links",
    "contributions": "/contributions",
    "events": "/events",
    "worker": f"/workers/{worker_id(2)}",
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def coordinator() -> Iterator[PicturedCoordinator]:
    with PicturedCoordinator(pictured(hostile=True)) as started:
        yield started


@pytest.fixture(scope="module")
def page(coordinator: PicturedCoordinator) -> Iterator[ServedPage]:
    settings = Settings(Listening(port=0), QUICK, wrong_key_delay_s=0.0)
    with served_page(coordinator.endpoint, settings) as served:
        yield served


@pytest.fixture(scope="module")
def public(coordinator: PicturedCoordinator) -> Iterator[ServedPage]:
    with served_page(coordinator.endpoint, Settings(Listening(port=0), QUICK, public=True)) as served:
        yield served


class Tab:
    """One tab that is signed in, and what went wrong in it."""

    def __init__(self, browser: Any, page: ServedPage, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.tab = self.context.new_page()
        self.tab.set_default_timeout(HUNG_MS)
        self.wrong: list[str] = []
        self.asked: list[str] = []
        self.tab.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.tab.on("console", lambda line: self.wrong.append(line.text) if line.type == "error" else None)
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.page = page
        self.tab.goto(page.address)
        self.drawn()
        self.wrong = [line for line in self.wrong if "401" not in line]  # the sign-in page's own status

    def goto(self, path: str) -> None:
        self.tab.goto(self.page.root + path)
        self.drawn()

    def drawn(self) -> None:
        """Wait until figures stand on the page."""
        self.tab.wait_for_selector("main h1")
        self.tab.wait_for_function("() => document.querySelector('#live').textContent === 'live'")
        self.tab.wait_for_selector("body[data-drawn] .tile strong, body[data-drawn] tbody tr")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (400, "light")])
def test_every_page_is_drawn_without_an_error_and_fits_its_window(
    browser: Any, page: ServedPage, width: int, scheme: str
) -> None:
    tab = Tab(browser, page, width, scheme)
    assert "#key" not in tab.tab.url, "the key does not stay in the address"
    for name, path in PAGES.items():
        tab.goto(path)
        over = tab.tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert over <= 0, f"{name} is {over} pixels too wide at {width}"
        if os.environ.get("ATOLL_PICTURES"):
            picture(tab, name, width, scheme)
    assert tab.wrong == []
    assert [url for url in tab.asked if not url.startswith((page.root, "data:"))] == [], "no third party"
    tab.context.close()


def picture(tab: Tab, name: str, width: int, scheme: str) -> None:
    """Write docs/figures/dashboard-NAME.png of the light page; of the job also a narrow and a dark one."""
    suffix = {(1280, "light"): "", (1280, "dark"): "-dark"}.get((width, scheme), "-narrow")
    if not suffix or name == "job":
        tab.tab.wait_for_load_state("load")
        clip = {"x": 0, "y": 0, "width": width, "height": 1100}
        tab.tab.screenshot(path=FIGURES / f"dashboard-{name}{suffix}.png", full_page=True, clip=clip)


def test_everybody_sees_a_run_without_a_key(browser: Any, public: ServedPage) -> None:
    for width, scheme in ((1280, "light"), (400, "dark")):
        tab = Tab(browser, public, width, scheme)
        tab.tab.get_by_role("heading", name="gpt2-medium-1").wait_for()
        tab.tab.locator(".chart canvas").wait_for()
        assert (
            tab.tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            <= 0
        )
        if os.environ.get("ATOLL_PICTURES"):
            picture(tab, "public", width, scheme)
        assert tab.wrong == []
        tab.context.close()


@pytest.mark.skipif("ATOLL_PICTURES" in os.environ, reason="pictures are of a fleet without hostile names")
def test_strangers_words_are_text_and_run_nothing(browser: Any, page: ServedPage) -> None:
    tab = Tab(browser, page)
    alarms: list[str] = []
    tab.tab.on("dialog", lambda dialog: (alarms.append(dialog.message), dialog.dismiss()))
    for path in ("/", f"/workers/{worker_id(0)}", "/jobs/gpt2-medium-1", "/events"):
        tab.goto(path)
        tab.tab.get_by_text(HOSTILE).first.wait_for(state="attached")
        assert tab.tab.locator("main script, main img").count() == 0
    assert alarms == []
    assert tab.wrong == []
    tab.context.close()


def test_the_curve_grows_and_the_plan_changes_hands_while_somebody_looks(
    browser: Any, page: ServedPage, coordinator: PicturedCoordinator
) -> None:
    tab = Tab(browser, page)
    tab.goto("/jobs/gpt2-medium-1")
    update = coordinator.world.updates["gpt2-medium-1"]
    update.step += 1
    update.loss = 2.5
    update.metrics.add(step=update.step, name="loss", value=2.5, time_s=2e9)
    update.stages[2].worker = worker_id(4)
    update.stages[2].standby = ""
    coordinator.world.stir()
    tab.tab.get_by_text(f"{update.step} / 600").wait_for()
    tab.tab.locator(".legend").get_by_text("2.5", exact=True).wait_for()
    tab.tab.locator(".plan a").get_by_text("eve").wait_for()
    assert tab.tab.locator(".plan .standby").count() == 0
    assert tab.wrong == []
    tab.context.close()


def test_a_filter_finds_workers_by_words_and_figures(browser: Any, page: ServedPage) -> None:
    tab = Tab(browser, page)
    field = tab.tab.get_by_label("Filter workers")
    rows = tab.tab.get_by_role("table", name="Workers", exact=True).locator("tbody tr")
    for words, names in (
        ("alice", 0),
        ("site=uni-bergen", 4),
        ("suspect", 2),
        ("memory>1000GiB", 0),
        ("bob", 1),
    ):
        field.fill(words)
        tab.tab.wait_for_function(
            "count => document.querySelectorAll('table[aria-label=Workers] tbody tr').length === count",
            arg=names,
        )
        assert rows.count() == names
    tab.context.close()


def test_a_coordinator_that_goes_is_named_and_the_page_comes_back_by_itself(
    browser: Any, page: ServedPage, coordinator: PicturedCoordinator
) -> None:
    tab = Tab(browser, page)
    coordinator.stop()
    tab.tab.get_by_role("alert").get_by_text("has not answered since").wait_for()
    assert tab.tab.get_by_role("table", name="Workers", exact=True).locator("tbody tr").count() > 50
    coordinator.start()
    tab.tab.wait_for_function("() => document.getElementById('away').hidden")
    tab.context.close()


def test_a_wrong_key_is_said_and_the_right_one_opens(browser: Any, page: ServedPage) -> None:
    context = browser.new_context()
    tab = context.new_page()
    tab.set_default_timeout(HUNG_MS)
    tab.goto(f"{page.root}/events#key=wrong")
    tab.get_by_text("not the key of this dashboard").wait_for()
    tab.get_by_label("Key").fill(page.address.partition("#key=")[2])
    tab.get_by_role("button", name="Sign in").click()
    tab.get_by_role("heading", name="Events").wait_for()
    context.close()
