"""Federated strategies by name: a client half and a server half each, pure (``strategies.base``).

A new strategy: its file, one entry here, one line in docs/federated.md; the conformance tests find it.
Importing this package does not load torch; the files ``*_module.py`` do, for the owner's machine.
"""

from __future__ import annotations

from collections.abc import Mapping

from atoll.errors import UsageError
from strategies.base import Strategy
from strategies.coordinate_median import CoordinateMedian
from strategies.ditto import Ditto
from strategies.fedadagrad import FedAdagrad
from strategies.fedadam import FedAdam
from strategies.fedasync import FedAsync
from strategies.fedavg import FedAvg
from strategies.fedavgm import FedAvgM
from strategies.fedbn import FedBN
from strategies.feddyn import FedDyn
from strategies.fedimpro import FedImpro
from strategies.fednova import FedNova
from strategies.fedprox import FedProx
from strategies.fedrep import FedRep
from strategies.fedsvd import FedSVD
from strategies.fedyogi import FedYogi
from strategies.flora import FLoRA
from strategies.krum import Krum
from strategies.moon import Moon
from strategies.options import Option, typed
from strategies.opwa import Opwa
from strategies.qfedavg import QFedAvg
from strategies.scaffold import Scaffold
from strategies.trimmed_mean import TrimmedMean
from strategies.vhl import Vhl

__all__ = ["STRATEGIES", "Option", "Strategy", "make_strategy"]

STRATEGIES: dict[str, type[Strategy]] = {
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "fedasync": FedAsync,
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
    "fedrep": FedRep,
    "ditto": Ditto,
    "qfedavg": QFedAvg,
    "opwa": Opwa,
    "vhl": Vhl,
    "fedimpro": FedImpro,
    "moon": Moon,
    "fedsvd": FedSVD,
    "flora": FLoRA,
}


def make_strategy(name: str, options: Mapping[str, Option] | None = None) -> Strategy:
    """The strategy ``name`` with ``options``. UsageError for an unknown name or option, or one out of
    bounds."""
    rule = STRATEGIES.get(name)
    if rule is None:
        raise UsageError(f"no strategy {name[:64]!r}; there are {', '.join(sorted(STRATEGIES))}")
    return rule(**typed(rule, options or {}))
