"""Peers of several stages with steps of their own in simulated worlds: a lost stage is its peer's affair."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.messages.facts import PlanAdopted, Reconfigured, RoundMet, StepCommitted
from coordinator.pipeline import history
from tests.parameters import sampled
from tests.sim import own_steps
from tests.sim.clock import digest
from tests.sim.faults import Crash
from tests.sim.shrink import holding
from tests.sim.test_local_steps import peers
from tests.sim.world import Scenario, violation_of

TWO = Scenario(seed=2, workers=4, replicas=2, peer_stages=2, local_steps=8, steps=48)
"""One peer of two stages, one of one, and an idle worker."""


def piped(seed: int) -> Scenario:
    """A world drawn by its seed with peers of two and one stages, or of three and two; in every fifth rounds
    begin with a quorum."""
    drawn, count, stages = peers(seed), 2 + seed % 2, 2 + seed % 2
    fewest = sum(stages - at % 2 for at in range(count)) + seed // 2 % 3
    return replace(
        drawn,
        workers=max(drawn.workers, fewest),
        replicas=count,
        peer_stages=stages,
        local_steps=2 + seed % 7,
        quorum=max(1, count - 1) if seed % 5 == 0 else 0,
    )


@pytest.mark.parametrize("first", sampled(1, range(0, 64, 4)))
def test_everything_holds_where_peers_are_pipelines(first: int) -> None:
    for seed in range(first, first + 4):
        holding(piped(seed))


@pytest.mark.parametrize("lost", ["w0", "w1"])
def test_a_lost_stage_is_taken_over_and_its_peer_has_its_place_in_every_round(lost: str) -> None:
    world = holding(replace(TWO, faults=(Crash(7.0, 0.0, lost),)))
    assert [fact.step for fact in world.facts(StepCommitted)] == list(range(7, 48, 8))
    assert len(world.facts(PlanAdopted)) == 1
    (move,) = world.facts(Reconfigured)
    assert "w3 takes over" in move.reason
    assert not move.absent
    assert all(not met.missing and len(met.included) == 3 for met in world.facts(RoundMet))


def test_without_an_idle_worker_the_round_closes_without_the_peer_which_joins_again() -> None:
    """Within 3 s of its loss being noticed."""
    world = holding(replace(TWO, peer_stages=3, faults=(Crash(7.0, 4.0, "w1"),)))
    assert [fact.step for fact in world.facts(StepCommitted)] == list(range(7, 48, 8))
    without = [met for met in world.facts(RoundMet) if met.missing]
    assert set(without[0].missing) == {"w0", "w1"}
    moved_s = next(at_s for at_s, text in world.clock.story if "the others continue without w1" in text)
    assert without[0].at_s - moved_s < 3.0
    assert world.facts(RoundMet)[-1].missing == {}


def test_a_pipeline_takes_committed_steps_while_a_stage_of_another_is_repeated() -> None:
    found = replace(TWO, workers=6, peer_stages=3, local_steps=16, faults=(Crash(7.0, 0.0, "w1"),))
    story = [(at_s, text) for at_s, text in holding(found).clock.story if at_s > 1007.0]
    back_s = next(at_s for at_s, text in story if text.startswith("w5 loading -> ready"))
    taken = [at_s for at_s, text in story if text.startswith("w3 waiting -> applying")]
    assert sum(1007.5 < at_s < back_s for at_s in taken) > 2


def test_a_peer_that_is_lost_while_a_stage_of_another_is_repeated_puts_both_out() -> None:
    """Rounds are repeated among the peers that were there."""
    faults = (Crash(7.0, 20.0, "w6"), Crash(8.0, 9.0, "w1"), Crash(8.9, 9.0, "w3"))
    found = replace(TWO, workers=8, replicas=4, peer_stages=2, local_steps=4, faults=faults)
    moves = holding(found).facts(Reconfigured)
    assert "w7 takes over" in moves[0].reason
    assert set(moves[1].absent) == {0, 1, 3, 4}


def test_a_repeated_step_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the peer heard a newcomer is not told the last step."""
    honest = history.replay

    def bug(*arguments: object) -> object:
        found = honest(*arguments)  # type: ignore[arg-type]
        return found and replace(found, commits=(*found.commits[:-2], found.commits[-1]))

    monkeypatch.setattr(history, "replay", bug)
    why, _ = violation_of(replace(TWO, faults=(Crash(7.0, 0.0, "w1"),)))
    assert "repeats step" in why


def test_a_newcomer_that_repeats_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = own_steps.OwnSteps._results

    def bug(held: own_steps.Held, messages: list[str]) -> dict[str, str]:
        found = honest(held, messages)
        odd = held.work.replay is not None
        return {name: digest("odd", value) if odd else value for name, value in found.items()}

    monkeypatch.setattr(own_steps.OwnSteps, "_results", staticmethod(bug))
    why, _ = violation_of(replace(TWO, local_steps=2, faults=(Crash(7.1, 0.0, "w1"),)))
    assert "different results" in why or "undisturbed" in why


def test_who_stands_by_for_a_stage_takes_it_and_loads_nothing() -> None:
    found = replace(
        TWO, workers=6, peer_stages=3, local_steps=4, standbys=5, steps=200, faults=(Crash(17.3, 0.0, "w0"),)
    )
    world = holding(found)
    assert [fact.step for fact in world.facts(StepCommitted)] == list(range(3, 200, 4))
    (move,) = world.facts(Reconfigured)
    assert move.newcomers == ()
    assert "w5 takes rank 0, for which it stood by" in move.reason
    assert all(not met.missing for met in world.facts(RoundMet))


@pytest.mark.parametrize("first", sampled(1, range(0, 64, 4)))
def test_everything_holds_where_standbys_repeat_peers_steps(first: int) -> None:
    for seed in range(first, first + 4):
        holding(replace(piped(seed), standbys=1 + seed % 2))
