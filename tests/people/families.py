"""Small models of families that people bring: of transformers by their configuration, and peft's methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn

Rows = dict[str, Tensor]
Make = Callable[[], nn.Module]
N, LENGTH, VOCABULARY, CLASSES = 24, 12, 32, 3

_IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}
_CAUSAL: dict[str, Any] = {**_SIZES, **_IDS, "num_key_value_heads": 1, "use_cache": False}
_EXPERTS: dict[str, Any] = {**_CAUSAL, "num_experts_per_tok": 2}
_BOTH: dict[str, Any] = {
    **_IDS,
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "decoder_start_token_id": 2,
    "use_cache": False,
}
_LABELS: dict[str, Any] = {"num_labels": CLASSES}
_PICTURES: dict[str, Any] = {**_LABELS, "image_size": 32, "patch_size": 8}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def language() -> Rows:
    """Tokens, each its own label."""
    tokens = torch.randint(3, VOCABULARY, (N, LENGTH), generator=_generator())
    return {"input_ids": tokens, "labels": tokens.clone()}


def padded() -> Rows:
    """The same, half of the rows padded."""
    found = language()
    mask = torch.ones_like(found["input_ids"])
    mask[::2, -3:] = 0
    return {**found, "attention_mask": mask}


def classes() -> Rows:
    """Tokens, a class for each row."""
    return {**language(), "labels": torch.randint(0, CLASSES, (N,), generator=_generator())}


def pictures() -> Rows:
    pixels = torch.randn(N, 3, 32, 32, generator=_generator())
    return {"pixel_values": pixels, "labels": torch.randint(0, CLASSES, (N,), generator=_generator())}


def sounds() -> Rows:
    spectra = torch.randn(N, 8, 40, generator=_generator())
    return {
        "input_features": spectra,
        "labels": torch.randint(3, VOCABULARY, (N, 6), generator=_generator()),
    }


def waves() -> Rows:
    return {
        "input_values": torch.randn(N, 400, generator=_generator()),
        "labels": torch.randint(0, CLASSES, (N,), generator=_generator()),
    }


def series() -> Rows:
    drawn = torch.randn(N, 20, 2, generator=_generator())
    return {"past_values": drawn[:, :16], "future_values": drawn[:, 16:]}


def of(kind: str, head: str, **settings: Any) -> Make:
    """Return how to build ``kind``'s model with this head, without dropout: its draws follow the plan's seed,
    not those of a plain loop."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        configuration = getattr(transformers, f"{kind}Config")(**settings)
        for name, value in list(vars(configuration).items()):
            if "drop" in name and isinstance(value, float):
                setattr(configuration, name, 0.0)
        found: nn.Module = getattr(transformers, f"{kind.removesuffix('Text')}{head}")(configuration)
        return found

    return make


class ImagesAndTexts(nn.Module):
    """CLIP, which returns its loss where it is asked for it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        picture = {**sizes, "image_size": 32, "patch_size": 8, "projection_dim": 8}
        text = {**_SIZES, **_IDS, "projection_dim": 8}
        self.clip = transformers.CLIPModel(
            transformers.CLIPConfig(text_config=text, vision_config=picture, projection_dim=8)
        )

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Any:
        return self.clip(input_ids=input_ids, pixel_values=pixel_values, return_loss=True)


def images_and_texts() -> Rows:
    return {"input_ids": language()["input_ids"], "pixel_values": pictures()["pixel_values"]}


LM, MASKED, ROWS = "ForCausalLM", "ForMaskedLM", "ForSequenceClassification"
GENERATES, PICTURES = "ForConditionalGeneration", "ForImageClassification"

FAMILIES: dict[str, tuple[Make, Callable[[], Rows]]] = {
    "T5": (
        of(
            "T5",
            GENERATES,
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
            use_cache=False,
        ),
        language,
    ),
    "BART": (of("Bart", GENERATES, **_BOTH), language),
    "Pegasus": (of("Pegasus", GENERATES, **_BOTH), language),
    "RoBERTa": (of("Roberta", MASKED, **_SIZES), padded),
    "DistilBERT": (
        of(
            "DistilBert", ROWS, vocab_size=VOCABULARY, dim=16, n_layers=1, n_heads=2, hidden_dim=32, **_LABELS
        ),
        classes,
    ),
    "ALBERT": (of("Albert", MASKED, embedding_size=8, **_SIZES), padded),
    "ELECTRA": (of("Electra", ROWS, embedding_size=8, **_LABELS, **_SIZES), classes),
    "ModernBERT": (
        of(
            "ModernBert",
            MASKED,
            cls_token_id=1,
            sep_token_id=2,
            global_attn_every_n_layers=2,
            local_attention=4,
            **_IDS,
            **_SIZES,
        ),
        padded,
    ),
    "XLNet": (
        of(
            "XLNet",
            ROWS,
            vocab_size=VOCABULARY,
            d_model=16,
            n_layer=1,
            n_head=2,
            d_inner=32,
            pad_token_id=0,
            **_LABELS,
        ),
        classes,
    ),
    "ESM": (of("Esm", MASKED, pad_token_id=0, mask_token_id=1, **_SIZES), padded),
    "Gemma 2": (of("Gemma2", LM, head_dim=8, sliding_window=4, **_CAUSAL), language),
    "Gemma 3": (of("Gemma3Text", LM, head_dim=8, sliding_window=4, **_CAUSAL), language),
    "Qwen 2, tied": (of("Qwen2", LM, tie_word_embeddings=True, **_CAUSAL), language),
    "Qwen 3": (of("Qwen3", LM, head_dim=8, **_CAUSAL), padded),
    "Mistral": (of("Mistral", LM, sliding_window=4, **_CAUSAL), language),
    "Phi 3": (of("Phi3", LM, **_CAUSAL), language),
    "SmolLM 3": (of("SmolLM3", LM, **_CAUSAL), language),
    "OLMo 2": (of("Olmo2", LM, **_CAUSAL), language),
    "Granite": (of("Granite", LM, **_CAUSAL), language),
    "GPT-NeoX": (of("GPTNeoX", LM, use_cache=False, **_IDS, **_SIZES), language),
    "GPT-Neo": (
        of(
            "GPTNeo",
            LM,
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_layers=2,
            num_heads=2,
            window_size=4,
            attention_types=[[["global", "local"], 1]],
            max_position_embeddings=32,
            use_cache=False,
        ),
        language,
    ),
    "GPT-J": (
        of(
            "GPTJ",
            LM,
            vocab_size=VOCABULARY,
            n_embd=16,
            n_layer=1,
            n_head=2,
            rotary_dim=4,
            n_positions=32,
            use_cache=False,
        ),
        language,
    ),
    "OPT": (
        of(
            "OPT",
            LM,
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            ffn_dim=32,
            max_position_embeddings=32,
            word_embed_proj_dim=16,
            use_cache=False,
            **_IDS,
        ),
        padded,
    ),
    "Falcon": (
        of(
            "Falcon",
            LM,
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            use_cache=False,
            **_IDS,
        ),
        language,
    ),
    "Mamba": (
        of(
            "Mamba",
            LM,
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=1,
            state_size=4,
            use_cache=False,
            **_IDS,
        ),
        language,
    ),
    "Mamba 2": (
        of(
            "Mamba2",
            LM,
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_heads=4,
            head_dim=8,
            state_size=4,
            n_groups=1,
            num_hidden_layers=1,
            chunk_size=4,
            use_cache=False,
            **_IDS,
        ),
        language,
    ),
    "Mixtral": (of("Mixtral", LM, num_local_experts=4, **_EXPERTS), language),
    "Qwen 3 MoE": (
        of("Qwen3Moe", LM, head_dim=8, num_experts=4, moe_intermediate_size=16, **_EXPERTS),
        language,
    ),
    "GPT-OSS": (of("GptOss", LM, head_dim=8, num_local_experts=4, sliding_window=4, **_EXPERTS), language),
    "DeepSeek 3": (
        of(
            "DeepseekV3",
            LM,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
            moe_intermediate_size=16,
            first_k_dense_replace=1,
            **{**_EXPERTS, "num_key_value_heads": 2},
        ),
        language,
    ),
    "ViT": (
        of(
            "ViT",
            PICTURES,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            **_PICTURES,
        ),
        pictures,
    ),
    "DINOv2": (
        of("Dinov2", PICTURES, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, **_PICTURES),
        pictures,
    ),
    "Swin": (
        of(
            "Swin",
            PICTURES,
            embed_dim=8,
            depths=[1, 1],
            num_heads=[2, 2],
            window_size=4,
            **{**_PICTURES, "patch_size": 4},
        ),
        pictures,
    ),
    "ConvNeXt": (
        of("ConvNext", PICTURES, image_size=32, hidden_sizes=[8, 8], depths=[1, 1], num_stages=2, **_LABELS),
        pictures,
    ),
    "ResNet": (
        of("ResNet", PICTURES, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], **_LABELS),
        pictures,
    ),
    "MobileNet 2": (of("MobileNetV2", PICTURES, depth_multiplier=0.25, image_size=32, **_LABELS), pictures),
    "SegFormer": (
        of(
            "Segformer",
            PICTURES,
            num_encoder_blocks=2,
            depths=[1, 1],
            hidden_sizes=[8, 16],
            sr_ratios=[2, 1],
            num_attention_heads=[1, 2],
            patch_sizes=[7, 3],
            strides=[4, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=8,
            **_LABELS,
        ),
        pictures,
    ),
    "CLIP": (ImagesAndTexts, images_and_texts),
    "Whisper": (
        of("Whisper", GENERATES, num_mel_bins=8, max_source_positions=20, max_target_positions=16, **_BOTH),
        sounds,
    ),
    "wav2vec 2": (
        of(
            "Wav2Vec2",
            ROWS,
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            conv_dim=(8, 8),
            conv_stride=(5, 2),
            conv_kernel=(10, 3),
            classifier_proj_size=8,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            apply_spec_augment=False,
            **_LABELS,
        ),
        waves,
    ),
    "PatchTST": (
        of(
            "PatchTST",
            "ForPrediction",
            num_input_channels=2,
            context_length=16,
            patch_length=4,
            patch_stride=4,
            prediction_length=4,
            d_model=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            ffn_dim=32,
        ),
        series,
    ),
}


def adapted(method: str, tied: bool = False, **settings: Any) -> Make:
    """Return how to put peft's ``method`` on a small Llama. Factors that begin at zero begin a little beside,
    so that a gradient reaches every one."""

    def make() -> nn.Module:
        base = of("Llama", LM, attention_bias=True, tie_word_embeddings=tied, **_CAUSAL)()
        wanted = getattr(peft, f"{method}Config")(task_type="CAUSAL_LM", **settings)
        module: nn.Module = peft.get_peft_model(base, wanted)  # type: ignore[arg-type]
        generator = _generator()
        for parameter in module.parameters():
            if parameter.requires_grad and not parameter.detach().any():
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
        return module

    return make


_TWO: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
ADAPTERS: dict[str, Make] = {
    "LoRA of all linears, tied head": adapted("Lora", tied=True, r=2, target_modules="all-linear"),
    "LoRA and a whole head": adapted("Lora", modules_to_save=["lm_head"], **_TWO),
    "LoRA of the embedding": adapted("Lora", r=2, target_modules=["embed_tokens", "q_proj"]),
    "rsLoRA with biases": adapted("Lora", use_rslora=True, bias="lora_only", **_TWO),
    "DoRA": adapted("Lora", use_dora=True, **_TWO),
    "AdaLoRA": adapted(
        "AdaLora", total_step=10, init_r=3, target_r=2, tinit=1, tfinal=1, target_modules=["q_proj", "v_proj"]
    ),
    "IA3": adapted(
        "IA3", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "prompt tuning": adapted("PromptTuning", num_virtual_tokens=3),
    "prefix tuning": adapted("PrefixTuning", num_virtual_tokens=3),
    "P-tuning": adapted("PromptEncoder", num_virtual_tokens=3, encoder_hidden_size=8),
    "VeRA": adapted("Vera", **_TWO),
    "OFT": adapted("OFT", oft_block_size=0, **_TWO),
    "BOFT": adapted("BOFT", boft_block_size=4, target_modules=["q_proj", "v_proj"]),
    "FourierFT": adapted("FourierFT", n_frequency=4, target_modules=["q_proj", "v_proj"]),
    "only norms": adapted("LNTuning", target_modules=["input_layernorm"]),
    "selected tokens, tied head": adapted("TrainableTokens", tied=True, token_indices=[1, 2]),
}
