"""``--set FIELD=VALUE``: fields of a Job, of its training and of its federation, parsed by their types."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from atoll.errors import UsageError
from atoll.job import Job, TrainingSpec

TRUE = frozenset({"true", "yes", "on", "1"})
FALSE = frozenset({"false", "no", "off", "0"})
_OF_JOB = ("name", "metrics")


class _Given(NamedTuple):
    """A field's path from where it is looked for, its text, and the whole path as it was given."""

    fields: Sequence[str]
    text: str
    key: str

    @property
    def inner(self) -> _Given:
        return self._replace(fields=self.fields[1:])


def override_job(job: Job, overrides: Sequence[str]) -> Job:
    """``job`` with each "field=value" applied, all at once, so that their order does not matter.

    A field is ``name`` or ``metrics``, of the TrainingSpec ("optimizer.lr"), or of the Federated
    ("federated.clients"). UsageError for what there is not.
    """
    training: list[_Given] = []
    federated: list[_Given] = []
    changes: dict[str, Any] = {}
    for item in overrides:
        key, equals, text = (part.strip() for part in item.partition("="))
        fields = [part for part in key.split(".") if part]
        if not equals or not fields:
            raise UsageError(f"--set {item!r}; write FIELD=VALUE, for example optimizer.lr=3e-4")
        given = _Given(fields, text, key)
        if fields[0] in _OF_JOB and len(fields) == 1:
            changes[fields[0]] = convert(text, str if fields[0] == "name" else tuple[str, ...], key)
        elif fields[0] == "federated":
            federated.append(given.inner)
        else:
            training.append(given.inner if fields[0] == "training" else given)
    if federated and job.federated is None:
        raise UsageError(
            f"--set {federated[0].key}: {job.name} is not federated; give Job(federated=Federated())"
        )
    if federated:
        changes["federated"] = _overridden(job.federated, federated)
    if training:
        changes["training"] = _overridden(job.training, training)
    return dataclasses.replace(job, **changes)


def settings(training: TrainingSpec) -> list[str]:
    """Return "field=value" for each field that is not the default: what ``--set`` takes to train any job file
    alike. Groups of parameters, which only a file can give, are left out."""
    return [*_settings(training, "")]


def _settings(value: Any, prefix: str) -> Iterator[str]:
    for field in dataclasses.fields(value):
        found = getattr(value, field.name)
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if dataclasses.is_dataclass(found):
            yield from _settings(found, f"{prefix}{field.name}.")
        elif found != default and not (
            isinstance(found, tuple) and any(map(dataclasses.is_dataclass, found))
        ):
            yield f"{prefix}{field.name}={_spelled(found)}"


def _spelled(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_spelled, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _overridden(value: Any, items: Sequence[_Given]) -> Any:
    """A copy of the dataclass ``value`` with the fields set from their texts by their types."""
    hints = typing.get_type_hints(type(value))
    inner: dict[str, list[_Given]] = {}
    changes: dict[str, Any] = {}
    for item in items:
        known = [field.name for field in dataclasses.fields(value)]
        if not item.fields or item.fields[0] not in known:
            raise UsageError(f"--set {item.key}: unknown field; known here: {', '.join(known)}")
        name, rest = item.fields[0], item.fields[1:]
        current = changes.get(name, getattr(value, name))
        if dataclasses.is_dataclass(current):
            if not rest:
                below = ", ".join(f"{name}.{field.name}" for field in dataclasses.fields(current))
                raise UsageError(f"--set {item.key}: has fields of its own; set one of {below}")
            inner.setdefault(name, []).append(item.inner)
        elif isinstance(current, Mapping):
            if len(rest) != 1:
                raise UsageError(f"--set {item.key}: write {name}.OPTION=VALUE")
            changes[name] = {**current, rest[0]: _option(item.text)}
        elif rest:
            raise UsageError(f"--set {item.key}: {name} has no fields; write {name}=VALUE")
        else:
            changes[name] = convert(item.text, hints[name], item.key)
    changes |= {name: _overridden(getattr(value, name), below) for name, below in inner.items()}
    return dataclasses.replace(value, **changes)


def _option(text: str) -> bool | int | float | str:
    """An option of a strategy: true, false, a number, or a word."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def convert(text: str, kind: Any, key: str) -> Any:
    """``text`` as a value of the annotation ``kind``; UsageError says what would be accepted."""
    origin = typing.get_origin(kind)
    if origin is types.UnionType or origin is typing.Union:
        options = [option for option in typing.get_args(kind) if option is not types.NoneType]
        if text.lower() in {"none", "null"}:
            return None
        return convert(text, options[0], key)
    if origin is tuple:
        return _tuple(text, typing.get_args(kind), key)
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(text.lower())
        except ValueError:
            raise UsageError(f"--set {key}={text}: use one of {', '.join(m.value for m in kind)}") from None
    if kind is bool:
        if text.lower() in TRUE | FALSE:
            return text.lower() in TRUE
        raise UsageError(f"--set {key}={text}: use true or false")
    if kind in (int, float):
        return _number(text, kind, key)
    if kind is str:
        return text
    raise UsageError(f"--set {key}: cannot be given on the command line; set it in the job file")


def _number(text: str, kind: type[int] | type[float], key: str) -> int | float:
    try:
        if kind is float:
            return float(text)
        value = float(text) if "e" in text.lower() else int(text)  # 1e3 steps are 1000
        if value == int(value):
            return int(value)
    except (ValueError, OverflowError):
        pass
    word = "whole number" if kind is int else "number"
    raise UsageError(f"--set {key}={text}: use a {word}")


def _tuple(text: str, kinds: tuple[Any, ...], key: str) -> tuple[Any, ...]:
    parts = [part.strip() for part in text.strip("()[]").split(",") if part.strip()]
    if kinds == (str, Ellipsis):
        return tuple(parts)
    if Ellipsis in kinds:
        raise UsageError(f"--set {key}: cannot be given on the command line; set it in the job file")
    if len(parts) != len(kinds):
        raise UsageError(f"--set {key}={text}: use {len(kinds)} numbers, separated by commas")
    return tuple(convert(part, kind, key) for part, kind in zip(parts, kinds, strict=True))
