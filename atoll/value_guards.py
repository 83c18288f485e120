"""Checks of values, right before the ops whose kernels take them without looking.

A kernel that reads memory by an index it was given, divides without asking, or loops as long as a number
says, is called only after its values were looked at. Most kernels look themselves; those here do not
(each has its case in ``tests/fuzz``). A rehearsal on fake tensors has no values and passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from atoll.effects import references
from atoll.errors import UnsupportedOp
from atoll.ops import schema

if TYPE_CHECKING:
    from atoll.indices import Range
    from atoll.opdag import OpNode

    Given = Mapping[str, Any]
    Guard = Callable[[Given], str | None]

ZETA_LOWEST = -1e4  # below it the kernel's loop, by ones up to 9, takes for ever
GRID_HIGHEST = 1e6  # -1 to 1 is inside the image
POISSON_HIGHEST = 1e18  # beyond it the kernel's rejection loop need not end


def guarded(target: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, after the guard of ``target`` where it has one; UnsupportedOp with the op and the value."""
    guard = _GUARDS.get(target.split(".")[1].removesuffix("_"))
    if guard is None:
        return call
    names = [argument.name for argument in schema(target).arguments]

    @wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if not _rehearsed(given.values()):
            why = guard(given)
            if why is not None:
                raise UnsupportedOp(f"op {target!r}: {why}; it is not run")
        return call(*args, **kwargs)

    return checked


def index_guarded(
    node: OpNode, call: Callable[..., Any], ranges: Sequence[tuple[str, Range]]
) -> Callable[..., Any]:
    """``call``, compiled of ``node``, after a look at the indices that it is given; UnsupportedOp with the
    value out of range."""
    declared = [argument.name for argument in schema(node.target).arguments]
    names = [*declared[: len(node.args)], *(name for name, arg in node.kwargs if references(arg))]
    seen: dict[str, tuple[Tensor, int]] = {}

    def checked(*args: Any) -> Any:
        given = dict(zip(names, args, strict=False))
        for name, bounds in ranges:
            value = _at(given, name)
            if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
                continue
            # A constant comes again and again; looking at it makes a GPU wait.
            before, version = seen.get(name, (None, 0))
            if before is value and version == value._version:
                continue
            if (why := out_of_range(value, bounds)) is not None:
                raise UnsupportedOp(f"op {node.target!r} ({node.name[:80]}): {name!r} {why}; it is not run")
            seen[name] = (value, value._version)
        return call(*args)

    return checked


def out_of_range(value: Tensor, bounds: Range) -> str | None:
    """The first value outside ``bounds``, in words; None when all are inside."""
    wrong = (value < bounds.low) | (value >= bounds.high)
    if bounds.besides is not None:
        wrong &= value != bounds.besides
    if not bool(wrong.any()):
        return None
    return f"holds the index {int(value[wrong][0])}; the model takes {bounds.low} to {bounds.high - 1}"


def sound_bools(value: Tensor) -> Tensor:
    """``value``, a bool's byte other than 0 and 1 made 1: what else it holds is undefined to a compiler."""
    return value.view(torch.uint8).ne(0) if value.dtype is torch.bool else value


def _at(given: Given, name: str) -> Any:
    """'indices[2]' -> the third of the list ``indices``."""
    base, _, place = name.partition("[")
    value = given.get(base)
    return value[int(place[:-1])] if place and isinstance(value, list | tuple) else value


def _rehearsed(values: Any) -> bool:
    return any(
        isinstance(v, FakeTensor)
        for value in values
        for v in (value if isinstance(value, list | tuple) else (value,))
    )


# ---------------------------------------------------------------- integer division


def _division(given: Given) -> str | None:
    """The most negative integer by -1 ends the process on x86; torch looks for zero alone."""
    number, by = given["self"], given["other"]
    dtype = torch.result_type(number, by)
    if dtype not in (torch.int32, torch.int64) or not _holds(by, -1):
        return None
    lowest = torch.iinfo(dtype).min
    return f"{lowest} is divided by -1" if _holds(number, lowest) else None


def _holds(value: Any, wanted: int) -> bool:
    return bool((value == wanted).any()) if isinstance(value, Tensor) else value == wanted


# ---------------------------------------------------------------- loops as long as a value says


def _zeta(given: Given) -> str | None:
    by = given["other"] if "other" in given else given["self"]
    lowest = (by.double().min() if by.numel() else 0.0) if isinstance(by, Tensor) else by
    return f"it sums up from {float(lowest)}, below {ZETA_LOWEST}" if float(lowest) < ZETA_LOWEST else None


def _poisson(given: Given) -> str | None:
    rate = given["self"]
    fits = bool(((rate >= 0) & (rate <= POISSON_HIGHEST)).all())
    return None if fits else f"a rate is not between 0 and {POISSON_HIGHEST:g}"


# ---------------------------------------------------------------- places, lengths, offsets, classes


def _grid(given: Given) -> str | None:
    """Not a number is no place: the kernel reads wherever its conversion to an index leads."""
    grid = given["grid"]
    fits = bool((grid.abs() <= GRID_HIGHEST).all())
    return None if fits else f"a place of the grid is not between -{GRID_HIGHEST:g} and {GRID_HIGHEST:g}"


def _repeat_interleave(given: Given) -> str | None:
    repeats, size = given.get("repeats"), given.get("output_size")
    if not isinstance(repeats, Tensor):
        return None
    most = torch.iinfo(repeats.dtype).max if size is None else size
    if not bool(((repeats >= 0) & (repeats <= most)).all()):
        return f"a repeat is not between 0 and {most}"
    total = int(repeats.double().sum())  # what int64 adds up may wrap round to what is declared
    return f"its repeats add up to {total} where {size} are declared" if size not in (None, total) else None


def _embedding_bag(given: Given) -> str | None:
    indices, offsets = given["indices"], given["offsets"]
    rows = given["weight"].shape[0]
    if indices.numel() and not bool(((indices >= 0) & (indices < rows)).all()):
        return f"an index is not between 0 and {rows - 1}"
    if indices.dim() == 1 and offsets.numel():
        sound = (
            (offsets[1:] >= offsets[:-1]).all() & (offsets >= 0).all() & (offsets <= indices.numel()).all()
        )
        ends = not given.get("include_last_offset") or int(offsets[-1]) == indices.numel()
        if int(offsets[0]) != 0 or not bool(sound) or not ends:
            return f"its offsets do not ascend from 0 to {indices.numel()}"
    return None


def _grouped_mm(given: Given) -> str | None:
    offs, rows = given["offs"], given["self"].shape[0]
    sound = not offs.numel() or (
        bool((offs[1:] >= offs[:-1]).all()) and int(offs[0]) >= 0 and int(offs[-1]) <= rows
    )
    return None if sound else f"its offsets do not ascend from 0 to at most {rows}"


def _ctc_loss(given: Given) -> str | None:
    classes, targets = given["log_probs"].shape[-1], given["targets"]
    if targets.numel() and not bool(((targets >= 0) & (targets < classes)).all()):
        return f"a target is not between 0 and {classes - 1}"
    reading, read = given["input_lengths"], given["target_lengths"]
    if not isinstance(reading, Tensor) or not isinstance(read, Tensor):
        return None  # literals, judged with the shapes
    steps = given["log_probs"].shape[0]
    most = targets.shape[-1]
    if reading.numel() and not bool(((reading >= 0) & (reading <= steps)).all()):
        return f"an input length is not between 0 and {steps}"
    if read.numel() and not bool(((read >= 0) & (read <= most)).all()):
        return f"a target length is not between 0 and {most}"
    if targets.dim() == 1 and int(read.sum()) != targets.shape[0]:
        return f"target lengths of {int(read.sum())} in all for {targets.shape[0]} targets"
    return None


def _packed(given: Given) -> str | None:
    """Sequences of a packed batch, the longest first: how many are left at each step."""
    sizes = given.get("batch_sizes")
    if sizes is None:
        return None
    batch = given["hx"][0].shape[1] if isinstance(given["hx"], list | tuple) else given["hx"].shape[1]
    falls = bool((sizes[1:] <= sizes[:-1]).all()) and bool((sizes > 0).all())
    if not sizes.numel() or not falls or int(sizes[0]) != batch or int(sizes.sum()) != given["data"].shape[0]:
        return f"its batch sizes do not fall from {batch} and add up to {given['data'].shape[0]}"
    return None


_GUARDS: dict[str, Guard] = {
    **dict.fromkeys(("div", "divide", "floor_divide", "remainder", "fmod"), _division),
    **dict.fromkeys(("special_zeta", "polygamma"), _zeta),
    **dict.fromkeys(("lstm", "gru", "rnn_relu", "rnn_tanh"), _packed),
    **dict.fromkeys(("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"), _grid),
    "poisson": _poisson,
    "repeat_interleave": _repeat_interleave,
    "embedding_bag": _embedding_bag,
    "ctc_loss": _ctc_loss,
    "_grouped_mm": _grouped_mm,
}
