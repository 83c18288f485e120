"""An unmodified BERT from `transformers`, small, learning to predict masked bytes of real text.

pip install transformers
atoll ops examples/bert_tiny.py
atoll submit examples/bert_tiny.py --watch
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import BertConfig, BertForMaskedLM

from atoll import Job, Optimizer, ParamGroup, Rows, Schedule, ScheduleKind, TrainingSpec
from atoll.data import standard_library_text

LENGTH = 64
MICRO_BATCH = 8
N_MICRO = 4
STEPS = 200
SAMPLES = 4096
HELD_OUT = 256
MASK = 256  # a token of its own behind the 256 bytes
MASKED_SHARE = 0.15
IGNORED = -100  # what the loss passes over
SEED = 4711


def rows() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Windows of text with a seeded share of their bytes masked, and the labels of those bytes."""
    text = np.frombuffer(standard_library_text(SAMPLES * LENGTH), dtype=np.uint8).astype(np.int64)
    labels = torch.from_numpy(text[: len(text) // LENGTH * LENGTH].reshape(-1, LENGTH).copy())
    masked = torch.rand(labels.shape, generator=torch.Generator().manual_seed(SEED)) < MASKED_SHARE
    inputs = {
        "input_ids": labels.masked_fill(masked, MASK),
        "labels": labels.masked_fill(~masked, IGNORED),
    }
    split = len(labels) - HELD_OUT
    return {n: v[:split] for n, v in inputs.items()}, {n: v[split:] for n, v in inputs.items()}


def job() -> Job:
    """What Atoll trains."""
    torch.manual_seed(SEED)
    config = BertConfig(
        vocab_size=MASK + 1,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=LENGTH,
    )
    train, held_out = rows()
    return Job(
        module=BertForMaskedLM(config),
        example_inputs={name: value[:MICRO_BATCH] for name, value in train.items()},
        data=Rows(train, held_out, seed=SEED),
        training=TrainingSpec(
            steps=STEPS,
            n_micro=N_MICRO,
            seed=SEED,
            optimizer=Optimizer(
                lr=5e-4,
                weight_decay=0.01,
                clip_norm=1.0,
                groups=(ParamGroup(("*.bias", "*LayerNorm*"), weight_decay=0.0),),
            ),
            schedule=Schedule(ScheduleKind.COSINE, warmup_steps=20),
            eval_batches=HELD_OUT // MICRO_BATCH,
        ),
        name="bert-tiny",
    )
