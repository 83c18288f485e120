"""A mesh of real processes, and stages of the tests' models that they compute together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

import protos.session  # noqa: F401 - codes of what an assignment holds
from atoll.data import DataSpec
from atoll.federated import Floors
from atoll.mesh.layout import Inside
from atoll.messages import to_worker as asked
from atoll.microbatch import ScheduleName
from atoll.opdag import StateMeta
from coordinator.capture.capture import capture
from protos import atoll_control_pb2 as pb
from protos import coding
from tests.captured_models import CapturedModel, captured_model
from tests.models import Example
from tests.worker.stage.steps.crew import TRAINING, Batches, Case, Crew, assign, case, cut_evenly
from worker.cancel import Cancel
from worker.context import ComputeSettings
from worker.machine.torch_device import find_device
from worker.mesh.leader import Leader
from worker.pipe.arena import HEAD_BYTES
from worker.pipe.status import ComputeStatus
from worker.stage import tensor_blobs

if TYPE_CHECKING:
    from atoll.job import TrainingSpec
    from worker.mesh.stage import MeshStage
    from worker.stage.assignment import Assignment
    from worker.stage.reports import StepReport


class Site:
    """A leader in this process, with its followers, and a folder of blobs that it has fetched."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size, self._scratch, self._blobs = size, folder / "scratch", folder / "blobs"
        for each in (self._scratch, self._blobs):
            each.mkdir()
        self.deaths: list[str] = []
        self.status = ComputeStatus(memoryview(bytearray(HEAD_BYTES)))
        self.leader = self._lead(folder)

    def _lead(self, folder: Path) -> Leader:
        settings = settings_of(folder, "+".join(["cpu"] * self.size))
        folders, died = (self._scratch, self._blobs), self.deaths.append
        return Leader(settings, find_device(settings), folders, died, status=self.status)

    def close(self) -> None:
        """End the others."""
        self.leader.close()

    def stage(self, made: Case, assignment: Assignment) -> MeshStage:
        """The assignment's stage on all processes, from the captured tensors."""
        refs = {}
        for name, file in tensor_blobs.write_tensors(made.tensors, self._blobs, Cancel()).items():
            Path(file.path).rename(self._blobs / file.hash)
            refs[name] = file.hash
        tensors = {name: refs[name] for name in assignment.leaf_states}
        said = asked.Assign(
            assignment.job, assignment.version, assignment.training, assignment.program,
            assignment.eval_program, assignment.plan, (), tensors, assignment.states, DataSpec((), 8, 4),
            None, 0, None, (), assignment.rank,
        )  # fmt: skip
        return self.leader.stage(coding.write(said, pb.Assign), assignment, made.tensors)


def settings_of(folder: Path, device: str) -> ComputeSettings:
    """Settings of a process of one thread."""
    return ComputeSettings(folder, device, 1, 1 << 30, 1, 1 << 20, 0, Floors())


@contextmanager
def site(size: int, folder: Path, kind: type[Site] = Site) -> Iterator[Site]:
    """A site of ``size`` processes of one thread."""
    found = kind(size, folder)
    try:
        yield found
    finally:
        found.close()


@cache
def plain(name: str) -> Case:
    """A model without dropout, of those that the oracle knows: its attention can be divided."""
    return of_captured(captured_model(name))


def case_of(example: Example) -> Case:
    """What a pipeline of the model needs, captured."""
    return of_captured(CapturedModel(example, capture(example.module, example.example_inputs, TRAINING)))


def of_captured(found: CapturedModel) -> Case:
    """What a pipeline of a captured model needs."""
    example, captured = found.example, found.captured
    dag, evaluation = captured.train, captured.evaluation
    inputs = {n: StateMeta(meta) for n, meta in dag.inputs.items()}
    constants = {n: StateMeta(meta) for n, meta in {**dag.constants, **evaluation.constants}.items()}
    states = {**dag.parameters, **evaluation.buffers, **dag.buffers, **constants, **inputs}
    tensors = {n: {"value": t} for n, t in captured.state.items()}
    batches = Batches("mlp")
    batches.example = example
    return Case(example.name, dag, evaluation, tensors, states, batches)


def assigned_to(
    made: Case, kind: Inside, *, stages: int = 1, rank: int = 0, training: TrainingSpec = TRAINING
) -> Sequence[Assignment]:
    """Stages of a pipeline, of which a site computes one by this inside plan."""
    schedule = ScheduleName.GPIPE if stages == 1 else ScheduleName.ONE_F_ONE_B
    found = []
    for each in assign(made, cut_evenly(made.dag, stages), training, schedule):
        (replica,) = each.plan.replicas
        specs = [replace(s, inside=kind) if at == rank else s for at, s in enumerate(replica.stages)]
        plan = replace(each.plan, replicas=(replace(replica, stages=tuple(specs)),))
        found.append(replace(each, plan=plan))
    return found


def crews(where: Site, made: Case, assignments: Sequence[Assignment], rank: int) -> tuple[Crew, Crew]:
    """The same pipeline in this process alone, and with one stage at the site."""
    return Crew(made, assignments), Crew(
        made, assignments, stages={rank: lambda assignment: where.stage(made, assignment)}
    )


def step(crew: Crew, number: int) -> tuple[float, float]:
    """A step's loss, and the norm of its gradients."""
    reports = [cast("StepReport", report).stage for report in crew.all("run_step", number, Cancel())]
    crew.all("apply", number, 1.0)
    losses = [sum(report.losses) for report in reports if report.losses]
    return losses[0], sum(sum(report.square_norms) for report in reports) ** 0.5


def train(where: Site, name: str | Case, kind: Inside, steps: int, stages: int = 1, rank: int = 0) -> None:
    """``steps`` steps of both; losses, norms, figures and what is stored agree."""
    made = case(name) if isinstance(name, str) else name
    alone, joint = crews(where, made, assigned_to(made, kind, stages=stages, rank=rank), rank)
    for number in range(steps):
        (loss, norm), (own_loss, own_norm) = step(alone, number), step(joint, number)
        assert own_loss == pytest.approx(loss, rel=1e-5), number
        assert own_norm == pytest.approx(norm, rel=1e-3), number
    figures = [found.all("evaluate", steps - 1, Cancel()) for found in (alone, joint)]
    for one, other in zip(*figures, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert other.loss == pytest.approx(one.loss, rel=1e-5)  # type: ignore[attr-defined]
    held, own = alone.snapshot(), joint.snapshot()
    assert {n: set(t) for n, t in held.items()} == {n: set(t) for n, t in own.items()}
    for parameter, tensors in held.items():
        for key, tensor in tensors.items():
            assert own[parameter][key].shape == tensor.shape
            gap = float((own[parameter][key].double() - tensor.double()).abs().max())
            assert gap < 2 * steps * 3e-3, (
                parameter,
                key,
            )  # Adam steps by the sign where gradients are nothing
