"""Selectors by name."""

from __future__ import annotations

from strategies.bandwidth_aware import BandwidthAware
from strategies.oort import Oort
from strategies.power_of_choice import PowerOfChoice
from strategies.selection import Random, Selector

SELECTORS: dict[str, type[Selector]] = {
    "random": Random,
    "power_of_choice": PowerOfChoice,
    "oort": Oort,
    "bandwidth_aware": BandwidthAware,
}
