"""Each of TrainingArguments is honoured or refused by its name."""

from __future__ import annotations

from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import BertConfig, BertForMaskedLM, TrainingArguments

from atoll import OptimizerName, Precision, Recompute
from atoll.errors import UsageError
from coordinator.hugging_face.arguments import (
    HERE,
    TRAINED,
    Length,
    check_arguments,
    order_of,
    training_of,
)

LENGTH = Length(steps=40, an_epoch=10)
REFUSED: dict[str, Any] = {
    "auto_find_batch_size": True,
    "average_tokens_across_devices": False,
    "eval_delay": 3,
    "eval_on_start": True,
    "full_determinism": True,
    "hub_model_id": "me/mine",
    "hub_strategy": "end",
    "ignore_data_skip": True,
    "label_smoothing_factor": 0.1,
    "lr_scheduler_kwargs": {"num_cycles": 2},
    "neftune_noise_alpha": 5.0,
    "optim": "adafactor",
    "optim_args": "momentum=0.9",
    "lr_scheduler_type": "polynomial",
    "push_to_hub": True,
    "save_total_limit": 2,
    "torch_compile": True,
    "train_sampling_strategy": "group_by_length",
}


def arguments(folder: Path, **given: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(folder), use_cpu=True, **given)


def spec(folder: Path, **given: Any) -> Any:
    return training_of(arguments(folder, **given), LENGTH, {"w"}, ["w", "b"], held_out=3)


def test_arguments_as_they_come_are_honoured(tmp_path: Path) -> None:
    check_arguments(arguments(tmp_path))
    check_arguments(transformers.Seq2SeqTrainingArguments(output_dir=str(tmp_path), use_cpu=True))


def test_the_tables_name_fields_that_there_are_each_once() -> None:
    known = {field.name for field in fields(TrainingArguments)}
    assert known >= TRAINED | HERE
    assert not TRAINED & HERE


@pytest.mark.parametrize("name", REFUSED)
def test_what_workers_would_not_do_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"do not honour these TrainingArguments: .*{name} = "):
        check_arguments(arguments(tmp_path, **{name: REFUSED[name]}))


def test_any_other_field_that_is_set_is_refused_by_name(tmp_path: Path) -> None:
    """Those that come with a newer transformers too."""
    for field in fields(TrainingArguments):
        if field.init and field.name not in TRAINED | HERE | {"accelerator_config"}:
            changed = arguments(tmp_path)
            object.__setattr__(changed, field.name, "set by somebody")
            with pytest.raises(UsageError, match=f"{field.name} = 'set by somebody'"):
                check_arguments(changed)
    changed = arguments(tmp_path, accelerator_config={"split_batches": True})
    with pytest.raises(UsageError, match="accelerator_config = an AcceleratorConfig"):
        check_arguments(changed)


def test_several_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"neftune_noise_alpha = 1.0; optim = 'lion_32bit' \(workers have"):
        check_arguments(arguments(tmp_path, neftune_noise_alpha=1.0, optim="lion_32bit"))


def test_what_workers_are_told(tmp_path: Path) -> None:
    found = spec(
        tmp_path, learning_rate=2e-4, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.99, adam_epsilon=1e-6,
        max_grad_norm=0.5, gradient_accumulation_steps=4, warmup_steps=0.1, seed=7, bf16=True,
        activation_checkpointing=True, eval_strategy="steps", eval_steps=5, save_steps=0.25,
    )  # fmt: skip
    optimizer = found.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.weight_decay) == (OptimizerName.ADAMW, 2e-4, 0.1)
    assert (optimizer.betas, optimizer.eps, optimizer.clip_norm) == ((0.8, 0.99), 1e-6, 0.5)
    assert (found.steps, found.n_micro, found.seed, found.precision) == (40, 4, 7, Precision.BF16)
    assert (found.schedule.warmup_steps, found.recompute) == (4, Recompute.FULL)
    assert (found.eval_every, found.eval_batches, found.checkpoint_every) == (5, 3, 10)


@pytest.mark.parametrize(
    ("given", "every"),
    [
        ({}, (0, 0)),
        ({"eval_strategy": "epoch", "save_strategy": "epoch"}, (10, 10)),
        ({"eval_strategy": "steps", "logging_steps": 6, "save_strategy": "no"}, (6, 0)),
    ],
)
def test_evaluations_and_checkpoints_come_as_asked(
    given: dict[str, Any], every: tuple[int, int], tmp_path: Path
) -> None:
    found = spec(tmp_path, **given)
    assert (found.eval_every, found.checkpoint_every) == every


@pytest.mark.parametrize("name", ["linear", "cosine", "constant", "constant_with_warmup"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_rates_are_those_of_the_same_arguments_in_transformers(
    name: str, warmup: int, tmp_path: Path
) -> None:
    given = arguments(
        tmp_path, lr_scheduler_type=name, warmup_steps=warmup, max_steps=LENGTH.steps, optim="sgd"
    )
    theirs = transformers.Trainer(BertForMaskedLM(BertConfig(hidden_size=12)), given)
    theirs.create_optimizer_and_scheduler(LENGTH.steps)
    assert theirs.optimizer is not None
    rates = []
    for _ in range(LENGTH.steps):
        rates.append(theirs.optimizer.param_groups[0]["lr"])
        theirs.optimizer.step()
        theirs.lr_scheduler.step()  # type: ignore[union-attr]
    ours = training_of(given, LENGTH, (), (), 0)
    assert [ours.learning_rate(step) for step in range(LENGTH.steps)] == pytest.approx(rates, abs=1e-15)


def test_weight_decay_is_of_the_parameters_that_transformers_decay(tmp_path: Path) -> None:
    model = BertForMaskedLM(BertConfig(hidden_size=12, num_hidden_layers=12, vocab_size=8))
    names = [name for name, _ in model.named_parameters()]
    given = arguments(tmp_path, weight_decay=0.1)
    theirs = transformers.Trainer(model, given)
    decayed = set(theirs.get_decay_parameter_names(model))
    ours = training_of(given, LENGTH, decayed, names, 0).optimizer
    [group] = ours.groups
    assert {name for name in names if ours.group_of(name) is None} == decayed & set(names)
    assert len(group.patterns) < 8 < len(names) - len(decayed)
    assert group.weight_decay == 0.0
    assert spec(tmp_path, weight_decay=0.0).optimizer.groups == ()


def test_a_name_that_a_wider_pattern_would_mix_up_stands_by_itself(tmp_path: Path) -> None:
    names = ["a.weight", "b.weight", "c.d[0]"]
    given = arguments(tmp_path, weight_decay=0.1)
    [group] = training_of(given, LENGTH, {"a.weight"}, names, 0).optimizer.groups
    assert [n for n in names if any(fnmatchcase(n, p) for p in group.patterns)] == ["b.weight", "c.d[0]"]


def test_the_order_of_samples_is_that_of_the_data_or_of_a_seed(tmp_path: Path) -> None:
    assert order_of(arguments(tmp_path, train_sampling_strategy="sequential")) is None
    assert order_of(arguments(tmp_path, seed=3)) == 3
    assert order_of(arguments(tmp_path, seed=3, data_seed=5)) == 5
