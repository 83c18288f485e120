"""TrainingArguments of transformers as a TrainingSpec; whatever workers would not do is refused by name.

A field is honoured by workers (``TRAINED``), or by transformers' own code on the owner's machine (``HERE``).
Every other field has to be at its default. Figures that workers take are checked where they are declared.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from atoll.errors import UsageError
from atoll.fields import described
from atoll.job import (
    Optimizer,
    OptimizerName,
    ParamGroup,
    Precision,
    Recompute,
    Schedule,
    ScheduleKind,
    TrainingSpec,
)

if TYPE_CHECKING:
    from transformers import TrainingArguments

TRAINED = frozenset({
    "activation_checkpointing", "adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "data_seed",
    "dataloader_drop_last", "eval_steps", "eval_strategy", "gradient_accumulation_steps",
    "gradient_checkpointing", "greater_is_better", "learning_rate", "load_best_model_at_end",
    "lr_scheduler_type", "max_grad_norm", "max_steps", "metric_for_best_model",
    "num_train_epochs", "optim", "per_device_train_batch_size", "save_steps", "save_strategy", "seed",
    "train_sampling_strategy", "warmup_steps", "weight_decay",
})  # fmt: skip
"""Fields that become a part of the job."""
HERE = frozenset({
    "batch_eval_metrics", "bf16_full_eval", "dataloader_in_order", "dataloader_multiprocessing_context",
    "dataloader_num_workers", "dataloader_persistent_workers", "dataloader_pin_memory",
    "dataloader_prefetch_factor", "disable_tqdm", "do_eval", "do_predict", "do_train",
    "eval_accumulation_steps", "eval_do_concat_batches", "fp16_full_eval", "include_for_metrics",
    "label_names", "log_level", "logging_first_step", "logging_steps", "logging_strategy", "output_dir",
    "per_device_eval_batch_size", "prediction_loss_only", "project", "remove_unused_columns", "report_to",
    "resume_from_checkpoint", "run_name", "use_cache", "use_cpu",
})  # fmt: skip
"""Fields of what transformers does on this machine: reading samples, logs, ``evaluate`` and ``predict``."""

OPTIMIZERS = {
    "adamw_torch": OptimizerName.ADAMW,
    "adamw_torch_fused": OptimizerName.ADAMW,
    "sgd": OptimizerName.SGD,
}
SCHEDULES = {
    "linear": ScheduleKind.LINEAR,
    "cosine": ScheduleKind.COSINE,
    "constant": ScheduleKind.CONSTANT,
    "constant_with_warmup": ScheduleKind.CONSTANT,
}
NO_WARMUP = "constant"
BEST_BY = ("loss", "eval_loss")
ORDERS = ("random", "sequential")


@dataclass(frozen=True, slots=True)
class Length:
    """Optimizer steps of a training, and of one epoch, as transformers count them."""

    steps: int
    an_epoch: int


def check_arguments(arguments: TrainingArguments) -> None:
    """UsageError that names every field which is set and would not be honoured."""
    odd = [
        f"{field.name} = {described(_plain(getattr(arguments, field.name)))}"
        for field in fields(arguments)
        if field.init and field.name not in TRAINED | HERE and not _untouched(arguments, field)
    ]
    odd += [
        f"{name} = {_word(getattr(arguments, name))!r} (workers have {', '.join(known)})"
        for name, known in (
            ("optim", OPTIMIZERS),
            ("lr_scheduler_type", SCHEDULES),
            ("train_sampling_strategy", ORDERS),
            ("save_strategy", ("no", "steps", "epoch")),
        )
        if _word(getattr(arguments, name)) not in known
    ]
    odd += _of_best(arguments)
    if odd:
        raise UsageError(
            f"workers do not honour these TrainingArguments: {'; '.join(odd)}; leave them at their defaults, "
            "or train on this machine with transformers.Trainer"
        )


def _of_best(arguments: TrainingArguments) -> list[str]:
    """Return what workers would not honour of a choice of the best model."""
    odd = []
    if arguments.metric_for_best_model not in (None, *BEST_BY):
        odd.append(f"metric_for_best_model = {arguments.metric_for_best_model!r} (workers have eval_loss)")
    if arguments.greater_is_better:
        odd.append("greater_is_better = True (a held-out loss is better where it is lower)")
    stepped = _word(arguments.eval_strategy) == "steps" and arguments.save_steps != arguments.eval_steps
    if arguments.load_best_model_at_end and stepped:
        odd.append("load_best_model_at_end = True with another save_steps than eval_steps")
    return odd


def training_of(
    arguments: TrainingArguments,
    length: Length,
    decayed: Collection[str],
    trained: Iterable[str],
    held_out: int,
) -> TrainingSpec:
    """Return the settings of training that stages need.

    ``decayed``: parameters that weight decay applies to, of the ``trained``, by name; ``held_out``:
    micro-batches of held-out data. UsageError for figures out of their range.
    """
    kind = _word(arguments.lr_scheduler_type)
    warmup = 0 if kind == NO_WARMUP else arguments.get_warmup_steps(length.steps)
    return TrainingSpec(
        steps=length.steps,
        n_micro=arguments.gradient_accumulation_steps,
        seed=arguments.seed,
        optimizer=Optimizer(
            OPTIMIZERS[_word(arguments.optim)],
            lr=arguments.learning_rate,
            weight_decay=arguments.weight_decay,
            betas=(arguments.adam_beta1, arguments.adam_beta2),
            eps=arguments.adam_epsilon,
            clip_norm=arguments.max_grad_norm or None,
            groups=_undecayed(arguments.weight_decay, decayed, trained),
        ),
        schedule=Schedule(SCHEDULES[kind], warmup, final=0.0, from_zero=True),
        precision=Precision.BF16 if arguments.bf16 else Precision.FP32,
        recompute=Recompute.FULL if arguments.activation_checkpointing else Recompute.AUTO,
        eval_every=_every(arguments.eval_strategy, arguments.eval_steps, length) if held_out else 0,
        eval_batches=held_out,
        checkpoint_every=_checkpoints(arguments, length),
    )


def order_of(arguments: TrainingArguments) -> int | None:
    """Return the seed of the order of samples, None for that of the data set."""
    if arguments.train_sampling_strategy == "sequential":
        return None
    return arguments.seed if arguments.data_seed is None else arguments.data_seed


def _checkpoints(arguments: TrainingArguments, length: Length) -> int:
    """Return the steps between checkpoints; 0, every few minutes, where the arguments say nothing of it."""
    if arguments.load_best_model_at_end:
        return _every(arguments.eval_strategy, arguments.eval_steps, length)
    asked = [field for field in fields(arguments) if field.name in ("save_strategy", "save_steps")]
    if all(_untouched(arguments, field) for field in asked):
        return 0
    return _every(arguments.save_strategy, arguments.save_steps, length)


def _untouched(arguments: TrainingArguments, field: Field[Any]) -> bool:
    """Return whether a field is at its default, as that is after the arguments' own normalisation."""
    value, default = _plain(getattr(arguments, field.name)), _plain(field.default)
    if field.default_factory is not MISSING:
        default = field.default_factory()
    if field.name == "accelerator_config":
        return bool(value is None or value == type(value)())
    return bool(value == default or not (value or default))  # of None, "", [] and False one becomes another


def _every(strategy: Any, steps: float | None, length: Length) -> int:
    """Return the steps between two of something; a number below 1 is a share of all steps."""
    if _word(strategy) == "epoch":
        return length.an_epoch
    if _word(strategy) == "no" or not steps:
        return 0
    return math.ceil(length.steps * steps) if steps < 1 else int(steps)


def _undecayed(decay: float, decayed: Collection[str], trained: Iterable[str]) -> tuple[ParamGroup, ...]:
    """Return a group without weight decay for the others, by as few patterns as name no decayed one."""
    rest = [name for name in trained if name not in decayed]
    if not decay or not rest:
        return ()
    patterns: list[str] = []
    for name in rest:
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            continue
        exact = name.replace("[", "[[]")
        parts = exact.split(".")
        tails = (f"*.{'.'.join(parts[-count:])}" for count in range(1, len(parts)))
        patterns.append(next((t for t in tails if not any(fnmatchcase(d, t) for d in decayed)), exact))
    return (ParamGroup(tuple(patterns), weight_decay=0.0),)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _word(value: Any) -> str:
    return str(_plain(value))
