"""Python state that a module's forward may change from one call to the next.

A graph holds what forward computes from inputs, parameters and buffers; whatever else it reads stays as it
was at capture. ``PythonState`` lists that rest by name: the attributes of all modules and of plain objects in
them, what their own functions find in closures, globals and classes, and the states of random generators.
Tensors count by identity, so nothing large is copied.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import os
import random
import sys
import types
import warnings
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coordinator.capture.unseen import is_own

MAX_ENTRIES = 500_000
MAX_ITEMS = 4096  # of a container that are looked at; of a longer one only the length
MAX_DEPTH = 32
MAX_ARRAY_BYTES = 1 << 20  # of an array whose content counts
MAX_SHOWN = 40  # characters of a value
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_VALUES = (Enum, np.generic, range, slice, frozenset, Decimal, Fraction, datetime.date, datetime.time,
           datetime.timedelta, PurePath, torch.dtype, torch.device)  # fmt: skip
"""Types of values that are compared by how they are written."""
_CACHE = type(functools.lru_cache(len))
_DICTS = (dict, OrderedDict, defaultdict)
_UNREAD = ("torch", "builtins", "numpy", "logging", "threading")  # packages whose objects' inside is theirs
_REGISTRIES = {"_parameters": "parameter", "_buffers": "buffer"}

Put = Callable[[object], None]
Held = tuple[Any, str, Put | None]  # a value, its name, and what replaces it in what holds it


@dataclass(frozen=True, slots=True)
class _Entry:
    """A value to compare: what it is, what tells it from others of its kind, and how it is shown."""

    kind: str
    key: object
    shown: str = field(default="", compare=False)


_ABSENT = _Entry("absent", None, "nothing")


@dataclass(frozen=True, slots=True)
class Change:
    """A value that is another one than before; ``put`` replaces it where it is held."""

    name: str
    before: _Entry
    after: _Entry
    put: Put | None

    @property
    def made_anew(self) -> bool:
        """Whether one tensor took another's place."""
        return self.before.kind == self.after.kind == "tensor"

    def __str__(self) -> str:
        if self.made_anew:
            return f"{self.name} (bound to another tensor)"
        if not self.after.shown:
            return self.name
        return f"{self.name} (from {self.before.shown} to {self.after.shown})"


class PythonState:
    """Everything that ``module``'s forward may find changed at its next call, as it is now."""

    def __init__(self, module: nn.Module) -> None:
        self._entries: dict[str, _Entry] = {}
        self._puts: dict[str, Put | None] = {}
        self._undo: list[Callable[[], object]] = []
        self._alive: list[object] = []  # identities must not be used again
        self._seen: set[int] = set()
        self._paths = {id(part): path for path, part in module.named_modules()}
        numbers: Any = np.random.get_state()
        self._undo += [partial(random.setstate, random.getstate()), partial(np.random.set_state, numbers)]
        self._entries["Python's random numbers (random)"] = _digest(random.getstate())
        self._entries["numpy's random numbers (np.random)"] = _digest(
            [item.tobytes() if isinstance(item, np.ndarray) else item for item in numbers]
        )
        self._entries["the environment (os.environ)"] = _digest(sorted(os.environ.items()))
        self._walk((module, "the module", None), 0)

    def changes(self, later: PythonState) -> list[Change]:
        """What is otherwise in ``later``, in the order of a walk."""
        mine, theirs = self._entries, later._entries
        return [
            Change(name, before, after, later._puts.get(name))
            for name in dict.fromkeys((*mine, *theirs))
            if (before := mine.get(name, _ABSENT)) != (after := theirs.get(name, _ABSENT))
        ]

    def restore(self) -> None:
        """Put everything back as it was, but for the contents of tensors."""
        for undo in self._undo:
            undo()

    def _walk(self, held: Held, depth: int) -> None:
        value, name, put = held
        while name in self._entries:
            name += "'"
        if len(self._entries) >= MAX_ENTRIES:
            return
        self._alive.append(value)
        self._entries[name], self._puts[name] = _entry(value), put
        if id(value) in self._seen or isinstance(value, (*_SCALARS, *_VALUES, Tensor)) or depth >= MAX_DEPTH:
            return
        self._seen.add(id(value))
        if isinstance(value, random.Random):
            self._undo.append(partial(value.setstate, value.getstate()))
        for inner in self._inside(value, name, put):
            self._walk(inner, depth + 1)

    def _inside(self, value: Any, name: str, put: Put | None) -> Iterator[Held]:
        if isinstance(value, nn.Module):
            yield from self._of_module(value, name)
        elif isinstance(value, types.FunctionType):
            yield from self._of_function(value)
        elif isinstance(value, types.MethodType):
            yield from (
                (value.__self__, f"{name}.__self__", None),
                (value.__func__, f"{name}.__func__", None),
            )
        elif isinstance(value, partial):
            yield from ((value.func, f"{name}.func", None), (value.args, f"{name}.args", None))
            yield value.keywords, f"{name}.keywords", None
        elif isinstance(value, type):
            yield from self._of_class(value)
        elif isinstance(value, tuple):
            yield from ((item, f"{name}[{at}]", put) for at, item in enumerate(value[:MAX_ITEMS]))
        elif isinstance(value, list | deque | set | dict):
            yield from self._of_container(value, name)
        elif _cached(value) is not None:
            self._undo.append(value.cache_clear)  # it may hold tensors of the tracing
            yield value.__wrapped__, f"function {name}", None
        else:
            yield from self._of_object(value, name)

    def _of_module(self, part: nn.Module, name: str) -> Iterator[Held]:
        path = self._paths.get(id(part), name)
        dot = f"{path}." if path else ""
        own = vars(part)
        self._contents(own)
        for key, value in list(own.items()):
            if key in _REGISTRIES and isinstance(value, dict):
                self._contents(value)
                for inner, tensor in value.items():
                    label = f"{_REGISTRIES[key]} {dot + inner!r}"
                    yield tensor, label, None
                    if isinstance(tensor, nn.Parameter):
                        yield tensor.requires_grad, f"requires_grad of {label}", None
            elif key == "_modules":
                self._contents(value)
                yield from ((child, f"module {dot + inner!r}", None) for inner, child in value.items())
            else:
                yield value, f"attribute {dot + key!r}", partial(own.__setitem__, key)
        yield type(part), f"class {type(part).__name__}", None

    def _of_container(self, value: Any, name: str) -> Iterator[Held]:
        if len(value) > MAX_ITEMS:
            return
        if type(value) in (list, deque, set, *_DICTS):  # others may do anything when they are filled
            self._contents(value)
        if isinstance(value, dict):
            yield from (
                (item, f"{name}[{_short(repr(key))}]", partial(value.__setitem__, key))
                for key, item in list(value.items())
            )
        elif not isinstance(value, set):
            yield from (
                (item, f"{name}[{at}]", partial(value.__setitem__, at)) for at, item in enumerate(value)
            )

    def _of_object(self, value: Any, name: str) -> Iterator[Held]:
        if isinstance(value, types.ModuleType) or type(value).__module__.partition(".")[0] in _UNREAD:
            return
        own = getattr(value, "__dict__", None)
        if type(own) is dict:
            self._contents(own)
            for key, item in list(own.items()):
                yield item, f"{name}.{key}", partial(own.__setitem__, key)
        for slot in _slots(type(value)):
            if hasattr(value, slot):
                yield getattr(value, slot), f"{name}.{slot}", partial(setattr, value, slot)
        yield type(value), f"class {type(value).__name__}", None

    def _of_class(self, kind: type) -> Iterator[Held]:
        for owner in kind.__mro__:
            if (owner is not kind and id(owner) in self._seen) or not _own_class(owner):
                continue
            self._seen.add(id(owner))
            for key, value in list(vars(owner).items()):
                if isinstance(value, staticmethod | classmethod):
                    value = value.__func__
                elif isinstance(value, property):
                    value = value.fget
                elif key.startswith("__") and not isinstance(value, types.FunctionType):
                    continue
                put = partial(setattr, owner, key)
                self._binding(partial(vars(owner).get, key), put, vars(owner)[key])
                yield value, f"class attribute {owner.__name__}.{key}", put

    def _of_function(self, function: types.FunctionType) -> Iterator[Held]:
        if not _own_function(function):
            return
        where = f"function {function.__qualname__}"
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            put = partial(setattr, cell, "cell_contents")
            self._binding(partial(getattr, cell, "cell_contents"), put, value)
            yield value, f"variable {variable!r} of {where}", put
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            yield default, f"a default of {where}", None
        self._contents(vars(function))
        yield from ((v, f"attribute {k!r} of {where}", None) for k, v in vars(function).items())
        yield from self._globals(function)

    def _globals(self, function: types.FunctionType) -> Iterator[Held]:
        names, file = _names(function.__code__), Path(function.__code__.co_filename).name
        scopes = [(function.__globals__, f" of {file}")]
        for name in sorted(names & function.__globals__.keys()):
            value = function.__globals__[name]
            if isinstance(value, types.ModuleType) and is_own(getattr(value, "__file__", None) or "<none>"):
                scopes.append((vars(value), f" of {name}"))
        for scope, where in scopes:
            for name in sorted(names & scope.keys()):
                value, put = scope[name], partial(scope.__setitem__, name)
                label = f"global {name}{where}"
                # One global may be read by many functions; modules are scopes themselves.
                if isinstance(value, types.ModuleType) or label in self._entries:
                    continue
                self._binding(partial(scope.get, name), put, value)
                yield value, label, put

    def _contents(self, container: Any) -> None:
        """Have the container's items put back by ``restore``."""
        before = type(container)(container) if not isinstance(container, _DICTS) else dict(container)

        def undo() -> None:
            now, then = list(_flat(container)), list(_flat(before))
            if len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True)):
                return
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(before)

        self._undo.append(undo)

    def _binding(self, get: Callable[[], object], put: Put, value: object) -> None:
        self._undo.append(lambda: None if get() is value else put(value))


class ReadLeft(Exception):
    """Something used what stands in the place of a tensor that an earlier call has left."""


class Left:
    """Stands in a tensor's place, and raises ``ReadLeft`` with its name where anything is done with it."""

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def __getattribute__(self, attribute: str) -> Any:
        if attribute in ("__class__", "__dict__", "__torch_function__"):
            return object.__getattribute__(self, attribute)
        raise ReadLeft(object.__getattribute__(self, "_name"))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = [arg for arg in args if isinstance(arg, Left)]
        raise ReadLeft(object.__getattribute__(names[0], "_name") if names else "an attribute")

    def _refuse(self, *_: object) -> Any:
        raise ReadLeft(object.__getattribute__(self, "_name"))

    __bool__ = __len__ = __iter__ = __getitem__ = __float__ = __int__ = __neg__ = __eq__ = __ne__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __pow__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = object.__hash__


def _entry(value: Any) -> _Entry:
    if isinstance(value, _SCALARS):
        return _Entry(type(value).__name__, repr(value), _short(repr(value)))
    if isinstance(value, Tensor):
        return _Entry("tensor", id(value), "a tensor")
    if isinstance(value, np.ndarray) and value.nbytes <= MAX_ARRAY_BYTES and not value.dtype.hasobject:
        return _digest(value.tobytes())
    if isinstance(value, random.Random):
        return _digest(value.getstate())
    if isinstance(value, np.random.Generator):
        return _digest(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return _digest(value.get_state())
    if isinstance(value, torch.Generator):
        return _digest(value.get_state().numpy().tobytes())
    if isinstance(value, bytearray | array) and len(value) <= MAX_ARRAY_BYTES:
        return _digest(bytes(value))
    if isinstance(value, Iterator):
        return _digest(_position(value))
    if isinstance(value, _VALUES):
        return _Entry(type(value).__name__, repr(value), _short(repr(value)))
    if isinstance(value, ContextVar):
        return _Entry("variable", repr(value.get(None)))
    if isinstance(value, list | tuple | dict | set | deque):
        return _Entry(type(value).__name__, len(value), f"{len(value)} items")
    if (size := _cached(value)) is not None:
        return _Entry("cache", size, f"{size} results")
    if isinstance(value, types.FunctionType):
        return _Entry(
            "function", value.__code__, value.__qualname__
        )  # made anew at each call, it is the same
    if isinstance(value, types.BuiltinFunctionType | type):
        return _Entry("function", value.__name__, value.__name__)
    return _Entry("object", type(value), f"a {type(value).__name__}")


def _position(iterator: Any, depth: int = 0) -> str:
    """Return where an iterator of Python's own stands, without taking from it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # iterators of itertools are losing their __reduce__
        try:
            made = iterator.__reduce__()
        except (TypeError, AttributeError):  # a generator, a file
            return repr(iterator)
    if depth >= MAX_DEPTH:
        return ""
    return repr([_part(part, depth) for item in made for part in (item if type(item) is tuple else (item,))])


def _part(part: Any, depth: int) -> str:
    if isinstance(part, _SCALARS):
        return repr(part)
    return _position(part, depth + 1) if isinstance(part, Iterator) else str(id(part))


def _digest(state: object) -> _Entry:
    data = state if isinstance(state, bytes) else repr(state).encode()
    return _Entry("digest", hashlib.blake2b(data, digest_size=16).digest())


def _flat(container: Any) -> Iterator[object]:
    if isinstance(container, dict):
        for item in container.items():
            yield from item
    else:
        yield from container


def _short(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def _cached(value: Any) -> int | None:
    """Results that an own function's ``functools.lru_cache`` holds; None for anything else."""
    if not isinstance(value, _CACHE) or not isinstance(value.__wrapped__, types.FunctionType):
        return None
    return int(value.cache_info().currsize) if _own_function(value.__wrapped__) else None


def _own_class(kind: type) -> bool:
    # A notebook's __main__ has no file.
    return is_own(getattr(sys.modules.get(kind.__module__), "__file__", None) or "<none>", kind.__module__)


def _own_function(function: types.FunctionType) -> bool:
    return is_own(function.__code__.co_filename, function.__globals__.get("__name__"))


def _slots(kind: type) -> Iterator[str]:
    for owner in kind.__mro__ if _own_class(kind) else ():
        slots = owner.__dict__.get("__slots__", ())
        yield from (s for s in ((slots,) if isinstance(slots, str) else slots) if not s.startswith("__"))


def _names(code: types.CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))
