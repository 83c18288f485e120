"""Another address of this machine is noticed once, and a moment without any is none."""

from __future__ import annotations

import pytest

from worker.control.address_watch import LOOK_EVERY_S, watch_address
from worker.machine.device import own_address


@pytest.mark.parametrize(
    ("seen", "moves"),
    [
        (["10.0.0.2", "10.0.0.2", "10.0.0.2"], 0),
        (["10.0.0.2", None, "10.0.0.2"], 0),
        (["10.0.0.2", None, None, "192.168.7.4", "192.168.7.4"], 1),
        (["10.0.0.2", "192.168.7.4", "10.0.0.2"], 2),
        ([None, "10.0.0.2", "10.0.0.2"], 0),
    ],
)
def test_every_other_address_is_noticed_once(seen: list[str | None], moves: int) -> None:
    looks, pauses, moved = iter(seen), [], []

    def stopped(seconds: float) -> bool:
        pauses.append(seconds)
        return len(pauses) == len(seen)

    watch_address("127.0.0.1", 7700, lambda: moved.append(1), stopped, lambda host, port: next(looks))
    assert len(moved) == moves
    assert set(pauses) == {LOOK_EVERY_S}


def test_the_address_towards_this_machine_is_its_own() -> None:
    assert own_address("127.0.0.1", 7700) == "127.0.0.1"
    assert own_address("not a host", 7700) is None
