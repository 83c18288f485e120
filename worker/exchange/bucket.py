"""BucketRun: one rank's part in the exchange of one bucket of gradients, without a socket or a clock.

    messages = run.contribute(label, parts)       a part of every gradient in it, as soon as it is whole
    messages = run.receive(segment, label, value) of another replica, in any order
    run.totals()                                  once ``finished``

It performs the actions of ``atoll.collective`` on float32 elements as they are. ``CollectiveRun`` does so for
rules with codecs and with ranks that may be given up; here everything is awaited or the step is discarded, so
there is nothing to encode, to label or to give account of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from atoll.collective import TOTAL, Action, Add, Copy, Send, slot_of

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.gradient_exchange import Bucket


class Outgoing(NamedTuple):
    """A message to the bucket's holder in replica ``to``."""

    to: int
    segment: int
    label: int
    value: Tensor


class BucketRun:
    """One step of one bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._left: dict[int, list[Action]] = {}  # by segment, reversed
        for action in reversed(bucket.collective.actions[bucket.replica]):
            self._left.setdefault(action.segment, []).append(action)
        self._held: dict[tuple[int, int], Tensor] = {}  # (segment, slot)

    @property
    def finished(self) -> bool:
        """Whether every segment's total is here and nothing is to be sent any more."""
        return not any(self._left.values())

    def contribute(self, label: int, parts: Mapping[str, Tensor | None]) -> list[Outgoing]:
        """Take in this replica's part of every gradient under ``label``; what can be sent now."""
        vector = _flat(self.bucket, parts)
        for number, segment in enumerate(self.bucket.collective.segments):
            self._held[number, label] = vector[segment.start : segment.stop]
        return list(self._advance())

    def receive(self, segment: int, label: int, value: Tensor) -> list[Outgoing]:
        """Take in another replica's message; what can be sent now."""
        self._held[segment, slot_of(label)] = value
        return list(self._advance())

    def totals(self) -> dict[str, Tensor | None]:
        """Return every gradient's total, flat; None where nothing reached the parameter."""
        bucket = self.bucket
        whole = torch.cat([self._held[n, TOTAL] for n, s in enumerate(bucket.collective.segments) if s.size])
        marks = whole[bucket.elements :].tolist()
        return {
            name: whole[start:stop] if mark else None
            for (name, start, stop), mark in zip(bucket.spans, marks, strict=True)
        }

    def _advance(self) -> Iterator[Outgoing]:
        for actions in self._left.values():
            while actions and (done := self._perform(actions[-1])) is not None:
                actions.pop()
                yield from done

    def _perform(self, action: Action) -> list[Outgoing] | None:
        """Messages of an action; None when it must wait."""
        held = self._held
        match action:
            case Send(to, segment, slot, label):
                if (segment, slot) not in held:
                    return None
                value = held[segment, slot] if slot == TOTAL else held.pop((segment, slot))
                return [Outgoing(to, segment, label, value)]
            case Add(segment, slots):
                if any((segment, slot) not in held for slot in slots):
                    return None
                total, *others = (held.pop((segment, slot)) for slot in slots)
                for other in others:
                    total += other
                held[segment, TOTAL] = total
            case Copy(segment):
                if (segment, slot_of(TOTAL)) not in held:
                    return None
                held[segment, TOTAL] = held.pop((segment, slot_of(TOTAL)))
        return []


def _flat(bucket: Bucket, parts: Mapping[str, Tensor | None]) -> Tensor:
    """Return the gradients one after another, then the marks."""
    pieces = [
        torch.zeros(stop - start) if (part := parts[name]) is None else part.detach().reshape(-1).to("cpu")
        for name, start, stop in bucket.spans
    ]
    marks = [0.0 if parts[name] is None else 1.0 for name in bucket.names]
    return torch.cat([*pieces, torch.tensor(marks)])
