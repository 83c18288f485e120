"""``federated_bandwidth`` on real lines: the same variants as jobs of a live fleet in the lab.

Clients are workers in their own namespaces, ratios those that the coordinator chooses from the lines that it
measures, seconds those of the clock: from the word that the first round begins until a round's model is
tested, and, for a client's finish, from the word that its round begins until its update is in.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.numpy import save_file

from benchmarks import bandwidth_report as reporting
from benchmarks.federated_mnist import NETS, digits
from benchmarks.federated_report import best
from benchmarks.registered_fleet import RegisteredFleet, Row
from lab.reader import read_scenario
from strategies import partition_data
from strategies.bcrs import spread

if TYPE_CHECKING:
    from benchmarks.federated_bandwidth import Conditions, Variant

JOB = "benchmarks/federated_bandwidth_job.py"
PARTS = ("download", "train", "upload")
RATIOS = ("", "own", "mean")  # what a variant may ask for here; the mean is that of the own ones


def run_all(
    scenario: str, conditions: Conditions, chosen: Sequence[Variant], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """Every variant on every seed, alternating."""
    order = sorted(chosen, key=lambda variant: RATIOS.index(variant.ratio))
    dense, found = dense_bytes(conditions), dict[tuple[str, int], dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        parts = {seed: write_clients(Path(folder) / str(seed), conditions, seed) for seed in seeds}
        hosts = read_scenario(scenario).join_order
        datasets = {f"mnist-{seed}": [of[host] for host in hosts] for seed, of in parts.items()}
        with RegisteredFleet(scenario, datasets) as fleet:
            for seed in seeds:
                for variant in order:
                    mean = [run["ratio"] for run in found.values() if run["seed"] == seed and run["own"]]
                    rows = fleet.federate(JOB, settings(conditions, variant, seed, mean))
                    found[variant.name, seed] = run = measured(rows, variant, seed, dense)
                    print(told(run), flush=True)
    return [found[variant.name, seed] for variant in chosen for seed in seeds]


def refuse(chosen: Sequence[Variant]) -> None:
    """SystemExit for variants that cannot be compared here."""
    ratios = {variant.ratio for variant in chosen}
    if unknown := [variant.name for variant in chosen if variant.ratio not in RATIOS]:
        raise SystemExit(f"--lab: {', '.join(unknown)} need ratios that only the model knows")
    if "mean" in ratios and "own" not in ratios:
        raise SystemExit("--lab: top-k has the mean of BCRS's ratios; add a variant with those to --only")


def write_clients(folder: Path, conditions: Conditions, seed: int) -> dict[str, Path]:
    """Each host's images and labels, split as in the modelled runs."""
    folder.mkdir(parents=True)
    data = digits(conditions.setting, seed)
    parts = partition_data.dirichlet_niid_bench(data.y, len(conditions.lines), conditions.setting.beta, seed)
    found = {}
    for host, part in zip(conditions.lines, parts, strict=True):
        found[host] = folder / f"{host}.safetensors"
        save_file({"x": data.x[part], "y": data.y[part]}, found[host])
    return found


def settings(conditions: Conditions, variant: Variant, seed: int, mean: Sequence[float]) -> dict[str, Any]:
    """Of the job file."""
    base = f":{conditions.base:g}" if conditions.base else ""
    uplink = {"": "off", "own": f"bcrs{base}", "mean": f"topk:{mean[0]:.4f}" if mean else ""}[variant.ratio]
    return {
        "SEED": seed,
        "ROUNDS": conditions.setting.rounds,
        "NET": conditions.net,
        "CLIENTS": len(conditions.lines),
        "STRATEGY": variant.strategy,
        "UPLINK": uplink,
        "DOWNLINK": conditions.downlink,
        "ERROR_FEEDBACK": variant.feedback,
        "GAMMA": conditions.gamma,
    }


def dense_bytes(conditions: Conditions) -> int:
    """Of one update as it is."""
    return sum(p.numel() * p.element_size() for p in NETS[conditions.net]().parameters())


def measured(rows: Sequence[Row], variant: Variant, seed: int, dense: int) -> dict[str, Any]:
    """A run as ``bandwidth_report.timed`` tells one."""
    series: dict[str, list[tuple[float, float]]] = {}  # name -> (clock, value) by round
    for row in rows:
        series.setdefault(row["name"], []).append((float(row["time_s"]), float(row["value"])))
    closed_s, took_s = series["round_s"][0]
    begun_s = closed_s - took_s
    up = down = 0.0
    curve = []
    for (at_s, accuracy), (_, sent), (_, fetched) in zip(
        series["eval_accuracy"], series["bytes_up"], series["bytes_down"], strict=True
    ):
        up, down = up + sent, down + fetched
        curve.append(
            {"accuracy": accuracy, "lab_s": at_s - begun_s, "up": up, "down": down, "bytes": up + down}
        )
    clients = sorted({name.split("/")[1] for name in series if name.startswith("client/")})

    def of(client: str, figure: str) -> list[float]:
        return [value for _, value in series[f"client/{client}/{figure}"]]

    finish = {c: of(c, "took_s") for c in clients}
    ratios = {c: of(c, "ratio") for c in clients}
    rounds = range(1, len(curve))  # before the first nothing is known of the lines
    spreads = [spread([finish[c][r] for c in clients]) for r in rounds]
    held = [[finish[c][r] for c in clients if ratios[c][r] > 1.0] for r in rounds]
    sent_bytes = [n for c in clients for n in of(c, "bytes_up")[1:]]
    return {
        "variant": variant.name,
        "seed": seed,
        "own": variant.ratio == "own",
        "curve": curve,
        "spread": statistics.median(spreads),
        "spread_held": statistics.median(spread(each) for each in held),
        "held": statistics.mean(len(each) for each in held),
        "ratio": reporting.mean_ratio(sent_bytes, dense),
        "ratios": {c: ratios[c][-1] for c in clients},
        "round_s": statistics.median(value for _, value in series["round_s"]),
        "parts_s": {
            part: round(statistics.median(v for c in clients for v in of(c, f"{part}_s")[1:]), 3)
            for part in PARTS
        },
    }


def told(run: Mapping[str, Any]) -> str:
    """One run's line, while others still go."""
    parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in run["parts_s"].items())
    return (
        f"seed {run['seed']} {run['variant']:<12} best {best(run):.2f} % in "
        f"{run['curve'][-1]['lab_s']:.0f} s, {run['round_s']:.2f} s a round, ratio {run['ratio']:.2f}, "
        f"spread {run['spread']:.0%}; a client's medians: {parts}"
    )
