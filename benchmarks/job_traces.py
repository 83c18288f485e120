"""Traces of jobs and of machines' hours, drawn from a seed, and ONES's evolution of schedules beside the
coordinator's greedy rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from benchmarks.shared_fleet import TraceJob
from coordinator.sharing.claims import Claim, Machine

# Jobs by GPUs (Philly's mix as arXiv 2002.10105 is remembered to use it), and nets: bytes, seconds a step.
PHILLY = {1: 80, 2: 14, 4: 26, 8: 30, 16: 8, 32: 2}
NETS = {
    "vgg16": (526.4e6, 0.0895),
    "resnet50": (99.2e6, 0.0624),
    "inception3": (103.0e6, 0.0873),
    "lstm": (251.8e6, 0.0788),
}
SERVERS, GPUS = 16, 4
ARRIVE_WITHIN_S = 1200.0
STEPS = (1000, 6000)
EVENING_H = (17.0, 20.0)  # a home's machine comes
NIGHT_H = (3.0, 10.0)  # and stays so long
DAY_S = 86400.0


def philly(seed: int) -> list[TraceJob]:
    """160 jobs of a fixed size on 16 servers of 4 GPUs."""
    random = Random(seed)
    sizes = [gpus for gpus, count in PHILLY.items() for _ in range(count)]
    random.shuffle(sizes)
    found = []
    for at, gpus in enumerate(sizes):
        n_bytes, compute_s = NETS[random.choice(list(NETS))]
        at_s, steps = random.uniform(1.0, ARRIVE_WITHIN_S), random.randint(*STEPS)
        found.append(TraceJob(f"job-{at}", at_s, steps, compute_s, n_bytes, least=gpus, most=gpus))
    return found


def servers() -> list[Machine]:
    """Return the machines of the notes' setting."""
    return [Machine(f"s{at}/{gpu}", f"s{at}") for at in range(SERVERS) for gpu in range(GPUS)]


def elastic(seed: int, count: int = 50, slots: int = 16) -> list[TraceJob]:
    """Jobs that may use any number of slots; each would ask for some where it must name a number."""
    random, at_s, found = Random(seed), 0.0, []
    for at in range(count):
        at_s += random.expovariate(1 / 20.0)
        asks = random.choice((1, 1, 2, 2, 4, 4, 8))
        work_s = random.lognormvariate(5.0, 1.0)
        steps = max(10, int(work_s))
        found.append(
            TraceJob(f"job-{at}", at_s, steps, work_s / steps, least=asks, most=slots, owner=f"o{at % 3}")
        )
    return found


def homes(
    seed: int, sites: int = 8, days: int = 7
) -> tuple[list[Machine], dict[str, list[tuple[float, float]]]]:
    """Machines at home: one to three a site, there from the evening into the night, some days not at all."""
    random = Random(seed)
    machines, sessions = [], {}
    for site in range(sites):
        for at in range(random.randint(1, 3)):
            machine = Machine(f"h{site}/{at}", f"h{site}")
            machines.append(machine)
            sessions[machine.name] = [
                (begin_s, begin_s + 3600.0 * random.uniform(*NIGHT_H))
                for day in range(days)
                if random.random() < 0.85
                for begin_s in [day * DAY_S + 3600.0 * random.uniform(*EVENING_H)]
            ]
    return machines, sessions


def evenings(seed: int, count: int = 50) -> list[TraceJob]:
    """Jobs of three owners for such a fleet: any number of machines, minutes to a night."""
    random, found = Random(seed), []
    for at in range(count):
        work_s = 3600.0 * random.lognormvariate(0.6, 1.0)
        at_s = 3600.0 * random.uniform(16.0, 26.0)
        steps = max(20, int(work_s / 6.0))
        found.append(TraceJob(f"job-{at}", at_s, steps, work_s / steps, least=1, most=12, owner=f"o{at % 3}"))
    return found


# ---------------------------------------------------------------- ONES


def evolution(
    slots: int, seed: int, population: int = 24, generations: int = 12
) -> Callable[[list[Claim], float], dict[str, int]]:
    """Return ONES's rule: a population of slot -> job, crossed and mutated, the best deployed.

    Fitness: the sum of remaining time x slots, those without slots counted as waiting for the shortest.
    Source: arXiv 2108.03645, of which only the abstract was read; the operators as they are remembered.
    """
    random = Random(seed)
    pool: list[list[str]] = []

    def decide(claims: list[Claim], now_s: float) -> dict[str, int]:
        nonlocal pool
        by_job = {claim.job: claim for claim in claims}
        names = list(by_job)
        if not names:
            pool = []
            return {}
        pool = [[name if name in by_job else random.choice(names) for name in one] for one in pool]
        while len(pool) < population:
            pool.append([random.choice(names) for _ in range(slots)])
        for _ in range(generations):
            children = []
            for _ in range(population):
                one, other = random.sample(pool, 2)
                child = [random.choice(pair) for pair in zip(one, other, strict=True)]
                if random.random() < 0.8:
                    child[random.randrange(slots)] = random.choice(names)
                children.append(child)
            pool = sorted([*pool, *children], key=lambda one: _fitness(one, by_job))[:population]
        return {name: pool[0].count(name) for name in names if name in pool[0]}

    return decide


def _fitness(genome: Sequence[str], claims: dict[str, Claim]) -> float:
    """Sum of the ends, if each job kept its slots and those without came after the shortest."""
    ends = {name: claims[name].left_s(genome.count(name)) for name in dict.fromkeys(genome)}
    soonest = min(ends.values())
    waits = [claim.left_s(1) + soonest for name, claim in claims.items() if name not in ends]
    return sum(ends.values()) + sum(waits)


def fixed_order(slots: int, *, shortest: bool) -> Callable[[list[Claim], float], dict[str, int]]:
    """Return FIFO's rule, or that of the least remaining service, on the number that each job asks for."""

    def decide(claims: list[Claim], now_s: float) -> dict[str, int]:
        def key(claim: Claim) -> tuple[float, float]:
            return (claim.left_s(claim.least) * claim.least if shortest else 0.0, claim.submitted_s)

        room, found = slots, {}
        for claim in sorted(claims, key=key):
            if claim.least <= room:
                found[claim.job] = claim.least
                room -= claim.least
            elif not shortest:
                break
        return found

    return decide


def marginal(slots: int) -> Callable[[list[Claim], float], dict[str, int]]:
    """Return the rule that gives each slot to the job whose own time it shortens most."""

    def decide(claims: list[Claim], now_s: float) -> dict[str, int]:
        in_order = sorted(claims, key=lambda claim: claim.work_s)[:slots]
        found = {claim.job: 1 for claim in in_order}
        for _ in range(slots - len(in_order) if in_order else 0):
            best = max(in_order, key=lambda c: c.left_s(found[c.job]) - c.left_s(found[c.job] + 1))
            found[best.job] += 1
        return found

    return decide
