"""Calls of ops as one process of a mesh makes them: arguments moved, results summed, with their gradients.

A rule of ``atoll.mesh.rules`` says what; here it is done, with a ``Group``'s collectives.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from atoll.mesh.layout import Kernel, Move, Split, Way, shard_rows
from atoll.mesh.ring import ring_attention
from atoll.mesh.rules import MEAN, RINGS, Path, Seen, references

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from atoll.mesh.group import Group
    from atoll.mesh.share import Shard, Shared, Turn
    from atoll.opdag import OpNode
    from atoll.repeats import Repeats

    Call = Callable[..., Any]


class Notes(Protocol):
    """Where a forward notes what its backward may compute again."""

    repeats: Repeats | None


# ---------------------------------------------------------------- parts of a tensor


def own_part(whole: Tensor, split: Split, group: Group) -> Tensor:
    """Return this process's part of a tensor, in memory of its own."""
    return parts_of(whole, split, group.size)[group.rank]


def parts_of(whole: Tensor, split: Split, size: int) -> tuple[Tensor, ...]:
    """Return each process's part, contiguous."""
    shape, dim = whole.shape, split.dim
    block = shape[dim] // (split.parts * size)
    blocks = whole.reshape(*shape[:dim], split.parts, size, block, *shape[dim + 1 :])
    local = (*shape[:dim], split.parts * block, *shape[dim + 1 :])
    return tuple(
        blocks.select(dim + 1, rank).reshape(local).clone(memory_format=torch.contiguous_format)
        for rank in range(size)
    )


def joined(parts: Tensor, split: Split) -> Tensor:
    """Return the whole of [size, ...] parts."""
    size, shape, dim = parts.shape[0], parts.shape[1:], split.dim
    block = shape[dim] // split.parts
    apart = parts.reshape(size, *shape[:dim], split.parts, block, *shape[dim + 1 :])
    whole = (*shape[:dim], size * shape[dim], *shape[dim + 1 :])
    return apart.movedim(0, dim + 1).reshape(whole)


def shards_of(whole: Tensor, size: int) -> Tensor:
    """Return [size, rows, ...] the stored shards of a matrix, the last one's filled up with zeros."""
    rows = shard_rows(whole.shape[0], size)
    filled = whole.new_zeros((size * rows, *whole.shape[1:]))
    filled[: whole.shape[0]] = whole
    return filled.view(size, rows, *whole.shape[1:])


def fetched(shard: Tensor, rows: int, group: Group) -> Tensor:
    """Return the whole of which each process has a shard."""
    return group.gather(shard).flatten(0, 1)[:rows]


# ---------------------------------------------------------------- moves with their gradients


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None if grads[0] is None else ctx.group.sum(grads[0])), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group) -> Tensor:
        ctx.set_materialize_grads(False)
        return group.sum(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, split: Split, group: Group) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.split, ctx.group = split, group
        return joined(group.gather(value), split)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None if grads[0] is None else own_part(grads[0], ctx.split, ctx.group)), None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, split: Split, group: Group) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.split, ctx.group = split, group
        return own_part(value, split, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is None:
            return None, None, None
        return joined(ctx.group.gather(grads[0]), ctx.split), None, None


class _Lend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, split: Split, group: Group) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.split, ctx.group = split, group
        return joined(group.gather(value), split)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is None:
            return None, None, None
        return ctx.group.sum_parts(torch.stack(parts_of(grads[0], ctx.split, ctx.group.size))), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, split: Split, group: Group) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.split, ctx.group = split, group
        return group.sum_parts(torch.stack(parts_of(value, split, group.size)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is None:
            return None, None, None
        return joined(ctx.group.gather(grads[0]), ctx.split), None, None


class _Fetch(torch.autograd.Function):
    """``summed``: gradients are parts of a sum; else every process has the whole of it."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, rows: int, summed: bool, group: Group) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.summed, ctx.group = summed, group
        return fetched(shard, rows, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is None:
            return None, None, None, None
        shards = shards_of(grads[0], ctx.group.size)
        own = ctx.group.sum_parts(shards) if ctx.summed else shards[ctx.group.rank].clone()
        return own, None, None, None


class _VocabularyLoss(torch.autograd.Function):
    """Sum over rows of log sum_c exp(x_c) - x_target, of logits whose classes are split; rows whose target is
    ``ignore`` are no part of it. Source: Megatron-LM (Shoeybi 2019), section 3."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignore: int, group: Group) -> Tensor:
        ctx.set_materialize_grads(False)
        x, classes = logits.float(), logits.shape[1]
        counted = target != ignore
        at = target - group.rank * classes
        mine = counted & (at >= 0) & (at < classes)
        at = torch.where(mine, at, 0)
        shifted = x - group.maximum(x.amax(1)).unsqueeze(1)
        picked = torch.where(mine, shifted.gather(1, at.unsqueeze(1)).squeeze(1), 0.0)
        exps = shifted.exp_()
        sums, picked = group.sum(torch.stack((exps.sum(1), picked)))
        ctx.save_for_backward(exps, sums, at, mine, counted)
        ctx.dtype = logits.dtype
        return torch.where(counted, sums.log() - picked, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is None:
            return None, None, None, None
        exps, sums, at, mine, counted = ctx.saved_tensors
        gradient = exps / sums.unsqueeze(1)
        gradient.scatter_add_(1, at.unsqueeze(1), -mine.to(gradient.dtype).unsqueeze(1))
        gradient.mul_(counted.unsqueeze(1) * grads[0])
        return gradient.to(ctx.dtype), None, None, None


def _again(move: Move, group: Group, own: Tensor) -> Tensor:
    """Return once more what a move has gathered."""
    return fetched(own, move.shape[0], group) if move.split is None else joined(group.gather(own), move.split)


_AGAIN = (Way.FETCH, Way.COPY, Way.LEND)
_SPLITS: dict[Way, Any] = {Way.TAKE: _Take, Way.LEND: _Lend, Way.SCATTER: _Scatter}

# ---------------------------------------------------------------- an op's call


class MeshCalls:
    """Calls of one program on one process; ``begin`` before each forward."""

    def __init__(self, shared: Shared, group: Group) -> None:
        self.shared, self.group = shared, group
        self._masks: Tensor | None = None
        self._moved: dict[tuple[int, Way, Split | None], Tensor] = {}
        self.fetches = any(
            move.way in _AGAIN for turn in shared.turns.values() for move in turn.moves.values()
        )

    def begin(self) -> None:
        """Forget what an earlier forward has moved."""
        self._moved.clear()

    def wrapped(self, position: int, node: OpNode, call: Call, notes: Notes) -> Call:
        """Return a node's call as this process makes it."""
        turn = self.shared.turns.get(position)
        if turn is None:
            return call
        compute = self._kernel(node, turn, call)
        slots = _slots(node)
        moves = [(slots[path], move) for path, move in turn.moves.items()]

        def on_mesh(*args: Any) -> Any:
            given = list(args)
            for (at, inner), move in moves:
                if inner is None:
                    given[at] = self._move(given[at], move, notes)
                else:
                    given[at] = list(given[at])
                    given[at][inner] = self._move(given[at][inner], move, notes)
            return compute(*given)

        return on_mesh

    def _move(self, value: Tensor, move: Move, notes: Notes) -> Tensor:
        group = self.group
        if move.way is Way.ROUND:
            return value
        if move.way in (Way.ENTER, Way.GATHER):
            return self._moved_once(value, move)
        if move.way is Way.SUM:
            return _summed(value, group)
        if move.way in _SPLITS:
            if move.split is None:
                raise ValueError("a part of a value that is not split")
            found: Tensor = _SPLITS[move.way].apply(value, move.split, group)
        else:
            found = _Fetch.apply(value, move.shape[0], move.way is Way.FETCH, group)  # type: ignore[no-untyped-call]
        if move.way in _AGAIN and notes.repeats is not None and torch.is_grad_enabled():
            notes.repeats.note(partial(_again, move, group), (value,), found)
        return found

    def _moved_once(self, value: Tensor, move: Move) -> Tensor:
        """What several ops read of one value is moved once, and their gradients come back as one."""
        enters = move.way is Way.ENTER
        if enters and not (torch.is_grad_enabled() and value.requires_grad):
            return value
        key = (move.of, move.way, move.split)
        found = self._moved.pop(key, None) if torch.is_grad_enabled() else None
        if found is None and enters:
            found = _Enter.apply(value, self.group)  # type: ignore[no-untyped-call]
        elif found is None:
            found = _Gather.apply(value, move.split, self.group)  # type: ignore[no-untyped-call]
        if not move.last and torch.is_grad_enabled():
            self._moved[key] = found
        return found

    def _kernel(self, node: OpNode, turn: Turn, call: Call) -> Call:
        group, kernel = self.group, turn.kernel
        if kernel is Kernel.ROW:
            return self._row(node)
        if kernel is Kernel.ROWS_MEAN:
            return lambda *args: _summed(call(*args) / group.size, group)
        if kernel is Kernel.ROWS_LOSS:
            return self._rows_loss(node)
        if kernel is Kernel.VOCABULARY:
            return self._vocabulary(call)
        if kernel is Kernel.VOCABULARY_LOSS:
            return self._vocabulary_loss(node)
        if kernel is Kernel.EXPERTS:
            return self._experts(call)
        if kernel is Kernel.CAUSAL:
            return self._causal(node)
        if kernel in RINGS:
            return self._ring(node, kernel is Kernel.RING_CAUSAL)
        if kernel is Kernel.DROPOUT:
            return self._dropout(node, turn, call)
        return (lambda *args: _summed(call(*args), group)) if turn.sums else call

    def _row(self, node: OpNode) -> Call:
        group = self.group
        if node.target == "aten.addmm.default":

            def addmm(bias: Tensor, x: Tensor, weights: Tensor) -> Tensor:
                found = _summed(torch.mm(x, weights), group)
                return found + bias.to(found.dtype)

            return addmm

        def linear(x: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
            found = _summed(functional.linear(x, weights), group)
            return found + bias.to(found.dtype)

        return linear

    def _rows_loss(self, node: OpNode) -> Call:
        group, ignore, _ = self.group, *_loss_literals(node)

        def loss(x: Tensor, target: Tensor, *_: Any) -> Tensor:
            total = functional.cross_entropy(x, target, reduction="sum", ignore_index=ignore)
            count = group.sum((target != ignore).sum())
            return _summed(total, group) / count

        return loss

    def _vocabulary(self, call: Call) -> Call:
        group = self.group

        def embedding(table: Tensor, index: Tensor) -> Tensor:
            rows = table.shape[0]
            if index.device.type == "cpu" and index.numel():
                least, most = map(int, index.aminmax())
                if least < 0 or most >= rows * group.size:
                    raise IndexError(f"an index of {least} to {most} into {rows * group.size} rows")
            at = index - group.rank * rows
            mine = (at >= 0) & (at < rows)
            found = call(table, torch.where(mine, at, 0))
            return _summed(found * mine.unsqueeze(-1).to(found.dtype), group)

        return embedding

    def _vocabulary_loss(self, node: OpNode) -> Call:
        group, (ignore, reduction) = self.group, _loss_literals(node)

        def loss(x: Tensor, target: Tensor, *_: Any) -> Tensor:
            total: Tensor = _VocabularyLoss.apply(x, target, ignore, group)  # type: ignore[no-untyped-call]
            return total / (target != ignore).sum() if reduction == MEAN else total

        return loss

    def _experts(self, call: Call) -> Call:
        """Rows of the own experts by these, zeros for those of others; ``offs``: where each expert's end."""
        group = self.group

        def experts(x: Tensor, matrices: Tensor, offs: Tensor) -> Tensor:
            first = group.rank * matrices.shape[0]
            own = offs[first : first + matrices.shape[0]]
            low, high = int(offs[first - 1]) if first else 0, int(own[-1])
            found = call(x[low:high], matrices, own - low)
            return functional.pad(found, (0, 0, low, len(x) - high))

        return experts

    def _causal(self, node: OpNode) -> Call:
        group, named = self.group, dict(node.kwargs)
        scale, grouped = named.get("scale"), bool(named.get("enable_gqa", False))
        scale = scale if isinstance(scale, float) else None

        def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
            own = query.shape[2]
            end = (group.rank + 1) * own
            key, value = key[:, :, :end], value[:, :, :end]
            mask = self._mask(query, end)
            return functional.scaled_dot_product_attention(
                query, key, value, mask, scale=scale, enable_gqa=grouped
            )

        return attention

    def _ring(self, node: OpNode, causal: bool) -> Call:
        scale = dict(node.kwargs).get("scale")
        given = partial(
            ring_attention, group=self.group, causal=causal, scale=scale if isinstance(scale, float) else None
        )
        return lambda query, key, value, *_: given(query, key, value)

    def _mask(self, query: Tensor, end: int) -> Tensor:
        """What is added to the scores of the last queries of ``end`` tokens; all layers share it."""
        own = query.shape[2]
        if self._masks is None or self._masks.shape != (own, end) or self._masks.dtype is not query.dtype:
            above = torch.ones(own, end, dtype=torch.bool, device=query.device).triu(end - own + 1)
            self._masks = torch.zeros_like(above, dtype=query.dtype).masked_fill_(above, float("-inf"))
        return self._masks

    def _dropout(self, node: OpNode, turn: Turn, call: Call) -> Call:
        """Draw for the whole value, so that each process has its part of the mask that one would draw."""
        group, split = self.group, turn.split
        if not isinstance(split, Split):
            raise ValueError(f"{node.name} is not split")

        def dropout(x: Tensor, *rest: Any) -> Tensor:
            whole = [n * group.size if at == split.dim else n for at, n in enumerate(x.shape)]
            with torch.no_grad():
                mask = own_part(call(x.new_ones(whole), *rest), split, group)
            return x * mask

        return dropout


def _summed(value: Tensor, group: Group) -> Tensor:
    return _Sum.apply(value, group)  # type: ignore[no-any-return, no-untyped-call]


def _loss_literals(node: OpNode) -> tuple[int, int]:
    """(ignored target, reduction) of a cross-entropy."""
    seen = Seen(node, 1, _nothing, _nothing)
    return seen.integer(4, "ignore_index", -100), seen.integer(3, "reduction", MEAN)


def _nothing(ref: object) -> Any:
    raise KeyError(ref)


def _slots(node: OpNode) -> Mapping[Path, tuple[int, int | None]]:
    """Path of a reference -> where a compiled call has it: positional, then keywords that refer to values."""
    found: dict[Path, tuple[int, int | None]] = {}
    named: list[str] = []
    for path, _ in references(node):
        first, *rest = path
        if isinstance(first, str):
            if first not in named:
                named.append(first)
            first = len(node.args) + named.index(first)
        inner = rest[0] if rest else None
        found[path] = (first, inner if isinstance(inner, int) else None)
    return found


# ---------------------------------------------------------------- stored tensors


def stored_part(whole: Tensor, stored: Split | Shard, group: Group) -> Tensor:
    """Return what a process stores of a named tensor."""
    if isinstance(stored, Split):
        return own_part(whole, stored, group)
    return shards_of(whole, group.size)[group.rank].clone()


def stored_whole(parts: Tensor, stored: Split | Shard) -> Tensor:
    """Return the whole of what [size, ...] processes store."""
    return joined(parts, stored) if isinstance(stored, Split) else parts.flatten(0, 1)[: stored.rows]
