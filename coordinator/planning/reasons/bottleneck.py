"""Bottleneck of a step: found by varying the timeline's inputs, not by rules of thumb.

Each stage, link resource and all latencies together are made 10 % better in turn; whatever
shortens the step the most is the bottleneck, and by how much is the reason. In long pipelines
only the busiest are tried. Memory is asked differently: with all micro-batches in flight wherever
delay asks for them, how long would the step take?
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.microbatch import one_f_one_b
from coordinator.planning import TUNED
from coordinator.planning.costs.timeline import step_seconds
from coordinator.planning.reasons.shortage import recompute_hint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.plan import Plan
    from coordinator.planning.costs.fleet import Fleet
    from coordinator.planning.costs.timeline import Timeline
    from coordinator.planning.costs.workload import Workload
    from coordinator.planning.problem import Problem


def bottleneck(problem: Problem, work: Workload, timeline: Timeline, caps: Sequence[int]) -> tuple[str, str]:
    """(name, reason): "link w1>w3", "stage 2 on w3", "uplink lab up", "latency" or "memory".

    ``caps``: most micro-batches in flight that each stage has memory for.
    """
    starved = _memory(problem, work, timeline, caps)
    if starved:
        return "memory", starved
    labels = [problem.fleet.devices[s.device].label for s in work.stages]
    number = {at: stage for stage, those in enumerate(work.together) for at in those}
    options: list[tuple[float, str, str]] = []
    busiest = sorted(range(len(labels)), key=lambda s: -timeline.compute_s[s])[: TUNED.tried_of_a_kind]
    for s in busiest:
        step = step_seconds(_faster_stage(work, s))
        share = timeline.busy_share(s)
        text = f"busy {share:.0%} of the step"
        options.append((step, f"stage {number[s]} on {labels[s]}", text))
    for name, pairs, busy in _wires(work, timeline, labels)[: TUNED.tried_of_a_kind]:
        step = step_seconds(_faster_routes(work, pairs))
        options.append((step, name, f"occupied {busy / timeline.step_s:.0%} of the step"))
    options.append((step_seconds(_shorter_ways(work)), "latency", _latency_text(work)))
    step, name, text = min(options, key=lambda option: option[0])
    gain = 1.0 - step / timeline.step_s
    return name, f"{text}; 10 % better there would shorten the step by {max(gain, 0.0):.1%}"


def thin_links(fleet: Fleet, parts: Sequence[Sequence[str]], exact: Plan) -> str:
    """Return why peers of several machines each meet rarely: what links carry inside a peer and between two,
    and what an exact plan's step sends between those machines; "" where each is one machine."""
    if all(len(part) == 1 for part in parts):
        return ""
    peer_of = {worker: number for number, part in enumerate(parts) for worker in part}
    inside: list[float] = []
    between: list[float] = []
    for a, one in enumerate(fleet.devices):
        for b, other in enumerate(fleet.devices):
            if a != b and one.worker in peer_of and other.worker in peer_of:
                same = peer_of[one.worker] == peer_of[other.worker]
                (inside if same else between).append(float(fleet.effective_bps[a, b]))
    links = exact.prediction.links if exact.prediction is not None else ()
    crossing = [
        link
        for link in links
        if {link.source, link.target} <= peer_of.keys() and peer_of[link.source] != peer_of[link.target]
    ]
    words = (
        f"; links carry {min(inside) / 1e6:.3g} Mbit/s inside a peer, {min(between) / 1e6:.3g} between two"
    )
    if not crossing:
        return words
    n_bytes, busy_s = sum(link.bytes_per_step for link in crossing), max(link.busy_s for link in crossing)
    return f"{words}, over which an exact step sends {n_bytes / 1e6:.3g} MB in {busy_s:.3g} s"


def _memory(problem: Problem, work: Workload, timeline: Timeline, caps: Sequence[int]) -> str:
    """Return why memory is the bottleneck of the step, "" when more of it would gain less than 10 %."""
    n = work.n_micro
    wanted = problem.warmups(work, [n] * len(caps))[0]
    short = [s for s, want in enumerate(wanted) if caps[s] <= want]
    if not short:
        return ""
    orders = [
        one_f_one_b(n, w, n if stage.defers else 0) for w, stage in zip(wanted, work.stages, strict=True)
    ]
    step = step_seconds(work.with_actions(orders))
    if step > TUNED.better * timeline.step_s:
        return ""
    worst = min(short, key=lambda s: (caps[s] / (wanted[s] + 1), s))
    number = next(at for at, those in enumerate(work.together) if worst in those)
    label = problem.fleet.devices[work.stages[worst].device].label
    return (
        f"stage {number} on {label} has room for {caps[worst]} of the {min(n, wanted[worst] + 1)} "
        f"micro-batches in flight that the delays ask for; with room the step would take {step:.3g} s "
        f"({recompute_hint(problem)}lower the micro-batch size or raise its memory limit)"
    )


def _faster_stage(work: Workload, s: int) -> Workload:
    stage = work.stages[s]
    faster = replace(
        stage,
        forward_s=stage.forward_s * TUNED.better,
        backward_s=stage.backward_s * TUNED.better,
        weights_s=stage.weights_s * TUNED.better,
        apart_s=stage.apart_s * TUNED.better,
    )
    return replace(work, stages=(*work.stages[:s], faster, *work.stages[s + 1 :]))


def _wires(
    work: Workload, timeline: Timeline, labels: list[str]
) -> list[tuple[str, frozenset[tuple[int, int]], float]]:
    """(name, stage pairs, busy seconds) of what may be scarce, busiest first.

    Several links in a row may be equally scarce, so what is improved is the whole way of all
    pairs that meet in one of them, both directions; resources met by the same pairs are one.
    """
    users: dict[str, set[tuple[int, int]]] = {}
    for pair, way in work.routes.items():
        for resource, _ in way.resources:
            users.setdefault(resource, set()).add(pair)
    found: dict[frozenset[tuple[int, int]], tuple[str, float]] = {}
    for resource, busy in timeline.resources:
        pairs = frozenset(users[resource])
        a, b = min(pairs)
        name = f"link {labels[a]}>{labels[b]}" if len(pairs) == 1 else f"uplink {resource}"
        if busy > found.get(pairs, ("", -1.0))[1]:
            found[pairs] = (name, busy)
    wires = [(name, pairs, busy) for pairs, (name, busy) in found.items()]
    return sorted(wires, key=lambda wire: (-wire[2], wire[0]))


def _faster_routes(work: Workload, pairs: frozenset[tuple[int, int]]) -> Workload:
    # Activations one way and gradients the other fill a link in turn: one direction alone helps little.
    pairs = pairs | {(b, a) for a, b in pairs if (b, a) in work.routes}
    scarce = {name for pair in pairs for name, _ in work.routes[pair].resources}
    routes = {
        pair: replace(
            way,
            resources=tuple((n, rate / TUNED.better if n in scarce else rate) for n, rate in way.resources),
        )
        for pair, way in work.routes.items()
    }
    return replace(work, routes=routes)


def _shorter_ways(work: Workload) -> Workload:
    routes = {pair: replace(way, latency_s=way.latency_s * TUNED.better) for pair, way in work.routes.items()}
    stages = tuple(replace(s, commit_latency_s=s.commit_latency_s * TUNED.better) for s in work.stages)
    return replace(work, routes=routes, stages=stages)


def _latency_text(work: Workload) -> str:
    longest = max([way.latency_s for way in work.routes.values()], default=0.0)
    commit = max(s.commit_latency_s for s in work.stages)
    return (
        f"one micro-batch's way there and back is long ({longest * 1e3:.0f} ms on the longest link, "
        f"{commit * 1e3:.0f} ms to the coordinator)"
    )
