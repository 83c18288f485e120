"""Which codec, at which ratio, on which link; and why.

A link is a directed pair of stages. Its dense time R_j is what one micro-batch's traffic occupies
the scarcest link on its way, everything that the plan sends through that link included. On a
shared gateway the flows get a share of the rate, and it is that share that decides. Latency is
left out: a codec does not shorten it, and other micro-batches use the link meanwhile.

``adatopk``: with tau = max_j R_j / R, every link keeps just enough to finish within tau; what is
fast enough stays dense, and so does what would not shrink. FusionLLM's abstract says no more than
that AdaTopK compresses slow links harder; this rule is our own, from papers/decentralized.md 1.7,
counted in wire bytes, since the formula recalled there may inflate what it sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log10
from typing import TYPE_CHECKING

from atoll.compression import ADATOPK, AUTO, LOSSLESS, MAX_RATIO, OFF, Compression
from atoll.errors import UsageError
from atoll.opdag import TensorMeta
from atoll.plan import LinkSpec, Mask
from compressors.catalogue import CODECS, Use, codec, for_links, link_codecs
from coordinator.planning import TUNED
from coordinator.planning.costs.codec_costs import DENSE, ends_s, load_bytes, taken

if TYPE_CHECKING:
    from compressors.catalogue import Codec
    from coordinator.planning.costs.fleet import Device
    from coordinator.planning.costs.traffic import LinkLoad
    from coordinator.planning.costs.workload import Workload

DEFAULT_RATIO = 32.0
"""R of ``adatopk`` and ``auto``, and of a codec that takes a ratio, when none is given: between the 10
by which a slow link is to shrink at least and the 100 of decentralized.md 1.8."""
FINE, SPARSE = "eden", "topk"
"""Codecs of adatopk and of auto's strongest rung: within ``fine_ratios`` every element in four to three bits,
which costs the trained model no more than dropping elements; beyond, above all where several links lose, the
largest elements alone (decision 010)."""
TOLERANCE = 1e-3  # of tau, when a ratio is solved for
DIGITS = 4  # of a solved ratio: more would only look exact

_TYPICAL = TensorMeta((1024, 256), "float32")  # a boundary of a small model, to size a codec by

# From mild to harsh; gradients are small and many, so they keep the exponent range of fp32.
FORWARD_RUNGS = ("lossless", "fp16", "int8_block")
BACKWARD_RUNGS = ("lossless", "bf16", "int8_block")


@dataclass(frozen=True)
class Link:
    """A directed stage pair as the choice sees it."""

    load: LinkLoad
    dense_s: float  # R_j: of one micro-batch on the scarcest link, with all that passes it
    line: str  # that link's name
    flows: int  # links of the plan that pass it
    sender: Device
    receiver: Device
    header_bytes: int = 0  # a message

    @property
    def pair(self) -> tuple[int, int]:
        return self.load.source, self.load.target

    @property
    def dense_bytes(self) -> int:
        return self.load.n_bytes

    @property
    def rate_bps(self) -> float:
        """Rate that this link's own bytes really get."""
        return 8.0 * self._with_headers(self.dense_bytes) / self.dense_s if self.dense_s else float("inf")

    def send_s(self, n_bytes: float) -> float:
        """Seconds of ``n_bytes`` of payload when the link's other flows shrink alike."""
        return self.dense_s * self._with_headers(n_bytes) / self._with_headers(self.dense_bytes)

    def coded_s(self, spec: LinkSpec) -> float:
        return self.send_s(load_bytes(self.load, spec))

    def pays(self, spec: LinkSpec) -> bool:
        """Break-even: encode + send + decode against sending dense (compression.md 1.4)."""
        encode, decode = ends_s(self.load, spec, self.sender, self.receiver)
        return encode + self.coded_s(spec) + decode < self.dense_s

    def _with_headers(self, n_bytes: float) -> float:
        return n_bytes + self.header_bytes * len(self.load.tensors)


# ---------------------------------------------------------------- what was asked for


def check_compression(wanted: Compression) -> None:
    """UsageError unless links can do what was asked for, naming what they can."""
    if wanted.mode in (OFF, AUTO):
        return
    name = {ADATOPK: SPARSE, LOSSLESS: "lossless"}.get(wanted.mode, wanted.mode)
    if name not in CODECS or not for_links(CODECS[name]):
        what = "is not valid for activations" if name in CODECS else "is not known"
        raise UsageError(
            f"--compress {wanted}: codec {name} {what}; give off, lossless, auto[:RATIO], "
            f"adatopk[:RATIO] or one of {', '.join(link_codecs())}"
        )
    if wanted.mode == name and wanted.ratio is not None and not CODECS[name].rated:
        raise UsageError(f"--compress {wanted}: {name} takes no ratio; write --compress {name}")


def asked_ratio(wanted: Compression) -> float:
    """R, the default where none was given."""
    return DEFAULT_RATIO if wanted.ratio is None else wanted.ratio


def mask_of(wanted: Compression) -> Mask:
    """Which elements of a gradient a sparse codec sends."""
    return Mask.INDEPENDENT if wanted.independent else Mask.SAME


def assumed_ratio(wanted: Compression) -> float:
    """Return how many times fewer bytes the scarcest link will carry, before any cut is known."""
    if wanted.mode == OFF:
        return 1.0
    if wanted.mode in (AUTO, ADATOPK):
        return asked_ratio(wanted)
    facts = CODECS[wanted.mode]
    return _TYPICAL.nbytes / facts.payload_bytes(_TYPICAL, asked_ratio(wanted))


# ---------------------------------------------------------------- links of a cut


def links_of(work: Workload, loads: Sequence[LinkLoad], devices: Sequence[Device]) -> tuple[Link, ...]:
    """Every link of a dense Workload; ``devices`` by stage."""
    header = work.wire.header_bytes
    bits: dict[str, float] = {}
    flows: dict[str, int] = {}
    loads = [load for load in loads if (load.source, load.target) in work.routes]  # between two devices
    for load in loads:
        for name, _ in work.routes[load.source, load.target].resources:
            bits[name] = bits.get(name, 0.0) + 8.0 * (load.n_bytes + header * len(load.tensors))
            flows[name] = flows.get(name, 0) + 1
    found = []
    for load in loads:
        ways = work.routes[load.source, load.target].resources
        seconds, line = max((bits[name] / rate, name) for name, rate in ways)
        ends = devices[load.source], devices[load.target]
        found.append(Link(load, seconds, line, flows[line], *ends, header))
    return tuple(found)


def choose(links: Sequence[Link], wanted: Compression, unnoticed_s: float = 0.0) -> tuple[LinkSpec, ...]:
    """A spec for every link. ``auto`` needs a target: ``within``, or ``codecs.auto_codecs``."""
    if wanted.mode == OFF:
        return ()
    if wanted.mode == ADATOPK:
        return adatopk(links, asked_ratio(wanted), mask_of(wanted), unnoticed_s=unnoticed_s)
    if wanted.mode == LOSSLESS:
        return tuple(_lossless(link) for link in links)
    return uniform(links, wanted.mode, asked_ratio(wanted), mask_of(wanted))


def adatopk(
    links: Sequence[Link],
    ratio: float,
    mask: Mask = Mask.SAME,
    names: Sequence[str] = (FINE, SPARSE),
    unnoticed_s: float = 0.0,
) -> tuple[LinkSpec, ...]:
    """Equalise: every link just within tau = max_j R_j / ``ratio``, dense where that suffices.

    ``names``: of the codecs, the gentlest first, each taken where it reaches. A pair of stages stays
    dense whatever tau is where its links take no longer than ``unnoticed_s`` a micro-batch, since the
    slowest stage takes longer, and where coding takes longer than it saves. A codec there would cost
    work and the model's loss for nothing.
    """
    slowest = max((link.dense_s for link in links), default=0.0)
    tau = slowest / ratio
    found = []
    for specs in _pairs(links):
        sparse = _harsh(specs, tau, ratio, mask, names)
        unnoticed = all(link.dense_s <= min(unnoticed_s, 0.5 * slowest) for link in specs)
        if unnoticed or not any(link.pays(sparse[link.pair]) for link in specs):
            sparse = {link.pair: LinkSpec(*link.pair) for link in specs}
        for link in specs:
            spec = sparse[link.pair]
            found.append(replace(spec, reason=_equalised(link, spec, tau, slowest, ratio, unnoticed_s)))
    return _ordered(found)


def uniform(links: Sequence[Link], name: str, ratio: float, mask: Mask = Mask.SAME) -> tuple[LinkSpec, ...]:
    """Return one codec and ratio on every link that it shrinks: the baseline."""
    found = []
    for pair in _pairs(links):
        specs = _both(pair, name, ratio if codec(name).rated else 1.0, mask)
        for link in pair:
            spec = specs[link.pair]
            found.append(replace(spec, reason=_asked(link, spec, name)))
    return _ordered(found)


def within(links: Sequence[Link], tau: float, limit: float, mask: Mask = Mask.SAME) -> tuple[LinkSpec, ...]:
    """The mildest codec that brings each link within ``tau`` seconds a micro-batch and pays there:
    none, lossless, half precision, int8, else a few bits an element or the sparse codec at the ratio
    needed, at most ``limit``. Where one direction of a pair must be sparse, both are, so that the
    gradient is the true one of the masked net. Reasons are left to the caller, who knows what was
    compared."""
    found: list[LinkSpec] = []
    for pair in _pairs(links):
        mild = {link.pair: _mildest(link, tau, limit) for link in pair}
        short = [link for link in pair if link.coded_s(mild[link.pair]) > tau * (1 + TOLERANCE)]
        if short and for_links(CODECS.get(SPARSE, CODECS[DENSE])):
            sparse = _harsh(pair, tau, limit, mask)
            better = all(
                link.coded_s(sparse[link.pair]) < link.coded_s(mild[link.pair])
                and link.pays(sparse[link.pair])
                for link in short
            )
            mild = sparse if better else mild
        found += mild.values()
    return _ordered(found)


# ---------------------------------------------------------------- one pair of stages


def _mildest(link: Link, tau: float, limit: float) -> LinkSpec:
    """The first rung within ``tau``, else the strongest that pays; never above ``limit``."""
    dense = LinkSpec(*link.pair)
    if link.dense_s <= tau:
        return dense
    best = dense
    for name in BACKWARD_RUNGS if link.load.backward else FORWARD_RUNGS:
        facts = CODECS.get(name)
        if facts is None or not _valid(facts, link):
            continue
        spec = LinkSpec(*link.pair, codec=name)
        shrunk = link.dense_bytes / max(load_bytes(link.load, spec), 1.0)
        if not 1.0 < shrunk <= limit * 1.05 or not link.pays(spec):
            continue
        if link.coded_s(spec) < link.coded_s(best):
            best = spec
        if link.coded_s(best) <= tau:
            break
    return best


def _lossless(link: Link) -> LinkSpec:
    spec = LinkSpec(*link.pair, codec="lossless")
    encode, decode = ends_s(link.load, spec, link.sender, link.receiver)
    told = (
        f"encode {_ms(encode)} + send {_ms(link.coded_s(spec))} + decode {_ms(decode)} against "
        f"{_ms(link.dense_s)} dense a micro-batch{_where(link)}"
    )
    if taken(link.load, "lossless") and link.pays(spec):
        return replace(spec, reason=f"lossless pays: {told}")
    return LinkSpec(*link.pair, reason=f"dense: lossless would take {told}")


def _harsh(
    pair: Sequence[Link], tau: float, limit: float, mask: Mask, names: Sequence[str] = (FINE, SPARSE)
) -> dict[tuple[int, int], LinkSpec]:
    """Return both directions under the first codec that brings them within ``tau``, else under the last."""
    found: dict[tuple[int, int], LinkSpec] = {}
    for name in names:
        if name == FINE and limit < TUNED.fine_ratios[0]:
            continue
        reach = min(limit, TUNED.fine_ratios[1]) if name == FINE else limit
        found = _sparse(pair, tau, reach, mask, name)
        if reach == limit or all(x.coded_s(found[x.pair]) <= tau * (1 + TOLERANCE) for x in pair):
            break
    return found


def _sparse(
    pair: Sequence[Link], tau: float, limit: float, mask: Mask, name: str
) -> dict[tuple[int, int], LinkSpec]:
    """Specs of both directions with the least ratio that brings each within ``tau``.

    With the same mask both directions share it; else each has its own. Dense where nothing needs
    to shrink; ``limit`` where no ratio below it suffices.
    """
    if mask is Mask.INDEPENDENT and len(pair) > 1:
        return {k: v for link in pair for k, v in _sparse((link,), tau, limit, mask, name).items()}
    dense = {link.pair: LinkSpec(*link.pair) for link in pair}
    if all(link.dense_s <= tau * (1 + TOLERANCE) for link in pair):
        return dense

    def specs_at(ratio: float) -> dict[tuple[int, int], LinkSpec]:
        return _both(pair, name, ratio, mask)

    def takes_s(ratio: float) -> float:
        specs = specs_at(ratio)
        return max(link.coded_s(specs[link.pair]) for link in pair)

    # The ratio is what a codec aims at; k a row is whole, and headers and small tensors do not
    # shrink, so it is the bytes that are asked.
    limit, most = min(limit, MAX_RATIO), tau * (1 + TOLERANCE)
    low, high = 1.0, min(limit, max(1.0, *(link.dense_s / max(tau, 1e-12) for link in pair)))
    while takes_s(high) > most:
        if high >= limit:
            return specs_at(limit)
        low, high = high, min(limit, 1.25 * high)
    plain = min(limit, _rounded_up(high))
    if low > 1.0 or takes_s(high) < TUNED.enough * tau:
        while high - low > TOLERANCE * high:
            middle = 0.5 * (low + high)
            low, high = (low, middle) if takes_s(middle) <= most else (middle, high)
    least, as_told = specs_at(min(limit, _rounded_up(high))), specs_at(plain)
    # Many ratios keep the same k: of those the one that follows from the times reads best.
    same = all(load_bytes(x.load, least[x.pair]) == load_bytes(x.load, as_told[x.pair]) for x in pair)
    return as_told if same else least


def _both(pair: Sequence[Link], name: str, ratio: float, mask: Mask) -> dict[tuple[int, int], LinkSpec]:
    """Return both directions of a stage pair under one codec; dense where it is not valid or shrinks nothing.
    The gradient takes its value's positions only where the value was sent sparse."""
    facts = codec(name)
    ratio = ratio if facts.rated else 1.0
    found: dict[tuple[int, int], LinkSpec] = {}
    ahead_is_sparse = False
    for link in sorted(pair, key=lambda one: one.load.backward):
        own = Mask.NONE
        if link.load.backward and facts.size_on is not None:
            direct = any(tensor.direct for tensor in link.load.tensors)
            same = mask is Mask.SAME and ahead_is_sparse and direct
            own = Mask.SAME if same else Mask.INDEPENDENT
        spec = LinkSpec(*link.pair, codec=name, ratio=ratio, mask=own)
        if not _valid(facts, link) or load_bytes(link.load, spec) >= link.dense_bytes:
            spec = LinkSpec(*link.pair)
        ahead_is_sparse = ahead_is_sparse or (not link.load.backward and spec.codec == name)
        found[link.pair] = spec
    return found


def _valid(facts: Codec, link: Link) -> bool:
    use = Use.GRADIENT if link.load.backward else Use.ACTIVATION
    return use in facts.valid_for and not facts.shared_state


def _pairs(links: Iterable[Link]) -> list[tuple[Link, ...]]:
    """Links with their opposite direction, where there is one."""
    found: dict[tuple[int, int], list[Link]] = {}
    for link in links:
        source, target = link.pair
        found.setdefault((min(source, target), max(source, target)), []).append(link)
    return [tuple(pair) for pair in found.values()]


def _ordered(specs: Iterable[LinkSpec]) -> tuple[LinkSpec, ...]:
    return tuple(sorted(specs, key=lambda spec: (spec.source, spec.target)))


def _rounded_up(ratio: float) -> float:
    step = 10.0 ** (floor(log10(ratio)) - DIGITS + 1)
    return round(ceil(ratio / step - 1e-9) * step, 6)


# ---------------------------------------------------------------- in words


def label(spec: LinkSpec) -> str:
    """topk:31.2, bf16, none."""
    facts = CODECS.get(spec.codec)
    return f"{spec.codec}:{spec.ratio:.4g}" if facts is not None and facts.rated else spec.codec


def reasoned(link: Link, spec: LinkSpec, why: str) -> LinkSpec:
    """``spec`` with the figures that stand behind ``why``."""
    if spec.codec == DENSE:
        return replace(spec, reason=f"dense: {_ms(link.dense_s)} a micro-batch{_where(link)}; {why}")
    return replace(spec, reason=f"{_shrunk(link, spec)}; {why}")


def _shrunk(link: Link, spec: LinkSpec) -> str:
    encode, decode = ends_s(link.load, spec, link.sender, link.receiver)
    return (
        f"{label(spec)}: {_ms(link.dense_s)} -> {_ms(link.coded_s(spec))} a micro-batch{_where(link)}, "
        f"{link.dense_bytes / 1024:.4g} -> {load_bytes(link.load, spec) / 1024:.4g} KiB, "
        f"encode {_ms(encode)}, decode {_ms(decode)}"
    )


def _equalised(
    link: Link, spec: LinkSpec, tau: float, slowest: float, ratio: float, unnoticed_s: float
) -> str:
    target = f"{_ms(tau)}, the slowest link's {_ms(slowest)} / {ratio:g}"
    if spec.codec != DENSE:
        return f"{_shrunk(link, spec)}; aims at {target}"
    if link.dense_s <= tau * (1 + TOLERANCE):
        return f"dense: {_ms(link.dense_s)} a micro-batch{_where(link)} is within {target}"
    if link.dense_s <= unnoticed_s:
        return f"dense: {_ms(link.dense_s)} a micro-batch{_where(link)}; {_ms(unnoticed_s)} go unnoticed"
    return f"dense: no codec pays; {_ms(link.dense_s)} a micro-batch{_where(link)}"


def _asked(link: Link, spec: LinkSpec, name: str) -> str:
    if spec.codec != DENSE:
        return f"{_shrunk(link, spec)}; asked for on every link"
    return f"dense: {name} would not shrink what it carries; {_ms(link.dense_s)} a micro-batch{_where(link)}"


def _where(link: Link) -> str:
    shared = f", {link.flows} flows share {link.line}" if link.flows > 1 else ""
    return f" at {link.rate_bps / 1e6:.3g} Mbit/s{shared}"


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
