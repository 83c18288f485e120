"""Selectors by name."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.errors import UsageError
from strategies.bandwidth_aware import BandwidthAware
from strategies.oort import Oort
from strategies.options import Option, typed
from strategies.power_of_choice import PowerOfChoice
from strategies.selection import Random, Selector

SELECTORS: dict[str, type[Selector]] = {
    "random": Random,
    "power_of_choice": PowerOfChoice,
    "oort": Oort,
    "bandwidth_aware": BandwidthAware,
}


def make_selector(name: str, options: Mapping[str, Option] | None = None) -> Selector:
    """The selector ``name`` with ``options``. UsageError for an unknown name or option, or one out of
    bounds."""
    kind = SELECTORS.get(name)
    if kind is None:
        raise UsageError(f"no selector {name[:64]!r}; there are {', '.join(sorted(SELECTORS))}")
    return kind(**typed(kind, options or {}))
