"""Periods of local steps: one commit a period, by whoever is there; a lost peer costs the others nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from atoll.dataset_spec import DataSpec
from atoll.exchange import Exchange, PairTable
from atoll.job import JobSpec, TrainingSpec
from atoll.microbatch import ScheduleName
from atoll.plan import Plan, Replica, StageSpec
from coordinator.messages import jobs, peer_tensors
from coordinator.messages.events import EvalReady, Loaded, RoundReceipt, StateStored, StepReady
from coordinator.messages.facts import Checkpoint, CheckpointStored, Reconfigured, RoundMet, StepCommitted
from coordinator.messages.instructions import StepCommit, StepStart
from coordinator.messages.jobs import (
    Cause,
    Exclude,
    FromRank,
    JobState,
    Phase,
    Placed,
    Point,
    Record,
    Seating,
    ToRanks,
    anew,
    moved,
)
from coordinator.pipeline import machine
from coordinator.pipeline.assigning import tensors_of
from coordinator.pipeline.health.deadlines import deadlines
from coordinator.pipeline.health.doubt import left_out
from coordinator.pipeline.periods import disagreement, exchange_words, odd_ones, round_groups
from strategies.exchanges.partners import group_of

HASH = "ab" * 32
PEERS = 3
DILOCO = Exchange("diloco", every=4)


def plan(exchange: Exchange, version: int = 1) -> Plan:
    replicas = tuple(Replica((i, i + 1), (StageSpec(0, 4, 0, 4, f"w{i}", 0),)) for i in range(PEERS))
    return Plan(
        "j", version, HASH, HASH, "op_fence", ScheduleName.ONE_F_ONE_B, PEERS, replicas, exchange=exchange
    )


def training(exchange: Exchange = DILOCO, **changes: Any) -> JobState:
    spec = TrainingSpec(**{"steps": 10, "n_micro": PEERS, "exchange": "diloco", "local_steps": 4, **changes})
    data = DataSpec((), 8, 1)
    state = JobState(
        "j", JobSpec("job", spec, HASH, HASH, {"p": HASH}, data, None), Checkpoint(0, {"p": HASH}), 0.0
    )
    for event in (jobs.Picked("go"), jobs.Profiled(), jobs.Planned(plan(exchange))):
        state, _ = machine.step(state, event, 1.0)
    return loaded(state)


def loaded(state: JobState) -> JobState:
    todo: list[jobs.Todo] = []
    for rank in state.present:
        state, todo = machine.step(state, FromRank(rank, Loaded("j", state.run.assigned)), 1.0)
    assert state.phase is Phase.TRAINING
    assert [t.message for t in todo if isinstance(t, ToRanks)] == [StepStart("j", state.version, state.due)]
    return state


def ready(state: JobState, rank: int, **changes: Any) -> FromRank[StepReady]:
    group = group_of(rank, round_groups(state))
    number = state.plan.exchange.round_of(state.due)  # type: ignore[union-attr]
    receipt = RoundReceipt(
        number, group, 1.0, 10, 10, "d1" if len(group) == len(state.present) else f"d{group}"
    )
    losses = tuple(float(rank) for _ in range(state.due + 1 - state.step))
    report = StepReady("j", state.version, state.due, losses=losses, receipts=(receipt,) if receipt else ())
    return FromRank(rank, replace(report, **changes))


def period(state: JobState, now_s: float = 9.0) -> tuple[JobState, list[jobs.Todo]]:
    todo: list[jobs.Todo] = []
    for rank in state.present:
        state, todo = machine.step(state, ready(state, rank), now_s)
    return state, todo


def facts(todo: list[jobs.Todo], kind: type) -> list[Any]:
    return [t.fact for t in todo if isinstance(t, Record) and isinstance(t.fact, kind)]


def test_a_period_is_committed_once_and_shows_each_of_its_steps() -> None:
    state, todo = period(training())
    assert state.step == 4
    (commit,) = [t.message for t in todo if isinstance(t, ToRanks)]
    assert isinstance(commit, StepCommit)
    assert (commit.step, commit.gradient_scale, commit.last) == (
        3,
        1.0,
        False,
    )
    assert [(p.step, p.value) for p in todo if isinstance(p, Point) and p.name == "loss"] == [
        (step, 1.0) for step in (1, 2, 3, 4)
    ]
    assert [fact.step for fact in facts(todo, StepCommitted)] == [3]
    (met,) = facts(todo, RoundMet)
    assert met.included == ("w0", "w1", "w2")
    assert met.missing == {}
    assert met.sent_bytes == 30


def test_it_is_shown_who_exchanges_with_whom_and_who_is_missing_since_when() -> None:
    state, todo = period(training())
    (met,) = facts(todo, RoundMet)
    assert exchange_words(state, met, str) == (
        "diloco every 4 steps, among w0, w1, w2; round 0 after 4 steps: 3 of 3"
    )
    state, _ = lose(state, 1)
    assert exchange_words(state, None, str) == "diloco every 4 steps, among w0, w2; without w1: w1 is lost"


def test_the_last_period_ends_with_the_last_step() -> None:
    state, _ = period(training())
    state, _ = period(state)
    assert (state.step, state.due) == (8, 9)
    state, todo = period(state)
    assert state.step == 10
    assert facts(todo, StepCommitted)[0].last


def lose(state: JobState, rank: int) -> tuple[JobState, list[jobs.Todo]]:
    workers = tuple(place.worker for place in state.plan.places)  # type: ignore[union-attr]
    words, absent = f"w{rank} is lost", frozenset({rank})
    return machine.step(state, moved(state, workers, (), Cause.LOST, words, absent=absent), 2.0)


def test_the_others_go_on_without_a_lost_peer_and_the_receipt_names_it() -> None:
    state = training()
    state, _ = machine.step(state, ready(state, 0), 1.5)
    state, todo = lose(state, 1)
    (placed,) = [t for t in todo if isinstance(t, Placed)]
    assert placed.left == ("w1",)
    assert facts(todo, Reconfigured)[0].newcomers == ()
    assert state.present == (0, 2)
    assert state.step == 0
    assert state.rank_of("w1") is None
    state = loaded(state)
    state, todo = period(state)
    assert state.step == 4
    (met,) = facts(todo, RoundMet)
    assert met.included == ("w0", "w2")
    assert met.missing == {"w1": "w1 is lost"}
    assert [p.value for p in todo if isinstance(p, Point) and p.name == "loss"] == [1.0] * 4


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (RoundReceipt(0, (0, 1, 2), 1.0, 1, 1, "d2"), "different results"),
        (RoundReceipt(0, (0, 2), 1.0, 1, 1, "d1"), "expected are those"),
        (RoundReceipt(0, (0, 1, 2), 0.5, 1, 1, "d1"), "50% of what is exchanged"),
        (None, "without a receipt"),
    ],
)
def test_peers_that_do_not_agree_commit_nothing(wrong: RoundReceipt | None, words: str) -> None:
    state = training()
    state, _ = machine.step(state, ready(state, 0), 1.0)
    state, _ = machine.step(state, ready(state, 1), 1.0)
    state, todo = machine.step(state, ready(state, 2, receipts=(wrong,) if wrong else ()), 1.0)
    (excluded,) = todo
    assert isinstance(excluded, Exclude)
    assert excluded.ranks == (2,)
    assert words in excluded.reason


def test_a_replica_alone_with_its_gradients_has_no_part_in_the_plan_after_the_next() -> None:
    state = training(Exchange(), blocks=PEERS, replicas=str(PEERS))

    def reported(state: JobState, odd: float) -> tuple[JobState, list[jobs.Todo]]:
        todo: list[jobs.Todo] = []
        for rank in (0, 2, 1):
            norms = (odd if rank == 1 else 1.0,)
            report = StepReady("j", state.version, state.due, losses=(1.0,), square_norms=norms)
            state, todo = machine.step(state, FromRank(rank, report), 1.0)
        return state, todo

    for version in (1, 2):
        state, (excluded,) = reported(state, 2.0)
        assert isinstance(excluded, Exclude)
        assert excluded.ranks == (1,)
        state, _ = machine.step(state, anew(state, "nobody can go on without it", Cause.BROKEN), 1.0)
        assert state.phase is Phase.PAUSED
        assert state.failed == ("w1",) * version
        for event in (jobs.Picked("go"), jobs.Profiled(), jobs.Planned(plan(Exchange(), version + 1))):
            state, _ = machine.step(state, event, 1.0)
        state = loaded(state)
    assert ("w1",) in left_out(state)
    assert reported(state, 1.0)[0].failed == ()


def test_of_two_with_other_results_nobody_is_named() -> None:
    assert odd_ones({0: "a", 1: "b"}) == []
    assert odd_ones({0: "a", 1: "b", 2: "a", 3: "b"}) == []
    assert odd_ones({0: "a", 1: "b", 2: "a", 3: "a"}) == [1]


def test_peers_have_as_long_as_their_period_takes() -> None:
    exact = replace(training(local_steps=1), plan=replace(plan(DILOCO), exchange=None))
    exact, state = (replace(s, run=replace(s.run, step_times_s=(9.0, 9.0))) for s in (exact, training()))
    assert deadlines(state).silent_s == 4 * deadlines(exact).silent_s == 4 * 90.0
    assert deadlines(state).still_s == deadlines(exact).still_s == 27.0


def stored(state: JobState, rank: int, done: int) -> FromRank[StateStored]:
    return FromRank(rank, StateStored("j", state.version, done - 1, {"p": f"{rank}" * 64}))


def test_every_peer_stores_a_state_of_its_own() -> None:
    state, _ = period(training(checkpoint_every=4))
    todo: list[jobs.Todo] = []
    for rank in state.present:
        state, todo = machine.step(state, stored(state, rank, 4), 9.0)
    (fact,) = facts(todo, CheckpointStored)
    assert fact.tensors == {"p": "0" * 64, "p@1": "1" * 64, "p@2": "2" * 64}
    assert peer_tensors.own(fact.tensors, 1) == {"p": "1" * 64}
    assert peer_tensors.own(fact.tensors, 7) == peer_tensors.model(fact.tensors) == {"p": "0" * 64}


def test_a_checkpoint_without_a_peer_keeps_nothing_of_its_old_state() -> None:
    before = {"p": "a" * 64, "p@1": "b" * 64, "constant": "c" * 64}
    assert peer_tensors.merged(before, {2: {"p": "2" * 64}, 3: {"p": "3" * 64}}, lambda rank: rank) == {
        "p": "2" * 64, "p@3": "3" * 64, "constant": "c" * 64,
    }  # fmt: skip


NAMED_LIKE_PEERS = ("up@2x.weight", "scale@2", "a@b", "@1", "w")


def test_a_models_own_names_are_no_peers() -> None:
    before = dict.fromkeys(NAMED_LIKE_PEERS, HASH)
    alone = replace(plan(DILOCO), replicas=plan(DILOCO).replicas[:1], exchange=None)
    assert tensors_of(alone, 0, Checkpoint(0, before)) == before
    parts = {rank: dict.fromkeys(NAMED_LIKE_PEERS, f"{rank}" * 64) for rank in range(PEERS)}
    whole = peer_tensors.merged(before, parts, lambda rank: rank)
    assert peer_tensors.merged(whole, parts, lambda rank: rank) == whole
    assert len(whole) == PEERS * len(NAMED_LIKE_PEERS)
    for rank in range(PEERS):
        assert tensors_of(plan(DILOCO), rank, Checkpoint(4, whole)) == parts[rank]
    assert peer_tensors.model(whole) == parts[0]


def test_a_peer_joins_with_the_state_that_a_period_began_with() -> None:
    state, _ = lose(training(), 1)
    state, _ = period(loaded(state))
    state, _ = machine.step(state, Seating(True), 3.0)
    state, todo = period(state)
    (commit,) = [t.message for t in todo if isinstance(t, ToRanks)]
    assert isinstance(commit, StepCommit)
    assert commit.store
    assert state.step == 8
    state, todo = period(state)  # has to wait: the newcomer would begin with an older state
    assert state.step == 8
    assert not facts(todo, StepCommitted)
    for rank in state.present:
        state, _ = machine.step(state, stored(state, rank, 8), 9.0)
    assert state.checkpoint.step == 8
    joins = moved(state, ("w0", "w9", "w2"), {1}, Cause.CHOSEN, "w9 joins", absent=frozenset())
    state, _ = machine.step(state, joins, 9.0)
    assert state.present == (0, 1, 2)
    assert state.run.lost == {}
    state, todo = period(loaded(state))
    assert facts(todo, RoundMet)[0].included == ("w0", "w9", "w2")


def test_a_period_that_waited_is_committed_when_nobody_joins_after_all() -> None:
    state, _ = lose(training(), 1)
    state = loaded(state)
    state, _ = machine.step(state, Seating(True), 3.0)
    state, _ = period(state)
    state, _ = period(state)
    assert state.step == 4
    state, todo = machine.step(state, Seating(False), 4.0)
    assert state.step == 8
    assert facts(todo, StepCommitted)


RATES = (0.0, 8e6, 1e6, 8e6, 0.0, 1e6, 1e6, 1e6, 0.0)
SAPS = Exchange("saps", ratio=10.0, pairs=PairTable(RATES, 4e6))


def test_a_period_of_gossip_is_committed_when_each_group_agrees() -> None:
    state = training(SAPS)
    groups = round_groups(state)
    assert sorted(map(len, groups)) == [1, 2]
    state, todo = period(state)
    assert state.step == 1
    (met,) = facts(todo, RoundMet)
    assert met.included == ("w0", "w1", "w2")
    assert met.groups == groups


def test_peers_of_a_pair_that_do_not_agree_commit_nothing() -> None:
    state = training(SAPS)
    pair = next(group for group in round_groups(state) if len(group) == 2)
    for rank in state.present:
        wrong = {"receipts": (RoundReceipt(0, pair, 1.0, 1, 1, "other"),)} if rank == pair[1] else {}
        state, todo = machine.step(state, ready(state, rank, **wrong), 1.0)
    (excluded,) = todo
    assert isinstance(excluded, Exclude)
    assert excluded.ranks == pair, "one of the two, and the third goes on"
    assert "different results" in excluded.reason


def test_a_sum_of_others_than_its_partner_is_refused() -> None:
    state = training(SAPS)
    for rank in state.present:
        receipt = RoundReceipt(0, state.present, 1.0, 1, 1, "d1")
        state, _ = machine.step(state, ready(state, rank, receipts=(receipt,)), 1.0)
    assert state.phase is Phase.PAUSED, "where most are wrong nobody is to blame"
    assert "expected are those of" in state.reason


def test_who_is_left_of_a_lost_pair_is_paired_anew_and_the_receipt_names_the_lost() -> None:
    state, _ = lose(training(SAPS), 1)
    state = loaded(state)
    assert round_groups(state) == ((0, 2),)
    state, todo = period(state)
    (met,) = facts(todo, RoundMet)
    assert met.missing == {"w1": "w1 is lost"}
    assert met.groups == ()  # all with all


def test_it_is_shown_who_exchanges_with_whom_next_and_why() -> None:
    shown = {exchange_words(at, None, str) for at in rounds_of(SAPS, 6)}
    by_rate = "saps every step, in pairs by bandwidth; next, round "
    assert all(words.startswith(by_rate) for words in shown)
    assert any("w0 and w1 (64 Mbit/s), w2 alone" in words for words in shown)
    assert any("(8 Mbit/s, to connect the others)" in words for words in shown)
    swarm = exchange_words(training(Exchange("swarm", every=5)), None, str)
    assert swarm.startswith("swarm every 5 steps, in random pairs; next, round 0: ")
    last = exchange_words(rounds_of(SAPS, 10)[9], None, str)
    assert last == "saps every step, all at the end; next, round 9: w0 and w1 and w2"


def rounds_of(exchange: Exchange, count: int) -> list[JobState]:
    """States before each of the first rounds."""
    state, found = training(exchange), []
    for _ in range(count):
        found.append(state)
        state, _ = period(state)
    return found


@pytest.mark.parametrize("exchange", [SAPS, DILOCO])
def test_the_first_peers_evaluation_is_the_jobs(exchange: Exchange) -> None:
    state = evaluating(exchange)
    for rank, loss in ((2, 0.5), (0, 0.25), (1, 0.75)):
        state, _ = machine.step(
            state, FromRank(rank, EvalReady("j", state.version, state.step - 1, loss)), 9.0
        )
    assert state.eval_loss == 0.25
    assert state.phase is Phase.TRAINING


def test_the_evaluation_is_of_the_first_peer_that_is_there() -> None:
    state = evaluating(SAPS)
    assert state.plan is not None
    state = replace(state, plan=replace(state.plan, absent=frozenset({0})))
    for rank, loss in ((2, 0.5), (1, 0.75)):
        state, _ = machine.step(
            state, FromRank(rank, EvalReady("j", state.version, state.step - 1, loss)), 9.0
        )
    assert state.eval_loss == 0.75


def evaluating(exchange: Exchange) -> JobState:
    """After the first period, whose commit asked for an evaluation."""
    state = training(exchange, eval_every=1, eval_batches=1)
    state = replace(state, spec=replace(state.spec, eval_data=state.spec.data))
    state, _ = period(state)
    assert state.phase is Phase.EVALUATING
    return state


# ---------------------------------------------------------------- sites


def sited(*digests: str) -> tuple[Plan, dict[int, StepReady]]:
    """Five peers, of which the first three are at one site, and what each says of a round."""
    replicas = tuple(Replica((i, i + 1), (StageSpec(0, 4, 0, 4, f"w{i}", 0),)) for i in range(5))
    exchange = replace(DILOCO, inner=Exchange(), sites=(0, 0, 0, 1, 1))
    made = replace(plan(DILOCO), n_micro=5, replicas=replicas, exchange=exchange)
    said = {
        rank: StepReady(
            "j",
            1,
            3,
            (0.0,) * 4,
            receipts=(RoundReceipt(0, (0, 1, 2, 3, 4), 1.0, 1, 1, digest, {3: digest}),),
        )
        for rank, digest in enumerate(digests)
    }
    return made, said


def test_a_gateway_that_tells_its_site_otherwise_is_no_fault_of_an_owner_elsewhere() -> None:
    """The odd one of its site goes; the others of it are suspects, as one of them may have misled it."""
    steps = (4,) * 5
    made, said = sited("a", "a", "a", "a", "a")
    groups = ((0, 1, 2, 3, 4),)
    assert disagreement(made, said, groups, steps) is None
    made, said = sited("a", "b", "b", "a", "a")
    found = disagreement(made, said, groups, steps)
    assert found is not None
    assert (found.ranks, found.suspects) == ((0,), (0, 1, 2))
    made, said = sited("a", "a", "a", "b", "a")
    found = disagreement(made, said, groups, steps)
    assert found is not None
    assert (found.ranks, found.suspects) == ((3, 4), (3, 4)), "of two either may be"


def test_a_site_that_differs_from_the_others_blames_the_owner_of_the_total() -> None:
    made, said = sited("a", "a", "a", "b", "b")
    found = disagreement(made, said, ((0, 1, 2, 3, 4),), (4,) * 5)
    assert found is not None
    assert found.ranks == (3,)
    assert set(found.suspects) == {3, 4}
