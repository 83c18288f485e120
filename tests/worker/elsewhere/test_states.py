"""Optimizer states in files: the same bits, and out of memory between steps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from atoll.errors import StorageError
from atoll.job import Optimizer, OptimizerName, Place
from atoll.opdag import StateMeta, TensorMeta
from worker.elsewhere.states import StatesElsewhere, states_elsewhere
from worker.stage.optimizers import StageOptimizer

CPU = torch.device("cpu")
SHAPES = {"embedding": (512, 64), "hidden": (96, 64), "bias": (64,)}
STATES = {
    name: StateMeta(TensorMeta(shape, "float32"), True, hidden_matrix=name == "hidden")
    for name, shape in SHAPES.items()
}
OPTIMIZERS = [
    Optimizer(lr=0.01, weight_decay=0.1),
    Optimizer(OptimizerName.SGD, lr=0.1, momentum=0.9),
    Optimizer(OptimizerName.SGD, lr=0.1),
    Optimizer(OptimizerName.MUON, lr=0.01),
    Optimizer(OptimizerName.ADAFACTOR, lr=0.01),
    Optimizer(OptimizerName.LION, lr=0.01),
]


def trained(spec: Optimizer, elsewhere: StatesElsewhere | None, steps: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    parameters = {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()
    }
    optimizer = StageOptimizer(parameters, spec, STATES, elsewhere)
    optimizer.reserve()
    for step in range(steps):
        for name, parameter in parameters.items():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            if step == 1 and name == "bias":
                parameter.grad = None  # a parameter without a gradient takes no step
        optimizer.step(spec.lr)
    found = {name: parameter.detach() for name, parameter in parameters.items()}
    return found | {f"{name}.{key}": t for name, state in optimizer.state.items() for key, t in state.items()}


@pytest.mark.parametrize("place", [Place.HOST, Place.DISK])
@pytest.mark.parametrize("spec", OPTIMIZERS, ids=lambda spec: f"{spec.name}-{spec.momentum}")
def test_states_in_files_train_the_same_bits(spec: Optimizer, place: Place, tmp_path: Path) -> None:
    elsewhere = states_elsewhere(place, tmp_path, CPU)
    kept, away = trained(spec, None), trained(spec, elsewhere)
    assert kept.keys() == away.keys()
    assert all(torch.equal(kept[name], away[name]) for name in kept)
    assert list(tmp_path.iterdir()) == []


def resident(words: str) -> int:
    """Bytes of this process's memory of a kind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(words))


def test_a_state_is_out_of_memory_until_its_next_step(tmp_path: Path) -> None:
    elsewhere = StatesElsewhere(tmp_path, CPU, pinned=False)
    before, size = resident("VmRSS:"), 64 << 20
    state = {"exp_avg": torch.randn(size // 4), "exp_avg_sq": torch.randn(size // 4)}
    assert resident("VmRSS:") >= before + 2 * size
    sums = {key: float(tensor.double().sum()) for key, tensor in state.items()}
    state = elsewhere.put("w", state)
    assert resident("VmRSS:") < before + size / 2
    assert resident("RssAnon:") < before + size / 2
    assert {key: float(tensor.double().sum()) for key, tensor in state.items()} == sums
    elsewhere.rest(state)
    assert resident("VmRSS:") < before + size / 2


def test_a_disk_without_room_is_said_before_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    parameters = {"w": torch.nn.Parameter(torch.zeros(4096))}
    optimizer = StageOptimizer(parameters, Optimizer(), None, states_elsewhere(Place.DISK, tmp_path, CPU))
    with pytest.raises(StorageError, match="No space left"):
        optimizer.reserve()
