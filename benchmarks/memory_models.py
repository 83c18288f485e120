"""Eight kinds of models that people bring, of 8 to 40 million parameters, as jobs for ``memory``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.data import Rows
from atoll.job import Job, Optimizer, TrainingSpec
from strategies.quantised_module import quantise_frozen

if TYPE_CHECKING:
    import transformers

VOCABULARY = 16_000
LENGTH = 64
MICRO_BATCH, MICROS, STEPS = 2, 4, 6
SAMPLES = 24


def gpt2() -> nn.Module:
    """24 million parameters, 6 of them in the tied head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCABULARY, n_positions=128, n_embd=384, n_layer=10, n_head=6)
    return GPT2LMHeadModel(config)


def _llama() -> transformers.LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=32_000, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def llama() -> nn.Module:
    """40 million parameters, 16 of them in the tied head."""
    return _llama()


def bert() -> nn.Module:
    """25 million parameters, 6 of them in the tied head."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=384, num_hidden_layers=10, num_attention_heads=6,
        intermediate_size=1536, max_position_embeddings=128, hidden_dropout_prob=0.1,
    )  # fmt: skip
    return BertForMaskedLM(config)


def lora() -> nn.Module:
    """The Llama, frozen, with adapters of rank 8."""
    from peft import LoraConfig, get_peft_model

    wanted = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    return get_peft_model(_llama(), wanted)


def lora_nf4() -> nn.Module:
    """The same on a base whose layers are in 4 bits; embedding and head, which are tied, are not."""
    return quantise_frozen(lora(), "nf4")


class Classifier(nn.Module):
    """Cross entropy of what a module says of images."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x), y)


class _Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(after) for _ in range(2))
        self.short = nn.Conv2d(before, after, 1, stride, bias=False) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        found = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(found + self.short(x))


def resnet() -> nn.Module:
    """ResNet-18's shape, 11 million parameters, on images of 64 x 64."""
    widths = (64, 64, 128, 256, 512)
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    for number, (before, after) in enumerate(pairwise(widths)):
        layers += [_Residual(before, after, 1 if number == 0 else 2), _Residual(after, after, 1)]
    return Classifier(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 100)))


def _twice(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU(),
        nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Denoiser of images with three levels: what skips the bottom crosses every cut there."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList(_twice(a, b) for a, b in pairwise([3, *sizes]))
        self.up = nn.ModuleList(_twice(a + b, a) for a, b in pairwise(sizes))
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        kept = []
        for number, block in enumerate(self.down):
            x = block(x if number == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        for number in reversed(range(len(self.up))):
            larger = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = self.up[number](torch.cat((kept[number], larger), 1))
        return F.mse_loss(self.out(x), y)


def unet() -> nn.Module:
    """Eight million parameters on images of 64 x 64."""
    return UNet()


class LstmText(nn.Module):
    """Next token by an LSTM of two layers."""

    def __init__(self, width: int = 640) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.body = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        found, _ = self.body(self.embedding(input_ids))
        return F.cross_entropy(self.head(found).flatten(0, 1), labels.flatten())


def lstm() -> nn.Module:
    """27 million parameters, head not tied."""
    return LstmText()


def vit() -> nn.Module:
    """A vision transformer of 18 million parameters on images of 64 x 64 in patches of 8."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=384, num_hidden_layers=10, num_attention_heads=6, intermediate_size=1536,
        image_size=64, patch_size=8,
    )  # fmt: skip
    config.num_labels = 100

    class Vit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = ViTForImageClassification(config)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.body(pixel_values=x).logits, y)

    return Vit()


def _text(vocabulary: int) -> Callable[[torch.Generator], dict[str, Tensor]]:
    def made(random: torch.Generator) -> dict[str, Tensor]:
        ids = torch.randint(vocabulary, (SAMPLES, LENGTH), generator=random)
        return {"input_ids": ids, "labels": ids.clone()}

    return made


def _images(random: torch.Generator) -> dict[str, Tensor]:
    x = torch.rand(SAMPLES, 3, 64, 64, generator=random)
    return {"x": x, "y": torch.randint(100, (SAMPLES,), generator=random)}


def _pairs(random: torch.Generator) -> dict[str, Tensor]:
    x = torch.rand(SAMPLES, 3, 64, 64, generator=random)
    return {"x": x, "y": x.clone()}


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Any, int]] = {
    "gpt2": (gpt2, _text(VOCABULARY), MICRO_BATCH),
    "llama": (llama, _text(32_000), MICRO_BATCH),
    "bert": (bert, _text(VOCABULARY), MICRO_BATCH),
    "resnet": (resnet, _images, 8),
    "unet": (unet, _pairs, 4),
    "lstm": (lstm, _text(VOCABULARY), MICRO_BATCH),
    "vit": (vit, _images, 8),
    "lora": (lora, _text(32_000), MICRO_BATCH),
}
BY_NAME = {**MODELS, "lora_nf4": (lora_nf4, _text(32_000), MICRO_BATCH)}  # what needs torchao is asked for


def model_job(name: str, seed: int) -> Job:
    """The job of a kind of model: a few steps with AdamW, stored in between and at the end, evaluated."""
    build, data, batch = BY_NAME[name]
    torch.manual_seed(seed)
    module = build()
    rows = data(torch.Generator().manual_seed(seed))
    held_out = {key: value[:batch] for key, value in rows.items()}
    example = {key: value[:batch].clone() for key, value in rows.items()}
    training = TrainingSpec(
        steps=STEPS, n_micro=MICROS, seed=seed, optimizer=Optimizer(lr=1e-4), eval_batches=1,
        checkpoint_every=2,
    )  # fmt: skip
    return Job(module, example, Rows(rows, held_out), training, name)
