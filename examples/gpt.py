"""A byte-level GPT on real text, in plain PyTorch: the job of `make demo`.

    atoll submit examples/gpt.py --steps 500 --watch
    atoll export JOB -o gpt.safetensors
    python examples/gpt.py --load gpt.safetensors

The text is the source code of the running Python's own standard library, so nothing is
downloaded. The model knows nothing of Atoll: ``GPT`` is an ordinary module with its loss inside.
Dims: B batch, T length, D width, V vocabulary, H heads.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll import ByteText, Job, Optimizer, ParamGroup, Schedule, ScheduleKind, TrainingSpec
from atoll.data import Materialised, sample_indices, take

# ---------------------------------------------------------------- knobs

VOCABULARY = 256
WIDTH = 256
LAYERS = 4
HEADS = 4
LENGTH = 64  # bytes of context
MICRO_BATCH = 2
N_MICRO = 8  # micro-batches a step
STEPS = 80
LEARNING_RATE = 1.5e-3
WARMUP_STEPS = 10
EVAL_BATCHES = 8
SEED = 4711


# ---------------------------------------------------------------- the model


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, length, width = x_BTD.shape
        q, k, v = self.qkv(self.norm_1(x_BTD)).split(width, dim=2)
        shape = (batch, length, self.heads, width // self.heads)
        attended = F.scaled_dot_product_attention(
            q.view(shape).transpose(1, 2),
            k.view(shape).transpose(1, 2),
            v.view(shape).transpose(1, 2),
            is_causal=True,
        )
        x_BTD = x_BTD + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        hidden: Tensor = self.down(F.gelu(self.up(self.norm_2(x_BTD))))
        return x_BTD + hidden


class GPT(nn.Module):
    """Returns the mean cross-entropy in nats a byte of the next byte given those before it."""

    def __init__(
        self, width: int = WIDTH, layers: int = LAYERS, heads: int = HEADS, length: int = LENGTH
    ) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(_initialise)
        for block in self.blocks:  # residual paths start small: GPT-2's 1/sqrt(2 layers)
            for name in ("out", "down"):
                nn.init.normal_(getattr(block, name).weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x_BTD = self.bytes(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(self.norm(x_BTD))
        return F.cross_entropy(logits_BTV[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


# ---------------------------------------------------------------- the job


def model() -> GPT:
    """The model with its seeded initial weights."""
    torch.manual_seed(SEED)
    return GPT(WIDTH, LAYERS, HEADS, LENGTH)  # here, not as defaults: --set LAYERS=8 turns the constant


def data() -> ByteText:
    """Windows of LENGTH bytes; the last twentieth of the text is held out."""
    return ByteText(length=LENGTH, input="tokens", max_bytes=8_000_000, seed=SEED)


def job() -> Job:
    """What Atoll trains."""
    return Job(
        module=model(),
        example_inputs={"tokens": torch.zeros(MICRO_BATCH, LENGTH, dtype=torch.long)},
        data=data(),
        training=TrainingSpec(
            steps=STEPS,
            n_micro=N_MICRO,
            seed=SEED,
            optimizer=Optimizer(
                lr=LEARNING_RATE,
                betas=(0.9, 0.95),
                weight_decay=0.1,
                clip_norm=1.0,
                groups=(ParamGroup(patterns=("*.bias", "*norm*", "positions.*"), weight_decay=0.0),),
            ),
            schedule=Schedule(ScheduleKind.COSINE, warmup_steps=WARMUP_STEPS, final=0.1),
            eval_batches=EVAL_BATCHES,
        ),
        name="gpt",
        notes={"parameters": sum(p.numel() for p in model().parameters())},
    )


# ---------------------------------------------------------------- evaluation without Atoll


def held_out() -> Materialised:
    """The text kept for evaluation, as the data source cuts it."""
    found = data().materialise(MICRO_BATCH)[1]
    assert found is not None
    return found


@torch.no_grad()
def held_out_loss(module: nn.Module, batches: int = EVAL_BATCHES) -> float:
    """Mean loss of the plain module over the micro-batches that Atoll evaluates on, nats a byte."""
    source = held_out()
    module.train(False)
    total = 0.0
    for micro in range(batches):
        samples = sample_indices(source.spec, batches, 0, micro)
        field = source.spec.fields[0]
        tokens = torch.from_numpy(np.array(take(source.arrays[field.blob], field, samples))).long()
        total += float(module(tokens))
    return total / batches


def unigram_entropy() -> float:
    """Entropy of the held-out text's single bytes, nats: what a model that ignores context reaches."""
    counts = np.bincount(held_out().arrays["text"], minlength=VOCABULARY)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def main() -> None:
    """Load exported weights into the plain module and evaluate it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--load", type=Path, help="weights that `atoll export` wrote; default: none")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    module = model()
    if options.load is not None:
        from safetensors.torch import load_file

        module.load_state_dict(load_file(options.load))
    loss, entropy = held_out_loss(module), unigram_entropy()
    facts = {"held_out_loss": loss, "unigram_entropy": entropy, "ratio": loss / entropy}
    if options.json:
        print(json.dumps(facts))
        return
    sys.stdout.write(
        f"held-out loss    {loss:.4f} nats a byte\n"
        f"unigram entropy  {entropy:.4f} nats a byte\n"
        f"ratio            {loss / entropy:.3f}\n"
    )


if __name__ == "__main__":
    main()
