"""Every trap of captured graphs, cut at random: losses and parameters stay those of one stage."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.job import TrainingSpec
from atoll.program import stage_programs
from coordinator.capture.capture import Captured, capture
from coordinator.capture.self_check import self_check
from tests.coordinator.capture.test_capture import Model, X
from tests.inprocess.pipeline import LocalPipeline

STEPS = 3
CUTS = 8


def write_to_a_view(m: Model, x: Tensor) -> Tensor:
    y = m.first(x)
    y[:, 0] = x[:, 1]
    y.view(2, 12).mul_(2)
    return m.last(torch.relu(y)) + y


def read_and_write_a_buffer(m: Model, x: Tensor) -> Tensor:
    y = m.first(x) + m.seen
    m.seen.mul_(0.9).add_(x.mean(0))
    return m.last(y) * m.seen  # autograd keeps m.seen while the next micro-batch writes it


def write_to_an_input(m: Model, x: Tensor) -> Tensor:
    y = torch.tanh(x)
    x.masked_fill_(x > 1, 0.0)
    return m.last(y) + m.first(x)


def write_under_no_grad(m: Model, x: Tensor) -> Tensor:
    y = m.first(x)
    with torch.no_grad():
        y.add_(1)
    return y * m.last(x) + F.dropout(y, 0.2, m.training)


def constants_and_tuples(m: Model, x: Tensor) -> Tensor:
    canvas = torch.zeros(4, 6)
    canvas[1:] = x[1:]
    mask = torch.full((4, 6), -1.0)
    mask[:, :2] = 0
    a, b, c = m.first(x + mask).split(2, 1)
    values, _ = torch.cat([torch.tanh(a), b], 1).sort(1)
    return m.last(torch.cat([values, c], 1)) + canvas * m.table * torch.tensor(2.5) + mask


def autocast_and_no_grad(m: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = m.last(x)
        with torch.autocast("cpu", torch.bfloat16):
            fine = m.last(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = m.first(x)
    return y * scale + fine + torch.relu(y).float()


def residuals_in_place(m: Model, x: Tensor) -> Tensor:
    y = m.first(x)
    y += m.last(torch.tanh(y.clone()))
    y += 1
    z = torch.relu_(y)
    return z + m.first(z) * m.last(z)


def random_everywhere(m: Model, x: Tensor) -> Tensor:
    torch.rand(3)
    noise = torch.rand_like(x) if m.training else 1
    return F.dropout(m.first(x), 0.5, m.training) * noise + m.last(x)


def written_after_it_was_read(m: Model, x: Tensor) -> Tensor:
    y = m.first(x)
    z = torch.zeros_like(y)
    z[:, 1:] = y[:, 1:]
    early = z + 2
    z[0] = 0.0
    return m.last(y) + early + z


class NormTwiceAndGru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(6)
        self.middle = nn.Linear(6, 6)
        self.gru = nn.GRU(6, 5, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.middle(self.norm(x))))
        out: Tensor = self.gru(hidden[:, None])[0]
        return out.pow(3).mean()


def train(found: Captured, starts: Sequence[int]) -> tuple[list[float], dict[str, dict[str, Tensor]]]:
    tensors = {name: {"value": tensor.clone()} for name, tensor in found.state.items()}
    states = {**found.train.parameters, **found.train.buffers}
    spec = TrainingSpec(steps=STEPS, n_micro=3, seed=7)
    pipeline = LocalPipeline(stage_programs(found.train, starts), spec, tensors, states=states)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        batches = [{"x": torch.randn(4, 6, generator=generator)} for _ in range(3)]
        losses.append(pipeline.step(step, batches).loss)
    return losses, pipeline.snapshot()


TRAPS: tuple[Callable[..., Tensor] | type[nn.Module], ...] = (
    write_to_a_view,
    read_and_write_a_buffer,
    write_to_an_input,
    write_under_no_grad,
    constants_and_tuples,
    autocast_and_no_grad,
    residuals_in_place,
    random_everywhere,
    written_after_it_was_read,
    NormTwiceAndGru,
)


@pytest.mark.parametrize("build", TRAPS)
def test_any_cut_of_a_trap_trains_as_one_stage(build: Callable[..., Tensor] | type[nn.Module]) -> None:
    module = build() if isinstance(build, type) else Model(build)
    found = capture(module, X)
    self_check(module, found, X)
    losses, tensors = train(found, [0])
    cuttable = found.train.cuttable()
    cuts = [(a,) for a in cuttable] + list(itertools.combinations(cuttable, 2))
    for cut in random.Random(4711).sample(cuts, min(CUTS, len(cuts))):
        cut_losses, cut_tensors = train(found, [0, *cut])
        assert cut_losses == losses, cut
        for name, keyed in cut_tensors.items():
            for key, value in keyed.items():
                assert torch.equal(value, tensors[name][key]), (cut, name, key)
