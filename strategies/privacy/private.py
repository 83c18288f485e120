"""Differential privacy around a strategy that sums: clip, integer noise, a fixed denominator.

    x' = w x min(1, C / |x|) / C,   w = min(n, cap) / cap         each update; |.| over all its tensors
    v  = x' 2^24, towards zero;     |v|^2 <= 2^48                 checked in whole numbers, after rounding
    D  = C (sum v + N_Z(0, (z 2^24)^2)) / (2^24 m)                m as declared, not as arrived

Rounding towards zero shortens every coordinate, so the bound holds after it as before; should the scaling's
own last bit break it, the update is scaled down once more. Where C adapts, each update also says whether it
was within C, as s = +1 or -1, and the noisy sum of these moves C for the next round:

    b = (sum s + N_Z(0, (m/10)^2)) / 2m + 1/2
    C <- C exp(-0.2 (b - gamma)),   1/z^2 = 1/z_D^2 + 1/(m/10)^2,   z_D the noise of D

b counts the UNclipped. A round's updates are clipped to the C by which its noise is scaled; an update of
norm 0 is within any C. Beside secure aggregation nobody holds the sum before its noise: each member adds
N_Z(0, s^2), s > z 2^24 / sqrt(q - 1), to its own v, q the fewest members that can be summed. So a sum has the
noise of q - 1 members and more, whichever one of them is left out of it. Sums of discrete Gaussians are not
discrete Gaussian. In the divergence of every order they cost at most tau d more (Kairouz 2021, Theorem 1 and
Proposition 14), tau = 10 sum_k<n exp(-2 pi^2 s^2 k/(k+1)), and the ">" is worth more than that.

Sources: McMahan 2018 (arXiv 1710.06963) with a fixed denominator; Andrew 2021 (arXiv 1905.03871), Alg. 1, the
bits doubled to whole numbers; Kairouz 2021 (arXiv 2102.06387) for integer sums and their noise.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from atoll.errors import UsageError
from atoll.federated import MOST_COUNTED, Federated
from atoll.opdag import TensorMeta
from atoll.privacy import CLIPS, Privacy
from strategies import make_strategy
from strategies.around import Around
from strategies.checking import check_updates
from strategies.fixed import Accumulator, FixedSums, Grid, real
from strategies.layout import Role, pieces
from strategies.linear import AVERAGED, SAMPLES, TRAINED, WEIGHT, Linear
from strategies.own.declared import Declared
from strategies.privacy.accountant import noise_for, planned
from strategies.privacy.discrete_gaussian import discrete_gaussian
from strategies.privacy.tree import SEED_BYTES, added
from strategies.sums import Contribution, Sums, Term
from strategies.values import Facts

if TYPE_CHECKING:
    from strategies.base import Strategy
    from strategies.layout import Array, Arrays, Layout, SlotMetas, Slots
    from strategies.linear import Source
    from strategies.values import Broadcast, ClientUpdate, ServerState

    Noise = Callable[..., Array]

COVERED = ("fedavg", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "fedprox", "fedbn", "fedrep")
"""Strategies whose server sees nothing of an update but its sum: what they do with it is
post-processing."""
UNIT_BITS = 24
UNIT = 1 << UNIT_BITS  # the clip in units of the sums
SURPLUS = 4
"""A round's sums hold so many times the clients expected: of 20 expected more than 80 never come."""
CLIP_RATE = 0.2
COUNT_SHARE = 10  # the count's noise is m / 10, of bits that count double: Andrew's m / 20
PRIVACY, CLIP, UNCLIPPED = "privacy", "clip", "unclipped"
TREE, SEED, DONE = "tree", "seed", "done"
CLIP_META = TensorMeta((1,), "float64")


@dataclass(frozen=True)
class Private(Around, Linear):
    """``rule`` under ``privacy``, for rounds of ``cohort`` clients (sampled: expected). UsageError for a
    strategy that the proof does not cover, or a model whose buffers travel."""

    name: ClassVar[str] = "private"

    rule: Linear
    privacy: Privacy
    cohort: int
    bound: float = 0.0  # C of the round in flight; 0: as declared
    seed: bytes = b""  # of the tree of the round in flight, at the coordinator alone
    done: int = 0  # rounds of that tree before it
    noise: Noise = discrete_gaussian

    def __post_init__(self) -> None:
        if not isinstance(self.rule, Linear) or self.rule.name not in COVERED:
            raise UsageError(
                f"privacy around {self.rule.name} is not proven: its server looks at single updates, or at "
                f"numbers beside them; take one of {', '.join(COVERED)}"
            )
        if self.cohort < 1 or not self.privacy.noise:
            raise UsageError(f"a private round of {self.cohort} clients with noise {self.privacy.noise:g}")

    # ------------------------------------------------------------ what it is around

    @property
    def inner(self) -> Strategy:
        return self.rule

    @property
    def core(self) -> Strategy:
        return self

    @property
    def facts(self) -> Facts:
        return replace(self.rule.facts, summary=f"{self.rule.facts.summary}; clipped, noised")

    @property
    def min_updates(self) -> int:
        return 0

    @property
    def whole(self) -> bool:
        return True

    def adapt(self, layout: Layout) -> Layout:
        found = self.rule.adapt(layout)
        if travel := found.names(Role.AVERAGED):
            raise UsageError(
                f"privacy: the buffer {travel[0]!r} travels beside the weights, and noise would make a "
                "variance negative; keep statistics with the clients, local=('*running_mean', "
                "'*running_var') or fedbn, or take GroupNorm"
            )
        return found

    def init(self, layout: Layout, weights: Arrays, n_clients: int) -> ServerState:
        self.adapt(layout)
        state = self.rule.init(layout, weights, n_clients)
        slots = {**state.slots, **self._slot(self.privacy.clip)}
        return replace(state, slots={**slots, **self._new_tree()})

    def extra_down(self, layout: Layout) -> SlotMetas:
        return {**self.rule.extra_down(layout), **({PRIVACY: {CLIP: CLIP_META}} if self._adapts else {})}

    def configure(self, state: ServerState) -> Broadcast:
        found = self.rule.configure(state)
        return replace(found, extra={**found.extra, **self._slot(self._clip_of(state.slots))})

    # ------------------------------------------------------------ sums

    def during(self, extra: Slots) -> Private:
        found = replace(self, bound=self._clip_of(extra))
        held = extra.get(TREE)  # which no broadcast has
        return found if held is None else replace(found, seed=held[SEED].tobytes(), done=int(held[DONE][0]))

    def term_metas(self, layout: Layout) -> SlotMetas:
        return {TRAINED: layout.metas_of(Role.TRAINED)}

    def grid(self, clients: int, samples: int) -> Grid:
        scalars = {SAMPLES: float(samples), **({UNCLIPPED: float(clients)} if self._adapts else {})}
        exponent = max(0, math.ceil(math.log2(clients)))
        return Grid({TRAINED: float(2**exponent)}, scalars, UNIT_BITS + exponent)

    def round_grid(self, clients: int, samples: int) -> Grid:
        """From public numbers alone: how many were drawn is nobody's business."""
        most = 2 ** math.ceil(math.log2(SURPLUS * self.cohort + 64))
        return self.grid(most, most * MOST_COUNTED)

    def contribute(self, layout: Layout, update: ClientUpdate) -> Contribution:
        delta = {name: update.delta[name] for name in layout.names(Role.TRAINED)}
        clip = self.bound or self.privacy.clip
        weight = min(update.n_samples, self.privacy.samples) / self.privacy.samples
        whole, within = clipped(delta, clip, weight, per_layer=self.privacy.per_layer)
        # Exact in doubles: whole numbers below 2^25 over a power of two.
        arrays = {name: array / float(UNIT) for name, array in whole.items()}
        scalars = {SAMPLES: float(update.n_samples)}
        if self._adapts:
            scalars[UNCLIPPED] = float(within)
        return Contribution({TRAINED: Term(1.0, arrays)}, scalars)

    def released(self, sums: FixedSums, layout: Layout) -> FixedSums:
        """Return the sums with noise, all that may ever be known of them; also of nobody's."""
        sigma, count_sigma = self.sigmas
        held = sums.arrays.get(TRAINED, {})
        noised = {}
        for name, meta in layout.metas_of(Role.TRAINED).items():
            total = np.array(held[name]) if name in held else np.zeros(meta.shape, np.int64)
            flat = total.reshape(-1)
            if self.privacy.tree:
                flat += self._of_tree(name, flat.size, sigma)
            for part in () if self.privacy.tree else pieces(flat.size):
                flat[part] += self.noise(sigma, len(flat[part]))
            noised[name] = total
        scalars = {SAMPLES: 0}
        if self._adapts:
            one = round(1.0 / sums.grid.scalar_unit(UNCLIPPED))
            signs = 2 * (sums.scalars[UNCLIPPED] // one) - sums.clients
            scalars[UNCLIPPED] = (signs + int(self.noise(count_sigma, 1)[0])) * one
        return FixedSums(sums.grid, {TRAINED: noised}, {TRAINED: 0}, scalars, 0)

    def hidden(self, sums: FixedSums, quorum: int, source: Source) -> FixedSums:
        sigma, noised = self.member_sigma(quorum), {}
        for name, array in sums.arrays[TRAINED].items():
            total = np.array(array)
            flat = total.reshape(-1)
            for part in pieces(flat.size):
                flat[part] += self.noise(sigma, len(flat[part]), source)
            noised[name] = total
        return replace(sums, arrays={TRAINED: noised})

    def finish(self, state: ServerState, sums: Sums) -> ServerState:
        clip, count = self._clip_of(state.slots), float(self.cohort)
        change = {name: array * array.dtype.type(clip) for name, array in sums.arrays[TRAINED].items()}
        ours = (PRIVACY, TREE)
        bare = replace(state, slots={slot: held for slot, held in state.slots.items() if slot not in ours})
        after = self.rule.finish(bare, Sums({TRAINED: change, AVERAGED: {}}, {SAMPLES: count, WEIGHT: count}))
        if self.privacy.tree:
            return replace(after, slots={**after.slots, **self._next_tree(state.slots[TREE])})
        if self.privacy.adaptive is None:
            return after
        share = min(1.0, max(0.0, sums.scalars[UNCLIPPED] / (2.0 * count) + 0.5))
        moved = clip * math.exp(-CLIP_RATE * (share - self.privacy.adaptive))
        return replace(after, slots={**after.slots, **self._slot(min(max(moved, CLIPS[0]), CLIPS[1]))})

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate]) -> ServerState:
        sums = Accumulator(self.round_grid(0, 0))
        core = self.during(state.slots)
        for update in check_updates(self, state, updates):
            sums.add(core.contribute(state.layout, update))
        return self.finish(state, real(core.released(sums.sums(), state.layout), state.layout))

    # ------------------------------------------------------------ the mechanism

    @property
    def sigmas(self) -> tuple[int, int]:
        """Standard deviations in whole numbers: of each element of the sum, and of the sum of signs (0:
        none). With both, one round is as private as noise ``z`` alone."""
        noise = self.privacy.noise
        if not self._adapts:
            return math.ceil(noise * UNIT), 0
        count = math.ceil(self.cohort / COUNT_SHARE)
        left = 1.0 / noise**2 - 1.0 / count**2
        if left <= 0.0:
            raise UsageError(
                f"adaptive clipping: noise {noise:g} with {self.cohort} clients; take more clients"
            )
        return math.ceil(UNIT / math.sqrt(left)), count

    def member_sigma(self, quorum: int) -> int:
        """Standard deviation in whole numbers of what one member adds to each element, where at least
        ``quorum`` are summed and one of them may tell the coordinator its own noise. UsageError for fewer
        than two."""
        if quorum < 2:
            raise UsageError(f"noise shared by {quorum} members; at least 2 must be left in every sum")
        # One more than needed: of s^2 n a share of 2/s, against tau d (see above) of less than 2^-10^8.
        return math.ceil(self.privacy.noise * UNIT / math.sqrt(quorum - 1)) + 1

    @property
    def _adapts(self) -> bool:
        return self.privacy.adaptive is not None

    def _of_tree(self, name: str, size: int, sigma: int) -> Array:
        if len(self.seed) != SEED_BYTES:
            raise UsageError("a sum of a tree's round without the seed of its noise")
        return added(name, size, self.done, self.seed, sigma, self.noise)

    def _new_tree(self) -> dict[str, dict[str, Array]]:
        if not self.privacy.tree:
            return {}
        seed = np.frombuffer(os.urandom(SEED_BYTES), np.uint8)
        return {TREE: {SEED: seed, DONE: np.zeros(1, np.int64)}}

    def _next_tree(self, held: Arrays) -> dict[str, dict[str, Array]]:
        done = int(held[DONE][0]) + 1
        if done == self.privacy.tree:
            return self._new_tree()
        return {TREE: {SEED: held[SEED], DONE: np.array([done], np.int64)}}

    def _slot(self, clip: float) -> dict[str, dict[str, Array]]:
        return {PRIVACY: {CLIP: np.array([clip])}} if self._adapts else {}

    def _clip_of(self, slots: Slots) -> float:
        if not self._adapts:
            return self.privacy.clip
        found = float(slots[PRIVACY][CLIP][0])
        if not CLIPS[0] <= found <= CLIPS[1]:
            raise UsageError(f"a clip of {found:g}; from {CLIPS[0]:g} to {CLIPS[1]:g}")
        return found


def strategy_of(rule: Federated) -> Strategy:
    """Return the strategy of a job, under its privacy. UsageError for what there is not, or is not
    proven."""
    own = rule.own
    found = make_strategy(rule.strategy, rule.options) if own is None else Declared(rule.strategy, own)
    if rule.privacy is None:
        return found
    if not isinstance(found, Linear):
        raise UsageError(f"privacy around {rule.strategy} is not proven; take one of {', '.join(COVERED)}")
    return Private(found, rule.privacy, rule.clients)


def settled(rule: Federated, rounds: int) -> Federated:
    """Return a job's settings with the noise that its budget asks for, where none was given. UsageError for
    a budget that no round keeps within."""
    privacy = rule.privacy
    if privacy is None:
        return rule
    if not privacy.noise:
        privacy = replace(privacy, noise=noise_for(privacy, rounds))
    if privacy.epsilon and (first := planned(privacy, 1)) > privacy.epsilon:
        raise UsageError(
            f"the first round alone would spend epsilon {first:.3g} of {privacy.epsilon:g}; raise noise, or "
            "leave it out and it is found"
        )
    return replace(rule, privacy=privacy)


def clipped(
    delta: Arrays, clip: float, weight: float, *, per_layer: bool = False
) -> tuple[dict[str, Array], bool]:
    """Return an update as whole numbers of L2 norm at most 2^24, int64, and whether its norm was within
    ``clip``.

    ``weight`` in [0, 1] makes it smaller; ``per_layer``: each tensor to clip / sqrt(their number).
    """
    parts = math.sqrt(len(delta)) if per_layer else 1.0
    squares = {name: _square(array) for name, array in delta.items()}
    whole_norm = math.sqrt(sum(squares.values()))
    most = clip / parts
    scales = {
        name: UNIT * weight / parts / max(math.sqrt(squares[name]) if per_layer else whole_norm, most)
        for name in delta
    }
    shrunk = 1.0
    while True:
        whole = {name: _rounded(array, scales[name] * shrunk) for name, array in delta.items()}
        if sum(_whole_square(array) for array in whole.values()) <= UNIT * UNIT:
            return whole, whole_norm <= clip
        shrunk *= 1.0 - 2.0**-20


def _square(array: Array) -> float:
    flat = array.reshape(-1)
    return sum(
        float(np.dot(piece, piece)) for piece in (flat[p].astype(np.float64) for p in pieces(flat.size))
    )


def _rounded(array: Array, scale: float) -> Array:
    found: Array = np.empty(array.shape, np.int64)
    into, source = found.reshape(-1), array.reshape(-1)
    for part in pieces(source.size):
        into[part] = np.trunc(np.multiply(source[part], scale, dtype=np.float64))
    return found


def _whole_square(array: Array) -> int:
    """The square of the norm, exact: a piece's elements are below 2^25 where the norm nearly is 2^24."""
    flat: Any = array.reshape(-1)
    return sum(int(np.dot(flat[part], flat[part])) for part in pieces(flat.size))
