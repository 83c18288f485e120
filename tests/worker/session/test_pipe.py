"""What crosses the pipe comes out as it was; what no computation of ours says is refused."""

from __future__ import annotations

import pytest

from atoll.errors import BadFrame
from protos import atoll_compute_pb2 as pb
from protos import atoll_control_pb2 as control
from tests.worker.session.test_federated import assessed, evaluate, settled, train, trained
from tests.worker.session.test_machine import relinked
from worker.session import events as ev
from worker.session import instructions as do
from worker.session import pipe

INSTRUCTIONS: list[do.Instruction] = [
    do.RunStep("j", 1, 4),
    relinked(4),
    do.RepeatStep(relinked(4)),
    do.Evaluate(relinked(4)),
    ev.StepDiscard("j", 1, 4, "again"),
    ev.Release("j", 1, "over"),
    train(3, "a"),
    evaluate(3),
    settled(3),
]
REPORTS: list[ev.Report] = [
    ev.Loaded("j", 3, 0.5),
    ev.StepReady("j", 3, 7, (1.5,)),
    ev.StepApplied("j", 3, 7),
    ev.EvalReady("j", 3, 7, 2.0),
    ev.StateStored("j", 3, 7, {"w": "a" * 64}, kept=True),
    trained(7, "a"),
    assessed(7),
    ev.OpsProbed(9, {"mm": (0.5, 0.25)}),
    ev.StageFailed("j", 3, 7, "out of memory", "w-b", 100),
    ev.ClientFailed("j", 7, "no such file", "train"),
]


def sent(report: ev.Report) -> ev.Report:
    return pipe.report_of(pb.FromCompute.FromString(pipe.reported(report).SerializeToString()))


@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda value: type(value).__name__)
def test_every_instruction_comes_out_as_it_was(instruction: do.Instruction) -> None:
    message = pb.ToCompute.FromString(pipe.asked(instruction).SerializeToString())
    kind = message.WhichOneof("body")
    assert kind is not None
    assert pipe.instruction_of(kind, getattr(message, kind)) == instruction


@pytest.mark.parametrize("report", REPORTS, ids=lambda value: type(value).__name__)
def test_every_report_comes_out_as_it_was(report: ev.Report) -> None:
    assert sent(report) == report


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"leaving": control.Leaving(reason="bye")},
        {"introduction": control.Introduction()},
        {"heartbeat": control.Heartbeat()},
        {"link_probed": control.LinkProbed(request=1)},
    ],
)
def test_what_no_computation_says_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(BadFrame, match="a message to the coordinator of kind"):
        pipe.report_of(pb.FromCompute(said=control.FromWorker(**body)))  # type: ignore[arg-type]


def test_a_process_cannot_say_itself_that_its_stage_is_gone() -> None:
    broke = sent(ev.StageFailed("j", 3, 7, "go\u202e\x1b[2J", gone=True))
    assert isinstance(broke, ev.StageFailed)
    assert (broke.gone, broke.reason) == (False, "go  [2J")
