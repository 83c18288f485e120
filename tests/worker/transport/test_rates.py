"""Limited rates on real connections: never faster, whatever sends, and nobody is taken for silent by them.

How slow a busy machine is says nothing; that a limit is used up too, the queue's own clock shows in
``tests/worker/manners/test_traffic.py``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.patience import HUNG_S
from tests.worker.transport.hosts import Host, key
from worker.manners.traffic import Traffic
from worker.transport.contract import Paths, TransportConfig
from worker.transport.frames import Direction

MBIT = 8.0
BYTES = 1 << 20
NO_PATIENCE = TransportConfig(streams=4)  # a link that is silent for 1.5 s is lost


@contextmanager
def pair(sending: Traffic, receiving: Traffic) -> Iterator[tuple[Host, Host]]:
    a = Host(None, NO_PATIENCE, listen=False, name="w-a", traffic=sending)
    b = Host(None, NO_PATIENCE, name="w-b", traffic=receiving)
    try:
        b.network.admit("w-a")
        a.network.meet("w-b", Paths((b.address,), dial=True), HUNG_S)
        yield a, b
    finally:
        a.network.close()
        b.network.close()


def carried_s(a: Host, b: Host, nbytes: int) -> float:
    """Seconds until messages of so many bytes together have arrived."""
    began_s = time.monotonic()
    for number in range(4):
        a.network.send("w-b", key(number), b"", bytes(nbytes // 4))
    for _ in range(4):
        b.delivered.get(timeout=HUNG_S)
    return time.monotonic() - began_s


@pytest.mark.parametrize("end", ["upload", "download"])
def test_nothing_passes_faster_than_either_end_allows(end: str) -> None:
    sending, receiving = Traffic(), Traffic()
    with pair(sending, receiving) as (a, b):
        carried_s(a, b, BYTES)  # a window as for a fast link
        sending.limit(MBIT if end == "upload" else 0.0, 0.0)
        receiving.limit(0.0, MBIT if end == "download" else 0.0)
        took_s = carried_s(a, b, BYTES)
        assert took_s >= 0.9 * 8 * BYTES / (1e6 * MBIT) - 0.05
        assert a.losses.empty()
        assert b.losses.empty()
        for traffic in (sending, receiving):
            assert 2 * BYTES < traffic.today[1] < 2.2 * BYTES + 100_000


def test_an_echo_passes_data_that_waits_for_its_turn() -> None:
    sending = Traffic()
    with pair(sending, Traffic()) as (a, b):
        sending.limit(1.0, 0.0)
        sender = threading.Thread(target=carried_s, args=(a, b, BYTES // 4), daemon=True)
        sender.start()
        echoes = [a.network.rtt("w-b") for _ in range(3)]
        # 32 KiB of data take a quarter of a second; 256 KiB were queued before the echoes.
        assert min(echoes) < 1.0
        a.network.send("w-b", key(9, Direction.BACKWARD), b"", b"urgent")
        sending.limit(0.0, 0.0)
        sender.join(HUNG_S)
        assert not sender.is_alive()
        assert a.losses.empty()
