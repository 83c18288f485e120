"""One reader for all viewers: it asks what is looked at, and keeps what it has while nobody answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from atoll.errors import UsageError
from coordinator.dashboard.model import applied, content
from coordinator.dashboard.reader import MAX_TOPICS, Pace, Reader
from coordinator.dashboard.topic import Topic
from protos import atoll_control_pb2 as pb
from tests.coordinator.dashboard.pictured import PicturedCoordinator, World, pictured

QUICK = Pace(
    status_every_s=0.02, checkpoints_every_s=0.05, linger_s=0.0, pause_least_s=0.02, pause_most_s=0.05
)
JOB = "gpt2-medium-1"


def with_reader(
    world: World, scenario: Callable[[Reader, PicturedCoordinator], Coroutine[Any, Any, None]]
) -> None:
    async def run(coordinator: PicturedCoordinator) -> None:
        reader = Reader(coordinator.endpoint, QUICK)
        try:
            await scenario(reader, coordinator)
        finally:
            await reader.close()

    with PicturedCoordinator(world) as coordinator:
        asyncio.run(run(coordinator))


async def until(reader: Reader, check: Callable[[], object]) -> None:
    while not check():
        await reader.pulse.next.wait()


def test_however_many_look_at_a_job_it_is_watched_once() -> None:
    world = pictured()

    async def scenario(reader: Reader, coordinator: PicturedCoordinator) -> None:
        async with reader.looking([f"job:{JOB}"]) as [first]:
            await until(reader, lambda: first.view.facts.get("state"))
            async with reader.looking([f"job:{JOB}"]) as [second], reader.looking(["fleet", "events"]):
                assert second is first
                await until(reader, lambda: "Logs" in world.calls)
        assert world.calls.count("Watch") == 1
        assert world.calls.count("Logs") == 1

    with_reader(world, scenario)


def test_nothing_is_asked_when_nobody_looks() -> None:
    world = pictured()

    async def scenario(reader: Reader, coordinator: PicturedCoordinator) -> None:
        async with reader.looking(["fleet"]) as [fleet]:
            await until(reader, lambda: fleet.version)
        while reader._tasks:
            await asyncio.sleep(0)
        asked = len(world.calls)
        async with asyncio.timeout(None):
            for _ in range(20):
                await asyncio.sleep(QUICK.status_every_s / 4)
        assert len(world.calls) == asked

    with_reader(world, scenario)


def test_a_job_shows_its_stored_curve_and_goes_on_with_new_points() -> None:
    world = pictured()

    async def scenario(reader: Reader, coordinator: PicturedCoordinator) -> None:
        async with reader.looking([f"job:{JOB}"]) as [topic]:
            await until(reader, lambda: topic.view.curves)
            assert topic.view.curves["loss"].length == world.updates[JOB].step
            have, known = content(topic.view), topic.version
            update = world.updates[JOB]
            update.step += 1
            update.metrics.add(step=update.step, name="loss", value=3.0, time_s=2e9)
            world.stir()
            await until(reader, lambda: topic.version > known)
            frame = topic.since(known)
            assert frame is not None
            assert frame.kind == "change"
            assert frame.data["more"]["loss"] == [[354], [3.0]]
            assert applied(have, frame.data) == content(topic.view)

    with_reader(world, scenario)


def test_while_the_coordinator_is_away_all_stays_and_it_comes_back_by_itself() -> None:
    world = pictured()

    async def scenario(reader: Reader, coordinator: PicturedCoordinator) -> None:
        async with reader.looking([f"job:{JOB}", "fleet"]) as [job, fleet]:
            await until(reader, lambda: job.view.curves and fleet.version)
            await asyncio.to_thread(coordinator.stop)
            await until(reader, lambda: job.view.facts.get("away") and fleet.view.facts.get("away"))
            assert job.view.curves["loss"].length == 353
            assert len(fleet.view.tables["workers"]) == 118
            assert "atoll serve" in fleet.view.facts["away"]["why"]
            world.updates[JOB].step = 400
            await asyncio.to_thread(coordinator.start)
            await until(reader, lambda: job.view.facts["step"] == 400 and not job.view.facts.get("away"))
            await until(reader, lambda: not fleet.view.facts.get("away"))

    with_reader(world, scenario)


def test_streams_that_a_stopping_coordinator_ends_without_an_error_are_read_again() -> None:
    world = pictured()

    async def scenario(reader: Reader, coordinator: PicturedCoordinator) -> None:
        async with reader.looking([f"job:{JOB}", "events"]) as [job, events]:
            await until(reader, lambda: job.view.curves and events.version)
            world.over = True
            world.stir()
            await until(reader, lambda: job.view.facts.get("away") and events.view.facts.get("away"))
            world.over = False
            await until(reader, lambda: not job.view.facts.get("away") and not events.view.facts.get("away"))
        assert world.calls.count("Watch") > 1

    with_reader(world, scenario)


def test_an_unknown_job_is_said_in_the_coordinators_words() -> None:
    async def scenario(reader: Reader, coordinator: PicturedCoordinator) -> None:
        async with reader.looking(["job:nothing"]) as [topic]:
            await until(reader, lambda: topic.view.facts.get("away"))
            assert topic.view.facts["away"]["kind"] == "UsageError"
            assert "no job 'nothing'" in topic.view.facts["away"]["why"]

    with_reader(pictured(), scenario)


def test_the_last_step_of_a_job_is_read_for_who_looks_at_it() -> None:
    async def scenario(reader: Reader, coordinator: PicturedCoordinator) -> None:
        async with reader.looking([f"timeline:{JOB}"]) as [topic]:
            await until(reader, lambda: topic.view.facts.get("step") == 352)
            assert len(topic.view.facts["ranks"]) == 4

    with_reader(pictured(), scenario)


def test_log_lines_that_come_again_after_an_interruption_are_one_row() -> None:
    world = pictured()

    async def scenario(reader: Reader, coordinator: PicturedCoordinator) -> None:
        async with reader.looking(["events"]) as [topic]:
            await until(reader, lambda: len(topic.view.tables.get("events", ())) == len(world.lines))
            await asyncio.to_thread(coordinator.stop)
            await until(reader, lambda: topic.view.facts.get("away"))
            world.lines.append(pb.LogLine(time_s=2e9, event="server.started", fields_json="{}"))
            await asyncio.to_thread(coordinator.start)
            await until(reader, lambda: len(topic.view.tables["events"]) == len(world.lines))
            rows = topic.view.tables["events"].values()
            assert [row["event"] for row in rows] == [line.event for line in world.lines]

    with_reader(world, scenario)


@pytest.mark.parametrize("name", ["", "job", "nothing", "fleet2", "job:" + "x" * 500])
def test_a_topic_that_there_is_not_is_refused_and_leaves_nothing_behind(name: str) -> None:
    async def scenario(reader: Reader, coordinator: PicturedCoordinator) -> None:
        with pytest.raises(UsageError):
            async with reader.looking(["fleet", name]):
                pass
        while reader._topics:
            await asyncio.sleep(0)

    with_reader(pictured(), scenario)


def test_so_many_topics_are_read_and_no_more() -> None:
    async def scenario(reader: Reader, coordinator: PicturedCoordinator) -> None:
        with pytest.raises(UsageError, match="close some"):
            async with reader.looking([f"job:{number}" for number in range(MAX_TOPICS + 1)]):
                pass

    with_reader(pictured(), scenario)


def test_a_viewer_that_is_one_version_behind_gets_the_change_and_any_other_the_whole() -> None:
    from coordinator.dashboard.model import View
    from coordinator.dashboard.topic import Pulse

    async def run() -> None:
        topic = Topic("fleet", Pulse())
        assert topic.since(0) is None
        for step in range(3):
            topic.publish(View({"step": step}))
        assert topic.since(topic.version) is None
        change, whole = topic.since(topic.version - 1), topic.since(topic.version - 2)
        assert change is not None
        assert whole is not None
        assert (change.kind, change.data) == ("change", {"facts": {"step": 2}})
        assert (whole.kind, whole.data["facts"]) == ("whole", {"step": 2})
        assert topic.since(0) is whole, "encoded once for all"
        version = topic.version
        topic.publish(View({"step": 2}))
        assert topic.version == version, "nobody is woken for nothing"

    asyncio.run(run())
