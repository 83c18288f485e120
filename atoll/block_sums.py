"""Gradients of a step, summed by blocks of its micro-batches in an order that no plan changes.

A parameter's gradient is the sum over blocks, ascending, of the sum over its uses, descending by op, of the
sum over the block's micro-batches, ascending. Whoever holds a whole block can take that block's sum alone,
so the blocks may lie with any replicas: added in their order, they give the bits of one machine with as many
blocks. One block is the order without blocks.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING
from weakref import ReferenceType, WeakMethod, ref

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from torch import Tensor

    Uses = Mapping[str, list[tuple[int, Tensor]]]  # parameter -> (op, gradient leaf), descending by op


def fold(gradients: Iterable[Tensor | None], first: Tensor | None = None) -> Tensor | None:
    """Return ``first`` plus ``gradients``, added one by one in their order; None is zero.

    The sum is taken in place on the first gradient; ``first`` stays as it is.
    """
    total = first
    for gradient in gradients:
        if gradient is None:
            continue
        if total is None:
            total = gradient
        elif total is first:
            total = gradient.add_(total)
        else:
            total.add_(gradient)
    return total


class BlockSums:
    """Sums of one stage's gradients over its blocks, an accumulator for each use and one for each sum.

    Blocks that begin the step are summed into one as they end. Later ones stay apart, since whoever has the
    sum before them must add them one by one; so do those of ``tied`` parameters, whose uses in later stages
    come first. ``late``: ops whose weight gradients come after the backward, also in ascending order.
    """

    def __init__(
        self, uses: Uses, late: Collection[int], blocks: Mapping[int, range], tied: Collection[str]
    ) -> None:
        self._uses, self._late, self._tied = uses, late, tied
        self._notice: WeakMethod[Callable[[str, int], None]] | None = None
        self.share(blocks)

    def watch(self, notice: Callable[[str, int], None]) -> None:
        """Have the method ``notice(parameter, label)`` called as soon as a part is whole, while a backward
        still computes others; not for parameters that are tied or late."""
        # Leaves share the weights' memory, which a cycle of references would keep.
        self._notice, me = WeakMethod(notice), ref(self)
        for name, sites in self._uses.items():
            if name not in self._tied and not any(op in self._late for op, _ in sites):
                for _, leaf in sites:
                    leaf.register_post_accumulate_grad_hook(partial(_accumulated, me, name))  # type: ignore[no-untyped-call]

    def share(self, blocks: Mapping[int, range]) -> None:
        """Sum these blocks from now on; what was summed of a step is forgotten."""
        self._blocks = tuple(blocks.items())
        self._prefix = 0 in blocks
        self.clear()

    def clear(self) -> None:
        """Forget the step's gradients."""
        self._backward = self._whole = 0  # blocks whose backwards are done, whose weight gradients are, too
        self._moved: dict[int, dict[tuple[str, int], Tensor]] = {}  # block -> (parameter, op)
        self._sums: dict[str, dict[int, Tensor | None]] = {}
        self._closing: int | None = None  # block whose last backward computes
        self._here: Counter[str] = Counter()  # parameter -> uses that this backward is done with
        self._early: dict[int, set[str]] = {}  # block -> whose sums of it were taken within its last backward

    def backward_begins(self, micro: int) -> None:
        """Take in that the backward of ``micro`` comes now."""
        number, block = self._blocks[self._backward]
        # Blocks are added in order: one that still owes weight gradients keeps the next from being early.
        closes = self._notice is not None and self._whole == self._backward and micro == block.stop - 1
        self._closing = number if closes else None
        self._here.clear()

    def backward_done(self, micro: int, owed: int | None) -> None:
        """Take in that ``micro``'s backward is done; ``owed``: the first micro-batch that still owes weight
        gradients."""
        self._closing = None
        while self._backward < len(self._blocks) and micro >= self._blocks[self._backward][1].stop - 1:
            self._move(late=False, block=self._blocks[self._backward][0])
            self._backward += 1
        self.weights_done(owed)

    def weights_done(self, owed: int | None) -> None:
        """Take in that all weight gradients before micro-batch ``owed`` are there."""
        while self._whole < self._backward and (owed is None or owed >= self._blocks[self._whole][1].stop):
            block = self._blocks[self._whole][0]
            self._move(late=True, block=block)
            self._whole += 1
            self._add_up(block)

    @property
    def whole(self) -> tuple[int, ...]:
        """Blocks of which everything but tied uses in later stages is summed, ascending."""
        return tuple(number for number, _ in self._blocks[: self._whole])

    def partial(self, name: str, block: int, later: Tensor | None = None) -> Tensor | None:
        """Return ``later`` plus this stage's uses of a parameter in ``block``, descending by op; these are
        forgotten."""
        moved = self._moved.get(block, {})
        return fold((moved.pop((name, op), None) for op, _ in self._uses.get(name, ())), later)

    def add(self, name: str, block: int, part: Tensor | None) -> None:
        """Take in a block's sum of a parameter, blocks ascending. It may be added to in place."""
        sums, label = self._sums.setdefault(name, {}), 0 if self._prefix else block
        sums[label] = fold((sums.get(label), part))

    def parts(self, name: str) -> Mapping[int, Tensor | None]:
        """Return a parameter's sums by block; where the blocks begin the step, one under 0 for them all."""
        return self._sums.get(name, {})

    def _add_up(self, block: int) -> None:
        early = self._early.pop(block, set())
        for name in self._uses:
            if name not in self._tied and name not in early:
                self.add(name, block, self.partial(name, block))
        moved = self._moved.pop(block, {})
        if kept := {use: gradient for use, gradient in moved.items() if use[0] in self._tied}:
            self._moved[block] = kept

    def _move(self, late: bool, block: int) -> None:
        """Take what the leaves have accumulated, so that the next block begins at nothing."""
        early = self._early.get(block, set())
        for name, op, leaf in self._leaves(late):
            if leaf.grad is not None:
                if name in early:
                    raise RuntimeError(f"a gradient of {name} came after its sum was taken")
                self._moved.setdefault(block, {})[name, op] = leaf.grad
                leaf.grad = None

    def accumulated(self, name: str) -> None:
        """Take in that a use of a parameter has its gradient of the backward that computes."""
        block, sites = self._closing, self._uses[name]
        notice = self._notice() if self._notice is not None else None
        if block is None or notice is None:
            return
        self._here[name] += 1
        if self._here[name] < len(sites):
            return
        for op, leaf in sites:
            if leaf.grad is not None:
                self._moved.setdefault(block, {})[name, op] = leaf.grad
                leaf.grad = None
        self._early.setdefault(block, set()).add(name)
        self.add(name, block, self.partial(name, block))
        if not self._prefix or block == self._blocks[-1][0]:
            notice(name, 0 if self._prefix else block)

    def _leaves(self, late: bool) -> Iterator[tuple[str, int, Tensor]]:
        for name, sites in self._uses.items():
            for op, leaf in sites:
                if (op in self._late) == late:
                    yield name, op, leaf


def _accumulated(sums: ReferenceType[BlockSums], name: str, _: Tensor) -> None:
    """Pass on that a leaf's gradient is there; a hook."""
    found = sums()
    if found is not None:
        found.accumulated(name)
