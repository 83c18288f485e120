"""The server: Flower's FedAvg or FedProx, or a strategy of Atoll, and the accuracy after every round."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, FedProx, Strategy

from . import task

if TYPE_CHECKING:
    from flwr.app import UserConfig
    from torch import Tensor

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds; with `out`, accuracies and times go to that file as JSON."""
    run = context.run_config
    data = task.held_out(full_batches=bool(run["paired-with"]))
    strategy, arrays = made(run)
    accuracy: list[float] = []
    at_s: list[float] = []

    def central(at_round: int, arrays: ArrayRecord) -> MetricRecord:
        loss, share = judged(run, arrays, data)
        accuracy.append(share)
        at_s.append(time.monotonic())  # a round ends here, its evaluation on the clients included
        return MetricRecord({"loss": loss, "acc": share})

    strategy.start(
        grid=grid,
        initial_arrays=arrays,
        num_rounds=int(run["num-server-rounds"]),
        evaluate_fn=central,
    )
    if run["out"]:
        rounds = [after - before for before, after in pairwise(at_s)]
        found = {"acc": accuracy, "round_s": rounds}
        part = Path(f"{run['out']}.part")
        part.write_text(json.dumps(found))
        part.rename(str(run["out"]))  # whoever waits for the file finds it whole


def made(run: UserConfig) -> tuple[Strategy, ArrayRecord]:
    """The run's strategy and the model before the first round."""
    nodes, name, seed = int(run["min-nodes"]), str(run["strategy"]), int(run["seed"])
    least: dict[str, Any] = {
        "min_train_nodes": nodes,
        "min_evaluate_nodes": nodes,
        "min_available_nodes": nodes,
    }
    strategy: Strategy
    if name.startswith("atoll.") and run["paired-with"]:
        raise ValueError("paired-with is for fedavg and fedprox; leave it out with a strategy of Atoll")
    if name.startswith("atoll."):
        from strategies.flower import atoll_strategy, trained_names

        from . import rules

        model = rules.make_model(run)
        options = json.loads(str(run["options"]))
        strategy = atoll_strategy(rules.rule_of(run), options, trained=trained_names(model), **least)
    else:
        model = task.make_model(seed, int(run["hidden"]))
        if name not in ("fedavg", "fedprox"):
            raise ValueError(f"strategy {name!r}; give fedavg, fedprox or atoll.NAME")
        strategy = FedProx(proximal_mu=0.01, **least) if name == "fedprox" else FedAvg(**least)
    if run["codec"]:
        from compressors.flower import Compressed

        strategy = Compressed(strategy, str(run["codec"]))
    return strategy, ArrayRecord(model.state_dict())


def judged(run: UserConfig, arrays: ArrayRecord, data: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """(loss, accuracy) of the common model."""
    seed = int(run["seed"])
    if str(run["strategy"]).startswith("atoll."):
        from . import rules

        model = rules.make_model(run)
        model.load_state_dict(arrays.to_torch_state_dict())
        return rules.central(rules.rule_of(run), model, data)
    model = task.make_model(seed, int(run["hidden"]))
    model.load_state_dict(arrays.to_torch_state_dict())
    return task.evaluate(model, data)
