"""Selectors by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from atoll.errors import UsageError
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


def make_selector(name: str, options: Mapping[str, float | int | bool | str] | None = None) -> Selector:
    """The selector ``name`` with ``options``. UsageError for an unknown name or option, or one out of
    bounds."""
    kind = SELECTORS.get(name)
    if kind is None:
        raise UsageError(f"no selector {name[:64]!r}; there are {', '.join(sorted(SELECTORS))}")
    known = {field.name: type(field.default) for field in fields(kind)}
    given = dict(options or {})
    for option, value in given.items():
        if option not in known:
            raise UsageError(f"{name} has no option {option[:64]!r}; it has {', '.join(known) or 'none'}")
        if known[option] is float and type(value) is int:
            given[option] = float(value)
        elif type(value) is not known[option]:
            raise UsageError(f"{name}: {option} = {value!r}; give a {known[option].__name__}")
    return kind(**given)
