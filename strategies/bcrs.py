"""BCRS: each client's ratio from its measured uplink, so that all updates arrive together.

    T_i = C_i + L_i + wire(R) / B_i        with the base ratio R for everybody
    T  = max_i T_i                        the slowest client uses R itself
    R_i = least ratio in [1, R] with C_i + L_i + wire(R_i) / B_i <= T

C_i is all time before the upload (the model's download, computation), L_i the latency, B_i the uplink and
wire(r) the bytes of an update at ratio r; the plan thus covers whole rounds. The faster a client's link, the
more of its update it sends, without lengthening the round. A client that has time to send everything
(R_i = 1) finishes earlier, and no ratio changes that; ``even_base`` finds how small the slowest client's
update must be for all to finish together.

The paper aligns the ends of the uploads alone (its C_i is 0) and states ratios as kept shares with 8 bytes
per kept element, CR_i = clip((T - L_i) B_i / 2V, CR, 1). Here a ratio is dense bytes over wire bytes, and
``wire`` counts the bytes that the codec in use really sends. A bandwidth measured only once becomes outdated:
pass the newest estimates every round. Averaging weights remain those by samples (the paper changes them with
the ratios too; where that was tried it cost accuracy). The formula is a reconstruction
(papers/compression.md 2.1), not the paper's text. Source: BCRS+OPWA, ICPP 2024 (arXiv 2408.14736).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import isfinite, sqrt

from atoll.errors import UsageError

HALVINGS = 24  # of the logarithm: a ratio to one part in a million
ROUNDING = 1e-9
EVEN = 0.15  # finish times this close count as even
PLANNED = 0.12  # so close a plan brings them: machines and links vary by the rest
SPARSEST = 128.0  # base that is sought: less than a hundredth of an update hardly moves a model


@dataclass(frozen=True, slots=True)
class Uplink:
    """Time of a client for an update, by its parts. ``bandwidth_bps``: payload bits per second, > 0."""

    bandwidth_bps: float
    latency_s: float = 0.0
    compute_s: float = 0.0  # and all else before the upload

    def finish_s(self, payload_bytes: float) -> float:
        return self.compute_s + self.latency_s + 8.0 * payload_bytes / self.bandwidth_bps


@dataclass(frozen=True, slots=True)
class Ratios:
    """Ratio and expected finish by client; ``slowest`` sets the pace ``bench_s``."""

    ratios: Mapping[str, float]
    finish_s: Mapping[str, float]
    bench_s: float
    slowest: str

    @property
    def whole(self) -> tuple[str, ...]:
        """Return the clients that send everything, ascending: their finish depends on their link, not on the
        plan."""
        return tuple(name for name, ratio in sorted(self.ratios.items()) if ratio <= 1.0)

    @property
    def spread(self) -> float:
        return spread(self.finish_s.values())

    @property
    def reason(self) -> str:
        each = ", ".join(f"{name} {ratio:.3g}x" for name, ratio in sorted(self.ratios.items())[:8])
        text = f"all at {self.bench_s:.3g} s with {self.slowest}: {each}"
        if self.spread <= EVEN:
            return text
        first_s = min(self.finish_s.values())
        return f"{text}; {len(self.whole)} have time for all of it, the first is done at {first_s:.3g} s"


def spread(finish_s: Collection[float]) -> float:
    """Latest over earliest of finish times, all above 0, less 1; 0 for none."""
    return max(finish_s) / min(finish_s) - 1.0 if finish_s else 0.0


def bcrs(
    uplinks: Mapping[str, Uplink],
    dense_bytes: float,
    ratio: float,
    wire_bytes: Callable[[float], float] | None = None,
) -> Ratios:
    """Ratios in [1, ``ratio``] for the participants of a round.

    ``wire_bytes(r)`` does not grow with r; by default dense_bytes / r. UsageError for an empty round,
    a ratio below 1 or a link without bandwidth.
    """
    wire = wire_bytes if wire_bytes is not None else lambda r: dense_bytes / r
    _check(uplinks, dense_bytes, ratio)
    at_base = {name: link.finish_s(wire(ratio)) for name, link in uplinks.items()}
    slowest = max(sorted(at_base), key=lambda name: at_base[name])
    bench_s = at_base[slowest]
    ratios = {}
    for name, link in uplinks.items():
        budget = (bench_s - link.latency_s - link.compute_s) * link.bandwidth_bps / 8.0
        ratios[name] = ratio if name == slowest else _least(wire, budget * (1.0 + ROUNDING), ratio)
    finish = {name: uplinks[name].finish_s(wire(ratios[name])) for name in uplinks}
    return Ratios(ratios, finish, bench_s, slowest)


def even_base(
    uplinks: Mapping[str, Uplink],
    dense_bytes: float,
    wire_bytes: Callable[[float], float] | None = None,
    within: float = PLANNED,
    most: float = SPARSEST,
) -> float | None:
    """The least base ratio in [1, ``most``] with which all finish ``within`` that share of each other.

    None where none does: what comes before the uploads differs by more than the fast clients can send.
    Raises as ``bcrs``.
    """
    wire = wire_bytes if wire_bytes is not None else lambda r: dense_bytes / r
    _check(uplinks, dense_bytes, most)
    # Who has something to hold back ends with the slowest, so only those matter that send all they have.
    first_s = min(link.finish_s(wire(1.0)) for link in uplinks.values())

    def late(ratio: float) -> bool:
        n_bytes = wire(ratio)
        return max(link.finish_s(n_bytes) for link in uplinks.values()) > (1.0 + within) * first_s

    if not late(1.0):
        return 1.0
    return None if late(most) else _bisected(late, most)


def _least(wire: Callable[[float], float], budget_bytes: float, most: float) -> float:
    """The least ratio in [1, most] whose bytes are within the budget; ``most`` always is."""
    return 1.0 if wire(1.0) <= budget_bytes else _bisected(lambda ratio: wire(ratio) > budget_bytes, most)


def _bisected(too_low: Callable[[float], bool], most: float) -> float:
    """The least ratio in [1, most] that is not; 1 is, ``most`` is not."""
    low, high = 1.0, most
    for _ in range(HALVINGS):
        middle = sqrt(low * high)
        low, high = (middle, high) if too_low(middle) else (low, middle)
    return high


def _check(uplinks: Mapping[str, Uplink], dense_bytes: float, ratio: float) -> None:
    if not uplinks:
        raise UsageError("bcrs: a round without participants")
    if not isfinite(ratio) or ratio < 1.0 or not dense_bytes > 0.0:
        raise UsageError(f"bcrs: ratio {ratio:g} of {dense_bytes:g} bytes; a ratio of 1 or more")
    for name, link in uplinks.items():
        delays = link.latency_s + link.compute_s
        if not (isfinite(link.bandwidth_bps) and link.bandwidth_bps > 0.0 and isfinite(delays)):
            raise UsageError(f"bcrs: client {name!r} has {link.bandwidth_bps:g} bit/s up; measure it")
