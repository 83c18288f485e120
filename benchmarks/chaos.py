"""`atoll chaos` across an emulated WAN: a job trains for minutes while its processes are killed and frozen.

Three stages and three backups on the homes of a scenario, the coordinator on its server. About every 20
seconds one of all processes, the coordinator too, is killed (kill -9) or stands still (SIGSTOP). The model
ends with the bits of a run that nobody disturbed, and the journal has each step once.

  python -m benchmarks.chaos --seed 1 --seeds 5 --steps 200 --json
  python -m benchmarks.chaos --minutes 2 --kinds kill,crash,freeze,hang,restart,disk,cut,slow --json
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import ROOT, CommandFailed, conclude, execute, machine, need_lab, parser
from lab.world import Lab

EXEC = f"{sys.executable} -m lab exec {{host}} --"
SET = f"{sys.executable} -m lab set {{one}} {{other}}"
WAYS = {"--cut-by": f"{SET} --cut", "--slow-by": f"{SET} --loss 0.1", "--heal-by": f"{SET} --heal --loss 0"}


def options_of(lab: Lab, given: Mapping[str, Any]) -> list[str]:
    """Return the options of `atoll chaos` in a lab."""
    world = lab.scenario
    home = world.coordinator
    found = ["--hosts", ",".join(world.join_order), "--start-by", EXEC, "--address", lab.address(home)]
    return found + [word for name, value in {**WAYS, **given}.items() for word in (name, str(value))]


def run(scenario: str, job: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `atoll chaos --json` says of one seed."""
    # A quarter of a core would be busy starting a killed worker for as long as it is away.
    with Lab(scenario, quotas=False) as lab:
        home = lab.scenario.coordinator
        command = [sys.executable, "-m", "coordinator.cli", "chaos", *job, *options_of(lab, given), "--json"]
        process = lab.popen(
            home, command, stdout=subprocess.PIPE, env={"PYTHONPATH": str(ROOT)}, cwd=ROOT, text=True
        )
        out, _ = process.communicate()
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if not lines:
        raise CommandFailed(f"atoll chaos ended with exit code {process.returncode} and said nothing")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def main() -> int:
    """Command line."""
    made = parser(__doc__, scenario="homes")
    made.add_argument("--job", default="", help="job file (default: the demo's)")
    made.add_argument("--seeds", type=int, default=1, help="so many runs, from --seed on")
    made.add_argument("--minutes", type=float, default=5.0)
    made.add_argument("--every", type=float, default=20.0, help="seconds")
    made.add_argument("--steps", type=int, default=600, help="of each job")
    made.add_argument("--kinds", default="kill,crash,freeze,hang,restart")
    options = made.parse_args()
    need_lab(options.json)
    rows: list[dict[str, Any]] = []
    for seed in range(options.seed, options.seed + options.seeds):
        given = {
            "--seed": seed,
            "--minutes": options.minutes,
            "--every": options.every,
            "--steps": options.steps,
            "--kinds": options.kinds,
        }
        row = run((options.scenario or ["homes"])[0], [options.job] if options.job else [], given)
        rows.append(row)
        for promise in row["promises"]:
            verdict = {True: "held", False: "BROKEN", None: "not seen"}[promise["held"]]
            print(f"seed {seed}: {promise['name']}: {verdict}: {promise['words']}", flush=True)
    wrong = [f"seed {row['seed']}" for row in rows if not row["held"]]
    deeds = sum(len(row["deeds"]) for row in rows)
    steps = sum(job["steps"] for row in rows for job in row["jobs"])
    figures = {"machine": machine(), "deeds": deeds, "steps": steps, "broken": len(wrong), "rows": rows}
    return conclude(figures, options.json, ", ".join(wrong))


if __name__ == "__main__":
    execute(main)
