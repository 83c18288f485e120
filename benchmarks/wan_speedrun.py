"""Eight stages across the internet: width 1,024, 200 Mbit/s and 50 ms a boundary, 524,288 tokens a step.

    python -m benchmarks.wan_speedrun --json
    python -m benchmarks.wan_speedrun --lab --json

A public benchmark of pipelines on thin links: its 1F1B takes 100.5 s a step in bf16, and boundaries of rank
160 take 19.9 s but 3.1 times the steps. A stage's line brings in activations and gradients: in bf16 it is
full for 85.9 s a step. Printed for each codec: seconds of the bytes alone, the planner's step, and how much
sooner as many steps are done than by the public runs. Codecs of 8 bits lose next to nothing, of 4 bits some
(docs/compression.md).

With --lab real workers train at 1/64 of the tokens, 1/8 of the width and 1/32 of the rate: a step lasts 1/16.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from atoll.job import Optimizer, Precision, TrainingSpec
from atoll.opdag import TensorMeta
from benchmarks.block_graphs import UNITS, transformer
from benchmarks.harness import (
    SCHEDULED,
    LabFleet,
    conclude,
    execute,
    fitting,
    machine,
    need_lab,
    parser,
    steady,
)
from compressors.catalogue import codec
from coordinator.capture.capture import capture
from coordinator.client.fleet_file import parse_fleet
from coordinator.client.job_file import load_job
from coordinator.planning.baselines import GIVEN_CUT
from coordinator.planning.planner import PlanRequest, make_plan

STAGES, LAYERS_EACH, WIDTH, TOKENS = 8, 2, 1024, 524_288
MBIT, DELAY_MS = 200.0, 50.0
MICROS = 256
PUBLISHED_S, RANK_S, RANK_STEPS = 100.5, 19.9, 3.1  # 1F1B; of rank 160, and its steps over 1F1B's
CODECS = ("off", "int8_block", "int4_block")
GPU = {"gflops": 60_000, "memory_mib": 24_000, "memory_gbps": 900}

LAB_CODECS = ("fp16", "int8_block", "int4_block")
LAB_SETTINGS = ("WIDTH=128", "LAYERS=8", "MICRO_BATCH=8", "n_micro=16")
LAB_TOKENS, LAB_WIDTH, LAB_MBIT = TOKENS // 64, WIDTH // 8, MBIT / 32
TOLERANCE = 0.25  # of a predicted step


def inbound_s(name: str, tokens: int, width: int, mbit: float, dtype: str) -> float:
    """Return the seconds in which a stage's line brings in a step's activations and gradients."""
    meta = TensorMeta((tokens, width), dtype)
    n_bytes = meta.nbytes if name == "off" else codec(name).size(meta, 1.0)
    return 2 * 8 * n_bytes / (mbit * 1e6)


def planned(name: str, seed: int) -> dict[str, Any]:
    """The planner's step of eight equal stages, each on a machine of its own."""
    dag = transformer(WIDTH, STAGES * LAYERS_EACH, TOKENS // MICROS, context=1024, dtype="bfloat16")
    line = {"up_mbit": MBIT, "down_mbit": MBIT}
    fleet = parse_fleet(
        {
            "default": {
                "mbit": 10_000,
                "ms": DELAY_MS,
                "coordinator_ms": DELAY_MS,
                "payload_share": 1.0,
                **GPU,
            },
            "device": [{"name": f"node{at}", **line} for at in range(STAGES)],
        }
    )
    training = TrainingSpec(
        steps=1, n_micro=MICROS, seed=seed, optimizer=Optimizer(), precision=Precision.BF16, eval_batches=0,
        compress=name,
    )  # fmt: skip
    cut = GIVEN_CUT + ",".join(str(at * UNITS * LAYERS_EACH) for at in range(1, STAGES))
    request = PlanRequest("wan", 1, dag, None, training, fleet, cut, standbys=0)
    found = make_plan(request).prediction
    assert found is not None
    return {
        "codec": name,
        "inbound_s": inbound_s(name, TOKENS, WIDTH, MBIT, "bfloat16"),
        "step_s": found.step_s,
        "bound_s": found.lower_bound_s,
        "sooner_than_1f1b": PUBLISHED_S / found.step_s,
        "sooner_than_rank_160": RANK_S * RANK_STEPS / found.step_s,
        "bottleneck": found.bottleneck,
    }


def at_blocks(job: str, settings: list[str]) -> str:
    """Return the cut between the job's blocks, which one tensor crosses; one block a stage."""
    loaded = load_job(Path(job), settings)
    dag = capture(loaded.module, dict(loaded.example_inputs), loaded.training).train
    firsts: dict[str, int] = {}
    for op, node in enumerate(dag.ops):
        if node.module_path.startswith("blocks."):
            firsts.setdefault(".".join(node.module_path.split(".")[:2]), op)
    return GIVEN_CUT + ",".join(map(str, list(firsts.values())[1:]))


def in_lab(scenario: str, job: str, seed: int, steps: int) -> list[dict[str, Any]]:
    """Rows of real workers, one a codec."""
    settings = [*fitting(LAB_SETTINGS, job), f"seed={seed}", "eval_batches=0", f"steps={SCHEDULED}"]
    rows, cut = [], at_blocks(job, settings)
    with LabFleet(scenario) as fleet:
        fleet.train(job, cut, settings, compress=LAB_CODECS[-1], stop_after=2)
        for name in LAB_CODECS:
            run = fleet.train(job, cut, settings, compress=name, stop_after=steps)
            step_s, predicted_s = steady(run["step_s"], skip=1), run["plan"]["prediction"]["step_s"]
            bound_s = run["plan"]["prediction"]["lower_bound_s"]
            row = {
                "codec": name,
                "inbound_s": inbound_s(name, LAB_TOKENS, LAB_WIDTH, LAB_MBIT, "float32"),
                "step_s": step_s,
                "predicted_s": predicted_s,
                "bound_s": bound_s,
                "of_bound": step_s / bound_s,
                "error": step_s / predicted_s - 1.0,
                "steps_s": [round(s, 3) for s in run["step_s"]],
            }
            rows.append(row)
            print(
                f"{name:<11} {step_s:>6.2f} s a step, {predicted_s:.2f} predicted, {row['of_bound']:.2f} of "
                f"the bound, bytes alone {row['inbound_s']:.2f} s",
                flush=True,
            )
    return rows


def main() -> int:
    """Print the planner's rows, or the lab's; exit code 1 where a measured step is not as predicted."""
    options = parser(__doc__ or "", scenario="wan_eight", job="examples/gpt.py")
    options.add_argument("--lab", action="store_true", help="train on real workers")
    options.add_argument("--steps", type=int, default=4, help="of each run in the lab")
    args = options.parse_args()
    if args.lab:
        need_lab(args.json)
        measured = in_lab((args.scenario or ["wan_eight"])[0], args.job, args.seed, args.steps)
        wrong = [f"{row['codec']}: {row['error']:+.0%}" for row in measured if abs(row["error"]) > TOLERANCE]
        return conclude({"rows": measured, "machine": machine()}, args.json, "; ".join(wrong))
    rows = [planned(name, args.seed) for name in CODECS]
    for row in rows:
        print(
            f"{row['codec']:<11} bytes alone {row['inbound_s']:>5.1f} s, a step {row['step_s']:>5.1f} s: "
            f"{row['sooner_than_1f1b']:.1f} times sooner than the published 1F1B, "
            f"{row['sooner_than_rank_160']:.1f} than rank 160",
            flush=True,
        )
    slower = [b["codec"] for a, b in pairwise(rows) if b["step_s"] >= a["step_s"]]
    print(json.dumps(machine()))
    wrong_words = f"no faster than the codec before: {', '.join(slower)}" if slower else ""
    return conclude({"rows": rows, "machine": machine()}, args.json, wrong_words)


if __name__ == "__main__":
    execute(main)
