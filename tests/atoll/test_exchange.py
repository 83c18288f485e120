"""Exchange: how many ranks it waits for; ExchangeRound: draws that are the same everywhere."""

from __future__ import annotations

import pytest

from atoll.exchange import Exchange, ExchangeRound


@pytest.mark.parametrize(
    ("quorum", "ranks", "awaited"), [(1.0, 5, 5), (0.5, 4, 2), (0.5, 5, 3), (0.07, 100, 7), (0.001, 4, 1)]
)
def test_a_quorum_is_at_least_its_share_of_the_ranks(quorum: float, ranks: int, awaited: int) -> None:
    assert Exchange(quorum=quorum).awaited(ranks) == awaited


def test_draws_depend_on_seed_round_and_purpose_alone() -> None:
    at = ExchangeRound(3, (0, 1), seed=5)
    assert at.draw_seed("mask") == ExchangeRound(3, (0, 7), seed=5, weights=(1.0, 2.0)).draw_seed("mask")
    others = [ExchangeRound(4, (0, 1), 5), ExchangeRound(3, (0, 1), 6)]
    assert len({at.draw_seed("mask"), at.draw_seed("1 2"), *(one.draw_seed("mask") for one in others)}) == 4
