"""Differential privacy of a federated job, as its owner declares it.

    Federated(clients=100, evaluate_every=0, privacy=Privacy(epsilon=8, delta=1e-5, clip=1.0, sampling=0.1))

What is proven, against which adversary, and what is not: docs/privacy.md; how: ``strategies.privacy``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.errors import UsageError
from atoll.fields import check_fields

MAX_NOISE = 1e4
MIN_NOISE = 0.05
"""Below it the bound is in the hundreds: a word that says nothing."""
MAX_EPSILON = 1e3
MAX_TREE = 2**20
CLIPS = (1e-6, 1e6)


@dataclass(frozen=True, slots=True)
class Privacy:
    """Central differential privacy: updates are clipped and summed, the sum is noised, the noise accounted.

    ``noise``: z, the noise's standard deviation over the sum's L2 sensitivity; 0: the least with which all
    rounds keep within ``epsilon``. ``epsilon``: budget; the job ends before the round that would exceed it;
    0: none. ``sampling``: q, each client takes part in a round by itself with this chance, and
    ``Federated(clients=m)`` is the number expected, by which sums are divided; 0: ``m`` clients a round,
    without amplification. ``clip``: C of an update's L2 norm, or its first value with ``adaptive``, the
    share of updates that shall be within C. ``samples``: a client with so many weighs 1, with fewer in
    proportion. ``tree``: R, each client takes part in one of every R rounds, by a hash of its name, and the
    noise is that of a binary tree over them (DP-FTRL). UsageError for a figure out of its range."""

    noise: float = 0.0
    epsilon: float = 0.0
    delta: float = 1e-5
    clip: float = 1.0
    adaptive: float | None = None
    sampling: float = 0.0
    samples: int = 1
    per_layer: bool = False  # each tensor to C / sqrt(number of tensors)
    tree: int = 0  # rounds of each tree of noise, in each of which a client has one round

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.noise and not self.epsilon:
            raise UsageError("Privacy without noise and without a budget; give epsilon=8, or noise=1.0")
        if self.noise:
            _within("noise", self.noise, MIN_NOISE, MAX_NOISE)
        if self.epsilon:
            _within("epsilon", self.epsilon, 1e-3, MAX_EPSILON)
        _within("delta", self.delta, 1e-18, 1e-2)
        _within("clip", self.clip, *CLIPS)
        _within("sampling", self.sampling, 0.0, 1.0)
        if self.sampling and self.sampling < 1e-6:
            raise UsageError(f"sampling = {self.sampling:g}; give 0 for fixed cohorts, or a chance from 1e-6")
        if self.adaptive is not None:
            _within("adaptive", self.adaptive, 0.01, 0.99)
        if self.adaptive is not None and self.per_layer:
            raise UsageError("adaptive clipping uses the whole update's norm; leave out per_layer")
        if type(self.tree) is not int or not 0 <= self.tree <= MAX_TREE or self.tree == 1:
            raise UsageError(f"tree = {self.tree!r}; give the rounds of a tree, from 2 to {MAX_TREE}, or 0")
        if self.tree and (self.sampling or self.adaptive is not None):
            raise UsageError(
                "a tree's noise covers prefixes of rounds, of which each client has one by its name: leave "
                "out sampling= and adaptive=, or tree="
            )
        if type(self.samples) is not int or not 1 <= self.samples <= 10**9:
            raise UsageError(f"samples = {self.samples!r}; give a whole number from 1")


@dataclass(frozen=True, slots=True)
class SamplePrivacy:
    """Differential privacy of every single sample, by noise that each client adds to the gradient of each of
    its local steps (DP-SGD).

    ``noise``: z, its standard deviation over ``clip``, the L2 bound of a sample's gradient. What it costs
    depends on how many samples a client has; its owner sees it, and may set a budget. UsageError for a
    figure out of its range."""

    noise: float
    clip: float = 1.0
    delta: float = 1e-5

    def __post_init__(self) -> None:
        check_fields(self)
        _within("noise", self.noise, MIN_NOISE, MAX_NOISE)
        _within("clip", self.clip, *CLIPS)
        _within("delta", self.delta, 1e-18, 1e-2)


def check_samples(evaluate_every: int, privacy: Privacy | None) -> None:
    """UsageError for settings of ``Federated`` beside which samples would not be private."""
    if evaluate_every:
        raise UsageError(
            "clients' own evaluations are figures of their samples that no noise covers; set "
            "evaluate_every=0 and evaluate on your own data, Registered(..., held_out=...)"
        )
    if privacy is not None:
        raise UsageError(
            "privacy= and sample_privacy= have different units, a client and a sample, and no bound of both "
            "is stated; leave one out"
        )


def check_private(privacy: Privacy, clients: int, selector: str, evaluate_every: int) -> None:
    """UsageError for settings of ``Federated`` beside which the proof does not hold."""
    if not clients:
        raise UsageError(
            "privacy divides every sum by a number that is known before: give Federated(clients=...), the "
            "clients a round, with sampling the number expected"
        )
    if selector != "random":
        raise UsageError(
            f"selector {selector} looks at what clients measured, which no noise covers; leave it out: "
            "Privacy(sampling=...) says who is drawn"
        )
    if evaluate_every:
        raise UsageError(
            "clients' own evaluations are figures of their data that no noise covers; set evaluate_every=0 "
            "and evaluate on your own data, Registered(..., held_out=...)"
        )
    if privacy.sampling and privacy.delta * clients >= privacy.sampling:
        raise UsageError(
            f"delta = {privacy.delta:g} with {clients / privacy.sampling:,.0f} clients: giving one's data "
            "away would be as private; take a delta well below one over their number"
        )
    if privacy.adaptive is not None and privacy.noise and privacy.noise >= clients / 20.0:
        raise UsageError(
            f"adaptive clipping with noise {privacy.noise:g} and {clients} clients a round: the count of "
            "unclipped updates would take most of the budget; take more than "
            f"{20.0 * privacy.noise:.0f} clients, or a clip"
        )


def _within(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise UsageError(f"Privacy: {name} = {value:g}; give a number from {low:g} to {high:g}")
