"""Peers of two hosts each against exact replicas, across two sites that 8 Mbit/s join, on real workers.

No host holds the tied GPT with what local steps keep of it, the two of a site do. Exact replicas and peers
are trained. Printed: samples a second, predicted and measured, their ratio, what a round sent between the
sites beside what the plan says of it, and which way the planner itself names (--exchange auto): on fast hosts
that may be a pipeline at one site, since local steps teach less a sample.

    python -m benchmarks.thin_sites --json
    python -m benchmarks.thin_sites --exchange sparseloco --local-steps 50
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.exchange import LOCAL_RULES
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
from coordinator.client.job_file import load_job

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GOAL = 8.0  # times the samples a second of exact replicas
TOLERANCE, BYTES_TOLERANCE = 0.25, 0.05  # of a prediction
SETTINGS = ("n_micro=4",)
REFRESHING_STEPS = 3  # of a run whose measurements refresh the estimates, as any training does
EXACT_STEPS = 3  # each takes the better part of a minute
ROUNDS = 8  # of the named way: every fragment of a streamed model travels twice


def crossing_bytes(plan: Mapping[str, Any]) -> int:
    """Return what a round sends between the peers of a plan, as it says."""
    peer_of = {
        stage["workers"][0]: number for number, r in enumerate(plan["replicas"]) for stage in r["stages"]
    }
    links = plan["prediction"]["links"]
    apart = (link for link in links if peer_of[link["source"]] != peer_of[link["target"]])
    return sum(int(link["bytes_per_step"]) for link in apart) * int(plan["exchange"]["every"])


def met_bytes(log: str) -> list[int]:
    """Return what each round of a coordinator's log sent, of all ranks together."""
    lines = (json.loads(line) for line in log.splitlines() if '"round.met"' in line and line.endswith("}"))
    return [int(line["bytes"]) for line in lines if line["event"] == "round.met"]


def trained(
    fleet: LabFleet, job: str, settings: list[str], what: str, samples: int, steps: int
) -> dict[str, Any]:
    """Train so many steps, and set what was predicted beside them."""
    before = len(met_bytes(whole_log(fleet)))
    run = fleet.train(job, "op_fence", [*settings, f"steps={SCHEDULED}"], stop_after=steps)
    plan = run["plan"]
    # The first step, or period, opens connections.
    step_s, predicted_s = steady(run["step_s"], skip=1), plan["prediction"]["step_s"]
    row = {
        "what": what,
        "stages": [len(replica["stages"]) for replica in plan["replicas"]],
        "rule": (plan["exchange"] or {"rule": "none"})["rule"],
        "predicted": round(samples / predicted_s, 3),
        "measured": round(samples / step_s, 3),
        "error": round(step_s / predicted_s - 1.0, 4),
        "steps_s": [round(s, 3) for s in run["step_s"]],
    }
    print(
        f"{what:<16} {row['stages']} stages, {row['rule']}: {row['predicted']:.3g} samples/s predicted, "
        f"{row['measured']:.3g} measured",
        flush=True,
    )
    sent = met_bytes(whole_log(fleet))[before:]
    if row["rule"] in LOCAL_RULES and sent:
        planned = crossing_bytes(plan)
        rounds = sent[: len(sent) // int(plan["exchange"]["fragments"]) * int(plan["exchange"]["fragments"])]
        row |= {"round_bytes": rounds, "planned_bytes": planned}
        row["bytes_error"] = round(sum(rounds or sent) / len(rounds or sent) / planned - 1.0, 4)
        print(f"  a round sent {sum(sent) / len(sent):.0f} bytes, {planned} planned", flush=True)
    return row


def whole_log(fleet: LabFleet) -> str:
    """The coordinator's log so far."""
    return (fleet.folder / "coordinator.log").read_text(errors="replace")


def wrong_figures(rows: Sequence[Mapping[str, Any]], ratio: float) -> str:
    """Say what of the promises does not hold, "" where all do."""
    local = rows[-1]
    found = []
    if max(local["stages"], default=1) < 2 or local["rule"] not in LOCAL_RULES:
        found.append(f"{local['rule']} of {local['stages']} stages was planned, no peers of several hosts")
    if ratio < GOAL:
        found.append(f"{ratio:.1f} times exact replicas, {GOAL:g} are asked")
    found += [f"{row['what']}: {row['error']:+.0%} off" for row in rows if abs(row["error"]) > TOLERANCE]
    if abs(local.get("bytes_error", 1.0)) > BYTES_TOLERANCE:
        found.append(f"a round's bytes are {local.get('bytes_error', 1.0):+.1%} off")
    return "; ".join(found)


def main() -> int:
    """Print a row for each way; exit code 1 where a promise does not hold."""
    options = parser(__doc__ or "", scenario="sites_thin", job="benchmarks/tied_gpt_job.py")
    options.add_argument("--exchange", default="streaming_diloco:int4_block", help="the peers' rule")
    options.add_argument("--local-steps", type=int, default=48, help="steps between two rounds of a value")
    args = options.parse_args()
    need_lab(args.json)
    settings = [*fitting(SETTINGS, args.job), f"seed={args.seed}", "eval_batches=0"]
    loaded = load_job(Path(args.job), settings)
    samples = loaded.training.n_micro * int(next(iter(loaded.example_inputs.values())).shape[0])
    replicated = ["replicas=2", "blocks=2"]
    asked = [f"exchange={args.exchange}", f"local_steps={args.local_steps}"]
    with LabFleet((args.scenario or ["sites_thin"])[0]) as fleet:
        fleet.train(args.job, "op_fence", [*settings, f"steps={SCHEDULED}"], stop_after=REFRESHING_STEPS)
        named = fleet.plan(args.job, "op_fence", [*settings, f"steps={SCHEDULED}", "exchange=auto"])
        rows = [trained(fleet, args.job, [*settings, *replicated], "exact replicas", samples, EXACT_STEPS)]
        steps = ROUNDS * args.local_steps
        rows.append(trained(fleet, args.job, [*settings, *asked], "peers", samples, steps))
    ratio = rows[-1]["measured"] / rows[0]["measured"]
    way = (named["exchange"] or {"rule": "none"})["rule"]
    print(f"peers: {ratio:.1f} times exact replicas; {json.dumps(machine())}", flush=True)
    print(f"exchange=auto names: {way}, {len(named['replicas'])} replicas", flush=True)
    figures = {"rows": rows, "ratio": round(ratio, 2), "named": way, "machine": machine()}
    return conclude(figures, args.json, wrong_figures(rows, ratio))


if __name__ == "__main__":
    execute(main)
