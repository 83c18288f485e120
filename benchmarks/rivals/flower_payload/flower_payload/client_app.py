"""A client that moves every array a little instead of training."""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """All bytes change: Flower would send nothing for arrays that it has seen."""
    config = message.content.config_records["config"]
    draw = np.random.default_rng([context.node_id % 2**32, int(str(config["server-round"]))])
    moved = ArrayRecord()
    for name, array in message.content.array_records["arrays"].items():
        moved[name] = Array(array.numpy() + np.float32(1e-3) * draw.standard_normal(1, np.float32))
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": moved, "metrics": metrics}), reply_to=message)
