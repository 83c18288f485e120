"""A fleet as a graph on paper, in inches: islands of machines, in the order in which a plan visits them.

A site is an island; machines of no site lie together where their links are fast (``clusters.groups``).
Islands follow the pipeline from left to right and back again, a replica begins a row of its own, so that
arrows between stages are short. Of a large fleet the machines that a plan leaves out are one node a site.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import ceil, hypot
from typing import TYPE_CHECKING

import networkx as nx
import numpy as np

from coordinator.planning.search.clusters import groups

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from atoll.plan import Plan
    from coordinator.planning.costs.fleet import Device, Fleet

WIDTH = 13.3  # of a row of islands
ALL_SHOWN = 40  # machines; in larger fleets unused ones are one node a site
MOST_CROWDS = 24  # such nodes
PAD, HEAD, GAP = 0.12, 0.28, 0.3  # in an island, for its name, between islands


@dataclass(frozen=True, slots=True)
class Machine:
    """Machine, or all unused ones of one site."""

    workers: tuple[str, ...]
    label: str
    site: str = ""
    rank: int | None = None  # in the plan
    replica: int = -1
    gflops: float = 0.0  # 0: not known
    memory_bytes: float = 0.0
    limit_bytes: float = 0.0  # 0: not known


@dataclass(frozen=True, slots=True)
class Node:
    """Machine on the map; the origin is the lower left corner."""

    machine: Machine
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Island:
    """Box around the machines of a site."""

    label: str
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Edge:
    """Link between two nodes that the plan does not use."""

    source: int
    target: int
    rate_bps: float  # of the slower direction


@dataclass(frozen=True)
class FleetMap:
    """Nodes by rank, unused ones after them; a node has a cell of ``cell`` (width, height) around it."""

    nodes: tuple[Node, ...]
    islands: tuple[Island, ...]
    edges: tuple[Edge, ...]
    cell: tuple[float, float]
    width: float
    height: float


def fleet_map(plan: Plan, names: Mapping[str, str], fleet: Fleet | None) -> FleetMap:
    """Lay out the machines of ``plan``, with all others where ``fleet`` describes them."""
    machines = _machines(plan, names, fleet)
    cell = _cell(len(machines))
    nodes, islands, width, height = _packed(machines, _islands(machines, fleet), cell)
    edges = _edges(nodes, plan, fleet) if fleet is not None else ()
    return FleetMap(tuple(nodes), tuple(islands), edges, cell, width, height)


def gflops_of(device: Device) -> float:
    """GFLOP/s of a device at matrix products, which most models are made of."""
    rates = device.gflops
    return rates.get("matmul", rates.get("", max(rates.values(), default=0.0))) / device.scale


def _machines(plan: Plan, names: Mapping[str, str], fleet: Fleet | None) -> list[Machine]:
    stages = plan.prediction.stages if plan.prediction is not None else ()
    memory = {s.worker: (float(s.memory_bytes), float(s.memory_limit_bytes)) for s in stages}
    devices = {device.worker: device for device in fleet.devices} if fleet is not None else {}

    def machine(worker: str, rank: int | None, replica: int) -> Machine:
        device = devices.get(worker)
        used, limit = memory.get(worker, (0.0, float(device.memory_limit_bytes) if device else 0.0))
        site, rate = (device.site, gflops_of(device)) if device else ("", 0.0)
        return Machine((worker,), names.get(worker, worker), site, rank, replica, rate, used, limit)

    found = [machine(place.worker, rank, place.replica) for rank, place in enumerate(plan.places)]
    used = {place.worker for place in plan.places}
    idle = [machine(worker, None, -1) for worker in devices if worker not in used]
    return found + (idle if len(devices) <= ALL_SHOWN else _crowds(idle))


def _crowds(idle: Sequence[Machine]) -> list[Machine]:
    """Unused machines as one node a site; the smallest sites together."""
    sites: dict[str, list[Machine]] = {}
    for machine in idle:
        sites.setdefault(machine.site, []).append(machine)
    largest = sorted(sites, key=lambda site: -len(sites[site]))[:MOST_CROWDS]
    rest = [machine for site in sites if site not in largest for machine in sites[site]]
    found = [_crowd(sites[site], site) for site in sites if site in largest]
    return [*found, _crowd(rest, "")] if rest else found


def _crowd(members: Sequence[Machine], site: str) -> Machine:
    workers = tuple(worker for machine in members for worker in machine.workers)
    label = members[0].label if len(members) == 1 else f"{len(members)} unused"
    return Machine(workers, label, site, gflops=sum(m.gflops for m in members) / len(members))


def _cell(nodes: int) -> tuple[float, float]:
    """Width and height of the room for a machine and its name."""
    if nodes <= 8:
        return min(2.4, WIDTH / max(nodes, 1) - 0.15), 1.75
    return (1.25, 1.6) if nodes <= 24 else (1.02, 0.95)


def _islands(machines: Sequence[Machine], fleet: Fleet | None) -> list[list[int]]:
    """Indices of machines by island, those that the plan visits first ahead."""
    found: dict[str, list[int]] = {}
    alone = []
    for at, machine in enumerate(machines):
        if machine.site:
            found.setdefault(machine.site, []).append(at)
        else:
            alone.append(at)
    islands = list(found.values())
    if fleet is None or len(alone) < 2:
        islands += [alone] if alone else []
    else:
        rows = [fleet.index[machines[at].workers[0]] for at in alone]
        islands += [[alone[i] for i in group] for group in groups(fleet.effective_bps[np.ix_(rows, rows)])]
    return sorted(islands, key=min)


@dataclass
class _Row:
    """Islands side by side; ``back``: from right to left."""

    islands: list[list[int]]
    width: float
    back: bool
    replica: int


def _packed(
    machines: Sequence[Machine], islands: Sequence[list[int]], cell: tuple[float, float]
) -> tuple[list[Node], list[Island], float, float]:
    sizes = {min(island): _size(island, machines, cell) for island in islands}
    rows: list[_Row] = []
    for island in islands:
        width, replica = sizes[min(island)][0] + GAP, machines[min(island)].replica
        row = rows[-1] if rows else None
        same = row is not None and replica in (-1, row.replica)
        if row is not None and same and row.width + width <= WIDTH + GAP:
            row.islands.append(island)
            row.width += width
        else:
            rows.append(_Row([island], width, row is not None and same and not row.back, replica))
    total = max(row.width for row in rows) - GAP
    placed: dict[int, Node] = {}
    boxes = []
    top = 0.0
    for row in rows:
        tall = max(sizes[min(island)][1] for island in row.islands)
        x = (total - (row.width - GAP)) / 2
        for island in reversed(row.islands) if row.back else row.islands:
            width, height = sizes[min(island)]
            bottom = -top - tall + (tall - height) / 2
            boxes.append(Island(machines[min(island)].site, x, bottom, width, height))
            for at, dx, dy in _grid(island, machines, cell, row.back):
                placed[at] = Node(machines[at], x + dx, bottom + height - dy)
            x += width + GAP
        top += tall + GAP
    height = top - GAP
    nodes = [Node(n.machine, n.x, n.y + height) for _, n in sorted(placed.items())]
    islands_up = [Island(b.label, b.x, b.y + height, b.width, b.height) for b in boxes]
    return nodes, islands_up, total, height


def _columns(n: int, cell: tuple[float, float]) -> int:
    """Machines in a row. Rows are odd in number: a path that enters on the left leaves on the right."""
    most = int((WIDTH - 2 * PAD) / cell[0])
    rows = ceil(n / most)
    return ceil(n / (rows + (rows + 1) % 2))


def _size(
    island: Sequence[int], machines: Sequence[Machine], cell: tuple[float, float]
) -> tuple[float, float]:
    columns = _columns(len(island), cell)
    head = HEAD if machines[min(island)].site else 0.0
    return columns * cell[0] + 2 * PAD, ceil(len(island) / columns) * cell[1] + head + PAD


def _grid(
    island: Sequence[int], machines: Sequence[Machine], cell: tuple[float, float], back: bool
) -> Iterator[tuple[int, float, float]]:
    """(machine, inches from the left, from the top) in rows, each beginning where the last one ended."""
    columns = _columns(len(island), cell)
    head = HEAD if machines[min(island)].site else 0.0
    for i, at in enumerate(sorted(island)):
        row, column = divmod(i, columns)
        if back != bool(row % 2):
            column = columns - 1 - column
        yield at, PAD + (column + 0.5) * cell[0], head + (row + 0.42) * cell[1]


def _edges(nodes: Sequence[Node], plan: Plan, fleet: Fleet) -> tuple[Edge, ...]:
    """The fastest links that join everything on the map: a maximum spanning tree, without the plan's own.

    It has each machine's fastest link and the fastest between any two sites that it joins; of equally fast
    ones the plan's and the shortest on paper.
    """
    shown = [at for at, node in enumerate(nodes) if node.machine.site or len(node.machine.workers) == 1]
    rows = [fleet.index[nodes[at].machine.workers[0]] for at in shown]
    rates = np.minimum(fleet.effective_bps, fleet.effective_bps.T)[np.ix_(rows, rows)]
    links = plan.prediction.links if plan.prediction is not None else ()
    used = {frozenset((link.source, link.target)) for link in links}
    found = []
    for (i, a), (j, b) in combinations(enumerate(shown), 2):
        one, other = nodes[a], nodes[b]
        spare = frozenset((one.machine.workers[0], other.machine.workers[0])) not in used
        length = hypot(one.x - other.x, one.y - other.y)
        found.append((-float(rates[i, j]), spare, length, a, b))
    graph = nx.Graph()
    for order, (rate, spare, _, a, b) in enumerate(sorted(found)):
        graph.add_edge(a, b, weight=order, rate=-rate, spare=spare)
    tree = nx.minimum_spanning_edges(graph)
    return tuple(Edge(a, b, facts["rate"]) for a, b, facts in tree if facts["spare"])
