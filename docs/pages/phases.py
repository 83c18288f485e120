"""Phases that a handler of a state machine can lead to, read from its source.

A handler maps a state and an event to the next state, mostly by ``replace(state, phase=Phase.X)``. Its
source is walked with the state's phase known: tests of the phase are decided, both sides of any other test
are taken, calls of the project's own functions are followed. A value is the set of phases that it, or a
state that it stands for, can have; ``UNKNOWN`` is in it where the source does not show one.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterable
from enum import Enum
from functools import cache
from typing import Any

UNKNOWN = "?"
OWN = ("atoll", "coordinator", "worker", "hostos", "protos", "strategies", "compressors", "tests")

Phases = frozenset[Any]
Value = Phases | tuple["Value", ...]
Names = dict[str, Value]
Calls = tuple[tuple[Any, Names], ...]
_NOTHING: Phases = frozenset({UNKNOWN})
_NEVER: Phases = frozenset()  # what is not returned
_known: dict[tuple[Any, tuple[tuple[str, Value], ...]], Value] = {}
_cut: set[tuple[Any, tuple[tuple[str, Value], ...]]] = set()  # calls under way that were met again inside


def targets(handler: Callable[..., Any], phase: Enum) -> Phases:
    """Return the phases after ``handler`` in ``phase``; with UNKNOWN where its source does not show one."""
    function = inspect.unwrap(handler)
    state = next(iter(inspect.signature(function).parameters))
    return _first(_called(function, {state: frozenset({phase})}, ()))


def _first(value: Value) -> Phases:
    return value if isinstance(value, frozenset) else _first(value[0]) if value else _NOTHING


def _flat(value: Value) -> Phases:
    return value if isinstance(value, frozenset) else frozenset().union(*map(_flat, value))


def _join(a: Value, b: Value) -> Value:
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return tuple(map(_join, a, b))
    return a if b == _NEVER else b if a == _NEVER else _flat(a) | _flat(b)


@cache
def _source(function: Callable[..., Any]) -> ast.FunctionDef | None:
    try:
        [node] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, ValueError):
        return None
    return node if isinstance(node, ast.FunctionDef) else None


def _called(function: Any, given: Names, calls: Calls) -> Value:
    """Return what ``function`` returns, its parameters bound as ``given``; ``calls`` are under way."""
    node = _source(function) if inspect.isfunction(function) else None
    if node is None or function.__module__.partition(".")[0] not in OWN:
        return _NOTHING
    if (function, given) in calls:
        _cut.add((function, _key(given)))
        return _NEVER  # a call of itself adds nothing to what its other ways return
    key = function, _key(given)
    if key not in _known:
        walk = _Walk(function.__globals__, dict(given), (*calls, (function, given)))
        walk.block(node.body)
        _cut.discard(key)
        if _cut:  # within a call of itself further up, whose other ways this result lacks
            return walk.returned
        _known[key] = walk.returned
    return _known[key]


def _key(given: Names) -> tuple[tuple[str, Value], ...]:
    return tuple(sorted(given.items(), key=lambda item: item[0]))


class _Walk:
    """One call: names and what they stand for so far."""

    def __init__(self, outer: dict[str, Any], names: Names, calls: Calls) -> None:
        self.outer = outer
        self.names = names
        self.calls = calls
        self.returned: Value = _NEVER

    def block(self, statements: Iterable[ast.stmt]) -> bool:
        """Walk statements; True when what stands behind them is not reached."""
        return any(self.statement(node) for node in statements)

    def statement(self, node: ast.stmt) -> bool:
        match node:
            case ast.Return(value):
                self.returned = _join(self.returned, self.value(value))
                return True
            case ast.Raise():
                return True
            case ast.If(test, body, otherwise):
                return self.branches(self.truth(test), body, otherwise)
            case ast.For(body=body) | ast.While(body=body):
                self.branches(None, body, [])
            case ast.With(body=body):
                return self.block(body)
            case ast.Try(body=body, handlers=handlers):
                return self.branches(None, body, [inner for handler in handlers for inner in handler.body])
            case ast.Assign(targets=[target], value=value):
                self.bind(target, self.value(value))
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.bind(target, self.value(value))
        return False

    def branches(self, truth: bool | None, body: list[ast.stmt], otherwise: list[ast.stmt]) -> bool:
        if truth is not None:
            return self.block(body if truth else otherwise)
        before = dict(self.names)
        left = self.block(body)
        after, self.names = self.names, before
        right = self.block(otherwise)
        if right:
            self.names = after
        elif not left:
            shared = after.keys() & self.names.keys()
            self.names = {**after, **self.names, **{n: _join(after[n], self.names[n]) for n in shared}}
        return left and right

    def bind(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, ast.Tuple):
            parts = value if isinstance(value, tuple) else (value, *[_NOTHING] * len(target.elts))
            for inner, part in zip(target.elts, parts, strict=False):
                self.bind(inner, part)

    def truth(self, test: ast.expr) -> bool | None:
        """Return the outcome of a test of phases, None for any other."""
        match test:
            case ast.UnaryOp(ast.Not(), operand):
                inner = self.truth(operand)
                return None if inner is None else not inner
            case ast.BoolOp(op, values):
                decides = isinstance(op, ast.Or)
                found = [self.truth(value) for value in values]
                return decides if decides in found else None if None in found else not decides
            case ast.Compare(left, [ast.Is() | ast.Eq() | ast.In()], [right]):
                return self.within(left, right)
            case ast.Compare(left, [ast.IsNot() | ast.NotEq() | ast.NotIn()], [right]):
                inner = self.within(left, right)
                return None if inner is None else not inner
        return None

    def within(self, left: ast.expr, right: ast.expr) -> bool | None:
        mine, theirs = _flat(self.value(left)), _flat(self.value(right))
        if UNKNOWN in mine | theirs or not mine:
            return None
        if not mine & theirs:
            return False
        several = isinstance(right, ast.Attribute) and len(mine) > 1
        return True if mine <= theirs and not several else None

    def value(self, node: ast.expr | None) -> Value:
        match node:
            case ast.Name(name) if name in self.names:
                return self.names[name]
            case ast.Attribute(inner, "phase"):
                return _first(self.value(inner))
            case ast.Tuple(parts) | ast.List(parts) | ast.Set(parts):
                return tuple(map(self.value, parts))
            case ast.Subscript(inner, ast.Constant(int(index))):
                found = self.value(inner)
                return found[index] if isinstance(found, tuple) and index < len(found) else _NOTHING
            case ast.IfExp(test, body, otherwise):
                truth = self.truth(test)
                if truth is not None:
                    return self.value(body if truth else otherwise)
                return _join(self.value(body), self.value(otherwise))
            case ast.Call():
                return self.call(node)
            case ast.Name() | ast.Attribute():
                return _constant(self.known(node))
        return _NOTHING

    def known(self, node: ast.expr) -> Any:
        """Return the module's own object of a (dotted) name, None where it has none."""
        if isinstance(node, ast.Attribute):
            inner = self.known(node.value)
            return getattr(inner, node.attr, None) if inspect.ismodule(inner) or _phases(inner) else None
        return self.outer.get(node.id) if isinstance(node, ast.Name) and node.id not in self.names else None

    def call(self, node: ast.Call) -> Value:
        function = self.known(node.func)
        named = {word.arg: word.value for word in node.keywords if word.arg}
        if function is dataclasses.replace:
            return _first(self.value(named["phase"] if "phase" in named else node.args[0]))
        if not inspect.isfunction(function):
            return _NOTHING
        parameters = list(inspect.signature(function).parameters)
        given = {**dict(zip(parameters, node.args, strict=False)), **named}
        return _called(function, {name: self.value(value) for name, value in given.items()}, self.calls)


def _phases(thing: Any) -> bool:
    return inspect.isclass(thing) and issubclass(thing, Enum)


def _constant(thing: Any) -> Phases:
    """Return a phase, or a collection of phases, as a value."""
    members = thing if isinstance(thing, tuple | frozenset | set) else (thing,)
    return frozenset(members) if members and all(isinstance(m, Enum) for m in members) else _NOTHING
