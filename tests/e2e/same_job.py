"""One small federated job, for tests that run it in different ways and compare the weights it ends with.

Two clients with unlike data; three rounds of two local epochs, SGD with momentum. The Flower app trains in
a plain torch loop; what it shares with the native path is the order of samples (``atoll.sampling``), the
initial weights and the rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll import Federated, Job, Optimizer, OptimizerName, Registered, TrainingSpec
from coordinator.client.prepare import prepare
from tests.coordinator.flower.flower_apps import PROJECT
from tests.inprocess.federation import LocalFederation, local_model

CLIENTS = ("worker0", "worker1")
BATCH, EPOCHS, ROUNDS, SEED = 16, 2, 3, 3
LR, MOMENTUM = 0.05, 0.9
SIZES = {"worker0": 121, "worker1": 72}  # neither full batches nor alike


class Classifier(nn.Module):
    """Loss in training, loss and accuracy in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.layers(x)
        loss = F.cross_entropy(logits, y)
        if self.training:
            return loss
        return SimpleNamespace(loss=loss, accuracy=(logits.argmax(-1) == y).float().mean())


def samples(client: str) -> dict[str, Any]:
    """``image`` [n, 16] and ``label`` [n] of one client: mostly two of four classes."""
    at = CLIENTS.index(client)
    draw = np.random.default_rng(at)
    y = draw.choice(4, SIZES[client], p=np.roll([0.5, 0.4, 0.05, 0.05], 2 * at)).astype(np.int64)
    centres = np.random.default_rng(7).normal(size=(4, 16))
    x = centres[y] + 0.8 * draw.normal(size=(len(y), 16))
    return {"image": x.astype(np.float32), "label": y}


def job(strategy: str, **options: Any) -> Job:
    """The job, for workers or for this process."""
    return Job(
        module=Classifier(),
        example_inputs={"x": torch.zeros(BATCH, 16), "y": torch.zeros(BATCH, dtype=torch.int64)},
        data=Registered("digits", {"x": "image", "y": "label"}),
        training=TrainingSpec(
            steps=ROUNDS,
            n_micro=1,
            seed=SEED,
            optimizer=Optimizer(OptimizerName.SGD, lr=LR, momentum=MOMENTUM),
        ),
        federated=Federated(
            strategy,
            local_epochs=EPOCHS,
            held_out=0.0,
            evaluate_every=0,
            min_clients=len(CLIENTS),
            **options,
        ),
        name=f"same {strategy}",
    )


def in_this_process(what: Job, names: Mapping[str, str] | None = None) -> dict[str, Tensor]:
    """The weights that ``LocalFederation`` ends with. ``names``: client -> what it is called there; a
    client's name is part of its seeds, and a worker's is drawn when it enrols."""
    called = names or {name: name for name in CLIENTS}
    prepared = prepare(what)
    assert what.federated is not None
    model = local_model(
        prepared.graphs.dag, prepared.graphs.eval_dag, what.module.state_dict(), prepared.spec.training
    )
    clients = {called[name]: samples(name) for name in CLIENTS}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the workers have: sums depend on it
    try:
        federation = LocalFederation(model, what.federated, clients, inputs={"x": "image", "y": "label"})
        for _ in range(ROUNDS):
            federation.run_round()
    finally:
        torch.set_num_threads(threads)
    return {name: torch.from_numpy(np.array(array)) for name, array in federation.weights.items()}


def furthest(these: Mapping[str, Tensor], those: Mapping[str, Tensor]) -> float:
    """The largest difference of any weight; both sides hold the same tensors."""
    assert set(these) == set(those)
    return max(float((these[name] - those[name]).abs().max()) for name in these)


# ---------------------------------------------------------------- the same as a Flower app

SERVER = """
import json
import os

from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from safetensors.torch import save_file

from strategies.flower import atoll_strategy, trained_names
from tests.e2e import same_job

app = ServerApp()


@app.main()
def main(grid, context):
    run, model, nodes = context.run_config, same_job.Classifier(), len(same_job.CLIENTS)
    for rule in run["rules"].split():
        strategy = atoll_strategy(
            rule,
            trained=trained_names(model),
            fraction_evaluate=0.0,
            min_train_nodes=nodes,
            min_available_nodes=nodes,
        )
        arrays = ArrayRecord(model.state_dict())
        strategy.start(grid=grid, initial_arrays=arrays, num_rounds=same_job.ROUNDS)
        assert strategy.state.round == same_job.ROUNDS
        save_file(strategy.arrays.to_torch_state_dict(), os.path.join(run["weights"], rule))
    with open(run["out"] + ".part", "w") as file:
        json.dump({"rules": run["rules"]}, file)
    os.rename(run["out"] + ".part", run["out"])  # whoever waits for it finds it whole
"""

CLIENT = """
import torch
from flwr.clientapp import ClientApp

from atoll.sampling import epoch_batches, split
from strategies import flower_records as words
from strategies.values import Done
from strategies.flower import correct, local_round
from tests.e2e import same_job

app = ClientApp()


def arrays(model):
    return {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}


@app.train()
def train(message, context):
    torch.set_num_threads(1)
    if message.content["config"][words.ROUND] == 0:
        context.state.clear()  # one run tries several rules; a client begins each without a past
    client = same_job.CLIENTS[int(context.node_config["partition-id"])]
    data = {field: torch.from_numpy(array) for field, array in same_job.samples(client).items()}
    own = split(len(data["label"]), 0.0, same_job.SEED, client).train
    model = same_job.Classifier()

    def local(work):
        model.load_state_dict({name: torch.from_numpy(array) for name, array in work.start.items()})
        correction = work.correction.mapped(torch.from_numpy)
        optimizer = torch.optim.SGD(model.parameters(), lr=same_job.LR, momentum=same_job.MOMENTUM)
        losses = []
        for epoch in range(same_job.EPOCHS):
            for batch in epoch_batches(own, same_job.BATCH, same_job.SEED, client, work.round, epoch):
                optimizer.zero_grad()
                loss = model(data["image"][batch], data["label"][batch])
                loss.backward()
                correct(model, correction)
                optimizer.step()
                losses.append(float(loss))
        mean = {"train_loss": sum(losses) / len(losses)}
        return Done(arrays(model), len(own), len(losses), same_job.LR, same_job.MOMENTUM, metrics=mean)

    return local_round(message, context, arrays(model), local)
"""


def write_app(folder: Path) -> Path:
    """The job as a Flower app: ``rules`` by blanks, one after another, each one's weights in the folder
    ``weights``."""
    package = folder / "samejob" / "samejob"
    package.mkdir(parents=True)
    config = dedent("""
        rules = "fedavg"
        weights = ""
    """)
    (package.parent / "pyproject.toml").write_text(PROJECT.format(name="samejob", config=config))
    (package / "__init__.py").write_text("")
    (package / "server.py").write_text(SERVER)
    (package / "client.py").write_text(CLIENT)
    return package.parent
