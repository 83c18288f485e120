"""Peers with steps of their own: what one of them says or suffers costs the others a round at most."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.events import Held
from coordinator.messages.facts import RoundMet
from coordinator.messages.jobs import Phase
from coordinator.pipeline.machine import MOST_LOSSES
from coordinator.pipeline.periods import round_groups
from strategies.exchanges.partners import group_of
from tests.coordinator.pipeline.changes.test_copies import Lending
from tests.coordinator.pipeline.changes.test_reconfigure import JOB
from tests.coordinator.pipeline.test_restart import back
from tests.sim import local_steps
from tests.sim.scripted import Scripted, spec

PERIOD = 4


def training(*workers: str, peers: int = 3, world: Scripted | None = None, **changes: Any) -> Scripted:
    """Peers train on the first workers, the others are idle."""
    world = world or Scripted(stages=1, fewest=1)
    world.stages = world.fewest = 1
    world.join(*workers)
    wanted = {"steps": 40, "n_micro": peers, "blocks": peers, "replicas": str(peers)}
    wanted |= {"exchange": "diloco", "local_steps": PERIOD}
    world.submit(what=spec(**wanted | changes))
    load(world)
    assert world.state().phase is Phase.TRAINING
    return world


def present(world: Scripted) -> list[str]:
    holders = world.holders()
    return [holders[rank] for rank in world.state().present]


def load(world: Scripted) -> None:
    for worker in present(world):
        world.says(worker, ev.Loaded(JOB, world.state().version))


def report(world: Scripted, worker: str, digest: str = "d", **changes: Any) -> None:
    """Have a peer report the period in flight."""
    state = world.state()
    assert state.plan is not None
    rank = state.rank_of(worker)
    assert rank is not None
    group = group_of(rank, round_groups(state))
    fields = {
        "losses": (1.0,) * (state.due + 1 - state.step),
        "receipts": (local_steps.receipt(state.plan, group, state.due, digest),),
    }
    world.says(worker, ev.StepReady(JOB, state.version, state.due, **fields | changes))


def period(world: Scripted) -> None:
    done = world.state().step
    for worker in present(world):
        report(world, worker)
    assert world.state().step == done + PERIOD


def last_round(world: Scripted) -> RoundMet:
    return [fact for fact in world.facts if isinstance(fact, RoundMet)][-1]


def lost(world: Scripted, worker: str, peer: str) -> None:
    """Have a peer say that it lost another, which is there; time shows that."""
    state = world.state()
    world.says(worker, ev.StageFailed(JOB, state.version, state.step, "its part did not come", peer))
    while world.state().version == state.version:
        world.wait(0.5)


WRONG: dict[str, dict[str, Any]] = {
    "diverged": {"finite": False},
    "diverged in the steps": {"losses": (float("nan"),) * PERIOD, "finite": False},
    "different results": {"digest": "another"},
    "reports 1 losses": {"losses": (1.0,)},
    "reports 0 losses": {"losses": ()},
}


@pytest.mark.parametrize("words", WRONG)
def test_a_report_that_cannot_be_used_costs_its_own_peer_its_place(words: str) -> None:
    world = training("a", "b", "c")
    report(world, "a")
    report(world, "c")
    report(world, "b", **WRONG[words])
    assert present(world) == ["a", "c"]
    load(world)
    period(world)
    met = last_round(world)
    assert met.included == ("a", "c")
    assert words in met.missing["b"]


def test_a_round_of_another_number_is_refused() -> None:
    world = training("a", "b", "c")
    period(world)
    plan = world.state().plan
    assert plan is not None
    for worker in ("a", "c"):
        report(world, worker)
    report(world, "b", receipts=(local_steps.receipt(plan, (0, 1, 2), PERIOD - 1, "d"),))
    assert present(world) == ["a", "c"]


def test_a_model_that_diverges_everywhere_goes_back_with_a_remedy() -> None:
    world = training("a", "b", "c")
    report(world, "a", finite=False)
    assert present(world) == ["b", "c"]
    load(world)
    report(world, "b", finite=False)
    assert world.state().broken == 1, "it fails when this comes again and again"
    assert any("lower the learning rate" in release.reason for release in world.to("c", do.Release))


def test_a_model_that_diverges_again_and_again_ends_the_job() -> None:
    world = training("a", "b", "c", "d", "e", "f", "g", peers=4)
    for _ in range(8):
        if world.state().phase is Phase.TRAINING:
            report(world, present(world)[0], finite=False)
        load(world)
    assert world.state().phase is Phase.FAILED
    assert "lower the learning rate" in world.state().reason


def poisoned(world: Scripted) -> None:
    """Have a round of which every peer but d diverges, until the job goes back."""
    for worker in ("a", "b"):
        report(world, "d")
        report(world, worker, finite=False)
        if worker == "a":
            assert present(world) == ["b", "c", "d"]
            load(world)


def test_a_peer_that_makes_all_others_diverge_is_not_left_alone() -> None:
    world = training("a", "b", "c", "d", "e", peers=4)
    period(world)
    poisoned(world)
    assert (world.state().step, world.state().broken) == (0, 1), "at the checkpoint, with all of them"
    assert sorted(present(world)) == ["a", "b", "c", "d"]
    load(world)
    period(world)
    poisoned(world)
    assert world.state().step == 0
    assert sorted(present(world)) == ["a", "b", "c", "e"], "d is a suspect twice"
    load(world)
    period(world)


def test_suspects_of_two_rounds_are_those_that_stayed_finite_in_both() -> None:
    world = training("a", "b", "c", "d", "e", peers=4)
    for diverged in (("a", "b"), ("c", "b")):
        for worker in diverged:
            report(world, worker, finite=False)
            if worker != "b":
                load(world)
        load(world)
    assert sorted(present(world)) == ["a", "b", "c", "e"]


def test_who_diverges_in_another_period_is_not_counted_with_those_before() -> None:
    world = training("a", "b", "c", "d", peers=4)
    report(world, "a", finite=False)
    load(world)
    period(world)
    report(world, "b", finite=False)
    assert present(world) == ["c", "d"]
    load(world)
    period(world)


def test_of_two_peers_the_one_that_diverges_goes_alone() -> None:
    world = training("a", "b", peers=2)
    report(world, "a", finite=False)
    assert present(world) == ["b"]
    load(world)
    assert (world.state().step, world.state().phase) == (0, Phase.TRAINING)


def test_a_site_that_goes_down_costs_the_peers_elsewhere_no_step() -> None:
    workers = [f"w{number:02}" for number in range(MOST_LOSSES + 5)]
    world = training(*workers, peers=len(workers))
    period(world)
    for worker in workers[: MOST_LOSSES + 2]:
        world.lose(worker)
    while len(present(world)) > 3:
        world.wait(1.0)
    assert (world.state().phase, world.state().failures) == (Phase.LOADING, 0)
    load(world)
    period(world)
    assert last_round(world).included == tuple(workers[-3:])


def test_who_names_one_peer_after_the_other_is_put_out_itself() -> None:
    world = training("a", "b", "c", "d", peers=4)
    period(world)
    lost(world, "c", "a")
    assert present(world) == ["b", "c", "d"]
    load(world)
    lost(world, "c", "b")
    assert present(world) == ["b", "d"]
    load(world)
    period(world)
    assert last_round(world).included == ("b", "d")


def test_who_names_the_same_peer_again_is_believed() -> None:
    world = training("a", "b", "c")
    lost(world, "c", "a")
    load(world)
    world.wait(1.0)
    assert present(world) == ["a", "b", "c"], "it joins with the state that the job began with"
    load(world)
    lost(world, "c", "a")
    assert present(world) == ["b", "c"]


def test_an_idle_worker_keeps_the_state_of_the_peer_whose_rank_it_could_take() -> None:
    world = training("a", "b", "c", "d", world=Lending(), checkpoint_every=PERIOD)
    period(world)
    for at, worker in enumerate("abc"):
        own = {name: f"{at}{name[-1]}" * 32 for name in ("w0", "w1")}
        world.says(worker, ev.StateStored(JOB, world.state().version, PERIOD - 1, own))
    assert world.state().checkpoint.step == PERIOD
    world.handle(ev.Tick())
    copies = world.to("d", do.KeepCopies)[-1].copies
    assert len({copy.name for copy in copies}) == 3
    assert [copy.tensors for copy in copies] == [
        {name: f"{at}{name[-1]}" * 32 for name in ("w0", "w1")} for at in range(3)
    ]


def test_a_first_period_outlives_the_coordinator_and_a_peer() -> None:
    """They are in the midst of it, so nothing is committed."""
    world = training("a", "b", "c", local_steps=500, steps=1000)
    version = world.state().version
    world.restart()
    for worker in ("a", "b"):
        back(world, worker, Held(JOB, version, 0))
    while present(world) != ["a", "b"]:
        assert world.state().phase is not Phase.PAUSED
        world.wait(0.5)
    load(world)
    assert (world.state().phase, world.state().version) == (Phase.TRAINING, version + 1)
