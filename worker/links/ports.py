"""What links need of others: arrivals that are declared, and a network that carries messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from atoll.opdag import TensorMeta
    from worker.transport.contract import Receiver
    from worker.transport.frames import MessageKey


class Arrival(Protocol):
    """A message that will come: its key, whom from, and its tensor."""

    @property
    def key(self) -> MessageKey: ...

    @property
    def peer(self) -> str: ...

    @property
    def meta(self) -> TensorMeta: ...


class Network(Protocol):
    """The part of PeerNetwork that links use."""

    def register(self, job: str, receiver: Receiver) -> None: ...

    def unregister(self, job: str, receiver: Receiver) -> None: ...

    def forget(self, job: str, plan_version: int | None = None) -> None: ...

    def send(
        self,
        peer: str,
        key: MessageKey,
        header: bytes,
        payload: bytes | bytearray | memoryview,
        timeout_s: float | None = None,
        more: bool = False,
    ) -> None: ...
