"""What was promised, judged by the journal, the log and what was done to the fleet. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from atoll.exchange import Exchange
from coordinator.messages.facts import Fact, PlanAdopted, Reconfigured, StepCommitted
from experiments.chaos.kinds import COORDINATOR, Deed, Kind
from protos.telemetry import Event

NOTICED_S: Mapping[Kind, float] = {Kind.KILL: 1.0, Kind.FREEZE: 3.0, Kind.HANG: 5.0}
"""Seconds within which the coordinator notices, by what happened to a worker that holds a stage; medians."""
NOTICED_STEPS = 3.0  # a hung computation may take as many steps, where they are longer
LOOKED_FOR_S = 30.0
SHOWN = 5
PAST = {Kind.KILL: "killed", Kind.FREEZE: "frozen", Kind.HANG: "hung"}


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the coordinator's log."""

    at_s: float
    event: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Trained:
    """A job that was disturbed. ``tensors``: by name the hash of its bytes, optimizer state included."""

    job: str
    state: str
    reason: str
    steps: int
    facts: Sequence[Fact]
    tensors: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Promise:
    """A verdict; ``held`` None: nothing happened that could show it."""

    name: str
    held: bool | None
    words: str
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seen:
    """All that is known of a run. ``undisturbed``: tensors of the same job with nobody disturbed, ``step_s``
    the median step there; ``left``: processes that outlived the daemon they belong to; ``died``: daemons that
    ended though nobody had killed them; ``journal``: whether the coordinator's could be read."""

    undisturbed: Mapping[str, str]
    step_s: float
    trained: Sequence[Trained]
    deeds: Sequence[Deed]
    lines: Sequence[Line]
    left: Sequence[str] = ()
    died: Sequence[str] = ()
    journal: bool = True


def judged(seen: Seen) -> list[Promise]:
    """Return the verdicts, the most important first."""
    found = [_finished(seen), _same(seen), _once(seen), _kept(seen)]
    found += [_noticed(seen, kind) for kind in NOTICED_S]
    return [
        *found,
        _none("no process outlives its daemon", seen.left),
        _none("no daemon ends by itself", seen.died),
    ]


def commits(facts: Iterable[Fact]) -> list[int]:
    """Return the steps committed, in the journal's order."""
    return [fact.step for fact in facts if isinstance(fact, StepCommitted)]


def committed(facts: Iterable[Fact]) -> Counter[int]:
    """Return how often each step was committed: with the commit of a period, each of its local steps."""
    counts, exchange, last = Counter[int](), Exchange(), -1
    for fact in facts:
        if isinstance(fact, PlanAdopted | Reconfigured) and fact.plan is not None:
            exchange = fact.plan.exchange or Exchange()
        elif isinstance(fact, StepCommitted):
            first = exchange.first_step(fact.step)
            counts.update(range(max(first, last + 1) if fact.step > last else first, fact.step + 1))
            last = fact.step
    return counts


def _finished(seen: Seen) -> Promise:
    wrong = [f"{t.job} {t.state}: {t.reason}" for t in seen.trained if t.state != "finished"]
    words = "; ".join(wrong[:SHOWN]) or f"{len(seen.trained)} jobs finished"
    return Promise("every job finishes", not wrong if seen.trained else None, words)


def _same(seen: Seen) -> Promise:
    wrong = []
    for trained in seen.trained:
        other = [name for name, blob in seen.undisturbed.items() if trained.tensors.get(name) != blob]
        if other:
            wrong.append(
                f"{len(other)} of {len(seen.undisturbed)} tensors of {trained.job}, first {other[0]}"
            )
    words = "; ".join(wrong[:SHOWN])
    words = (
        words or f"{len(seen.undisturbed)} tensors bit-equal to the undisturbed run's, optimizer state too"
    )
    known = seen.trained and seen.undisturbed
    return Promise("nothing is lost", not wrong if known else None, words, {"other_tensors": len(wrong)})


def _once(seen: Seen) -> Promise:
    wrong, total = [], 0
    for trained in seen.trained:
        counts = committed(trained.facts)
        total += len(counts)
        odd = [step for step in range(trained.steps) if counts[step] != 1]
        odd += [step for step in counts if step >= trained.steps]
        if odd:
            shown = ", ".join(f"{step} {counts[step]} times" for step in odd[:SHOWN])
            wrong.append(f"{trained.job}: {len(odd)} steps, {shown}")
    words = "; ".join(wrong) or f"{total} steps, 1 to n of each job"
    return _by_journal("each step is committed once", seen, words, held=not wrong)


def _kept(seen: Seen) -> Promise:
    """No commit was taken back by a plan that began at an earlier step."""
    wrong, moves = [], 0
    for trained in seen.trained:
        begun, last = False, -1
        for fact in trained.facts:
            if isinstance(fact, StepCommitted):
                if fact.step <= last:
                    wrong.append(f"{trained.job}: step {fact.step} after step {last}")
                begun, last = True, fact.step
            elif isinstance(fact, PlanAdopted) and begun:
                moves += 1
    words = "; ".join(wrong[:SHOWN]) or f"none; {moves} new plans since a job's first step"
    return _by_journal("no committed step is reverted", seen, words, held=not wrong)


def _by_journal(name: str, seen: Seen, words: str, *, held: bool) -> Promise:
    if not seen.journal:
        return Promise(name, None, "the coordinator's journal is no file of a folder that was attached")
    return Promise(name, held if seen.trained else None, words)


def _noticed(seen: Seen, kind: Kind) -> Promise:
    """Median of the seconds until the coordinator gives up who is gone."""
    took_s = [
        s for deed in seen.deeds if deed.kind is kind and (s := noticed_s(deed, seen.lines)) is not None
    ]
    most_s = NOTICED_S[kind]
    if kind is Kind.HANG:
        most_s = max(most_s, NOTICED_STEPS * seen.step_s)
    name = f"a {PAST[kind]} worker is noticed within {most_s:.0f} s"
    if not took_s:
        return Promise(name, None, "no worker with a stage was disturbed so, or nobody was there to notice")
    median_s = statistics.median(took_s)
    words = f"median {median_s:.2f} s of {len(took_s)}, {min(took_s):.2f} to {max(took_s):.2f} s"
    figures = {"median_s": median_s, "most_s": max(took_s), "count": float(len(took_s))}
    return Promise(name, median_s <= most_s, words, figures)


def noticed_s(deed: Deed, lines: Sequence[Line]) -> float | None:
    """Return the seconds from a deed until its worker was dead or quarantined; None where it held no stage
    or the log does not say."""
    if not deed.held or deed.target == COORDINATOR:
        return None
    for line in lines:
        if not deed.at_s <= line.at_s <= deed.at_s + LOOKED_FOR_S or line.fields.get("worker") != deed.worker:
            continue
        dead = line.event == Event.WORKER_STATE.value and line.fields.get("state") in ("dead", "left")
        if dead or line.event == Event.WORKER_QUARANTINED.value:
            return line.at_s - deed.at_s
    return None


def pauses_s(seen: Seen) -> dict[Kind, list[float]]:
    """Return the longest time between two commits that each deed may have caused, by kind."""
    times = [
        sorted(fact.at_s for fact in trained.facts if isinstance(fact, StepCommitted))
        for trained in seen.trained
    ]
    found: dict[Kind, list[float]] = {}
    for at, deed in enumerate(seen.deeds):
        until_s = seen.deeds[at + 1].at_s if at + 1 < len(seen.deeds) else deed.over_s + LOOKED_FOR_S
        gaps = [b - a for steps in times for a, b in pairwise(steps) if b >= deed.at_s and a <= until_s]
        if gaps:
            found.setdefault(deed.kind, []).append(max(gaps))
    return found


def _none(name: str, wrong: Sequence[str]) -> Promise:
    return Promise(name, not wrong, "; ".join(wrong[:SHOWN]) or "none")
