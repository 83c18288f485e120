"""Hosts of a population on Ray stand in for processes of this machine."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli.local_fleet import LocalFleet
from coordinator.cli.on_ray.cluster import Cluster
from coordinator.cli.on_ray.hosts import RayHosts, RayProcess
from coordinator.cli.processes import Processes
from tests.coordinator.cli.on_ray.fake_ray import Actor, FakeRay, RayError


class Reserved:
    """Bundles that are free once somebody has looked twice."""

    def __init__(self) -> None:
        self.looks, self.closed = 0, False

    def ready(self, timeout_s: float) -> bool:
        self.looks += 1
        return self.looks > 2

    def strategy(self, index: int) -> int:
        return index

    def close(self) -> None:
        self.closed = True


class Nodes(Cluster):
    def __init__(self, ray: FakeRay) -> None:
        super().__init__(ray)  # type: ignore[arg-type]
        self.ray, self.reserved, self.stored = ray, Reserved(), []

    def group(self, bundles: Any) -> Any:
        self.bundles = list(bundles)
        return self.reserved

    def put(self, value: bytes) -> Any:
        self.stored.append(value)
        return len(self.stored)


@pytest.fixture
def nodes() -> Nodes:
    return Nodes(FakeRay())


def started(nodes: Nodes, hosts: RayHosts, folder: Path, name: str) -> tuple[RayProcess, Actor]:
    (folder / name / "data").mkdir(parents=True)
    (folder / name / "data" / "rows").write_bytes(b"rows")
    words = ["-m", "worker.cli", "join", "10.0.0.9:1", "--token", "T", "--name", name]
    words += ["--threads", "2", "--state-dir", str(folder / name)]
    with (folder / f"{name}.log").open("w") as log:
        process = hosts.start(name, words, stdout=subprocess.PIPE, stderr=log)
    assert isinstance(process, RayProcess)
    return process, nodes.ray.actors.pop(None)  # type: ignore[call-overload]


def test_hosts_wait_for_room_together_and_get_data_once_and_the_token_aside(
    nodes: Nodes, tmp_path: Path
) -> None:
    told: list[str] = []
    with RayHosts(nodes, ["host0", "host1"], 2, told.append) as hosts:
        assert told == ["waiting for 2 x 2 free CPUs of the Ray cluster"]
        assert [bundle.cpus for bundle in nodes.bundles] == [2, 2]
        actors = [started(nodes, hosts, tmp_path, name)[1] for name in ("host0", "host1")]
    assert nodes.reserved.closed
    assert nodes.stored == [b"rows"]
    for index, actor in enumerate(actors):
        assert actor.order.arguments == ("10.0.0.9:1", "--name", f"host{index}", "--threads", "2")
        assert actor.order.environment == {"ATOLL_TOKEN": "T"}
        assert (actor.order.passing, actor.options["scheduling_strategy"]) == (True, index)
        assert (actor.options["lifetime"], actor.options["num_cpus"]) == (None, 2)
    assert len({actor.order.folder.partition("/")[0] for actor in actors}) == 1


def test_an_interrupted_wait_gives_the_room_back(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(timeout_s: float) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(nodes.reserved, "ready", interrupted)
    with pytest.raises(KeyboardInterrupt), RayHosts(nodes, ["host0"], 1):
        pass
    assert nodes.reserved.closed


def test_what_is_no_host_runs_on_this_machine(nodes: Nodes, tmp_path: Path) -> None:
    with RayHosts(nodes, ["host0"], 1) as hosts, Processes(tmp_path, hosts.start) as processes:
        assert processes.run("words", "here", ["-c", "print('of this machine')"]) == "of this machine\n"
    assert nodes.ray.actors == {}


def test_a_host_is_a_process_that_runs_ends_and_leaves_its_last_words(nodes: Nodes, tmp_path: Path) -> None:
    with RayHosts(nodes, ["host0"], 1) as hosts:
        process, actor = started(nodes, hosts, tmp_path, "host0")
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.0)
        process._waited.answer = {"exit_code": 6, "log": "denied"}
        assert process.poll() == process.wait() == 6
        process.terminate()
        assert ("leave",) not in actor.called
    assert (tmp_path / "host0.log").read_text() == "denied\n"


@pytest.mark.parametrize(("answer", "code"), [(None, -9), ("left", 0)])
def test_a_host_is_asked_to_leave_and_killed_where_it_does_not(
    nodes: Nodes, tmp_path: Path, answer: Any, code: int
) -> None:
    with RayHosts(nodes, ["host0"], 1) as hosts:
        process, actor = started(nodes, hosts, tmp_path, "host0")
        nodes.ray.actors["host0"] = actor
        process.terminate()
        assert ("leave",) in actor.called
        if answer is None:
            process.kill()
            assert nodes.ray.actors == {}
        else:
            actor.answers["leave"] = None
            process._waited.answer = {}
        assert process.poll() == code


def test_an_actor_that_is_lost_for_good_is_a_process_that_failed(nodes: Nodes, tmp_path: Path) -> None:
    with RayHosts(nodes, ["host0"], 1) as hosts:
        process, _ = started(nodes, hosts, tmp_path, "host0")
        process._waited.answer = RayError("its owner has died")
        assert process.wait() == 5
    assert "its owner has died" in (tmp_path / "host0.log").read_text()


def test_a_local_fleet_starts_its_hosts_by_what_it_is_given(nodes: Nodes, tmp_path: Path) -> None:
    """The words of `LocalFleet` are those that ``RayHosts`` reads."""
    seen: list[Any] = []

    def before(processes: Processes, states: Any) -> None:
        (states[0] / "data").mkdir(parents=True)

    with RayHosts(nodes, ["host0"], 1) as hosts:

        def start(host: str, arguments: Any, **streams: Any) -> Any:
            process = hosts.start(host, arguments, **streams)
            seen.append((host, process))
            return process

        with LocalFleet(
            0, ["--threads", "1"], keep=tmp_path, before=before, hosts=["host0"], start=start, in_order=False,
            awaited=False,
        ):  # fmt: skip
            actor = nodes.ray.actors[None]  # type: ignore[index]
            assert "--state-dir" not in actor.order.arguments
            assert actor.order.environment["ATOLL_TOKEN"].startswith("atoll")
            assert actor.order.arguments[-2:] == ("--threads", "1")
            seen[1][1]._code = 0
    assert [host for host, _ in seen] == ["", "host0"]
