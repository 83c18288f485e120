"""Submits small jobs of several owners to a fleet in the lab, from a host of it, one line of JSON each.

All are one job file's model with other cuts, steps and learning rates, captured once. A command for each
would take seconds of the machine that is being measured, and the first job might end before the last came.

  python -m benchmarks.small_jobs STATE_DIR JOB_FILE SETTING...

{"submit": NAME, "token": TOKEN, "cut": CUT, "steps": STEPS, "lr": RATE}  -> {"job": JOB}
{"export": JOB, "to": PATH}                                              -> {}
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.client.client import connect
from coordinator.client.job_file import load_job
from coordinator.client.prepare import prepare

if TYPE_CHECKING:
    from coordinator.client.prepare import Prepared


def submitted(folder: Path, captured: Prepared, asked: dict[str, Any]) -> dict[str, Any]:
    """Submit the captured model as the job that is asked for."""
    training = captured.spec.training
    optimizer = replace(training.optimizer, lr=float(asked["lr"]))
    training = replace(training, steps=int(asked["steps"]), optimizer=optimizer)
    spec = replace(
        captured.spec, name=str(asked["submit"]), partitioner=str(asked["cut"]), training=training, standbys=0
    )
    with connect(token=str(asked["token"]), state_dir=folder) as client:
        return {"job": client.submit(replace(captured, spec=spec)).job}


def main() -> None:
    """Answer each line of the standard input."""
    folder = Path(sys.argv[1])
    captured = prepare(load_job(Path(sys.argv[2]), sys.argv[3:]))
    print(json.dumps({"cuttable": list(captured.graphs.dag.cuttable())}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "submit" in asked:
            answer = submitted(folder, captured, asked)
        else:
            with connect(state_dir=folder) as client:
                client.export(str(asked["export"]), Path(asked["to"]))
            answer = {}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
