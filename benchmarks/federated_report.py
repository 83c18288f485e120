"""What trainings of several rules on paired seeds say: accuracies, gains with intervals, cost to a target."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

BASE = "fedavg"
LAST = 5  # rounds averaged at the end
LEVEL = 0.95
COLOURS = ("#22313f", "#2a9d8f", "#e9a03b", "#b5179e", "#577590", "#d1495b", "#8ab17d", "#6d597a")

Run = Mapping[str, Any]


def best(run: Run) -> float:
    """The highest accuracy of any round, in percent."""
    return 100.0 * max(float(point["accuracy"]) for point in run["curve"])


def last(run: Run) -> float:
    """The mean accuracy of the last rounds, in percent: what whoever stops there may expect."""
    return 100.0 * statistics.mean(float(point["accuracy"]) for point in run["curve"][-LAST:])


def by_variant(results: Sequence[Run]) -> dict[str, dict[int, Run]]:
    """Rule -> seed -> run."""
    found: dict[str, dict[int, Run]] = {}
    for run in results:
        found.setdefault(run["variant"], {})[run["seed"]] = run
    return found


def interval(gains: Sequence[float], level: float = LEVEL) -> tuple[float, float] | None:
    """The mean's two-sided Student interval; None for fewer than two gains."""
    from scipy import stats

    if len(gains) < 2:
        return None
    mean = statistics.mean(gains)
    half = float(stats.t.ppf((1 + level) / 2, len(gains) - 1)) * statistics.stdev(gains) / sqrt(len(gains))
    return mean - half, mean + half


def gain(runs: Mapping[int, Run], base: Mapping[int, Run], measure: Any) -> dict[str, Any] | None:
    """Points over the base on the seeds that both have, or None without any."""
    seeds = sorted(runs.keys() & base.keys())
    if not seeds:
        return None
    gains = [measure(runs[seed]) - measure(base[seed]) for seed in seeds]
    found = interval(gains)
    return {
        "mean": round(statistics.mean(gains), 3),
        "interval": None if found is None else [round(edge, 3) for edge in found],
        "wins": sum(value > 0 for value in gains),
        "seeds": len(seeds),
        "by_seed": [round(value, 3) for value in gains],
    }


def cost_to(run: Run, target: float) -> dict[str, float] | None:
    """Rounds, bytes and modelled seconds until the accuracy is at least ``target`` percent; None if never."""
    for at, point in enumerate(run["curve"], 1):
        if 100.0 * point["accuracy"] >= target:
            return {"rounds": at, "bytes": point["bytes"], "lab_s": point["lab_s"]}
    return None


def report(results: Sequence[Run]) -> dict[str, Any]:
    """The figures of every rule; ``promised``: mean gain above 0 and at most one seed lost, by best
    accuracy, None for the base and for rules without a paired seed."""
    found = by_variant(results)
    base = found.get(BASE, {})
    rows = {}
    for name, runs in found.items():
        over = gain(runs, base, best) if name != BASE else None
        targets = [cost_to(run, best(base[seed])) for seed, run in sorted(runs.items()) if seed in base]
        rows[name] = {
            "best": {str(seed): round(best(run), 2) for seed, run in sorted(runs.items())},
            "best_mean": round(statistics.mean(map(best, runs.values())), 2),
            "last_mean": round(statistics.mean(map(last, runs.values())), 2),
            "gain_best": over,
            "gain_last": gain(runs, base, last) if name != BASE else None,
            "promised": None if over is None else over["mean"] > 0 and over["wins"] >= over["seeds"] - 1,
            "to_base": _to_target(targets),
            "mbytes": round(statistics.mean(run["curve"][-1]["bytes"] for run in runs.values()) / 1e6, 2),
            "lab_s": round(statistics.mean(run["curve"][-1]["lab_s"] for run in runs.values()), 1),
            "step_mflops": round(next(iter(runs.values())).get("step_mflops", 0.0), 1),
        }
    return {"rules": rows}


def _to_target(costs: Sequence[Mapping[str, float] | None]) -> dict[str, Any]:
    """Means over the seeds that reached the base's best accuracy."""
    reached = [cost for cost in costs if cost is not None]
    means = {key: round(statistics.mean(cost[key] for cost in reached), 1) for key in (reached or [{}])[0]}
    return {"reached": len(reached), "seeds": len(costs), **means}


def show(found: Mapping[str, Any]) -> None:
    """The table: accuracies in percent, gains in points with a 95 % paired interval and seeds won."""
    print(
        "rule         best by seed                         best   last 5   gain of best           won  "
        "gain of last 5         won  rounds to FedAvg's best      MB  lab s"
    )
    for name, row in found["rules"].items():
        seeds = " ".join(f"{value:.2f}" for value in row["best"].values())
        to = row["to_base"]
        reached = f"{to['rounds']:.0f} ({to['reached']}/{to['seeds']})" if to.get("rounds") else "-"
        print(
            f"{name:<12} {seeds:<36} {row['best_mean']:>5.2f} {row['last_mean']:>7.2f}  "
            f"{_gain(row['gain_best'])}  {_gain(row['gain_last'])}  {reached:>23} "
            f"{row['mbytes']:>7.1f} {row['lab_s']:>6.0f}"
        )
    for name, row in found["rules"].items():
        if row["promised"] is not None:
            print(f"{name}: better than {BASE}: {'yes' if row['promised'] else 'NO'}", flush=True)


def _gain(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return f"{'':<26}"
    spread = "[{:+.2f}, {:+.2f}]".format(*found["interval"]) if found["interval"] else ""
    return f"{found['mean']:+.2f} {spread:<16} {found['wins']}/{found['seeds']}"


def plot(results: Sequence[Run], path: Path) -> None:
    """Mean accuracy against rounds, bytes and modelled lab time, the seeds' range shaded."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(13.0, 4.0), layout="constrained")
        panels = figure.subplots(1, 3, sharey=True)
        for colour, (name, runs) in zip(COLOURS, by_variant(results).items(), strict=False):
            curves = list(zip(*(run["curve"] for run in runs.values()), strict=False))
            middle = [100 * statistics.mean(p["accuracy"] for p in at) for at in curves]
            low = [100 * min(p["accuracy"] for p in at) for at in curves]
            high = [100 * max(p["accuracy"] for p in at) for at in curves]
            axes = (
                list(range(1, len(curves) + 1)),
                [statistics.mean(p["bytes"] for p in at) / 1e6 for at in curves],
                [statistics.mean(p["lab_s"] for p in at) for at in curves],
            )
            for panel, xs in zip(panels, axes, strict=True):
                panel.plot(xs, middle, color=colour, label=name)
                panel.fill_between(xs, low, high, color=colour, alpha=0.1, linewidth=0)
        panels[0].set(xlabel="rounds", ylabel="test accuracy, %: mean of the seeds and their range")
        panels[1].set(xlabel="MB up and down, all participants")
        panels[2].set(xlabel="seconds on modelled links")
        panels[0].legend(frameon=False, loc="lower right")
        figure.savefig(path, dpi=140)
