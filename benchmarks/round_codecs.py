"""The codec of peers' rounds while their line goes from 10 to 1 to 50 Mbit/s, which nobody is told.

Two workers train a GPT by DiLoCo with `--exchange diloco:auto`. Printed: the codec that rounds travel in, how
soon after each change of the line it is another one, and what a round's period took.

  python -m benchmarks.round_codecs --json
"""

from __future__ import annotations

import json
import time
from typing import Any

from benchmarks.harness import (
    CommandFailed,
    LabFleet,
    conclude,
    execute,
    fitting,
    machine,
    need_lab,
    parser,
    settings_options,
)
from benchmarks.link_adaptation import SCENARIO, watch

MBIT = (10.0, 1.0, 50.0)
PERIODS_BEFORE = 2  # at each rate, with the codec that it came to
GOAL_S = 60.0
SETTINGS = ("WIDTH=128", "LAYERS=2", "n_micro=4", "eval_batches=0", "steps=100000", "checkpoint_every=50000")


def followed(fleet: LabFleet, job: str, settings: list[str]) -> list[dict[str, Any]]:
    """Train while the line changes; a row for each rate. A rate is over once the codec has changed and two
    periods have passed with it, or when twice the time that it should take is over."""
    a, b = fleet.scenario.join_order
    rates = list(MBIT)
    fleet.lab.set_link(a, b, mbit=rates[0])
    name = fleet.atoll("submit", job, *settings_options(settings), "--detach", "--json")["job"]
    rows: list[dict[str, Any]] = []
    codec, ends = "", set[int]()  # steps that periods under this codec ended with
    for update in watch(fleet, name):
        if update["state"] in ("failed", "cancelled"):
            if len(rows) < len(MBIT):
                raise CommandFailed(f"{name} ended {update['state']}: {update.get('reason')}")
            break
        now_s = time.monotonic()
        plan = update.get("plan") or {}
        found = (plan.get("exchange") or {}).get("codec", codec)
        if not rows and found:
            rows.append({"mbit": rates[0], "codec": found, "changed_s": None, "began_s": now_s})
            codec = found
        if not rows:
            continue
        row = rows[-1]
        if found != codec:
            codec, ends = found, set()
            row |= {"codec": found, "changed_s": round(now_s - row["began_s"], 1)}
            print(f"{row['mbit']:g} Mbit/s: rounds in {found} after {row['changed_s']} s", flush=True)
        ends.add(update["step"])
        waited = now_s - row["began_s"] > 2 * GOAL_S
        settled = row["changed_s"] is not None or len(rows) == 1
        if (settled and len(ends) > PERIODS_BEFORE) or waited:
            if len(rows) == len(MBIT):
                fleet._output("cancel", name)
                break
            fleet.lab.set_link(a, b, mbit=rates[len(rows)])
            rows.append({"mbit": rates[len(rows)], "codec": codec, "changed_s": None, "began_s": now_s})
            ends = set()
    steps = fleet._metrics(name)["step_s"]
    print(f"seconds a step: {', '.join(f'{s:.3f}' for s in steps)}", flush=True)
    return rows


def main() -> int:
    """Print a row for each rate; exit code 1 when a codec does not follow within a minute."""
    options = parser(__doc__ or "", scenario=SCENARIO, job="examples/gpt.py")
    options.add_argument("--local-steps", type=int, default=100, help="of a period")
    args = options.parse_args()
    need_lab(args.json)
    asked = ["exchange=diloco:auto", f"local_steps={args.local_steps}", f"seed={args.seed}"]
    settings = [*fitting(SETTINGS, args.job), *asked]
    with LabFleet((args.scenario or [SCENARIO])[0]) as fleet:
        rows = followed(fleet, args.job, settings)
    wrong = [
        f"{row['mbit']:g} Mbit/s: {row['codec']} after {row['changed_s']} s"
        for row in rows[1:]
        if row["changed_s"] is None or row["changed_s"] > GOAL_S
    ]
    for row in rows:
        row.pop("began_s")
    print(json.dumps(machine()))
    return conclude({"rows": rows, "machine": machine()}, args.json, "; ".join(wrong))


if __name__ == "__main__":
    execute(main)
