"""Checks of a Job as its file returns it: each part is what it is taken for, with values that can be trained.

What people bring instead is known by its class's name, so nothing here imports torch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from atoll.errors import UsageError
from atoll.fields import described, instead_of, is_a

MAX_NAME = 200  # characters of a job's name
_MODULE = "torch.nn.modules.module.Module"
_TENSOR = "torch.Tensor"
DATA_LOADER = "torch.utils.data.dataloader.DataLoader"
_DATA_FRAMES = ("pandas.DataFrame", "pandas.core.frame.DataFrame", "pyarrow.lib.Table")
_COMPUTED_BY = ("toPandas", "collect", "compute")  # of pyspark, polars and dask
_STREAM = "torch.utils.data.dataset.IterableDataset"
_BY_NUMBER = "torch.utils.data.dataset.Dataset"  # whatever else its class offers
_WRAPPED = (  # modules around the module that is meant, and where they keep it
    ("torch._dynamo.eval_frame.OptimizedModule", "the module without torch.compile", "._orig_mod"),
    ("torch.nn.parallel.data_parallel.DataParallel", "the module inside", ".module"),
    ("torch.nn.parallel.distributed.DistributedDataParallel", "the module inside", ".module"),
)


def check_job(job: Any, training: type, federated: type) -> None:
    """UsageError for a part that is something else than its declaration says, with what to write instead."""
    if job.weights is not None and not isinstance(job.weights, str | Path):
        raise UsageError(f"weights = {described(job.weights)}; give the path of a folder of safetensors")
    _check_module(job.module, job.weights is not None)
    _check_examples(job.example_inputs, job.module)
    if not isinstance(job.training, training):
        raise UsageError(
            f"training = {described(job.training)}; give {instead_of(job.training, 'TrainingSpec')}"
        )
    check_values(job.training)
    _check_groups(job.training, job.module)
    _check_data(job.data, list(job.example_inputs))
    if not isinstance(job.name, str) or not 0 < len(job.name) <= MAX_NAME:
        raise UsageError(f"name = {described(job.name)}; give a word of 1 to {MAX_NAME} characters")
    if isinstance(job.metrics, list):
        object.__setattr__(job, "metrics", tuple(job.metrics))
    if isinstance(job.metrics, str):
        raise UsageError(f"metrics = {job.metrics!r}; give a tuple, metrics=({job.metrics!r},)")
    _check_federated(job.federated, federated)
    _check_patience(job.training, job.federated)


def check_values(training: Any) -> None:
    """UsageError for a hyper-parameter that no optimizer or schedule takes."""
    _check_optimizer(training.optimizer)
    schedule = training.schedule
    if schedule.warmup_steps < 0:
        raise UsageError(f"warmup_steps = {schedule.warmup_steps}; give a number of steps from 0")
    _from_zero("final", schedule.final)
    if schedule.gamma is not None:
        _from_zero("gamma", schedule.gamma)
    if schedule.kind == "step" and schedule.every < 1:
        raise UsageError("a schedule of kind step with every = 0; give the steps between two of its steps")
    if not 0 <= training.seed < 2**64:
        raise UsageError(f"seed = {training.seed}; give a number from 0 to 2**64 - 1")


def _check_optimizer(optimizer: Any) -> None:
    for name in ("lr", "weight_decay", "eps", "momentum"):
        _from_zero(name, getattr(optimizer, name))
    if not all(0.0 <= beta < 1.0 for beta in optimizer.betas):
        raise UsageError(f"betas = {optimizer.betas}; give two numbers from 0 to below 1")
    muon = optimizer.name == "muon"  # which has a momentum by itself
    if optimizer.nesterov and not optimizer.momentum and not muon:
        raise UsageError("nesterov = True with momentum = 0; give a momentum, or leave nesterov out")
    if optimizer.clip_norm is not None and not 0.0 < optimizer.clip_norm < math.inf:
        raise UsageError(f"clip_norm = {optimizer.clip_norm}; give a number above 0, or None: no clipping")
    for group in optimizer.groups:
        if not group.patterns:
            raise UsageError(
                "a ParamGroup without patterns matches nothing; give ('head.*',) or leave it out"
            )
        _from_zero("lr_scale", group.lr_scale)
        if group.weight_decay is not None:
            _from_zero("weight_decay", group.weight_decay)


def _check_groups(training: Any, module: Any) -> None:
    """UsageError for a group without a parameter, which would train all of them otherwise than it says. A
    pattern beside others may match none: one list often serves several models."""
    groups = training.optimizer.groups
    if not groups:
        return
    names = [name for name, _ in module.named_parameters()]
    every = dict(module.named_parameters(remove_duplicate=False))
    for group in groups:
        if any(fnmatchcase(name, pattern) for name in names for pattern in group.patterns):
            continue
        tied = [alias for alias in every if any(fnmatchcase(alias, pattern) for pattern in group.patterns)]
        shown = ", ".join(map(repr, group.patterns[:3]))
        if tied:
            first = next(name for name in names if every[name] is every[tied[0]])
            raise UsageError(f"ParamGroup of {shown}: {tied[0]!r} is tied to {first!r}; name {first!r}")
        some = f"; they are named like {names[-1]!r}" if names else ""
        raise UsageError(f"ParamGroup of {shown} matches none of the module's {len(names)} parameters{some}")


def _from_zero(name: str, value: float) -> None:
    if not 0.0 <= value < math.inf:
        raise UsageError(f"{name} = {value}; give a finite number from 0")


# ---------------------------------------------------------------- module and example inputs


def _check_module(module: Any, weights: bool) -> None:
    if isinstance(module, type):
        raise UsageError(f"module is the class {module.__name__}; give an instance, {module.__name__}(...)")
    if not is_a(module, _MODULE):
        raise UsageError(
            f"module = {described(module)}; give a torch.nn.Module whose forward returns the loss"
        )
    if not _has_forward(module):
        raise UsageError(f"module = {described(module)} has no forward(); give it one that returns the loss")
    for kind, words, attribute in _WRAPPED:
        if is_a(module, kind):
            raise UsageError(f"module = {described(module)}; give {words}, module=model{attribute}")
    for path, part in module.named_modules():
        if is_a(part, "torch.jit._script.ScriptModule"):
            what = f"{path!r} of the module" if path else "module"
            raise UsageError(f"{what} is compiled by torch.jit; give the module that it was made of")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_a(tensor, "torch.nn.parameter.UninitializedTensorMixin"):
            raise UsageError(
                f"{name!r} of the module has no size yet; call the module once on the example inputs in job()"
            )
        if tensor.is_meta and not weights:
            raise UsageError(
                f"{name!r} of the module is on the meta device, which holds no values; load its weights, or "
                "name their folder in Job(weights=...)"
            )


def _has_forward(module: Any) -> bool:
    own = [kind for kind in type(module).__mro__ if f"{kind.__module__}.{kind.__qualname__}" != _MODULE]
    return "forward" in vars(module) or any("forward" in vars(kind) for kind in own)


def _check_examples(examples: Any, module: Any) -> None:
    wanted, needed, open_ended = _arguments(module)
    shown = wanted or ["x"]
    form = "{" + ", ".join(f'"{name}": ...' for name in shown) + "}"
    if not isinstance(examples, Mapping):
        raise UsageError(
            f"example_inputs = {described(examples)}; give a dict with a tensor for each argument of "
            f"forward(), {form}"
        )
    if not examples:
        raise UsageError(f"example_inputs is empty; give a tensor for each argument of forward(), {form}")
    for name, value in examples.items():
        if not isinstance(name, str):
            raise UsageError(f"example_inputs names {described(name)}; name forward()'s arguments, {form}")
        if not is_a(value, _TENSOR) or isinstance(value, type):
            raise UsageError(_no_tensor(name, value))
        if value.is_meta:
            raise UsageError(
                f"example_inputs[{name!r}] is on the meta device, which holds no values; give zeros, say"
            )
    unknown = [name for name in examples if name not in wanted and not open_ended]
    missing = [name for name in needed if name not in examples]
    if unknown or missing:
        raise UsageError(
            f"example_inputs gives {', '.join(examples)}, forward() takes {', '.join(wanted) or 'nothing'}: "
            + "; ".join(
                f"{what} {', '.join(names)}"
                for what, names in (("missing", missing), ("unknown", unknown))
                if names
            )
            + "; name the inputs after forward()'s arguments"
        )


def _arguments(module: Any) -> tuple[list[str], list[str], bool]:
    """Return forward's arguments, those without a default, and whether it takes any other by name."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return [], [], True
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    # ``forward(*args)`` of a wrapper says nothing of what is inside.
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return [p.name for p in by_name], [p.name for p in by_name if p.default is p.empty], open_ended


def _no_tensor(name: str, value: Any) -> str:
    what = f"example_inputs[{name!r}] = {described(value)}"
    if is_a(value, "numpy.ndarray"):
        return f"{what}; give a tensor, torch.from_numpy(...)"
    if isinstance(value, Mapping | list | tuple):
        return f"{what}; give tensors alone: an argument of forward() for each, forward(self, x, y)"
    return f"{what}; give a tensor, and move all else into the module"


# ---------------------------------------------------------------- data


def _check_data(data: Any, inputs: Sequence[str]) -> None:
    if not isinstance(data, type) and callable(getattr(data, "materialise", None)):
        return
    raise UsageError(f"data = {described(data)}; {data_words(data, inputs)}")


def is_data_frame(data: Any) -> bool:
    """Return whether ``data`` is a table of pandas, pyarrow, or a library with frames such as polars."""
    # Asked of the class: a lazy frame computes its columns when it is asked itself.
    alike = not isinstance(data, type) and all(hasattr(type(data), name) for name in ("columns", "dtypes"))
    return (alike and not is_a(data, _BY_NUMBER)) or any(is_a(data, name) for name in _DATA_FRAMES)


def computed(frame: Any) -> str:
    """Return the call that makes a lazy frame's values, "" for one that holds them."""
    return next((f".{name}()" for name in _COMPUTED_BY if hasattr(type(frame), name)), "")


def data_words(data: Any, inputs: Sequence[str]) -> str:
    """Return what to write in place of ``data``, which is no source, for a model with these inputs."""
    names = ", ".join(repr(name) for name in inputs)
    by_name = "Rows({" + ", ".join(f'"{name}": ...' for name in inputs) + "})"
    loader = data if is_a(data, DATA_LOADER) else None
    if is_a(data if loader is None else getattr(loader, "dataset", None), _STREAM):
        return f"a stream has no rows to draw from: give its samples as tensors, {by_name}"
    if loader is not None:
        return (
            "micro-batches are made by Atoll, as large as example_inputs and in an order of its own: give "
            f"the data set, Rows.of(loader.dataset, {names}{_collator(loader)}){_sampler(loader)}"
        )
    if isinstance(data, type):
        return f"give an instance, {by_name}"
    if isinstance(data, Mapping):
        return f"give it as {by_name}"
    if is_data_frame(data):
        first = inputs[0] if inputs else "x"
        return (
            f"give its columns as arrays, Rows({{{first!r}: frame{computed(data)}[[...]].to_numpy(), ...}})"
        )
    if is_a(data, _TENSOR) or is_a(data, "numpy.ndarray"):
        return f"give an array for each input, {by_name}"
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, str):
        return f"give Rows.of(dataset, {names}), or an array for each input, {by_name}"
    return f"give {by_name} with an array or tensor for each input, or ByteText(length=64)"


def _collator(loader: Any) -> str:
    function = getattr(loader, "collate_fn", None)
    plain = function is None or getattr(function, "__name__", "") in ("default_collate", "default_convert")
    return "" if plain else ", collate=loader.collate_fn"


def _sampler(loader: Any) -> str:
    """Say how to keep a choice of rows that the data set by itself would not make."""
    for name, plain in (("batch_sampler", "Batch"), ("sampler", "Sequential Random")):
        sampler = getattr(loader, name, None)
        if sampler is None or type(sampler).__name__ in [f"{word}Sampler" for word in plain.split()]:
            continue
        rows = "[i for batch in loader.batch_sampler for i in batch]" if name == "batch_sampler" else ""
        return (
            f"; its {type(sampler).__name__} does not come along: for the rows that it draws in an epoch "
            f"give Subset(loader.dataset, {rows or 'list(loader.sampler)'})"
        )
    return ""


def _check_federated(given: Any, federated: type) -> None:
    if given is not None and not isinstance(given, federated):
        raise UsageError(f"federated = {described(given)}; give {instead_of(given, 'Federated')}")


def _check_patience(training: Any, federated: Any) -> None:
    """UsageError where nothing is evaluated that could be waited for."""
    if training.int8_moments and federated is not None:
        raise UsageError("int8_moments of a federated job, which stores no moments; leave it out")
    if training.patience and federated is not None:
        raise UsageError(f"patience = {training.patience} of a federated job, which has rounds; leave it out")
    if training.patience and not (training.eval_every and training.eval_batches):
        raise UsageError(
            f"patience = {training.patience} with eval_every = {training.eval_every} and eval_batches = "
            f"{training.eval_batches}; give both, and held-out data: it counts evaluations while training"
        )
