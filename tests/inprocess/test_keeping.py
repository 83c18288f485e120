"""Models that people bring: activations in few bits or elsewhere, state in files, whatever the cut."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from atoll.job import Activations, Keeping, Optimizer, Place, TrainingSpec
from atoll.program import stage_programs
from benchmarks.oracle import Case, Run, case_of, difference, random_starts, run_local
from coordinator.planning.costs.memory import MemoryModel
from coordinator.planning.costs.traffic import Traffic
from tests.parameters import each_once

pytestmark = pytest.mark.usefixtures("one_thread")

TRAINING = TrainingSpec(steps=2, n_micro=2, seed=4, optimizer=Optimizer(lr=1e-3, weight_decay=0.01))
ELSEWHERE = {"saved_on": Place.DISK, "state_on": Place.DISK}


def tied_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=2, use_cache=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    wanted = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    return get_peft_model(tied_gpt2(), wanted)


def nf4_lora() -> nn.Module:
    from strategies.quantised_module import quantise_frozen

    return quantise_frozen(lora(), "nf4")


@cache
def case(name: str) -> Case:
    torch.manual_seed(6)
    module = {"tied gpt2": tied_gpt2, "lora": lora, "nf4 lora": nf4_lora}[name]()

    def batches(step: int) -> list[dict[str, Tensor]]:
        found = []
        for micro in range(TRAINING.n_micro):
            generator = torch.Generator().manual_seed(100 * step + micro)
            tokens = torch.randint(0, 128, (4, 32), generator=generator)
            found.append({"input_ids": tokens, "labels": tokens})
        return found

    return case_of(name, module, batches(0)[0], TRAINING, batches)


@cache
def plain(name: str) -> Run:
    """One stage that keeps everything where it is computed."""
    return run_local(case(name), (0,))


def kept(name: str, **changes: object) -> Case:
    found = case(name)
    return replace(found, training=replace(found.training, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tied gpt2", "lora"])
def test_what_lies_elsewhere_trains_the_same_bits_whatever_the_cut(name: str) -> None:
    assert difference(run_local(kept(name, **ELSEWHERE), (0,)), plain(name)) == 0.0
    starts = random_starts(case(name).dag, 3, random.Random(2))
    assert difference(run_local(kept(name, **ELSEWHERE), starts), plain(name)) == 0.0


@pytest.mark.parametrize(
    ("name", "activations"), each_once(["tied gpt2", "lora"], [Activations.INT8, Activations.INT4])
)
def test_few_bits_train_the_same_bits_whatever_the_cut_and_the_place(
    name: str, activations: Activations
) -> None:
    whole = run_local(kept(name, activations=activations), (0,))
    starts = random_starts(case(name).dag, 3, random.Random(3))
    assert difference(run_local(kept(name, activations=activations, **ELSEWHERE), starts), whole) == 0.0
    assert difference(plain(name), whole) > 0.0


def test_a_cut_within_a_weights_dequantisation_packs_no_part_of_that_weight() -> None:
    found = kept("nf4 lora", activations=Activations.INT8)
    halved = {b for low, high in found.dag.unsplittable for b in range(low + 1, high)}
    cuts = [
        cut
        for cut in sorted(set(range(1, len(found.dag.ops))) - halved)
        if any(value.standing for value in stage_programs(found.dag, (0, cut))[1].received)
    ]
    whole = run_local(found, (0,))
    for cut in random.Random(4).sample(cuts, 3):
        assert difference(run_local(found, (0, cut)), whole) == 0.0, cut


@pytest.mark.parametrize("name", ["tied gpt2", "lora"])
def test_a_plan_counts_less_for_each_form_and_the_sum_over_stages_knows_ties(name: str) -> None:
    dag, n = case(name).dag, len(case(name).dag.ops)

    def taken(keeping: Keeping) -> float:
        return MemoryModel(dag, TRAINING, Traffic(dag, TRAINING.optimizer), keeping).bytes(0, n, 2)

    exact = taken(Keeping())
    trained = sum(p.meta.nbytes for p in dag.parameters.values() if p.requires_grad)
    away = taken(Keeping(state_on=Place.DISK))
    assert 0.0 < exact - away <= 2 * trained
    assert taken(Keeping(activations=Activations.INT4)) < taken(Keeping(activations=Activations.INT8)) < exact
    assert taken(Keeping(saved_on=Place.DISK)) < exact
