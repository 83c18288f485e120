"""BucketRun: one rank's part in the exchange of one bucket of gradients, without a socket or a clock.

    messages = run.contribute(label, parts)       a part of every gradient in it, as soon as it is whole
    messages = run.receive(segment, label, value) of another replica, in any order
    run.totals()                                  once ``finished``

It runs the actions of ``atoll.collective`` on float32 elements as they are. ``CollectiveRun`` does so for
rules with codecs and with ranks that may be given up; here everything is awaited or the step is discarded, so
there is nothing to encode, to label or to give account of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from atoll.collective import ActionRun, slot_of

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.gradient_exchange import Arriving, Bucket


class Outgoing(NamedTuple):
    """A message to the bucket's holder in replica ``to``."""

    to: int
    segment: int
    label: int
    value: Tensor
    phase: int = 0


class BucketRun:
    """One step of one bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._run: ActionRun[Tensor] = ActionRun(bucket.collective, bucket.replica, _added)

    @property
    def finished(self) -> bool:
        """Whether every segment's total is here and nothing is to be sent any more."""
        return self._run.finished

    def contribute(self, label: int, parts: Mapping[str, Tensor | None]) -> list[Outgoing]:
        """Take in this replica's part of every gradient under ``label``; what can be sent now."""
        vector = _flat(self.bucket, parts)
        for number, segment in enumerate(self.bucket.collective.segments):
            self._run.hold(number, label, vector[segment.start : segment.stop])
        return [message for number in self._run.segments for message in self._advance(number)]

    def receive(self, segment: int, label: int, value: Tensor) -> list[Outgoing]:
        """Take in another replica's message; what can be sent now."""
        self._run.hold(segment, slot_of(label), value)
        return list(self._advance(segment))

    def take(self, arriving: Arriving, value: Tensor) -> list[Outgoing]:
        """``receive`` what was awaited."""
        return self.receive(arriving.segment, arriving.label, value)

    def awaits(self, arriving: Arriving) -> bool:
        """Whether a message that has not come is still to come."""
        return True

    def totals(self) -> dict[str, Tensor | None]:
        """Return every gradient's total, flat; None where nothing reached the parameter."""
        bucket = self.bucket
        totals = (self._run.held(n) for n, s in enumerate(bucket.collective.segments) if s.size)
        whole = torch.cat([total for total in totals if total is not None])
        marks = whole[bucket.elements :].tolist()
        return {
            name: whole[start:stop] if mark else None
            for (name, start, stop), mark in zip(bucket.spans, marks, strict=True)
        }

    def _advance(self, segment: int) -> Iterator[Outgoing]:
        for send, value in self._run.advance(segment):
            yield Outgoing(send.to, segment, send.label, value)


def _added(_: int, values: list[Tensor]) -> Tensor:
    total, *others = values
    for other in others:
        total += other
    return total


def _flat(bucket: Bucket, parts: Mapping[str, Tensor | None]) -> Tensor:
    """Return the gradients one after another, then the marks."""
    pieces = [
        torch.zeros(stop - start) if (part := parts[name]) is None else part.detach().reshape(-1).to("cpu")
        for name, start, stop in bucket.spans
    ]
    marks = [0.0 if parts[name] is None else 1.0 for name in bucket.names]
    return torch.cat([*pieces, torch.tensor(marks)])
