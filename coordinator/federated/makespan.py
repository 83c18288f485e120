"""Which host trains which of a round's clients, so that all hosts end together. Pure.

A host trains its clients one after another. A client of n local steps takes it

    T = t n + b          t > 0 seconds a step, b >= 0 seconds a client

t and b of each host are fitted to what it took, by least squares of T / n over 1 / n: timing errors grow with
the time. Each round counts a quarter of the next, so that a host whose speed changed is seen as it is within
two rounds. Clients are dealt longest first. Those whose state lies on a host stay there as long as it would
not end after the round's lower bound; the others go to the host that would end soonest, fetching the state
included. That takes O(log hosts) a client, and O(hosts) for each number of steps that occurs.
Source: FedML Parrot; papers/federated.md 3. Our own: relative errors, forgetting by weight, where state lies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import groupby
from math import inf
from statistics import median

from atoll.errors import UsageError

FORGET = 0.25  # weight of a round's measurements after the next round
ALIKE = 1e-9  # spread of sizes, relative, below which one point and no line was measured


@dataclass(frozen=True, slots=True)
class Timed:
    """Measurement of one client on one host: its local steps, and the seconds that they took."""

    steps: int
    seconds: float


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Sums over a host's measurements, older ones weighted less: z = 1 / steps, r = seconds / steps."""

    count: float = 0.0
    z: float = 0.0
    zz: float = 0.0
    r: float = 0.0
    rz: float = 0.0


@dataclass(frozen=True, slots=True)
class Rate:
    """Time model of a host."""

    step_s: float
    client_s: float = 0.0

    def seconds(self, steps: int) -> float:
        """Predicted seconds of a client."""
        return self.step_s * steps + self.client_s


@dataclass(frozen=True, slots=True)
class Task:
    """A client to be trained. ``home``: host that has its state, which costs any other ``move_s`` to fetch
    (infinite: the client's data are there alone)."""

    client: str
    steps: int
    home: str = ""
    move_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Assignment:
    """Clients of each host in the order in which they are trained, and when it is predicted to end."""

    clients: Mapping[str, tuple[str, ...]]
    end_s: Mapping[str, float]
    steps: Mapping[str, int]
    moved: int  # clients that are not trained where their state is
    bound_s: float  # no assignment ends sooner

    @property
    def makespan_s(self) -> float:
        """Predicted end of the round's last host."""
        return max(self.end_s.values())


def learnt(times: HostTimes, measured: Collection[Timed]) -> HostTimes:
    """The sums after a round's measurements; unchanged where a host trained nobody."""
    points = [(1.0 / m.steps, m.seconds / m.steps) for m in measured if m.steps > 0 and m.seconds > 0.0]
    if not points:
        return times
    return HostTimes(
        FORGET * times.count + len(points),
        FORGET * times.z + sum(z for z, _ in points),
        FORGET * times.zz + sum(z * z for z, _ in points),
        FORGET * times.r + sum(r for _, r in points),
        FORGET * times.rz + sum(r * z for z, r in points),
    )


def fitted(times: HostTimes) -> Rate | None:
    """The time model of a host; None before anything was measured.

    Where all clients were of one size, or no line with t > 0 and b >= 0 fits best, all time counts by steps.
    """
    if not times.count:
        return None
    ratio = Rate(times.r / times.count)
    spread = times.count * times.zz - times.z**2
    if spread <= ALIKE * times.count * times.zz:
        return ratio
    client_s = (times.count * times.rz - times.z * times.r) / spread
    step_s = (times.r - client_s * times.z) / times.count
    return Rate(step_s, client_s) if step_s > 0.0 and client_s >= 0.0 else ratio


def rates(hosts: Mapping[str, HostTimes]) -> dict[str, Rate]:
    """Time models of all hosts. One that was not measured is taken for the median of those that were; if
    none was, all are alike, at a second a step."""
    known = {name: rate for name, times in hosts.items() if (rate := fitted(times)) is not None}
    usual = Rate(1.0)
    if known:
        usual = Rate(median(r.step_s for r in known.values()), median(r.client_s for r in known.values()))
    return {name: known.get(name, usual) for name in hosts}


def assign(
    tasks: Collection[Task], hosts: Mapping[str, Rate], busy_s: Mapping[str, float] | None = None
) -> Assignment:
    """Deal ``tasks`` to ``hosts``, which are busy for ``busy_s`` before they can begin.

    Ties go to the first client and host by name, so equal arguments give equal assignments. UsageError
    without a host, or for a client whose data no host has.
    """
    if not hosts:
        raise UsageError(f"{len(tasks)} clients and no host to train them; join a worker with their data")
    names = sorted(hosts)
    place = {name: at for at, name in enumerate(names)}
    ends, moved = [(busy_s or {}).get(name, 0.0) for name in names], 0
    bound_s = lower_bound([task.steps for task in tasks], hosts, busy_s)
    dealt: list[list[Task]] = [[] for _ in names]
    queue = []
    for task in sorted(tasks, key=lambda task: (-task.steps, task.client)):
        end_s = inf
        if task.move_s and task.home in place:
            end_s = ends[place[task.home]] + hosts[task.home].seconds(task.steps)
        if end_s <= bound_s:
            dealt[place[task.home]].append(task)
            ends[place[task.home]] = end_s
        else:
            queue.append(task)
    for steps, alike in groupby(queue, key=lambda task: task.steps):
        costs = [hosts[name].seconds(steps) for name in names]
        heap = [(end + cost, at) for at, (end, cost) in enumerate(zip(ends, costs, strict=True))]
        heapify(heap)
        for task in alike:
            while heap[0][0] < ends[heap[0][1]] + costs[heap[0][1]]:  # it was given one since
                heapreplace(heap, (ends[heap[0][1]] + costs[heap[0][1]], heap[0][1]))
            soonest, at = heap[0]
            home = place.get(task.home)
            if home is not None and ends[home] + costs[home] <= soonest + task.move_s:
                at = home
            fetch_s = 0.0 if at == home else task.move_s
            if fetch_s == inf:
                raise UsageError(f"{task.home!r} has left; only it has the data of client {task.client!r}")
            dealt[at].append(task)
            ends[at] += costs[at] + fetch_s
            moved += bool(task.home) and at != home
    by_name = dict(zip(names, dealt, strict=True))
    return Assignment(
        {name: tuple(task.client for task in mine) for name, mine in by_name.items()},
        dict(zip(names, ends, strict=True)),
        {name: sum(task.steps for task in mine) for name, mine in by_name.items()},
        moved,
        bound_s,
    )


def lower_bound(
    steps: Collection[int], hosts: Mapping[str, Rate], busy_s: Mapping[str, float] | None = None
) -> float:
    """Seconds that no assignment beats: of work shared without remainder, and of the longest client."""
    if not steps:
        return 0.0
    busy = busy_s or {}
    least = min(rate.client_s / rate.step_s for rate in hosts.values())  # steps that a client costs at least
    speed = sum(1.0 / rate.step_s for rate in hosts.values())
    begun = sum(busy.get(name, 0.0) / rate.step_s for name, rate in hosts.items())
    longest = max(steps)
    alone = min(busy.get(name, 0.0) + rate.seconds(longest) for name, rate in hosts.items())
    return max((sum(steps) + len(steps) * least + begun) / speed, alone)


def explained(found: Assignment, hosts: Mapping[str, Rate]) -> str:
    """The assignment in a line for people: what each host has to do, and why."""
    parts = [
        f"{name}: {len(clients)} clients, {found.steps[name]:,} steps at {1e3 * hosts[name].step_s:.3g} ms"
        f"{f' + {hosts[name].client_s:.2g} s a client' if hosts[name].client_s else ''}, "
        f"ends at {found.end_s[name]:.3g} s"
        for name, clients in found.clients.items()
    ]
    ratio = found.makespan_s / found.bound_s if found.bound_s else 1.0
    return f"{'; '.join(parts)}; {ratio:.2f} x the lower bound, {found.moved} clients away from their state"
