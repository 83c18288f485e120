"""What a module returns of a micro-batch: its loss, perhaps the count that it is a sum over, and metrics.

A loss is a mean, and a step's loss the mean of its micro-batches' means, unless the module says otherwise:

- it returns ``weight`` beside ``loss``: the loss is a sum over so many (target tokens, say);
- it is a model of transformers whose loss takes ``num_items_in_batch``: called with 1 its loss is a sum, over
  the targets of the one cross entropy that it computes. That this is so is tried before it is believed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from atoll.errors import CaptureError
from coordinator.capture.unseen import Following, refuse_functions

if TYPE_CHECKING:
    from collections.abc import Iterable

ITEMS = "num_items_in_batch"
TRIED = 1e-3  # relative: a mean in bf16 has no more digits
SHOWN_CLASSES = 8  # of a cross entropy's stand-in


@dataclass(frozen=True)
class Outcome:
    """Scalars of one forward; ``weight`` None: the loss is a mean."""

    loss: Tensor
    metrics: Mapping[str, Tensor]
    weight: Tensor | None = None


class Loss(nn.Module):
    """The module with positional inputs; loss, metrics and the loss's weight, if any, as outputs.

    What is returned beside the loss is a copy, so that it is computed behind the loss, and no cut parts them.
    """

    def __init__(
        self,
        module: nn.Module,
        names: tuple[str, ...],
        metrics: tuple[str, ...] = (),
        *,
        items: bool = False,
        differentiated: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self.names = names
        self.metrics = metrics
        self.items = items
        self.differentiated = differentiated

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        inputs = dict(zip(self.names, values, strict=True))
        with Following():
            found = outcome(self.module, inputs, self.metrics, items=self.items)
        if self.differentiated:
            refuse_functions(found.loss)
        beside = [found.metrics[name] for name in self.metrics]
        if found.weight is not None:
            beside.append(found.weight.detach())
        return found.loss, *(value.clone() for value in beside)


def outcome(
    module: nn.Module, inputs: Mapping[str, Tensor], metrics: Iterable[str] = (), *, items: bool = False
) -> Outcome:
    """Call the module; ``items``: have it sum its loss, see ``sums_items``. CaptureError for what is no loss,
    no metric or no count."""
    targets = _Targets()
    with targets if items else nullcontext():
        output = module(**inputs, **({ITEMS: 1} if items else {}))
    loss = loss_of(output)
    told = {name: metric_of(output, name) for name in metrics}
    return Outcome(loss, told, targets.count(loss) if items else weight_of(output, loss))


def loss_of(output: object) -> Tensor:
    """The scalar loss a module returned, itself or as ``.loss`` or ``["loss"]``; CaptureError when there
    is none."""
    loss = output if isinstance(output, Tensor) else _member(output, "loss")
    if not isinstance(loss, Tensor):
        given = "an output whose loss is None" if hasattr(output, "loss") else f"a {type(output).__name__}"
        raise CaptureError(
            f"the module returned {given}, not a loss; return the scalar loss or an object with .loss "
            "(transformers models do when they are given labels)"
        )
    if loss.ndim != 0 or not loss.is_floating_point():
        raise CaptureError(
            f"the module returned a loss of shape {tuple(loss.shape)} and type {loss.dtype}; "
            "return one floating-point number, such as loss.mean()"
        )
    return loss


def metric_of(output: object, name: str) -> Tensor:
    """The scalar called ``name`` of what a module returned in evaluation mode; CaptureError when there is
    none."""
    found = None if isinstance(output, Tensor) else _member(output, name)
    if not isinstance(found, Tensor):
        raise CaptureError(
            f"the module returned a {type(output).__name__} without a tensor {name!r} in evaluation mode; "
            f"return an object or a dict with loss and {name}, or drop it from the job's metrics"
        )
    if found.ndim != 0 or found.is_complex():
        raise CaptureError(
            f"metric {name!r} has shape {tuple(found.shape)} and type {found.dtype}; return one number, such "
            "as (logits.argmax(-1) == labels).float().mean()"
        )
    return found


def weight_of(output: object, loss: Tensor) -> Tensor | None:
    """The count that ``loss`` is a sum over, as ``.weight`` or ``["weight"]``; None without one, CaptureError
    for what is no count."""
    weight = None if isinstance(output, Tensor) else _member(output, "weight")
    if isinstance(weight, int | float) and not isinstance(weight, bool):
        return loss.detach().new_full((), float(weight))
    if weight is None:
        return None
    if not isinstance(weight, Tensor):
        given = f"a {type(weight).__name__}"
    elif weight.ndim != 0 or weight.is_complex() or weight.dtype is torch.bool:
        given = f"a tensor of shape {tuple(weight.shape)} and type {weight.dtype}"
    else:
        return weight
    raise CaptureError(
        f"the module returned {given} as weight; return one number, how many the loss is a sum over, such as "
        "(labels != -100).sum(), or no weight where the loss is a mean"
    )


@contextmanager
def modes_kept(module: nn.Module) -> Iterator[list[tuple[nn.Module, bool]]]:
    """Every sub-module with its mode, which it has again at the end."""
    modes = [(child, child.training) for child in module.modules()]
    try:
        yield modes
    finally:
        for child, mode in modes:
            child.training = mode


def sums_items(module: nn.Module, inputs: Mapping[str, Tensor]) -> bool:
    """Whether the module sums its loss over its targets where it is called with ``num_items_in_batch=1``, as
    models of transformers do that accept it: found out in evaluation mode, which changes nothing. Shapes and
    cross entropies of numbers of our own tell it at once; a module that does not run so is run on its inputs.
    """
    if not _says_so(module):
        return False
    for trial in (partial(_on_shapes, module, inputs), partial(_on_inputs, module, inputs)):
        with suppress(Exception):  # a model may do anything with an argument that it does not know
            return trial()
    return False


def _on_shapes(module: nn.Module, inputs: Mapping[str, Tensor]) -> bool:
    # Neither a copy of the weights nor a matrix product: with a billion of them one takes many seconds.
    named = (*module.named_parameters(), *module.named_buffers())
    with FakeTensorMode() as shapes:
        state = {name: torch.empty(t.shape, dtype=t.dtype, device=t.device) for name, t in named}
        given = {name: torch.empty(t.shape, dtype=t.dtype, device=t.device) for name, t in inputs.items()}

    def call(values: dict[str, Any]) -> object:
        with shapes, _StandIns():
            return functional_call(module, state, (), values)

    return _sums(module, call, given)


def _on_inputs(module: nn.Module, inputs: Mapping[str, Tensor]) -> bool:
    return _sums(module, lambda given: module(**given), inputs)


def _sums(module: nn.Module, call: Callable[[dict[str, Any]], object], inputs: Mapping[str, Tensor]) -> bool:
    targets = _Targets()
    with modes_kept(module), torch.random.fork_rng(), torch.no_grad():
        module.train(False)
        with targets:
            loss = loss_of(call({**inputs, ITEMS: 1}))
        count = targets.count(loss)
        mean = loss_of(call(dict(inputs)))
    if count is None:
        return False
    weight, total = float(count), float(loss)
    # Class weights, parts that are no cross entropy: then the mean is not the sum over the count.
    return weight == 0.0 or abs(float(mean) * weight - total) <= TRIED * abs(total)


def resized(inputs: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    """The inputs with so many rows, their own again and again; empty where they have no rows in common."""
    first = {value.shape[0] if value.ndim else 0 for value in inputs.values()}
    if len(first) != 1 or rows < 1 or not (count := first.pop()):
        return {}
    taken = torch.arange(rows) % count
    return {name: value[taken.to(value.device)] for name, value in inputs.items()}


def _says_so(module: nn.Module) -> bool:
    """As transformers' own Trainer asks: by an attribute, else by the arguments of forward."""
    own = _unwrapped(module)
    if not hasattr(own, "loss_function"):
        return False
    said = getattr(own, "accepts_loss_kwargs", None)
    if said is not None:
        return bool(said)
    arguments = inspect.signature(own.forward).parameters.values()
    return any(a.kind is a.VAR_KEYWORD or a.name == ITEMS for a in arguments)


def _unwrapped(module: nn.Module) -> nn.Module:
    """The model that adapters of peft wrap."""
    base = getattr(module, "get_base_model", None)
    found = base() if callable(base) else module
    return found if isinstance(found, nn.Module) else module


@dataclass
class _Targets(TorchFunctionMode):
    """Watches for cross entropies that are summed, and over which targets."""

    calls: list[tuple[Tensor, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.cross_entropy:
            given = inspect.signature(nn.functional.cross_entropy).bind(*args, **(kwargs or {}))
            given.apply_defaults()
            if given.arguments["reduction"] == "sum":
                self.calls.append((given.arguments["target"], given.arguments["ignore_index"]))
        return func(*args, **(kwargs or {}))

    def count(self, loss: Tensor) -> Tensor | None:
        """How many targets there were in the one cross entropy, None where there was none, or several."""
        if len(self.calls) != 1 or self.calls[0][0].is_floating_point():
            return None
        target, ignored = self.calls[0]
        return (target != ignored).sum().to(loss.device)


class _StandIns(TorchFunctionMode):
    """Gives cross entropies numbers where there are shapes: the same ones at each call of as many targets.
    What follows from them alone has numbers too; with anything else that is added to a loss it fails."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.cross_entropy:
            given = inspect.signature(func).bind(*args, **kwargs)
            given.apply_defaults()
            with unset_fake_temporarily():
                given.arguments |= _shown(given.arguments["target"].numel(), given.arguments["ignore_index"])
                return func(*given.args, **given.kwargs)
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
        if tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _shown(count: int, ignored: int) -> dict[str, Tensor]:
    """Logits and targets of a cross entropy's stand-in, every third of them to be left out."""
    generator = torch.Generator().manual_seed(count)
    logits = torch.randn(count, SHOWN_CLASSES, generator=generator)
    target = torch.randint(SHOWN_CLASSES, (count,), generator=generator)
    target[1::3] = ignored
    return {"input": logits, "target": target}


def _member(output: object, name: str) -> object:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
