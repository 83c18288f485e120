"""A Llama of 6.7 billion parameters, whose plan needs no weights: two sites of eight cards, say.

    pip install transformers
    atoll plan examples/llama_7b.py --fleet examples/fleets/two_sites.toml --replicas auto
    atoll submit examples/llama_7b.py --set FOLDER=llama-2-7b --watch

The module is on the meta device. A submit maps its tensors from a folder of safetensors.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from atoll import ByteText, Job, Optimizer, Precision, TrainingSpec

FOLDER = ""  # of the weights; "": for plans alone
LENGTH = 2048
MICRO_BATCH = 8
N_MICRO = 16
STEPS = 1000
SEED = 4711


def job() -> Job:
    """What Atoll trains."""
    config = LlamaConfig(use_cache=False, max_position_embeddings=LENGTH)  # by itself it is Llama 2's of 7B
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    if not FOLDER:
        model.to_empty(device="cpu")  # pages that nobody writes take no memory
    model.model.rotary_emb = LlamaRotaryEmbedding(config)  # its frequencies are in no checkpoint
    empty = torch.zeros(MICRO_BATCH, LENGTH, dtype=torch.long)
    return Job(
        module=model,
        example_inputs={"input_ids": empty, "labels": empty.clone()},
        data=ByteText(LENGTH, "input_ids", inputs_too={"labels": "input_ids"}, max_bytes=4_000_000),
        training=TrainingSpec(
            steps=STEPS,
            n_micro=N_MICRO,
            seed=SEED,
            optimizer=Optimizer(lr=2e-5),
            precision=Precision.BF16,
            eval_batches=0,
        ),
        name="llama-7b",
        weights=FOLDER or None,
    )
