"""Peers of several stages with local steps, in threads over real links: the bits of peers that are whole."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from atoll.exchange import Exchange
from atoll.job import Optimizer, OptimizerName
from atoll.messages.to_worker import PeerLink
from atoll.microbatch import ScheduleName
from atoll.plan import Piece, Plan, Replica, stage_of
from atoll.program import PiecePrograms
from atoll.step_loss import step_loss
from tests.inprocess.peers import LocalPeers, WholeModel
from tests.parameters import sampled
from tests.patience import HUNG_S, eventually
from tests.worker.stage.steps.crew import TRAINING, Case, Crew, case
from worker.cancel import Cancel
from worker.stage.assignment import Assignment
from worker.stage.reports import StepReport
from worker.transport.contract import Paths

pytestmark = pytest.mark.usefixtures("one_thread")
SHARES = (range(2), range(2, 4))
SPEC = replace(TRAINING, steps=7, optimizer=Optimizer(lr=3e-3, weight_decay=0.01, clip_norm=0.5))
RULES = {
    "diloco": Exchange("diloco", every=3),
    "streaming": Exchange("streaming_diloco", every=2, fragments=2, delay=1),
    "sparseloco": Exchange("sparseloco", every=3, ratio=20.0),
    "saps": Exchange("saps", every=2, ratio=10.0),
}


def assigned(
    made: Case, exchange: Exchange, starts: Sequence[Sequence[int]], owners: Sequence[Sequence[int]] = ()
) -> list[Assignment]:
    """Stages of replicas cut at ``starts``; ``owners``: the stage of each piece, one each without."""
    owned = owners or [range(len(cut)) for cut in starts]
    replicas, programs = [], []
    for number, (cut, stages) in enumerate(zip(starts, owned, strict=True)):
        pieces = [
            Piece(at, stop, 0, 1, 1) for at, stop in zip(cut, (*cut[1:], len(made.dag.ops)), strict=True)
        ]
        held = [[at for at, stage in enumerate(stages) if stage == s] for s in range(max(stages) + 1)]
        share = SHARES[number]
        replicas.append(
            Replica(
                (share.start, share.stop),
                tuple(stage_of(f"p{number}-{s}", [pieces[at] for at in mine]) for s, mine in enumerate(held)),
            )
        )
        made_here = [PiecePrograms(*both) for both in zip(*made.programs(cut, list(stages)), strict=True)]
        programs += [(number, [made_here[at] for at in mine]) for mine in held]
    plan = Plan(
        "job", 1, "", "", "test", ScheduleName.ONE_F_ONE_B, SPEC.n_micro, tuple(replicas), exchange=exchange
    )
    peers = tuple(PeerLink(place.worker, Paths()) for place in plan.places)
    return [
        Assignment(
            "job", 1, SPEC, *own[0], plan, peers, {}, made.states, 0, replica=number, further=tuple(own[1:])
        )
        for number, own in programs
    ]


class Pipes:
    """Replicas of a crew that are driven as a coordinator does it."""

    def __init__(self, made: Case, assignments: Sequence[Assignment]) -> None:
        self.crew = Crew(made, assignments)
        self.assignments = assignments
        self.losses: list[list[float]] = [[] for _ in SHARES]

    def ranks(self, replica: int) -> list[int]:
        return [rank for rank, a in enumerate(self.assignments) if a.replica == replica]

    def period(self, first: int, last: int) -> list[StepReport]:
        """Each replica by itself up to the round; what all report of that."""
        for step in range(first, last + 1):
            self.step(step, range(len(SHARES)))
        return self.round(last, range(len(self.assignments)))

    def step(self, step: int, replicas: Iterable[int], shares: tuple[float, ...] = ()) -> None:
        for replica in replicas:
            ranks = self.ranks(replica)
            own = self.reports("run_step", step, ranks)
            found = step_loss(
                [loss for r in own for loss in r.stage.losses], [w for r in own for w in r.stage.weights]
            )
            norms = [square for r in own for square in r.stage.square_norms]
            scale = SPEC.optimizer.gradient_scale(norms, found.weight)
            self.losses[replica].append(found.mean)
            for rank in ranks:
                self.crew.runs[rank].apply(step, scale, Cancel(), shares)

    def round(self, last: int, ranks: Sequence[int]) -> list[StepReport]:
        reports = self.reports("run_round", last, ranks)
        self.crew.all("apply", last, 1.0, only=ranks)
        return reports

    def reports(self, work: str, step: int, ranks: Sequence[int]) -> list[StepReport]:
        found = self.crew.all(work, step, Cancel(), only=ranks)
        return [report for report in found if isinstance(report, StepReport)]

    def state(self, replica: int) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = {}
        for rank in reversed(self.ranks(replica)):  # of a tied parameter the first holder's
            found.update(self.crew.runs[rank].snapshot())
        return found


def cuts(made: Case, seed: int) -> list[list[int]]:
    draw, positions = random.Random(seed), [at for at in made.dag.cuttable() if at]
    return [[0, *sorted(draw.sample(positions, stages - 1))] for stages in (3, 2)]


def whole_peers(made: Case, exchange: Exchange) -> LocalPeers:
    (program,) = made.programs((0,))[0]
    model = WholeModel(program, SPEC, made.tensors, states=made.states)
    return LocalPeers(model, exchange, len(SHARES), micros=SHARES)


def same(found: Mapping[str, Mapping[str, Tensor]], wanted: Mapping[str, Mapping[str, Tensor]]) -> None:
    for name, tensors in wanted.items():
        for key, value in tensors.items():
            assert torch.equal(value, found[name][key]), (name, key)


def bits_of_whole_peers(
    name: str, rule: str, starts: Sequence[Sequence[int]], owners: Sequence[Sequence[int]] = ()
) -> None:
    made, exchange = case(name), RULES[rule]
    assignments = assigned(made, exchange, starts, owners)
    pipes, reference, first = Pipes(made, assignments), whole_peers(made, exchange), 0
    while first + exchange.every + exchange.delay <= SPEC.steps - 1:  # the last round joins otherwise
        last = exchange.last_step(first, SPEC.steps)
        reports = pipes.period(first, last)
        by_slice: dict[int, set[str]] = {}
        for report in reports:
            for number, receipt in report.receipts.items():
                assert receipt.complete
                by_slice.setdefault(number, set()).add(receipt.digest)
        assert all(len(digests) == 1 for digests in by_slice.values())
        first = last + 1
    for step in range(first):
        figures = reference.step(step, lambda rank, at: [made.batches.of(at, m) for m in SHARES[rank]])
        assert figures.losses == tuple(losses[step] for losses in pipes.losses)
    for replica, stage in enumerate(reference.stages):
        same(pipes.state(replica), stage.snapshot())


@pytest.mark.parametrize("seed", sampled(2, range(10)))
@pytest.mark.parametrize("rule", RULES)
def test_replicas_of_three_and_two_stages_have_the_bits_of_whole_peers(rule: str, seed: int) -> None:
    bits_of_whole_peers("gpt2", rule, cuts(case("gpt2"), seed))


@pytest.mark.parametrize("rule", RULES)
def test_a_ring_beside_a_chain_has_the_bits_of_whole_peers(rule: str) -> None:
    """One holds the tied table at both ends, in the other its uses are in two stages."""
    made = case("gpt2")
    (ring, _), (chain, _) = cuts(made, 1), cuts(made, 2)
    bits_of_whole_peers("gpt2", rule, (ring, chain[:2]), ((0, 1, 0), (0, 1)))


def test_muon_inside_local_steps_has_the_bits_of_whole_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DiLoCo's inner optimizer, in a ring beside a chain."""
    muon = Optimizer(OptimizerName.MUON, lr=3e-3, weight_decay=0.01, clip_norm=0.5)
    monkeypatch.setattr(sys.modules[__name__], "SPEC", replace(SPEC, optimizer=muon))
    made = case("gpt2")
    (ring, _), (chain, _) = cuts(made, 1), cuts(made, 2)
    bits_of_whole_peers("gpt2", "diloco", (ring, chain[:2]), ((0, 1, 0), (0, 1)))


@pytest.mark.parametrize("rule", ["diloco", "sparseloco"])
@pytest.mark.parametrize("stages", [(3, 2), (1, 1)])
def test_a_late_peer_brings_the_steps_that_it_has_taken(rule: str, stages: tuple[int, int]) -> None:
    """A round begins with one of its three steps, weighted so; the next has all again."""
    made, exchange = case("gpt2"), replace(RULES[rule], quorum=0.5)
    starts = [cut[:count] for cut, count in zip(cuts(made, 5), stages, strict=True)]
    pipes, reference = Pipes(made, assigned(made, exchange, starts)), whole_peers(made, RULES[rule])
    early = (1.0, 1 / 3)
    for first, shares, kept in ((0, early, 1), (3, (1.0, 1.0), 3)):
        for at, step in enumerate(range(first, first + 3)):
            ends = at == 2, at + 1 == kept
            late = [] if at < kept else [1]
            pipes.step(step, (0,), shares if ends[0] else ())
            if not late:
                pipes.step(step, (1,), shares if ends[1] else ())
            reference.shares = shares
            reference.step(step, lambda rank, at: [made.batches.of(at, m) for m in SHARES[rank]], late)
        reports = pipes.round(first + 2, range(len(pipes.assignments)))
        assert {len(r.stage.losses) for r in reports if r.stage.losses} == {3, kept}
        for replica, stage in enumerate(reference.stages):
            same(pipes.state(replica), stage.snapshot())


def test_what_a_peer_keeps_is_stored_as_its_own_whatever_the_stage() -> None:
    """Under another cut its tensors lie at other ranks, and a residual is no other peer's."""
    made, exchange = case("gpt2"), RULES["sparseloco"]
    pipes = Pipes(made, assigned(made, exchange, cuts(made, 3)))
    pipes.period(0, exchange.every - 1)
    for replica in range(len(SHARES)):
        trained = [tensors for tensors in pipes.state(replica).values() if "peer" in tensors]
        assert trained
        assert {int(tensors["peer"]) for tensors in trained} == {replica}


def test_a_peer_goes_on_alone_with_the_step_that_it_was_at() -> None:
    """The others of its pipeline keep the steps that they have taken; the one in flight begins anew."""
    made, exchange = case("gpt2"), RULES["diloco"]
    pipes = Pipes(made, assigned(made, exchange, cuts(made, 3)))
    mine = pipes.ranks(1)
    for step in range(2):
        if step:
            later = [pipes.crew.runs[rank] for rank in mine]
            gone = frozenset(pipes.ranks(0))
            for run in later:
                plan = run.assignment.plan
                workers = [place.worker for place in plan.places]
                moved = plan.moved(2, workers, gone)
                run.reconfigure(run.assignment.reconfigured(moved, run.assignment.links, step))
        pipes.step(step, (1,))


def test_a_round_that_is_done_again_takes_messages_of_the_step_behind_it() -> None:
    """A neighbour may begin that before the commit has come here; what nobody wants is lost."""
    made, exchange = case("gpt2"), RULES["diloco"]
    pipes = Pipes(made, assigned(made, exchange, cuts(made, 3)))
    mine, last = pipes.ranks(1), exchange.every - 1
    for step in range(last + 1):
        pipes.step(step, (1,))
    for rank in mine:
        run = pipes.crew.runs[rank]
        plan = run.assignment.plan
        moved = plan.moved(2, [place.worker for place in plan.places], frozenset(pipes.ranks(0)))
        run.reconfigure(run.assignment.reconfigured(moved, run.assignment.links, last))
    pipes.round(last, mine)
    first, second = (pipes.crew.runs[rank] for rank in mine)
    early = threading.Thread(target=first.run_step, args=(last + 1, Cancel()))
    early.start()
    hub = pipes.crew.hub
    eventually(lambda: any(key.step == last + 1 for _, _, key in hub.sent))
    assert not hub.dropped
    second.run_step(last + 1, Cancel())
    early.join(HUNG_S)
    assert not early.is_alive()
