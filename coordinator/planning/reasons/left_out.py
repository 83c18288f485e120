"""Reasons why a device is not in the plan: the step's duration with it, or why the search passed it over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from coordinator.planning import TUNED
from coordinator.planning.problem import Candidate, Problem, Scored
from coordinator.planning.search.chain import min_max
from coordinator.planning.search.ring import ring_cuts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from coordinator.planning.costs.fleet import Fleet
    from coordinator.planning.search.preselect import Preselection


def left_out(problem: Problem, best: Scored) -> tuple[tuple[str, str], ...]:
    """(worker, reason) of every device that the plan does not use."""
    used = set(best.candidate.devices)
    spare = [d for d in range(len(problem.fleet.devices)) if d not in used]
    found = []
    for i, d in enumerate(spare):
        worker = problem.fleet.devices[d].worker
        if i < TUNED.explained_devices and len(used) <= 24:
            found.append((worker, _reason(problem, best, d)))
        else:
            found.append((worker, f"{len(used)} devices suffice; each further one slows the step"))
    return tuple(found)


def passed_over(preselection: Preselection, searched: Fleet) -> tuple[tuple[str, str], ...]:
    """(worker, reason) of every device that the search did not look at."""
    tried = np.array([preselection.fleet.index[device.worker] for device in searched.devices], dtype=np.intp)
    usual_s = float(np.median(preselection.seconds[tried]))
    among = f"not among the {len(tried)} of {len(preselection.fleet.devices)} workers that were tried"
    inside = set(tried.tolist())
    rates = preselection.fleet.effective_bps
    between = np.minimum(rates[np.ix_(tried, tried)], rates[np.ix_(tried, tried)].T)
    np.fill_diagonal(between, 0.0)
    usual_bps = float(np.median(between.max(axis=1)))
    found = []
    for at, device in enumerate(preselection.fleet.devices):
        if at in inside:
            continue
        alone_s = float(preselection.seconds[at])
        best_bps = float(np.minimum(rates[at, tried], rates[tried, at]).max())
        if alone_s > 1.01 * usual_s:
            why = f"alone it takes {alone_s:.3g} s a micro-batch, half of those at most {usual_s:.3g} s"
        elif best_bps < 0.99 * usual_bps:
            why = (
                f"its best link to them carries {best_bps / 1e6:.3g} Mbit/s, half of theirs at least "
                f"{usual_bps / 1e6:.3g}"
            )
        else:
            why = "it is about as good as they are, and they suffice"
        found.append((device.worker, f"{among}: {why}"))
    return tuple(found)


def summarised(
    reasons: Sequence[tuple[str, str]], beyond: int = 0, among: int = 0
) -> tuple[tuple[str, str], ...]:
    """The first reasons, one entry for all others, and one for the ``beyond`` workers of a huge
    fleet of which only the best ``among`` were timed and probed."""
    rest = len(reasons) - TUNED.listed
    found = tuple(reasons)
    if rest > 1:
        found = (*found[: TUNED.listed], (f"{rest} more workers", "for reasons like these"))
    if beyond:
        why = f"slower, worse linked or not measured yet: a plan is made among the best {among}"
        found = (*found, (f"{beyond} more workers", why))
    return found


def _reason(problem: Problem, best: Scored, device: int) -> str:
    judged = [
        problem.deferring(s) for c in _with(problem, best, device) if (s := problem.score(c)) is not None
    ]
    if not judged:
        limit = problem.limits[device] / 2**20
        return f"no place for it: its {limit:.0f} MiB hold no useful share of the model"
    step = min(s.step_s for s in judged)
    if step > best.step_s * 1.001:
        return f"it would slow the step from {best.step_s:.3g} s to {step:.3g} s"
    return f"it would not help: {step:.3g} s a step with it, {best.step_s:.3g} s without"


def _with(problem: Problem, best: Scored, device: int) -> Iterator[Candidate]:
    """The best plan with ``device`` inserted anywhere, cut anew."""
    positions = problem.coarse(TUNED.left_out_positions)
    devices = tuple(dict.fromkeys(best.candidate.devices))
    orders = [(*devices[:i], device, *devices[i:]) for i in range(len(devices) + 1)]
    if best.candidate.several:
        yield from ring_cuts(problem, orders, positions, len(orders))
        return
    for order in orders:
        fits = [problem.fits(d, positions, 1) for d in order]
        cut = min_max(problem.chain(order, positions, fits))
        if cut is not None and np.isfinite(cut.value):
            yield Candidate(order, tuple(int(positions[s]) for s in cut.starts))
