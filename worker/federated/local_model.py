"""What a client trains: the job's model as every client gets it, and its own samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from atoll.errors import UsageError
from atoll.execute import DTYPES
from atoll.job import stepwise_groups
from atoll.opdag import TensorMeta
from atoll.sampling import Split, split
from strategies.layout import Layout

if TYPE_CHECKING:
    from atoll.job import TrainingSpec
    from atoll.opdag import StateMeta
    from atoll.program import StageProgram
    from strategies.layout import Array

    Fields = Mapping[str, Array]


@dataclass(frozen=True)
class LocalModel:
    """What every client of a job computes with. ``tensors``: the job's own values by name, on the CPU,
    perhaps memory-mapped, never written; ``states`` describes parameters and buffers in the state dict's
    order, ``inputs`` the model's inputs."""

    program: StageProgram
    eval_program: StageProgram | None
    training: TrainingSpec
    states: Mapping[str, StateMeta]
    tensors: Mapping[str, Tensor]
    inputs: Mapping[str, TensorMeta]

    @property
    def leaves(self) -> tuple[str, ...]:
        """Parameters and buffers of both programs, in the order of ``states``."""
        programs = [p for p in (self.program, self.eval_program) if p is not None]
        used = {name for p in programs for name in (*p.parameters, *p.buffers)}
        return tuple(name for name in self.states if name in used)

    @property
    def frozen(self) -> frozenset[str]:
        """Parameters that the optimizer's groups hold fixed."""
        groups = stepwise_groups(self.program.parameters, self.training.optimizer)
        return frozenset(name for name, group in groups.items() if group.frozen)

    def metas(self) -> dict[str, TensorMeta]:
        """Shape and dtype of every leaf but the inputs, of constants by their values."""
        described = {name: state.meta for name, state in self.states.items()}
        for program in (self.program, self.eval_program):
            for name in program.constants if program is not None else ():
                described.setdefault(name, _meta(self.tensors[name]))
        return described

    def layout(self) -> Layout:
        """Roles of the leaves, before a rule adapts them."""
        return Layout.of_state({name: self.states[name] for name in self.leaves}, self.frozen)


def _meta(tensor: Tensor) -> TensorMeta:
    return TensorMeta(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


class LocalData:
    """One client's samples: arrays by field, each with the samples along its first axis, perhaps
    memory-mapped. ``inputs``: input of the model -> field. ``rows``: the client's samples among them, None:
    all are.

    UsageError when a field is missing, has another shape or dtype than the input, or another length.
    """

    def __init__(
        self,
        fields: Fields,
        inputs: Mapping[str, str],
        metas: Mapping[str, TensorMeta],
        rows: Array | None = None,
    ) -> None:
        missing = [name for name in metas if inputs.get(name) not in fields]
        if missing:
            raise UsageError(
                f"input {missing[0]!r} takes field {inputs.get(missing[0])!r}; the data has {sorted(fields)}"
            )
        self._sources = {name: (fields[inputs[name]], meta) for name, meta in metas.items()}
        lengths = {len(array) for array, _ in self._sources.values()}
        if len(lengths) != 1:
            raise UsageError(f"fields of one data set have {sorted(lengths)} samples; give each as many")
        for name, (array, meta) in self._sources.items():
            if array.shape[1:] != meta.shape[1:] or (array.dtype.kind == "f" and "float" not in meta.dtype):
                raise UsageError(
                    f"field {inputs[name]!r} holds {array.dtype} samples of shape {array.shape[1:]}, input "
                    f"{name!r} takes {meta.dtype} {meta.shape[1:]}; register the data in that form"
                )
        self._rows = rows
        self.n_samples = lengths.pop() if rows is None else len(rows)
        self.batch = next(iter(metas.values())).shape[0]

    def take(self, samples: Array, device: torch.device) -> dict[str, Tensor]:
        """The micro-batch of these samples, in memory of torch's own: kernels look at alignment."""
        if self._rows is not None:
            samples = self._rows[samples]
        return {
            name: torch.from_numpy(array[samples]).to(device, DTYPES[meta.dtype], copy=True)
            for name, (array, meta) in self._sources.items()
        }


@dataclass(frozen=True)
class Client:
    """Who trains on what. ``name`` is part of every seed."""

    name: str
    data: LocalData
    split: Split

    @classmethod
    def of(cls, name: str, data: LocalData, held_out: float, seed: int) -> Client:
        """The client ``name`` with its own share held out."""
        return cls(name, data, split(data.n_samples, held_out, seed, name))

    @classmethod
    def whole(cls, name: str, data: LocalData) -> Client:
        """All of ``data`` for evaluation."""
        every = np.arange(data.n_samples)
        return cls(name, data, Split(every, every))
