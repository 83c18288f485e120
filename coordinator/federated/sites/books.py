"""Data of a round's gateways: who keeps its update for which one, and which sums came.

A gateway is a client of the round like any other. It fetches what the others of its site keep for it, and
answers with one sum in whole numbers, as a population's host does. Whoever is not in that sum is asked for
its update by itself, so a gateway can delay a round, but keep nobody out of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coordinator.messages.events import UpdateReady

SUM_OF = "sum of "
"""Before a gateway's name: what its sum is called among updates. No worker's name has a blank."""


@dataclass(frozen=True, slots=True)
class SiteSum:
    """A gateway's sum: the clients in it, and the message that it came with."""

    members: tuple[str, ...]
    update: UpdateReady


@dataclass(frozen=True, slots=True)
class Sites:
    """``via``: the gateway of each client that has one; ``again``: clients that are to send for themselves
    and have not been asked."""

    via: Mapping[str, str] = field(default_factory=dict)
    sums: Mapping[str, SiteSum] = field(default_factory=dict)  # by gateway
    again: frozenset[str] = frozenset()

    @property
    def summed(self) -> frozenset[str]:
        """Clients whose updates are in a sum that came."""
        return frozenset(name for held in self.sums.values() for name in held.members)
