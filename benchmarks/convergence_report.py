"""What a set of trainings says: losses by variant and seed, gaps to dense, bytes, and the picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WITHIN_DENSE = 0.03  # of dense, the exported model's loss
WITHIN_UNIFORM = 0.01  # of uniform at the same bytes on the slow link
COLOURS = ("#22313f", "#2a9d8f", "#e9a03b", "#b5179e", "#577590", "#d1495b")

Run = Mapping[str, Any]


def by_variant(results: Sequence[Run]) -> dict[str, dict[int, Run]]:
    """Variant -> seed -> run."""
    found: dict[str, dict[int, Run]] = {}
    for run in results:
        found.setdefault(run["variant"], {})[run["seed"]] = run
    return found


def over(found: Mapping[str, Mapping[int, Run]], name: str, other: str) -> float | None:
    """Mean over the seeds that both have of exported loss / the other's - 1; None without any."""
    if other not in found or name not in found:
        return None
    seeds = found[name].keys() & found[other].keys()
    if not seeds:
        return None
    ratios = [found[name][seed]["exported"] / found[other][seed]["exported"] for seed in seeds]
    return statistics.mean(map(float, ratios)) - 1.0


def report(results: Sequence[Run]) -> dict[str, Any]:
    """The figures, and whether they keep what is promised."""
    found = by_variant(results)
    rows = {name: _row(found, name) for name in found}
    to_dense, to_uniform = over(found, "adatopk", "dense"), over(found, "adatopk", "uniform")
    return {
        "variants": rows,
        "adatopk_over_dense": _rounded(to_dense),
        "adatopk_over_uniform": _rounded(to_uniform),
        "within_dense": None if to_dense is None else to_dense <= WITHIN_DENSE,
        "within_uniform": None if to_uniform is None else to_uniform <= WITHIN_UNIFORM,
    }


def _row(found: Mapping[str, Mapping[int, Run]], name: str) -> dict[str, Any]:
    runs = found[name]
    first = next(iter(runs.values()))
    return {
        "exported": {str(seed): round(run["exported"], 5) for seed, run in sorted(runs.items())},
        "exported_mean": round(statistics.mean(run["exported"] for run in runs.values()), 5),
        "coded_mean": round(statistics.mean(run["coded"] for run in runs.values()), 5),
        # What the codecs' presence hides: how much better the loss looks through them.
        "gap": round(statistics.mean(run["exported"] / run["coded"] - 1.0 for run in runs.values()), 5),
        "over_dense": _rounded(over(found, name, "dense")),
        "slow_bytes_per_step": round(first["slow_bytes_per_step"]),
        "slow_shrunk": round(first["dense_slow_bytes_per_step"] / first["slow_bytes_per_step"], 2),
        "all_bytes_per_step": round(first["all_bytes_per_step"]),
        "lab_step_s": round(first["lab_step_s"], 4),
        "links": first["links"],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def show(found: Mapping[str, Any]) -> None:
    """The table."""
    print("variant         exported  over dense  through codecs     gap  slow KiB/step  shrunk  lab s/step")
    for name, row in found["variants"].items():
        to_dense = "" if row["over_dense"] is None else f"{row['over_dense']:+.2%}"
        kib = row["slow_bytes_per_step"] / 1024
        print(
            f"{name:<15} {row['exported_mean']:>8.4f} {to_dense:>11} {row['coded_mean']:>15.4f} "
            f"{row['gap']:>+7.2%} {kib:>14.1f} {row['slow_shrunk']:>7.1f} {row['lab_step_s']:>11.3f}"
        )
    for name, limit in (("dense", WITHIN_DENSE), ("uniform", WITHIN_UNIFORM)):
        value = found[f"adatopk_over_{name}"]
        if value is not None:
            print(f"AdaTopK over {name}: {value:+.2%} (at most {limit:+.0%})", flush=True)


def points(runs: Mapping[int, Run]) -> list[dict[str, float]]:
    """The curve averaged over seeds, with bytes of the slow link and lab seconds."""
    curves = [run["curve"] for run in runs.values()]
    lab_step_s = next(iter(runs.values()))["lab_step_s"]
    found = []
    for at in zip(*curves, strict=False):
        held = [point["held_out"] for point in at]
        found.append(
            {
                "step": at[0]["step"],
                "slow_bytes": statistics.mean(point["slow_bytes"] for point in at),
                "lab_s": at[0]["step"] * lab_step_s,
                "held_out": statistics.mean(held),
                "low": min(held),
                "high": max(held),
            }
        )
    return found


def plot(results: Sequence[Run], path: Path) -> None:
    """Held-out loss against the slow link's bytes and against lab time, the seeds' range shaded."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9.0, 3.8), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for colour, (name, runs) in zip(COLOURS, by_variant(results).items(), strict=False):
            curve = points(runs)
            for panel, xs in (
                (panels[0], [p["slow_bytes"] / 2**20 for p in curve]),
                (panels[1], [p["lab_s"] / 60 for p in curve]),
            ):
                panel.plot(xs, [p["held_out"] for p in curve], color=colour, label=name)
                low, high = [p["low"] for p in curve], [p["high"] for p in curve]
                panel.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
        panels[0].set(
            xlabel="MiB over the slow link, both directions", ylabel="held-out loss, no codec", xscale="log"
        )
        panels[1].set(xlabel="minutes in the lab (predicted steps)", xscale="log")
        panels[0].legend(frameon=False)
        figure.savefig(path, dpi=140)
