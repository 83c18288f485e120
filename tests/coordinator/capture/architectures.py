"""Unmodified transformers of six more families, as small as their configurations allow.

Together they bring what ``tests.models`` has not: an encoder that a decoder attends to, relative
position buckets, patches, log-mel frames, sliding windows, scaled embeddings, norms of queries and
keys, and experts that a router chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.models import BATCH, LENGTH, VOCABULARY, Example, image_batch, of_module, token_batch

MEL_BINS = 8
FRAMES = 20  # of the spectrogram; the encoder's convolutions halve them
DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": LENGTH,
    "use_cache": False,
}
SPECIAL_TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _spectrogram_batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_features": torch.randn(BATCH, MEL_BINS, FRAMES, generator=generator),
        "labels": torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator),
    }


def t5(dropout: float = 0.0) -> Example:
    """T5: encoder and decoder share the embedding; the decoder's inputs are the labels, shifted."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(  # type: ignore[call-arg] # a keyword of every configuration
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_decoder_layers=1,
        num_heads=2,
        dropout_rate=dropout,
        pad_token_id=0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return of_module("t5", T5ForConditionalGeneration(config), token_batch)


def vit(dropout: float = 0.0) -> Example:
    """ViT for image classification: patches by a strided convolution, a class token in front."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    config.num_labels = 10
    return of_module("vit", ViTForImageClassification(config), image_batch)


def whisper(dropout: float = 0.0) -> Example:
    """Whisper: convolutions over log-mel frames, an encoder, and a decoder that attends to it."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=MEL_BINS,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=FRAMES // 2,
        max_target_positions=LENGTH,
        dropout=dropout,
        attention_dropout=dropout,
        activation_dropout=dropout,
        decoder_start_token_id=3,
        use_cache=False,
        **SPECIAL_TOKENS,
    )
    return of_module("whisper", WhisperForConditionalGeneration(config), _spectrogram_batch)


def gemma(dropout: float = 0.0) -> Example:
    """Gemma 3: a layer with a sliding window and one without, each with rotary tables of its own."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    layers = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        **{**DECODER, "num_hidden_layers": len(layers)},
        **SPECIAL_TOKENS,
        attention_dropout=dropout,
        layer_types=layers,
        sliding_window=4,
    )
    return of_module("gemma", Gemma3ForCausalLM(config), token_batch)


def qwen(dropout: float = 0.0, attention: str = "sdpa") -> Example:
    """Qwen 3: queries and keys are normalised by head; attention is computed as ``attention`` says."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(  # type: ignore[call-arg] # a keyword of every configuration
        **DECODER, **SPECIAL_TOKENS, attention_dropout=dropout, attn_implementation=attention
    )
    return of_module("qwen", Qwen3ForCausalLM(config), token_batch)


def mixtral(dropout: float = 0.0, experts: str | None = None) -> Example:
    """Mixtral: two of four experts a token, computed as ``experts`` says; None: transformers' default."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(  # type: ignore[call-arg] # a keyword of every configuration
        **DECODER,
        **SPECIAL_TOKENS,
        attention_dropout=dropout,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation=experts,
    )
    return of_module("mixtral", MixtralForCausalLM(config), token_batch)


ARCHITECTURES: dict[str, Callable[..., Example]] = {
    "t5": t5,
    "vit": vit,
    "whisper": whisper,
    "gemma": gemma,
    "qwen": qwen,
    "mixtral": mixtral,
}
