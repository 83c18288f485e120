"""Split fine-tuning on real workers behind 1 Mbit/s: steps and bytes with a narrow cut and with a plain one.

Two hosts of which neither holds the model alone train a GPT of width 384 as it is, cut where the planner
finds it best, and with its last block narrow (``split_finetune``, rank 4). Printed: the seconds of a step,
predicted and measured, bytes a step each way, a message's header, and how many times fewer bytes a token
crosses with.

  python -m benchmarks.split_lab --json
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import (
    SCHEDULED,
    LabFleet,
    conclude,
    execute,
    machine,
    need_lab,
    parser,
    steady,
)
from compressors import make_compressor
from coordinator.client.job_file import load_job
from worker.transport.frames import Data, Direction, MessageKey, encode

GOAL = 10.0  # times the plain cut's steps
TOLERANCE, HEADERS = 0.15, 0.05
RANK, BYTES = 4, 4  # of a number
WIDTH, N_MICRO = 384, 4
REFRESHING_STEPS = {0: 3, RANK: 20}  # of a run whose measurements refresh the estimates
STEPS = {0: 6, RANK: 40}


def micro_batch_of(job: str, settings: list[str]) -> Tensor:
    """Return the tokens [B, T] of a micro-batch."""
    return next(iter(load_job(Path(job), settings).example_inputs.values()))


def header_bytes(job: str, shape: Sequence[int]) -> int:
    """Bytes of the message of a boundary tensor beside its numbers."""
    packet, _ = make_compressor("none").compress(torch.zeros(*shape))
    key = MessageKey(job, 1, SCHEDULED, 0, 0, Direction.FORWARD)
    return len(encode(Data(0, key, 0, len(packet.payload), packet.header)))


def trained(fleet: LabFleet, job: str, settings: list[str], rank: int) -> dict[str, Any]:
    """Train the job at ``rank`` (0: as it is), and set what was predicted beside it."""
    asked = [*settings, f"RANK={rank}", f"steps={SCHEDULED}"]
    fleet.train(job, "op_fence", asked, stop_after=REFRESHING_STEPS[rank])
    run = fleet.train(job, "op_fence", asked, stop_after=STEPS[rank])
    plan = run["plan"]
    step_s, predicted_s = steady(run["step_s"]), plan["prediction"]["step_s"]
    planned = [int(link["bytes_per_step"]) for link in plan["prediction"]["links"]]
    row = {
        "rank": rank,
        "stages": [stage["start"] for stage in plan["stages"]],
        "predicted_s": round(predicted_s, 4),
        "measured_s": round(step_s, 4),
        "error": round(predicted_s / step_s - 1.0, 4),
        "bytes": planned,
        "header": header_bytes(run["job"], [*micro_batch_of(job, asked).shape, rank or WIDTH]),
        "steps_s": [round(s, 3) for s in run["step_s"]],
    }
    print(
        f"rank {rank}: {step_s:.3f} s a step ({predicted_s:.3f} predicted), {planned} bytes each way and "
        f"{row['header']} of a header a message",
        flush=True,
    )
    return row


def wrong_figures(rows: Sequence[Mapping[str, Any]], tokens: int, faster: float) -> str:
    """Say what of the promises does not hold, "" where all do."""
    narrow = rows[-1]
    found = [] if faster >= GOAL else [f"{faster:.1f} times the plain cut, {GOAL:g} are asked"]
    if set(narrow["bytes"]) != {BYTES * RANK * tokens}:
        found.append(f"{narrow['bytes']} bytes of {tokens} tokens, {BYTES * RANK} each are asked")
    message = BYTES * RANK * tokens // N_MICRO
    if narrow["header"] > HEADERS * message:
        found.append(f"a header of {narrow['header']} bytes in a message of {message}")
    found += [f"rank {row['rank']}: {row['error']:+.0%} off" for row in rows if abs(row["error"]) > TOLERANCE]
    return "; ".join(found)


def main() -> int:
    """Print a row for each; exit code 1 where a promise does not hold."""
    options = parser(__doc__ or "", scenario="split_pair", job="benchmarks/split_lab_job.py")
    args = options.parse_args()
    need_lab(args.json)
    settings = [f"seed={args.seed}", f"n_micro={N_MICRO}", "eval_batches=0"]
    tokens = N_MICRO * micro_batch_of(args.job, settings).numel()
    with LabFleet((args.scenario or ["split_pair"])[0]) as fleet:
        rows = [trained(fleet, args.job, settings, rank) for rank in (0, RANK)]
    plain, narrow = rows
    faster = plain["measured_s"] / narrow["measured_s"]
    thinner = plain["bytes"][0] / narrow["bytes"][0]
    facts = machine()
    print(f"narrow: {faster:.1f} times the plain cut's steps, {thinner:g} times fewer bytes a token; {facts}")
    figures = {"rows": rows, "tokens": tokens, "faster": round(faster, 2), "thinner": thinner}
    return conclude({**figures, "machine": facts}, args.json, wrong_figures(rows, tokens, faster))


if __name__ == "__main__":
    execute(main)
