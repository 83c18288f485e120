"""The page for everybody holds counts, curves and totals, and nothing by which anybody could be found."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from contextlib import closing

import pytest

from coordinator.dashboard.access import Listening
from coordinator.dashboard.app import PAGES, Settings
from coordinator.dashboard.curves import Seen
from coordinator.dashboard.model import View, content
from coordinator.dashboard.public import public_run, public_view
from protos import atoll_control_pb2 as pb
from tests.coordinator.dashboard.pictured import PicturedCoordinator, World, pictured
from tests.coordinator.dashboard.serving import ServedPage, served_page
from tests.coordinator.dashboard.test_reader import QUICK
from tests.patience import HUNG_S


@pytest.fixture(scope="module")
def world() -> World:
    return pictured(hostile=True)


@pytest.fixture(scope="module")
def page(world: World) -> Iterator[ServedPage]:
    settings = Settings(Listening(port=0), QUICK, public=True)
    with PicturedCoordinator(world) as coordinator, served_page(coordinator.endpoint, settings) as served:
        assert "#" not in served.address
        yield served


def secrets(world: World) -> set[str]:
    """Texts that say who somebody is, or what about them."""
    found = {text for w in world.status.workers for text in (w.worker, w.name, w.address, w.site, w.reason)}
    found |= {job.reason for job in world.updates.values()} | {line.event for line in world.lines}
    return found - {""}


def said(world: World, text: str) -> list[str]:
    return [word for word in secrets(world) if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)]


def get(page: ServedPage, path: str) -> tuple[int, str]:
    with closing(http.client.HTTPConnection(page.root.removeprefix("http://"), timeout=HUNG_S)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        assert "set-cookie" not in answer.headers
        return answer.status, answer.read().decode() if "stream" not in path or answer.status != 200 else ""


def events(page: ServedPage, topics: str, wanted: int) -> str:
    """The first events of a stream, as they came."""
    with closing(http.client.HTTPConnection(page.root.removeprefix("http://"), timeout=HUNG_S)) as connection:
        connection.request("GET", f"/stream?{topics}")
        with closing(connection.getresponse()) as answer:
            assert answer.status == 200
            text = ""
            while text.count("data: ") < wanted:
                text += answer.readline().decode()
            return text


def test_nothing_of_who_takes_part_leaves(page: ServedPage, world: World) -> None:
    topics = "&".join(
        f"topic={name}" for name in ("public", *(f"public-run:{job}" for job in list(world.updates)[:3]))
    )
    assert said(world, "eve ran <script>alert(1)</script> at hall-west"), "the search finds what there is"
    shown = events(page, topics, 5) + get(page, "/")[1] + get(page, "/runs/gpt2-medium-1")[1]
    assert '"loss":' in shown
    assert '"places":' in shown
    assert said(world, shown) == []


def test_every_other_topic_and_page_is_none(page: ServedPage, world: World) -> None:
    for topic in (
        "fleet",
        "events",
        "contributions",
        "job:gpt2-medium-1",
        "timeline:gpt2-medium-1",
        "publicx",
    ):
        status, text = get(page, f"/stream?topic={topic}")
        assert status == 404, topic
        status, _ = get(page, f"/stream?topic=public&topic={topic}")
        assert status == 404, topic
        assert said(world, text) == []
    for path in ("/session", "/jobs/gpt2-medium-1/trace", *(p.path for p in PAGES if p.path != "/")):
        assert get(page, path.replace("{job}", "j").replace("{worker:path}", "w"))[0] == 404, path


def test_a_coordinator_that_is_away_is_not_named_by_its_address(world: World) -> None:
    settings = Settings(Listening(port=0), QUICK, public=True)
    coordinator = PicturedCoordinator(world)
    coordinator.start()
    address = coordinator.endpoint.address
    coordinator.stop()
    with served_page(coordinator.endpoint, settings) as served:
        text = events(served, "topic=public", 1)
    assert '"away"' in text
    assert address not in text


def test_counts_and_sums_are_those_of_the_fleet() -> None:
    status = pb.StatusReply()
    for number, (site, state, job) in enumerate(
        [("a", "assigned", "j"), ("a", "pool", ""), ("b", "dead", "")]
    ):
        status.workers.add(worker=f"w{number}", site=site, state=state, job=job, gflops=2.0)
    given = [
        pb.Credit(day="2026-11-30", worker="w0", name="n", useful=pb.WorkDone(steps=3, computed_ms=4000))
    ]
    found = content(public_view(status, given))
    json.dumps(found, allow_nan=False)
    assert found["facts"]["places"] == [{"at work": 1, "idle": 1}]
    assert (found["facts"]["workers"], found["facts"]["gflops"]) == (2, 4.0)
    assert found["facts"]["totals"]["steps"] == 3
    assert found["facts"]["totals"]["workers"] == 1


def test_of_a_jobs_view_only_its_losses_are_public() -> None:
    seen = Seen(0, 1, [1], [2.0])
    view = View({"reason": "x"}, {"stages": {}}, {"loss": seen, "client/w-1/loss": seen})
    assert public_run(view) == View(curves={"loss": seen})
