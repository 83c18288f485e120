"""Peers of which some share a site: the bits of whole peers by the same sites, whatever the cuts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from atoll.exchange import SITE_RULES, Exchange
from tests.inprocess.peers import LocalPeers, WholeModel
from tests.parameters import sampled
from tests.worker.stage.steps import test_piped_steps as piped
from tests.worker.stage.steps.crew import Case, case
from worker.stage.reports import StepReport

pytestmark = pytest.mark.usefixtures("one_thread")
SHARES = tuple(range(at, at + 1) for at in range(4))
SITES = (0, 0, 1, 1)  # of each peer


@pytest.fixture(autouse=True)
def _four_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piped, "SHARES", SHARES)


def cuts(made: Case, seed: int) -> list[list[int]]:
    """Of two, three, two and two stages."""
    draw, positions = random.Random(seed), [at for at in made.dag.cuttable() if at]
    return [[0, *sorted(draw.sample(positions, stages - 1))] for stages in (2, 3, 2, 2)]


def by_rank(starts: Sequence[Sequence[int]], sites: Sequence[int] = SITES) -> tuple[int, ...]:
    return tuple(site for site, cut in zip(sites, starts, strict=True) for _ in cut)


def sited(exchange: Exchange, sites: Sequence[int]) -> Exchange:
    return replace(exchange, inner=Exchange(), sites=tuple(sites))


def whole_peers(made: Case, exchange: Exchange) -> LocalPeers:
    (program,) = made.programs((0,))[0]
    model = WholeModel(program, piped.SPEC, made.tensors, states=made.states)
    return LocalPeers(model, exchange, len(SHARES), micros=SHARES)


def ran(
    made: Case, exchange: Exchange, starts: Sequence[Sequence[int]]
) -> tuple[piped.Pipes, list[StepReport]]:
    """Pipelines after two rounds by gateways, and what each rank reports of the second."""
    assignments = piped.assigned(made, sited(exchange, by_rank(starts)), starts)
    pipes, first, reports = piped.Pipes(made, assignments), 0, list[StepReport]()
    for _ in range(2):
        last = exchange.last_step(first, piped.SPEC.steps)
        reports, first = pipes.period(first, last), last + 1
    return pipes, reports


@pytest.mark.parametrize("seed", sampled(1, range(5)))
@pytest.mark.parametrize("rule", [name for name, each in piped.RULES.items() if each.rule in SITE_RULES])
def test_pipelines_at_two_sites_have_the_bits_of_whole_peers_there(rule: str, seed: int) -> None:
    made, exchange = case("gpt2"), piped.RULES[rule]
    pipes, reports = ran(made, exchange, cuts(made, seed))
    assert all(receipt.complete for report in reports for receipt in report.receipts.values())
    reference = whole_peers(made, sited(exchange, SITES))
    for step in range(exchange.last_step(exchange.last_step(0, 7) + 1, 7) + 1):
        figures = reference.step(step, lambda rank, at: [made.batches.of(at, m) for m in SHARES[rank]])
        assert figures.losses == tuple(losses[step] for losses in pipes.losses)
    for replica, stage in enumerate(reference.stages):
        piped.same(pipes.state(replica), stage.snapshot())


def test_parts_that_are_passed_on_are_the_same_parts() -> None:
    """SparseLoCo has no sum to make on the way: its bits are those of a round without sites."""
    made, exchange = case("gpt2"), piped.RULES["sparseloco"]
    starts = cuts(made, 3)
    found, _ = ran(made, exchange, starts)
    flat = piped.Pipes(made, piped.assigned(made, exchange, starts))
    for first in (0, exchange.every):
        flat.period(first, first + exchange.every - 1)
    for replica in range(len(SHARES)):
        piped.same(found.state(replica), flat.state(replica))


def test_a_site_keeps_what_the_codec_leaves_out_of_its_sum() -> None:
    """With four bits the sum of four changes misses what the gateways' residuals have."""
    made, exchange = case("gpt2"), Exchange("diloco", every=3, codec="int4_block", quorum=0.5)
    pipes, _ = ran(made, exchange, [[0]] * 4)
    kept = [pipes.state(peer) for peer in range(4)]
    assert any("residual" in tensors for state in kept for tensors in state.values())
    for peer in (1, 2, 3):
        for name, tensors in kept[0].items():
            assert torch.equal(tensors["value"], kept[peer][name]["value"]), name


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_round_goes_on_through_another_gateway_where_one_is_lost(lost: int) -> None:
    """The peers that are left, one of them alone at its site, have the bits of three from the start."""
    made, exchange = case("gpt2"), replace(piped.RULES["diloco"], quorum=0.5)
    starts = [[0]] * 4
    pipes = piped.Pipes(made, piped.assigned(made, sited(exchange, SITES), starts))
    left = [peer for peer in range(4) if peer != lost]
    last = exchange.every - 1
    for step in range(last + 1):
        pipes.step(step, left)
    for peer in left:
        run = pipes.crew.runs[peer]
        plan = run.assignment.plan
        moved = plan.moved(2, [place.worker for place in plan.places], frozenset({lost}))
        run.reconfigure(run.assignment.reconfigured(moved, run.assignment.links, last))
    reports = pipes.round(last, left)
    digests = {receipt.digest for report in reports for receipt in report.receipts.values()}
    assert len(digests) == 1
    assert all(r.included == tuple(left) for report in reports for r in report.receipts.values())
    states = [pipes.state(peer) for peer in left]
    for state in states[1:]:
        for name, tensors in state.items():
            assert torch.equal(tensors["value"], states[0][name]["value"]), name
