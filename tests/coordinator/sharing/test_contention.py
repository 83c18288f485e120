"""AdaDUAL's rule against the sum of ends that it is derived from."""

from __future__ import annotations

import pytest

from coordinator.sharing.contention import begins, eta, slowed_s

BYTE_S, ETA_S = 8.53e-10, 2.56e-10


def _ends(new: float, left: float, *, at_once: bool, eta_s: float) -> float:
    """Sum of both transfers' ends, played through."""
    if not at_once:
        return 2.0 * left * BYTE_S + new * BYTE_S
    both_s, short = slowed_s(2, BYTE_S, eta_s), min(new, left)
    return 2.0 * short * both_s + (max(new, left) - short) * BYTE_S


@pytest.mark.parametrize("eta_s", [0.0, ETA_S, BYTE_S])
def test_a_transfer_begins_exactly_where_that_ends_both_sooner_in_sum(eta_s: float) -> None:
    for ratio in [at / 100.0 + 0.001 for at in range(1, 300)]:
        new, left = 1e8 * ratio, 1e8
        sooner = _ends(new, left, at_once=True, eta_s=eta_s) < _ends(new, left, at_once=False, eta_s=eta_s)
        assert begins(new, [left], BYTE_S, eta_s) is sooner, ratio


def test_a_free_link_is_taken_and_a_third_transfer_waits() -> None:
    assert begins(1e9, [], BYTE_S, ETA_S)
    assert not begins(1.0, [1e9, 1e9], BYTE_S, ETA_S)


def test_eta_is_what_two_flows_lose_against_one() -> None:
    assert eta(8e9, 4e9) == 0.0
    assert eta(8e9, 3.2e9) == pytest.approx(0.5e-9)
