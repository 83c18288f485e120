"""One case: a call of one op on tensors that are described, not held, so that it can be repeated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from atoll.execute import DTYPES
from atoll.opdag import FLOATING, Arg, Kind, OpNode, OpRef, TensorMeta, TorchLiteral

FILLS = ("normal", "unit", "small", "extreme", "zero", "one", "index")


@dataclass(frozen=True, slots=True)
class Tensorlike:
    """A tensor argument: its shape, dtype and what fills it (``FILLS``); ``bound`` of "index" values."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    fill: str = "normal"
    bound: int = 2
    grad: bool = True

    @property
    def meta(self) -> TensorMeta:
        return TensorMeta(self.shape, self.dtype)


Value = Any  # Tensorlike, a literal, a TorchLiteral, or a tuple of these


@dataclass(frozen=True, slots=True)
class Case:
    """``target`` called with ``given`` by name; ``seed`` of what fills the tensors."""

    target: str
    given: Mapping[str, Value]
    seed: int
    at_start: bool = False  # the guard page lies before the tensors, not behind them

    def text(self) -> str:
        """JSON on one line, as ``case_of`` reads it."""
        given = {name: _plain(value) for name, value in self.given.items()}
        return json.dumps([self.target, given, self.seed, self.at_start])

    def without(self, name: str) -> Case:
        """The case with one argument left to its default."""
        return replace(self, given={n: v for n, v in self.given.items() if n != name})

    def with_(self, name: str, value: Value) -> Case:
        """The case with another value of one argument."""
        return replace(self, given={**self.given, name: value})


def case_of(text: str) -> Case:
    """The case that ``Case.text`` wrote."""
    target, given, seed, at_start = json.loads(text)
    return Case(target, {name: _value(value) for name, value in given.items()}, seed, at_start)


def _plain(value: Value) -> Any:
    if isinstance(value, Tensorlike):
        return {"tensor": asdict(value)}
    if isinstance(value, TorchLiteral):
        return {"torch": [value.kind, value.name]}
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _value(plain: Any) -> Value:
    if isinstance(plain, list):
        return tuple(_value(item) for item in plain)
    if isinstance(plain, dict) and "tensor" in plain:
        fields = plain["tensor"]
        return Tensorlike(**{**fields, "shape": tuple(fields["shape"])})
    return TorchLiteral(*plain["torch"]) if isinstance(plain, dict) else plain


def node_of(case: Case) -> tuple[OpNode, list[Tensorlike]]:
    """The case as a node that reads its tensors as values of ops 0, 1, ...; outputs are not declared yet."""
    tensors: list[Tensorlike] = []

    def argument(value: Value) -> Arg:
        if isinstance(value, Tensorlike):
            tensors.append(value)
            return OpRef(len(tensors) - 1)
        return tuple(argument(item) for item in value) if isinstance(value, tuple) else value

    kwargs = tuple((name, argument(value)) for name, value in case.given.items())
    node = OpNode("case", Kind.NON_PARAMETRIC, case.target, (), kwargs, (), requires_grad=True, random=True)
    return node, tensors


def filled(spec: Tensorlike, generator: torch.Generator) -> Tensor:
    """Values of one tensor, on ordinary memory."""
    dtype = DTYPES[spec.dtype]
    if spec.dtype == "bool":
        return torch.randint(0, 2, spec.shape, generator=generator).bool()
    if spec.fill == "zero" or spec.fill == "one":
        return torch.full(spec.shape, float(spec.fill == "one")).to(dtype)
    if spec.fill == "index":
        return torch.randint(0, max(1, spec.bound), spec.shape, generator=generator).to(dtype)
    if spec.fill == "extreme":
        return _extreme(spec, generator)
    if spec.dtype not in FLOATING or spec.fill == "small":
        low = 0 if spec.dtype == "uint8" else -3
        return torch.randint(low, 6, spec.shape, generator=generator).to(dtype)
    make = torch.rand if spec.fill == "unit" else torch.randn
    return make(spec.shape, generator=generator).to(dtype)


def _extreme(spec: Tensorlike, generator: torch.Generator) -> Tensor:
    """Values that a kernel may stumble over, mixed with ordinary ones."""
    dtype = DTYPES[spec.dtype]
    if spec.dtype in FLOATING:
        chosen = torch.tensor(
            [
                0.0,
                -0.0,
                1.0,
                -1.0,
                0.5,
                1e30,
                -1e30,
                1e-40,
                float("inf"),
                float("-inf"),
                float("nan"),
                -3.5,
                2.0**31,
                2.0**63,
            ]
        )
    else:
        info = torch.iinfo(dtype)
        values = [
            0,
            1,
            2,
            3,
            info.max,
            info.min,
            min(info.max, spec.bound),
            max(info.min, -1),
            max(info.min, -spec.bound - 1),
            min(info.max, 2**31),
            info.max // 2,
        ]
        chosen = torch.tensor(values)
    picked = torch.randint(0, len(chosen), spec.shape, generator=generator)
    return chosen[picked].to(dtype)
