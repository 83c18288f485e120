"""What torch.export follows without a word although the graph does not hold it.

While the module is traced, ``Following`` refuses calls that reach behind the graph (a hook on a tensor, a
gradient taken within forward, ``.data``), and ``mode_reads`` notes whether anything asks for the mode.
``refuse_functions`` looks for functions with a backward of their own in autograd's graph of the loss. While
the module runs by itself, ``watching`` refuses what no state shows: clocks, the system's random numbers,
files, a seed set by forward, hooks on autograd's nodes. ``Carried`` finds what a call computes from trained
values and a later one reads.
"""

from __future__ import annotations

import datetime
import inspect
import os
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from atoll.errors import CaptureError

_HOOK = "registers a hook on a gradient, which does not travel to the workers; compute its effect in forward"
_GRADIENT = (
    "takes a gradient within forward, which cannot be captured; write the derivative out in tensor ops, or "
    "use a loss without it"
)
_DATA = "reaches a tensor's memory by .data, which torch.export cannot follow; use .detach(), or a buffer"
_GRAD = (
    "uses a parameter's gradient (.grad, zero_grad()) in forward, which the graph would not; gradients are "
    "the optimizer's"
)
_TRACED: dict[Any, str] = {
    torch.Tensor.register_hook: _HOOK,
    torch.Tensor.register_post_accumulate_grad_hook: _HOOK,
    torch.autograd.grad: _GRADIENT,
    torch.autograd.backward: _GRADIENT,
    torch.Tensor.backward: _GRADIENT,
    torch.Tensor.data.__get__: _DATA,  # type: ignore[attr-defined]
    torch.Tensor.data.__set__: _DATA,  # type: ignore[attr-defined]
    torch.Tensor.__deepcopy__: "copies a tensor by copy.deepcopy, which torch.export cannot follow; use "
    ".clone()",
    torch.Tensor.numpy: "passes a tensor to numpy, which the graph cannot hold; compute in tensor ops",
    torch.Tensor.grad.__get__: _GRAD,  # type: ignore[union-attr]
    torch.Tensor.grad.__set__: _GRAD,  # type: ignore[union-attr]
    torch.Tensor.grad.__delete__: _GRAD,  # type: ignore[union-attr]
}
_CLOCK = "reads the clock, and the graph would not; decide it outside forward"
_SEED = "sets torch's seed, and the graph would not; the job's seed is TrainingSpec(seed=...)"
_CALLED: dict[Any, str] = {
    **dict.fromkeys(
        (time.time, time.time_ns, time.monotonic, time.monotonic_ns, time.perf_counter, time.perf_counter_ns,
         time.process_time, time.localtime, time.gmtime, time.ctime, time.strftime,
         datetime.datetime.now, datetime.datetime.today, datetime.date.today),
        _CLOCK,
    ),
    os.urandom: "draws random numbers from the system, and the graph would not; draw them by torch.rand",
    open: "opens a file, and the graph would not; read it in job() and keep it as a buffer",
}  # fmt: skip
_RUN: dict[Any, str] = {
    torch.manual_seed: _SEED,
    torch.seed: _SEED,
    torch.set_rng_state: "sets the state of torch's generator, and the graph would not; draw numbers as they "
    "come",
    torch.inference_mode.__init__: "uses torch.inference_mode, and the graph would not; use torch.no_grad()",
    torch.autograd.graph.saved_tensors_hooks.__init__: "changes what autograd saves for backward, and the "
    "graph would not; leave it out",
}
_NODE_HOOKS = ("register_hook", "register_prehook")
_INSTALLED = ("site-packages", "dist-packages")
_STDLIB = tuple({str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib")})
_TORCH = str(Path(torch.__file__).parent)
_WRAPPERS = tuple(str(Path(_TORCH) / part) for part in ("_dynamo", "_compile.py"))  # of torch's functions


# Of their tensors only shape, type or device count; of the second kind, those behind the first argument.
_OF_A_FORM = {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like",
              "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"}  # fmt: skip
_AS_ANOTHER = {"to", "type_as", "view_as", "expand_as", "reshape_as"}

_MODE = "training"
_OF_A_GRAPH = torch.fx.GraphModule.__init__.__code__
_patching = threading.Lock()  # nn.Module is one for all threads


class Unfollowed(Exception):
    """Something in forward that the graph would not show; raised where it happens, in words."""


class Following(TorchFunctionMode):
    """Refuse calls that the traced graph would not hold; ``Unfollowed`` says which and what to write."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            words = _TRACED.get(func)
        except TypeError:  # not hashable
            words = None
        if words is not None:
            raise Unfollowed(words)
        return func(*args, **(kwargs or {}))


class Carried(TorchFunctionMode):
    """Finds a tensor that a call of a module computes from ``changing`` and one after a step reads.

    ``changing``: trained parameters and written buffers. The graph computes such a tensor at every call,
    while the module keeps it as it was at the first. One on the memory of ``state`` changes with that.
    """

    def __init__(self, changing: Iterable[Tensor], state: Iterable[Tensor]) -> None:
        super().__init__()
        self.line = ""  # at which one is read
        self.kept = False  # by one evaluation for the next, perhaps until the next step alone
        self._state = {_memory(tensor) for tensor in state}
        self._follows = {id(tensor): weakref.ref(tensor) for tensor in changing}
        self._earlier: dict[int, weakref.ref[Tensor]] = {}
        self._before: dict[int, weakref.ref[Tensor]] = {}  # in another call since the last step
        self._now: dict[int, weakref.ref[Tensor]] = {}
        self._training = False

    def next_call(self, training: bool) -> None:
        """A call begins; a step lies between it and the last unless both are evaluations."""
        self._before, self._now = {**self._before, **self._now}, {}
        if training or self._training:
            self._earlier, self._before = {**self._earlier, **self._before}, {}
        self._training = training

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        read = _tensors(args[:1] if name in _AS_ANOTHER else (args, kwargs))
        made = _tensors(args[:1]) if name == "__setitem__" else _tensors(result)
        if not made or name in _OF_A_FORM:
            return result
        earlier, before = (
            [tensor for tensor in read if _is_in(known, tensor)] for known in (self._earlier, self._before)
        )
        if not self.line and any(_memory(tensor) not in self._state for tensor in earlier):
            self.line = _own_line()
        self.kept |= bool(before)
        if earlier or before or any(_is_in(self._follows, t) or _is_in(self._now, t) for t in read):
            self._now |= {id(tensor): weakref.ref(tensor) for tensor in made}
        return result


def _is_in(known: dict[int, weakref.ref[Tensor]], tensor: Tensor) -> bool:
    found = known.get(id(tensor))
    return found is not None and found() is tensor


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for item in value for tensor in _tensors(item)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def _own_line() -> str:
    frame = inspect.currentframe()
    while frame is not None and (frame.f_code.co_filename == __file__ or not is_own_frame(frame)):
        frame = frame.f_back
    return "an unknown line" if frame is None else _line(frame)


def _line(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


@contextmanager
def mode_reads(module: nn.Module) -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether a module's mode (``training``) has been read since.

    A forward that does not ask is the same in both. True as well where a read would not be seen: a class
    has a ``train``, ``training``, ``__getattribute__`` or ``__setattr__`` of its own, or is TorchScript.
    Reads by way of ``vars(module)`` are not seen; the check of values in evaluation mode refuses what comes
    of them.
    """
    if hasattr(nn.Module, _MODE) or not all(map(_has_plain_mode, module.modules())):
        yield lambda: True
        return
    read = False

    def get(part: nn.Module) -> object:
        nonlocal read
        frame = inspect.currentframe()
        reader = frame.f_back if frame is not None else None
        # torch.export's own graph modules take over a mode and do not act on it.
        read |= reader is None or reader.f_code is not _OF_A_GRAPH
        try:
            return vars(part)[_MODE]
        except KeyError:
            raise AttributeError(_MODE) from None

    def put(part: nn.Module, mode: bool) -> None:
        vars(part)[_MODE] = mode

    # A property of the class comes before an attribute of the instance, also in the tracer's proxies.
    with _patching:
        setattr(nn.Module, _MODE, property(get, put))
        try:
            yield lambda: read
        finally:
            delattr(nn.Module, _MODE)


def _has_plain_mode(part: nn.Module) -> bool:
    kind = type(part)
    others = [one for one in kind.__mro__ if one is not nn.Module]
    return (
        kind.train is nn.Module.train
        and kind.__getattribute__ is nn.Module.__getattribute__
        and kind.__setattr__ is nn.Module.__setattr__
        and not any(_MODE in vars(one) for one in others)
        and "train" not in vars(part)
        and not isinstance(part, torch.jit.ScriptModule)
    )


def refuse_functions(loss: Tensor) -> None:
    """CaptureError naming the functions with a backward of their own between ``loss`` and what it is of.

    Their forward is traced like any code, so the graph's backward would be that of their forward.
    """
    found: dict[str, None] = {}
    seen: set[Any] = set()
    stack: list[Any] = [loss.grad_fn]  # those of Functions are of two classes at once
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = type(node).__name__
        # A library's op is a node of the graph itself, on the allow-list or not.
        if isinstance(node, BackwardCFunction) and not name.startswith("GeneratedBackwardFor"):
            found[name.removesuffix("Backward")] = None
        stack += [before for before, _ in node.next_functions]
    if not found:
        return
    names = list(found)
    if any(name.startswith("CheckpointFunction") for name in names):
        raise CaptureError(
            "the model is checkpointed with use_reentrant=True, whose backward is not in the graph; give "
            "checkpoint(..., use_reentrant=False), or leave it out: what to recompute is Atoll's own choice"
        )
    if any(name.startswith("BackwardHookFunction") for name in names):
        raise CaptureError(
            "a module has a backward hook (register_full_backward_hook), which does not travel to the "
            "workers; remove it, or compute its effect in forward"
        )
    if "_Dirichlet" in names:
        raise CaptureError(
            "torch's Beta and Dirichlet draw by a backward written by hand, which is not in the graph; draw "
            "from torch.distributions.Kumaraswamy, or from a softmax of Normals"
        )
    raise CaptureError(
        f"the model uses the autograd.Function {', '.join(names)}: capture follows a forward, not a backward "
        "written by hand; write it in tensor ops (f(x) with the gradient of g(x) is "
        "g(x) + (f(x) - g(x)).detach())"
    )


def is_own(filename: str, module: object = None) -> bool:
    """Return whether a source file is the owner's, not an installed package's or the standard library's.

    ``module``: the name of its module. What is typed at a prompt, piped in or given by ``-c`` has no file
    (``<stdin>``, ``<ipython-input-3-...>``), and is the owner's as part of ``__main__``; other code without a
    file is generated by a library.
    """
    if filename.startswith("<"):
        return module == "__main__"
    return not filename.startswith(_STDLIB) and not _is_installed(filename)


def is_own_frame(frame: FrameType) -> bool:
    """Return whether a frame runs the owner's code."""
    return is_own(frame.f_code.co_filename, frame.f_globals.get("__name__"))


def is_pythons(filename: str) -> bool:
    """Return whether a source file is the standard library's."""
    return filename.startswith(_STDLIB) and not _is_installed(filename)


def _is_installed(filename: str) -> bool:
    return any(name in Path(filename).parts for name in _INSTALLED)


@contextmanager
def watching() -> Iterator[None]:
    """Refuse what forward asks of the world outside, on leaving; CaptureError names the line."""
    seen: list[str] = []
    called = {code: words for function, words in _RUN.items() if (code := _code(function)) is not None}

    def profile(frame: Any, event: str, argument: Any) -> None:
        words: str | None
        if seen:
            return
        if event == "call" and frame.f_code in called:
            words, frame = called[frame.f_code], frame.f_back
            while frame is not None and frame.f_code.co_filename.startswith(_WRAPPERS):
                frame = frame.f_back
            if frame is None or not is_own_frame(frame):
                return
        elif event == "c_call":
            words = _asked(frame, argument)
        else:
            return
        while words and frame.f_back is not None and not is_own_frame(frame):
            frame = frame.f_back  # by way of secrets, say
        if words:
            seen.append(f"{words} (at {_line(frame)})")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)
    if seen:
        raise CaptureError(f"forward {seen[0]}")


def _asked(frame: Any, function: Any) -> str | None:
    filename = frame.f_code.co_filename
    if getattr(function, "__name__", "") in _NODE_HOOKS:
        return _HOOK if is_own_frame(frame) else None
    try:
        words = _CALLED.get(function)
    except TypeError:  # not hashable
        return None
    if function is os.urandom:  # by way of uuid, secrets or random
        return None if filename.startswith(_TORCH) else words
    return words if words and is_own_frame(frame) else None


def _code(function: Callable[..., Any]) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return getattr(function, "__code__", None)
