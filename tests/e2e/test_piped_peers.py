"""Peers that are pipelines with steps of their own, on real worker processes: the bits of whole peers."""

from __future__ import annotations

import json
import math
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import pytest

from atoll.exchange import Exchange
from atoll.job import Optimizer, TrainingSpec
from atoll.program import stage_programs
from benchmarks.oracle import Case, Run, built_in
from benchmarks.real_workers import LoopbackFleet, as_job
from coordinator.client.prepare import prepare
from coordinator.messages.facts import PlanAdopted, Reconfigured, RoundMet, StepCommitted, from_record
from coordinator.storage.journal import StoredJournal
from tests.e2e.test_local_steps import same
from tests.e2e.test_reconfigured import disturb
from tests.inprocess.peers import LocalPeers, WholeModel

pytestmark = pytest.mark.usefixtures("one_thread")
TRAINING = TrainingSpec(
    steps=6,
    n_micro=4,
    seed=17,
    optimizer=Optimizer(lr=3e-3, weight_decay=0.01, clip_norm=0.5),
    exchange="diloco",
    local_steps=3,
)
SHARES = (range(2), range(2, 4))


def cut(case: Case) -> str:
    """Two replicas of three and two stages, each for half of a step."""
    positions = [at for at in case.dag.cuttable() if at]
    third, half = positions[len(positions) // 3], positions[len(positions) // 2]
    later = positions[2 * len(positions) // 3]
    return f"cut:{third},{later}@2/{half}@2"


def whole_peers(case: Case, shares: Sequence[range] = SHARES, sites: tuple[int, ...] = ()) -> Run:
    """The rule among peers in one process; ``sites``: of each, where they join by gateways."""
    (program,) = stage_programs(case.dag, (0,))
    model = WholeModel(program, case.training, case.tensors, states=case.states)
    exchange = Exchange(
        "diloco", every=TRAINING.local_steps, inner=Exchange() if sites else None, sites=sites
    )
    peers = LocalPeers(model, exchange, len(shares), micros=shares)
    losses = []
    for step in range(case.training.steps):
        figures = peers.step(step, lambda rank, at: [case.batches(at)[m] for m in shares[rank]])
        weights = figures.weights or [float(len(share)) for share in shares]
        whole = math.fsum(weight * loss for weight, loss in zip(weights, figures.losses, strict=True))
        losses.append((whole / math.fsum(weights),))
    state = peers.stages[0].snapshot()
    return Run(tuple(losses), {name: {"value": held["value"]} for name, held in state.items()})


@pytest.mark.slow
def test_replicas_of_three_and_two_stages_end_in_the_bits_of_whole_peers() -> None:
    case = built_in("gpt2", TRAINING, 0.1)
    with LoopbackFleet(5) as fleet:
        found = fleet.train(prepare(as_job(case), partitioner=cut(case)))
        assert fleet.plan is not None
        assert [len(replica.stages) for replica in fleet.plan.replicas] == [3, 2]
        with closing(StoredJournal(fleet.state / "journal.sqlite")) as journal:
            facts = [from_record(record) for record in journal.replay()]
    same(found, whole_peers(case))
    rounds = [fact for fact in facts if isinstance(fact, RoundMet)]
    assert [(fact.step, len(fact.included)) for fact in rounds] == [(2, 5), (5, 5)]


@pytest.mark.slow
def test_a_killed_stage_is_taken_over_within_its_peer_and_costs_the_other_no_step() -> None:
    """The idle worker repeats its peer's own steps and rounds since the checkpoint."""
    case = built_in("gpt2", replace(TRAINING, steps=90, local_steps=9), 0.1)
    struck, holders = "", list[str]()
    with LoopbackFleet(6) as fleet:
        job = fleet.client.submit(prepare(as_job(case), partitioner=cut(case))).job
        for update in fleet.client.watch(job):
            holders = [s.workers[0] for r in update.plan.replicas for s in r.stages] or holders
            if not struck and holders and update.step > 12:
                struck = holders[1]
                disturb(fleet, struck, signal.SIGKILL)
        assert update.state == "finished", update.reason
        with closing(StoredJournal(fleet.state / "journal.sqlite")) as journal:
            facts = [from_record(record) for record in journal.replay()]
    assert [fact.step for fact in facts if isinstance(fact, StepCommitted)] == list(range(8, 90, 9))
    assert sum(isinstance(fact, PlanAdopted) for fact in facts) == 1  # nothing began anew
    (moved,) = [fact for fact in facts if isinstance(fact, Reconfigured)]
    assert "takes over rank 1, repeating" in moved.reason
    rounds = [fact for fact in facts if isinstance(fact, RoundMet)]
    assert all(len(fact.included) == 5 and not fact.missing for fact in rounds)
    assert struck not in rounds[-1].included


# ---------------------------------------------------------------- two sites

FAR_MBIT, FAR_MS = 20, 10  # between the sites
SITED = (range(1), range(1, 2), range(2, 4))  # shares of two peers at one site and one at the other


class TwoSites(LoopbackFleet):
    """Workers of which the last two are far from the others."""

    def _far(self, name: str) -> bool:
        return int(name.removeprefix("worker")) >= self.workers - 2

    def _spawn(self, name: str, module: str, *arguments: str, **also: str) -> None:
        if module == "worker.cli":
            others = [f"worker{n}" for n in range(self.workers)]
            far = {"mbit": FAR_MBIT, "ms": FAR_MS}
            peers = {other: far for other in others if self._far(other) != self._far(name)}
            path = self.state.parent / f"{name}.shaper.json"
            path.write_text(json.dumps({"self": name, "peers": peers}))
            module, also = "lab.shaped_worker", {"ATOLL_SHAPER": str(path)}
        super()._spawn(name, module, *arguments, **also)


@pytest.mark.slow
def test_pipelines_of_two_sites_join_by_gateways_in_the_bits_of_whole_peers_there() -> None:
    """Nobody says where the workers are: their links do. What crosses in a round is what the plan says."""
    case = built_in("gpt2", TRAINING, 0.1)
    positions = [at for at in case.dag.cuttable() if at]
    cuts = [positions[at * len(positions) // 4] for at in (1, 2, 3)]
    with TwoSites(6) as fleet:
        given = "cut:" + "/".join(f"{cut}@{len(share)}" for cut, share in zip(cuts, SITED, strict=True))
        found = fleet.train(prepare(as_job(case), partitioner=given))
        plan, spans = fleet.plan, fleet.client.trace(fleet.job)
        with closing(StoredJournal(fleet.state / "journal.sqlite")) as journal:
            rounds = [fact for fact in map(from_record, journal.replay()) if isinstance(fact, RoundMet)]
    assert plan is not None
    assert plan.exchange is not None
    assert plan.prediction is not None
    assert [len(replica.stages) for replica in plan.replicas] == [2, 2, 2]
    assert plan.exchange.inner == Exchange()
    assert plan.exchange.sites == (0, 0, 0, 0, 1, 1)
    same(found, whole_peers(case, SITED, (0, 0, 1)))
    assert [(fact.step, len(fact.included), dict(fact.missing)) for fact in rounds] == [
        (2, 6, {}),
        (5, 6, {}),
    ]
    site = {place.worker: at for place, at in zip(plan.places, plan.exchange.sites, strict=True)}
    links = plan.prediction.links
    planned = sum(link.bytes_per_step for link in links if site[link.source] != site[link.target])
    planned *= plan.exchange.every
    # A copy each way, and not one for each of two peers.
    assert planned == pytest.approx(2 * sum(each.meta.nbytes for each in case.dag.parameters.values()), 0.01)
    crossing = [span for span in spans if span.kind == "send" and site[span.worker] != site[span.peer]]
    assert {span.worker for span in crossing} == set(site)  # each is a gateway of what it holds
    crossed = Counter[int]()
    for span in crossing:
        crossed[span.step] += span.bytes
    assert crossed == {step: pytest.approx(planned, rel=0.05) for step in (2, 5)}
