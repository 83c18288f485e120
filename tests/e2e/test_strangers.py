"""Strangers with large messages and wrong tokens cost the coordinator little, a job beside them nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import psutil
import pytest

from benchmarks.federated_fleet import COORDINATOR, FederatedFleet
from protos.credentials import COORDINATOR as NAME
from protos.credentials import JoinToken, channel_credentials, name_options
from tests.e2e.test_federated import job, samples, submitted
from tests.patience import HUNG_S

CONNECTIONS = 200
AT_ONCE = 6  # calls that send: each holds its message in this process
MESSAGE = bytes(63 << 20)  # what gRPC takes with its frame
WRONG = (("authorization", "Bearer " + "x" * 22),)
GROWTH_BYTES = 50 << 20


class Peak:
    """The most memory that a process had resident while this looked."""

    def __init__(self, process: int) -> None:
        self._process, self._done = psutil.Process(process), threading.Event()
        self.before = self.most = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(0.02):
            self.most = max(self.most, self._process.memory_info().rss)


def strangers(port: int, token: str) -> list[grpc.Channel]:
    """Connections of their own to the entry port, all open."""
    credentials = channel_credentials(JoinToken.decode(token).ca_pem)
    options: list[tuple[str, Any]] = [
        ("grpc.max_send_message_length", -1),
        ("grpc.use_local_subchannel_pool", 1),
        *name_options(NAME),
    ]
    found = [
        grpc.secure_channel(f"127.0.0.1:{port}", credentials, options=options) for _ in range(CONNECTIONS)
    ]
    for channel in found:
        grpc.channel_ready_future(channel).result(HUNG_S)
    return found


@pytest.mark.slow
def test_200_strangers_with_64_mib_messages_cost_little_memory_and_no_step() -> None:
    with FederatedFleet([samples(120, 1), samples(80, 2)]) as fleet:
        name = submitted(fleet, job(2000, "beside", min_clients=2, evaluate_every=0))
        steps = (update.step for update in fleet.client.watch(name))
        reached: Callable[[int], int] = lambda least: next(step for step in steps if step >= least)  # noqa: E731
        begun = reached(5)
        channels = strangers(fleet.entry_port, fleet.token)

        def knock(channel: grpc.Channel) -> grpc.StatusCode:
            call = channel.unary_unary("/atoll.v1.Blobs/Missing", lambda data: data, lambda data: data)
            with pytest.raises(grpc.RpcError) as refused:
                call(MESSAGE, metadata=WRONG, timeout=HUNG_S)
            return refused.value.code()

        with Peak(fleet.processes[COORDINATOR].pid) as memory, ThreadPoolExecutor(AT_ONCE) as threads:
            codes = set(threads.map(knock, channels))
        assert codes <= {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE}
        assert memory.most - memory.before < GROWTH_BYTES
        ended = reached(begun + 10)
        assert ended > begun
        dropped = [line for line in fleet.client.logs(name) if line.event == "client.dropped"]
        assert dropped == [], "a client lost a round beside them"
        for channel in channels:
            channel.close()
        fleet.client.cancel(name)
