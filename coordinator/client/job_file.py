"""Runs the owner's job file and applies ``--set`` overrides to the Job it returns.

A job file is plain Python with a function ``job()`` that returns an ``atoll.Job``. It runs on the
owner's machine only. An error inside it, then or while its model is captured, names the file's own line.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from inspect import Parameter
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from atoll.errors import AtollError, UsageError
from atoll.fields import described
from atoll.job import Job
from coordinator.client.overrides import TRUE, override_job
from hostos.installation import check_beside

_serial = itertools.count(1)  # every load is a module of its own, even of the same file
MAX_SHOWN = 400  # characters of what the file raised
LARGE_BYTES = 1 << 20  # of a tensor from which on drawing its values takes time and memory
# In-place fills of torch.Tensor, torch.nn.init and transformers' own init with random values.
_KINDS = ("", "trunc_", "kaiming_", "xavier_")
_FILLS = {f"{kind}{name}_" for kind in _KINDS for name in ("normal", "uniform")} | {"orthogonal_"}


class _Unfilled(TorchFunctionMode):
    """Leaves large tensors as they were allocated where they would be filled at random: their pages are never
    touched, so a model of a billion weights takes neither its memory nor the seconds of drawing them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        filled = args[0] if args else kwargs.get("tensor")
        large = isinstance(filled, Tensor) and filled.nbytes >= LARGE_BYTES
        if large and getattr(func, "__name__", "") in _FILLS:
            return filled
        return func(*args, **kwargs)


def load_job(
    path: Path, overrides: Sequence[str] = (), *, full_trace: bool = False, shapes_only: bool = False
) -> Job:
    """The Job that ``path``'s ``job()`` returns, with ``overrides`` such as "optimizer.lr=3e-4".

    Raises UsageError naming the file's own line when it raises; ``full_trace`` lets the file's
    exception through as it is. ``shapes_only``: large weights are not drawn at random, for who only plans.
    """
    module = load_module(path, full_trace=full_trace)
    knobs = [item for item in overrides if item.partition("=")[0].strip().isupper()]
    for item in knobs:
        _turn(module, item, path)
    make = getattr(module, "job", None)
    if not callable(make):
        raise UsageError(f"{path} has no function job(); define one that returns an atoll.Job")
    if wanted := _required(make):
        raise UsageError(
            f"{path}: job() is called without arguments, this one needs {', '.join(wanted)}; give them "
            "defaults, or read constants of the file, which --set NAME=VALUE changes"
        )
    with blaming(path, full_trace), _Unfilled() if shapes_only else nullcontext():
        made = make()
    if not isinstance(made, Job):
        raise UsageError(f"{path}: job() returned {described(made)}; return an atoll.Job")
    return override_job(made, [item for item in overrides if item not in knobs])


def _required(make: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that a call cannot do without."""
    try:
        inspect.signature(make).bind()
    except TypeError:
        known = inspect.signature(make).parameters.values()
        given = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        return [one.name for one in known if one.default is Parameter.empty and one.kind not in given]
    except ValueError:  # a builtin
        pass
    return []


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
        value: object = text.lower() in TRUE if kind is bool else kind(text)
    except ValueError:
        raise UsageError(f"--set {item}: {name} is {constants[name]!r}; give a {kind.__name__}") from None
    setattr(module, name, value)


def load_module(path: Path, *, full_trace: bool = False) -> types.ModuleType:
    """Import the file at ``path`` under a name of its own; its folder is searched first."""
    path = path.expanduser()
    if not path.is_file():
        raise UsageError(_no_file(path))
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
        with blaming(path, full_trace):
            loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _no_file(path: Path) -> str:
    """Say what is wrong with the path of a job file, and which one may be meant."""
    if path.is_dir():
        inside = path / "job.py"
        return f"{path} is a folder; give {inside if inside.is_file() else 'the path of a job file in it'}"
    if path.exists():
        return f"{path} is not a file; give the path of a job file"
    folder = path.parent
    if not folder.is_dir():
        return f"{path} is not there, nor is its folder {folder}; give the path of a job file"
    near = get_close_matches(path.name, [found.name for found in folder.glob("*.py")], 1)
    move = f"is it {folder / near[0]}?" if near else "give the path of a job file"
    return f"{path} is not there; {move}"


@contextmanager
def blaming(path: Path, full_trace: bool) -> Iterator[None]:
    """Have work on the job of ``path`` end in words where it raises: with the file's own line, where one led
    there. ``full_trace`` lets the exception through as it is."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except UsageError as error:
        own = _own_line(path, error)
        if own is None:
            raise
        raise UsageError(f"{own[0]}: {error}") from None
    except AtollError:
        raise
    except (Exception, SystemExit) as error:
        if full_trace:
            raise
        raise _in_words(path, error) from None


def _in_words(path: Path, error: BaseException) -> AtollError:
    text = " ".join(str(error).split())[:MAX_SHOWN]
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError):
        return UsageError(f"{path}:{error.lineno}: {type(error).__name__}: {error.msg}; mend the job file")
    own = _own_line(path, error)
    if own:
        return UsageError(f"{own[0]}: {what}{own[1]}; mend the job file (--trace shows the whole traceback)")
    frames = traceback.extract_tb(error.__traceback__)
    where = f", at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return AtollError(f"{path}: {what}{where}; --trace shows the whole traceback")


def _own_line(path: Path, error: BaseException) -> tuple[str, str] | None:
    """The line of ``path`` that led to ``error``, as "FILE:LINE" and its text; None where none did."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _same(frame.filename, path)]
    if not own:
        return None
    return f"{path}:{own[-1].lineno}", f" at `{own[-1].line}`" if own[-1].line else ""


def _same(filename: str, path: Path) -> bool:
    try:
        return Path(filename).resolve() == path.resolve()
    except OSError:
        return False
