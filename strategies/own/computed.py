"""Formulas computed: each shape's program is rehearsed, then run by the interpreter of all graphs. Torch is
loaded at the first one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.errors import AtollError, UnsupportedOp
from atoll.formulas import CLIENT_NUMBERS, SERVER_NUMBERS, value_meta
from atoll.opdag import TensorMeta

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from atoll.execute import Executor
    from atoll.formulas import Formula
    from strategies.layout import Array

NUMBERS = frozenset({*CLIENT_NUMBERS, *SERVER_NUMBERS})


@dataclass
class Computer:
    """One formula, compiled for each kind of tensor that it meets."""

    formula: Formula
    _executors: dict[tuple[TensorMeta, str], Executor] = field(default_factory=dict)

    def rehearse(self, metas: Iterable[TensorMeta]) -> None:
        """Raise UnsupportedOp unless the formula runs on tensors of these, by their shapes alone."""
        from atoll.job import Precision
        from atoll.rehearse import rehearse

        for meta in sorted({_at_least_one_dim(meta) for meta in metas}, key=repr):
            program = self.formula.at(meta)
            inputs = {name: value_meta(name, meta) for name in program.inputs}
            try:
                rehearse(program, {}, inputs, Precision.FP32)
            except AtollError as error:
                raise UnsupportedOp(f"for tensors {meta.dtype} {meta.shape}: {error}") from None

    def run(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The results for one tensor; ``values``: at least those that the formula reads."""
        like = next(tensor for name, tensor in values.items() if name not in NUMBERS)
        shape = tuple(like.shape)
        meta = _at_least_one_dim(TensorMeta(shape, str(like.dtype).removeprefix("torch.")))
        if not shape:
            values = {name: t if name in NUMBERS else t.reshape(1) for name, t in values.items()}
        found = self._executor(meta, str(like.device)).forward(0, 0, values, {})
        return {name: found[op].reshape(shape) for name, op in self.formula.results.items()}

    def run_arrays(self, values: Mapping[str, Array | float]) -> dict[str, Any]:
        """The same on numpy's arrays and numbers, which the caller may not be allowed to write."""
        import torch

        given = {
            name: torch.tensor(float(held), dtype=torch.float64) if name in NUMBERS else _shared(torch, held)
            for name, held in values.items()
        }
        found = self.run(given)
        return {name: tensor.numpy() for name, tensor in found.items()}

    def _executor(self, meta: TensorMeta, device: str) -> Executor:
        key = (meta, device)
        if key not in self._executors:
            from atoll.execute import Executor

            self._executors[key] = Executor(self.formula.at(meta), device, seed=None, differentiate=False)
            self._executors[key].load({})
        return self._executors[key]


def _at_least_one_dim(meta: TensorMeta) -> TensorMeta:
    """A tensor without dims has one: by torch's rules it would take a number's dtype."""
    return meta if meta.shape else TensorMeta((1,), meta.dtype)


def _shared(torch: Any, array: Any) -> Any:
    held = np.asarray(array)
    whole = held.flags.writeable and held.flags.c_contiguous
    return torch.from_numpy(held if whole else np.array(held, order="C"))
