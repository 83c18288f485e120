"""Choices of two published planners beside `atoll plan`'s, on one timeline: a Llama of 6.7 B parameters.

    python -m benchmarks.published_planners --json
    python -m benchmarks.published_planners --only pool

- Parallax deals single GPUs to pipelines and fills these with layers (benchmarks/rivals/parallax.py). It
  plans inference: how many layers a GPU holds is counted here with gradients, optimizer state and the
  activations of 1, 2, 4 or 8 micro-batches, of which the fastest is shown. A region is a site. Its second
  phase picks a chain for each request; training has none.
- Alpa cuts layers into stages on submeshes of equal hosts, of 1, 2, 4 ... cards or whole hosts
  (benchmarks/rivals/alpa.py). Its integer program over shardings of each operator is not recomputed: a stage
  takes the least that our inside plans take on its submesh.

Each choice is timed with the fleet's links: what it would take here, not what the papers measured. Their
figures are of other models and machines, and are not repeated. `atoll` is the exact way that `atoll plan`
ranks first, with each site one worker, and with each card one. Speeds are data sheets'
(examples/fleets/two_sites.toml). Nothing runs but planners; no figure depends on the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.errors import AtollError, NotEnoughMemory, UsageError
from benchmarks.harness import ROOT, conclude, execute, machine, parser
from benchmarks.rivals.alpa import sliced
from benchmarks.rivals.parallax import Holds, dealt, filled
from coordinator.client.fleet_file import read_fleet
from coordinator.client.job_file import load_job
from coordinator.client.prepare import capture_graphs
from coordinator.planning.baselines import GIVEN_CUT, layer_starts
from coordinator.planning.costs.fleet import Device, Fleet, Mesh
from coordinator.planning.inside.cards import card_fleet, placed_fleet
from coordinator.planning.inside.choice import Insides
from coordinator.planning.peers.replicas import BETWEEN, best_plan, with_blocks
from coordinator.planning.planner import PlanRequest
from coordinator.planning.problem import Candidate, Problem, memory_on
from coordinator.planning.ways import compare_ways

if TYPE_CHECKING:
    from atoll.job import TrainingSpec
    from atoll.mesh.layout import Inside
    from atoll.opdag import OpDag


JOB = ROOT / "examples" / "llama_7b.py"
USUAL = ["nvlink", "pcie", "slow", "fast"]  # 16 unequal workers take the search much longer
IN_FLIGHT = (1, 2, 4, 8)  # micro-batches whose activations a device has room for, where layers are counted
ROWS, MICRO_BATCHES = 128, (8, 1)  # rows of 2,048 tokens a step, and of a micro-batch
SITES = ROOT / "examples" / "fleets" / "two_sites.toml"


# ---------------------------------------------------------------- the model and its machines


@dataclass(frozen=True)
class Option:
    """A submesh with an inside plan. ``hosts``: that it spans."""

    size: int
    hosts: int
    kind: Inside | None  # None: a single card
    device: int  # of the problem that prices it


@dataclass(frozen=True)
class Model:
    """A captured graph with the positions where its layers begin and the last one ends."""

    dag: OpDag
    training: TrainingSpec
    borders: tuple[int, ...]

    @property
    def layers(self) -> int:
        """Return their number."""
        return len(self.borders) - 1

    def request(self, fleet: Fleet) -> PlanRequest:
        """Return what is asked of the planner."""
        return PlanRequest("published", 1, self.dag, None, self.training, fleet, standbys=0)


def model_of(job: Path, settings: Sequence[str], seed: int) -> Model:
    """Capture a job file's model by its shapes."""
    loaded = load_job(job, [*settings, f"SEED={seed}"], shapes_only=True)
    return bordered(capture_graphs(loaded).dag, loaded.training)


def bordered(dag: OpDag, training: TrainingSpec) -> Model:
    """Return a graph with its layers, the first with what is before it and the last with what follows."""
    cuts = np.array([0, *dag.cuttable(), len(dag.ops)])
    starts = sorted({int(cuts[np.searchsorted(cuts, at, side="right") - 1]) for at in layer_starts(dag, 2)})
    return Model(dag, training, (0, *starts[1:], len(dag.ops)))


def cards(fleet: Fleet) -> Fleet:
    """The devices of every site as workers of their own, joined as they are inside, sites as they are."""
    return card_fleet(fleet, [device.worker for device in fleet.devices])


# ---------------------------------------------------------------- their choices on one timeline


def parallax(model: Model, fleet: Fleet) -> dict[str, Any]:
    """Parallax's pipelines of single devices, with the room for micro-batches that suits the step best."""
    rows = [_dealt(model, fleet, micros) for micros in IN_FLIGHT if micros <= model.training.n_micro]
    return min(rows, key=lambda row: row["step_s"] or inf)


def _dealt(model: Model, fleet: Fleet, micros: int) -> dict[str, Any]:
    """Its pipelines, region by region, as replicas of ours; devices hold layers of so many micro-batches."""
    problem = Problem(model.dag, model.training, fleet)
    holds = [_holds(model, problem, at, micros) for at in range(len(fleet.devices))]
    regions: dict[str, list[int]] = {}
    for at, device in enumerate(fleet.devices):
        regions.setdefault(device.worker.rpartition("/")[0], []).append(at)
    pipelines: list[list[tuple[int, int]]] = []
    for region in regions.values():
        for nodes in dealt([holds[at] for at in region], model.layers):
            own = [region[at] for at in nodes]
            room = [holds[at].layers for at in own]
            room[-1] = holds[own[-1]].last
            room[0] = holds[own[0]].first
            flops = [fleet.devices[at].gflops["matmul"] for at in own]
            counts = filled(room, flops, model.layers)
            pipelines.append([(at, n) for at, n in zip(own, counts, strict=True) if n])
    if not pipelines:
        return {"choice": "no pipeline has room", "step_s": None}
    text = ", ".join(sorted({"+".join(str(n) for _, n in one) for one in pipelines}))
    choice = f"{len(pipelines)} pipelines of single devices, layers {text}"
    cuts = []
    for one in pipelines:
        ends = accumulate(n for _, n in one[:-1])
        cuts.append(",".join(str(model.borders[end]) for end in ends))
    order = [fleet.devices[at].worker for one in pipelines for at, _ in one]
    training = with_blocks(replace(model.training, replicas=str(len(pipelines))))
    request = replace(
        model.request(fleet.subset(order)), training=training, partitioner=GIVEN_CUT + BETWEEN.join(cuts)
    )
    try:
        found = best_plan(request).prediction
    except AtollError as error:
        return {"choice": choice, "step_s": None, "why": str(error)[:200]}
    assert found is not None
    return {"choice": choice, "step_s": found.step_s, "bottleneck": found.bottleneck}


def _holds(model: Model, problem: Problem, at: int, micros: int) -> Holds:
    memory, limit = memory_on(problem, at)
    borders, layers = model.borders, model.layers

    def most(of: Sequence[tuple[int, int]]) -> int:
        """The longest of intervals, ascending, in which the micro-batches have room."""
        return sum(memory.in_flight_cap(a, b, limit) >= micros for a, b in of)

    counts = range(1, layers + 1)
    first = most([(0, borders[n]) for n in counts])
    between = most([(borders[1], borders[n + 1]) for n in counts[:-1]])
    last = most([(borders[layers - n], borders[-1]) for n in counts])
    return Holds(layers if first == layers else between, first, last)


def alpa(model: Model, fleet: Fleet) -> dict[str, Any]:
    """Alpa's stages on submeshes of equal sites."""
    site, mesh = fleet.devices[0], fleet.devices[0].mesh
    if mesh is None or any(
        replace(d, worker="", name="") != replace(site, worker="", name="") for d in fleet.devices
    ):
        return {"choice": "not computed: the paper's cluster is hosts of equal devices", "step_s": None}
    options, pricing = _options(model, fleet, site, mesh)
    shape = (model.layers, model.layers + 1, len(options))
    seconds, caps = np.full(shape, inf), np.zeros(shape, dtype=np.intp)
    for m, option in enumerate(options):
        memory, limit = memory_on(pricing, option.device)
        for i, k in combinations(range(model.layers + 1), 2):
            a, b = model.borders[i], model.borders[k]
            more = pricing.undivided[option.device](a, b)
            took = pricing.compute[option.device, b] - pricing.compute[option.device, a]
            seconds[i, k, m] = took + more[0] + more[1]
            caps[i, k, m] = memory.in_flight_cap(a, b, limit)
    sizes = [option.size for option in options]
    total = mesh.size * len(fleet.devices)
    own_s, stages = sliced(seconds, caps, sizes, total, model.training.n_micro)
    if not stages:
        return {"choice": "no cut has room", "step_s": None}
    text = " > ".join(
        f"{k - i} layers on {options[m].size}" + (f" by {options[m].kind}" if options[m].kind else "")
        for i, k, m in stages
    )
    found = _timed(model, fleet, [(model.borders[i], options[m]) for i, _, m in stages])
    return {"choice": text, "own_s": own_s, "step_s": found}


def _options(model: Model, fleet: Fleet, site: Device, mesh: Mesh) -> tuple[list[Option], Problem]:
    """Submeshes (1, 2^m) and whole hosts, each with every inside plan, and the problem that prices them."""
    shapes = [(2**n, 1) for n in range(mesh.size.bit_length()) if 2**n <= mesh.size]
    shapes += [(mesh.size * hosts, hosts) for hosts in range(2, len(fleet.devices) + 1)]
    plain = Problem(model.dag, model.training, fleet)
    insides = Insides(model.dag, model.training, plain.keeping, plain.memory)
    options, devices, kinds = list[Option](), list[Device](), {}
    for size, hosts in shapes:
        for kind in [one.kind for one in insides.of_size(size)] if size > 1 else [None]:
            name = f"{size} {kind or 'alone'}"
            options.append(Option(size, hosts, kind, len(devices)))
            devices.append(_submesh(site, mesh, fleet, size, hosts, name))
            if kind is not None:
                kinds[name] = kind
    n = len(devices)
    apart = Fleet(tuple(devices), np.full((n, n), 1e12), np.zeros((n, n)))
    return options, Problem(model.dag, model.training, apart, kinds=kinds)


def _submesh(site: Device, mesh: Mesh, fleet: Fleet, size: int, hosts: int, name: str) -> Device:
    """A part of a host, or several hosts, whose collectives pass the links between them."""
    own = None if size == 1 else replace(mesh, size=size)
    if own is not None and hosts > 1:
        slowest = float(fleet.effective_bps[0, 1]) / 8.0
        own = replace(own, latency_s=float(fleet.latency_s[0, 1]), bytes_per_s=slowest)
    each = site.memory_limit_bytes // mesh.size
    return replace(site, worker=name, name=name, memory_limit_bytes=each * size, mesh=own)


def _timed(model: Model, fleet: Fleet, stages: Sequence[tuple[int, Option]]) -> float | None:
    """Seconds of a step on the fleet's links. The largest submeshes are placed first, as in the paper."""
    site, mesh = fleet.devices[0], fleet.devices[0].mesh
    assert mesh is not None
    home, left = [0] * len(stages), [mesh.size] * len(fleet.devices)
    for at in sorted(range(len(stages)), key=lambda at: -stages[at][1].size):
        host = next((h for h, free in enumerate(left) if free >= min(stages[at][1].size, mesh.size)), 0)
        home[at] = host
        left[host] -= stages[at][1].size
    devices, kinds = [], {}
    for at, (_, option) in enumerate(stages):
        name = f"stage{at}"
        devices.append(_submesh(site, mesh, fleet, option.size, option.hosts, name))
        if option.kind is not None:
            kinds[name] = option.kind
    placed = placed_fleet(tuple(devices), home, fleet)
    problem = Problem(model.dag, model.training, placed, kinds=kinds)
    scored = problem.score(Candidate(tuple(range(len(stages))), tuple(start for start, _ in stages)))
    return None if scored is None else problem.deferring(scored).step_s


def ours(model: Model, fleet: Fleet) -> dict[str, Any]:
    """The exact way that `atoll plan` ranks first."""
    try:
        way = compare_ways(model.request(fleet))[0]
    except NotEnoughMemory as error:
        return {"choice": "no plan has room", "step_s": None, "why": str(error)[:200]}
    plan = way.plan
    assert plan is not None
    parts = []
    for replica in plan.replicas:
        for stage in replica.stages:
            held = sum(stage.pieces[0].start <= a < stage.pieces[-1].stop for a in model.borders[:-1])
            parts.append(f"{held} layers" + (f" by {stage.inside}" if stage.inside else ""))
    prediction = plan.prediction
    assert prediction is not None
    text = f"{way.text}: {' > '.join(dict.fromkeys(parts))}"
    return {"choice": text, "step_s": way.step_s, "bottleneck": prediction.bottleneck}


def pool() -> Fleet:
    """Two A100 and six RTX 4090, each a worker of its own, on 1 Gbit/s and 10 ms."""
    sites = read_fleet(SITES)
    made = []
    for site, count in zip(sites.devices, (2, 6), strict=True):
        assert site.mesh is not None
        each = site.memory_limit_bytes // site.mesh.size
        made += [
            replace(
                site, worker=f"{site.worker}{n}", name=f"{site.worker}{n}", memory_limit_bytes=each, mesh=None
            )
            for n in range(count)
        ]
    n = len(made)
    apart = ~np.eye(n, dtype=bool)
    rate, delay = np.where(apart, 1e9, inf), np.where(apart, 0.01, 0.0)
    return Fleet(tuple(made), rate, delay, payload_share=sites.payload_share)


def twins(mbit: float) -> Fleet:
    """Two sites like the first of the example."""
    first = read_fleet(SITES).devices[0]
    apart = ~np.eye(2, dtype=bool)
    sites = tuple(replace(first, worker=name, name=name) for name in ("east", "west"))
    return Fleet(sites, np.where(apart, 1e6 * mbit, inf), np.where(apart, 0.01, 0.0), payload_share=0.95)


def fleets() -> Mapping[str, tuple[str, Fleet]]:
    """Fleets by name, with their words."""
    sites = read_fleet(SITES)
    return {
        "nvlink": ("8 A100 on NVLink", sites.subset(["university"])),
        "pcie": ("8 RTX 4090 on PCIe", sites.subset(["lab"])),
        "slow": ("two sites of 8 A100, 1 Gbit/s", twins(1e3)),
        "fast": ("two sites of 8 A100, 100 Gbit/s", twins(1e5)),
        "unequal": ("8 A100 and 8 RTX 4090, 1 Gbit/s", sites),
        "pool": ("2 A100 and 6 RTX 4090, 1 Gbit/s each", pool()),
    }


def compared(models: Sequence[Model], fleet: Fleet) -> dict[str, dict[str, Any]]:
    """Every planner's choice, with the micro-batches that are the fastest for it."""
    sites = any(device.mesh is not None for device in fleet.devices)
    single = cards(fleet) if sites else fleet
    asked: dict[str, Callable[[Model], dict[str, Any]]] = {
        "atoll": lambda model: ours(model, fleet),
        "alpa": lambda model: alpa(model, fleet),
        "parallax": lambda model: parallax(model, single),
    }
    if sites:
        asked["cards"] = lambda model: ours(model, single)
    found = {}
    for planner, choose in asked.items():
        rows = [{**choose(model), "micro_batches": model.training.n_micro} for model in models]
        found[planner] = min(rows, key=lambda row: row["step_s"] or inf)
    return found


def main() -> int:
    """Print a row for each planner on each fleet."""
    made = parser(__doc__ or "")
    made.add_argument("--only", help="fleets, with commas; also unequal and pool")
    args = made.parse_args()
    known = fleets()
    names = args.only.split(",") if args.only else USUAL
    if unknown := set(names) - known.keys():
        raise UsageError(f"--only {min(unknown)}; give {', '.join(known)}")
    models = [
        model_of(JOB, [f"MICRO_BATCH={rows}", f"N_MICRO={ROWS // rows}"], args.seed) for rows in MICRO_BATCHES
    ]
    found: dict[str, Any] = {}
    for name in names:
        words, fleet = known[name]
        found[name] = compared(models, fleet)
        for planner, row in found[name].items():
            step = f"{row['step_s']:8.2f} s" if row["step_s"] else "         -"
            print(
                f"{words:36s} {planner:9s}{step}  {row['choice']}; {row['micro_batches']} micro-batches "
                f"{row.get('why', '')}",
                flush=True,
            )
    return conclude({"fleets": found, "machine": machine()}, args.json)


if __name__ == "__main__":
    execute(main)
