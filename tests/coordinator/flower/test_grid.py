"""The Grid of one run: whatever a node answers costs its own reply, never the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("flwr")

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from atoll.errors import BadFrame, ConnectionFailed
from coordinator.flower import replies as heard
from coordinator.flower.grid import CoordinatorGrid
from coordinator.flower.progress import Shown
from protos import atoll_apps_pb2 as pb
from protos import flower_content as content
from protos import flower_internals as flower
from protos.text_limits import REASON_CHARS
from tests.patience import HUNG_S


class Link:
    """What the Grid says, and an answer to what it asks for."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.said: list[pb.FromApp] = []
        self._failure = failure

    def say(self, message: pb.FromApp) -> None:
        self.said.append(message)

    def put(self, parts: Mapping[str, bytes]) -> int:
        return 0

    def get(self, wanted: Mapping[str, int]) -> dict[str, bytes]:
        if wanted and self._failure is not None:
            raise self._failure
        return {}


def asked(link: Link) -> tuple[CoordinatorGrid, str]:
    """A Grid whose one node owes a reply."""
    flower.take_identity(5, flower.SERVER_NODE)
    grid = CoordinatorGrid(5, None, lambda event, figures: None)
    grid.use(link)  # type: ignore[arg-type]
    grid.nodes_changed(pb.AppNodes(nodes=[pb.AppNode(node=9, name="n")], partitions=1))
    records = RecordDict({"c": ConfigRecord({"a": 1})})
    (name,) = grid.push_messages([Message(records, 9, "query")])
    return grid, name


def answered(link: Link, **reply: Any) -> Message:
    grid, name = asked(link)
    grid._take(pb.AppReply(message=name, **reply))
    (found,) = grid.pull_messages([name])
    assert grid._failure is None
    return found


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ({"content": b"\xff\xff\xff"}, "no content"),
        ({"parts": [pb.Part(hash="a" * 64, size=3, data=b"abc")]}, "not what its name says"),
        ({"parts": [pb.Part(hash="b" * 64, size=3)]}, "was not expected"),
        (
            {
                "content": pb.AppContent(
                    records=[
                        pb.AppRecord(
                            name="m",
                            kind=pb.APP_RECORD_METRICS,
                            entries=[pb.AppEntry(key="k", value=pb.AppValue(text="no number"))],
                        )
                    ]
                ).SerializeToString()
            },
            "m",
        ),
    ],
)
def test_a_reply_that_cannot_be_read_is_that_nodes_error(reply: dict[str, Any], why: str) -> None:
    found = answered(Link(BadFrame("byte 0 of 4 was not expected")), **reply)
    assert found.has_error()
    assert why in (found.error.reason or "")


@pytest.mark.parametrize(
    "records",
    [
        RecordDict({"m": MetricRecord({"\x1b[2Jloss": 1.0})}),
        RecordDict({"m": MetricRecord({"l" * 300: 1.0})}),
        RecordDict({"m\r": MetricRecord({"loss": 1.0})}),
        RecordDict({"c": ConfigRecord({"line\nline": "x"})}),
        RecordDict({"a": ArrayRecord({"\u202ew": Array(np.zeros(1))})}),
        RecordDict({"m": MetricRecord({f"{n}": 1.0 for n in range(heard.MAX_NAMES + 1)})}),
    ],
)
def test_names_that_no_terminal_or_log_should_see_cost_the_reply(records: RecordDict) -> None:
    encoded = content.encode(records)
    found = answered(Link(), content=encoded.content, parts=content.inlined(encoded.parts))
    assert found.has_error()
    assert "accepted" in found.error.reason
    assert "\x1b" not in found.error.reason


def test_an_errors_words_are_cleaned_and_told_in_one_line() -> None:
    link, told = Link(), []
    flower.take_identity(5, flower.SERVER_NODE)
    grid = CoordinatorGrid(5, None, lambda event, figures: told.append((event, figures)))
    grid.use(link)  # type: ignore[arg-type]
    nodes = [pb.AppNode(node=9 + n, name=f"n{n}", partition=n) for n in range(30)]
    grid.nodes_changed(pb.AppNodes(nodes=nodes, partitions=30))

    def answer(message: pb.FromApp) -> None:
        link.said.append(message)
        if message.HasField("task"):
            reason = "\x1b[2Jbad\x07\nTraceback\x1b]0;x\n" + "y" * 50_000
            grid.replied(pb.AppReply(message=message.task.message, error=2, reason=reason))

    link.say = answer  # type: ignore[method-assign]
    asks = [Message(RecordDict({"c": ConfigRecord({"a": 1})}), n.node, "query") for n in nodes]
    replies = list(grid.send_and_receive(asks, timeout=HUNG_S))
    assert {len(reply.error.reason) for reply in replies} == {REASON_CHARS}
    assert replies[0].error.reason.startswith(" [2Jbad \nTraceback ]0;x\ny")
    figures = dict(told)["replies"]
    assert (figures["failed"], len(figures["errors"])) == (30, 20)
    assert all(error.endswith(":  [2Jbad ") or "\x1b" not in error for error in figures["errors"])
    lines = Shown().take({"event": "replies", **figures})
    assert len(lines) == 6
    assert max(map(len, lines)) < 400


def test_metrics_are_told_in_one_line_however_many_there_are() -> None:
    metrics = {"\x1b[2J" + "n" * 1000 + str(n): [1.0] * 500 for n in range(5000)}
    told = heard.metrics_shown({"text": "\x07" * 10_000, "flag": True, **metrics})
    line = json.dumps(told)
    assert len(line) < 100_000
    assert "\\u001b" not in line
    assert told["flag"] is True
    assert len(told) <= heard.SHOWN_METRICS + 1


def test_a_good_reply_is_read_and_a_lost_coordinator_is_not_the_nodes_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("coordinator.flower.grid.RETRY_S", 0.001)
    good = content.encode(RecordDict({"c": ConfigRecord({"a": 2})}))
    found = answered(Link(), content=good.content)
    assert dict(found.content.config_records["c"]) == {"a": 2}
    grid, name = asked(Link(ConnectionFailed("gone")))
    reply = pb.AppReply(message=name, parts=[pb.Part(hash="b" * 64, size=3)])
    grid._guarded(lambda: grid._take(reply))
    assert isinstance(grid._failure, ConnectionFailed)


class Restarted(Link):
    """A coordinator that is restarted while arrays go up or come down."""

    def __init__(self) -> None:
        super().__init__()
        self.grid: CoordinatorGrid | None = None
        self.away = False

    def _fall(self) -> None:
        if self.away and self.grid is not None:
            self.away = False
            self.grid.reopened()
            raise ConnectionFailed("gone")

    def put(self, parts: Mapping[str, bytes]) -> int:
        self._fall()
        return 0

    def get(self, wanted: Mapping[str, int]) -> dict[str, bytes]:
        self._fall()
        return {}

    def tasks(self) -> list[str]:
        return [m.task.message for m in self.said if m.HasField("task")]


NODE = pb.AppNodes(nodes=[pb.AppNode(node=9, name="n")], partitions=1)


def test_a_reply_that_is_lost_with_its_coordinator_is_asked_for_again() -> None:
    link = Restarted()
    grid, name = asked(link)
    link.grid, link.away = grid, True
    reply = pb.AppReply(message=name, parts=[pb.Part(hash="b" * 64, size=3)])
    grid._guarded(lambda: grid._take(reply))
    assert grid._failure is None
    assert list(grid.pull_messages([name])) == []
    grid.nodes_changed(NODE)
    grid._pool.shutdown(wait=True)
    assert link.tasks() == [name, name]


def test_a_message_that_does_not_get_through_is_said_when_its_node_is_back() -> None:
    link = Restarted()
    grid, first = asked(link)
    link.grid, link.away = grid, True
    (second,) = grid.push_messages([Message(RecordDict({"c": ConfigRecord({"a": 2})}), 9, "query")])
    assert link.tasks() == [first]
    grid.nodes_changed(NODE)
    grid._pool.shutdown(wait=True)
    assert sorted(link.tasks()) == sorted([first, first, second])
