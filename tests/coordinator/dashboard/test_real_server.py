"""`atoll dashboard` as a process beside a real coordinator: what it shows, and that no job depends on it."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from atoll.job import TrainingSpec
from benchmarks.oracle import built_in
from benchmarks.real_workers import LoopbackFleet, as_job, cut_at
from coordinator.client.endpoint import remember
from coordinator.client.prepare import prepare
from tests.coordinator.serving import Hold, Owner, fleet, start
from tests.e2e.test_coordinator_restart import killed_and_started_again, work_port
from tests.patience import HUNG_S

HUNG_MS = HUNG_S * 1000


@dataclass
class Process:
    """The command, and the address that it printed."""

    process: subprocess.Popen[str]
    root: str
    key: str

    def get(self, path: str, cookie: str = "") -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self.root.removeprefix("http://"), timeout=HUNG_S)
        connection.request("GET", path, headers={"cookie": cookie})
        return connection.getresponse()

    def cookie(self) -> str:
        connection = http.client.HTTPConnection(self.root.removeprefix("http://"), timeout=HUNG_S)
        connection.request("POST", "/session", self.key, {"origin": self.root})
        return connection.getresponse().headers["set-cookie"].partition(";")[0]


@contextmanager
def dashboard(state_dir: Path) -> Iterator[Process]:
    command = [sys.executable, "-m", "coordinator.cli", "dashboard", "--state-dir", str(state_dir)]
    process = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0", "--json"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        root, _, key = json.loads(process.stdout.readline())["url"].partition("/#key=")
        yield Process(process, root, key)
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def first_event(answer: http.client.HTTPResponse) -> dict:
    while not (line := answer.readline()).startswith(b"data: "):
        pass
    return json.loads(line.removeprefix(b"data: "))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_a_page_that_is_frozen_and_then_killed_changes_nothing_for_a_job(tmp_path: Path) -> None:
    with ExitStack() as stack:
        running = start(stack, tmp_path)
        owner, hold = Owner(running), Hold(stack, 2)
        fleet(stack, running, 2, ready=hold)
        remember(tmp_path, "127.0.0.1", running.started.entry_port, insecure=False)
        page = stack.enter_context(dashboard(tmp_path))
        job = owner.submit(steps=40)
        cookie = page.cookie()
        streams = [page.get(f"/stream?topic=job:{job}&topic=events", cookie) for _ in range(3)]
        for stream in streams:
            assert first_event(stream)["topic"]
        os.kill(page.process.pid, signal.SIGSTOP)
        hold.release()
        update = owner.watch(job, lambda u: u.step >= 20)
        assert update.step >= 20, "it goes on while the page is frozen"
        page.process.kill()
        last = owner.watch(job)
        assert (last.state, last.step, last.plan_version) == ("finished", 40, 1), last.reason
        for stream in streams:
            stream.close()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here: apt-get install chromium")
def test_a_run_from_submission_to_its_end_in_a_browser(tmp_path: Path) -> None:
    """Submit, the curve moves; a worker is killed, its stage passes on; the coordinator restarts, the page
    comes back by itself."""
    from playwright.sync_api import sync_playwright

    case = built_in("branches", TrainingSpec(steps=4000, n_micro=4, seed=3, checkpoint_every=25), 0.1)
    positions = case.dag.cuttable()
    half = (0, positions[len(positions) // 2])
    with LoopbackFleet(3) as fleet, dashboard(fleet.state) as page, sync_playwright() as playwright:
        port = work_port(fleet.state.with_suffix(".log"))
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page()
        tab.set_default_timeout(HUNG_MS)
        wrong: list[str] = []
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.goto(f"{page.root}/#key={page.key}")
        tab.get_by_role("table", name="Workers", exact=True).get_by_text("worker2").wait_for()

        job = fleet.client.submit(prepare(as_job(case), partitioner=cut_at(half), standbys=0)).job
        tab.get_by_role("link", name=job).first.click()
        tab.get_by_role("heading", name=job).wait_for()
        step_past(tab, 20)
        first = tab.locator(".legend b").first.text_content()
        tab.wait_for_function("t => document.querySelector('.legend b').textContent !== t", arg=first)

        lost = tab.locator(".plan a text").nth(1).text_content()
        os.kill(fleet.daemons()[int(lost.removeprefix("worker"))], signal.SIGKILL)
        tab.wait_for_function(
            "t => ![...document.querySelectorAll('.plan a text')].some(x => x.textContent == t)", arg=lost
        )
        tab.locator(".plan a text").get_by_text("worker2").wait_for()
        at = shown_step(tab)
        step_past(tab, at + 20)

        killed_and_started_again(fleet, port)
        at = shown_step(tab)
        step_past(tab, at + 20)
        assert tab.locator("#away").is_hidden()
        points = tab.evaluate("() => document.querySelector('.chart canvas') !== null")
        assert points
        assert wrong == []
        browser.close()


def shown_step(tab: object) -> int:
    text = tab.locator(".tile strong").first.text_content()  # type: ignore[attr-defined]
    return int("".join(c for c in text.partition("/")[0] if c.isdigit()))


def step_past(tab: object, step: int) -> None:
    """Wait until the page shows a later step."""
    tab.wait_for_function(  # type: ignore[attr-defined]
        "s => [...document.querySelectorAll('.tile strong')].slice(0, 1)"
        ".some(x => parseInt(x.textContent.split('/')[0].replace(/\\D/g, '') || '0') > s)",
        arg=step,
    )
