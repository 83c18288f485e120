"""What others wrote stands on the screen as they wrote it: no markup, no emoji codes, no traceback."""

from __future__ import annotations

import ast
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from google.protobuf.descriptor import FieldDescriptor
from rich.console import Console, RenderableType

from atoll.exchange import Exchange
from atoll.microbatch import ScheduleName
from atoll.plan import (
    LinkPrediction,
    LinkSpec,
    Plan,
    Prediction,
    Replica,
    StagePrediction,
    StageSpec,
    one_replica,
)
from coordinator.cli.views.render import plan_view, status_view, watch_line, watch_view
from protos import atoll_control_pb2 as pb

if TYPE_CHECKING:
    from google.protobuf.message import Message

ROOT = Path(__file__).resolve().parents[4]
HOSTILE = "[/a][red]:bomb:"
NAMES = {"w-1": f"name{HOSTILE}"}


def shown(view: RenderableType) -> str:
    """As a console with markup and emoji codes switched on shows it."""
    text = io.StringIO()
    Console(file=text, width=2000).print(view)
    return text.getvalue()


def hostile(message: Message) -> list[str]:
    """Fill every text of ``message``, those below it too; returns the texts."""
    filled: list[str] = []
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is message.DESCRIPTOR:
            continue  # one within one of its kind: filled once
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            filled += hostile(value.add() if field.is_repeated else value)
        elif field.is_repeated:
            continue  # of plain values
        elif field.type == FieldDescriptor.TYPE_STRING:
            filled.append(f"{message.DESCRIPTOR.name}.{field.name}{HOSTILE}")
            setattr(message, field.name, filled[-1])
        elif field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            setattr(message, field.name, 1.5)
        elif field.cpp_type != FieldDescriptor.CPPTYPE_BOOL:
            setattr(message, field.name, 2)
    return filled


def test_a_workers_device_kind_is_no_markup() -> None:
    status = pb.StatusReply(workers=[pb.WorkerStatus(worker="w-1", device=pb.DeviceFacts(kind="[/a]"))])
    assert "[/a] x0" in shown(status_view(status))


def test_every_text_of_a_status_stands_as_it_is() -> None:
    status = pb.StatusReply()
    texts = hostile(status)
    found = shown(status_view(status))
    told = [text for text in texts if text in found]
    assert {text.partition(HOSTILE)[0] for text in told} >= {
        "WorkerStatus.worker",
        "WorkerStatus.name",
        "WorkerStatus.state",
        "WorkerStatus.reason",
        "WorkerStatus.job",
        "DeviceFacts.kind",
        "JobUpdate.job",
        "JobUpdate.name",
        "JobUpdate.state",
        "JobUpdate.reason",
        "LinkStatus.shared",
    }
    # Whatever is shown at all is shown whole.
    assert found.count(HOSTILE) == found.count("[/a]") == found.count(":bomb:")


@pytest.mark.parametrize("federated", [False, True])
def test_every_text_of_a_running_job_stands_as_it_is(federated: bool) -> None:
    update = pb.JobUpdate()
    texts = hostile(update)
    if not federated:
        update.ClearField("federated")
    for view in (shown(watch_view(update, [1.0, 0.5], NAMES)), watch_line(update)):
        assert view.count(HOSTILE) == view.count("[/a]") == view.count(":bomb:") >= 4
    found = shown(watch_view(update, [1.0, 0.5], NAMES))
    missing = {text.partition(HOSTILE)[0] for text in texts if text not in found}
    expected = {
        "FederatedStatus.strategy",
        "FederatedStatus.data",
        "ClientStatus.codec",
        "ClientStatus.reason",
    }
    assert not missing & (expected if federated else {"LinkRate.codec", "LinkRate.reason", "JobUpdate.state"})


def test_planned_and_measured_memory_of_running_stages_are_shown() -> None:
    stage = pb.StageStatus(stage=1, worker="w-1", planned_bytes=306 << 20, measured_bytes=290 << 20)
    update = pb.JobUpdate(job="llama", state="training", stages=[stage])
    for words in ("306.0 MiB", "290.0 MiB"):
        assert words in shown(watch_view(update, [], NAMES))
    found = shown(status_view(pb.StatusReply(jobs=[update])))
    assert "llama: memory of stage 1 306.0 MiB planned, 290.0 MiB measured" in found


def test_every_text_of_a_plan_stands_as_it_is() -> None:
    plan = Plan(
        job="j",
        version=1,
        dag_hash="",
        eval_dag_hash="",
        partitioner=f"partitioner{HOSTILE}",
        schedule=ScheduleName.GPIPE,
        n_micro=2,
        replicas=one_replica(
            2,
            (StageSpec(0, 3, 0, 3, "w-1", 2), StageSpec(3, 5, 3, 5, f"w-2{HOSTILE}", 2)),
            (LinkSpec(0, 1, f"codec{HOSTILE}", 2.0, reason=f"why{HOSTILE}"),),
        ),
        prediction=Prediction(
            step_s=1.0,
            lower_bound_s=0.5,
            bottleneck=f"bottleneck{HOSTILE}",
            reason=f"reason{HOSTILE}",
            stages=(StagePrediction("w-1", 0.1, 0.1, 1 << 20, 1 << 30),),
            links=(LinkPrediction("w-1", f"w-2{HOSTILE}", 1000, 0.1, 2000),),
            notes=(f"note{HOSTILE}",),
        ),
        left_out=(("w-1", f"left out{HOSTILE}"),),
    )
    found = shown(plan_view(plan, NAMES))
    for word in ("partitioner", "name", "w-2", "codec", "why", "bottleneck", "note", "left out"):
        assert f"{word}{HOSTILE}" in found


def consoles() -> Iterator[tuple[str, ast.Call]]:
    for path in [
        p
        for package in ("coordinator", "worker", "hostos", "protos")
        for p in ROOT.glob(f"{package}/**/*.py")
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Console":
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_a_plan_of_replicas_shows_each_ones_share_cut_and_links() -> None:
    pair = (StageSpec(0, 3, 0, 3, "w-1", 2), StageSpec(3, 5, 3, 5, "w-2", 2))
    links = (LinkSpec(0, 1, "fp16", reason="thin"),)
    replicas = (Replica((0, 6), pair, links), Replica((6, 8), (StageSpec(0, 5, 0, 5, "w-3", 0),)))
    stages = tuple(StagePrediction(f"w-{n}", 0.1, 0.5, 2**20, 2**21) for n in (1, 2, 3))
    prediction = Prediction(1.0, 0.5, "latency", "", stages, (LinkPrediction("w-1", "w-2", 10, 0.1, 20),))
    plan = Plan(
        "j", 1, "", "", "op_fence", ScheduleName.GPIPE, 8, replicas, (), prediction,
        blocks=4, exchange=Exchange(),
    )  # fmt: skip
    found = shown(plan_view(plan, {"w-3": "third"}))
    assert "2 replicas, 3 stages, 8 micro-batches" in found
    assert [line.partition(", compute")[0] for line in found.splitlines() if line.startswith("replica ")] == [
        "replica 0: micro-batches 0-5, stage 0, device w-1, ops 0-2",
        "replica 0: micro-batches 0-5, stage 1, device w-2, ops 3-4",
        "replica 1: micro-batches 6-7, stage 0, device third, ops 0-4",
    ]
    assert "w-1 > w-2: thin" in found


def test_no_console_of_a_command_reads_markup_or_emoji_codes() -> None:
    found = dict(consoles())
    assert found
    for where, call in found.items():
        given = {keyword.arg: getattr(keyword.value, "value", None) for keyword in call.keywords}
        assert (given.get("markup"), given.get("emoji")) == (False, False), where
