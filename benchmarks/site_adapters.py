"""Adapters trained across two sites on real workers: rare coded rounds between sites beside exact exchange.

Two sites of two hosts, 1 Gbit/s inside and 8 Mbit/s between. No host holds the frozen base with its adapters,
the two of a site do: a peer is a pipeline, exact inside. Of ``examples/two_sites.py`` replicas that exchange
exact gradients every step are trained, then the job as it is (DiLoCo, 4 bits). Printed: samples a second,
predicted and measured, and the bytes of a round between the sites beside what the trained share says:

    2 n (1/2 + 2/64)   n trained elements; of each half its change and its sum, 4 bits and a scale for 64

  python -m benchmarks.site_adapters --json
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import SCHEDULED, LabFleet, conclude, execute, machine, need_lab, parser
from benchmarks.thin_sites import BYTES_TOLERANCE, trained
from coordinator.client.job_file import load_job

GOAL = 2.0  # times the samples a second of exact replicas
EXACT = ("exchange=exact", "local_steps=0", "replicas=2", "blocks=2")
BYTES = 0.5 + 2 / 64  # of an element in int4_block
REFRESHING_STEPS = 4
EXACT_STEPS, ROUNDS = 12, 4


def wrong_figures(rows: Sequence[Mapping[str, Any]], share: float, ratio: float) -> str:
    """Say what of the promises does not hold, "" where all do. ``share``: bytes of a round by the formula."""
    local = rows[-1]
    found = [] if local["stages"] == [2, 2] else [f"peers of {local['stages']} stages, not two of two"]
    if ratio < GOAL:
        found.append(f"{ratio:.1f} times exact replicas, {GOAL:g} are asked")
    if not local.get("round_bytes"):
        found.append("no round was met")
    found += [
        f"a round sent {sent} bytes, the trained share is {share:.0f}"
        for sent in local.get("round_bytes", ())
        if abs(sent / share - 1.0) > BYTES_TOLERANCE
    ]
    return "; ".join(found)


def main() -> int:
    """Print a row for each way; exit code 1 where a promise does not hold."""
    options = parser(__doc__ or "", scenario="sites_adapters", job="examples/two_sites.py")
    args = options.parse_args()
    need_lab(args.json)
    settings = [f"seed={args.seed}", f"steps={SCHEDULED}", "eval_batches=0"]
    loaded = load_job(Path(args.job), settings)
    samples = loaded.training.n_micro * int(next(iter(loaded.example_inputs.values())).shape[0])
    elements = [(p.numel(), p.requires_grad) for p in loaded.module.parameters()]
    share = 2 * BYTES * sum(count for count, learnt in elements if learnt)
    whole = 2 * BYTES * sum(count for count, _ in elements)
    exact, every = [*settings, *EXACT], loaded.training.local_steps
    with LabFleet((args.scenario or ["sites_adapters"])[0]) as fleet:
        fleet.train(args.job, "op_fence", exact, stop_after=REFRESHING_STEPS)
        rows = [trained(fleet, args.job, exact, "exact replicas", samples, EXACT_STEPS)]
        rows.append(trained(fleet, args.job, settings, "rare and coded", samples, ROUNDS * every))
    ratio = rows[-1]["measured"] / rows[0]["measured"]
    print(
        f"rare and coded: {ratio:.1f} times exact replicas; a round's trained share is {share:.0f} bytes, "
        f"of the whole model it would be {whole:.0f}; {json.dumps(machine())}",
        flush=True,
    )
    figures = {"rows": rows, "ratio": round(ratio, 2), "share_bytes": share, "whole_bytes": whole}
    return conclude({**figures, "machine": machine()}, args.json, wrong_figures(rows, share, ratio))


if __name__ == "__main__":
    execute(main)
