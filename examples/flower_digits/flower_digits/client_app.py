"""A client: trains and evaluates on its own part of the images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from . import task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor


def packed(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """A mod that compresses what is uploaded, where the run's `codec` says so."""
    codec = str(context.run_config["codec"])
    if not codec:
        return call_next(message, context)
    from compressors.flower import compress_mod

    return compress_mod(codec)(message, context, call_next)


app = ClientApp(mods=[packed])


def data_of(context: Context) -> tuple[Tensor, Tensor]:
    """This node's images."""
    run, node = context.run_config, context.node_config
    return task.partition(
        int(node["partition-id"]), int(node["num-partitions"]), float(run["alpha"]), int(run["seed"])
    )


def paired(context: Context, at_round: int, n: int) -> tuple[int, Callable[[int], Iterable[Tensor]] | None]:
    """How many of ``n`` images this node trains on, and which an epoch's batches have: those of Atoll's
    native job, where `paired-with` names its workers by partition and `held-out` is its own."""
    run = context.run_config
    names = str(run["paired-with"]).split()
    if not names:
        return n, None
    from atoll.sampling import epoch_batches, split

    seed, name = int(run["seed"]), names[int(context.node_config["partition-id"])]
    own = split(n, float(run["held-out"]), seed, name).train

    def batches(epoch: int) -> Iterable[Tensor]:
        return map(torch.from_numpy, epoch_batches(own, task.BATCH, seed, name, at_round, epoch))

    return len(own), batches


def ours(context: Context) -> bool:
    """Whether the run uses a strategy of Atoll."""
    return str(context.run_config["strategy"]).startswith("atoll.")


@app.train()
def train(message: Message, context: Context) -> Message:
    """Local epochs from the received weights."""
    data = data_of(context)
    if ours(context):
        from . import rules

        return rules.train(message, context, data)
    run, request = context.run_config, message.content.config_records["config"]
    model = task.make_model(int(run["seed"]), int(run["hidden"]))
    received = message.content.array_records["arrays"].to_torch_state_dict()
    model.load_state_dict(received)
    pull = float(str(request.get("proximal-mu", 0.0)))  # FedProx: mu (w - received) on top of each gradient

    def towards_received() -> None:
        for name, parameter in model.named_parameters():
            if pull and parameter.grad is not None:
                parameter.grad += pull * (parameter.detach() - received[name])

    at_round = int(str(request["server-round"]))
    examples, batches_of = paired(context, at_round - 1, len(data[0]))
    loss, _ = task.train(
        model,
        data,
        epochs=int(run["local-epochs"]),
        lr=float(run["lr"]),
        seed=at_round,
        before_step=towards_received,
        batches_of=batches_of,
    )
    metrics = MetricRecord({"train_loss": loss, "num-examples": examples})
    return Message(
        RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message
    )


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """The received weights on this node's images."""
    data = data_of(context)
    if ours(context):
        from . import rules

        return rules.evaluate(message, context, data)
    run = context.run_config
    model = task.make_model(int(run["seed"]), int(run["hidden"]))
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    loss, accuracy = task.evaluate(model, data)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(data[0])})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
