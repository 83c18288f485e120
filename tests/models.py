"""Small models that the tests train: unmodified transformers, and two modules of our own.

Each builder is seeded and returns an ``Example``: the module with its loss inside, inputs at
micro-batch size, and ``make_batch(seed)`` for further micro-batches of the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 61
BATCH = 2
LENGTH = 12


@dataclass(frozen=True)
class Example:
    """A module, its inputs by argument name, and further batches of the same shapes."""

    name: str
    module: nn.Module
    example_inputs: Mapping[str, Tensor]
    make_batch: Callable[[int], dict[str, Tensor]]


def of_module(name: str, module: nn.Module, make_batch: Callable[[int], dict[str, Tensor]]) -> Example:
    """``module`` with its first batch as example inputs."""
    return Example(name, module, make_batch(0), make_batch)


def token_batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def _masked_batch(seed: int) -> dict[str, Tensor]:
    batch = token_batch(seed)
    return {**batch, "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long)}


def image_batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(4, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 10, (4,), generator=generator),
    }


def _vector_batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(8, 16, generator=generator),
        "target": torch.randint(0, 10, (8,), generator=generator),
    }


def gpt2(dropout: float = 0.0, layers: int = 2) -> Example:
    """GPT-2 with its head tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=layers,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return of_module("gpt2", GPT2LMHeadModel(config), token_batch)


def llama(dropout: float = 0.0, layers: int = 2) -> Example:
    """Llama with grouped-query attention and rotary tables."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        attention_dropout=dropout,
        use_cache=False,
    )
    return of_module("llama", LlamaForCausalLM(config), token_batch)


def bert(dropout: float = 0.0, layers: int = 2) -> Example:
    """BERT with a masked-language-model head, tied, and an attention mask among its inputs."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return of_module("bert", BertForMaskedLM(config), _masked_batch)


def resnet(dropout: float = 0.0) -> Example:
    """ResNet: convolutions, residuals added in place, batch-norm buffers; it has no dropout."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    config.num_labels = 10
    return of_module("resnet", ResNetForImageClassification(config), image_batch)


class Branches(nn.Module):
    """Two branches that meet, a skip over two thirds, dropout, batch-norm and tied weights."""

    def __init__(self, width: int = 16, classes: int = 10, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.left = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU())
        self.right = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh())
        self.dropout = nn.Dropout(dropout)
        self.middle = nn.Linear(width, width)
        self.tied = nn.Linear(width, width)
        self.tied.weight = self.stem.weight
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        skip = self.stem(x)
        met = self.left(skip) + self.right(skip)
        hidden = self.dropout(F.relu(self.middle(met)))
        return F.cross_entropy(self.head(self.tied(hidden) + skip), target)


def branches(dropout: float = 0.0) -> Example:
    torch.manual_seed(0)
    return of_module("branches", Branches(dropout=dropout), _vector_batch)


class Mlp(nn.Module):
    """The plainest model: linear layers with a nonlinearity between them."""

    def __init__(self, width: int = 16, depth: int = 4, classes: int = 10, dropout: float = 0.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(x)), target)


def mlp(dropout: float = 0.0, depth: int = 4) -> Example:
    torch.manual_seed(0)
    return of_module("mlp", Mlp(depth=depth, dropout=dropout), _vector_batch)


MODELS: dict[str, Callable[..., Example]] = {
    "mlp": mlp,
    "branches": branches,
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "resnet": resnet,
}
