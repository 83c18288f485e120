"""What a backward in two parts costs: CPU milliseconds of a stage's micro-batch, on this machine.

`whole`: one backward. `two_parts`: what other stages wait for first, the weight gradients after it.
`own_graphs`: the same as if no op's products were known by hand, so each has a graph of its own. The job is
cut into stages of about equal work; those to whose backward nobody waits are left out. The three take turns,
with the caches swept between the parts, as waits for messages sweep them. Their gradients must be equal to
the last bit, else the benchmark ends with exit code 1.

  python -m benchmarks.two_parts --set MICRO_BATCH=4 --json
"""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor

from atoll.execute import DTYPES, Executor
from atoll.program import stage_programs
from benchmarks.gpu import even_starts
from benchmarks.harness import conclude, execute, machine, parser
from coordinator.capture.capture import capture
from coordinator.client.job_file import load_job
from worker.machine.malloc import keep_chunk_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from atoll.opdag import TensorMeta
    from atoll.program import StageProgram
    from coordinator.capture.capture import Captured

ORDERS = ("whole", "two_parts", "own_graphs")
CACHES = 4 << 20  # floats
WARM_UP = 5


class MicroBatch:
    """A stage with one micro-batch's values and gradients, run in every order of work."""

    def __init__(self, program: StageProgram, found: Captured, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        nodes = dict(program.ops)
        self.inputs = {
            leaf: torch.zeros(meta.shape, dtype=DTYPES[meta.dtype])
            for leaf, meta in found.train.inputs.items()
        }
        self.received = {r.op: _drawn(r.meta, draw) for r in program.received}
        self.gradients = {
            **{p.op: _drawn(nodes[p.op].outputs[0], draw) for p in program.produced if p.requires_grad},
            **{
                r.op: _drawn(r.meta, draw)
                for r in program.received
                if r.requires_grad and r.grad_from is not None
            },
        }
        self.executors = {order: self._executor(program, found, order) for order in ORDERS}
        self.cpu_s: dict[str, list[float]] = {order: [] for order in ORDERS}
        self._caches = torch.zeros(CACHES)

    def _executor(self, program: StageProgram, found: Captured, order: str) -> Executor:
        executor = Executor(program, precision=found.precision, defer=order != "whole")
        names = (*program.parameters, *program.buffers, *program.constants)
        tensors = {name: found.state[name].detach().clone() for name in names}
        own_graphs = patch("atoll.deferred.is_layer", lambda _: False)
        with own_graphs if order == "own_graphs" else nullcontext():
            executor.load(tensors, found.frozen)
        return executor

    def run(self, order: str) -> None:
        """Once in this order, forward included."""
        executor = self.executors[order]
        executor.zero_gradients()
        parts: list[Callable[[], Any]] = [
            lambda: executor.forward(0, 0, self.inputs, self.received),
            lambda: executor.backward(0, self.gradients),
        ]
        if order != "whole":
            parts.append(lambda: _take(executor))
        self.cpu_s[order].append(sum(map(self._seconds, parts)))

    def _seconds(self, part: Callable[[], Any]) -> float:
        self._caches.add_(1.0)
        begun_s = time.thread_time()
        part()
        return time.thread_time() - begun_s

    @property
    def same(self) -> bool:
        """Whether every order came to the same gradients."""
        whole, *others = (
            [leaf.grad for sites in executor.uses.values() for _, leaf in sites]
            for executor in self.executors.values()
        )
        return all(
            a is b is None or (a is not None and b is not None and torch.equal(a, b))
            for other in others
            for a, b in zip(whole, other, strict=True)
        )


def _drawn(meta: TensorMeta, draw: torch.Generator) -> Tensor:
    return torch.randn(meta.shape, generator=draw).to(DTYPES[meta.dtype])


def _take(executor: Executor) -> None:
    while executor.owed is not None:
        executor.weight_gradients()


def measure(job: str, settings: Sequence[str], stages: int, rounds: int, seed: int) -> list[dict[str, Any]]:
    """One row a stage: medians in CPU milliseconds, and how much longer than whole."""
    loaded = load_job(Path(job), settings)
    found = capture(loaded.module, loaded.example_inputs, loaded.training, loaded.metrics)
    rows = []
    for program in stage_programs(found.train, even_starts(found.train, stages)):
        if not any(r.requires_grad for r in program.received):
            continue
        batch = MicroBatch(program, found, seed)
        for _ in range(WARM_UP + rounds):
            for order in ORDERS:
                batch.run(order)
        ms = {order: 1e3 * statistics.median(batch.cpu_s[order][WARM_UP:]) for order in ORDERS}
        more = {order: round(ms[order] / ms["whole"] - 1.0, 4) for order in ORDERS[1:]}
        rows.append(
            {
                "stage": program.stage,
                "cpu_ms": {k: round(v, 3) for k, v in ms.items()},
                "more": more,
                "same": batch.same,
            }
        )
        print(
            f"stage {program.stage}: {ms['whole']:.2f} ms whole, {more['two_parts']:+.1%} in two parts, "
            f"{more['own_graphs']:+.1%} with graphs of their own",
            flush=True,
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every stage and print."""
    made = parser(__doc__ or "", job="examples/gpt.py")
    made.add_argument("--stages", type=int, default=4)
    made.add_argument("--rounds", type=int, default=60)
    made.add_argument("--set", action="append", default=[], help="job override, e.g. MICRO_BATCH=4")
    args = made.parse_args(argv)
    keep_chunk_memory()  # as in a worker
    torch.set_num_threads(1)
    rows = measure(args.job, args.set, args.stages, args.rounds, args.seed)
    print(f"machine {machine()}, seed {args.seed}")
    wrong = "" if all(row["same"] for row in rows) else "gradients differ between the orders of work"
    return conclude(rows, args.json, wrong)


if __name__ == "__main__":
    execute(main)
