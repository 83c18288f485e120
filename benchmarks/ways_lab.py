"""Does `atoll plan` name the way that is fastest on real workers? Each way trained across an emulated WAN.

Fleets: machines of which no two hold the model (one pipeline), machines of one site that each hold it
(replicas, since a pipeline of four waits for its first and last micro-batches), two of an office whose
exchange takes several steps' time (gradients in a codec, beside exact ones), and machines behind thin
links that each hold it (local steps, with --exchange auto). In each the plan is asked for its choice, then
every way is trained that fits, local steps by the rule that is chosen then. Printed: samples a second,
predicted and measured, what each sample counts (benchmarks.local_steps), the way that was named, the fastest,
and the ratio of the two, predicted and measured.

    python -m benchmarks.ways_lab --json
    python -m benchmarks.ways_lab --case thin --steps 100
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.exchange import GRADIENT_RULES, LOCAL_RULES
from benchmarks.harness import (
    SCHEDULED,
    CommandFailed,
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
from strategies.exchanges import exchange_facts

TOLERANCE = 0.30  # of the ratio of two ways
LOCAL_STEPS = 100  # of a run with local steps, some of its periods
REFRESHING_STEPS = 5  # of a run whose measurements refresh the estimates, as any training does


@dataclass(frozen=True, slots=True)
class Case:
    """A fleet, a job for it, and the ways that are trained on it."""

    name: str
    scenario: str
    settings: tuple[str, ...]
    asked: tuple[str, ...]  # what the owner says: the way is chosen within that
    ways: tuple[tuple[str, tuple[str, ...]], ...]  # (name, settings)


PIPELINE = ("pipeline", ("replicas=1",))
PAIRS = ("replicas", ("replicas=2", "blocks=2"))
REPLICAS = ("replicas", ("replicas=4", "blocks=4"))
OFFICE = ("replicas", ("replicas=2", "blocks=2"))
CODED = ("coded", ("replicas=2", "blocks=2", "exchange=mean:int8_block"))
LOCAL = ("local steps", ("exchange=auto",))  # by the rule that the plan names
WIDE = ("MICRO_BATCH=6", "n_micro=8", "WIDTH=320")
CASES = (
    Case("tight", "four_slow", WIDE, ("replicas=auto", "blocks=2"), (PIPELINE, PAIRS)),
    Case(
        "sites",
        "four_roomy",
        ("MICRO_BATCH=48", "n_micro=4"),  # a fifth of a core computes for longer than it sends gradients
        ("replicas=auto", "blocks=4"),
        (PIPELINE, REPLICAS),
    ),
    Case(
        "thin",
        "four_thin",
        ("WIDTH=128", "LAYERS=2", "MICRO_BATCH=8", "n_micro=4"),
        ("exchange=auto",),
        (PIPELINE, LOCAL),
    ),
    Case(
        "lan",
        "lan",
        ("WIDTH=384", "LAYERS=6", "MICRO_BATCH=1", "n_micro=2"),  # 10.8 M parameters: gradients dominate
        ("replicas=2", "blocks=2", "exchange=mean:int8_block"),
        (OFFICE, CODED),
    ),
)


def way_of(plan: dict[str, Any]) -> str:
    """Name the way of a plan."""
    exchange = plan.get("exchange") or {}
    if exchange.get("rule") in LOCAL_RULES:
        return "local steps"
    if exchange.get("rule") in GRADIENT_RULES:
        return "coded"
    return "replicas" if len(plan.get("replicas") or ()) > 1 else "pipeline"


def counts(plan: dict[str, Any]) -> float:
    """What a sample of the plan's way counts, one of an exact way being 1."""
    exchange = plan.get("exchange")
    if not exchange or way_of(plan) not in ("local steps", "coded"):
        return 1.0
    return exchange_facts(exchange["rule"]).efficiency_at(int(exchange["every"]))


def trained(
    fleet: LabFleet, job: str, way: str, settings: list[str], batch: int, steps: int
) -> dict[str, Any]:
    """Train one way; ``fits`` is false where the coordinator says that it does not."""
    local = way == "local steps"
    try:
        run = fleet.train(
            job,
            "op_fence",
            [*settings, f"steps={LOCAL_STEPS if local else SCHEDULED}"],
            stop_after=None if local else steps,
        )
    except CommandFailed as error:
        if "memory" not in str(error).lower():
            raise
        print(f"  {way:<12} does not fit", flush=True)
        return {"way": way, "fits": False}
    plan = run["plan"]
    # A period of local steps has one duration, which is a step's in it; there may be two.
    step_s = steady(run["step_s"], skip=min(2, len(run["step_s"]) - 1))
    predicted_s, worth = plan["prediction"]["step_s"], counts(plan)
    row = {
        "way": way,
        "fits": True,
        "trained_as": way_of(plan),
        "predicted": round(batch / predicted_s, 3),
        "measured": round(batch / step_s, 3),
        "counts": round(worth, 3),
        "worth": batch / step_s * worth,
        "predicted_worth": batch / predicted_s * worth,
        "steps_s": [round(s, 4) for s in run["step_s"]],
    }
    print(
        f"  {way:<12} {row['predicted']:>8.2f} samples/s predicted {row['measured']:>8.2f} measured, "
        f"each counts {worth:.2f}",
        flush=True,
    )
    return row


def compared(case: Case, job: str, common: list[str], steps: int) -> dict[str, Any]:
    """Ask a fleet's plan for its choice, and train the ways."""
    settings = [*fitting(case.settings, job), *common]
    loaded = load_job(Path(job), settings)
    batch = loaded.training.n_micro * int(next(iter(loaded.example_inputs.values())).shape[0])
    print(f"{case.name} ({case.scenario})", flush=True)
    with LabFleet(case.scenario) as fleet:
        fleet.train(job, "op_fence", [*settings, f"steps={SCHEDULED}"], stop_after=REFRESHING_STEPS)
        chosen = fleet.plan(job, "op_fence", [*settings, f"steps={LOCAL_STEPS}", *case.asked])
        rows = [trained(fleet, job, way, [*settings, *own], batch, steps) for way, own in case.ways]
    fitted = sorted((row for row in rows if row["fits"]), key=lambda row: -row["worth"])
    named, best = way_of(chosen), fitted[0]["way"]
    found: dict[str, Any] = {"case": case.name, "named": named, "fastest": best, "ways": rows}
    words = f"  named: {named}; fastest: {best}"
    if len(fitted) > 1:
        first, second = fitted[:2]
        found["ratio"] = round(first["worth"] / second["worth"], 3)
        found["predicted_ratio"] = round(first["predicted_worth"] / second["predicted_worth"], 3)
        words += f", {found['ratio']:.2f} times the next, {found['predicted_ratio']:.2f} predicted"
    print(words, flush=True)
    return found


def main() -> int:
    """Compare the cases; exit code 1 when a way is named wrongly, or a ratio is off by more than 30 %."""
    options = parser(__doc__ or "", job="examples/gpt.py")
    options.add_argument("--case", action="append", choices=[case.name for case in CASES], help="may repeat")
    options.add_argument("--steps", type=int, default=8, help="of each exact run")
    args = options.parse_args()
    need_lab(args.json)
    common = [f"seed={args.seed}", "eval_batches=0"]
    found = [
        compared(case, args.job, common, args.steps)
        for case in CASES
        if not args.case or case.name in args.case
    ]
    wrong = [
        f"{one['case']}: {one['named']} was named, {one['fastest']} was faster"
        for one in found
        if one["named"] != one["fastest"]
    ]
    wrong += [
        f"{one['case']}: ratio {one['ratio']}, {one['predicted_ratio']} predicted"
        for one in found
        if "ratio" in one and abs(one["predicted_ratio"] / one["ratio"] - 1.0) > TOLERANCE
    ]
    print(json.dumps(machine()))
    return conclude({"cases": found, "machine": machine()}, args.json, "; ".join(wrong))


if __name__ == "__main__":
    execute(main)
