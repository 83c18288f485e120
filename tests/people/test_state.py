"""State that a module carries from call to call: what the graph holds, and what it could not.

The refused ones do the same at every checked call, or change to and fro.
"""

from __future__ import annotations

import collections
import copy
import enum
import functools
import itertools
import os
import re
import sys
import threading
import time
import types
from array import array
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parameters import sampled
from tests.people.loop import Case, case, job_of, refusal, run
from tests.people.test_one_batch import Net, rows

LATE = 100  # calls until anything is otherwise
CALLS: ContextVar[int] = ContextVar("calls", default=0)


class Mode(enum.Enum):
    ODD = 1
    EVEN = 2


class Scaled(Net):
    """A module that is another one after many calls; ``late`` says whether that is now."""

    def late(self) -> bool:
        raise NotImplementedError

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) * (0.5 if self.late() else 1.0)


class CountsInACounter(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.seen = collections.Counter(calls=0)

    def late(self) -> bool:
        self.seen["calls"] += 1
        return self.seen["calls"] > LATE


class Numbers(list[int]):
    """A list of one's own."""


class CountsInAListOfItsOwn(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.seen = Numbers([0])

    def late(self) -> bool:
        self.seen[0] += 1
        return self.seen[0] > LATE


class CountsInAnArray(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.seen = array("i", [0])

    def late(self) -> bool:
        self.seen[0] += 1
        return self.seen[0] > LATE


class CountsInAContextVariable(Scaled):
    def late(self) -> bool:
        CALLS.set(CALLS.get() + 1)
        return CALLS.get() > LATE


class CountsInTheEnvironment(Scaled):
    def late(self) -> bool:
        calls = int(os.environ.get("ATOLL_TEST_CALLS", "0")) + 1
        os.environ["ATOLL_TEST_CALLS"] = str(calls)
        return calls > LATE


class CountsInAPath(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.path = Path("a")

    def late(self) -> bool:
        self.path = self.path.with_name(self.path.name + "a")
        return len(self.path.name) > LATE


class ReadsAnIterator(Scaled):
    def __init__(self, steps: Iterator[Any] | None = None) -> None:
        super().__init__()
        self.steps = steps or iter([False] * LATE + [True])

    def late(self) -> bool:
        return bool(next(self.steps))


class ReadsAMap(ReadsAnIterator):
    def __init__(self) -> None:
        super().__init__(map(LATE.__lt__, itertools.count()))


class ReadsACycle(ReadsAnIterator):
    def __init__(self) -> None:
        super().__init__(itertools.cycle([False] * LATE + [True]))


class ReadsAGenerator(ReadsAnIterator):
    def __init__(self) -> None:
        super().__init__(calls > LATE for calls in itertools.count())


class TakesTurns(Net):
    """At every second call it is as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = Mode.ODD

    def hidden(self, x: Tensor) -> Tensor:
        scale = self.mode.value
        self.mode = Mode.EVEN if self.mode is Mode.ODD else Mode.ODD
        return super().hidden(x) * scale


class SwapsItsActivation(Net):
    def __init__(self) -> None:
        super().__init__()
        self.activation = torch.tanh

    def hidden(self, x: Tensor) -> Tensor:
        found = self.activation(self.a(x))
        self.activation = torch.sigmoid if self.activation is torch.tanh else torch.tanh
        return found


class HoldsALock(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b.lock = threading.Lock()


class DropsAGradient(Net):
    """What the micro-batch before has added is lost, which no loss shows."""

    def hidden(self, x: Tensor) -> Tensor:
        self.a.bias.grad = None
        return super().hidden(x)


class ZeroesItsGradients(Net):
    def hidden(self, x: Tensor) -> Tensor:
        self.zero_grad()
        return super().hidden(x)


class ReadsAGradient(Net):
    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        gradient = self.a.weight.grad
        return super().loss(out, y) + (0.0 if gradient is None else gradient.norm())


class SetsTorchsGenerator(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drawn = torch.get_rng_state()

    def hidden(self, x: Tensor) -> Tensor:
        before = torch.get_rng_state()
        torch.set_rng_state(self.drawn)
        noise = torch.randn_like(x)
        torch.set_rng_state(before)
        return super().hidden(x + noise)


class CopiesALayer(Net):
    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) + copy.deepcopy(self.a)(x).detach()


class ByNumpy(Net):
    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return super().loss(out, y) * float(abs(out.detach().numpy()).max())


# Trained as the plain loop does.


class Queue(Net):
    """Keys of the last batches, as MoCo keeps them; where the next go stands in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(16, 8))
        self.register_buffer("next", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.hidden(x)
        likeness = (hidden @ self.queue.clone().T).logsumexp(1).mean()
        with torch.no_grad():
            self.queue[(self.next + torch.arange(len(x))) % 16] = hidden.detach()
            self.next.copy_((self.next + len(x)) % 16)
        return self.loss(self.b(hidden), y) + 0.1 * likeness


class Codebook(Net):
    """A vector quantiser whose codes are moving averages."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randn(6, 8)
        for name, value in {"codes": codes, "sums": codes.clone(), "counts": torch.ones(6)}.items():
            self.register_buffer(name, value)

    def hidden(self, x: Tensor) -> Tensor:
        found = super().hidden(x)
        nearest = torch.cdist(found.detach(), self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                ours = F.one_hot(nearest, 6).float()
                self.counts.lerp_(ours.sum(0), 0.1)
                self.sums.lerp_(ours.T @ found.detach(), 0.1)
                self.codes.copy_(self.sums / (self.counts[:, None] + 1e-5))
        return found + (self.codes[nearest] - found).detach()


class Remembers(Net):
    """The hidden state of the batch before, in a buffer; it is written in evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)
        self.register_buffer("last", torch.zeros(4, 8))

    def hidden(self, x: Tensor) -> Tensor:
        found: Tensor = self.cell(super().hidden(x), self.last.clone())
        self.last.copy_(found.detach())
        return found


class SharesANorm(Net):
    """One batch norm at two depths: its statistics move twice a call."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.one, self.two = nn.Sequential(shared, nn.Tanh()), nn.Sequential(nn.ReLU(), shared)

    def hidden(self, x: Tensor) -> Tensor:
        found: Tensor = self.two(self.one(super().hidden(x)))
        return found


class BuffersOnOneMemory(Net):
    def __init__(self) -> None:
        super().__init__()
        both = torch.zeros(2, 8)
        self.register_buffer("mean", both[0])
        self.register_buffer("square", both[1])

    def hidden(self, x: Tensor) -> Tensor:
        found = super().hidden(x)
        self.mean.lerp_(found.detach().mean(0), 0.1)
        self.square.lerp_(found.detach().square().mean(0), 0.1)
        return (found - self.mean) / (1.0 + self.square).sqrt()


class EveryFourthCall(Net):
    """What a count in a buffer chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def hidden(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().hidden(x) * torch.where(self.calls % 4 == 0, 2.0, 1.0)


class DistanceToTheFirst(Net):
    """Weights as they were at the first call, as a penalty on leaving them has them (L2-SP)."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Tensor] = {}

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        if not self.first:
            self.first = {name: weight.detach().clone() for name, weight in self.named_parameters()}
        far = sum((weight - self.first[name]).square().sum() for name, weight in self.named_parameters())
        return super().loss(out, y) + far


class CachesAProperty(Net):
    @functools.cached_property
    def doubled(self) -> Tensor:
        return self.a.weight.detach() * 2

    def hidden(self, x: Tensor) -> Tensor:
        return F.linear(x, self.doubled) + self.a(x)


@functools.lru_cache
def length(layer: nn.Linear) -> Tensor:
    return layer.weight.detach().norm()


class CachesAFunction(Net):
    def hidden(self, x: Tensor) -> Tensor:
        return self.a(x) / length(self.a)


class LearnsFromItsFirst(Net):
    """A teacher with the weights of the first call, out of the module's sight."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher: list[nn.Linear] = []

    def hidden(self, x: Tensor) -> Tensor:
        if not self.teacher:
            self.teacher.append(nn.Linear(6, 8))
            with torch.no_grad():
                self.teacher[0].weight.copy_(self.a.weight)
                self.teacher[0].bias[:] = self.a.bias
        return super().hidden(x) - self.teacher[0](x).detach()


class FirstStatistics(Net):
    """A running statistic as it was at the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.spread: Tensor | None = None

    def hidden(self, x: Tensor) -> Tensor:
        if self.spread is None:
            self.spread = self.norm.running_var.ne(0).to(x.dtype)  # type: ignore[union-attr]
        return super().hidden(self.norm(x) * self.spread)


class MergesForEvaluation(Net):
    """A weight that evaluations share until training drops it."""

    drops = True

    def __init__(self) -> None:
        super().__init__()
        self.merged: Tensor | None = None

    def hidden(self, x: Tensor) -> Tensor:
        if self.training:
            self.merged = None if self.drops else self.merged
            return super().hidden(x)
        if self.merged is None:
            self.merged = self.a.weight.detach() * 2
        return F.linear(x, self.merged)


class MergesOnce(MergesForEvaluation):
    drops = False


class CachesFormsAndViews(Net):
    """What is made at the first call of a weight's form, of its memory, or of what nothing trains."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Linear(6, 8).requires_grad_(False)
        self.kept: list[Tensor] = []

    def hidden(self, x: Tensor) -> Tensor:
        if not self.kept:
            ones = torch.ones(8, dtype=torch.float64).to(self.a.weight)
            self.kept = [torch.ones_like(self.a.bias), ones, self.a.weight.detach(), self.fixed.weight * 2]
        ones, more, weight, fixed = self.kept
        return super().hidden(x) * ones * more + F.linear(x, weight + fixed)


class HidesPlaces(Net):
    """A buffer of infinities, as causal masks are often written."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((8, 8), -torch.inf).triu(1))

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) @ self.mask.softmax(1)


_CARRIED = r"reads a tensor that an earlier call computed from what training changes \(at test_state\.py:\d"
REFUSED = {
    DistanceToTheFirst: _CARRIED,
    CachesAProperty: _CARRIED,
    CachesAFunction: _CARRIED,
    LearnsFromItsFirst: _CARRIED,
    FirstStatistics: _CARRIED,
    MergesOnce: _CARRIED,
    CountsInACounter: r"changes attribute 'seen'\['calls'\]",
    CountsInAListOfItsOwn: r"changes attribute 'seen'\[0\]",
    CountsInAnArray: "changes attribute 'seen'",
    CountsInAContextVariable: "changes global CALLS of test_state",
    CountsInTheEnvironment: r"changes the environment \(os\.environ\)",
    CountsInAPath: "changes attribute 'path'",
    ReadsAnIterator: "changes attribute 'steps'",
    ReadsAMap: "changes attribute 'steps'",
    ReadsACycle: "changes attribute 'steps'",
    ReadsAGenerator: "attribute 'steps' is a generator, which moves on whenever it is read",
    TakesTurns: r"changes attribute 'mode' \(from <Mode\.EVEN: 2> to <Mode\.ODD: 1>\)",
    SwapsItsActivation: r"changes attribute 'activation' \(from sigmoid to tanh\)",
    HoldsALock: r"attribute 'b\.lock' cannot be copied.*keep it outside the module",
    DropsAGradient: r"uses a parameter's gradient \(\.grad, zero_grad\(\)\) in forward.*test_state\.py",
    ZeroesItsGradients: "uses a parameter's gradient",
    ReadsAGradient: "uses a parameter's gradient",
    SetsTorchsGenerator: r"sets the state of torch's generator.*\(at test_state\.py",
    CopiesALayer: r"copies a tensor by copy\.deepcopy.*use \.clone\(\): in the module at test_state\.py",
    ByNumpy: "passes a tensor to numpy",
}
OWN = [kind for kind in list(globals().values()) if isinstance(kind, type) and issubclass(kind, Net)]
CASES = [case(kind, rows, refused=REFUSED.get(kind, "")) for kind in OWN if kind not in (Net, Scaled)]


@pytest.mark.parametrize("kind", sampled(13, CASES))
def test_state_is_in_the_graph_or_refused_by_its_name(
    kind: Case, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_TEST_CALLS", "0")
    run(kind)


TYPED = {  # the body of ``late``
    "CALLS[0] += 1; return CALLS[0] > 100": r"global CALLS of <stdin>",
    "Mine.n += 1; return Mine.n > 100": r"class attribute Mine\.n",
    "return time.time() < 0": r"reads the clock.*\(at <stdin>:3\)",
}


@pytest.mark.parametrize("source", TYPED)
def test_a_class_that_was_typed_at_a_prompt_is_looked_into_too(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, its module is `__main__`, which has no file."""
    main = types.ModuleType("__main__")
    vars(main).update(Net=Scaled, CALLS=[0], time=time)
    monkeypatch.setitem(sys.modules, "__main__", main)
    typed = f"class Mine(Net):\n    n = 0\n    def late(self): {source}"
    exec(compile(typed, "<stdin>", "exec"), vars(main))  # noqa: S102 - our own text
    words = refusal(lambda: job_of(vars(main)["Mine"](), rows()))
    assert re.search(TYPED[source], words), words
