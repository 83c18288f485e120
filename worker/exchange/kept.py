"""KeptState: what a rule of exchange keeps of each parameter of a stage; it changes with commits alone.

By parameter, so that it goes on under another cut, among other replicas, and in a job that is restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from atoll.errors import BadFrame
from atoll.gradient_exchange import kept_name, kept_of
from strategies.exchanges.base import OWN, is_own

if TYPE_CHECKING:
    from torch import Tensor

    from strategies.exchanges.base import Kept

OWNER = "owner"
"""Key of a checkpoint's tensor: the replica whose own it is (``is_own``)."""


class KeptState:
    """Not thread-safe; tensors are never written to, so who reads one may go on reading."""

    def __init__(self) -> None:
        self._held: dict[str, Kept] = {}
        self._next: dict[str, Kept] = {}  # with the commit of the step under way

    def of(self, name: str) -> Kept:
        """What is kept of a parameter, under no key where that is nothing."""
        return self._held.get(name, {})

    def propose(self, name: str, kept: Kept) -> None:
        """Have this kept of a parameter from the step's commit on."""
        self._next[name] = kept

    def commit(self) -> None:
        """Take what was proposed. What was not is of an exchange that is over: among no other replicas."""
        self._held, self._next = self._next, {}

    def discard(self) -> None:
        """Forget what was proposed: the step is done again, with the same bits."""
        self._next = {}

    def stored(self, shapes: Mapping[str, tuple[int, ...]], replica: int) -> dict[str, dict[str, Tensor]]:
        """Return what a checkpoint has of these parameters, by ``kept_name``."""
        owner = torch.tensor([float(replica)])
        return {
            kept_name(name, replica): {OWN: torch.zeros(shape), **self.of(name), OWNER: owner}
            for name, shape in shapes.items()
        }

    def restore(
        self, tensors: Mapping[str, Kept], shapes: Mapping[str, tuple[int, ...]], replica: int
    ) -> None:
        """Take what ``tensors`` have by ``kept_name`` of these parameters. Of another replica's it is what
        all keep alike. Raises BadFrame for what is of another shape."""
        for key, found in tensors.items():
            named = kept_of(key)
            if named is None or named[0] not in shapes:
                continue
            name = named[0]
            if tuple(found[OWN].shape) != shapes[name]:
                raise BadFrame(f"{key} is of shape {tuple(found[OWN].shape)}, {name} of {shapes[name]}")
            own = OWNER in found and int(found[OWNER].reshape(-1)[0]) == replica
            if name in self._held and not own:
                continue
            keys = (key for key in found if key != OWNER and (own or not is_own(key)))
            # A copy: what was read may be a file that is mapped.
            self._held[name] = {key: found[key].detach().clone() for key in keys}


def kept_keys(tensors: Iterable[str], known: Mapping[str, object]) -> dict[str, str]:
    """Return the names among ``tensors`` that are what a rule keeps of one that is ``known``, with that."""
    named = ((name, kept_of(name)) for name in sorted(tensors) if name not in known)
    return {name: of[0] for name, of in named if of is not None and of[0] in known}
