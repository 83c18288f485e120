"""Tensors of a stage for processes that cannot read the leader's files: each is handed its part of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from atoll.errors import BadFrame
from atoll.execute import DTYPES
from atoll.mesh.calls import parts_of, shards_of
from atoll.mesh.layout import Split
from protos import atoll_compute_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from atoll.mesh.group import Processes
    from worker.mesh.share import ProcessShare

    Tensors = dict[str, dict[str, Tensor]]
    Whole = Mapping[str, Mapping[str, Tensor]]

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Handing:
    """One stage's tensors, from the leader to all.

    The leader has ``tell``, which announces a parameter's tensors; the others have ``heard``, which returns
    what was announced next.
    """

    def __init__(
        self,
        processes: Processes,
        device: torch.device,
        tell: Callable[[pb.ToFollower], None] | None = None,
        heard: Callable[[], pb.ToFollower] | None = None,
    ) -> None:
        self._processes, self._device = processes, device
        self._tell, self._heard = tell, heard

    def parts(self, shares: ProcessShare, whole: Whole) -> Tensors:
        """Return this process's part of every tensor; ``whole``: all of them, at the leader."""
        found: Tensors = {}
        for name, announced in self._announced(shares, whole):
            found[name] = {m.key: self._part(shares, name, m, tensor) for m, tensor in announced}
        return found

    def _announced(
        self, shares: ProcessShare, whole: Whole
    ) -> Iterator[tuple[str, list[tuple[pb.HandedTensor, Tensor | None]]]]:
        if self._tell is None:
            yield from self._expected()
            return
        for name in sorted(whole):
            state = shares.whole_state(name, whole[name])
            listed = [
                (pb.HandedTensor(key=key, dtype=_NAMES[t.dtype], shape=t.shape), t)
                for key, t in sorted(state.items())
            ]
            self._tell(pb.ToFollower(handed=pb.HandedTensors(name=name, tensors=[m for m, _ in listed])))
            yield name, [(m, t) for m, t in listed]
        self._tell(pb.ToFollower(handed=pb.HandedTensors()))

    def _expected(self) -> Iterator[tuple[str, list[tuple[pb.HandedTensor, Tensor | None]]]]:
        while True:
            assert self._heard is not None  # noqa: S101 - of a follower
            message = self._heard()
            if not message.HasField("handed"):
                raise BadFrame("another order in the midst of a stage's tensors")
            if not message.handed.name:
                return
            yield message.handed.name, [(m, None) for m in message.handed.tensors]

    def _part(self, shares: ProcessShare, name: str, m: pb.HandedTensor, whole: Tensor | None) -> Tensor:
        shape, dtype, size = tuple(m.shape), DTYPES[m.dtype], self._processes.size
        way = shares.way(name, shape)
        here = None if whole is None else whole.to(self._device)
        if way is None:
            own = torch.empty(shape, dtype=dtype, device=self._device) if here is None else here.contiguous()
            self._processes.broadcast(as_bytes(own))
            return own
        own = torch.empty(way.local(shape, size), dtype=dtype, device=self._device)
        if here is None:
            parts = None
        elif isinstance(way, Split):
            parts = parts_of(here, way, size)
        else:
            parts = tuple(shards_of(here, size))
        self._processes.scatter(
            None if parts is None else [as_bytes(p.contiguous()) for p in parts], as_bytes(own)
        )
        return own


def as_bytes(value: Tensor) -> Tensor:
    """Return a contiguous tensor's own memory as bytes: these move, whatever their type."""
    return value.reshape(-1).view(torch.uint8)
