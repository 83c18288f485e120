"""What a stage's work needs of the world: tensors from neighbours, and data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from worker.cancel import Cancel

if TYPE_CHECKING:
    from worker.links.codecs import StageCodecs
    from worker.stage.steps.expected import Arrival
    from worker.transport.frames import MessageKey


class TensorLinks(Protocol):
    """What the computation needs of the links of one plan."""

    def expect(self, arrivals: Iterable[Arrival]) -> None:
        """Take these messages from now on."""
        ...

    def relink(self, plan_version: int, first_step: int, codecs: StageCodecs) -> None:
        """From ``first_step`` on messages are of this version and go through these codecs."""
        ...

    def send(self, peer: str, key: MessageKey, tensor: Tensor | None, *, more: bool = False) -> None:
        """Queue; None is the zero-gradient mark. ``more``: another one to this peer follows at once.
        Raises PeerLost."""
        ...

    def receive(self, key: MessageKey, timeout_s: float) -> Tensor | None:
        """Raises TimeoutError when it is not here in time, PeerLost when it cannot come or is not what was
        declared."""
        ...

    def take_digest(self) -> bytes:
        """Return a digest of training's messages received since the last call; empty where there is none."""
        ...

    def step_done(self, step: int) -> None:
        """Messages of ``step`` and before are not wanted any more."""
        ...

    def reconfigure(
        self, plan_version: int, first_step: int, codecs: StageCodecs, *, sends: bool = True
    ) -> None:
        """From ``first_step`` on messages are of this version alone, whatever was lost or aborted before;
        ``sends``: and go to the peers, not to the send log alone."""
        ...

    def ask(self, peer: str, key: MessageKey) -> None:
        """Ask for what ``peer`` sent this stage in ``key``'s step. Raises PeerLost, TimeoutError."""
        ...

    def close(self) -> None: ...


class MicroBatches(Protocol):
    """Training data, fetched ahead (worker/stage/feed.py)."""

    def start(self, first_step: int) -> None: ...

    def take(self, step: int, micro: int, cancel: Cancel) -> dict[str, Tensor]: ...

    def step_done(self, step: int) -> None: ...

    def close(self) -> None: ...


HeldOut = Callable[[Cancel], Iterator[Mapping[str, Tensor]]]
