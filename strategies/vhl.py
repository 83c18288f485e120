"""VHL: all clients also learn one common set of virtual images, and match their features to it.

    L = CE(real) + alpha CE(virtual) + lambda SupCon([f_real, stopgrad(f_virtual)]) + 0.1 SupCon(f_virtual)

The loss lives in the wrapper of the owner's module (``strategies.vhl_module``). This file is the strategy
around it: another strategy by name as ``base``, with its own options, and the buffer that ends the matching
after ``match_epochs`` local epochs of a round. The virtual set is a buffer of the wrapper, so it goes out
once with the job and is the same bytes everywhere; a client that makes it from the seed compares its
fingerprint (``strategies.virtual_data``). Costs: about twice the local computation, 2C instead of C outputs.
Source: VHL (Tang 2022); papers/federated.md 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from atoll.errors import UsageError
from strategies.around import Around
from strategies.base import Strategy
from strategies.fedadam import FedAdam
from strategies.fedavg import FedAvg
from strategies.fedavgm import FedAvgM
from strategies.feddyn import FedDyn
from strategies.fednova import FedNova
from strategies.fedprox import FedProx
from strategies.options import bounded, parsed, typed
from strategies.scaffold import Scaffold
from strategies.values import Facts

if TYPE_CHECKING:
    from strategies.layout import Arrays, Layout
    from strategies.values import Broadcast

MATCH = "vhl_match"
"""Buffer of the wrapper: 1 while features are matched, 0 afterwards."""


BASES: dict[str, type[Strategy]] = {
    rule.name: rule for rule in (FedAvg, FedAvgM, FedAdam, FedProx, FedNova, Scaffold, FedDyn)
}


@dataclass(frozen=True)
class Vhl(Around):
    """``base``: a strategy of ``BASES`` by name; ``match_epochs`` >= 0; ``base_options``: the base's, as in
    "mu=0.1, server_lr=0.5", within the bounds that it has alone."""

    name: ClassVar[str] = "vhl"
    FACTS: ClassVar[Facts] = Facts(
        "a common virtual data set aligns features", "Tang 2022; papers/federated.md 1", changes_loss=True
    )

    base: str = "fedavg"
    match_epochs: int = bounded(5, 0, 1_000_000)
    base_options: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base not in BASES:
            raise UsageError(f"vhl: base {self.base[:64]!r}; it goes around {', '.join(BASES)}")
        _ = self.inner  # whose options are checked where it is made

    @cached_property
    def inner(self) -> Strategy:
        rule = BASES[self.base]
        return rule(**typed(rule, parsed("vhl: base_options", self.base_options)))

    @property
    def facts(self) -> Facts:
        """The base's, with a changed loss."""
        return replace(
            self.inner.facts, summary=self.FACTS.summary, source=self.FACTS.source, changes_loss=True
        )

    def at_epoch(self, layout: Layout, broadcast: Broadcast, epoch: int) -> Arrays:
        matched = np.asarray(1.0 if epoch < self.match_epochs else 0.0, np.float32)
        return {**super().at_epoch(layout, broadcast, epoch), MATCH: matched}
