"""``auto``: each link the mildest codec that stops it from holding the step up, judged by the timeline.

One figure ranks what may be done to all links: tau, the seconds a micro-batch that any of them
may take. For each tau every link gets the mildest codec that meets it and pays there
(``ratios.within``). The timeline judges a row of them from mild to the limit, the mildest within
2 % of the fastest is kept, and then each pair of stages is eased as far as the step allows. Less
than 1 % faster than dense is not worth a changed number: then it stays off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.compression import AUTO, OFF, Compression
from atoll.plan import LinkSpec
from coordinator.planning import TUNED
from coordinator.planning.codecs.ratios import Link, asked_ratio, choose, mask_of, reasoned, within
from coordinator.planning.costs.codec_costs import DENSE

if TYPE_CHECKING:
    from coordinator.planning.problem import Problem, Scored

Judge = Callable[[tuple[LinkSpec, ...]], float]
"""Specs (empty: dense) -> predicted step seconds."""

EASINGS = (float("inf"), 8.0, 3.0, 1.5)  # times tau, for one pair; inf: dense


def auto(
    links: Sequence[Link], wanted: Compression, unnoticed_s: float, judge: Judge, judgements: int = 60
) -> tuple[LinkSpec, ...]:
    """A spec for every link, with its reason; all dense when compressing gains less than 1 %.

    ``unnoticed_s``: seconds a micro-batch within which a link holds nothing up. Calls ``judge``
    at most about ``judgements`` times.
    """
    limit, mask = asked_ratio(wanted), mask_of(wanted)
    off_s = judge(())
    steps: dict[tuple[LinkSpec, ...], float] = {}
    found = []  # with the tau of each, mildest first
    for tau in _taus(links, limit, unnoticed_s, max(1, min(TUNED.taus, judgements - 2))):
        specs = within(links, tau, limit, mask)
        if specs not in steps and not without_codecs(specs):
            steps[specs] = judge(specs)
            found.append((specs, tau))
    fastest = min(steps.values(), default=off_s)
    if fastest > TUNED.compressed_is_worth * off_s:
        why = (
            f"compressing gains {max(0.0, 1 - fastest / off_s):.1%} of a step of {off_s:.3g} s, 1 % is asked"
        )
        return tuple(reasoned(link, LinkSpec(*link.pair), why) for link in links)
    enough = max(fastest, min(fastest * TUNED.near_fastest, TUNED.compressed_is_worth * off_s))
    specs, tau = next((s, t) for s, t in found if steps[s] <= enough)
    bar = max(steps[specs], min(steps[specs] * TUNED.eased_slows, TUNED.compressed_is_worth * off_s))
    milder = ([within(pair, tau * times, limit, mask) for times in EASINGS] for pair in _by_pair(links))
    specs, step_s = _eased(specs, steps[specs], bar, judge, judgements - len(steps), milder)
    why = f"the step {off_s:.3g} -> {step_s:.3g} s"
    return tuple(reasoned(link, spec, why) for link, spec in _matched(links, specs))


def settled(problem: Problem, scored: Scored, judgements: int = 60) -> Scored:
    """``scored`` under the specs that ``auto`` chooses for its cut and devices."""
    candidate = scored.candidate
    links = problem.links_between(candidate)

    def judge(specs: tuple[LinkSpec, ...]) -> float:
        judged = problem.scheduled(candidate, specs)
        return judged.step_s if judged is not None else float("inf")

    specs = auto(links, problem.compression, problem.unnoticed_s(candidate), judge, judgements)
    return problem.scheduled(candidate, specs) or scored


def specs_for(
    links: Sequence[Link], wanted: Compression, unnoticed_s: float, judge: Judge
) -> tuple[LinkSpec, ...]:
    """Specs of any compression for a given cut; ``off`` gives dense ones."""
    if wanted.mode == AUTO:
        return auto(links, wanted, unnoticed_s, judge)
    if wanted.mode == OFF:
        return tuple(LinkSpec(*link.pair) for link in links)
    return choose(links, wanted, unnoticed_s)


def _taus(links: Sequence[Link], limit: float, unnoticed_s: float, count: int) -> Iterator[float]:
    """From the mildest to the harshest: even steps on a logarithmic scale, and ``unnoticed_s``."""
    slowest = max((link.dense_s for link in links), default=0.0)
    taus = [slowest / limit ** (i / count) for i in range(1, count + 1)]
    if slowest / limit < unnoticed_s < slowest:
        taus.append(unnoticed_s)
    yield from sorted(taus, reverse=True)


def _by_pair(links: Sequence[Link]) -> list[list[Link]]:
    """Return both directions of each stage pair together, the least loaded first."""
    pairs: dict[tuple[int, int], list[Link]] = {}
    for link in links:
        pairs.setdefault((min(link.pair), max(link.pair)), []).append(link)
    return sorted(pairs.values(), key=lambda pair: max(link.dense_s for link in pair))


def _eased(
    specs: tuple[LinkSpec, ...],
    step_s: float,
    bar: float,
    judge: Judge,
    judgements: int,
    pairs: Iterable[Sequence[tuple[LinkSpec, ...]]],
) -> tuple[tuple[LinkSpec, ...], float]:
    """Each pair in turn as mild, of the choices given for it, as keeps the step within ``bar``."""
    for choices in pairs:
        tried = {specs}
        for choice in choices:
            milder = _with(specs, choice)
            if milder in tried or judgements <= 0:
                continue
            tried.add(milder)
            judgements -= 1
            took_s = judge(milder)
            if took_s <= bar:
                specs, step_s = milder, took_s
                break
    return specs, step_s


def _with(specs: tuple[LinkSpec, ...], changed: Sequence[LinkSpec]) -> tuple[LinkSpec, ...]:
    by_pair = {(spec.source, spec.target): spec for spec in changed}
    return tuple(by_pair.get((spec.source, spec.target), spec) for spec in specs)


def _matched(links: Sequence[Link], specs: Sequence[LinkSpec]) -> list[tuple[Link, LinkSpec]]:
    by_pair = {(spec.source, spec.target): spec for spec in specs}
    return [(link, by_pair[link.pair]) for link in links]


def without_codecs(specs: Sequence[LinkSpec]) -> bool:
    """Return whether no link is compressed."""
    return all(spec.codec == DENSE for spec in specs)


def relabelled(specs: Sequence[LinkSpec], why: str) -> tuple[LinkSpec, ...]:
    """The same specs for another reason."""
    return tuple(replace(spec, reason=why) for spec in specs)
