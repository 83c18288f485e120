"""Fields of what a job file declares: each of its annotated type, or refused with what to write instead.

Nothing here imports torch: what people bring in place of a declaration is known by its class's name.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from numbers import Integral, Real
from typing import Any, cast

from atoll.errors import UsageError

MAX_SHOWN = 60  # characters of a value in a message


def check_fields(made: Any) -> None:
    """Convert the fields of a frozen dataclass to their annotated types, where that loses nothing.

    An enum takes its value ("sgd"), a tuple a list, a number numpy's own. UsageError names the field, what
    it was given and what it takes. Fields of other types than these are left as they are.
    """
    for name, kind in _hints(cast("Any", type(made))).items():
        given = getattr(made, name)
        try:
            found = _converted(given, kind)
        except _Other as other:
            words = f"{type(made).__name__}: {name} = {described(given)}; give {other}"
            raise UsageError(words) from None
        if found is not given:
            object.__setattr__(made, name, found)


def described(value: object) -> str:
    """Return a value in a few words: itself where it is short, else its type and size."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
    name = type(value).__name__
    if is_a(value, "torch.dtype"):
        return str(value)
    if isinstance(value, types.FunctionType | types.MethodType):
        return f"the function {value.__name__}"
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return f"{with_article(name)} of shape {tuple(shape)}"
    if isinstance(value, list | tuple | set | Mapping):
        return f"{with_article(name)} of {len(value)}"
    return with_article(name)


def with_article(name: str) -> str:
    """Return ``name`` after "a" or "an"."""
    spelt = name[:2].isupper() or name.startswith("nd")  # an SGD, an ndarray
    vowel = name[:1] in "AEFHILMNRSXn" if spelt else name[:1].lower() in "aeiou"
    return f"{'an' if vowel else 'a'} {name}"


def is_a(value: object, full_name: str) -> bool:
    """Return whether ``value``, or the class that it is, descends from the class of this full name."""
    kind = value if isinstance(value, type) else type(value)
    return any(f"{base.__module__}.{base.__qualname__}" == full_name for base in kind.__mro__)


class _Other(Exception):
    """A value of another type; its text says what is taken."""


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def _converted(value: Any, kind: Any) -> Any:
    origin = typing.get_origin(kind)
    if origin is types.UnionType or origin is typing.Union:
        options = [option for option in typing.get_args(kind) if option is not types.NoneType]
        optional = len(options) < len(typing.get_args(kind))
        if value is None and optional:
            return None
        return _converted(value, options[0]) if len(options) == 1 else value
    if origin is tuple:
        return _tuple(value, typing.get_args(kind))
    if not isinstance(kind, type):
        return value
    if issubclass(kind, Enum):
        return _member(value, kind)
    if kind in (bool, int, float):
        return _number(value, kind)
    if kind is str:
        if type(value) is int:  # replicas=4 is "4"
            return str(value)
        if not isinstance(value, str):
            raise _Other("a word, in quotes")
    elif not isinstance(value, kind) and dataclasses.is_dataclass(kind):
        raise _Other(instead_of(value, kind.__name__))
    return value


def _number(value: Any, kind: type) -> Any:
    if kind is bool:
        if type(value).__name__ in ("bool", "bool_"):  # numpy's own too
            return bool(value)
        raise _Other("True or False")
    wanted, words = (Integral, "a whole number") if kind is int else (Real, "a number")
    if isinstance(value, bool) or not isinstance(value, wanted):
        whole = kind is int and isinstance(value, float) and value.is_integer()
        raise _Other(f"{words}, {int(value)}" if whole else words)
    return value if type(value) is kind else kind(value)


def _member(value: Any, kind: type[Enum]) -> Enum:
    if isinstance(value, kind):
        return value
    if isinstance(value, str):
        for member in kind:
            if value == member.value:
                return member
    raise _Other(" or ".join(f"{kind.__name__}.{member.name}" for member in kind))


def _tuple(value: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    endless = len(kinds) == 2 and kinds[1] is Ellipsis
    if isinstance(value, str) and endless:
        raise _Other(f"a tuple, ({value[:MAX_SHOWN]!r},)")
    if not isinstance(value, list | tuple):
        if endless and isinstance(kinds[0], type) and isinstance(value, kinds[0]):
            raise _Other(f"a tuple of them, ({type(value).__name__}(...),)")
        raise _Other("a tuple" if endless else f"a tuple of {len(kinds)}")
    if not endless and len(value) != len(kinds):
        raise _Other(f"a tuple of {len(kinds)}")
    each = [kinds[0]] * len(value) if endless else list(kinds)
    found = tuple(_converted(item, kind) for item, kind in zip(value, each, strict=True))
    if isinstance(value, tuple) and all(a is b for a, b in zip(found, value, strict=True)):
        return value
    return found


# ---------------------------------------------------------------- what people bring from torch

_OPTIMIZERS = {"AdamW": "ADAMW", "Adam": "ADAMW", "SGD": "SGD", "Muon": "MUON", "Adafactor": "ADAFACTOR"}
_OTHERS = "SGD, MUON, ADAFACTOR, LION"
_OPTIONS = {"lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "momentum": 0.0,
            "nesterov": False}  # fmt: skip
"""Hyper-parameters that mean the same in ``atoll.Optimizer``, with its defaults."""


_SCHEDULES = {
    "StepLR": "STEP, every=30, gamma=0.1",
    "OneCycleLR": "ONE_CYCLE, final=4e-6",
    "LinearLR": "LINEAR, final=0.0",
    "PolynomialLR": "LINEAR, final=0.0",
}
"""Kinds by the names of torch's schedulers."""


def instead_of(value: object, kind: str) -> str:
    """Return what to write in place of ``value`` where the declaration ``kind`` is taken."""
    if kind == "Optimizer":
        return _optimizer_words(value)
    if kind == "Schedule":
        kind = _SCHEDULES.get(type(value).__name__, "COSINE, warmup_steps=100")
        return f"Schedule(ScheduleKind.{kind}), which is a function of the step alone"
    if kind == "TrainingSpec":
        return "TrainingSpec(steps=1000, n_micro=8)"
    if kind == "Federated":
        name = repr(value) if isinstance(value, str) else "'fedavg'"
        return f"Federated({name}, clients=10)"
    return f"{kind}(...)"


def _optimizer_words(value: object) -> str:
    if not is_a(value, "torch.optim.optimizer.Optimizer"):
        return f"Optimizer(OptimizerName.ADAMW, lr=1e-3), or {_OTHERS}"
    name = value.__name__ if isinstance(value, type) else type(value).__name__
    if name not in _OPTIMIZERS:
        return f"Optimizer(OptimizerName.ADAMW, lr=1e-3), or {_OTHERS}: stages have these"
    given = getattr(value, "defaults", None)
    options = given if isinstance(given, dict) else {}
    shown = [
        f"{key}={options[key]}"
        for key, default in _OPTIONS.items()
        if isinstance(options.get(key), bool | int | float | tuple)
        and (options[key] != default or key == "lr")
        and not (name == "Muon" and key in ("eps", "nesterov"))  # of its iterations, and always
    ]
    arguments = ", ".join([f"OptimizerName.{_OPTIMIZERS[name]}", *shown])
    words = f"the declaration that travels: Optimizer({arguments})"
    if name == "Adam" and options.get("weight_decay"):
        words += ", whose weight decay is decoupled, as AdamW's"
    if name == "Muon":
        words += ', with rates as for adjust_lr_fn="match_rms_adamw" and AdamW for all but hidden matrices'
    return words
