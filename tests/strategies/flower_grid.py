"""A Flower run in one process: a Grid whose nodes are ClientApps called in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid

from protos.flower_internals import take_identity

SERVER = 99
Client = Callable[[Message, Context], Message]


class LocalGrid(Grid):
    """``clients``: node id -> its ClientApp; an exception becomes an error reply, as a runtime does it."""

    def __init__(self, clients: Mapping[int, Client]) -> None:
        take_identity(run=1, node=SERVER)
        self.clients = clients
        self.contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in clients}
        self.requests: list[Message] = []
        self.change: Callable[[Message], Message | None] = lambda reply: reply
        """What becomes of a reply on its way; None loses it."""

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        replies = []
        # Flower draws the nodes without a seed: one order here, so that sums repeat to the bit.
        for message in sorted(messages, key=lambda message: message.metadata.dst_node_id):
            self.requests.append(message)
            node = message.metadata.dst_node_id
            try:
                reply = self.clients[node](message, self.contexts[node])
            except Exception as error:  # noqa: BLE001 - whatever an app raises
                reply = Message(Error(2, repr(error)), reply_to=message)
            changed = self.change(reply)
            replies += [] if changed is None else [changed]
        return replies

    def get_node_ids(self) -> Iterable[int]:
        return list(self.clients)

    def set_run(self, run: Any) -> None:
        raise AssertionError("nobody sets a run here")

    @property
    def run(self) -> Any:
        raise AssertionError("nobody asks for the run here")

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise AssertionError("deprecated by Flower")

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise AssertionError("strategies send and receive")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise AssertionError("strategies send and receive")
