"""A client: a few local steps on its own images."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from . import task

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train from the received weights."""
    run, config = context.run_config, message.content.config_records["config"]
    x, y = (
        torch.from_numpy(a)
        for a in task.images_of(str(run["data"]), int(context.node_config["partition-id"]))
    )
    net = task.LeNet()
    net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    loss = task.train(
        net,
        x,
        y,
        steps=int(run["steps"]),
        batch=int(run["batch"]),
        lr=float(run["lr"]),
        seed=int(str(config["server-round"])),
    )
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(x)})
    return Message(
        RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message
    )
