"""Flower's SecAgg+ in one process: its server workflow and its client mod, message by message.

``flwr.server.workflow.SecAggPlusWorkflow`` and ``secaggplus_mod`` as shipped, with their defaults, among
nodes that answer a vector at once. What carries messages between them here is a loop, so neither Ray nor gRPC
costs it anything. Bytes are those of the messages' contents as flwr writes them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from protos.flower_internals import take_identity

SHARES = 1.0  # of the nodes hold shares: as with ours where 20 take part
THRESHOLD = 0.66


class Nodes:
    """A grid of nodes that all have one vector."""

    def __init__(self, fit: Callable[[Any, Any], Any], contexts: dict[int, Any]) -> None:
        self._fit, self._contexts = fit, contexts
        self.up_bytes = self.down_bytes = 0
        self.node_s = 0.0

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> list[Any]:
        """Have the mod answer each message."""
        from flwr.client.mod import secaggplus_mod
        from flwr.common.serde import recorddict_from_proto, recorddict_to_proto

        replies = []
        for message in messages:
            written = recorddict_to_proto(message.content)
            self.down_bytes += written.ByteSize()
            message.content = recorddict_from_proto(written)  # nodes share no object with the server
            began_s = time.process_time()
            reply = secaggplus_mod(message, self._contexts[message.metadata.dst_node_id], self._fit)
            self.node_s += time.process_time() - began_s
            self.up_bytes += recorddict_to_proto(reply.content).ByteSize()
            replies.append(reply)
        return replies


def flower_round(clients: int, parameters: int, seed: int) -> dict[str, Any]:
    """One round over ``clients`` vectors: bytes of a client, seconds of one and of the server."""
    import flwr.compat.common.recorddict_compat as compat
    from flwr.app import ConfigRecord, Context, Message, RecordDict
    from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
    from flwr.server import LegacyContext, SimpleClientManager
    from flwr.server.compat.grid_client_proxy import GridClientProxy
    from flwr.server.strategy import FedAvg
    from flwr.server.workflow import SecAggPlusWorkflow
    from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key

    take_identity(1, 0)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    vector = np.random.default_rng(seed).normal(size=parameters).astype(np.float32)
    sent = ndarrays_to_parameters([vector])

    def fit(message: Any, context: Any) -> Any:
        result = FitRes(Status(Code.OK, ""), sent, 100, {})
        return Message(compat.fitres_to_recorddict(result, True), reply_to=message)

    known = {node: Context(1, node, {}, RecordDict(), {}) for node in range(1, clients + 1)}
    nodes = Nodes(fit, known)
    manager = SimpleClientManager()
    grid: Any = nodes
    for node in known:
        manager.register(GridClientProxy(node, grid, 1))
    strategy = FedAvg(min_fit_clients=clients, min_available_clients=clients)
    state = RecordDict()
    state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: 1})
    state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(sent, True)
    context = LegacyContext(Context(1, 0, {}, state, {}), None, strategy, manager)
    began_s = time.process_time()
    SecAggPlusWorkflow(SHARES, THRESHOLD)(grid, context)
    took_s = time.process_time() - began_s
    found = compat.arrayrecord_to_parameters(context.state.array_records[MAIN_PARAMS_RECORD], True)
    off = float(np.abs(parameters_to_ndarrays(found)[0] - vector).max())
    if not off < 1e-2:
        raise RuntimeError(f"flower's sum is off by {off} from the mean of its vectors")
    member_s, server_s = nodes.node_s / clients, took_s - nodes.node_s
    return {
        "members": clients,
        "up_bytes": nodes.up_bytes / clients,
        "down_bytes": nodes.down_bytes / clients,
        "member_s": member_s,
        "server_s": server_s,
        "round_s": member_s + server_s,
    }
