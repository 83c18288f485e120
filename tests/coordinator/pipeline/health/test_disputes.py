"""Who is taken out where peers have different results of a round: an owner that gives one peer another total,
or a peer that says so, costs at most one other its place."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.jobs import Phase
from coordinator.pipeline.periods import round_groups
from strategies.exchanges.partners import group_of
from tests.coordinator.pipeline.test_peers import load, present, report, training
from tests.sim import local_steps
from tests.sim.scripted import Scripted

if TYPE_CHECKING:
    from atoll.plan import Plan

FIVE = ("a", "b", "c", "d", "e")


def receipt(world: Scripted, worker: str, digest: str = "d", **otherwise: str) -> ev.RoundReceipt:
    """What a peer says of a round in which all own a part; ``otherwise``: the totals of these owners."""
    state = world.state()
    assert state.plan is not None
    group = group_of(rank_of(world, worker), round_groups(state))
    totals = {rank: f"total {rank}" for rank in group}
    totals |= {rank_of(world, owner): total for owner, total in otherwise.items()}
    return replace(local_steps.receipt(state.plan, group, state.due, digest), totals=totals)


def rank_of(world: Scripted, worker: str) -> int:
    rank = world.state().rank_of(worker)
    assert rank is not None
    return rank


def all_report(world: Scripted, **others: ev.RoundReceipt) -> None:
    """Have all report a period; ``others`` with receipts of their own."""
    for worker in present(world):
        report(world, worker, receipts=(others.get(worker) or receipt(world, worker),))


def agreed(world: Scripted) -> None:
    load(world)
    done = world.state().step
    all_report(world)
    assert world.state().step == done + 4


def gives_otherwise(world: Scripted, owner: str, *to: str) -> None:
    """Have an owner give others another total than the rest."""
    all_report(world, **{worker: receipt(world, worker, "odd", **{owner: "another"}) for worker in to})


def test_an_owner_that_gives_one_after_the_other_another_total_is_taken_out() -> None:
    world = training(*FIVE, peers=5)
    gives_otherwise(world, "a", "c")
    assert present(world) == ["a", "b", "d", "e"], "one of two, and it may have made it up"
    agreed(world)
    gives_otherwise(world, "a", "d")
    assert present(world) == ["b", "d", "e"]
    agreed(world)


def test_a_peer_that_accuses_one_owner_after_the_other_is_taken_out_itself() -> None:
    world = training(*FIVE, peers=5)
    gives_otherwise(world, "a", "c")
    load(world)
    world.wait(1.0)
    assert present(world) == list(FIVE), "it joins with the state that the job began with"
    load(world)
    gives_otherwise(world, "b", "c")
    assert present(world) == ["a", "b", "d", "e"]


@pytest.mark.parametrize("odd", [("b", "c"), ("a", "d"), ("b", "c", "d")])
def test_an_owner_that_several_accuse_is_taken_out_at_once(odd: tuple[str, ...]) -> None:
    world = training(*FIVE, peers=5)
    gives_otherwise(world, "a", *odd)
    assert present(world) == ["b", "c", "d", "e"]


def test_two_that_accuse_one_owner_after_the_other_are_taken_out() -> None:
    world = training(*FIVE, peers=5)
    gives_otherwise(world, "a", "b", "c")
    agreed(world)
    gives_otherwise(world, "d", "b", "c")
    assert present(world) == ["d", "e"]


def test_an_owner_that_halves_the_peers_is_taken_out() -> None:
    world = training(*FIVE[:4], peers=4)
    gives_otherwise(world, "a", "c", "d")
    assert present(world) == ["b", "c", "d"]


@pytest.mark.parametrize("otherwise", [{}, {"a": "another", "b": "another"}, {"c": "another"}])
def test_who_accuses_nobody_several_or_itself_is_taken_out(otherwise: dict[str, str]) -> None:
    world = training(*FIVE, peers=5)
    all_report(world, c=receipt(world, "c", "odd", **otherwise))
    assert present(world) == ["a", "b", "d", "e"]
    load(world)
    gives_otherwise(world, "a", "d")
    assert present(world) == ["a", "b", "e"], "nobody had accused a"


def partner(world: Scripted, worker: str) -> str:
    """Return whom a peer meets in the round in flight, itself where it is alone."""
    own = rank_of(world, worker)
    group = group_of(own, round_groups(world.state()))
    return world.holders()[next((rank for rank in group if rank != own), own)]


def met(world: Scripted, **digests: str) -> None:
    """Have all report a period of gossip."""
    for worker in present(world):
        group = group_of(rank_of(world, worker), round_groups(world.state()))
        report(world, worker, digests.get(worker, f"d{group}"))


def test_a_peer_that_agrees_with_none_it_meets_ends_no_gossip() -> None:
    world = training(*FIVE, "f", peers=6, exchange="saps", steps=400)
    first = partner(world, "a")
    met(world, a="made up")
    assert sorted({*FIVE, "f"} - set(present(world))) == sorted(["a", first]), "one of the two"
    load(world)
    world.wait(1.0)
    load(world)
    while partner(world, "a") in (first, "a"):
        met(world)
    met(world, a="made up")
    assert sorted({*FIVE, "f"} - set(present(world))) == ["a"]
    load(world)
    done = world.state().step
    met(world)
    assert world.state().step > done


def test_who_was_in_a_dispute_is_known_when_two_are_left() -> None:
    world = training("a", "b", "c", exchange="saps", steps=400)
    while partner(world, "a") == "a":
        met(world)
    first = partner(world, "a")
    met(world, a="made up")
    (other,) = present(world)
    assert other not in ("a", first)
    world.lose(first)
    load(world)
    world.wait(1.0)
    load(world)
    assert "a" in present(world)
    met(world, a="made up")
    assert present(world) == [other]


def test_an_owner_that_is_nobody_is_not_looked_for() -> None:
    world = training(*FIVE[:4], peers=4)
    known = receipt(world, "a")
    said = {w: replace(known, digest=w, totals={99: w}) for w in FIVE[:2]}
    all_report(world, **said)
    assert world.state().broken == 1


def test_of_two_peers_alone_nobody_is_named() -> None:
    world = training("a", "b", peers=2)
    gives_otherwise(world, "a", "b")
    assert world.state().broken == 1


JUNK = {"b": "junk"}


@pytest.mark.parametrize("said", [{"a": "another", **JUNK}, JUNK, {"d": "junk", **JUNK}])
@pytest.mark.parametrize("victims", ["c", "bd"])
def test_totals_that_do_not_make_the_result_beside_them_cost_their_own_peer_its_place(
    victims: str, said: dict[str, str]
) -> None:
    world = training(*FIVE, peers=5)
    given = {worker: receipt(world, worker, "odd", a="another") for worker in victims}
    all_report(world, a=receipt(world, "a", **said), **given)
    assert present(world) == ["b", "c", "d", "e"]
    agreed(world)


def test_of_two_with_one_result_of_other_totals_both_go_where_others_differ() -> None:
    world = training(*FIVE[:4], peers=4)
    given = {worker: receipt(world, worker, "odd", a="another") for worker in "cd"}
    all_report(world, a=receipt(world, "a", **JUNK), **given)
    assert present(world) == ["c", "d"]
    agreed(world)


def test_who_leaves_its_totals_out_is_a_suspect_as_well() -> None:
    world = training(*FIVE, peers=5)
    for victim in "cd":
        silent = replace(receipt(world, "a"), totals={})
        all_report(world, a=silent, **{victim: receipt(world, victim, "odd", a="another")})
        if victim == "c":
            assert present(world) == ["a", "b", "d", "e"]
            agreed(world)
    assert present(world) == ["b", "d", "e"]


@pytest.mark.parametrize("owned", ["none", "own", "some"])
def test_receipts_of_one_result_that_lack_totals_are_no_dispute(owned: str) -> None:
    """Peers of older versions have none; where all add for themselves each has that of its own rank."""
    world = training(*FIVE, peers=5)
    kept = {"none": (), "own": ("c",), "some": ("a", "d")}[owned]
    whole = receipt(world, "c").totals
    some = {rank_of(world, worker): whole[rank_of(world, worker)] for worker in kept}
    all_report(world, c=replace(receipt(world, "c"), totals=some))
    assert world.state().step == 4
    assert present(world) == list(FIVE)


def test_who_adds_for_itself_is_not_compared_with_others() -> None:
    world = training(*FIVE, peers=5)
    own = {w: replace(receipt(world, w), totals={rank_of(world, w): f"from {w}"}) for w in FIVE}
    all_report(world, **own)
    assert world.state().step == 4
    all_report(world, **{w: replace(own[w], round=1, digest="odd" if w == "c" else "d") for w in FIVE})
    assert present(world) == ["a", "b", "d", "e"]


def replicated(*workers: str, replicas: int = 3, **changes: Any) -> Scripted:
    """Replicas of a stage train on the first workers, the others are idle."""

    def altered(plan: Plan, asked: do.MakePlan) -> Plan:
        whole = plan.replicas[0].stages[0]
        return replace(
            plan,
            replicas=tuple(
                replace(replica, stages=(replace(whole, worker=replica.stages[0].worker),), links=())
                for replica in plan.replicas
            ),
        )

    world = Scripted(altered=altered)
    return training(*workers, peers=replicas, world=world, exchange="exact", local_steps=0, **changes)


def stepped(world: Scripted, odd: str = "") -> None:
    """Have all replicas report a step; ``odd``: whose norms are others."""
    state, holders = world.state(), world.holders()
    for worker, replica in zip(holders, state.plan.replicas if state.plan else (), strict=True):
        losses = (1.0,) * (replica.micros[1] - replica.micros[0]) if len(holders) > 1 else ()
        norms = (1.0 + 1e-9 * (worker == odd),)
        world.ready(worker, losses=losses or (1.0,), square_norms=norms)


def test_a_replica_with_other_gradients_costs_no_step_that_is_committed() -> None:
    world = replicated("a", "b", "c")
    stepped(world)
    stepped(world, odd="b")
    assert (world.state().step, world.state().phase) == (1, Phase.LOADING), "the step in dispute is not"
    assert world.holders() == ["a", "c"]
    assert world.state().plan.replicas[-1].micros[1] == 3  # type: ignore[union-attr]
    load(world)
    stepped(world)
    assert (world.state().step, world.state().broken) == (2, 0)


def test_an_idle_worker_takes_over_from_a_replica_with_other_gradients() -> None:
    world = replicated("a", "b", "c", "d")
    stepped(world)
    stepped(world, odd="b")
    assert (world.state().step, world.holders()) == (1, ["a", "d", "c"])
    assert world.to("d", do.Assign)[-1].replay.first_step == 0
    load(world)
    stepped(world)
    assert world.state().step == 2


def test_a_replica_that_differs_at_every_other_step_ends_no_job() -> None:
    world = replicated("a", "b", "c", steps=12)
    for _ in range(30):
        if world.state().phase is Phase.LOADING:
            load(world)
        if world.state().phase is Phase.TRAINING:
            before = world.state().step
            stepped(world, odd="b" if before % 2 and "b" in world.holders() else "")
            assert world.state().step in (before, before + 1), "nothing is taken back"
        world.wait(1.0)
    assert world.state().step == 12


def test_of_two_replicas_that_differ_nobody_is_named() -> None:
    world = replicated("a", "b", replicas=2)
    stepped(world)
    stepped(world, odd="b")
    assert (world.state().step, world.state().broken) == (0, 1)
