"""Curvature of linear layers over a stage's executor: factors, steps, and the same bits for any cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from atoll.execute import Executor
from atoll.job import Optimizer, TrainingSpec
from atoll.program import stage_programs
from benchmarks.oracle import Case, case_of
from experiments.curvature import Curvature, Kind, Scale, Settings

ROWS, WIDTHS = 6, (5, 4, 3)


class Net(nn.Module):
    """Two layers and a loss; the first is a hidden matrix, as the second is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid = nn.Linear(WIDTHS[0], WIDTHS[1]), nn.Linear(WIDTHS[1], WIDTHS[2])
        self.head = nn.Linear(WIDTHS[2], 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(torch.tanh(self.up(torch.tanh(x))))
        loss: Tensor = self.head(torch.tanh(x)).square().mean()
        return loss


def case() -> Case:
    torch.manual_seed(3)
    module = Net()
    batch = {"x": torch.randn(ROWS, WIDTHS[0])}
    training = TrainingSpec(steps=3, n_micro=1, optimizer=Optimizer(lr=0.1))
    return case_of("net", module, batch, training, lambda step: [batch])


def trained(
    given: Case, settings: Settings, starts: tuple[int, ...] = (0,), steps: int = 3
) -> dict[str, Tensor]:
    """Step the layers alone, stage by stage; returns the parameters."""
    programs = stage_programs(given.dag, starts)
    tensors = {name: kept["value"].clone() for name, kept in given.tensors.items()}
    executors = [Executor(program) for program in programs]
    hidden = frozenset(name for name, state in given.states.items() if state.hidden_matrix)
    curvatures = [Curvature(program, hidden, settings) for program in programs]
    for executor in executors:
        executor.load(tensors)
    for step in range(steps):
        values: dict[int, Tensor] = {}
        for executor, curvature in zip(executors, curvatures, strict=True):
            executor.zero_gradients()
            received = {r.op: values[r.op] for r in executor.program.received}
            curvature.receive(received)
            values |= executor.forward(step, 0, given.batches(step)[0], received, curvature.observe)
        grads: dict[int, Tensor | None] = {}
        for executor in reversed(executors):
            grads |= executor.backward(0, grads)
        for executor, curvature in zip(executors, curvatures, strict=True):
            own = {name: nn.Parameter(tensors[name]) for name in executor.uses}
            for name, parameter in own.items():
                parameter.grad = executor.gradient(name)
            curvature.step(own, 0.1)
    return tensors


def by_hand(given: Case) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Rows, their gradients and the weight's of each hidden layer, by autograd on the plain module."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    module = given.module

    def watch(name: str) -> None:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            output.register_hook(  # type: ignore[no-untyped-call]
                lambda g: found.update({name: (inputs[0].detach(), g)})
            )

        module.get_submodule(name).register_forward_hook(hook)

    for name in ("up", "mid"):
        watch(name)
    module(**given.batches(0)[0]).backward()
    weights = {name: module.get_submodule(name).weight.grad for name in found}
    return {name: (*pair, weights[name]) for name, pair in found.items() if weights[name] is not None}  # type: ignore[misc]


@pytest.mark.parametrize("kind", list(Kind))
def test_a_first_step_is_the_gradient_times_the_damped_inverse(kind: Kind) -> None:
    given = case()
    settings = Settings(kind, Scale.RMS, damping=0.1)
    before = {name: kept["value"].clone() for name, kept in given.tensors.items()}
    after = trained(given, settings, steps=1)
    for name, (a_NM, g_NK, d_KM) in by_hand(given).items():
        if kind is Kind.KFAC:
            a_MM, g_KK = a_NM.T @ a_NM / ROWS, ROWS * g_NK.T @ g_NK
            ratio = ((a_MM.trace() / len(a_MM)) / (g_KK.trace() / len(g_KK))).sqrt()
            eye = torch.eye
            expected = (
                torch.linalg.inv(g_KK + 0.1**0.5 / ratio * eye(len(g_KK)))
                @ d_KM
                @ torch.linalg.inv(a_MM + 0.1**0.5 * ratio * eye(len(a_MM)))
            )
        else:
            a_M, g_K = a_NM.mean(0), g_NK.sum(0)
            whole = torch.kron(torch.outer(g_K, g_K), torch.outer(a_M, a_M))
            whole += 0.1 * torch.eye(len(whole))
            expected = torch.linalg.solve(whole, d_KM.flatten()).view_as(d_KM)
        moved = (before[f"{name}.weight"] - after[f"{name}.weight"]) / 0.1
        assert moved.square().mean().sqrt() == pytest.approx(0.2, rel=1e-4)
        torch.testing.assert_close(moved / moved.norm(), expected / expected.norm(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", list(Kind))
def test_a_cut_changes_no_bit(kind: Kind) -> None:
    given = case()
    whole = trained(given, Settings(kind, every=2))
    for start in given.dag.cuttable()[1:]:
        parted = trained(given, Settings(kind, every=2), (0, start))
        assert all(torch.equal(parted[name], whole[name]) for name in whole), start


def test_heads_and_biases_are_left_to_others() -> None:
    given = case()
    (program,) = stage_programs(given.dag, (0,))
    hidden = frozenset(name for name, state in given.states.items() if state.hidden_matrix)
    curvature = Curvature(program, hidden, Settings(Kind.EVA))
    assert curvature.weights == {"up.weight", "mid.weight"}
    assert curvature.state_bytes == 0
