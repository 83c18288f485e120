"""Model FLOP/s utilisation of one-stage and two-stage plans against plain PyTorch on one GPU.

Everything runs in one process: the same Stage code that workers run, exchanging tensors in
memory, so the figures show what the interpreter and the boundary cost, not a network. Plain
PyTorch goes first, as its users run it; ours runs under a worker's own settings (determinism,
threads). Same weights, data and optimizer, no dropout: the losses must agree within
LOSS_TOLERANCE, or the exit code is 1.

  python -m benchmarks.gpu --peak-tflops 989 --json     # bf16 peak of an H100 or H200
  python -m benchmarks.gpu --job examples/bert_tiny.py --set n_micro=8
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from atoll.job import Precision
from atoll.program import stage_programs
from benchmarks.harness import conclude, execute, follow, machine, parser, skip, steady
from benchmarks.oracle import Case, from_job, without_dropout
from coordinator.client.job_file import load_job
from tests.inprocess.pipeline import LocalPipeline
from worker.config import WorkerConfig
from worker.machine.torch_device import find_device, prepare
from worker.stage.optimizers import make_optimizer

if TYPE_CHECKING:
    from atoll.job import Job
    from atoll.opdag import OpDag

JOB = "examples/gpt.py"
SIZES = (
    "VOCABULARY=32000",
    "WIDTH=1024",
    "LAYERS=12",
    "HEADS=16",
    "LENGTH=1024",
    "MICRO_BATCH=8",
    "N_MICRO=4",
    "LEARNING_RATE=1e-4",
)
"""The demo's model at a size that fills a GPU: 218 M parameters."""
SETTINGS = ("precision=bf16", "eval_batches=0")
LOSS_TOLERANCE = {Precision.FP32: 2e-3, Precision.BF16: 1e-2}
"""Relative, of a step's loss: kernels add in another order, and bf16 keeps 8 bits."""

Batches = list[dict[str, Tensor]]  # of one step
Step = Callable[[int, Batches], float]  # trains one step; its loss


@dataclass(frozen=True)
class Run:
    """What one way of training took and gave."""

    step_s: float
    losses: list[float]


def case_of_job(job: Job) -> Case:
    """The job without dropout: plain PyTorch would draw other numbers."""
    return from_job(replace(job, module=without_dropout(job.module)), job.training)


def timed(case: Case, device: torch.device, step: Step) -> Run:
    """Every step of the job, its data on the device before the clock starts."""
    seconds, losses = [], []
    for number in range(case.training.steps):
        batches = [{n: v.to(device) for n, v in batch.items()} for batch in case.batches(number)]
        _synchronise(device)
        begun = time.perf_counter()
        losses.append(step(number, batches))
        _synchronise(device)
        seconds.append(time.perf_counter() - begun)
    return Run(steady(seconds), losses)


def plain(case: Case, device: torch.device) -> Run:
    """Ordinary PyTorch: the module under autocast, and the job's optimizer over all parameters."""
    training = case.training
    module = copy.deepcopy(case.module).to(device).train()
    wanted = {name for name, meta in case.dag.parameters.items() if meta.requires_grad}
    trained = {name: p for name, p in module.named_parameters() if name in wanted}
    module.requires_grad_(False)
    for parameter in trained.values():
        parameter.requires_grad_()
    optimizer = make_optimizer(trained, training.optimizer)
    assert optimizer is not None
    bf16 = training.precision is Precision.BF16

    def step(number: int, batches: Batches) -> float:
        total = torch.zeros((), device=device)
        for batch in batches:
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                out = module(**batch)
            loss = getattr(out, "loss", out) / len(batches)
            loss.backward()
            total += loss.detach()
        if training.optimizer.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained.values(), training.optimizer.clip_norm)
        optimizer.step(training.learning_rate(number))
        module.zero_grad()
        return float(total)

    return timed(case, device, step)


def even_starts(dag: OpDag, n_stages: int) -> list[int]:
    """Where stages of about equal work start."""
    cuts = set(dag.cuttable())
    share = sum(op.flops_forward for op in dag.ops) / n_stages
    starts, done = [0], 0.0
    for position, op in enumerate(dag.ops):
        if len(starts) < n_stages and done >= share * len(starts) and position in cuts:
            starts.append(position)
        done += op.flops_forward
    return starts


def ours(case: Case, device: torch.device, n_stages: int) -> Run:
    """Our stages, all on the same device."""
    programs = stage_programs(case.dag, even_starts(case.dag, n_stages))
    pipeline = LocalPipeline(programs, case.training, case.tensors, states=case.states, devices=(device,))
    return timed(case, device, lambda number, batches: pipeline.step(number, batches).loss)


def measure(
    case: Case, device: torch.device, settle: Callable[[], None], peak_tflops: float
) -> dict[str, Any]:
    """Plain PyTorch, then, after ``settle``, our stages: the figures of all."""
    runs = {"plain": plain(case, device)}
    settle()
    runs |= {"one_stage": ours(case, device, 1), "two_stages": ours(case, device, 2)}
    tolerance = LOSS_TOLERANCE[case.training.precision]
    # As the planner counts; a product's backward is two products, and what is computed twice counts once.
    flops = 3 * sum(op.flops_forward for op in case.dag.ops) * case.training.n_micro
    return {
        "job": case.name,
        "parameters": sum(p.numel() for p in case.module.parameters()),
        "precision": case.training.precision.value,
        "samples_per_step": case.training.n_micro * len(next(iter(case.batches(0)[0].values()))),
        "seconds_per_step": {name: round(run.step_s, 5) for name, run in runs.items()},
        "mfu": {name: round(flops / run.step_s / 1e12 / peak_tflops, 4) for name, run in runs.items()},
        "of_plain": {name: round(runs["plain"].step_s / run.step_s, 4) for name, run in runs.items()},
        "losses": {name: [round(loss, 5) for loss in run.losses] for name, run in runs.items()},
        "loss_tolerance": tolerance,
        "same_losses": {
            name: follow(run.losses, runs["plain"].losses, tolerance) for name, run in runs.items()
        },
    }


def as_worker() -> None:
    """This process as a worker on the GPU sets itself up."""
    config = WorkerConfig(host="localhost", device="cuda")
    prepare(find_device(config), config)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> int:
    """Print seconds a step, samples a second and utilisation of each; exit code 1 when losses differ."""
    options = parser(__doc__, job=JOB)
    options.add_argument("--steps", type=int, default=12)
    options.add_argument("--set", action="append", default=[], help="job override, e.g. precision=fp32")
    options.add_argument("--peak-tflops", type=float, default=989.0, help="of the GPU in bf16, dense")
    args = options.parse_args()
    if not torch.cuda.is_available():
        skip("no CUDA", args.json)
    sizes = SIZES if args.job == JOB else ()
    settings = [*sizes, *SETTINGS, f"steps={args.steps}", f"seed={args.seed}", *args.set]
    case = case_of_job(load_job(Path(args.job), settings))
    result = measure(case, torch.device("cuda"), as_worker, args.peak_tflops)
    result["device"] = torch.cuda.get_device_name()
    for name, seconds in result["seconds_per_step"].items():
        print(
            f"{name:<11} {seconds:.4f} s/step  {result['samples_per_step'] / seconds:,.1f} samples/s  "
            f"MFU {result['mfu'][name]:.1%}  last loss {result['losses'][name][-1]:.4f}"
        )
    print(f"machine {machine()}, {result['device']}, seed {args.seed}")
    differing = ", ".join(name for name, same in result["same_losses"].items() if not same)
    wrong = f"the losses of {differing} differ from plain PyTorch's by over {result['loss_tolerance']:g}"
    return conclude(result, args.json, wrong if differing else "")


if __name__ == "__main__":
    execute(main)
