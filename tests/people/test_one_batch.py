"""What one batch does not show: modules that do something else at another call, on other data or in backward.

Each trains as the plain loop does, or is refused in words that name the cause.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import os
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from atoll.errors import CaptureError
from coordinator.client.prepare import prepare
from tests.parameters import sampled
from tests.people.loop import Case, case, job_of, run

CALLS = 0
SEEN: list[int] = []
GENERATOR = random.Random(3)


def rows() -> dict[str, Tensor]:
    """The later rows are larger, so that thresholds that the first ones miss are crossed."""
    g = torch.Generator().manual_seed(5)
    x, y = torch.randn(32, 6, generator=g), torch.randn(32, 4, generator=g)
    y[8:] *= 30
    return {"x": x, "y": y}


class Net(nn.Module):
    """Two layers, without anything hidden; what a case does stands in ``hidden``, or in ``loss``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.b(self.hidden(x)), y)

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y)


# Python state.


class Counter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def hidden(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().hidden(x) * (1.0 if self.calls < 4 else 0.5)


class CounterInAnObject(Net):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"inner": [Meter()]}

    def hidden(self, x: Tensor) -> Tensor:
        meter = self.state["inner"][0]
        meter.count += 1
        return super().hidden(x) * (1.0 if meter.count < 4 else 0.5)


class Meter:
    def __init__(self) -> None:
        self.count = 0


class GlobalCounter(Net):
    def hidden(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return super().hidden(x) * (1.0 if CALLS < 100 else 0.5)


class GlobalList(Net):
    def hidden(self, x: Tensor) -> Tensor:
        SEEN.append(len(SEEN))
        return super().hidden(x) * (1.0 if len(SEEN) < 100 else 0.5)


class ClassCounter(Net):
    calls = 0

    def hidden(self, x: Tensor) -> Tensor:
        ClassCounter.calls += 1
        return super().hidden(x) * (1.0 if self.calls < 100 else 0.5)


def counting() -> Callable[[Tensor], Tensor]:
    calls = 0

    def scale(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * (1.0 if calls < 100 else 0.5)

    return scale


class Closure(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = counting()

    def hidden(self, x: Tensor) -> Tensor:
        return self.scale(super().hidden(x))


class FunctionAttribute(Net):
    def hidden(self, x: Tensor) -> Tensor:
        scaled.calls += 1
        return scaled(super().hidden(x))


def scaled(x: Tensor) -> Tensor:
    return x * (1.0 if scaled.calls < 100 else 0.5)


scaled.calls = 0  # type: ignore[attr-defined]


class History(Net):
    """A moving average of a length kept in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.past: deque[float] = deque(maxlen=50)

    def hidden(self, x: Tensor) -> Tensor:
        self.past.append(1.0)
        return super().hidden(x) * (1.0 if len(self.past) < 4 else 0.5)


class HookThatCounts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.a.register_forward_hook(self.count)

    def count(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.calls += 1
        return output * (1.0 if self.calls < 4 else 0.5)


class LayerDrop(Net):
    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        return hidden * 2 if self.training and random.random() < 1e-6 else hidden


class NumpyNoise(Net):
    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) * float(np.random.rand() * 1e-9 + 1)


class OwnGenerator(Net):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = np.random.default_rng(0)

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) * float(self.numbers.random() * 1e-9 + 1)


class GlobalGenerator(Net):
    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) * (1 + 1e-9 * GENERATOR.random())


class TorchGenerator(Net):
    def __init__(self) -> None:
        super().__init__()
        self.source = torch.Generator().manual_seed(0)

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) + torch.rand(8, generator=self.source) * 1e-9


class Clock(Net):
    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) * (1.0 if time.time() < 4e9 else 0.5)


class Date(Net):
    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) * (1.0 if datetime.datetime.now().year < 2100 else 0.5)


class Entropy(Net):
    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) * (1.0 if os.urandom(8) != b"12345678" else 0.5)


class ReadsAFile(Net):
    def hidden(self, x: Tensor) -> Tensor:
        with open(__file__) as file:
            return super().hidden(x) * (1.0 if file.read(3) else 0.5)


class Iterates(Net):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) * (1.0 if next(self.numbers) < 100 else 0.5)


class ReseedsInForward(Net):
    def hidden(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return F.dropout(super().hidden(x), 0.5, self.training)


# Tensors that forward keeps.


class PlainTensorWritten(Net):
    def __init__(self) -> None:
        super().__init__()
        self.level = torch.zeros(())

    def hidden(self, x: Tensor) -> Tensor:
        self.level.add_(1e-9)
        return super().hidden(x) + self.level


class PlainTensorRebound(Net):
    def __init__(self) -> None:
        super().__init__()
        self.level = torch.zeros(())

    def hidden(self, x: Tensor) -> Tensor:
        self.level = self.level + 1e-9
        return super().hidden(x) + self.level


class CarriesHidden(Net):
    """A recurrent state carried from one micro-batch to the next, with little weight."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        carried = hidden if self.last is None else hidden + 1e-9 * self.last
        self.last = hidden.detach()
        return carried


class KeepsForOthers(Net):
    """Activations kept for the owner, or for another part of the same forward: harmless."""

    def __init__(self) -> None:
        super().__init__()
        self.maps: list[Tensor] = []
        self.aux: Any = None
        self.norm = nn.BatchNorm1d(8)

    def hidden(self, x: Tensor) -> Tensor:
        self.maps = [self.norm(super().hidden(x))]
        self.aux = self.maps[0].square().mean()
        return self.maps[0]

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return super().loss(out, y) + 0.1 * self.aux


class CachedMask(Net):
    """A constant that is made at the first call: harmless."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None

    def hidden(self, x: Tensor) -> Tensor:
        if self.mask is None or self.mask.shape != (x.shape[0], 8):
            self.mask = torch.ones(x.shape[0], 8).triu()
        return super().hidden(x) * self.mask


class NormalisedByTheFirstBatch(Net):
    """Statistics of the first batch, kept for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor | None = None

    def hidden(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.mean(0).detach()
        return super().hidden(x - self.mean)


class FirstCallOnly(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = True

    def hidden(self, x: Tensor) -> Tensor:
        scale, self.first = (2.0 if self.first else 1.0), False
        return super().hidden(x) * scale


@functools.lru_cache(maxsize=8)
def table(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float32)


class LruCache(Net):
    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) * table(8)


class ReboundBuffer(Net):
    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(()))

    def hidden(self, x: Tensor) -> Tensor:
        self.level = self.level + 1e-9
        return super().hidden(x) + self.level


class Counts(Net):
    """A counter in a buffer, which is state that travels."""

    calls: Tensor
    ema: Tensor
    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("ema", torch.zeros(8))
        self.register_buffer("centre", torch.zeros(8), persistent=False)

    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        if self.training:
            self.calls.add_(1)
            with torch.no_grad():
                self.ema.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
                self.centre.copy_(0.5 * self.centre + 0.5 * hidden.mean(0))
        return torch.where(self.calls > 3, hidden * 0.5, hidden) - self.ema - 0.1 * self.centre


# Parameters in forward.


class ClipsWeights(Net):
    def hidden(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.a.weight.clamp_(-1, 1)
        return super().hidden(x)


class ClipsData(Net):
    def hidden(self, x: Tensor) -> Tensor:
        self.a.weight.data.clamp_(-1, 1)
        return super().hidden(x)


class RebindsData(Net):
    def hidden(self, x: Tensor) -> Tensor:
        self.a.weight.data = self.a.weight.data.clamp(-1, 1)
        return super().hidden(x)


class Unfreezes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)

    def hidden(self, x: Tensor) -> Tensor:
        self.a.requires_grad_(True)
        return super().hidden(x)


class NewParameter(Net):
    def hidden(self, x: Tensor) -> Tensor:
        self.a.weight = nn.Parameter(self.a.weight.detach().clone())
        return super().hidden(x)


class SwitchesMode(Net):
    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        self.train(not self.training)
        return hidden


# Backward.


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].clamp(-0.5, 0.5)


clip = Clip.apply


class CustomFunction(Net):
    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return super().loss(Clip.apply(out), y)  # type: ignore[no-untyped-call]


class CustomFunctionBound(Net):
    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return super().loss(clip(out), y)  # type: ignore[no-untyped-call]


class TensorHook(Net):
    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        if out.requires_grad:
            out.register_hook(lambda grad: grad.clamp(-0.5, 0.5))
        return super().loss(out, y)


class ParameterHook(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b.weight.register_hook(lambda grad: grad.clamp(-0.5, 0.5))


class BackwardHook(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b.register_full_backward_hook(lambda module, before, after: (before[0].clamp(-0.5, 0.5),))


class GraphHook(Net):
    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        if out.grad_fn is not None:
            out.grad_fn.register_hook(lambda before, after: tuple(b.clamp(-0.5, 0.5) for b in before))
        return super().loss(out, y)


class SavedTensors(Net):
    def hidden(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clamp(-9, 9), lambda t: t):
            return super().hidden(x)


class GradientInForward(Net):
    """A gradient penalty."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        loss = super().forward(x, y)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + grad.square().mean()


class FunctionalGradient(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        grad = torch.func.grad(lambda x: F.mse_loss(self.b(self.hidden(x)), y))(x)
        return loss + grad.square().mean()


class Checkpointed(Net):
    def hidden(self, x: Tensor) -> Tensor:
        found = checkpoint(super().hidden, x, use_reentrant=False)
        assert isinstance(found, Tensor)
        return found


class CheckpointedReentrant(Net):
    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        found = checkpoint(lambda h: torch.tanh(h), hidden, use_reentrant=True)
        assert isinstance(found, Tensor)
        return found


# Data.


class BranchesOnData(Net):
    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        return hidden * 2 if float(x.abs().max()) > 100 else hidden


class WritesItsInput(Net):
    def hidden(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return super().hidden(x)


class StraightThrough(Net):
    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        return hidden + (hidden.round() - hidden).detach()


class PartlyWithoutGradient(Net):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(6, 8)

    def hidden(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            offset = self.c(x)
        return super().hidden(x) + offset


class CountsRows(Net):
    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return (out - y).square().sum() / x_rows(out)


def x_rows(out: Tensor) -> int:
    return out.shape[0]


class AutocastInside(Net):
    def hidden(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.a(x)
        return torch.tanh(hidden.float())


class RoutedExperts(Net):
    """Experts by argmax; the first rows all go to one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 8) for _ in range(3))
        self.router = nn.Linear(6, 3)

    def hidden(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        chosen = F.one_hot(scores.argmax(-1), 3).to(x.dtype)
        outs = torch.stack([expert(x) for expert in self.experts], 1)
        return torch.tanh((outs * (chosen * scores)[..., None]).sum(1))


class Mixup(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(0.7 * x + 0.3 * x.flip(0), 0.7 * y + 0.3 * y.flip(0))


REFUSED: dict[type[Net], str] = {
    Counter: r"changes attribute 'calls' \(from 1 to 2\)",
    CounterInAnObject: r"'state'\['inner'\]\[0\]\.count",
    GlobalCounter: "changes global CALLS of test_one_batch",
    GlobalList: "changes global SEEN of test_one_batch",
    ClassCounter: r"changes class attribute ClassCounter\.calls",
    Closure: "changes variable 'calls' of function counting",
    FunctionAttribute: "changes attribute 'calls' of function scaled",
    History: "changes attribute 'past'",
    HookThatCounts: "changes attribute 'calls'",
    LayerDrop: "changes Python's random numbers.*draw random numbers by torch",
    NumpyNoise: "changes numpy's random numbers.*draw random numbers by torch",
    OwnGenerator: "changes attribute 'numbers'",
    GlobalGenerator: "changes global GENERATOR",
    TorchGenerator: r"aten\.rand\.generator.*without generator=",
    Clock: r"reads the clock.*\(at test_one_batch",
    Date: "reads the clock",
    Entropy: "random numbers from the system",
    ReadsAFile: "opens a file",
    Iterates: "changes attribute 'numbers'",
    ReseedsInForward: "sets torch's seed",
    PlainTensorWritten: "writes the constant.*register it as a buffer",
    PlainTensorRebound: "reads attribute 'level', a tensor that the call before has left",
    CarriesHidden: "reads attribute 'last', a tensor that the call before has left",
    NormalisedByTheFirstBatch: "changes attribute 'mean'",
    FirstCallOnly: r"changes attribute 'first' \(from True to False\)",
    ReboundBuffer: "changes buffer 'level'.*write a buffer in place",
    ClipsWeights: r"writes the parameter 'a\.weight' in place",
    ClipsData: r"by \.data, which torch\.export cannot follow",
    RebindsData: r"by \.data, which torch\.export cannot follow",
    Unfreezes: r"changes requires_grad of parameter 'a\.weight'.*set it in job",
    NewParameter: r"changes parameter 'a\.weight' \(bound to another",
    SwitchesMode: "changes attribute 'training'",
    CustomFunction: r"uses the autograd\.Function Clip",
    CustomFunctionBound: r"uses the autograd\.Function Clip",
    TensorHook: r"registers a hook on a gradient.*test_one_batch\.py",
    ParameterHook: r"parameter 'b\.weight' has a gradient hook",
    BackwardHook: "a module has a backward hook",
    GraphHook: "registers a hook on a gradient",
    SavedTensors: "changes what autograd saves for backward",
    GradientInForward: r"takes a gradient within forward.*torch\.autograd\.grad",
    FunctionalGradient: r"takes a gradient within forward.*torch\.func\.grad",
    CheckpointedReentrant: "use_reentrant=False",
    BranchesOnData: "data-dependent control flow",
}
KINDS = [kind for kind in list(globals().values()) if isinstance(kind, type) and issubclass(kind, Net)]
CASES = [case(kind, rows, refused=REFUSED.get(kind, "")) for kind in KINDS]


@pytest.mark.parametrize("kind", sampled(28, CASES))
def test_what_one_batch_does_not_show(kind: Case, one_thread: None) -> None:
    run(kind)


def test_state_that_a_forward_changed_is_put_back() -> None:
    """Capturing and checking leave the module, the globals and the generators as they were."""
    before = random.getstate(), CALLS, list(SEEN), ClassCounter.calls
    for kind in (Counter, GlobalCounter, GlobalList, ClassCounter, LayerDrop, CarriesHidden):
        job = job_of(kind(), rows())
        with pytest.raises(CaptureError):
            prepare(job)
        assert getattr(job.module, "calls", 0) == 0
        assert getattr(job.module, "last", None) is None
    assert (random.getstate(), CALLS, list(SEEN), ClassCounter.calls) == before
