"""A round's clients dealt to hosts by measured times: its end over the lower bound, in simulated time.

Hosts train their clients one after another; a client takes its host's seconds, with multiplicative noise.
Every trial draws clients anew each round and learns from the rounds before, as the coordinator does.

  settled   rounds 2 to 6: end over the lower bound at true rates, an equal random split's end over it, and
            the end over the bound with true rates known
  slowed    one host slowed threefold: rounds until below 1.15 x the bound again, and the rounds themselves
  affinity  clients whose state lies on hosts: end and share moved, against dealing without regard to states
  large     CPU seconds to assign 100,000 clients

  python -m benchmarks.makespan --seed 0 --json
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import execute, parser
from coordinator.federated.makespan import (
    Assignment,
    HostTimes,
    Rate,
    Task,
    Timed,
    assign,
    learnt,
    lower_bound,
    rates,
)

HOSTS, CLIENTS, TRIALS, ROUNDS = 8, 100, 50, 6
MEDIAN_STEPS, SIGMA = 20.0, 1.0  # of lognormal clients (papers/federated.md 3)
STEP_S, CLIENT_S = 0.01, 0.05  # of the fastest host
NOISE = 0.05
SLOWDOWN, BELOW = 3.0, 1.15
MOVE_S = 0.1
LARGE = 100_000


def fleet(hosts: int) -> dict[str, Rate]:
    """True rates: the slowest takes nearly twice the time of the fastest."""
    factors = {f"host-{at}": 1.0 + at / hosts for at in range(hosts)}
    return {name: Rate(STEP_S * factor, CLIENT_S * factor) for name, factor in factors.items()}


def drawn(chance: np.random.Generator, clients: int) -> list[Task]:
    """A round's clients with lognormal local steps."""
    steps = np.maximum(1, np.rint(MEDIAN_STEPS * np.exp(SIGMA * chance.normal(size=clients))))
    return [Task(f"client-{at:06d}", int(n)) for at, n in enumerate(steps)]


@dataclass(frozen=True, slots=True)
class Ran:
    """A round in simulated time: when the last host ended, and what was measured."""

    end_s: float
    measured: Mapping[str, Sequence[Timed]]


def run(
    clients: Mapping[str, Sequence[str]],
    tasks: Sequence[Task],
    true: Mapping[str, Rate],
    chance: np.random.Generator,
) -> Ran:
    """Train ``clients`` by host: each takes true seconds with noise; states elsewhere are fetched."""
    by_name = {task.client: task for task in tasks}
    noise = dict(zip(by_name, np.exp(NOISE * chance.normal(size=len(tasks))).tolist(), strict=True))
    measured, ends = {}, []
    for host, mine in clients.items():
        took = [Timed(by_name[c].steps, true[host].seconds(by_name[c].steps) * noise[c]) for c in mine]
        fetched = sum(by_name[c].move_s for c in mine if by_name[c].home not in ("", host))
        measured[host] = took
        ends.append(fetched + sum(t.seconds for t in took))
    return Ran(max(ends), measured)


def equally(tasks: Sequence[Task], hosts: Sequence[str], chance: np.random.Generator) -> dict[str, list[str]]:
    """An equal random split."""
    order = chance.permutation(len(tasks))
    return {host: [tasks[i].client for i in order[at :: len(hosts)]] for at, host in enumerate(hosts)}


@dataclass(frozen=True, slots=True)
class Round:
    """Ends over the lower bound at true rates."""

    scheduled: float
    perfect: float
    equal: float
    predicted_error: float  # of the round's end, relative


def trial(
    seed: int, rounds: int = ROUNDS, slow_at: int | None = None, clients: int = CLIENTS, hosts: int = HOSTS
) -> list[Round]:
    """Rounds of one trial; from round ``slow_at`` on a host drawn by the seed is slowed."""
    chance, true = np.random.default_rng(seed), fleet(hosts)
    times = dict.fromkeys(true, HostTimes())
    found = []
    for at in range(rounds):
        if at == slow_at:
            name = f"host-{chance.integers(hosts)}"
            rate = true[name]
            true = {**true, name: Rate(SLOWDOWN * rate.step_s, SLOWDOWN * rate.client_s)}
        tasks = drawn(chance, clients)
        bound = lower_bound([task.steps for task in tasks], true)
        dealt = assign(tasks, rates(times))
        ran = run(dealt.clients, tasks, true, chance)
        perfect = run(assign(tasks, true).clients, tasks, true, chance)
        equal = run(equally(tasks, list(true), chance), tasks, true, chance)
        error = abs(dealt.makespan_s / ran.end_s - 1.0)
        found.append(Round(ran.end_s / bound, perfect.end_s / bound, equal.end_s / bound, error))
        times = {host: learnt(times[host], ran.measured[host]) for host in times}
    return found


def settled(seed: int, trials: int = TRIALS) -> dict[str, float]:
    """Rounds after the first, which measures."""
    rounds = [found for at in range(trials) for found in trial(1000 * seed + at)[1:]]
    return {
        "over_bound": mean(r.scheduled for r in rounds),
        "worst": max(r.scheduled for r in rounds),
        "perfect": mean(r.perfect for r in rounds),
        "over_equal": mean(r.equal / r.scheduled for r in rounds),
        "predicted_error": mean(r.predicted_error for r in rounds),
    }


def slowed(seed: int, trials: int = TRIALS) -> dict[str, Any]:
    """Rounds from the one in which a host becomes slow."""
    at, after = 4, 7
    runs = [[r.scheduled for r in trial(1000 * seed + n, at + after, at)[at:]] for n in range(trials)]
    # The round of the change cannot know of it; rounds are counted from there.
    back = [next((i for i, ratio in enumerate(run) if ratio < BELOW), after) for run in runs]
    return {
        "rounds_to_recover": max(back),
        "rounds": [round(mean(run[i] for run in runs), 3) for i in range(after)],
    }


def affinity(seed: int, trials: int = TRIALS) -> dict[str, float]:
    """Rounds in which each client's state lies on a host drawn at random, fetched at a cost."""
    true = fleet(HOSTS)
    aware: list[tuple[float, float]] = []  # (end over the bound, share moved)
    blind: list[tuple[float, float]] = []
    for at in range(trials):
        chance = np.random.default_rng(1000 * seed + at)
        tasks = [
            Task(t.client, t.steps, f"host-{chance.integers(HOSTS)}", MOVE_S) for t in drawn(chance, CLIENTS)
        ]
        for kept, dealt in (
            (aware, assign(tasks, true)),
            (blind, assign([Task(t.client, t.steps) for t in tasks], true)),
        ):
            end = run(dealt.clients, tasks, true, chance).end_s
            kept.append((end / dealt.bound_s, _moved(dealt, tasks)))
    return {
        "over_bound": mean(end for end, _ in aware),
        "moved": mean(share for _, share in aware),
        "blind_over_bound": mean(end for end, _ in blind),
        "blind_moved": mean(share for _, share in blind),
    }


def _moved(dealt: Assignment, tasks: Sequence[Task]) -> float:
    home = {task.client: task.home for task in tasks}
    away = sum(home[client] != host for host, clients in dealt.clients.items() for client in clients)
    return away / len(tasks)


def large(seed: int, clients: int = LARGE) -> dict[str, float]:
    """CPU seconds of one assignment, the best of three."""
    found = {}
    for hosts in (8, 64):
        tasks = drawn(np.random.default_rng(seed), clients)
        took = []
        for _ in range(3):
            begun_s = time.process_time()
            dealt = assign(tasks, fleet(hosts))
            took.append(time.process_time() - begun_s)
        found[f"{hosts}_hosts_s"] = min(took)
        found[f"{hosts}_hosts_over_bound"] = dealt.makespan_s / dealt.bound_s
    return found


def main() -> None:
    """Run all and print the figures."""
    options = parser(__doc__ or "").parse_args()
    figures: dict[str, Any] = {
        "settled": settled(options.seed),
        "slowed": slowed(options.seed),
        "affinity": affinity(options.seed),
        "large": large(options.seed),
    }
    for name, found in figures.items():
        shown = (f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items())
        print(f"{name}: {', '.join(shown)}")
    if options.json:
        print(json.dumps({"seed": options.seed, "hosts": HOSTS, "clients": CLIENTS, **figures}))


if __name__ == "__main__":
    execute(main)
