"""Adapters of one model trained at two sites: exact steps inside a site, rare coded rounds between them.

    pip install peft
    atoll submit examples/two_sites.py --watch
    atoll export JOB -o adapter --format peft --job-file examples/two_sites.py

The base is frozen, so a round between sites sends the change of the adapters alone. Where no machine of a
site holds the model, a peer is a pipeline of the site's machines.
"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model

from atoll import ByteText, Job, Optimizer, Schedule, ScheduleKind, TrainingSpec
from examples.gpt import GPT

WIDTH = 256
LAYERS = 6
HEADS = 4
LENGTH = 64  # bytes of context
RANK = 8
MICRO_BATCH = 2
N_MICRO = 4  # micro-batches a step, of all sites together
STEPS = 400
LOCAL_STEPS = 20  # of a site between two rounds
EXCHANGE = "diloco:int4_block"
SEED = 4711


def job() -> Job:
    """What Atoll trains."""
    torch.manual_seed(SEED)
    base = GPT(WIDTH, LAYERS, HEADS, LENGTH)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["qkv", "out", "up", "down"])
    return Job(
        module=get_peft_model(base, config),
        example_inputs={"tokens": torch.zeros(MICRO_BATCH, LENGTH, dtype=torch.long)},
        data=ByteText(length=LENGTH, input="tokens", max_bytes=4_000_000),
        training=TrainingSpec(
            steps=STEPS,
            n_micro=N_MICRO,
            seed=SEED,
            optimizer=Optimizer(lr=2e-3),
            schedule=Schedule(ScheduleKind.COSINE, warmup_steps=STEPS // 20),
            exchange=EXCHANGE,
            local_steps=LOCAL_STEPS,
        ),
        name="two-sites",
    )
