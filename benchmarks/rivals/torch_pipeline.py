"""torch.distributed.pipelining over gloo as a rival: one rank of an equal split of a job's module.

Started once per host by a benchmark; prints one JSON object with every step's seconds and loss.
The module is traced and split with torch's own ``pipeline`` front end at equal counts of its
longest ModuleList. torch refuses inputs that only a later stage reads (labels), so every rank
draws its micro-batches locally and injects such inputs itself: this costs the rival nothing.

  python -m benchmarks.rivals.torch_pipeline --job examples/gpt.py --rank 0 --world 2 --master 127.0.0.1:29500
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline

from atoll.data import sample_indices, take
from coordinator.client.job_file import load_job

if TYPE_CHECKING:
    from atoll import Job


class MicroBatches:
    """The job's own micro-batches, so that losses can be compared with ours."""

    def __init__(self, job: Job, n_micro: int) -> None:
        batch = next(iter(job.example_inputs.values())).shape[0]
        self.train, _ = job.data.materialise(batch)
        self.dtypes = {name: value.dtype for name, value in job.example_inputs.items()}
        self.n_micro = n_micro

    def get(self, step: int, micro: int) -> dict[str, torch.Tensor]:
        samples = sample_indices(self.train.spec, self.n_micro, step, micro)
        return {
            f.input: torch.from_numpy(take(self.train.arrays[f.blob], f, samples).copy()).to(
                self.dtypes[f.input]
            )
            for f in self.train.spec.fields
        }


class LocalInputs(nn.Module):
    """One traced stage whose root inputs come from this rank's own data, in micro-batch order."""

    def __init__(self, stage: nn.Module, roots: list[str | None]) -> None:
        super().__init__()
        self.stage = stage
        self.roots = roots
        self.queue: list[dict[str, torch.Tensor]] = []

    def forward(self, *received: torch.Tensor) -> Any:
        own = self.queue.pop(0)
        values = iter(received)
        args = [own[root] if root is not None else next(values) for root in self.roots]
        out = self.stage(*args)
        # torch merges micro-batch outputs along an axis, which a scalar loss does not have.
        return out.unsqueeze(0) if isinstance(out, torch.Tensor) and out.dim() == 0 else out


def blocks_of(module: nn.Module) -> tuple[str, int]:
    """Name and length of the longest ModuleList or Sequential; of none, ("", 0)."""
    found = [
        (name, len(m)) for name, m in module.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)
    ]
    return max(found, key=lambda item: item[1], default=("", 0))


def equal_split(module: nn.Module, world: int) -> dict[str, SplitPoint]:
    """Split points at equal counts of blocks."""
    name, count = blocks_of(module)
    if count < world:
        raise SystemExit(f"the rival cannot split {count} blocks over {world} ranks")
    return {f"{name}.{count * rank // world}": SplitPoint.BEGINNING for rank in range(1, world)}


class WithLoss(nn.Module):
    """The job's module with positional inputs, returning the scalar loss."""

    def __init__(self, module: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.module = module
        self.names = names

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        out = self.module(**dict(zip(self.names, values, strict=True)))
        return out.loss if hasattr(out, "loss") else out  # type: ignore[no-any-return]


def build(job: Job, rank: int, world: int) -> tuple[LocalInputs, list[str]]:
    """Trace, split and wrap this rank's stage."""
    names = list(job.example_inputs)
    root = WithLoss(job.module.train(), names)
    split = {f"module.{name}": point for name, point in equal_split(job.module, world).items()}
    pipe = pipeline(root, mb_args=tuple(job.example_inputs.values()), split_spec=split)
    placeholders = {
        n.name: name
        for n, name in zip(
            (n for n in pipe.split_gm.graph.nodes if n.op == "placeholder"), names, strict=True
        )
    }
    call = [n for n in pipe.split_gm.graph.nodes if n.op == "call_module"][rank]
    return LocalInputs(pipe.get_stage_module(rank), [placeholders.get(a.name) for a in call.args]), names


def main() -> None:
    """Join the other ranks and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--job", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--master", required=True, help="HOST:PORT of rank 0")
    parser.add_argument("--schedule", choices=("gpipe", "1f1b"), default="gpipe")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], help="job override, e.g. n_micro=16")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    job = load_job(Path(args.job), args.set)
    n_micro = job.training.n_micro
    host, port = args.master.rsplit(":", 1)
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
    dist.init_process_group("gloo", rank=args.rank, world_size=args.world)
    print(json.dumps(train(job, args, n_micro)), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def train(job: Job, args: argparse.Namespace, n_micro: int) -> dict[str, Any]:
    """Run the steps; the first includes torch's shape exchange and is not counted by callers."""
    module, _ = build(job, args.rank, args.world)
    stage = PipelineStage(module, args.rank, args.world, torch.device("cpu"))
    last = args.rank == args.world - 1
    kind = ScheduleGPipe if args.schedule == "gpipe" else Schedule1F1B
    schedule = kind(stage, n_micro, loss_fn=(lambda out, _: out.sum()), scale_grads=True)
    declared = job.training.optimizer
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer
    if declared.name == "adamw":
        optimizer = torch.optim.AdamW(
            parameters,
            lr=declared.lr,
            betas=declared.betas,
            eps=declared.eps,
            weight_decay=declared.weight_decay,
        )
    else:
        optimizer = torch.optim.SGD(parameters, lr=declared.lr)
    data = MicroBatches(job, n_micro)
    dist.barrier()
    print("built", flush=True)
    seconds, losses = [], []
    for step in range(args.steps):
        module.queue = [data.get(step, micro) for micro in range(n_micro)]
        # The first forward also runs once for shape inference in the eager stage.
        if step == 0:
            module.queue.insert(0, data.get(0, 0))
        dist.barrier()
        begun = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = job.training.learning_rate(step)
        optimizer.zero_grad()
        found: list[torch.Tensor] = []
        dummy = torch.zeros(n_micro)
        if args.rank == 0:
            schedule.step(dummy) if module.roots.count(None) else schedule.step()
        elif last:
            schedule.step(target=dummy, losses=found)
        else:
            schedule.step()
        optimizer.step()
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
        losses.append(float(torch.stack(found).mean()) if found else None)
    return {"rank": args.rank, "seconds": seconds, "losses": losses}


if __name__ == "__main__":
    main()
