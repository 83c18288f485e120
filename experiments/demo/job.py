"""The job of `atoll demo`: a small neural language model of bytes, in plain PyTorch.

    atoll submit job.py --steps 200 --watch
    atoll export JOB -o model.safetensors
    python job.py --load model.safetensors

The next byte of Python's own standard library, given the fifteen before it, by the model of Bengio et al.,
"A Neural Probabilistic Language Model" (2003). Nothing is downloaded, and the model knows nothing of Atoll.
Dims: B batch, T length, D width of an embedding, H hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll import ByteText, Job, Optimizer, Schedule, ScheduleKind, TrainingSpec
from atoll.data import Materialised, sample_indices, take

VOCABULARY = 256
LENGTH = 16  # bytes, the one to predict among them
WIDTH = 32
HIDDEN = 512
MICRO_BATCH = 64
N_MICRO = 4  # micro-batches a step
STEPS = 120
LEARNING_RATE = 3e-3
WARMUP_STEPS = 10
EVAL_BATCHES = 32
SEED = 4711


class ByteModel(nn.Module):
    """Returns the mean cross-entropy, in nats, of the last of LENGTH bytes given those before it."""

    def __init__(self, length: int = LENGTH, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.first = nn.Linear((length - 1) * width, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded_BTD = self.bytes(tokens[:, :-1])
        hidden_BH = F.gelu(self.first(embedded_BTD.flatten(1)))
        hidden_BH = hidden_BH + F.gelu(self.second(hidden_BH))
        return F.cross_entropy(self.head(hidden_BH), tokens[:, -1])


def model() -> ByteModel:
    """The model with its seeded initial weights."""
    torch.manual_seed(SEED)
    return ByteModel(LENGTH, WIDTH, HIDDEN)  # here, not as defaults: --set HIDDEN=1024 turns the constant


def data() -> ByteText:
    """Windows of LENGTH bytes; the last twentieth of the text is held out."""
    return ByteText(length=LENGTH, input="tokens", max_bytes=2_000_000, seed=SEED)


def job() -> Job:
    """Return the job that Atoll trains."""
    return Job(
        module=model(),
        example_inputs={"tokens": torch.zeros(MICRO_BATCH, LENGTH, dtype=torch.long)},
        data=data(),
        training=TrainingSpec(
            steps=STEPS,
            n_micro=N_MICRO,
            seed=SEED,
            optimizer=Optimizer(lr=LEARNING_RATE, weight_decay=0.01, clip_norm=1.0),
            schedule=Schedule(ScheduleKind.COSINE, warmup_steps=WARMUP_STEPS, final=0.1),
            eval_batches=EVAL_BATCHES,
        ),
        name="demo",
    )


def held_out() -> Materialised:
    """The text kept for evaluation, as the data source cuts it."""
    found = data().materialise(MICRO_BATCH)[1]
    assert found is not None  # noqa: S101 - ByteText holds a share out unless told otherwise
    return found


@torch.no_grad()
def held_out_loss(module: nn.Module, batches: int = EVAL_BATCHES) -> float:
    """Mean loss of the plain module over the micro-batches that Atoll evaluates on, nats a byte."""
    source = held_out()
    field = source.spec.fields[0]
    module.train(False)
    total = 0.0
    for micro in range(batches):
        samples = sample_indices(source.spec, batches, 0, micro)
        total += float(
            module(torch.from_numpy(np.array(take(source.arrays[field.blob], field, samples))).long())
        )
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
    if options.json:
        sys.stdout.write(json.dumps({"held_out_loss": loss, "unigram_entropy": entropy}) + "\n")
    else:
        sys.stdout.write(f"held-out loss {loss:.4f} nats a byte, unigram entropy {entropy:.4f}\n")


if __name__ == "__main__":
    main()
