"""Measured memory of two workers beside the plan's figure: eight kinds of models, cut in two by ``even``.

    python -m benchmarks.memory --models llama,resnet --precision fp32,bf16
    python -m benchmarks.memory --limit 1.02           # under so much of the figure
    python -m benchmarks.memory --job examples/gpt.py

Real workers on loopback. A worker's measured peak is the high-water mark of its compute process's control
group: every page that the process takes beyond what it held when it was idle and ready, the files that it
writes included. Storing in between and at the end, and an evaluation, are part of a run.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.errors import AtollError
from atoll.job import Job, Precision
from benchmarks.harness import conclude, execute, machine, parser, skip
from benchmarks.memory_models import MODELS, model_job
from benchmarks.real_workers import LoopbackFleet
from coordinator.client.job_file import load_job
from coordinator.client.prepare import prepare
from protos.convert import from_proto
from worker.hosting.contained.control_group import GROUPS, memory_groups

if TYPE_CHECKING:
    from coordinator.client.prepare import Prepared

MIB = float(1 << 20)
ROOM = "8GiB"
LEAST, MOST = 0.75, 1.0
LOOK_EVERY_S = 0.01


@dataclass(frozen=True)
class Worker:
    """Memory of one worker of one run, MiB."""

    model: str
    precision: str
    stage: int
    planned: float
    measured: float
    terms: dict[str, float]
    within_limit: str = ""  # how a run under the limit ended, where there was one

    @property
    def ratio(self) -> float:
        return self.measured / self.planned


class Group:
    """Control group of a daemon's compute process."""

    def __init__(self, daemon: int) -> None:
        (self.folder,) = (path for path in GROUPS.glob(f"**/atoll-{daemon}-*") if path.is_dir())

    def peak_mib(self) -> float:
        """High-water mark since the process was ready."""
        for name in ("memory.peak", "memory.max_usage_in_bytes"):
            with contextlib.suppress(OSError):
                return int((self.folder / name).read_text()) / MIB
        raise AtollError(f"{self.folder} shows no high-water mark; Linux 5.19 does")

    def forget(self) -> None:
        """Begin the high-water mark anew, where the kernel can."""
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            with contextlib.suppress(OSError):
                (self.folder / name).write_text("0")

    def now(self) -> dict[str, float]:
        text = (self.folder / "memory.stat").read_text()
        found = {m[1]: int(m[2]) / MIB for m in re.finditer(r"^(\w+) (\d+)$", text, re.MULTILINE)}
        return {"usage": int((self.folder / "memory.usage_in_bytes").read_text()) / MIB} | {
            k: found[k] for k in ("rss", "cache", "shmem", "mapped_file") if k in found
        }

    def limit(self, mib: float) -> None:
        """Bound the group instead of what its daemon has set."""
        n_bytes = int(mib * MIB)
        for name in ("memory.max", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
            if (self.folder / name).exists():
                (self.folder / name).write_text(str(n_bytes))


class Looks(threading.Thread):
    """Looks at groups until ``over``: the most that each held (workers begin to count anew with each stage),
    what it was made of then, and in which step."""

    def __init__(self, groups: Sequence[Group]) -> None:
        super().__init__(daemon=True)
        self.step = 0
        self.groups, self._over = groups, threading.Event()
        self.begin()

    def run(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            for at, group in enumerate(self.groups):
                with contextlib.suppress(OSError):
                    self.peaks[at] = max(self.peaks[at], group.peak_mib())
                    now = group.now() | {"step": self.step}
                    self.largest[at] = max(self.largest[at], now, key=lambda look: look["usage"])

    def begin(self) -> None:
        """Forget what came before: ops of the job that were timed for its plan."""
        for group in self.groups:
            group.forget()
        self.peaks = [0.0 for _ in self.groups]
        self.largest: list[dict[str, float]] = [{"usage": 0.0} for _ in self.groups]

    def over(self) -> None:
        self._over.set()
        self.join()


def _trained(fleet: LoopbackFleet, prepared: Prepared, looks: Looks, limit: float) -> str:
    """Train and return how it ended; ``fleet.plan`` is its plan. With ``limit`` so much of its figures bounds
    the groups from when it is known."""
    reply = fleet.client.submit(prepared)
    fleet.plan = None
    for update in fleet.client.watch(reply.job):
        if update.HasField("plan") and fleet.plan is None:
            fleet.plan = from_proto(update.plan)
            looks.begin()
            if limit and fleet.plan.prediction is not None:
                for group, stage in zip(looks.groups, fleet.plan.prediction.stages, strict=True):
                    group.limit(limit * stage.memory_bytes / MIB)
        looks.step = update.step
    if "killed for memory" in (fleet.state.parent / "coordinator.log").read_text():
        return "a stage was killed"
    return update.state if update.state == "finished" else f"{update.state}: {update.reason}"


def measure(job: Job, precision: Precision, limit: float, explain: bool) -> list[Worker]:
    """Train over two workers with room, with ``limit`` under so much of the plan's figures."""
    job = replace(job, training=replace(job.training, precision=precision))
    prepared = prepare(job, partitioner="even")
    with LoopbackFleet(2, options=("--memory", ROOM)) as fleet:
        looks = Looks([Group(daemon) for daemon in fleet.daemons()])
        looks.start()
        ended = _trained(fleet, prepared, looks, limit)
        looks.over()
        for look in looks.largest if explain else ():
            print("      ", {k: round(v, 1) for k, v in look.items()}, flush=True)
        plan = fleet.plan
    if plan is None or plan.prediction is None or (ended != "finished" and not limit):
        raise AtollError(f"{job.name} ended {ended}")
    return [
        Worker(
            job.name, precision.value, at, stage.memory_bytes / MIB, peak,
            {name: n_bytes / MIB for name, n_bytes in stage.memory_terms}, ended if limit else "",
        )
        for at, (stage, peak) in enumerate(zip(plan.prediction.stages, looks.peaks, strict=True))
    ]  # fmt: skip


def _shown(worker: Worker) -> str:
    terms = ", ".join(f"{name} {mib:.0f}" for name, mib in worker.terms.items() if mib >= 0.5)
    good = "" if LEAST <= worker.ratio <= MOST else "  <-- out of bounds"
    return (
        f"{worker.model:8s} {worker.precision} stage {worker.stage}: planned {worker.planned:6.0f} MiB, "
        f"measured {worker.measured:6.0f} MiB, {worker.ratio:.2f}{good} "
        f"{worker.within_limit}\n         ({terms})"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    made = parser(__doc__ or "")
    made.add_argument("--models", default=",".join(MODELS))
    made.add_argument("--precision", default="fp32,bf16")
    made.add_argument("--limit", type=float, default=0.0, help="train under so much of the figure")
    made.add_argument("--job", action="append", default=[], help="job files instead of the eight kinds")
    made.add_argument("--explain", action="store_true", help="show what the largest moment was made of")
    options = made.parse_args(argv)
    if reason := memory_groups():
        skip(reason, options.json)
    found: list[Worker] = []
    for precision in map(Precision, options.precision.split(",")):
        jobs = [load_job(Path(path)) for path in options.job]
        for job in jobs or [model_job(name, options.seed) for name in options.models.split(",")]:
            workers = measure(job, precision, options.limit, options.explain)
            found += workers
            for worker in workers:
                print(_shown(worker), flush=True)
    ratios = [worker.ratio for worker in found]
    ended = all(worker.within_limit == "finished" for worker in found)
    figures = {
        "machine": machine(),
        "seed": options.seed,
        "workers": [asdict(worker) | {"ratio": worker.ratio} for worker in found],
        "least": min(ratios),
        "most": max(ratios),
        "within_limit": ended,
        "runs": len(found) // 2,
        "finished": sum(worker.within_limit == "finished" for worker in found) // 2,
    }
    wrong = "a run under the limit did not end" if options.limit and not ended else ""
    return conclude(figures, options.json, wrong)


if __name__ == "__main__":
    execute(main)
