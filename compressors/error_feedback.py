"""Error feedback: what a codec left out of this tensor is added to the next.

    v = g + e;  packet = C(v);  e' = v - decode(packet)

so that every part of a gradient or delta arrives at last, whatever ``C`` drops, as long as
||v - decode(C(v))|| <= sqrt(1 - delta) ||v|| (top-k: delta = k/d). Of a codec that sends some elements
alone, e' is v with those replaced by what rounding left: no tensor is decoded. Not around unbiased
codecs: their d/k makes the residual grow; take ``RandomK(unbiased=False)``. Not for activations: the
next micro-batch holds other samples.

**Commit a state only once its packet is delivered.** ``compress`` returns the state that holds if
the receiver acknowledges. Keep the old one until then:

    packet, after = codec.compress(gradient, state)
    if send(packet):                       # acknowledged
        state = after

To send again, send the same packet, or compress again with the old state: it is the same packet. A
receiver that had it after all must drop the repetition by its key, or the mass counts twice.

Drop the state (``init``) with a change of codec or of who holds the tensor, and once it is too old, which
for clients of federated rounds ``atoll.federated.residual_counts`` says. Keep it in checkpoints (wiping
it every 50 steps cost 0.3 points of accuracy, every 10 steps 1.5: papers/compression.md 1.5, 8). Where v
or what arrives of it is not finite, the residual stays as it was: the step will be discarded.
Source: EF-SGD; papers/compression.md 3 (common EF top-k), 8 (ownership, failed sends; it drops after one
missed round, which with partial participation would be nearly always).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atoll.opdag import TensorMeta
from compressors.base import Compressor, Packet, State, meta_of
from compressors.catalogue import CODECS
from compressors.packing import TORCH_DTYPES, empty, require_floats
from compressors.selection import all_finite, place
from compressors.sparse import Scattered
from compressors.topk import TopK


@dataclass(frozen=True, slots=True)
class Residual:
    """``error``: float32, flat, not to be written to; None is zero. ``inner``: the codec's own state."""

    error: Tensor | None
    inner: State


class ErrorFeedback:
    """``codec`` with a residual; by default top-k of the whole tensor with a reused threshold."""

    name = "error_feedback"

    def __init__(self, ratio: float = 100.0, *, codec: Compressor | None = None) -> None:
        """``ratio`` is for the default codec. Raises ValueError for one that keeps what it left out itself:
        this residual would count it twice."""
        self.codec: Compressor = TopK(ratio, rows=False, selection="reused") if codec is None else codec
        facts = CODECS.get(self.codec.name)
        if facts is not None and facts.stateful:
            raise ValueError(f"{self.codec.name} keeps its own residual; use it without error feedback")
        self._lossy = facts is not None and not facts.exact

    def init(self, meta: TensorMeta) -> State:
        return Residual(None, self.codec.init(meta))

    def compress(self, tensor: Tensor, state: State = None, *, seed: int = 0) -> tuple[Packet, State]:
        """The packet of gradient and residual, and the state once it is delivered."""
        require_floats(self.name, meta_of(tensor))
        before = _residual(state)
        wanted = _sum(tensor, before.error)
        packet, inner = self.codec.compress(
            wanted.view(tensor.shape).to(tensor.dtype), before.inner, seed=seed
        )
        left = self._left(wanted, packet)
        return replace(packet, codec=self.name), Residual(before.error if left is None else left, inner)

    def decompress(self, packet: Packet, state: State = None) -> Tensor:
        return self.codec.decompress(replace(packet, codec=self.codec.name))

    def max_payload_bytes(self, meta: TensorMeta) -> int:
        return self.codec.max_payload_bytes(meta)

    def _left(self, wanted: Tensor, packet: Packet) -> Tensor | None:
        """Return the part of ``wanted`` (overwritten) that ``packet`` does not hold; None where either is not
        finite."""
        if isinstance(self.codec, Scattered):
            # Elsewhere all of it waits, and what is not finite shows among the kept: no other pass.
            positions, values = self.codec.kept_of(packet)
            arrived = torch.from_numpy(values).to(TORCH_DTYPES[packet.meta.dtype])
            error = wanted[torch.from_numpy(positions)] - arrived.to(torch.float32)
            if not all_finite(error):
                return None
            place(wanted, positions, error)
            return wanted
        arrived = self.codec.decompress(packet).reshape(-1).to(torch.float32)
        # In place, but for an exact codec, whose packet may be the sum's own memory.
        error = torch.sub(wanted, arrived, out=wanted if self._lossy else None)
        return error if all_finite(error) else None


def _residual(state: State) -> Residual:
    return state if isinstance(state, Residual) else Residual(None, None)


def _sum(tensor: Tensor, error: Tensor | None) -> Tensor:
    """A new flat float32 tensor."""
    own = tensor.detach().to("cpu", torch.float32).reshape(-1)
    total = empty(TensorMeta(tuple(own.shape), "float32"))
    return total.copy_(own) if error is None else torch.add(own, error, out=total)
