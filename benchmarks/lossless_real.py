"""What the lossless codec saves on real tensors: the demo GPT's activations and gradients.

    python -m benchmarks.lossless_real --seed 4711 --json

Trains examples/gpt.py in this process and packs, in fp32 and in bf16, what would cross a cut between
any two blocks (activations forward, their gradients back) and the gradients of all parameters, after
some steps. Every packet is decoded and compared bit for bit. ``--json`` ends with one JSON object;
shares are of the dense bytes, saved = 1 - share.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from atoll.data import sample_indices, take
from benchmarks.harness import execute
from compressors import make_compressor
from compressors.base import parse_packet
from examples.gpt import LEARNING_RATE, MICRO_BATCH, N_MICRO, data, model

if TYPE_CHECKING:
    from torch import Tensor

GOALS = {"float32": 0.14, "bfloat16": 0.30}
LOOKED_AT = 3
"""The tensors of so many steps, evenly spread over the second half of the run."""


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes in row-major order."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class Totals:
    """Dense and packed bytes by (kind of tensor, dtype)."""

    def __init__(self) -> None:
        self.dense: dict[tuple[str, str], int] = defaultdict(int)
        self.packed: dict[tuple[str, str], int] = defaultdict(int)
        self.exact = True

    def add(self, kind: str, tensor: Tensor) -> None:
        """Pack ``tensor`` in both dtypes, headers included, and check what comes back."""
        codec = make_compressor("lossless")
        for dtype in (torch.float32, torch.bfloat16):
            cast = tensor.detach().to(dtype)
            packet, _ = codec.compress(cast)
            back = codec.decompress(parse_packet(packet.header, bytes(packet.payload)))
            self.exact &= torch.equal(bits(back), bits(cast)) and back.stride() == cast.stride()
            key = (kind, str(dtype).removeprefix("torch."))
            self.dense[key] += cast.nbytes
            self.packed[key] += packet.wire_bytes

    def saved(self) -> dict[str, dict[str, float]]:
        """Saved share by kind and dtype, and over all kinds."""
        found: dict[str, dict[str, float]] = defaultdict(dict)
        for kind, dtype in self.dense:
            found[kind][dtype] = 1 - self.packed[kind, dtype] / self.dense[kind, dtype]
        for dtype in GOALS:
            of_dtype = [key for key in self.dense if key[1] == dtype]
            packed, dense = (sum(each[key] for key in of_dtype) for each in (self.packed, self.dense))
            found["all"][dtype] = 1 - packed / dense
        return dict(found)


def train(steps: int, seed: int, totals: Totals) -> float:
    """AdamW as in the example; returns the last step's loss."""
    torch.manual_seed(seed)
    module, source = model(), data().materialise(MICRO_BATCH)[0]
    field = source.spec.fields[0]
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    looked_at = {steps - 1 - i * max(1, steps // (2 * LOOKED_AT)) for i in range(LOOKED_AT)}
    crossing: list[Tensor] = []
    for block in module.blocks:
        block.register_forward_hook(lambda _, __, output: crossing.append(output))
    last = 0.0
    for step in range(steps):
        for micro in range(N_MICRO):
            crossing.clear()
            samples = sample_indices(source.spec, N_MICRO, step, micro)
            tokens = torch.from_numpy(np.array(take(source.arrays[field.blob], field, samples))).long()
            loss = module(tokens) / N_MICRO
            if step in looked_at:
                for value in crossing:
                    value.retain_grad()
            loss.backward()
            last = float(loss.detach()) * N_MICRO
            if step in looked_at:
                for value in crossing:
                    assert value.grad is not None
                    totals.add("activations", value)
                    totals.add("activation gradients", value.grad)
        if step in looked_at:
            for parameter in module.parameters():
                assert parameter.grad is not None
                totals.add("parameter gradients", parameter.grad)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return last


def main() -> int:
    """Train, pack, print; exit code 1 when a bit changed or a goal is missed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=4711)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    totals = Totals()
    loss = train(options.steps, options.seed, totals)
    saved = totals.saved()
    met = totals.exact and all(saved["all"][dtype] >= goal for dtype, goal in GOALS.items())
    for kind, shares in saved.items():
        sys.stdout.write(
            f"{kind:22} fp32 {shares['float32']:6.1%} saved   bf16 {shares['bfloat16']:6.1%} saved\n"
        )
    sys.stdout.write(
        f"bit-exact: {'yes' if totals.exact else 'NO'}; loss at step {options.steps}: {loss:.3f}\n"
    )
    if options.json:
        facts: dict[str, Any] = {"saved": saved, "exact": totals.exact, "goals": GOALS, "met": met}
        facts |= {"steps": options.steps, "seed": options.seed, "loss": loss}
        sys.stdout.write(json.dumps(facts) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    execute(main)
