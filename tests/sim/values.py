"""What simulated stages compute: hashes instead of tensors.

The value of every tensor after a step is a hash of its value before, of the step, and of what the whole
pipeline computed in it. So a step that is skipped, applied twice or fed with another's messages shows in
the next loss, whatever the cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from atoll.microbatch import block_ranges
from coordinator.messages import events as ev
from tests.sim.clock import digest

if TYPE_CHECKING:
    from atoll.job import JobSpec

NAN = "nan"
"""A value that is not finite; whatever is computed from it is not either."""


def forward(values: str, tensors: Mapping[str, str], names: list[str]) -> str:
    """Return what a stage with these tensors makes of the values of its blocks of micro-batches."""
    found = values.split(",")
    for name in names:
        found = [value if value == NAN else digest(value, tensors[name]) for value in found]
    return ",".join(found)


def batches(step: int, blocks: int, own: range) -> str:
    """Return the data of some of a step's blocks of micro-batches."""
    return ",".join(digest("batch", step) if blocks == 1 else digest("batch", step, at) for at in own)


def joined(values: str) -> str:
    """Return what all blocks of a step come to."""
    found = values.split(",")
    return found[0] if len(found) == 1 else NAN if NAN in found else digest(*found)


def micro_losses(values: str, n_micro: int, blocks: int, own: range) -> tuple[float, ...]:
    """Return the loss of each micro-batch of some blocks, as its share of the step's."""
    by_block = dict(zip(own, values.split(","), strict=True))
    ranges = enumerate(block_ranges(n_micro, blocks))
    return tuple(number(by_block[at]) / n_micro for at, block in ranges if at in own for _ in block)


def update(tensors: Mapping[str, str], step: int, loss: str, scale: float) -> dict[str, str]:
    """Return the tensors after a step in which the whole pipeline computed ``loss``."""
    return {name: digest(value, step, loss, scale) for name, value in tensors.items()}


def told(tensors: Mapping[str, str], step: int, loss: str, given: str, taken: str) -> ev.Digest:
    """Return what a stage says of its gradients in a step, and of the messages that it took."""
    return ev.Digest(
        digest("gradients", sorted(tensors.items()), step, loss)[:16], digest("inputs", given, taken)[:16]
    )


def square_norms(tensors: Mapping[str, str], names: Iterable[str], loss: str) -> tuple[float, ...]:
    """Return the squared norms of a step's gradients, so that each step is clipped by another scale."""
    return tuple(number(digest("norm", tensors[name], loss)) for name in names)


def number(value: str) -> float:
    """Return a hash as a loss."""
    return math.nan if value == NAN else int(value[:12], 16) / 16**12 + 0.5


def reference(spec: JobSpec, steps: int) -> tuple[dict[str, str], list[float]]:
    """Return the tensors after ``steps`` undisturbed steps, and each step's loss."""
    tensors, losses = dict(spec.tensors), []
    for step in range(steps):
        tensors, loss = exact_step(spec, tensors, step)
        losses.append(loss)
    return tensors, losses


def exact_step(spec: JobSpec, tensors: Mapping[str, str], step: int) -> tuple[dict[str, str], float]:
    """Return the tensors after an undisturbed step, and its loss."""
    blocks = spec.training.blocks
    values = forward(batches(step, blocks, range(blocks)), tensors, sorted(tensors))
    loss = joined(values)
    several = micro_losses(values, spec.training.n_micro, blocks, range(blocks))
    norms = list(square_norms(tensors, sorted(tensors), loss))
    after = update(tensors, step, loss, spec.training.optimizer.gradient_scale(norms))
    return after, number(loss) if blocks == 1 else sum(several, 0.0)
