"""Runs the owner's job file and applies ``--set`` overrides to the Job it returns.

A job file is plain Python with a function ``job()`` that returns an ``atoll.Job``. It runs on the
owner's machine only. What goes wrong inside it is told with the file's own line.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import sys
import traceback
import types
import typing
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from atoll.errors import UsageError
from atoll.job import Job
from protos.installation import check_beside

_serial = itertools.count(1)  # every load is a module of its own, even of the same file
_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})


def load_job(path: Path, overrides: Sequence[str] = (), *, full_trace: bool = False) -> Job:
    """The Job that ``path``'s ``job()`` returns, with ``overrides`` such as "optimizer.lr=3e-4".

    Raises UsageError naming the file's own line when it raises; ``full_trace`` lets the file's
    exception through as it is.
    """
    module = load_module(path, full_trace=full_trace)
    knobs = [item for item in overrides if item.partition("=")[0].strip().isupper()]
    for item in knobs:
        _turn(module, item, path)
    make = getattr(module, "job", None)
    if not callable(make):
        raise UsageError(f"{path} has no function job(); define one that returns an atoll.Job")
    made = _guarded(path, make, full_trace)
    if not isinstance(made, Job):
        raise UsageError(f"{path}: job() returned {type(made).__name__}; return an atoll.Job")
    return override_job(made, [item for item in overrides if item not in knobs])


def _turn(module: types.ModuleType, item: str, path: Path) -> None:
    """Set one of the file's own constants, such as MICRO_BATCH=4, before ``job()`` runs."""
    name, equals, text = (part.strip() for part in item.partition("="))
    constants = {
        k: v for k, v in vars(module).items() if k.isupper() and isinstance(v, bool | int | float | str)
    }
    if not equals or name not in constants:
        known = ", ".join(sorted(constants)) or "none"
        raise UsageError(f"--set {item}: {path} has no constant {name}; it has: {known}")
    kind = type(constants[name])
    try:
        value: object = text.lower() in _TRUE if kind is bool else kind(text)
    except ValueError:
        raise UsageError(f"--set {item}: {name} is {constants[name]!r}; give a {kind.__name__}") from None
    setattr(module, name, value)


def load_module(path: Path, *, full_trace: bool = False) -> types.ModuleType:
    """Import the file at ``path`` under a name of its own; its folder is searched first."""
    path = path.expanduser()
    if not path.is_file():
        raise UsageError(f"{path} is not a file; give the path of a job file")
    check_beside(path)
    name = f"atoll_job_{next(_serial)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file; a job file ends in .py")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[name] = module  # dataclasses and pickling inside the file look it up
    loader = spec.loader
    try:
        _guarded(path, lambda: loader.exec_module(module), full_trace)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def override_job(job: Job, overrides: Sequence[str]) -> Job:
    """``job`` with each "field=value" applied: "name=..." or a field of its TrainingSpec."""
    for item in overrides:
        key, equals, text = item.partition("=")
        fields = [part for part in key.strip().split(".") if part]
        if not equals or not fields:
            raise UsageError(f"--set {item!r}; write FIELD=VALUE, for example optimizer.lr=3e-4")
        if fields == ["name"]:
            job = dataclasses.replace(job, name=text.strip())
            continue
        if fields[0] == "training":
            fields = fields[1:]
        job = dataclasses.replace(job, training=override(job.training, fields, text.strip(), key.strip()))
    return job


def override(value: Any, fields: Sequence[str], text: str, key: str) -> Any:
    """A copy of the dataclass ``value`` with the field at ``fields`` set from ``text`` by its type."""
    known = [field.name for field in dataclasses.fields(value)]
    if not fields or fields[0] not in known:
        # `name` is a field of the Job around the training settings.
        raise UsageError(f"--set {key}: unknown field; known here: {', '.join(known)}")
    name, rest = fields[0], fields[1:]
    kind = typing.get_type_hints(type(value))[name]
    current = getattr(value, name)
    if dataclasses.is_dataclass(current):
        if not rest:
            inner = ", ".join(f"{name}.{field.name}" for field in dataclasses.fields(current))
            raise UsageError(f"--set {key}: has fields of its own; set one of {inner}")
        new = override(current, rest, text, key)
    elif rest:
        raise UsageError(f"--set {key}: {name} has no fields; write {name}=VALUE")
    else:
        new = convert(text, kind, key)
    return dataclasses.replace(value, **{name: new})


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
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
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
    if Ellipsis in kinds:
        raise UsageError(f"--set {key}: cannot be given on the command line; set it in the job file")
    parts = [part.strip() for part in text.strip("()[]").split(",") if part.strip()]
    if len(parts) != len(kinds):
        raise UsageError(f"--set {key}={text}: use {len(kinds)} numbers, separated by commas")
    return tuple(convert(part, kind, key) for part, kind in zip(parts, kinds, strict=True))


def _guarded(path: Path, call: Callable[[], Any], full_trace: bool) -> Any:
    """Run ``call``; tell what it raises with the line of ``path`` that led there."""
    try:
        return call()
    except (KeyboardInterrupt, UsageError):
        raise
    except (Exception, SystemExit) as error:
        if full_trace:
            raise
        raise UsageError(_told(path, error)) from None


def _told(path: Path, error: BaseException) -> str:
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError):
        return f"{path}:{error.lineno}: {type(error).__name__}: {error.msg}; mend the job file"
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _same(frame.filename, path)]
    where = f"{path}:{own[-1].lineno}" if own else str(path)
    line = f" at `{own[-1].line}`" if own and own[-1].line else ""
    return f"{where}: {what}{line}; mend the job file (--trace shows the whole traceback)"


def _same(filename: str, path: Path) -> bool:
    try:
        return Path(filename).resolve() == path.resolve()
    except OSError:
        return False
