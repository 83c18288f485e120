"""Gradients that show no single sample: DP-SGD inside a client (Abadi 2016, Alg. 1), in whole numbers.

    g_i = gradient of sample i alone;   v_i = 2^24 g_i min(1, C / |g_i|) / C, towards zero
    g   = C (sum v_i + N_Z(0, (z 2^24)^2)) / (2^24 B),   i drawn by itself with q = B / N

A sample goes through the captured graph alone: it fills the micro-batch, so the mean loss over its copies is
its own, whatever the graph's static shapes. That takes as many times the work as a micro-batch has rows.
Draws and noise are the operating system's, so a round that is trained again is another release, and counted.
Losses are not looked at: whether one is finite is a function of the data.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from atoll.errors import UnsupportedOp
from atoll.flow.value import Kind
from atoll.flow.walk import described, walk
from atoll.opdag import LeafRef, OpRef, arguments
from atoll.schemas import named_arguments
from strategies.privacy.discrete_gaussian import discrete_gaussian
from strategies.privacy.private import UNIT, clipped
from strategies.privacy.samples import sigma_of

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.execute import Executor
    from atoll.opdag import TensorMeta
    from atoll.privacy import SamplePrivacy
    from atoll.program import StageProgram
    from strategies.layout import Array
    from worker.federated.local_model import Client

WORD = 2.0**64


class NoisedGradients:
    """Noised gradients of one program. ``source``: as ``os.urandom``; ``tick``: called after each sample."""

    def __init__(
        self,
        executor: Executor,
        privacy: SamplePrivacy,
        device: torch.device,
        tick: Callable[[], None] = lambda: None,
        source: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._executor, self._privacy, self._device = executor, privacy, device
        self._tick, self._source = tick, source

    def drawn(self, samples: Array, batch: int) -> Array:
        """Return who of ``samples`` is drawn, each by itself with a chance of ``batch`` over their number."""
        below = int(min(1.0, batch / len(samples)) * WORD)  # rounded down
        words = np.frombuffer(self._source(8 * len(samples)), np.uint64)
        return samples[words < np.uint64(below)] if below < 2**64 else samples

    def gradients(
        self,
        step: int,
        phase: int,
        client: Client,
        parameters: Mapping[str, Tensor],
        held: Collection[str] = (),
    ) -> dict[str, Tensor]:
        """Return the step's gradient of every parameter that is not ``held``."""
        batch, clip = client.data.batch, self._privacy.clip
        trained = {name: value for name, value in parameters.items() if name not in held}
        sums = {name: np.zeros(tuple(value.shape), np.int64) for name, value in trained.items()}
        for sample in self.drawn(client.split.train, batch).tolist():
            for name, whole in self._one(step, phase, client, sample, trained).items():
                sums[name] += whole
            self._tick()
        sigma, found = sigma_of(self._privacy.noise), {}
        for name, value in trained.items():
            noise = discrete_gaussian(sigma, sums[name].size, self._source).reshape(sums[name].shape)
            exact = (sums[name] + noise) * (clip / UNIT / batch)
            found[name] = torch.from_numpy(exact).to(self._device, value.dtype)
        return found

    def _one(
        self, step: int, phase: int, client: Client, sample: int, trained: Mapping[str, Tensor]
    ) -> Mapping[str, Array]:
        """A sample's clipped gradient in whole numbers; zeros where it is not finite."""
        executor, batch = self._executor, client.data.batch
        executor.forward(step, phase, client.data.take(np.full(batch, sample), self._device), {})
        executor.backward(phase, {})
        arrays = {}
        for name, value in trained.items():
            gradient = executor.gradient(name)
            arrays[name] = (
                np.zeros(tuple(value.shape)) if gradient is None else gradient.detach().cpu().double().numpy()
            )
        executor.zero_gradients()
        if not all(np.isfinite(array).all() for array in arrays.values()):
            return {name: np.zeros(array.shape, np.int64) for name, array in arrays.items()}
        return clipped(arrays, self._privacy.clip, 1.0)[0]


def check_apart(
    program: StageProgram, inputs: Mapping[str, TensorMeta], metas: Mapping[str, TensorMeta], least: int
) -> None:
    """Raise UnsupportedOp naming an op that mixes samples before the loss is their mean: of a sample alone it
    would compute something else, and what it keeps no noise covers."""
    (walked,) = walk([program], inputs, metas, least)
    for position, node in walked.nodes.items():
        name = node.target.split(".")[1]
        if name == "batch_norm" and named_arguments(node).get("training"):
            raise UnsupportedOp(f"{described(node)} mixes the samples of a micro-batch; {REMEDY}")
        given = [walked.single(arg) for arg in arguments(node) if isinstance(arg, OpRef | LeafRef)]
        kinds = {value.kind for value in given}
        made = walked.values[OpRef(position)]
        pairs = not isinstance(made, tuple) and made.kind is Kind.PAIRS
        if pairs or (Kind.MEAN in kinds and kinds & {Kind.ROWS, Kind.PAIRS, Kind.RAW}):
            raise UnsupportedOp(f"{described(node)} mixes the samples of a micro-batch; {REMEDY}")
    for write in walked.writes:
        if write.leaf.name in program.buffers:
            op = described(walked.nodes[write.position])
            raise UnsupportedOp(f"{op} writes {write.leaf.name!r}, which no noise covers; {REMEDY}")


REMEDY = "sample_privacy= needs each sample's own loss: take GroupNorm or LayerNorm, and a mean over samples"
