"""What an owner reads of a run: the strategy's rounds and metrics, the app's own lines, and why it waits."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.flower import grid as grids
from coordinator.flower.grid import CoordinatorGrid
from coordinator.flower.progress import Shown
from coordinator.flower.server_process import Progress
from protos import atoll_apps_pb2 as pb

if TYPE_CHECKING:
    import pytest


def heard(folder: Path, *lines: tuple[str, str, tuple[Any, ...]], shows: bool = False) -> list[str]:
    """Lines shown of what was logged: (file, text, arguments)."""
    told: list[dict[str, Any]] = []
    progress = Progress(lambda event, figures: told.append({"event": event, **figures}), folder, shows)
    for path, text, arguments in lines:
        progress.handle(logging.LogRecord("flwr", logging.INFO, path, 1, text, arguments, None))
    shown = Shown()
    return [line for event in told for line in shown.take(event)]


FLOWER = "/site-packages/flwr/server.py"


def test_a_legacy_apps_rounds_losses_and_history_are_shown(tmp_path: Path) -> None:
    shown = heard(
        tmp_path,
        (FLOWER, "initial parameters (loss, other metrics): %s, %s", (2.5, {"accuracy": 0.1})),
        (FLOWER, "[ROUND %s]", (1,)),
        (FLOWER, "fit progress: (%s, %s, %s, %s)", (1, 1.25, {"accuracy": 0.5}, 3.0)),
        (FLOWER, "[SUMMARY]", ()),
        (FLOWER, "\t%s", ("\tround 1: 0.75",)),
    )
    assert shown == [
        "start  global model: loss 2.5, accuracy 0.1",
        "round 1  global model: loss 1.25, accuracy 0.5",
        "    round 1: 0.75",
    ]


def test_what_the_app_itself_logs_is_shown_once(tmp_path: Path) -> None:
    own = (str(tmp_path / "mine" / "server.py"), "best so far: %s\x1b[2J", (0.5,))
    assert heard(tmp_path, own, (FLOWER, "Starting %s", ("x",))) == ["  best so far: 0.5 [2J"]
    assert heard(tmp_path, own, shows=True) == []  # Flower's log is printed anyhow


def test_too_few_nodes_are_said_at_once(tmp_path: Path) -> None:
    waits = (FLOWER, "Waiting for nodes to connect: %d connected (minimum required: %d).", (2, 10))
    (line,) = heard(tmp_path, waits, waits)
    assert "waits for 10 nodes, 2 take part" in line


def test_groups_are_shown_where_nobody_counts_rounds() -> None:
    shown, sent = Shown(), {"event": "sent", "kind": "train", "nodes": 2}
    replies = {
        "event": "replies", "replies": 2, "errors": [], "failed": 0, "late": 0, "down_bytes": 1,
        "up_bytes": 1, "took_s": 1.0,
    }  # fmt: skip
    heads = []
    for group in ("1", "2"):
        shown.take({**sent, "group": group})
        heads += [line.split("  ")[0] for line in shown.take(replies)]
    shown.take({"event": "round", "round": 7, "rounds": 0})
    shown.take({**sent, "group": "1"})
    heads += [line.split("  ")[0] for line in shown.take(replies)]
    assert heads == ["group 1", "group 2", "round 7"]


def test_an_app_that_asks_who_is_there_and_sends_nothing_is_mentioned_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[dict[str, Any]] = []
    grid = CoordinatorGrid(1, None, lambda event, figures: told.append({"event": event, **figures}))
    grid.nodes_changed(pb.AppNodes(nodes=[pb.AppNode(node=5, name="lab1")]))
    for _ in range(grids.IDLE_LOOKS):
        grid.get_node_ids()
    assert told == []
    monkeypatch.setattr(grids, "IDLE_S", 0.0)
    for _ in range(3):
        grid.get_node_ids()
    (event,) = told
    assert event["event"] == "waiting"
    assert "more than the 1 nodes" in event["reason"]
