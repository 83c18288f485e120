"""A forward that does not ask for its mode is exported once for both; every other one is exported in each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coordinator.capture import torch_export
from coordinator.capture.capture import Captured, capture, op_uses
from coordinator.capture.self_check import self_check
from protos.convert import dag_bytes
from tests.models import MODELS, Example

X = {"x": torch.linspace(-2, 2, 24).reshape(4, 6)}
MORE = {"x": torch.linspace(3, -1, 24).reshape(4, 6)}


class Net(nn.Module):
    """A layer of its own behind a linear one."""

    def __init__(self, behind: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.behind = behind

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.behind(self.first(x)).square().mean()
        return loss


class Functional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


class Doubled(nn.Module):
    """Of another module's mode."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        return x * 2.0 if getattr(self.other, "training") else x  # noqa: B009 - as some write it


class Merging(nn.Module):
    """Another weight in evaluation mode, as layers of low rank that merge it there."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def train(self, mode: bool = True) -> Merging:
        self.factor = 1.0 if mode else 3.0
        super().train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Shadowing(nn.Module):
    training = True

    def forward(self, x: Tensor) -> Tensor:
        return x * 2.0 if self.training else x


class Peeking(nn.Module):
    def __getattribute__(self, name: str) -> object:
        if name == "scale":
            return 2.0 if object.__getattribute__(self, "__dict__")["training"] else 1.0
        return super().__getattribute__(name)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale  # type: ignore[operator]


class Following(nn.Module):
    """What it multiplies by changes as its mode is set, and forward does not ask."""

    factor: float

    def __setattr__(self, name: str, value: object) -> None:
        if name == "training":
            super().__setattr__("factor", 1.0 if value else 3.0)
        super().__setattr__(name, value)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Mode:
    """A mode kept where nn.Module does not look."""

    @property
    def training(self) -> bool:
        return bool(self.__dict__["own_mode"])

    @training.setter
    def training(self, mode: bool) -> None:
        self.__dict__["own_mode"] = mode


class Behind(nn.Module, Mode):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return x * 2.0 if self.training else x


def hooked() -> nn.Module:
    layer = nn.Linear(6, 6)
    layer.register_forward_hook(lambda part, _, out: out * 2.0 if part.training else out)
    return layer


ASKING: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Dropout(0.5),
    "functional dropout": Functional,
    "batch norm": lambda: nn.BatchNorm1d(6),
    "cumulative batch norm": lambda: nn.BatchNorm1d(6, momentum=None),
    "another's mode": lambda: Doubled(nn.Identity()),
    "own train": Merging,
    "shadowed": Shadowing,
    "own lookup": Peeking,
    "own setting": Following,
    "of a base behind the module's": Behind,
    "hook": hooked,
}
PLAIN: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 6),
    "norm": lambda: nn.Sequential(nn.LayerNorm(6), nn.GELU()),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
}


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[nn.Module]]:
    """Modules that were exported within."""
    seen: list[nn.Module] = []
    honest = torch_export.exported

    def exported(module: nn.Module, inputs: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
        seen.append(module)
        return honest(module, inputs)

    with monkeypatch.context() as patch:
        patch.setattr(torch_export, "exported", exported)
        yield seen


@contextmanager
def in_each_mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Captures export each mode by itself."""

    @contextmanager
    def unknown(module: nn.Module) -> Iterator[Callable[[], bool]]:
        yield lambda: True

    with monkeypatch.context() as patch:
        patch.setattr(torch_export, "mode_reads", unknown)
        yield


def as_bytes(found: Captured) -> tuple[bytes, bytes, list[str]]:
    return dag_bytes(found.train), dag_bytes(found.evaluation), list(found.state)


@pytest.mark.parametrize("name", ASKING)
def test_a_forward_that_asks_for_its_mode_is_exported_in_both(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Net(ASKING[name]())
    with counted(monkeypatch) as exports:
        found = capture(module, X, tail=False)
    assert len(exports) == 2
    self_check(module, found, MORE)
    assert not hasattr(nn.Module, "training"), "the class is as it was"


@pytest.mark.parametrize("name", PLAIN)
def test_one_export_gives_the_graphs_of_two(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Net(PLAIN[name]())
    with counted(monkeypatch) as exports:
        found = capture(module, X)
    assert len(exports) == 2, "one for both modes, one with a row more"
    with counted(monkeypatch) as exports, in_each_mode(monkeypatch):
        assert as_bytes(capture(module, X)) == as_bytes(found)
    assert len(exports) == 3
    self_check(module, found, MORE)


@pytest.mark.parametrize("name", MODELS)
def test_graphs_of_models_are_those_of_two_exports(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    example: Example = MODELS[name]()
    found = capture(example.module, example.example_inputs, tail=False)
    with in_each_mode(monkeypatch):
        again = capture(example.module, example.example_inputs, tail=False)
    assert as_bytes(again) == as_bytes(found)


def test_a_module_without_a_mode_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Net(nn.Linear(6, 6))
    module.behind.training = False
    with counted(monkeypatch) as exports:
        op_uses(module, X)
    assert len(exports) == 1
    assert (module.training, module.first.training, module.behind.training) == (True, True, False)
    del module.training
    with pytest.raises(AttributeError):
        _ = module.training


def test_metrics_are_of_the_evaluation_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Measured(Net):
        def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            loss = super().forward(x)
            return {"loss": loss, "twice": loss * 2.0}

    with counted(monkeypatch) as exports:
        found = capture(Measured(nn.Identity()), X, metrics=("twice",), tail=False)
    assert len(exports) == 2
    assert (set(found.train.metrics), set(found.evaluation.metrics)) == (set(), {"twice"})
