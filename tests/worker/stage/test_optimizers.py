"""The optimizer by torch's functions is torch's optimizer, bit for bit."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from atoll.job import Optimizer, OptimizerName, ParamGroup
from worker.machine.own_share import held_bytes
from worker.stage.optimizers import make_optimizer

RATE = 0.05


@pytest.mark.parametrize(
    "spec",
    [
        Optimizer(weight_decay=0.1, groups=(ParamGroup(("b",), lr_scale=0.5, weight_decay=0.0),)),
        Optimizer(OptimizerName.SGD, momentum=0.9, nesterov=True, weight_decay=0.01),
        Optimizer(OptimizerName.SGD),
    ],
    ids=["adamw", "momentum", "sgd"],
)
def test_steps_have_the_bits_of_torchs_optimizer(spec: Optimizer) -> None:
    random = torch.Generator().manual_seed(5)
    values = {name: torch.randn(17, 3, generator=random) for name in "abc"}
    ours = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
    theirs = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
    groups = [
        {"params": [theirs["a"], theirs["c"]], "lr": RATE, "weight_decay": spec.weight_decay},
        {
            "params": [theirs["b"]],
            "lr": RATE * (0.5 if spec.groups else 1.0),
            "weight_decay": 0.0 if spec.groups else spec.weight_decay,
        },
    ]
    if spec.name is OptimizerName.ADAMW:
        reference: torch.optim.Optimizer = torch.optim.AdamW(groups, fused=True)
    else:
        reference = torch.optim.SGD(groups, momentum=spec.momentum, nesterov=spec.nesterov, fused=True)
    optimizer = make_optimizer(ours, spec)
    assert optimizer is not None
    for _ in range(4):
        for name in "abc":
            gradient = torch.randn(17, 3, generator=random)
            ours[name].grad, theirs[name].grad = gradient.clone(), gradient
        optimizer.step(RATE)
        reference.step()
        assert all(torch.equal(ours[name], theirs[name]) for name in "abc")


def test_a_momentum_buffer_may_begin_later_than_anothers() -> None:
    spec = Optimizer(OptimizerName.SGD, momentum=0.9)
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = make_optimizer({"first": first, "second": second}, spec)
    assert optimizer is not None
    first.grad = torch.ones(2)
    optimizer.step(RATE)
    first.grad, second.grad = None, torch.ones(2)
    optimizer.step(RATE)
    assert torch.equal(first, second)


def test_an_optimizer_imports_no_compiler() -> None:
    """It would be the largest thing that a worker of a small model holds."""
    code = (
        "import sys, torch\n"
        "from atoll.job import Optimizer\n"
        "from worker.stage.optimizers import make_optimizer\n"
        "p = torch.nn.Parameter(torch.ones(2)); p.grad = torch.ones(2)\n"
        "make_optimizer({'p': p}, Optimizer()).step(0.1)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("spec", "states"),
    [
        (Optimizer(), 2),
        (Optimizer(name=OptimizerName.SGD, momentum=0.9), 1),
        (Optimizer(name=OptimizerName.SGD), 0),
    ],
    ids=["adamw", "momentum", "sgd"],
)
def test_memory_of_states_to_come_is_held_until_the_first_step(spec: Optimizer, states: int) -> None:
    """So a stage that does not fit is killed before a step of it is committed."""
    size = 10 << 20  # of 40 MiB each: blocks that the heap never keeps
    parameter = torch.nn.Parameter(torch.zeros(size))
    optimizer = make_optimizer({"p": parameter}, spec)
    assert optimizer is not None
    before = held_bytes()
    optimizer.reserve()
    reserved = held_bytes() - before
    assert abs(reserved - states * 4 * size) < 4 << 20
    parameter.grad = torch.ones(size)
    optimizer.step(0.1)
    assert held_bytes() - before - 4 * size < states * 4 * size + (4 << 20), "held once"
    optimizer.reserve()
    assert held_bytes() - before - 4 * size < states * 4 * size + (4 << 20), "there is a state"
