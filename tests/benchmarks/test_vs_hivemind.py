"""The comparison with hivemind: its arithmetic, and our peers' mean of both."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks.transport import identities
from benchmarks.vs_hivemind import HIVEMIND, OURS, Peer, between, lasted, with_limit, wrong_of

SMALL = {"tensors": 3, "elements": 5000, "seed": 7}


def test_a_round_lasts_from_the_first_beginning_to_the_last_end() -> None:
    assert lasted([[10.0, 12.5], [10.5, 12.0]]) == 2.5
    assert between([1.0, 2.0, 4.5]) == [1.0, 2.5]


def test_a_limit_ratio_is_over_the_lines_time_for_the_bytes_of_one_peer() -> None:
    found = with_limit({OURS: {"s": 2.0}}, 25_000_000, 200.0)  # one second
    assert found == {OURS: {"s": 2.0, "limit_ratio": 2.0}}


@pytest.mark.parametrize(
    ("ours", "theirs", "same_losses", "apart", "count"),
    [
        (0.0, 1e-7, True, 1e-5, 0),
        (1e-9, 1e-7, True, 1e-5, 1),
        (0.0, 0.5, True, 1e-5, 1),
        (0.0, float("nan"), False, 0.1, 3),
    ],
)
def test_wrong_values_of_either_system_are_named(
    ours: float, theirs: float, same_losses: bool, apart: float, count: int
) -> None:
    found: dict[str, Any] = {
        "averaging": {"loopback": {OURS: {"max_error": ours}, HIVEMIND: {"max_error": theirs}}},
        "step": {"pair": {OURS: {"same_losses": same_losses}, HIVEMIND: {"max_error": apart}}},
    }
    assert len(wrong_of(found).split("; ")) - (not wrong_of(found)) == count


def test_both_of_our_peers_end_with_the_exact_mean_of_both(tmp_path: Path) -> None:
    identities(tmp_path)
    peers = [Peer(rank, "127.0.0.1", {**SMALL, "folder": str(tmp_path)}) for rank in range(2)]
    try:
        peers[1].open(peers[0].open([]))
        for number in range(2):
            for peer in peers:
                peer.prepare(number)
                assert not peer.stage.means
            other = threading.Thread(target=peers[1].average)
            other.start()
            peers[0].average()
            other.join()
            assert [peer.error() for peer in peers] == [0.0, 0.0]
            assert all(peer.mean.abs().max() > 0.4 for peer in peers)
    finally:
        for peer in peers:
            peer.close()
