"""SALR: how near pruned weights with their adapter are, in how many bytes, and that they train to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from atoll.errors import UsageError
from atoll.job import Optimizer
from coordinator.client.export import Format, write_folder
from strategies.salr_module import salr
from tests.models import VOCABULARY, llama
from tests.people.loop import compare, job_of


def layer(d: int, k: int, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(d * k)
    return nn.Sequential(nn.Linear(k, d, bias=False).to(dtype).requires_grad_(False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("d", "k", "rank"), [(128, 128, 8), (128, 512, 16), (96, 40, 4), (64, 64, 64)])
def test_the_error_is_that_of_pruning_less_the_share_of_the_rank(
    d: int, k: int, rank: int, dtype: torch.dtype
) -> None:
    """papers/federated.md 7: per entry at most 1.02 (1 - r / min(d, k)) of pruning alone at 50 %."""
    whole = layer(d, k, dtype)[0].weight.detach().double()
    pruned = salr(layer(d, k, dtype), 0.5, 0)[0].weight.detach().double()
    found = salr(layer(d, k, dtype), 0.5, rank)[0].weight
    assert found.dtype is dtype
    alone, with_adapter = ((w - whole).square().mean() for w in (pruned, found.detach().double()))
    rounding = 0.0 if dtype is torch.float32 else 1e-5 * float(whole.square().mean())
    assert float(with_adapter) <= 1.02 * (1 - rank / min(d, k)) * float(alone) + rounding + 1e-12
    left_out = int(0.5 * d * k)
    assert int((pruned == 0).sum()) == left_out
    assert float(pruned[pruned != 0].abs().min()) >= float(whole[pruned == 0].abs().max())


def test_a_bitmap_and_half_of_the_entries_are_at_most_58_percent_of_16_bit_weights() -> None:
    made = salr(layer(256, 384, torch.float16), 0.5, 8)
    bitmap, kept, u, v = made[0].parametrizations.weight.parameters()
    dense = 2 * 256 * 384
    assert bitmap.nbytes + kept.nbytes <= 0.58 * dense
    held = sum(tensor.nbytes for tensor in (bitmap, kept, u, v))
    assert held == pytest.approx(dense * (1 / 16 + 0.5 + 8 * (256 + 384) / (256 * 384)))


def test_sizes_that_fill_no_byte_and_other_shares_come_back() -> None:
    for sparsity in (0.1, 0.9):
        whole = layer(5, 3)[0].weight
        found = salr(layer(5, 3), sparsity, 3)[0].weight
        assert torch.allclose(found, whole, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_adapters_on_a_pruned_base_train_as_in_a_plain_loop_however_cut(one_thread: None) -> None:
    def adapted() -> nn.Module:
        model: Any = get_peft_model(
            llama(layers=1).module, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
        )
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.02)
        return salr(model, 0.5, 4, "*layers.*")

    _train(adapted)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_dora_of_peft_trains_as_in_a_plain_loop_however_cut(one_thread: None) -> None:
    def adapted() -> nn.Module:
        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, use_dora=True)
        model: Any = get_peft_model(llama(layers=1).module, config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.02)
        assert any("lora_magnitude_vector" in name for name, _ in model.named_parameters())
        return model

    _train(adapted)


def _train(made: Callable[[], nn.Module]) -> None:
    ids = torch.randint(VOCABULARY, (16, 8), generator=torch.Generator().manual_seed(3))
    rows = {"input_ids": ids, "labels": ids}
    compare(lambda: job_of(made(), rows, optimizer=Optimizer(lr=0.01)), cuts=2)


def test_a_pruned_base_is_not_written_as_a_model_of_its_own(tmp_path: Path) -> None:
    model = llama(layers=1).module.requires_grad_(False)
    with pytest.raises(UsageError, match=r"quantise_frozen or salr.*--format peft"):
        write_folder(tmp_path / "model", salr(model, 0.5, 2), Format.HF)


@pytest.mark.parametrize(
    ("made", "sparsity", "rank", "words"),
    [
        (lambda: nn.Linear(8, 8), 0.5, 2, "get_peft_model first"),
        (lambda: layer(8, 8), 1.0, 2, "sparsity = 1.0"),
        (lambda: layer(8, 4), 0.5, 5, "rank 5 must be 0 to 4"),
        (lambda: nn.Linear(8, 8, device="meta").requires_grad_(False), 0.5, 2, "load it first"),
    ],
)
def test_what_cannot_be_pruned_is_refused(made: Any, sparsity: float, rank: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        salr(made(), sparsity, rank)
