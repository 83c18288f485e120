"""A job as Atoll trains it, beside a plain PyTorch loop over the same micro-batches.

``compare`` submits the job as the command does (capture, self-check, weights as blobs), trains it in this
process as one stage and cut in two at random, and compares losses, parameters, buffers and the loss in
evaluation mode with ``plain_loop``. ``refusal`` returns the words with which a submission is refused.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from atoll.arrays import tensor_of
from atoll.data import Rows, sample_indices, take
from atoll.errors import AtollError
from atoll.execute import Executor
from atoll.job import Job, Optimizer, OptimizerName, TrainingSpec
from atoll.opdag import OpDag
from atoll.program import stage_programs
from coordinator.client.prepare import Prepared, prepare
from tests.inprocess.pipeline import LocalPipeline

MICRO = 4
TOLERANCE = 1e-6  # of the larger of 1 and the value
SGD = Optimizer(OptimizerName.SGD, lr=0.05)

MakeJob = Callable[[], Job]
Batches = list[dict[str, Tensor]]


@dataclass(frozen=True)
class Trained:
    """What a training left: a loss for each step, all tensors by name, the loss in evaluation mode."""

    losses: list[float]
    tensors: Mapping[str, Tensor]
    evaluated: float


@dataclass(frozen=True)
class Case:
    """A kind of what people bring: its job, and a pattern of the refusal where it is refused."""

    name: str
    make: MakeJob
    refused: str = ""


def case(
    make: Callable[[], nn.Module],
    inputs: Callable[[], Mapping[str, Tensor]],
    *,
    refused: str = "",
    name: str = "",
    **training: Any,
) -> Any:
    """A pytest parameter of a module and all rows of its inputs, micro-batches of four."""
    made = Case(name or make.__name__, lambda: job_of(make(), inputs(), **training), refused)
    return pytest.param(made, id=made.name)


def job_of(module: nn.Module, rows: Mapping[str, Tensor], **training: Any) -> Job:
    """A job over ``rows`` in their order, four a micro-batch, two micro-batches a step."""
    spec = TrainingSpec(**{"steps": 3, "n_micro": 2, "optimizer": SGD, **training})
    examples = {name: torch.zeros_like(value[:MICRO]) for name, value in rows.items()}
    return Job(module=module, example_inputs=examples, data=Rows(rows, seed=None), training=spec)


def run(case: Case) -> None:
    """Check a case: it is refused in its words, or trains as the plain loop does."""
    if case.refused:
        words = refusal(case.make)
        assert re.search(case.refused, words, re.DOTALL), words
    else:
        compare(case.make)


def refusal(make: MakeJob) -> str:
    """The words with which the job is refused; fails where it is not."""
    torch.manual_seed(7)
    try:
        prepare(make())
    except AtollError as error:
        return str(error)
    pytest.fail("the job was taken")


def compare(make: MakeJob, cuts: int = 1) -> Job:
    """Fail unless the job, as one stage and as two at each of ``cuts`` places, trains what the plain loop
    trains; return it."""
    torch.manual_seed(7)
    expected = plain_loop(make())
    torch.manual_seed(7)
    job = make()
    prepared = prepare(job)
    positions = prepared.graphs.dag.cuttable()
    drawn = random.Random(0).sample(positions, min(cuts, len(positions)))
    ways = [(0,), *((0, cut) for cut in drawn)]
    runs = [_pipeline(job, prepared, starts) for starts in ways]
    for starts, found in zip(ways, runs, strict=True):
        assert not differences(found, expected), (starts, differences(found, expected))
    for found in runs[1:]:
        assert found.losses == runs[0].losses
        assert all(torch.equal(found.tensors[n], t) for n, t in runs[0].tensors.items())
    return job


def differences(found: Trained, expected: Trained) -> list[str]:
    """What is not equal, by name and size."""
    numbers = {
        **{
            f"loss of step {at}": pair
            for at, pair in enumerate(zip(found.losses, expected.losses, strict=True))
        },
        "loss in evaluation": (found.evaluated, expected.evaluated),
    }
    pairs = {
        **{name: (torch.tensor(one), torch.tensor(other)) for name, (one, other) in numbers.items()},
        **{name: (found.tensors[name], tensor) for name, tensor in expected.tensors.items()},
    }
    gaps = {name: _gap(*pair) for name, pair in pairs.items()}
    return [f"{name}: {gap:.2e}" for name, gap in gaps.items() if not gap <= TOLERANCE]


def _gap(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    wide = torch.complex128 if one.is_complex() else torch.float64
    if torch.equal(one, other) or not one.numel():
        return 0.0
    if torch.equal(one.isnan(), other.isnan()):
        one, other = one.nan_to_num(), other.nan_to_num()
    scale = max(1.0, float(other.abs().max()))
    return float((one.to(wide) - other.to(wide)).abs().max()) / scale


def batches_of(job: Job, step: int) -> Batches:
    """The micro-batches of a step as the workers are given them."""
    inputs = dict(job.example_inputs)
    data, _ = job.data.materialise(next(iter(inputs.values())).shape[0])
    found = []
    for micro in range(job.training.n_micro):
        samples = sample_indices(data.spec, job.training.n_micro, step, micro)
        arrays = {f.input: take(data.arrays[f.blob], f, samples) for f in data.spec.fields}
        found.append({n: tensor_of(a).to(inputs[n].dtype) for n, a in arrays.items()})
    return found


def plain_loop(job: Job) -> Trained:
    """Train the job's module as its owner would by hand, then evaluate the first step's micro-batches."""
    net, training = job.module, job.training
    if not any(part.training for part in net.modules()):
        net.train()  # as ``from_pretrained`` gives it: every loop begins with this
    optimizer = _optimizer(net, training.optimizer)
    losses = []
    for step in range(training.steps):
        for group in optimizer.param_groups:
            group["lr"] = training.learning_rate(step) * group["scale"]
        total = 0.0
        for batch in batches_of(job, step):
            loss = _loss(net(**batch)) / training.n_micro
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        if training.optimizer.clip_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), training.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    tensors = {n: t.detach().clone() for n, t in _named(net).items()}
    net.eval()
    with torch.no_grad():
        values = [float(_loss(net(**batch))) for batch in batches_of(job, 0)]
    return Trained(losses, tensors, sum(values) / len(values))


def _named(net: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(net.named_parameters(remove_duplicate=False)),
        **dict(net.named_buffers(remove_duplicate=False)),
    }


def _loss(output: Any) -> Tensor:
    found = output["loss"] if isinstance(output, Mapping) else getattr(output, "loss", output)
    assert isinstance(found, Tensor)
    return found


def _optimizer(net: nn.Module, spec: Optimizer) -> torch.optim.Optimizer:
    groups = []
    for name, parameter in net.named_parameters():
        group = spec.group_of(name)
        if group is not None and group.frozen:
            parameter.requires_grad_(False)
        decay = spec.weight_decay if group is None or group.weight_decay is None else group.weight_decay
        scale = 1.0 if group is None else group.lr_scale
        groups.append({"params": [parameter], "weight_decay": decay, "scale": scale})
    if spec.name is OptimizerName.SGD:
        return torch.optim.SGD(groups, spec.lr, momentum=spec.momentum, nesterov=spec.nesterov)
    return torch.optim.AdamW(groups, spec.lr, betas=spec.betas, eps=spec.eps)


def goes_on(make: MakeJob, steps: int) -> bool:
    """Whether a job that is taken up elsewhere after ``steps`` ends in the bits of an undisturbed one."""
    job = make()
    prepared = prepare(job)
    by_hash = {blob.hash: blob for blob in prepared.blobs}
    tensors = {
        name: safetensors.torch.load(b"".join(by_hash[key].read(0)))
        for name, key in prepared.spec.tensors.items()
    }
    dag = prepared.graphs.dag
    programs, states = stage_programs(dag, (0,)), {**dag.parameters, **dag.buffers}
    whole = LocalPipeline(programs, job.training, tensors, states=states)
    for at in range(steps):
        whole.step(at, batches_of(job, at))
    second = LocalPipeline(programs, job.training, {**tensors, **whole.snapshot()}, states=states)
    for at in range(steps, job.training.steps):
        for pipeline in (whole, second):
            pipeline.step(at, batches_of(job, at))
    one, other = whole.snapshot(), second.snapshot()
    return all(
        torch.equal(kept[key], other[name][key]) and kept[key].dtype == other[name][key].dtype
        for name, kept in one.items()
        for key in kept
    )


def _pipeline(job: Job, prepared: Prepared, starts: tuple[int, ...]) -> Trained:
    by_hash = {blob.hash: blob for blob in prepared.blobs}
    tensors = {
        name: safetensors.torch.load(b"".join(by_hash[key].read(0)))
        for name, key in prepared.spec.tensors.items()
    }
    dag, evaluation = prepared.graphs.dag, prepared.graphs.eval_dag
    states = {**dag.parameters, **dag.buffers}
    pipeline = LocalPipeline(stage_programs(dag, starts), job.training, tensors, states=states)
    losses = [pipeline.step(at, batches_of(job, at)).loss for at in range(job.training.steps)]
    state = {name: kept["value"] for name, kept in {**tensors, **pipeline.snapshot()}.items()}
    state |= {name: state[first] for name, first in dag.aliases.items()}
    copied = {name: tensor.clone() for name, tensor in state.items()}  # of which evaluation writes buffers
    return Trained(losses, state, _evaluated(job, evaluation, copied))


def _evaluated(job: Job, dag: OpDag, state: Mapping[str, Tensor]) -> float:
    """The loss of the first step's micro-batches in evaluation mode, over its weight where it is a sum."""
    (program,) = stage_programs(dag, (0,))
    executor = Executor(program, precision=job.training.precision, differentiate=False)
    executor.load(state)
    loss, weight = 0.0, 0.0
    for micro, batch in enumerate(batches_of(job, 0)):
        found = executor.forward(0, micro, batch, {})
        loss += float(found[dag.loss])
        weight += 1.0 if dag.weight is None else float(found[dag.weight])
    return loss / weight
