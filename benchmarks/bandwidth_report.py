"""What rounds on unlike lines take, and what variants of one federation need to a common accuracy. Pure.

A client's finish in a round, from the round's beginning:

    download bytes / downlink + latency + steps x seconds a step + upload bytes / uplink + latency

The round takes as long as its slowest participant. Bytes are those of the files that travelled; lines are
a scenario's rates for one flow alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.federated_report import Run, best, cost_to
from lab.scenario import Scenario
from strategies.bcrs import Uplink, spread

DENSE, PROPOSED = "dense", "bcrs_opwa"
FULL = 1.02  # an update within 2 % of a client's largest is all that it has to send


@dataclass(frozen=True, slots=True)
class Line:
    """One client's way to the coordinator and back."""

    up_bps: float
    down_bps: float
    latency_s: float  # one way

    def down_s(self, payload_bytes: float) -> float:
        return 8.0 * payload_bytes / self.down_bps + self.latency_s

    def up_s(self, payload_bytes: float) -> float:
        return 8.0 * payload_bytes / self.up_bps + self.latency_s

    def uplink(self, down_bytes: float, compute_s: float) -> Uplink:
        """The line as BCRS sees it: what comes before the upload is no time to send in."""
        return Uplink(self.up_bps, self.latency_s, self.down_s(down_bytes) + compute_s)


def lines(scenario: Scenario) -> dict[str, Line]:
    """Each worker's line, by host name."""
    hub = scenario.coordinator
    return {
        host.name: Line(
            scenario.bottleneck_mbit(host.name, hub) * 1e6,
            scenario.bottleneck_mbit(hub, host.name) * 1e6,
            scenario.round_trip_ms(host.name, hub) / 2e3,
        )
        for host in scenario.hosts
        if host.worker and host.name != hub
    }


def finish_s(
    known: Mapping[str, Line],
    steps: Mapping[str, int],
    up_bytes: Mapping[str, float],
    down_bytes: float,
    step_s: float,
) -> dict[str, float]:
    """Seconds until each participant's update is in."""
    return {
        name: known[name].down_s(down_bytes) + steps[name] * step_s + known[name].up_s(sent)
        for name, sent in up_bytes.items()
    }


def mean_ratio(sent_bytes: Sequence[float], dense_bytes: float) -> float:
    """The mean over clients of dense / sent."""
    return statistics.mean(dense_bytes / sent for sent in sent_bytes)


def ratio_for(wire_bytes: Callable[[float], float], wanted_bytes: float, most: float = 10_000.0) -> float:
    """The ratio in [1, ``most``] at which ``wire_bytes``, which does not grow, is ``wanted_bytes``."""
    low, high = 1.0, most
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if wire_bytes(middle) <= wanted_bytes else (middle, high)
    return high


# ---------------------------------------------------------------- a training's cost


def timed(run: Run, known: Mapping[str, Line], step_s: float, downlink: str) -> dict[str, Any]:
    """The run with bytes and seconds up to each round, and how far apart its clients finished.

    A spread is the latest finish over the earliest less 1, the median of the rounds. ``spread_held``
    counts those alone that held something back: who sends all that it has cannot fill the time that is
    left.
    """
    curve, total_s, up, down = [], 0.0, 0.0, 0.0
    spreads, held_spreads = [], []
    for point in run["curve"]:
        finish = finish_s(known, run["steps"], point["up"], point["down"][downlink], step_s)
        held = [s for name, s in finish.items() if point["up"][name] * FULL < run["full_bytes"]]
        spreads.append(spread(list(finish.values())))
        held_spreads.append(spread(held))
        total_s += max(finish.values())
        up += sum(point["up"].values())
        down += point["down"][downlink] * len(finish)
        curve.append(
            {"accuracy": point["accuracy"], "lab_s": total_s, "up": up, "down": down, "bytes": up + down}
        )
    sent = list(run["curve"][-1]["up"].values())
    return {
        "variant": run["variant"],
        "seed": run["seed"],
        "curve": curve,
        "spread": statistics.median(spreads),
        "spread_held": statistics.median(held_spreads),
        "held": len(held),
        "ratio": mean_ratio(sent, run["dense_bytes"]),
        "ratios": run["ratios"],
    }


# ---------------------------------------------------------------- the table


def report(runs: Sequence[Run], share: float) -> dict[str, Any]:
    """Figures by variant. The target of a seed is ``share`` of its dense run's best accuracy.

    ``faster``: by how much the proposed variant's seconds to the target are fewer than this one's, None
    where either never got there; ``sooner_to_best``: the same to this variant's own best accuracy, and
    ``points_below`` how far its best is below the proposed one's. Spreads are those of the worst seed.
    """
    by: dict[str, dict[int, Run]] = {}
    for run in runs:
        by.setdefault(run["variant"], {})[run["seed"]] = run
    targets = {seed: share * best(run) for seed, run in by.get(DENSE, {}).items()}
    costs = {
        name: {seed: _cost(run, targets[seed]) for seed, run in sorted(of.items()) if seed in targets}
        for name, of in by.items()
    }
    proposed = by.get(PROPOSED, {})
    rows = {
        name: _row(of, costs[name], costs.get(PROPOSED, {})) | _beaten(of, proposed)
        for name, of in by.items()
    }
    return {"targets": {str(seed): round(value, 2) for seed, value in targets.items()}, "variants": rows}


def _cost(run: Run, target: float) -> dict[str, float] | None:
    found = cost_to(run, target)
    if found is None:
        return None
    at = run["curve"][int(found["rounds"]) - 1]
    return {**found, "up": at["up"], "down": at["down"]}


def _beaten(runs: Mapping[int, Run], proposed: Mapping[int, Run]) -> dict[str, Any]:
    """How far the proposed variant is ahead of this one at this one's best, by paired seeds."""
    seeds = sorted(runs.keys() & proposed.keys())
    points = [best(proposed[seed]) - best(runs[seed]) for seed in seeds]
    sooner = []
    for seed in seeds:
        target = best(runs[seed])
        ours, theirs = cost_to(proposed[seed], target), cost_to(runs[seed], target)
        sooner.append(None if ours is None or theirs is None else theirs["lab_s"] / ours["lab_s"])
    known = [value for value in sooner if value is not None]
    return {
        "points_below": round(statistics.mean(points), 2) if points else None,
        "sooner_to_best": round(statistics.mean(known), 3) if known and len(known) == len(sooner) else None,
        "sooner_by_seed": [None if value is None else round(value, 3) for value in sooner],
    }


def _row(
    runs: Mapping[int, Run],
    costs: Mapping[int, Mapping[str, float] | None],
    proposed: Mapping[int, Mapping[str, float] | None],
) -> dict[str, Any]:
    reached = [cost for cost in costs.values() if cost is not None]
    faster = {}
    for seed, cost in costs.items():
        ours = proposed.get(seed)
        faster[str(seed)] = None if cost is None or ours is None else round(cost["lab_s"] / ours["lab_s"], 3)
    known = [value for value in faster.values() if value is not None]
    means = {key: statistics.mean(c[key] for c in reached) for key in (reached or [{}])[0]}
    return {
        "best": round(statistics.mean(best(run) for run in runs.values()), 2),
        "reached": len(reached),
        "seeds": len(costs),
        "rounds": {str(seed): None if cost is None else int(cost["rounds"]) for seed, cost in costs.items()},
        "lab_s": {str(s): None if cost is None else round(cost["lab_s"], 1) for s, cost in costs.items()},
        "up_mbytes": round(means.get("up", 0.0) / 1e6, 2),
        "down_mbytes": round(means.get("down", 0.0) / 1e6, 2),
        "faster": faster,
        "faster_mean": round(statistics.mean(known), 3) if known and len(known) == len(faster) else None,
        "round_s": round(
            statistics.mean(r["curve"][-1]["lab_s"] / len(r["curve"]) for r in runs.values()), 3
        ),
        "ratio": round(statistics.mean(run["ratio"] for run in runs.values()), 2),
        "spread": round(max(run["spread"] for run in runs.values()), 3),
        "spread_held": round(max(run["spread_held"] for run in runs.values()), 3),
        "held": round(statistics.mean(run["held"] for run in runs.values()), 1),
    }


def show(found: Mapping[str, Any]) -> None:
    """The table: to the target, means over the seeds that reached it."""
    print(f"target by seed: {', '.join(f'{value:.1f} %' for value in found['targets'].values())}")
    print(
        "variant      ratio   best  rounds to target   s to target            s a round   MB up  MB down  "
        "spread  of those held back  bcrs_opwa faster by seed, mean"
    )
    for name, row in found["variants"].items():
        rounds = " ".join(_or_dash(value, "d") for value in row["rounds"].values())
        seconds = " ".join(_or_dash(value, ".0f") for value in row["lab_s"].values())
        faster = " ".join(_or_dash(value, ".2f") for value in row["faster"].values())
        print(
            f"{name:<12} {row['ratio']:>5.2f} {row['best']:>6.2f}  {rounds:<17}  {seconds:<22} "
            f"{row['round_s']:>8.2f} {row['up_mbytes']:>8.2f} {row['down_mbytes']:>8.2f} "
            f"{100 * row['spread']:>6.0f}% {100 * row['spread_held']:>8.1f}% of {row['held']:<6.0f} "
            f"{faster}, {_or_dash(row['faster_mean'], '.2f')}; at its best "
            f"{_or_dash(row['points_below'], '+.2f')} points below, "
            f"{_or_dash(row['sooner_to_best'], '.2f')} x later",
            flush=True,
        )


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
