"""K-FAC and Eva beside AdamW and Muon on the demo's text: steps and time to AdamW's loss, and memory.

Rows of AdamW and Muon are those of ``benchmarks.optimizers``, on the same weights and data. K-FAC and Eva
(``experiments.curvature``) step the hidden matrices, AdamW all else, as with Muon. Milliseconds are processor
time. A variant is NAME:RATE, of K-FAC and Eva also NAME:RATE:SCALE: ``rms`` has one rate for all, as Muon;
with ``kl`` the rate is that of the matrices, and AdamW has the job's own for all else.

  python -m benchmarks.curvature --json
  python -m benchmarks.curvature --steps 100 --seeds 1 --variants adamw:1.5e-3,eva:4e-3:kl
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from atoll.errors import UsageError
from atoll.execute import Executor
from atoll.program import stage_programs
from benchmarks.harness import conclude, execute, machine, parser
from benchmarks.optimizers import GPT, HeldOut, Variant, job_of, train
from benchmarks.oracle import Case, from_job
from experiments.curvature import Curvature, Kind, Scale, Settings
from worker.stage.optimizers import make_optimizer

VARIANTS = (
    "adamw:1.5e-3,muon:8e-3,kfac:4e-3,kfac:8e-3,kfac:3e-2:kl,kfac:1e-1:kl,"
    "eva:4e-3,eva:8e-3,eva:3e-2:kl,eva:1e-1:kl"
)


@dataclass(frozen=True, slots=True)
class Second:
    """A method of second order at a learning rate."""

    settings: Settings
    lr: float

    @classmethod
    def parse(cls, text: str) -> Second:
        """NAME:RATE or NAME:RATE:SCALE. UsageError for another form."""
        name, _, rest = text.partition(":")
        rate, _, scale = rest.partition(":")
        try:
            return cls(Settings(Kind(name), Scale(scale or "rms")), float(rate))
        except ValueError:
            raise UsageError(f"--variants {text}: write {'|'.join(Kind)}:RATE[:{'|'.join(Scale)}]") from None

    def __str__(self) -> str:
        return f"{self.settings.kind}:{self.lr:g}:{self.settings.scale}"


def parse(text: str) -> Variant | Second:
    """Return the variant of an optimizer that workers have, or of one that they have not."""
    return Second.parse(text) if text.partition(":")[0] in set(Kind) else Variant.parse(text)


def train_second(case: Case, held_out: HeldOut, second: Second, every: int) -> dict[str, Any]:
    """Train a case in one stage's executor; its curve, the milliseconds of steps and updates, state bytes."""
    declared, kl = case.training.optimizer, second.settings.scale is Scale.KL
    training = replace(case.training, optimizer=replace(declared, lr=second.lr))
    (program,) = stage_programs(case.dag, (0,))
    executor, spec = Executor(program, seed=training.seed), training.optimizer
    tensors = {name: kept["value"].clone() for name, kept in case.tensors.items()}
    executor.load(tensors)
    parameters = {name: torch.nn.Parameter(tensors[name]) for name in executor.uses}
    hidden = frozenset(n for n in parameters if case.states[n].hidden_matrix)
    curvature = Curvature(program, hidden, second.settings)
    others = {name: value for name, value in parameters.items() if name not in curvature.weights}
    usual = make_optimizer(others, spec, {name: case.states[name] for name in others})
    assert usual is not None
    steps, updates, curve = [], [], {}
    for step in range(training.steps):
        batches, begun = case.batches(step), time.process_time()
        executor.zero_gradients()
        for micro, batch in enumerate(batches):
            executor.forward(step, micro, batch, {}, curvature.observe)
            executor.backward(micro, {}, float(len(batches)))
        computed = time.process_time()
        for name, parameter in parameters.items():
            parameter.grad = executor.gradient(name)
        norms = [float(p.grad.square().sum()) for p in parameters.values() if p.grad is not None]
        scale, rate = spec.gradient_scale(norms), training.learning_rate(step)
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        usual.step(case.training.learning_rate(step) if kl else rate)
        curvature.step(parameters, rate, spec.weight_decay)
        updates.append(time.process_time() - computed)
        steps.append(time.process_time() - begun)
        if (step + 1) % every == 0 or step + 1 == training.steps:
            curve[step + 1] = held_out.loss({name: {"value": t} for name, t in tensors.items()})
    return {
        "loss": curve[training.steps],
        "curve": curve,
        "step_ms": 1e3 * statistics.median(steps),
        "mean_step_ms": 1e3 * statistics.fmean(steps),
        "update_ms": 1e3 * statistics.fmean(updates),
        "state_bytes": curvature.state_bytes,
    }


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each variant: losses by seed, steps and processor seconds to the loss that AdamW ends with, state."""
    targets = {row["seed"]: row["loss"] for row in rows if row["variant"].startswith("adamw")}
    by_variant: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_variant.setdefault(row["variant"], []).append(row)
    found = []
    for variant, mine in by_variant.items():
        reached = [
            next((at for at, loss in row["curve"].items() if loss <= targets[row["seed"]]), None)
            for row in mine
            if row["seed"] in targets
        ]
        there = [at for at in reached if at is not None]
        step_ms = statistics.fmean(row.get("mean_step_ms", row["step_ms"]) for row in mine)
        whole = bool(there) and len(there) == len(mine)
        found.append(
            {
                "variant": variant,
                "losses": [round(row["loss"], 4) for row in mine],
                "loss": statistics.fmean(row["loss"] for row in mine),
                "steps_to_adamw": max(there) if whole else None,
                "seconds_to_adamw": round(max(there) * step_ms / 1e3, 2) if whole else None,
                "step_ms": round(step_ms, 1),
                "update_ms": round(statistics.fmean(row["update_ms"] for row in mine), 1),
                "state_bytes": mine[0].get("state_bytes"),
            }
        )
    return sorted(found, key=lambda row: float(row["loss"]))


def main() -> int:
    """Print a row for each variant."""
    options = parser(__doc__ or "", job=GPT)
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--seeds", type=int, default=3, help="paired seeds, from --seed on")
    options.add_argument("--variants", default=VARIANTS, help="by commas (default: %(default)s)")
    options.add_argument("--every", type=int, default=20, help="steps between points of the curve")
    options.add_argument("--set", action="append", default=[], help="job override")
    args = options.parse_args()
    torch.set_num_threads(1)
    variants = [parse(text.strip()) for text in args.variants.split(",")]
    rows = []
    for seed in range(args.seed, args.seed + args.seeds):
        job = job_of(args, seed)
        case, held_out = from_job(job, job.training), HeldOut(job_of(args, seed))
        for variant in variants:
            if isinstance(variant, Second):
                row = train_second(case, held_out, variant, args.every)
            else:
                training = replace(job.training, optimizer=variant.of(job.training.optimizer))
                row = train(replace(case, training=training), held_out, args.every)
            rows.append({"seed": seed, "variant": str(variant), **row})
            print(
                f"seed {seed} {variant!s:<16} loss {row['loss']:.4f}  step {row['step_ms']:.1f} ms",
                flush=True,
            )
    found = table(rows)
    print("| optimizer | held-out losses | steps to AdamW's | CPU s to it | step, ms | of it the update |")
    for row in found:
        print(
            f"| {row['variant']} | {row['losses']} | {row['steps_to_adamw'] or '-'} | "
            f"{row['seconds_to_adamw'] or '-'} | {row['step_ms']} | {row['update_ms']} |"
        )
    figures = {"table": found, "rows": rows, "machine": machine(), "seed": args.seed, "steps": args.steps}
    return conclude(figures, args.json)


if __name__ == "__main__":
    execute(main)
