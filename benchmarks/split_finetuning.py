"""What split fine-tuning costs in loss: a GPT that knows Python learns C++, uncut and through few numbers.

The byte-level GPT of ``examples/gpt.py`` is trained on the sources of Python's library, then fine-tuned on
the C++ headers that come with torch. Every variant begins with the same weights and sees the same windows:
the model as it is, and with ``split_finetune`` at its last or a middle block, of each rank, without and with
the residual link, which crosses dense or through a link's codec, both ways. The loss is that of held-out
headers, before the first step and at the end.

  python -m benchmarks.split_finetuning --json
  python -m benchmarks.split_finetuning --only "residual coded"
  python -m benchmarks.split_finetuning --seed 3 --seeds 1 --ranks 4,8,32
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from atoll import ByteText
from benchmarks.harness import conclude, execute, machine, parser
from benchmarks.reconstruction import windows
from compressors import make_compressor
from examples.gpt import GPT
from strategies.split_finetune_module import split_finetune

if TYPE_CHECKING:
    from compressors.base import Compressor

MAX_BYTES = 4_000_000  # of each language
CODEC, RATIOS = "eden", (8.0, 16.0)  # of a residual that is kept


@dataclass(frozen=True, slots=True)
class Setup:
    """Sizes of the model and of both trainings."""

    width: int = 128
    layers: int = 4
    heads: int = 4
    length: int = 64
    batch: int = 16
    steps: int = 800
    learning_rate: float = 2e-3
    tuning_steps: int = 300
    tuning_rate: float = 1e-3
    held_out: int = 512  # windows


@dataclass(frozen=True, slots=True)
class Variant:
    """Where the model is narrow and how; rank 0: nowhere."""

    rank: int = 0
    block: int = 0
    residual: bool = False
    ratio: float = 1.0  # times fewer bytes of the residual, by ``CODEC``

    def of(self, module: GPT) -> GPT:
        """Return a copy of ``module`` that is narrow there."""
        found = copy.deepcopy(module)
        if not self.rank:
            return found
        split_finetune(found, f"blocks.{self.block}", self.rank, residual=self.residual)
        if self.ratio > 1.0:
            code_residual(found.blocks[self.block], make_compressor(CODEC, self.ratio))
        return found

    def bytes_a_token(self, width: int) -> float:
        """What crosses, each way."""
        return 4.0 * (self.rank + width * self.residual / self.ratio if self.rank else width)

    def __str__(self) -> str:
        kept = ", residual kept" if self.residual else ""
        kept = f", residual coded {self.ratio:g} times by {CODEC}" if self.ratio > 1.0 else kept
        return f"rank {self.rank} at block {self.block}{kept}" if self.rank else "uncut"


class Crossing(torch.autograd.Function):
    """A tensor as the other end of a link reads it, and its gradient on the way back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, codec: Compressor, seeds: Iterator[int]) -> Tensor:
        ctx.codec, ctx.seeds = codec, seeds
        return codec.decompress(codec.compress(tensor, seed=next(seeds))[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        packet, _ = ctx.codec.compress(gradient, seed=next(ctx.seeds))
        return ctx.codec.decompress(packet), None, None


def code_residual(block: nn.Module, codec: Compressor) -> None:
    """Let the residual of ``block``'s FFN go through ``codec``, forwards and backwards."""
    parts: dict[str, Tensor] = {}
    seeds = itertools.count()  # a packet's each, as on a link

    def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        parts["residual"] = args[0]

    def keep_result(module: nn.Module, args: Any, out: Tensor) -> None:
        parts["result"] = out

    def summed(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return Crossing.apply(parts.pop("residual"), codec, seeds) + parts.pop("result")  # type: ignore[no-any-return,no-untyped-call]

    block.get_submodule("norm_2").register_forward_pre_hook(keep)
    block.get_submodule("down").register_forward_hook(keep_result)
    block.register_forward_hook(summed)


def variants(setup: Setup, ranks: list[int]) -> list[Variant]:
    """Return what is compared: all ranks at the last block, the first also otherwise."""
    last, middle = setup.layers - 1, setup.layers // 2 - 1
    narrow = [Variant(rank, last) for rank in ranks]
    kept = [Variant(ranks[0], last, residual=True, ratio=ratio) for ratio in (1.0, *RATIOS)]
    return [Variant(), *narrow, *kept, Variant(ranks[0], middle)]


def headers() -> bytes:
    """Return C++ headers of torch in a fixed (shuffled) order."""
    root = Path(torch.__file__).parent / "include"
    files = sorted(root.rglob("*.h"))
    random.Random(0).shuffle(files)
    return b"".join(path.read_bytes() for path in files)[:MAX_BYTES]


def texts(setup: Setup, text: bytes | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes that are trained on and those held out; None: the sources of Python's library."""
    trained, held = ByteText(length=setup.length, text=text, max_bytes=MAX_BYTES).materialise(1)
    assert held is not None
    return trained.arrays["text"], held.arrays["text"]


def train(module: GPT, batches: Iterator[Tensor], steps: int, rate: float) -> None:
    """Take that many steps of AdamW, the rate falling to zero by a cosine behind a warm-up of a tenth."""
    optimizer = torch.optim.AdamW(module.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.1)
    warm = max(1, steps // 10)
    ups = [(step + 1) / warm for step in range(warm)]
    downs = [0.5 + 0.5 * float(np.cos(np.pi * step / (steps - warm))) for step in range(steps - warm)]
    for share in (*ups, *downs):
        optimizer.param_groups[0]["lr"] = rate * share
        optimizer.zero_grad()
        module(next(batches)).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()


def drawn(setup: Setup, text: np.ndarray, seed: int) -> Iterator[Tensor]:
    """Yield batches of windows, drawn by ``seed``."""
    draw = np.random.default_rng(seed)
    while True:
        yield windows(text, setup.batch, setup.length, draw)


@torch.no_grad()
def held_out_loss(setup: Setup, module: GPT, text: np.ndarray) -> float:
    """Return the mean loss of the same windows whatever the seed, nats a byte."""
    draw = np.random.default_rng(0)
    batches = setup.held_out // setup.batch
    return statistics.fmean(
        float(module(windows(text, setup.batch, setup.length, draw))) for _ in range(batches)
    )


def compare(setup: Setup, ranks: list[int], seed: int, only: str = "") -> list[dict[str, Any]]:
    """Train once, fine-tune each variant, and return a row for each."""
    torch.manual_seed(seed)
    module = GPT(setup.width, setup.layers, setup.heads, setup.length)
    train(module, drawn(setup, texts(setup, None)[0], seed), setup.steps, setup.learning_rate)
    text, held = texts(setup, headers())
    found = []
    for variant in variants(setup, ranks):
        if variant.rank and only not in str(variant):
            continue
        tuned = variant.of(module)
        before = held_out_loss(setup, tuned, held)
        train(tuned, drawn(setup, text, seed + 1), setup.tuning_steps, setup.tuning_rate)
        crossing = variant.bytes_a_token(setup.width)
        row = {"seed": seed, "variant": str(variant), "bytes_a_token": crossing, "before": before}
        found.append({**row, "loss": held_out_loss(setup, tuned, held)})
        print(f"seed {seed} {variant}: {found[-1]['loss']:.4f}", flush=True)
    return found


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return by variant the means over seeds, and by how much each seed's loss is above the uncut model's."""
    uncut = {row["seed"]: row["loss"] for row in rows if row["variant"] == "uncut"}
    found = []
    for name in dict.fromkeys(row["variant"] for row in rows):
        mine = [row for row in rows if row["variant"] == name]
        means = {key: statistics.fmean(row[key] for row in mine) for key in ("before", "loss")}
        above = [row["loss"] / uncut[row["seed"]] - 1.0 for row in mine]
        found.append({"variant": name, "bytes_a_token": mine[0]["bytes_a_token"], **means, "above": above})
    return found


def options() -> argparse.ArgumentParser:
    """The command line."""
    made = parser(__doc__)
    made.add_argument("--seeds", type=int, default=3, help="so many, from --seed on")
    made.add_argument("--only", default="", help="variants whose name has this, beside the uncut one")
    made.add_argument("--ranks", default="8,16", help="at the last block; the first also elsewhere")
    return made


def main() -> int:
    """Print a line a variant and, with --json, one object."""
    args = options().parse_args()
    setup, ranks = Setup(), [int(rank) for rank in args.ranks.split(",")]
    seeds = range(args.seed, args.seed + args.seeds)
    rows = [row for seed in seeds for row in compare(setup, ranks, seed, args.only)]
    found = summary(rows)
    for one in found:
        above = ", ".join(f"{share:+.1%}" for share in one["above"])
        print(
            f"{one['variant']}: {one['bytes_a_token']:g} bytes a token, held-out loss "
            f"{one['before']:.3f} before, "
            f"{one['loss']:.3f} after {setup.tuning_steps} steps (by seed {above})"
        )
    print(f"machine {machine()}")
    return conclude({"seed": args.seed, "rows": rows, "summary": found}, args.json)


if __name__ == "__main__":
    execute(main)
