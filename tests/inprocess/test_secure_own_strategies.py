"""Own strategies in secure rounds: the bits of plain sums, and nobody sees a single update."""

from __future__ import annotations

from pathlib import Path

from atoll.secure import Stage
from coordinator.messages.jobs import Phase
from tests.inprocess.test_secure_federation import NAMES, plain, same, secure
from tests.strategies.own.tutorial import ClientMomentum, tutorial


def test_secure_rounds_of_an_own_strategy_end_with_the_bits_of_plain_sums(tmp_path: Path) -> None:
    tutorial()
    made = secure(tmp_path / "secure", NAMES[:4], strategy="controls")
    made.run()
    assert made.state.phase is Phase.FINISHED, made.state.reason
    other = plain(tmp_path / "plain", made)
    other.run()
    assert same(made.weights(), other.weights())


def test_a_third_that_is_lost_at_any_stage_costs_an_own_strategy_nothing_but_its_updates(
    tmp_path: Path,
) -> None:
    lost = {(at, stage): (NAMES[at], NAMES[(at + 3) % 6]) for at, stage in enumerate(Stage)}
    made = secure(tmp_path / "secure", lost=lost, strategy=ClientMomentum.name)
    made.run()
    assert made.state.phase is Phase.FINISHED, made.state.reason
    other = plain(tmp_path / "plain", made)
    other.run()
    assert same(made.weights(), other.weights())
