"""Rates of gossip's pairs while a job runs: drawn anew when many have moved, and when somebody joins."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from coordinator.client.fleet_file import parse_fleet
from coordinator.messages.facts import Reconfigured
from coordinator.messages.jobs import JobState, PlanChange
from coordinator.pipeline import machine
from coordinator.pipeline.tuning.rounds import LOOK_S, Rounds, newer_table
from coordinator.planning.costs.fleet import Fleet
from tests.coordinator.pipeline.test_periods import DILOCO, SAPS, facts, loaded, lose, period, training

SLOW = {frozenset({0, 2}), frozenset({1, 2})}
"""Pairs that are slow in ``SAPS``'s table."""


@dataclass
class Links:
    """A roster that knows links, and the clock beside it."""

    slow: set[frozenset[int]]
    now_s: float = 0.0
    asked: list[list[str]] = field(default_factory=list)

    @property
    def roster(self) -> Links:
        return self

    def fleet(self, workers: list[str], precision: str) -> Fleet:
        self.asked.append(workers)
        device: list[dict[str, Any]] = [{"name": w, "memory_mib": 1000, "gflops": 1} for w in workers]
        fleet = parse_fleet({"default": {"mbit": 64, "ms": 1}, "device": device})
        bps = np.array(fleet.bandwidth_bps)
        for a, one in enumerate(workers):
            for b, other in enumerate(workers):
                if frozenset({int(one[1:]), int(other[1:])}) in self.slow:
                    bps[a, b] = 8e6
        return replace(fleet, bandwidth_bps=bps)


def looked(links: Links, state: JobState, *times_s: float) -> list[PlanChange]:
    found: list[PlanChange] = []
    rounds = Rounds(links)  # type: ignore[arg-type]
    for links.now_s in times_s:
        found += rounds.candidates(state)
    return found


def test_pairs_are_drawn_anew_when_many_are_faster_or_slower_than_they_were() -> None:
    state, _ = period(training(SAPS))
    assert looked(Links(SLOW), state, 0.0, LOOK_S, 2 * LOOK_S) == []
    moved_links = Links({frozenset({0, 1}), frozenset({0, 2})})
    (event,) = looked(moved_links, state, 0.0, 1.0, LOOK_S)
    assert event.plan is not None
    assert "67% of the pairs" in event.reason
    moved, todo = machine.step(state, event, 9.0)
    (fact,) = facts(todo, Reconfigured)
    assert moved.plan is not None
    assert moved.plan.exchange is not None
    assert fact.exchange == moved.plan.exchange != SAPS
    moved, _ = period(loaded(moved))
    assert moved.step == state.step + 1


def test_nothing_is_looked_up_where_pairs_are_not_drawn_by_rates_or_before_a_round() -> None:
    links = Links(set())
    state, _ = period(training(DILOCO))
    assert looked(links, state, 0.0, LOOK_S) == looked(links, training(SAPS), 0.0, LOOK_S) == []
    assert links.asked == []


def test_who_is_lost_is_in_no_table_and_who_joins_is() -> None:
    state, _ = lose(training(SAPS), 1)
    state, _ = period(loaded(state))
    links = Links(set())
    lonely = newer_table(state, links, ("w0", "w1", "w2"), state.present)  # type: ignore[arg-type]
    joined = newer_table(state, links, ("w0", "w9", "w2"), (0, 1, 2))  # type: ignore[arg-type]
    assert links.asked == [["w0", "w2"], ["w0", "w9", "w2"]]
    assert lonely is not None
    assert joined is not None
    assert np.count_nonzero(lonely.rates) == 2
    assert np.count_nonzero(joined.rates) == 6
