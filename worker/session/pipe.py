"""Instructions and reports on the pipe between the daemon and its compute process: each kind by its class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.errors import BadFrame
from protos import atoll_compute_pb2 as pb
from protos import atoll_control_pb2 as control
from protos import coding
from protos.session import from_worker, to_coordinator
from worker.session import events as ev
from worker.session import instructions as do

INSTRUCTIONS: Mapping[str, type] = {
    "run_step": do.RunStep,
    "run_round": do.RunRound,
    "apply_step": ev.StepCommit,
    "repeat_step": do.RepeatStep,
    "evaluate": do.Evaluate,
    "discard": ev.StepDiscard,
    "drop": ev.Release,
    "train": ev.TrainRound,
    "evaluate_round": ev.EvaluateRound,
    "settle": ev.RoundTaken,
    "secure": ev.SecureOrder,
}
"""What a compute process is asked to do, by the field of ``ToCompute``, but for what it reads whole."""
_NAMES = {kind: name for name, kind in INSTRUCTIONS.items()}
OF_STAGE = frozenset(
    {
        "loaded",
        "failed",
        "ready",
        "eval_ready",
        "stored",
        "update_ready",
        "client_evaluated",
        "client_failed",
        "secure_answer",
    }
)
"""Reports on the job that is held, by the field of ``FromWorker``."""
REPORTS = OF_STAGE | {"ops_probed"}
TURNS = {ev.Loaded: "load", ev.UpdateReady: "train", ev.ClientEvaluated: "evaluate"}


def asked(instruction: do.Instruction) -> pb.ToCompute:
    """Return the message of an instruction of ``INSTRUCTIONS``."""
    name = _NAMES[type(instruction)]
    kind = pb.ToCompute.DESCRIPTOR.fields_by_name[name].message_type
    fields: dict[str, Any] = {name: coding.fields_of(instruction, kind)}
    return pb.ToCompute(**fields)


def instruction_of(kind: str, message: Any) -> do.Instruction:
    """Return the instruction that the field ``kind`` stands for."""
    found: do.Instruction = coding.read(INSTRUCTIONS[kind], message)
    return found


def reported(report: ev.Report) -> pb.FromCompute:
    """Return the message of a report."""
    if isinstance(report, ev.StepApplied):
        return pb.FromCompute(applied=coding.write(report, control.StepStart))
    return pb.FromCompute(said=to_coordinator(report))


def report_of(m: pb.FromCompute) -> ev.Report:
    """Return a report. Raises BadFrame for what breaks a bound, or says what no computation may."""
    if m.HasField("applied"):
        return coding.read(ev.StepApplied, m.applied)
    kind = m.said.WhichOneof("body")
    if kind not in REPORTS:
        raise BadFrame(f"a message to the coordinator of kind {kind}")
    report: ev.Report = from_worker(m.said)
    return report


def turn_over(report: ev.Report) -> str | None:
    """Return the turn of a federated job that a report ends; a job joined again may be in another."""
    return report.during if isinstance(report, ev.ClientFailed) else TURNS.get(type(report))
