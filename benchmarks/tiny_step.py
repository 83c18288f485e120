"""What a step costs beside its computing: two real workers on loopback train a tiny model.

    python -m benchmarks.tiny_step --steps 300 --json

Prints CPU milliseconds a step and worker, of the daemon and of the compute process, and the median step;
``--json`` ends with one JSON object. Eight tensors go and eight come a step. ``--send-log-bytes 0``: without
the send log (decision 033).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import psutil

from atoll.job import Optimizer, TrainingSpec
from benchmarks.harness import execute
from benchmarks.oracle import built_in
from benchmarks.real_workers import LoopbackFleet, as_job, cut_at
from coordinator.client.prepare import prepare

WARM_UP = 20  # steps
MICROS = 4


def measure(steps: int, seed: int, options: Sequence[str] = ()) -> dict[str, Any]:
    """Train ``steps`` steps after the warm-up; figures by name, times in milliseconds. ``options``: of the
    workers."""
    training = TrainingSpec(
        steps=steps + WARM_UP + 1, n_micro=MICROS, seed=seed, optimizer=Optimizer(lr=3e-3)
    )
    case = built_in("branches", training, 0.1)
    cuts = case.dag.cuttable()
    times_s: list[float] = []
    before: dict[str, float] = {}
    after: dict[str, float] = {}
    with LoopbackFleet(2, options=options) as fleet:
        job = prepare(as_job(case), partitioner=cut_at((0, cuts[len(cuts) // 2])))
        for update in fleet.client.watch(fleet.client.submit(job).job):
            for point in update.metrics:
                if point.name == "loss" and point.step >= WARM_UP:
                    before = before or _cpu_s(fleet)
                    times_s.append(point.time_s)
                    if len(times_s) == steps:
                        after = _cpu_s(fleet)
    lasted_s = [later - earlier for earlier, later in pairwise(times_s)]
    share = 1e3 / (len(times_s) - 1) / fleet.workers
    return {
        "steps": len(times_s) - 1,
        "daemon_cpu_ms": (after["daemon"] - before["daemon"]) * share,
        "compute_cpu_ms": (after["compute"] - before["compute"]) * share,
        "step_ms": 1e3 * statistics.median(lasted_s),
        "step_p90_ms": 1e3 * statistics.quantiles(lasted_s, n=10)[-1],
    }


def _cpu_s(fleet: LoopbackFleet) -> dict[str, float]:
    """CPU seconds of all workers so far, by kind of process."""
    found = {"daemon": 0.0, "compute": 0.0}
    for daemon in fleet.daemons():
        for process in (root := psutil.Process(daemon), *root.children(recursive=True)):
            times = process.cpu_times()
            kind = "compute" if "worker.compute" in process.cmdline() else "daemon"
            found[kind] += times.user + times.system
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--send-log-bytes", help="of the workers; default: theirs")
    options = parser.parse_args(argv)
    given = () if options.send_log_bytes is None else ("--send-log-bytes", options.send_log_bytes)
    found = measure(options.steps, options.seed, given)
    print(
        f"CPU a step and worker: daemon {found['daemon_cpu_ms']:.1f} ms, compute process "
        f"{found['compute_cpu_ms']:.1f} ms; step {found['step_ms']:.1f} ms, p90 {found['step_p90_ms']:.1f} ms"
    )
    if options.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    execute(main)
