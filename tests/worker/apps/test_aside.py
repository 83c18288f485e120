"""A node that is slow costs its neighbours on the same worker nothing, whatever becomes of its own task."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, MetricRecord, RecordDict

from protos import atoll_apps_pb2 as pb
from protos import flower_content as content
from tests.patience import HUNG_S
from tests.worker.apps.test_host import Hosted
from worker.apps.store import AppStore

SLOW, NEIGHBOUR = 11, 12
OTHERS = 300
CLIENT = """
import time
from pathlib import Path
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

client = ClientApp()

@client.query()
def query(message, context):
    while message.content["c"]["waits"] and not Path({release!r}).exists():
        time.sleep(0.01)
    served = context.state["m"]["served"] if "m" in context.state else 0
    context.state["m"] = MetricRecord({{"served": served + 1}})
    return Message(RecordDict({{"m": MetricRecord({{"served": served + 1}})}}), reply_to=message)
"""


@pytest.fixture
def hosted(tmp_path: Path) -> Iterator[Hosted]:
    store = AppStore(tmp_path / "state")
    made = Hosted(tmp_path, CLIENT.format(release=str(tmp_path / "release")), store)
    store.accept(made.bundle.hash)
    made.run.consent_changed()
    made.until(lambda m: m.HasField("ready"))
    seats = [pb.AppSeat(node=node, partition=at) for at, node in enumerate((SLOW, NEIGHBOUR))]
    made.run.start(pb.AppStart(run=5, partitions=2, seats=seats))
    yield made
    made.run.end("the test is over")
    made.run.join(HUNG_S)


def ask(hosted: Hosted, message: str, node: int, *, waits: bool = False, left_s: float = HUNG_S) -> None:
    said = content.encode(RecordDict({"c": ConfigRecord({"waits": waits})}))
    task = pb.AppTask(run=5, message=message, node=node, kind="query", left_s=left_s, content=said.content)
    hosted.run.task(task)


def served(hosted: Hosted, message: str) -> int:
    """How often the node had been served, as its reply says."""
    reply = hosted.until(lambda m: m.reply.message == message).reply
    assert not reply.error, reply.reason
    found: Any = content.decode(reply.content, lambda name, size: b"")
    metrics: MetricRecord = found["m"]
    return int(metrics["served"])


def test_a_slow_node_keeps_its_task_and_its_neighbours_do_not_wait_for_it(
    hosted: Hosted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("worker.apps.aside.LOOK_S", 0.01)
    ask(hosted, "slow", SLOW, waits=True, left_s=OTHERS * 2.0)
    for number in range(OTHERS):  # its share is soon over
        ask(hosted, f"other {number}", NEIGHBOUR)
    assert served(hosted, f"other {OTHERS - 1}") == OTHERS
    assert not any(m.reply.message == "slow" for m in hosted.said)
    ask(hosted, "after it", SLOW)
    ask(hosted, "last", NEIGHBOUR)
    assert served(hosted, "last") == OTHERS + 1
    assert not any(m.reply.message == "after it" for m in hosted.said)
    (tmp_path / "release").touch()
    assert served(hosted, "slow") == 1
    assert served(hosted, "after it") == 2  # by another process, which knows what became of the state


def test_a_slow_node_that_is_given_up_takes_nobodys_process_along(
    hosted: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(hosted, "slow", SLOW, waits=True)
    ask(hosted, "other", NEIGHBOUR)
    hosted.run.cancel(["slow"])
    assert served(hosted, "other") == 1
    ask(hosted, "again", SLOW)
    assert served(hosted, "again") == 1
