"""Who is given the place of a lost peer, or makes a replica more: where more is computed a second with it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from atoll.exchange import PairTable
from atoll.plan import LinkPrediction, Plan, Prediction, StagePrediction
from coordinator.config import Liveness, Probing
from coordinator.membership import member as members
from coordinator.membership.roster import Roster
from coordinator.messages.events import StepReady
from coordinator.messages.jobs import Event, JobState, PlanChange
from coordinator.pipeline import machine
from coordinator.pipeline.changes.choice import Changes
from coordinator.pipeline.changes.seats import another_replica, places, seats
from tests.coordinator.pipeline.changes.test_whole_replicas import planned
from tests.coordinator.pipeline.changes.test_whole_replicas import state as replicated
from tests.coordinator.pipeline.test_periods import DILOCO, SAPS, loaded, lose, ready, training
from tests.sim.worker import introduction

TIMED = {"op1": (0.001, 0.002), "op2": (0.003, 0.004)}


def roster_of(**times: float) -> Roster:
    """Workers that take so many times as long as the others for an op; 0: nobody has timed it. Those that are
    named w hold a place."""
    roster = Roster(Liveness(), Probing())
    for worker, slow in times.items():
        roster.open(worker, 1, introduction(worker), 0.0)
        roster.move(worker, members.Admitted(), 0.0)
        if worker.startswith("w"):
            roster.move(worker, members.AssignedTo("job", 0), 0.0)
        if slow:
            timed = {op: (slow * seconds[0], slow * seconds[1]) for op, seconds in TIMED.items()}
            roster.ops.timings[worker, "fp32"] = timed
    return roster


def two_of_three(*forward_s: float) -> JobState:
    """A job of three peers without the last; the others have computed for so long a step."""
    state, _ = lose(training(DILOCO), 2)
    state = loaded(state)
    for rank in state.present:
        state, _ = machine.step(state, ready(state, rank, forward_s=forward_s[rank]), 9.0)
    return state


def taking(state: JobState, **times: float) -> tuple[str, ...]:
    """Who of the workers, the idle ones among them, are chosen for the places of those that are lost."""
    chosen = seats(state, roster_of(**times))
    return () if chosen is None else tuple(chosen.workers[rank] for rank in sorted(chosen.sources))


@pytest.mark.parametrize(("slow", "who"), [(1.0, ("new",)), (1.4, ("new",)), (1.6, ()), (5.0, ())])
def test_a_peers_place_goes_to_who_lets_more_be_computed_a_second(slow: float, who: tuple[str, ...]) -> None:
    """Two of three micro-batches take a second without it, three as long as it takes."""
    assert taking(two_of_three(1.0, 1.0), w0=1.0, w1=1.0, new=slow) == who


def test_a_slow_machine_is_passed_over_for_one_that_is_not() -> None:
    assert taking(two_of_three(1.0, 1.0), w0=1.0, w1=1.0, slow=5.0, new=1.2) == ("new",)


def test_who_is_waited_for_already_lets_others_be_as_slow() -> None:
    assert taking(two_of_three(1.0, 4.0), w0=1.0, w1=4.0, new=4.0) == ("new",)
    assert taking(two_of_three(4.0, 1.0), w0=4.0, w1=1.0, new=5.0) == ("new",)


def test_a_machine_of_unknown_speed_takes_the_place() -> None:
    assert taking(two_of_three(1.0, 1.0), w0=1.0, w1=1.0, new=0.0) == ("new",)
    assert taking(two_of_three(0.0, 0.0), w0=1.0, w1=1.0, new=5.0) == ("new",), "nor is the others' known"


def test_what_steps_have_shown_of_the_others_is_not_held_against_who_has_not_trained() -> None:
    state, roster = two_of_three(0.5, 0.5), roster_of(w0=1.0, w1=1.0, new=1.0)
    for worker in ("w0", "w1"):
        roster.workers[worker].computing.value, roster.workers[worker].computing.samples = 0.5, 9
    chosen = seats(state, roster)
    assert chosen is not None
    assert chosen.workers[2] == "new"
    roster.workers["new"].computing.samples = 9
    assert seats(state, roster) is None, "its own steps have shown that it is slower"


# ---------------------------------------------------------------- a replica more


def alone(forward_s: float = 4.0) -> JobState:
    """A job of one replica that asks for two, which computes its four blocks for so long."""
    plan = planned(4, stages=1)
    reports = {0: StepReady("job-1", 3, 9, forward_s=forward_s, backward_s=0.0)} if forward_s else {}
    return replicated(plan, step=1, step_times_s=(10.0,) * 5, load_s={0: 0.5}, reports=reports)


def shares(state: JobState, **times: float) -> list[tuple[int, int]] | None:
    chosen = another_replica(state, roster_of(**times))
    return None if chosen is None or chosen.plan is None else [r.micros for r in chosen.plan.replicas]


def test_a_newcomers_replica_has_the_share_that_suits_its_speed() -> None:
    assert shares(alone(), w00=1.0, new=1.0) == [(0, 2), (2, 4)]
    assert shares(alone(), w00=1.0, new=2.0) == [(0, 3), (3, 4)]
    assert shares(alone(), w00=1.0, new=0.0) == [(0, 2), (2, 4)], "of unknown speed"


def test_a_newcomer_with_whom_a_step_takes_longer_makes_no_replica() -> None:
    """One of four blocks takes it 1.25 times as long as the other one takes for all."""
    assert shares(alone(), w00=1.0, new=5.0) is None


# ---------------------------------------------------------------- rates of pairs


@pytest.mark.parametrize("n_bytes", [1000, 0])
def test_who_joins_has_rates_though_no_round_has_shown_any(n_bytes: int) -> None:
    """As after a restart: the table still has none of the peer that was lost."""
    state, _ = lose(training(SAPS), 1)
    state = loaded(state)
    assert state.plan is not None
    assert state.plan.exchange is not None
    without = np.array(SAPS.pairs.rates).reshape(3, 3)  # type: ignore[union-attr]
    without[1] = without[:, 1] = 0.0
    exchange = replace(state.plan.exchange, pairs=PairTable(tuple(without.reshape(-1).tolist()), 4e6))
    plan = replace(state.plan, exchange=exchange, prediction=foretold(state.plan, n_bytes))
    found = list[Event]()
    roster = roster_of(w0=1.0, w2=1.0, new=1.0)
    effects = cast("Any", SimpleNamespace(roster=roster, now_s=0.0, storage=""))
    changes = Changes(
        effects,
        lambda job, event: found.append(event),
        lambda: None,
        lambda state: places(state, roster),
        (),
    )
    changes.look(replace(state, plan=plan))
    (event,) = found
    assert isinstance(event, PlanChange)
    assert event.plan is not None
    assert event.workers == ("w0", "new", "w2")
    if n_bytes:
        assert event.plan.exchange is not None
        assert event.plan.exchange.pairs is not None
        assert np.count_nonzero(event.plan.exchange.pairs.rates) == 6
    else:
        assert event.plan.exchange == exchange, "nobody knows what a round sends"


def foretold(plan: Plan, n_bytes: int) -> Prediction:
    workers = [place.worker for place in plan.places]
    links = tuple(LinkPrediction(a, b, n_bytes, 0.1) for a in workers for b in workers if a != b)
    stages = tuple(StagePrediction(worker, 1.0, 1.0, 100, 1000) for worker in workers)
    return Prediction(1.0, 1.0, "", "", stages, links)
