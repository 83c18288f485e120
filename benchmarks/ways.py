"""Does `atoll plan` name the way that is fastest? Each way's step, predicted and run on simulated time.

    python -m benchmarks.ways --job examples/gpt.py --json
    python -m benchmarks.ways --fleet my-fleet.toml --exchange auto

For each fleet every way that fits is carried out in one process: pipelines on the planner's event timeline
(benchmarks.prediction holds that to real machines), exchanges as the real rounds' real messages over the
fleet's links, peers' rounds in the pairs that peer selection draws. Printed: samples a second, predicted and
simulated, and whether the named way is the fastest, each sample counted as `atoll plan` counts it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from atoll.collective import Collective, cut, owner_shares, owners, pairwise_sums
from atoll.exchange import EXACT, Exchange, ExchangeRound, Pattern
from atoll.opdag import OpDag
from atoll.plan import Plan
from benchmarks.harness import execute, machine, parser
from compressors.vector import dense
from coordinator.capture.capture import capture
from coordinator.client.fleet_file import read_fleet
from coordinator.client.job_file import load_job
from coordinator.planning.baselines import GIVEN_CUT
from coordinator.planning.costs.fleet import Fleet
from coordinator.planning.gossip_plans import hidden_steps
from coordinator.planning.planner import PlanRequest, make_plan
from coordinator.planning.problem import Problem
from coordinator.planning.transfers import rank_rates
from coordinator.planning.ways import Way, WayKind, compare_ways
from strategies.exchanges import exchange_facts, make_rule
from strategies.exchanges.base import Contribution
from strategies.exchanges.partners import Group, groups_at
from tests.inprocess.network import SimulatedNetwork
from worker.exchange.round import CollectiveRun

FLEETS = ("tight", "sites", "thin")
HERE = Path(__file__).resolve().parent / "fleets"
GOSSIP_ROUNDS = 40


def network_of(fleet: Fleet) -> SimulatedNetwork:
    """The fleet's pairs and single machines' uplinks; a group's uplink bounds each pair's rate alone."""
    rates = fleet.effective_bps / 8.0
    np.fill_diagonal(rates, 1e15)
    up, down = [1e15] * len(fleet.devices), [1e15] * len(fleet.devices)
    for uplink in fleet.uplinks:
        if len(uplink.members) == 1 and uplink.members[0] in fleet.index:
            at = fleet.index[uplink.members[0]]
            up[at] = uplink.up_bps * fleet.payload_share / 8.0
            down[at] = uplink.down_bps * fleet.payload_share / 8.0
    off = ~np.eye(len(fleet.devices), dtype=bool)
    delay_s = float(fleet.latency_s[off].max()) if off.any() else 0.0
    return SimulatedNetwork(rates.tolist(), delay_s, up, down)


def carried_s(network: SimulatedNetwork, exchanges: Sequence[tuple[Collective, int]]) -> float:
    """Move the clocks by exchanges of zeros of so many elements, all at once; when the last is done."""
    rule = make_rule(Exchange("sum"))
    every = []
    for collective, size in exchanges:
        at = ExchangeRound(0, tuple(sorted(collective.actions)))
        part = Contribution(dense(torch.zeros(size)))
        held = {rank: dict.fromkeys(labels, part) for rank, labels in collective.labels.items()}
        every.append({r: CollectiveRun(rule, collective, r, at, parts) for r, parts in held.items()})
    network.carry_all(every)
    return max(network.clock[rank] for runs in every for rank in runs)


def by_owners(fleet: Fleet, members: Sequence[int], size: int) -> Collective:
    """Exchange of ``members``, shares by their rates."""
    shares = owner_shares(rank_rates(fleet, list(members)))
    return owners({m: (m,) for m in members}, cut(size, shares), list(members))


def simulated_step_s(way: Way, request: PlanRequest) -> float:
    """Seconds of a step of ``way``."""
    fleet, problem = request.fleet, Problem(request.dag, request.training, request.fleet)
    network = network_of(fleet)
    if way.kind is WayKind.PIPELINE:
        return way.step_s
    if way.exact and way.plan is not None:
        return _replicas_s(way.plan, request, problem, network)
    members = [fleet.index[replica[0]] for replica in way.workers]
    size = round(problem.memory.trained(0, problem.n_ops)[0] / 4)
    compute_s = [m * float(problem.compute[at, -1]) for m, at in zip(way.micros, members, strict=True)]
    exchange = way.exchange or Exchange()
    if exchange.gossips:
        drawn = partial(groups_at, exchange, tuple(range(len(members))), len(members), request.training.seed)
        return _gossip_s(exchange, drawn, members, compute_s, size, (fleet, network))
    # A coded exchange as one of as many bytes, uncoded.
    volume = exchange_facts(exchange.rule).volume(((size,),), exchange, len(members))
    carried = round(volume / (8.0 * (len(members) - 1) / len(members)))
    for at, seconds in zip(members, compute_s, strict=True):
        network.compute(at, (exchange.every - exchange.delay) * seconds)
    hidden_s = max(network.clock) + exchange.delay * max(compute_s)
    end_s = carried_s(network, [(by_owners(fleet, members, carried), carried)])
    return max(hidden_s, end_s) / exchange.every


def _replicas_s(plan: Plan, request: PlanRequest, problem: Problem, network: SimulatedNetwork) -> float:
    """Seconds of a step of replicas: each pipeline as it is planned alone, then the gradients they share."""
    fleet = request.fleet
    for replica in plan.replicas:
        start, stop = replica.micros
        training = replace(request.training, n_micro=stop - start, blocks=1, replicas="2", exchange=EXACT)
        cut = GIVEN_CUT + ",".join(str(stage.start) for stage in replica.stages[1:])
        workers = [stage.worker for stage in replica.stages]
        own = replace(request, fleet=fleet.subset(workers), training=training, partitioner=cut)
        alone = make_plan(own).prediction
        for worker in workers:
            network.clock[fleet.index[worker]] = alone.step_s if alone is not None else 0.0
    common = [(sorted(holders), round(n_bytes / 4)) for holders, n_bytes in held_in_common(plan, problem)]
    return carried_s(network, [(by_owners(fleet, holders, size), size) for holders, size in common])


def held_in_common(plan: Plan, problem: Problem) -> Iterator[tuple[list[int], float]]:
    """(holders in the fleet, one a replica; trained bytes) of what lies between two cuts of any replica."""
    index = problem.fleet.index
    edges = sorted({edge for r in plan.replicas for stage in r.stages for edge in (stage.start, stage.stop)})
    for start, stop in pairwise(edges):
        n_bytes = problem.memory.trained(start, stop)[0]
        if n_bytes > 0.0:
            held = (next(s.worker for s in r.stages if s.start <= start < s.stop) for r in plan.replicas)
            yield [index[worker] for worker in held], n_bytes


def _gossip_s(
    exchange: Exchange,
    drawn: Callable[[int], tuple[Group, ...]],
    members: Sequence[int],
    compute_s: Sequence[float],
    size: int,
    where: tuple[Fleet, SimulatedNetwork],
) -> float:
    """Rounds in the groups that workers derive, each of which ends with a commit for all."""
    (fleet, network), published = where, hidden_steps(exchange) > 0
    for number in range(GOSSIP_ROUNDS):
        groups = drawn(number)
        begun_s = max(network.clock)
        network.clock[:] = [begun_s] * len(network.clock)
        for at, seconds in zip(members, compute_s, strict=True):
            network.compute(at, 0.0 if published else exchange.every * seconds)
        exchanges = [
            _group(exchange, [members[rank] for rank in group], size, fleet)
            for group in groups
            if len(group) > 1
        ]
        carried_s(network, exchanges)
        burst_s = begun_s + exchange.every * max(compute_s)
        network.clock[:] = [max(burst_s, *network.clock)] * len(network.clock)
    return max(network.clock) / (GOSSIP_ROUNDS * exchange.every)


def _group(exchange: Exchange, members: Sequence[int], size: int, fleet: Fleet) -> tuple[Collective, int]:
    if exchange_facts(exchange.rule).pattern is Pattern.OWNERS:
        return by_owners(fleet, members, size), size
    carried = round(exchange_facts(exchange.rule).volume(((size,),), exchange, 2) / 4)
    return pairwise_sums([(members[0], members[1])], carried), carried


def measured(path: Path, dag: OpDag, args: argparse.Namespace) -> dict[str, object]:
    """Rows of one fleet, and whether the named way is the fastest."""
    job = args.loaded
    request = PlanRequest("ways", 1, dag, None, job.training, read_fleet(path))
    batch = int(next(iter(job.example_inputs.values())).shape[0])
    rows = list(_rows(compare_ways(request, inexact=args.exchange), request, batch))
    best = max(rows, key=lambda row: float(str(row["simulated_worth"])))
    print(f"{path.stem}: {len(request.fleet.devices)} machines")
    for row in rows:
        print(
            f"  {row['text']}: {row['predicted']:.3g} samples/s predicted, {row['simulated']:.3g} simulated, "
            f"each counts {row['efficiency']:.2f}"
        )
    print(f"  named: {rows[0]['text']}; the fastest simulated: {best['text']}")
    return {"fleet": path.stem, "named": rows[0]["way"], "fastest": best["way"], "ways": rows}


def _rows(ways: Sequence[Way], request: PlanRequest, batch: int) -> Iterator[dict[str, object]]:
    for way in ways:
        if not way.why_not:
            simulated = sum(way.micros) * batch / simulated_step_s(way, request)
            yield {
                "way": way.kind.value,
                "text": way.text,
                "predicted": way.micros_per_s * batch,
                "simulated": simulated,
                "efficiency": way.efficiency,
                "simulated_worth": simulated * way.efficiency,
            }


def run(args: argparse.Namespace) -> int:
    """Print the fleets' ways; exit code 1 when a named way is not the fastest."""
    torch.set_num_threads(1)
    args.loaded = load_job(Path(args.job), [])
    dag = capture(args.loaded.module, dict(args.loaded.example_inputs), args.loaded.training).train
    paths = [Path(path) for path in args.fleet] or [HERE / f"{name}.toml" for name in FLEETS]
    found = [measured(path, dag, args) for path in paths]
    misnamed = sum(fleet["named"] != fleet["fastest"] for fleet in found)
    if args.json:
        print(json.dumps({"fleets": found, "misnamed": misnamed, "machine": machine()}))
    return int(misnamed > 0)


def main() -> int:
    """Compare the ways of three fleets, or of those given."""
    options = parser(__doc__ or "", job="examples/gpt.py")
    options.add_argument("--fleet", action="append", default=[], help="fleet file; default: three of ours")
    options.add_argument("--exchange", default="auto", help="'' compares exact ways alone")
    return run(options.parse_args())


if __name__ == "__main__":
    execute(main)
