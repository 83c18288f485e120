"""FedAvg over some of the clients in every round, without evaluation; seconds of every round as JSON."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from . import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds and write what they took to `out`."""
    run = context.run_config
    clients, drawn = int(run["clients"]), int(run["drawn"])
    torch.manual_seed(int(run["seed"]))
    at_s: list[float] = []
    strategy = FedAvg(
        fraction_train=drawn / clients,
        min_train_nodes=drawn,
        min_available_nodes=clients,
        fraction_evaluate=0.0,
    )
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(task.LeNet().state_dict()),
        num_rounds=int(run["num-server-rounds"]),
        evaluate_fn=lambda at_round, arrays: at_s.append(time.monotonic()),
    )
    if run["out"]:
        part = Path(f"{run['out']}.part")
        part.write_text(json.dumps({"round_s": [after - before for before, after in pairwise(at_s)]}))
        part.rename(str(run["out"]))
