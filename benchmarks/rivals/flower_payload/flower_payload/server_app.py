"""FedAvg over float32 arrays of a chosen size, without evaluation; seconds of every round as JSON."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds and write what they took to `out`."""
    run = context.run_config
    nodes, count = int(run["min-nodes"]), int(run["arrays"])
    draw = np.random.default_rng(0)
    size = int(run["megabytes"]) * 1_000_000 // 4 // count
    arrays = ArrayRecord({f"w{at}": Array(draw.standard_normal(size, np.float32)) for at in range(count)})
    at_s: list[float] = []
    strategy = FedAvg(min_train_nodes=nodes, min_available_nodes=nodes, fraction_evaluate=0.0)
    strategy.start(
        grid=grid,
        initial_arrays=arrays,
        num_rounds=int(run["num-server-rounds"]),
        evaluate_fn=lambda at_round, arrays: at_s.append(time.monotonic()),
    )
    if run["out"]:
        found = {"round_s": [after - before for before, after in pairwise(at_s)]}
        part = Path(f"{run['out']}.part")
        part.write_text(json.dumps(found))
        part.rename(str(run["out"]))
