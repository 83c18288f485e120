"""What each optimizer reaches on the demo's GPT, what its update costs, and whether a cut changes its bits.

Every variant (an optimizer at a rate) trains the job in this process, one stage, one thread, on paired
seeds: of the initial weights and of the data's order. Held-out loss is the plain module's. Of each optimizer
its best rate counts, and with it the step at which it is at the best loss that AdamW ends with. An update's
milliseconds, of processor time, stand beside what the plan counts for this machine's rates. Then random cuts
and random replicas of each optimizer are compared with one stage (expected 0.0).

  python -m benchmarks.optimizers --json
  python -m benchmarks.optimizers --steps 100 --seeds 1 --variants adamw:1.5e-3,lion:3e-4 --plans 0
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from atoll.errors import UsageError
from atoll.job import Job, Optimizer, OptimizerName
from atoll.program import stage_programs
from benchmarks.convergence import batch_of, exported_loss
from benchmarks.harness import execute, machine, parser
from benchmarks.oracle import (
    Case,
    difference,
    from_job,
    random_replicas,
    random_starts,
    run_local,
    run_replicas,
)
from coordinator.client.job_file import load_job
from coordinator.planning.costs.fleet import Device
from coordinator.planning.costs.memory import MemoryModel, Together
from coordinator.planning.costs.op_seconds import apply_seconds
from coordinator.planning.costs.traffic import Traffic
from tests.inprocess.pipeline import LocalPipeline
from worker.machine.torch_device import device_rates

VARIANTS = "adamw:8e-4,adamw:1.5e-3,adamw:2.5e-3,adamw:4e-3,muon:2e-3,muon:4e-3,muon:8e-3"
SETTINGS = ("WIDTH=128", "MICRO_BATCH=8", "N_MICRO=1")  # 0.87 M parameters, 8 windows of 64 bytes a step
HELD_OUT = 16  # micro-batches of a point of the curve
MICRO = 8  # of the plans that are compared


@dataclass(frozen=True, slots=True)
class Variant:
    """An optimizer at a learning rate."""

    optimizer: OptimizerName
    lr: float

    @classmethod
    def parse(cls, text: str) -> Variant:
        """NAME:RATE. UsageError for another form, or an optimizer that there is not."""
        name, _, rate = text.partition(":")
        try:
            return cls(OptimizerName(name), float(rate))
        except ValueError:
            known = ", ".join(OptimizerName)
            raise UsageError(f"--variants {text}: write NAME:RATE, of {known}") from None

    def of(self, declared: Optimizer) -> Optimizer:
        """The job's optimizer under this name and rate."""
        return replace(declared, name=self.optimizer, lr=self.lr)

    def __str__(self) -> str:
        return f"{self.optimizer}:{self.lr:g}"


def job_of(args: argparse.Namespace, seed: int) -> Job:
    """The job with its weights and data drawn by ``seed``."""
    settings = [*SETTINGS, f"SEED={4711 + seed}", *args.set] if args.job == GPT else args.set
    return load_job(Path(args.job), [*settings, f"steps={args.steps}"])


GPT = "examples/gpt.py"


class HeldOut:
    """Micro-batches of the job's held-out data, and the plain module's loss on them."""

    def __init__(self, job: Job) -> None:
        source = job.data.materialise(next(iter(job.example_inputs.values())).shape[0])[1]
        if source is None:
            raise UsageError("the job's data holds nothing out; give it a held-out share")
        self._module = job.module
        self._batches = [batch_of(source, job, HELD_OUT, 0, micro) for micro in range(HELD_OUT)]

    def loss(self, state: dict[str, dict[str, torch.Tensor]]) -> float:
        """Mean loss of the module with these tensors."""
        return exported_loss(self._module, state, self._batches)


def train(case: Case, held_out: HeldOut, every: int) -> dict[str, Any]:
    """Train a case in one stage; its curve on held-out data, and the milliseconds of steps and updates."""
    pipeline = LocalPipeline(stage_programs(case.dag, (0,)), case.training, case.tensors, states=case.states)
    steps, updates, curve = [], [], {}
    for step in range(case.training.steps):
        batches = case.batches(step)
        begun = time.process_time()
        reports = pipeline.compute(step, batches)
        norms = tuple(norm for report in reports for norm in report.square_norms)
        scale = case.training.optimizer.gradient_scale(norms, reports[0].step_loss.weight)
        computed = time.process_time()
        pipeline.apply(scale)
        updates.append(time.process_time() - computed)
        steps.append(time.process_time() - begun)
        if (step + 1) % every == 0 or step + 1 == case.training.steps:
            curve[step + 1] = held_out.loss(pipeline.snapshot())
    return {
        "loss": curve[case.training.steps],
        "curve": curve,
        "step_ms": 1e3 * statistics.median(steps),
        "update_ms": 1e3 * statistics.median(updates),
    }


def predicted_ms(case: Case, device: Device) -> float:
    """What the plan counts for an update of the whole model."""
    memory = MemoryModel(case.dag, case.training, Traffic(case.dag, case.training.optimizer))
    work = Together(memory, ((0, len(case.dag.ops)),)).step_work()
    return 1e3 * apply_seconds(*work, device)


def compare(args: argparse.Namespace, variants: list[Variant]) -> list[dict[str, Any]]:
    """A row for each seed and variant."""
    rates = device_rates(torch.device("cpu"), clock=time.process_time)
    device = Device("here", 1 << 40, gflops={"": rates.matmul_gflops}, memory_gbps=rates.memory_gbps)
    rows = []
    for seed in range(args.seed, args.seed + args.seeds):
        job = job_of(args, seed)
        case, held_out = from_job(job, job.training), HeldOut(job_of(args, seed))
        for variant in variants:
            training = replace(job.training, optimizer=variant.of(job.training.optimizer))
            mine = replace(case, training=training)
            found = train(mine, held_out, args.every)
            rows.append(
                {"seed": seed, "variant": str(variant), **found, "predicted_ms": predicted_ms(mine, device)}
            )
            print(
                f"seed {seed} {variant!s:<14} loss {found['loss']:.4f}  step {found['step_ms']:.1f} ms, "
                f"of it the update {found['update_ms']:.1f} (planned {rows[-1]['predicted_ms']:.1f})",
                flush=True,
            )
    return rows


def summary(rows: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Each optimizer at its best rate: mean loss, spread, and the share of the steps to AdamW's best loss."""
    by_variant: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_variant.setdefault(row["variant"], []).append(row)
    best: dict[str, list[dict[str, Any]]] = {}
    for variant, found in by_variant.items():
        name = variant.partition(":")[0]
        if name not in best or _mean(found, "loss") < _mean(best[name], "loss"):
            best[name] = found
    target = {row["seed"]: row["loss"] for row in best.get(OptimizerName.ADAMW, [])}
    found = []
    for name, mine in best.items():
        reached = [
            next((at for at, loss in row["curve"].items() if loss <= target[row["seed"]]), None)
            for row in mine
            if target
        ]
        shares = [at / steps for at in reached if at is not None]
        losses = [row["loss"] for row in mine]
        found.append(
            {
                "optimizer": name,
                "variant": mine[0]["variant"],
                "loss": _mean(mine, "loss"),
                "spread": max(losses) - min(losses),
                "share_of_steps": max(shares) if shares and len(shares) == len(mine) else None,
                **{key: _mean(mine, key) for key in ("step_ms", "update_ms", "predicted_ms")},
            }
        )
    return sorted(found, key=lambda row: float(row["loss"]))


def _mean(rows: list[dict[str, Any]], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)


def same_bits(args: argparse.Namespace, variants: list[Variant]) -> dict[str, float]:
    """The largest difference of random cuts, and of random replicas, to one stage, by optimizer."""
    job = job_of(args, args.seed)
    case, found = from_job(job, replace(job.training, steps=2, n_micro=MICRO)), {}
    for variant in {variant.optimizer: variant for variant in variants}.values():
        mine = replace(case, training=replace(case.training, optimizer=variant.of(job.training.optimizer)))
        whole, source, worst = run_local(mine, (0,)), random.Random(args.seed), 0.0
        for _ in range(args.plans):
            starts = random_starts(mine.dag, source.randint(2, 4), source)
            worst = max(worst, difference(run_local(mine, starts), whole))
            shared, plan = random_replicas(mine, source)
            worst = max(worst, difference(run_replicas(shared, plan), run_local(shared, (0,))))
        found[str(variant.optimizer)] = worst
        print(f"{variant.optimizer}: {args.plans} cuts, as many plans of replicas: max_abs_diff {worst}")
    return found


def main() -> int:
    """Print rows and tables; exit code 1 where bits differ."""
    options = parser(__doc__ or "", job=GPT)
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--seeds", type=int, default=3, help="paired seeds, from --seed on")
    options.add_argument("--variants", default=VARIANTS, help="NAME:RATE, by commas (default: %(default)s)")
    options.add_argument("--every", type=int, default=20, help="steps between points of the curve")
    options.add_argument("--plans", type=int, default=5, help="random cuts, and plans of replicas, compared")
    options.add_argument("--set", action="append", default=[], help="job override")
    args = options.parse_args()
    variants = [Variant.parse(text.strip()) for text in args.variants.split(",")]
    torch.set_num_threads(1)
    rows = compare(args, variants)
    table = summary(rows, args.steps)
    print("| optimizer | held-out loss | spread | share of steps | step, ms | update, ms | planned, ms |")
    for row in table:
        share = row["share_of_steps"]
        print(
            f"| {row['variant']} | {row['loss']:.3f} | {row['spread']:.3f} | "
            f"{'-' if share is None else f'{share:.2f}'} | {row['step_ms']:.1f} | {row['update_ms']:.1f} | "
            f"{row['predicted_ms']:.1f} |"
        )
    bits = same_bits(args, variants) if args.plans else {}
    worst = max(bits.values(), default=0.0)
    print(f"machine {machine()}, seeds {args.seed} to {args.seed + args.seeds - 1}, {args.steps} steps")
    if args.json:
        print(json.dumps({"table": table, "rows": rows, "max_abs_diff": worst, "bits": bits}))
    return int(worst > 0.0)


if __name__ == "__main__":
    execute(main)
