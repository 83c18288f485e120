"""`atoll ray` over a Ray of this process."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli.main import app
from coordinator.cli.on_ray import cluster
from hostos.command_line import run
from tests.coordinator.cli.on_ray.fake_ray import ActorUnavailableError, FakeRay, RayError


def joined(**more: Any) -> dict[str, Any]:
    shown = {"state": "joined", "host": "node1", "folder": "/srv/atoll-ray/node1/atoll/0", "starts": 1}
    return {"status": {**shown, "since_s": time.time(), "log": "", **more}, "leave": True}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    made = FakeRay({"CPU": 4.0, "memory": 8e9}, {"CPU": 8.0, "GPU": 2.0, "memory": 8e9})
    made.joins = {f"atoll-{number}": joined() for number in range(3)}
    monkeypatch.setattr(cluster, "_ray", lambda: made)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return made


@pytest.fixture
def token(tmp_path: Path) -> str:
    (tmp_path / "token").write_text("atoll2_secret\n")
    return str(tmp_path / "token")


def up(token: str, *words: str) -> int:
    return run(app, ["ray", "up", "192.0.2.7:7700", "--token-file", token, *words])


def test_workers_take_each_node_as_it_is_and_the_token_stands_on_no_command_line(
    ray: FakeRay, token: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert up(token, "--worker-options", "--sandbox require", "--node-dir", "/data/atoll") == 0
    taken = [(a.options["num_cpus"], a.options["num_gpus"], a.options["memory"]) for a in ray.actors.values()]
    assert taken == [(4, 0, None), (4, 1, None), (4, 1, None)]
    for number, (name, actor) in enumerate(ray.actors.items()):
        assert name == f"atoll-{number}"
        assert (actor.options["lifetime"], actor.options["max_restarts"]) == ("detached", -1)
        assert actor.order.environment == {"ATOLL_TOKEN": "atoll2_secret"}
        assert (actor.order.folder, actor.order.base) == (f"atoll/{number}", "/data/atoll")
    words = [" ".join(actor.order.arguments) for actor in ray.actors.values()]
    last = "--sandbox require"
    assert words[0] == f"192.0.2.7:7700 --name atoll-0 --threads 4 --device cpu {last}"
    assert words[1] == f"192.0.2.7:7700 --name atoll-1 --threads 4 --device cuda:0 {last}"
    assert capsys.readouterr().out.count("state joined, node node1, started 1 x") == 3


def test_workers_as_asked_have_their_memory_reserved_and_several_gpus_are_one(
    ray: FakeRay, token: str
) -> None:
    assert up(token, "--workers", "2", "--cpus", "2", "--memory", "1GiB") == 0
    (first, second) = ray.actors.values()
    assert first.options["memory"] == second.options["memory"] == 1 << 30
    assert "--threads 2 --device cpu --memory 1073741824" in " ".join(first.order.arguments)
    ray.actors.clear()
    assert up(token, "--gpus", "2") == 0
    (site,) = ray.actors.values()
    assert (site.options["num_cpus"], site.options["num_gpus"]) == (8, 2)
    assert "--devices cuda:0+cuda:1" in " ".join(site.order.arguments)
    ray.actors.clear()
    assert up(token, "--gpus", "2", "--worker-options", "--device=cuda:1") == 0
    (own,) = ray.actors.values()
    assert "--devices" not in own.order.arguments


def test_a_fleet_that_is_there_is_not_started_twice(
    ray: FakeRay, token: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert up(token) == 0
    assert up(token) == 2
    assert "`atoll ray down`" in capsys.readouterr().err
    assert ray.given == ()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--worker-options", "--state-dir /x"], "--state-dir"),
        (["--worker-options", "--token=T"], "--token=T"),
        (["--worker-options", "'"], "--worker-options"),
        (["--cpus", "9"], "8 CPUs and 2 GPUs"),
        (["--memory", "much"], "much"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    ray: FakeRay, token: str, capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    assert up(token, *words) == 2
    assert named in capsys.readouterr().err
    assert ray.actors == {}


def test_a_fleet_needs_a_token(ray: FakeRay, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["ray", "up", "192.0.2.7:7700"]) == 2
    assert "atoll token create" in capsys.readouterr().err


def test_status_tells_apart_who_waits_who_starts_again_and_who_failed(
    ray: FakeRay, token: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ray.joins = {
        "atoll-0": joined(),
        "atoll-1": {"status": ActorUnavailableError("away")},
        "atoll-2": {"status": RayError("first\nlast words")},
    }
    assert up(token, "--workers", "4", "--cpus", "1", "--wait", "0") == 0
    capsys.readouterr()
    assert run(app, ["ray", "status", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in rows] == ["joined", "starting again", "failed", "waiting for room"]
    assert run(app, ["ray", "status"]) == 0
    assert "atoll-2: last words" in capsys.readouterr().err


@pytest.mark.parametrize("forget", [False, True])
def test_down_asks_who_answers_to_leave_and_ends_everybody(
    ray: FakeRay, token: str, capsys: pytest.CaptureFixture[str], forget: bool
) -> None:
    ray.joins.pop("atoll-2")
    assert up(token, "--wait", "0") == 0
    actors = dict(ray.actors)
    capsys.readouterr()
    assert run(app, ["ray", "down", *(["--forget"] if forget else []), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"ended": ["atoll-0", "atoll-1", "atoll-2"], "without_answer": ["atoll-2"]}
    assert ray.actors == {}
    assert all(("leave", forget) in actor.called for actor in actors.values())


def test_without_ray_the_remedy_is_named(
    token: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert up(token) == 2
    assert "pip install 'atoll[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "named"),
    [
        (ConnectionError("Could not find any running Ray instance."), 5, "ray start --head"),
        (RuntimeError("Version mismatch"), 2, "Version mismatch"),
    ],
)
def test_a_cluster_that_is_not_there_or_is_another_version_is_an_error(
    ray: FakeRay, token: str, capsys: pytest.CaptureFixture[str], error: Exception, code: int, named: str
) -> None:
    ray.refused = error
    assert up(token) == code
    assert named in capsys.readouterr().err
