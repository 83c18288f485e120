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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from atoll.collective import Collective, Segment, cut, owner_shares, owners, pairwise_sums
from atoll.exchange import EXACT, Exchange, ExchangeRound, Pattern
from atoll.gateways import Sites, column_shares, site_relays, site_sums, sites_of
from atoll.plan import Plan, Replica
from benchmarks.harness import execute, machine, parser
from compressors.vector import dense
from coordinator.capture.capture import capture
from coordinator.client.fleet_file import read_fleet
from coordinator.client.job_file import load_job
from coordinator.planning.baselines import GIVEN_CUT
from coordinator.planning.costs.fleet import Fleet
from coordinator.planning.peers.gossip_plans import Range, held_by, hidden_steps
from coordinator.planning.peers.transfers import rank_rates
from coordinator.planning.planner import PlanRequest, make_plan
from coordinator.planning.problem import Problem
from coordinator.planning.ways import Way, WayKind, compare_ways
from strategies.exchanges import exchange_facts, make_rule
from strategies.exchanges.base import Contribution
from strategies.exchanges.mean import part_and_total
from strategies.exchanges.partners import Group, groups_at
from tests.inprocess.network import SharedLine, SimulatedNetwork
from worker.exchange.round import CollectiveRun

FLEETS = {"tight": "", "sites": "", "thin": "", "sites_thin": "benchmarks/tied_gpt_job.py"}
"""Fleet files of ours, and the job that a fleet is made for; "": --job."""
HERE = Path(__file__).resolve().parent / "fleets"
GOSSIP_ROUNDS = 40


def network_of(fleet: Fleet) -> SimulatedNetwork:
    """The fleet's pairs and uplinks, of single machines and of groups."""
    rates = fleet.effective_bps / 8.0
    np.fill_diagonal(rates, 1e15)
    up, down = [1e15] * len(fleet.devices), [1e15] * len(fleet.devices)
    lines: list[SharedLine] = []
    for uplink in fleet.uplinks:
        if len(uplink.members) > 1:
            members = frozenset(fleet.index[name] for name in uplink.members if name in fleet.index)
            rates_bps = (uplink.up_bps, uplink.down_bps)
            lines.append(SharedLine(members, *(fleet.payload_share * bps / 8.0 for bps in rates_bps)))
        if len(uplink.members) == 1 and uplink.members[0] in fleet.index:
            at = fleet.index[uplink.members[0]]
            up[at] = uplink.up_bps * fleet.payload_share / 8.0
            down[at] = uplink.down_bps * fleet.payload_share / 8.0
    off = ~np.eye(len(fleet.devices), dtype=bool)
    delay_s = float(fleet.latency_s[off].max()) if off.any() else 0.0
    return SimulatedNetwork(rates.tolist(), delay_s, up, down, lines=lines)


def carried_s(network: SimulatedNetwork, exchanges: Sequence[tuple[Collective, Contribution]]) -> float:
    """Move the clocks by exchanges of such contributions, all at once; when the last is done."""
    rule = make_rule(Exchange("sum"))
    every = []
    for collective, part in exchanges:
        at = ExchangeRound(0, tuple(sorted(collective.actions)))
        held = {rank: dict.fromkeys(labels, part) for rank, labels in collective.labels.items()}
        every.append({r: CollectiveRun(rule, collective, r, at, parts) for r, parts in held.items()})
    network.carry_all(every)
    return max(network.clock[rank] for runs in every for rank in runs)


def by_owners(fleet: Fleet, members: Sequence[int], size: int) -> tuple[Collective, Contribution]:
    """Exchange of so many zeros of ``members``, shares by their rates."""
    shares = owner_shares(rank_rates(fleet, list(members)))
    collective = owners({m: (m,) for m in members}, cut(size, shares), list(members))
    return collective, Contribution(dense(torch.zeros(size)))


def by_gateways(
    fleet: Fleet, range_: Range, exchange: Exchange, sites: Sites
) -> tuple[Collective, Contribution]:
    """Exchange of a range's zeros by gateways between the sites of its holders."""
    facts, rates = exchange_facts(exchange.rule), rank_rates(fleet, list(range_.holders))
    if facts.pattern is not Pattern.OWNERS:
        size = round(facts.volume(range_.shapes, exchange, 2) / 4)
        return site_relays(sites, (Segment(0, size),)), Contribution(dense(torch.zeros(size)))
    size = round(range_.n_bytes / 4) // exchange.fragments
    shares = column_shares(sites, dict(zip(range_.holders, rates, strict=True)))
    part = Contribution(dense(torch.zeros(size)), *part_and_total(exchange.codec, exchange.ratio))
    return site_sums(sites, cut(size, shares)), part


def simulated_step_s(way: Way, request: PlanRequest) -> float:
    """Seconds of a step of ``way``."""
    fleet, problem = request.fleet, Problem(request.dag, request.training, request.fleet)
    network, plan = network_of(fleet), way.plan
    if way.kind is WayKind.PIPELINE or plan is None:
        return way.step_s
    if way.exact:
        return _replicas_s(plan, request, network)
    exchange = way.exchange or Exchange()
    held = held_by(fleet, plan.replicas, request.dag, request.training.optimizer)
    compute_s = _peers_s(plan, request, problem)
    if exchange.gossips:
        peers = tuple(range(len(plan.replicas)))
        drawn = partial(groups_at, exchange, peers, len(peers), request.training.seed)
        return _gossip_s(exchange, drawn, held.ranges, compute_s, (fleet, network))
    for at, seconds in compute_s.items():
        network.compute(at, (exchange.every - exchange.delay) * seconds)
    hidden_s = max(network.clock) + exchange.delay * max(compute_s.values())
    exchanges = []
    for range_ in held.ranges:
        if sites := _sites(plan, range_, fleet):
            exchanges.append(by_gateways(fleet, range_, exchange, sites))
            continue
        # A coded exchange as one of as many bytes, uncoded.
        size, count = round(range_.n_bytes / 4), len(range_.holders)
        volume = exchange_facts(exchange.rule).volume(((size,),), exchange, count)
        carried = round(volume / (8.0 * (count - 1) / count))
        exchanges.append(by_owners(fleet, range_.holders, carried))
    end_s = carried_s(network, exchanges)
    return max(hidden_s, end_s) / exchange.every


def _sites(plan: Plan, range_: Range, fleet: Fleet) -> Sites:
    """Devices that hold a range, by the sites between which it has gateways."""
    rank_of = {fleet.index[place.worker]: rank for rank, place in enumerate(plan.places)}
    found = sites_of(
        plan.exchange or Exchange(), {peer: rank_of[at] for peer, at in enumerate(range_.holders)}
    )
    return tuple(tuple(range_.holders[peer] for peer in site) for site in found)


def _peers_s(plan: Plan, request: PlanRequest, problem: Problem) -> dict[int, float]:
    """Seconds in which each device's peer takes a step of its own: a machine computes, a pipeline as it is
    planned alone."""
    found: dict[int, float] = {}
    for replica in plan.replicas:
        at, (start, stop) = problem.fleet.index[replica.stages[0].worker], replica.micros
        step_s = (stop - start) * float(problem.compute[at, -1])
        if len(replica.stages) > 1:
            step_s = _alone_s(replica, request, "1")
        found |= {problem.fleet.index[stage.worker]: step_s for stage in replica.stages}
    return found


def _alone_s(replica: Replica, request: PlanRequest, replicas: str) -> float:
    """Predicted step of a pipeline with the cut of a replica, for its share."""
    start, stop = replica.micros
    training = replace(request.training, n_micro=stop - start, blocks=1, replicas=replicas, exchange=EXACT)
    starts = ",".join(str(at) for at in replica.starts[1:])
    stages = ",".join(str(one.stage) for one in replica.pieces)
    workers = [stage.worker for stage in replica.stages]
    own = replace(
        request,
        fleet=request.fleet.subset(workers),
        training=training,
        partitioner=f"{GIVEN_CUT}{starts}:{stages}" if starts else GIVEN_CUT,
    )
    alone = make_plan(own).prediction
    return alone.step_s if alone is not None else 0.0


def _replicas_s(plan: Plan, request: PlanRequest, network: SimulatedNetwork) -> float:
    """Seconds of a step of replicas: each pipeline as it is planned alone, then the gradients they share."""
    fleet = request.fleet
    for replica in plan.replicas:
        step_s = _alone_s(replica, request, "2")
        for stage in replica.stages:
            network.clock[fleet.index[stage.worker]] = step_s
    held = held_by(fleet, plan.replicas, request.dag, request.training.optimizer)
    common = [(sorted(range_.holders), round(range_.n_bytes / 4)) for range_ in held.ranges]
    return carried_s(network, [by_owners(fleet, holders, size) for holders, size in common])


def _gossip_s(
    exchange: Exchange,
    drawn: Callable[[int], tuple[Group, ...]],
    ranges: Sequence[Range],
    compute_s: Mapping[int, float],
    where: tuple[Fleet, SimulatedNetwork],
) -> float:
    """Rounds in the groups of peers that workers derive, each of which ends with a commit for all."""
    (fleet, network), published = where, hidden_steps(exchange) > 0
    for number in range(GOSSIP_ROUNDS):
        groups = drawn(number)
        begun_s = max(network.clock)
        network.clock[:] = [begun_s] * len(network.clock)
        for at, seconds in compute_s.items():
            network.compute(at, 0.0 if published else exchange.every * seconds)
        exchanges = [
            _group(exchange, [range_.holders[peer] for peer in group], round(range_.n_bytes / 4), fleet)
            for group in groups
            for range_ in ranges
            if len(group) > 1
        ]
        carried_s(network, exchanges)
        burst_s = begun_s + exchange.every * max(compute_s.values())
        network.clock[:] = [max(burst_s, *network.clock)] * len(network.clock)
    return max(network.clock) / (GOSSIP_ROUNDS * exchange.every)


def _group(
    exchange: Exchange, members: Sequence[int], size: int, fleet: Fleet
) -> tuple[Collective, Contribution]:
    if exchange_facts(exchange.rule).pattern is Pattern.OWNERS:
        return by_owners(fleet, members, size)
    carried = round(exchange_facts(exchange.rule).volume(((size,),), exchange, 2) / 4)
    collective = pairwise_sums([(members[0], members[1])], carried)
    return collective, Contribution(dense(torch.zeros(carried)))


def measured(path: Path, given: str, args: argparse.Namespace) -> dict[str, object]:
    """Rows of one fleet, and whether the named way is the fastest. ``given``: the job file."""
    job = load_job(Path(given), [f"seed={args.seed}"])
    dag = capture(job.module, dict(job.example_inputs), job.training).train
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
    exact = [float(str(row["simulated"])) for row in rows if row["way"] in ("replicas", "data parallel")]
    found: dict[str, object] = {
        "fleet": path.stem,
        "named": rows[0]["way"],
        "fastest": best["way"],
        "ways": rows,
    }
    if exact and rows[0]["efficiency"] != 1.0:
        found["over_exact_replicas"] = float(str(rows[0]["simulated"])) / max(exact)
        print(f"  {found['over_exact_replicas']:.3g} times the samples/s of exact replicas")
    return found


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
    ours = [(HERE / f"{name}.toml", job or args.job) for name, job in FLEETS.items()]
    found = [measured(*one, args) for one in [(Path(path), args.job) for path in args.fleet] or ours]
    misnamed = sum(fleet["named"] != fleet["fastest"] for fleet in found)
    if args.json:
        print(json.dumps({"fleets": found, "misnamed": misnamed, "machine": machine()}))
    return int(misnamed > 0)


def main() -> int:
    """Compare the ways of four fleets, or of those given."""
    options = parser(__doc__ or "", job="examples/gpt.py")
    options.add_argument("--fleet", action="append", default=[], help="fleet file; default: four of ours")
    options.add_argument("--exchange", default="auto", help="'' compares exact ways alone")
    return run(options.parse_args())


if __name__ == "__main__":
    execute(main)
