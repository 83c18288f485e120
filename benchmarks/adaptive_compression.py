"""Samples a second on slow links: dense, uniform top-k, AdaTopK, and torch's pipelines beside them.

Every variant trains the same job on the same live fleet, alternating: `even` and op_fence dense,
op_fence with AdaTopK, op_fence with uniform top-k at the ratio that AdaTopK gave the slowest
link, torch.distributed.pipelining (GPipe, 1F1B; dense, as it has no compression) over op_fence's
devices in op_fence's order. Dense variants must give the same losses, step by step, or the exit code
is 1; the lossy ones must learn. Each variant's predicted step is the one that its plan carried before
it ran.

  python -m benchmarks.adaptive_compression --json                           # eight hosts, 8 Mbit/s
  python -m benchmarks.adaptive_compression --scenario home_pair --json      # two stages, 20 Mbit/s
  python -m benchmarks.adaptive_compression --chooser --scenario two_islands --scenario datacenter --json
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import (
    SCHEDULED,
    CommandFailed,
    LabFleet,
    conclude,
    execute,
    fitting,
    machine,
    need_lab,
    parser,
    steady,
)
from benchmarks.pipeline_vs_torch import SAME_MATHS, hosts_of, strays, summary
from coordinator.client.job_file import load_job

if TYPE_CHECKING:
    from torch.nn import Module

CASES: Mapping[str, tuple[str, ...]] = {
    # 6.5 M parameters; a boundary is 128 KiB, 0.13 s of the gateway.
    "eight_hosts": ("LAYERS=8", "LENGTH=128", "MICRO_BATCH=1", "n_micro=16"),
    # papers/peers.md H.3: 8.45 M parameters, a boundary is 128 KiB.
    "home_pair": ("LAYERS=8", "LENGTH=128", "VOCABULARY=4096", "MICRO_BATCH=1", "n_micro=8"),
}
"""Job settings by scenario; the demo's model at a size that its memory budgets force apart."""
OTHERWISE = ("n_micro=16",)
RATIO = 100.0  # of the slowest link, papers/decentralized.md 1.8
DENSE = {"even_off": "even", "op_fence_off": "op_fence"}
ADAPTIVE, UNIFORM, CHOOSER = "op_fence_adatopk", "op_fence_uniform", "op_fence_auto"
RIVALS = {"torch_gpipe": "gpipe", "torch_1f1b": "1f1b"}
# `even` after them: what its every boundary on the slow line teaches of links is not for op_fence.
VARIANTS = ("op_fence_off", ADAPTIVE, UNIFORM, "even_off", *RIVALS)
CHOOSER_VARIANTS = ("op_fence_off", CHOOSER)


@dataclass
class Series:
    """What one variant's runs gave."""

    step_s: list[float] = field(default_factory=list)  # a run's steady step each
    steps_s: list[float] = field(default_factory=list)  # every step of the last run
    predicted_s: list[float] = field(default_factory=list)
    lower_bound_s: list[float] = field(default_factory=list)
    losses: dict[int, list[float]] = field(default_factory=dict)  # round -> of each step
    plan: dict[str, Any] = field(default_factory=dict)
    links: list[dict[str, Any]] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)  # what each computed in a step

    @property
    def measured_s(self) -> float:
        """Median of the runs."""
        return statistics.median(self.step_s)

    @property
    def last_losses(self) -> list[float]:
        """Of the last run."""
        return self.losses[max(self.losses)]

    def add(self, run: Mapping[str, Any], number: int = 0) -> None:
        """Take in the run of round ``number``: ours, or the rival's, which has no plan."""
        self.step_s.append(steady(run["step_s"]))
        self.steps_s, self.losses[number] = list(run["step_s"]), list(run["loss"])
        if "plan" in run:
            self.plan, self.links = run["plan"], run["links"]
            self.stages = run.get("stages", [])
            self.predicted_s.append(run["plan"]["prediction"]["step_s"])
            self.lower_bound_s.append(run["plan"]["prediction"]["lower_bound_s"])


def slowest_ratio(plan: Mapping[str, Any]) -> float:
    """The largest ratio that a plan's links have: that of the slowest link under AdaTopK."""
    return max((float(link["ratio"]) for link in plan["links"]), default=1.0)


def bytes_by_link(series: Series, names: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """By "source>target": bytes that its last step sent, dense bytes, codec and ratio.

    Where no run reported them, what the plan expected.
    """
    if series.links:
        return {
            f"{names.get(link['source'], link['source'])}>{names.get(link['target'], link['target'])}": {
                "bytes": link["bytes_per_step"],
                "dense_bytes": link.get("dense_bytes_per_step", 0),
                "codec": link["codec"],
                "ratio": round(link.get("ratio", 1.0), 3),
            }
            for link in series.links
        }
    return {
        f"{names.get(link['source'], link['source'])}>{names.get(link['target'], link['target'])}": {
            "bytes": link["bytes_per_step"]
        }
        for link in series.plan.get("prediction", {}).get("links", ())
    }


def same_losses(found: Mapping[str, Series], reference: str) -> bool:
    """Whether every exact variant's losses follow the reference's, round by round and step by step."""
    exact = {name: found[name].losses for name in (*DENSE, *RIVALS) if name in found}
    return not strays({**exact, reference: found[reference].losses}, reference)


def learns(losses: Sequence[float]) -> bool:
    """Whether losses are finite and their last quarter is below their first."""
    part = max(1, len(losses) // 4)
    return (
        len(losses) > 1
        and all(map(math.isfinite, losses))
        and statistics.mean(losses[-part:]) < statistics.mean(losses[:part])
    )


def aggregate(found: Mapping[str, Series], samples: int, names: Mapping[str, str]) -> dict[str, Any]:
    """The figures of one scenario under the names that are promised."""
    ours = {name: series for name, series in found.items() if series.predicted_s}
    speed = {name: samples / series.measured_s for name, series in found.items()}
    predicted = {name: statistics.median(series.predicted_s) for name, series in ours.items()}
    return {
        "samples_per_s": {name: round(rate, 4) for name, rate in speed.items()},
        "over": {
            other: round(speed[ADAPTIVE] / speed[other], 3)
            for other in speed
            if ADAPTIVE in speed and other != ADAPTIVE
        },
        "chooser_over_off": round(speed[CHOOSER] / speed["op_fence_off"], 4) if CHOOSER in speed else None,
        "predicted_s": {name: round(seconds, 4) for name, seconds in predicted.items()},
        "measured_s": {name: round(series.measured_s, 4) for name, series in found.items()},
        "runs_s": {name: [round(s, 4) for s in series.step_s] for name, series in found.items()},
        "steps_s": {name: [round(s, 3) for s in series.steps_s] for name, series in found.items()},
        "prediction_error": {
            name: round(predicted[name] / series.measured_s - 1.0, 4) for name, series in ours.items()
        },
        "prediction_error_by_run": {
            name: [round(p / s - 1.0, 4) for p, s in zip(series.predicted_s, series.step_s, strict=True)]
            for name, series in ours.items()
        },
        "limit_ratio": {
            name: round(series.measured_s / statistics.median(series.lower_bound_s), 4)
            for name, series in ours.items()
        },
        "bytes_per_step": {name: bytes_by_link(series, names) for name, series in ours.items()},
        "plan": {name: summary(series.plan) for name, series in ours.items()},
        "same_losses": same_losses(found, "op_fence_off"),
        "learns": {name: learns(s.last_losses) for name, s in found.items() if name in (ADAPTIVE, UNIFORM)},
        "losses": {name: [round(loss, 4) for loss in series.last_losses] for name, series in found.items()},
    }


def run_variant(
    fleet: LabFleet,
    name: str,
    job: str,
    module: Module,
    settings: list[str],
    steps: int,
    found: Mapping[str, Series],
) -> dict[str, Any]:
    """One run of one variant; ``module`` is the job's."""
    if name in RIVALS:
        order = hosts_of(fleet, found["op_fence_off"].plan, module)
        return fleet.rival(job, order, RIVALS[name], steps, settings)
    if name == UNIFORM:
        compress = f"topk:{slowest_ratio(found[ADAPTIVE].plan):.6g}"
    else:
        compress = {ADAPTIVE: f"adatopk:{RATIO:g}", CHOOSER: "auto"}.get(name, "off")
    partitioner = DENSE.get(name, "op_fence")
    return fleet.train(job, partitioner, settings, compress, stop_after=steps)


def compare(
    scenario: str, job: str, settings: list[str], steps: int, rounds: int, variants: Sequence[str]
) -> dict[str, Any]:
    """One scenario: ``rounds`` alternating runs of every variant."""
    loaded = load_job(Path(job), settings)
    samples = next(iter(loaded.example_inputs.values())).shape[0] * loaded.training.n_micro
    found: dict[str, Series] = {name: Series() for name in variants}
    refused: dict[str, str] = {}
    names: dict[str, str] = {}
    with LabFleet(scenario) as fleet:
        for number in range(rounds):
            for name in variants:
                try:
                    run = run_variant(fleet, name, job, loaded.module, settings, steps, found)
                except CommandFailed as error:
                    if name not in RIVALS:
                        raise
                    refused[name] = str(error)[-500:]
                    continue
                found[name].add(run, number)
                names = names or {w["worker"]: w["name"] for w in fleet.status()["workers"]}
                print(f"  round {number}: {name:<17} {told_run(found[name], names)}", flush=True)
    kept = {name: series for name, series in found.items() if series.step_s}
    return {"scenario": fleet.scenario.name, **aggregate(kept, samples, names), "refused": refused}


def told_run(series: Series, names: Mapping[str, str]) -> str:
    """A run in a line: its step, what its plan said, and each stage's compute, measured/predicted."""
    told = f"{series.step_s[-1]:8.3f} s a step"
    if not series.predicted_s:
        return told
    predicted = {stage["worker"]: stage["compute_s"] for stage in series.plan["prediction"]["stages"]}
    measured = {stage["worker"]: stage["forward_s"] + stage["backward_s"] for stage in series.stages}
    stages = [
        f"{names.get(worker, worker)} {measured.get(worker, 0.0):.2f}/{seconds:.2f}"
        for worker, seconds in predicted.items()
    ]
    return f"{told}, {series.predicted_s[-1]:.3f} predicted; compute {', '.join(stages)}"


def show(result: Mapping[str, Any]) -> None:
    """One scenario's table."""
    print(f"{result['scenario']}: samples/s, step measured and predicted, measured / lower bound")
    for name, rate in result["samples_per_s"].items():
        predicted = result["predicted_s"].get(name)
        told = (
            f"{predicted:8.3f} s {result['prediction_error'][name]:+7.1%}  {result['limit_ratio'][name]:5.2f}"
            if predicted is not None
            else ""
        )
        print(f"  {name:<17} {rate:8.3f} {result['measured_s'][name]:9.3f} s {told}")
    for name, factor in result["over"].items():
        print(f"  {ADAPTIVE} over {name}: {factor:.2f}x")
    if result["chooser_over_off"] is not None:
        print(f"  auto over off: {result['chooser_over_off']:.3f}x")
    for name, links in result["bytes_per_step"].items():
        told = ", ".join(f"{pair} {figures['bytes']:,}" for pair, figures in links.items())
        print(f"  bytes a step, {name}: {told}")
    print(f"  dense losses agree: {result['same_losses']}; lossy ones learn: {result['learns']}", flush=True)


def main() -> int:
    """Print a table a scenario and, with --json, one object (a list for several scenarios); exit code 1
    when dense losses differ."""
    options = parser(__doc__, scenario="eight_hosts", job="examples/gpt.py")
    options.add_argument("--steps", type=int, default=6)
    options.add_argument("--rounds", type=int, default=2, help="alternations of everything")
    options.add_argument("--only", help=f"variants, by commas (default {','.join(VARIANTS)})")
    options.add_argument("--chooser", action="store_true", help="`--compress auto` against off instead")
    options.add_argument("--set", action="append", default=[], help="job override")
    args = options.parse_args()
    variants = tuple((args.only or ",".join(CHOOSER_VARIANTS if args.chooser else VARIANTS)).split(","))
    unknown = set(variants) - {*VARIANTS, CHOOSER}
    if unknown or "op_fence_off" not in variants:
        options.error(f"--only: {', '.join(sorted(unknown)) or 'op_fence_off is the reference, name it too'}")
    if UNIFORM in variants and ADAPTIVE not in variants[: variants.index(UNIFORM)]:
        options.error(f"--only: {UNIFORM} takes its ratio from {ADAPTIVE}: name that before it")
    need_lab(args.json)
    results = []
    for scenario in args.scenario or ("eight_hosts",):
        sizes = fitting(CASES.get(Path(scenario).stem, OTHERWISE), args.job)
        settings = [*sizes, *SAME_MATHS, "eval_batches=0"]
        settings += [f"steps={SCHEDULED}", f"seed={args.seed}", *args.set]
        result = compare(scenario, args.job, settings, args.steps, args.rounds, variants)
        results.append(result)
        show(result)
    print(f"machine {machine()}, seed {args.seed}")
    differing = ", ".join(result["scenario"] for result in results if not result["same_losses"])
    wrong = f"dense variants gave different losses in {differing}" if differing else ""
    return conclude(results[0] if len(results) == 1 else results, args.json, wrong)


if __name__ == "__main__":
    execute(main)
