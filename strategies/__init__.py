"""Federated rules by name: a client half and a server half each, pure (``strategies.base``).

A new rule: its file, one entry here, one line in docs/federated.md; the conformance tests find it.
Importing this package does not load torch; the files ``*_module.py`` do, for the owner's machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from atoll.errors import UsageError
from strategies.base import Strategy
from strategies.coordinate_median import CoordinateMedian
from strategies.ditto import Ditto
from strategies.fedadagrad import FedAdagrad
from strategies.fedadam import FedAdam
from strategies.fedavg import FedAvg
from strategies.fedavgm import FedAvgM
from strategies.fedbn import FedBN
from strategies.feddyn import FedDyn
from strategies.fedimpro import FedImpro
from strategies.fednova import FedNova
from strategies.fedprox import FedProx
from strategies.fedyogi import FedYogi
from strategies.krum import Krum
from strategies.moon import Moon
from strategies.opwa import Opwa
from strategies.qfedavg import QFedAvg
from strategies.scaffold import Scaffold
from strategies.trimmed_mean import TrimmedMean
from strategies.vhl import Vhl

__all__ = ["STRATEGIES", "Option", "Strategy", "make_strategy"]

Option = float | int | bool | str

STRATEGIES: dict[str, type[Strategy]] = {
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedadagrad": FedAdagrad,
    "fedprox": FedProx,
    "fednova": FedNova,
    "scaffold": Scaffold,
    "feddyn": FedDyn,
    "coordinate_median": CoordinateMedian,
    "trimmed_mean": TrimmedMean,
    "krum": Krum,
    "fedbn": FedBN,
    "ditto": Ditto,
    "qfedavg": QFedAvg,
    "opwa": Opwa,
    "vhl": Vhl,
    "fedimpro": FedImpro,
    "moon": Moon,
}


def make_strategy(name: str, options: Mapping[str, Option] | None = None) -> Strategy:
    """The rule ``name`` with ``options``. UsageError for an unknown name or option, or one out of bounds."""
    rule = STRATEGIES.get(name)
    if rule is None:
        raise UsageError(f"no strategy {name[:64]!r}; there are {', '.join(sorted(STRATEGIES))}")
    known = {field.name: field for field in fields(rule)}
    given = dict(options or {})
    for option, value in given.items():
        if option not in known:
            raise UsageError(f"{name} has no option {option[:64]!r}; it has {', '.join(known) or 'none'}")
        wanted = type(known[option].default)
        if wanted is float and type(value) is int:
            given[option] = float(value)
        elif type(value) is not wanted:
            raise UsageError(f"{name}: {option} = {value!r}; give a {wanted.__name__}")
    return rule(**given)
