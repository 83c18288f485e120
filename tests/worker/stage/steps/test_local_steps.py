"""Peers with local steps in threads over real links: the bits of their rule in one process."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from atoll.collective import TOTAL
from atoll.errors import PlanError
from atoll.exchange import Exchange, PairTable, Pattern, Receipt, wanted_exchange
from atoll.job import Optimizer
from atoll.messages.to_worker import PeerLink
from atoll.microbatch import ScheduleName
from atoll.plan import Plan, Replica, StageSpec
from atoll.program import stage_programs
from strategies.exchanges import exchange_facts, make_rule
from strategies.exchanges.partners import groups_at
from tests.inprocess.peers import LocalPeers, WholeModel
from tests.parameters import sampled
from tests.patience import HUNG_S
from tests.worker.stage.steps.crew import TRAINING, Case, Crew, case
from worker.cancel import Cancel, Cancelled
from worker.exchange import carrier, slices
from worker.exchange.carrier import packed
from worker.exchange.round import Message, digest_of
from worker.exchange.schedule import Groups
from worker.exchange.slices import Send
from worker.stage.assignment import Assignment, check
from worker.stage.reports import StepReport
from worker.transport.contract import Paths, PeerLost
from worker.transport.frames import MessageKey

pytestmark = pytest.mark.usefixtures("one_thread")
SHARES = (range(1), range(1, 2), range(2, 4))
SPEC = replace(TRAINING, steps=8, optimizer=Optimizer(lr=3e-3, weight_decay=0.01, clip_norm=0.5))
RULES = {
    "diloco": Exchange("diloco", every=3),
    "diloco, coded": Exchange("diloco", every=4, codec="int8_block"),
    "streaming": Exchange("streaming_diloco", every=2, fragments=2, delay=1),
    "sparseloco": Exchange("sparseloco", every=4, ratio=20.0),
    "saps": Exchange("saps", ratio=8.0, pairs=PairTable((0.0, 9.0, 1.0, 9.0, 0.0, 2.0, 1.0, 2.0, 0.0))),
    "swarm": Exchange("swarm", every=2),
    "wagma": Exchange("wagma"),
}
GOSSIP = [rule for rule, exchange in RULES.items() if exchange.gossips]


def assigned(made: Case, exchange: Exchange, first_step: int = 0) -> list[Assignment]:
    n_ops = len(made.dag.ops)
    replicas = tuple(
        Replica((share.start, share.stop), (StageSpec(0, n_ops, 0, 1, f"p{rank}", 0),))
        for rank, share in enumerate(SHARES)
    )
    plan = Plan("job", 1, "", "", "test", ScheduleName.ONE_F_ONE_B, SPEC.n_micro, replicas, exchange=exchange)
    peers = tuple(PeerLink(place.worker, Paths()) for place in plan.places)
    ((program,), (evaluation,)) = made.programs((0,))
    return [
        Assignment(
            "job", 1, SPEC, program, evaluation, plan, peers, {}, made.states, first_step, replica=rank
        )
        for rank in range(len(SHARES))
    ]


def in_one_process(made: Case, exchange: Exchange) -> LocalPeers:
    (program,) = stage_programs(made.dag, (0,))
    model = WholeModel(program, SPEC, made.tensors, states=made.states)

    def meeting(number: int) -> Groups:
        """Who exchanges with whom on workers; of a pair that publishes each reads the other."""
        groups = groups_at(exchange, (0, 1, 2), 3, SPEC.seed, number)
        both_read = exchange_facts(exchange.rule).pattern is Pattern.PUBLISHED
        return [*groups, *(group[::-1] for group in groups if both_read and len(group) > 1)]

    return LocalPeers(model, exchange, len(SHARES), micros=SHARES, groups=meeting)


def same(run: Mapping[str, Mapping[str, Tensor]], stage: Mapping[str, Mapping[str, Tensor]]) -> None:
    for name, tensors in stage.items():
        for key, value in tensors.items():
            assert torch.equal(value, run[name][key]), (name, key)


def receipt_of(report: StepReport) -> Receipt:
    """Of a peer that is one stage."""
    (receipt,) = report.receipts.values()
    return receipt


def periods(exchange: Exchange, first: int = 0) -> list[int]:
    ends, step = [], first
    while step < SPEC.steps:
        ends.append(exchange.last_step(step, SPEC.steps))
        step = ends[-1] + 1
    return ends


def trained(crew: Crew, ends: list[int]) -> list[list[StepReport]]:
    found = []
    for last in ends:
        found.append([r for r in crew.all("run_step", last, Cancel()) if isinstance(r, StepReport)])
        crew.all("apply", last, 1.0)
    return found


@pytest.mark.parametrize("rule", RULES)
def test_peers_end_in_the_bits_of_the_rule_in_one_process(rule: str) -> None:
    made, exchange = case("gpt2"), RULES[rule]
    crew, reference = Crew(made, assigned(made, exchange)), in_one_process(made, exchange)
    # The reference exchanges nothing where the training ends before a round does.
    whole = range(exchange.every + exchange.delay - 1, SPEC.steps, exchange.every)
    joined = [SPEC.steps - 1] if exchange.gossips else []
    ends = [last for last in periods(exchange) if last in whole and last not in joined]
    losses: list[tuple[float, ...]] = []
    sent: dict[int, tuple[int, ...]] = {}  # by the step after which it was contributed
    for reports in trained(crew, ends):
        receipts = [receipt_of(report) for report in reports]
        digests = {receipt.included: receipt.digest for receipt in receipts}
        assert all(receipt.digest == digests[receipt.included] for receipt in receipts)
        assert all(receipt.complete for receipt in receipts)
        losses += zip(*(report.stage.losses for report in reports), strict=True)
        sent[exchange.contributed_after(reports[0].step) - 1] = tuple(
            receipt.sent_bytes for receipt in receipts
        )
    for step in range(ends[-1] + 1):
        figures = reference.step(step, lambda rank, at: [made.batches.of(at, m) for m in SHARES[rank]])
        assert figures.losses == losses[step]
        assert figures.sent_bytes == sent.get(step, (0, 0, 0))
    for run, stage in zip(crew.runs, reference.stages, strict=True):
        same(run.snapshot(), stage.snapshot())


@pytest.mark.parametrize("rule", ["streaming", *GOSSIP])
def test_all_end_with_one_model_though_theirs_differ_before(rule: str) -> None:
    made, exchange = case("gpt2"), RULES[rule]
    crew = Crew(made, assigned(made, exchange))
    *before, last = periods(exchange)
    trained(crew, before)
    names = list(crew.runs[0].snapshot())

    def alike() -> bool:
        first, *others = (run.snapshot() for run in crew.runs)
        return all(torch.equal(first[n]["value"], other[n]["value"]) for n in names for other in others)

    assert not alike()
    trained(crew, [last])
    assert alike()


@pytest.mark.parametrize("rule", ["diloco, coded", "streaming", "saps", "swarm"])
def test_peers_that_begin_with_what_they_stored_end_in_the_same_bits(rule: str) -> None:
    made, exchange = case("gpt2"), RULES[rule]
    whole = Crew(made, assigned(made, exchange))
    first, *rest = periods(exchange)
    trained(whole, [first])
    stored = [run.snapshot() for run in whole.runs]
    tensors = [{**made.tensors, **held} for held in stored]
    again = Crew(made, assigned(made, exchange, first + 1), tensors=tensors)
    for one in (whole, again):
        trained(one, rest)
    for run, other in zip(whole.runs, again.runs, strict=True):
        same(run.snapshot(), other.snapshot())


@pytest.mark.parametrize("first", sampled(4, range(1, SPEC.steps)))
@pytest.mark.parametrize(("every", "delay"), [(4, 3), (3, 1)])
def test_a_job_that_goes_on_from_any_step_ends_in_the_bits_of_the_rule(
    first: int, every: int, delay: int
) -> None:
    made, exchange = case("gpt2"), Exchange("streaming_diloco", every, fragments=2, delay=delay)
    crew, reference = Crew(made, assigned(made, exchange, first)), in_one_process(made, exchange)
    *before, last = periods(exchange, first)
    for reports in trained(crew, before):
        assert all(receipt_of(report).complete for report in reports)
    for step in range(first, max(before, default=first - 1) + 1):
        reference.step(step, lambda rank, at: [made.batches.of(at, m) for m in SHARES[rank]])
    for run, stage in zip(crew.runs, reference.stages, strict=True):
        same(run.snapshot(), stage.snapshot())
    (reports,) = trained(crew, [last])
    assert all(receipt_of(report).complete for report in reports)


def test_who_joins_late_publishes_a_copy_that_its_partner_can_read() -> None:
    made, exchange = case("gpt2"), RULES["swarm"]
    crew, (first, *_) = Crew(made, assigned(made, exchange)), periods(exchange)
    trained(crew, [first])
    newcomer, partner = next(g for g in groups_at(exchange, (0, 1, 2), 3, SPEC.seed, 1) if len(g) > 1)
    stored = [run.snapshot() for run in crew.runs]
    stored[newcomer] = stored[3 - newcomer - partner]
    tensors = [{**made.tensors, **held} for held in stored]
    again = Crew(made, assigned(made, exchange, first + 1), tensors=tensors)
    trained(again, periods(exchange, first + 1)[:1])
    dense = [held["distance"][1].item() for held in again.runs[partner].snapshot().values()]
    assert not any(dense)


def test_who_begins_with_anothers_state_takes_no_residual_of_it() -> None:
    made, exchange = case("gpt2"), RULES["diloco, coded"]
    crew = Crew(made, assigned(made, exchange))
    trained(crew, periods(exchange)[:1])
    stored = crew.runs[0].snapshot()
    assert any("residual" in held for held in stored.values())
    later = assigned(made, exchange, 4)
    newcomer = Crew(made, later[1:2], tensors=[{**made.tensors, **stored}]).runs[0].snapshot()
    assert not any("residual" in held for held in newcomer.values())
    assert all(torch.equal(stored[n]["outer_momentum"], newcomer[n]["outer_momentum"]) for n in stored)


class Counted(Cancel):
    """Is cancelled at its n-th look."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.left = looks

    def check(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.set("a peer is lost")
        super().check()


@pytest.mark.parametrize(("rule", "looks"), [("diloco", 4), ("diloco", 14), ("saps", 9)])
def test_the_others_go_on_with_the_steps_they_took_without_a_lost_peer(rule: str, looks: int) -> None:
    made, exchange = case("gpt2"), replace(RULES[rule], every=3)
    crew, given = Crew(made, assigned(made, exchange)), assigned(made, exchange)
    crew.runs = crew.runs[:2]  # the third is gone before it sends anything

    def cancelled(run: object, cancel: Cancel) -> None:
        with pytest.raises(Cancelled):
            run.run_step(2, cancel)  # type: ignore[attr-defined]

    for run in crew.runs:
        cancelled(run, Counted(looks))
    taken = [len(run._local.losses) for run in crew.runs if run._local is not None]
    assert max(taken) > 0
    plan = given[0].plan.moved(2, [place.worker for place in given[0].plan.places], frozenset({2}))
    for run, assignment in zip(crew.runs, given, strict=False):
        run.reconfigure(assignment.reconfigured(plan, assignment.links, 0))
    (reports,) = trained(crew, [2])
    assert [len(report.stage.losses) for report in reports] == [3, 3]
    assert all(receipt_of(report).included == (0, 1) for report in reports)
    # What they took before was not taken again: two peers alone come to the same.
    (program,) = stage_programs(made.dag, (0,))
    model = WholeModel(program, SPEC, made.tensors, states=made.states)
    alone = LocalPeers(model, exchange, 2, micros=SHARES[:2])
    for step in range(3):
        alone.step(step, lambda rank, at: [made.batches.of(at, m) for m in SHARES[rank]])
    for run, stage in zip(crew.runs, alone.stages, strict=True):
        same(run.snapshot(), stage.snapshot())


@pytest.mark.parametrize("codecs", [("none", "int4_block"), ("int4_block", "none")])
def test_rounds_under_a_plan_with_another_codec_have_the_bits_of_that_codec(codecs: tuple[str, str]) -> None:
    made = case("gpt2")
    first, then = (Exchange("diloco", every=2, codec=codec) for codec in codecs)
    given, reference = assigned(made, first), in_one_process(made, first)
    crew = Crew(made, given)
    trained(crew, [1])
    names = [place.worker for place in given[0].plan.places]
    plan = given[0].plan.moved(2, names, exchange=then)
    for run, assignment in zip(crew.runs, given, strict=True):
        run.reconfigure(assignment.reconfigured(plan, assignment.links, 2))
    trained(crew, [3, 5])
    for step in range(6):
        if step == 2:
            reference.exchange, reference.rule = then, make_rule(then)
        reference.step(step, lambda rank, at: [made.batches.of(at, m) for m in SHARES[rank]])
    for run, stage in zip(crew.runs, reference.stages, strict=True):
        same(run.snapshot(), stage.snapshot())


def test_nobody_is_waited_for_beyond_the_deadline() -> None:
    made = case("gpt2")
    crew = Crew(made, assigned(made, replace(RULES["diloco"], deadline_s=0.3)))
    crew.runs = crew.runs[:1]
    with pytest.raises(PeerLost, match="deadline") as lost:
        crew.runs[0].run_step(2, Cancel())
    assert lost.value.peer in ("p1", "p2")


def test_who_sends_each_piece_just_in_time_keeps_nobody_beyond_one_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(carrier, "PIECE_BYTES", 4096)
    made = case("gpt2")
    crew = Crew(made, assigned(made, Exchange("diloco", every=1, deadline_s=10.0)))
    run, now_s, pieces = crew.runs[0], [0.0], [0]

    def trickling(key: MessageKey, timeout_s: float) -> Tensor:
        comes_s = 9.0 * (pieces[0] + 1)
        if comes_s > now_s[0] + timeout_s:
            now_s[0] += timeout_s
            raise TimeoutError
        now_s[0] = max(now_s[0], comes_s)
        pieces[0] += 1
        return torch.zeros(4096, dtype=torch.uint8)

    monkeypatch.setattr(run._links, "receive", trickling)
    run.messages.clock = lambda: now_s[0]
    with pytest.raises(PeerLost, match="deadline") as lost:
        run.run_step(0, Cancel())
    assert lost.value.peer == "p1"
    assert (now_s[0], pieces[0]) == (10.0, 1)


def test_a_peer_that_is_absent_is_given_no_work() -> None:
    made = case("gpt2")
    one = assigned(made, RULES["diloco"])[2]
    names = [place.worker for place in one.plan.places]
    with pytest.raises(PlanError, match="absent"):
        check(replace(one, plan=one.plan.moved(1, names, frozenset({2}))), "p2")


def test_a_rule_by_its_name_is_one_that_workers_run() -> None:
    made = case("gpt2")
    for how in ("diloco", "diloco:int4_block", "streaming_diloco", "sparseloco", "saps:50", "swarm", "wagma"):
        exchange = wanted_exchange(how, 20)
        assert exchange is not None
        ready = assigned(made, exchange)[0]
        tensors = dict.fromkeys(made.states, "ab" * 32)
        check(replace(ready, tensors=tensors), "p0")


def outcomes(crew: Crew, last: int) -> list[object]:
    """What a period comes to at each peer: its report, or what was raised."""
    found: list[object] = [None] * len(crew.runs)

    def one(at: int) -> None:
        try:
            found[at] = crew.runs[at].run_step(last, Cancel())
        except PeerLost as lost:
            found[at] = lost

    threads = [threading.Thread(target=one, args=(at,)) for at in range(len(crew.runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HUNG_S)
    return found


@pytest.mark.parametrize("rule", ["diloco", "sparseloco"])
def test_who_sends_a_part_that_does_not_match_its_digest_is_named(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, exchange = case("gpt2"), replace(RULES[rule], deadline_s=1.0)
    crew = Crew(made, assigned(made, exchange))

    def damaged(message: Message) -> Tensor:
        frame = packed(message)
        if message.source == 1:
            frame[-1] ^= 1
        return frame

    monkeypatch.setattr(slices, "packed", damaged)
    first, *_ = outcomes(crew, periods(exchange)[0])
    assert isinstance(first, PeerLost)
    assert first.peer == "p1"
    assert "does not match its digest" in str(first)


def test_an_owner_whose_total_lacks_a_contribution_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever takes it reports less than the others, and is taken for the one that is wrong."""
    made, exchange = case("gpt2"), replace(RULES["diloco"], deadline_s=1.0)
    crew = Crew(made, assigned(made, exchange))

    def lacking(message: Message) -> Tensor:
        if message.source == 1 and message.label == TOTAL:
            included = message.included[1:]
            message = replace(message, included=included, digest=digest_of(message.packet, included))
        return packed(message)

    monkeypatch.setattr(slices, "packed", lacking)
    first, *_ = outcomes(crew, periods(exchange)[0])
    assert isinstance(first, PeerLost)
    assert first.peer == "p1"
    assert "claims contributions" in str(first)


@pytest.mark.parametrize(
    ("rule", "bad"),
    [
        ("diloco", torch.nan),
        ("diloco, coded", torch.inf),
        ("streaming", torch.nan),
        ("saps", torch.nan),
        ("wagma", torch.inf),
    ],
)
def test_who_brings_what_is_not_finite_is_named(rule: str, bad: float) -> None:
    """Else equal digests commit a round that moves no model, or a model of NaNs."""
    made, exchange = case("gpt2"), replace(RULES[rule], deadline_s=10.0)
    last = periods(exchange)[0]
    crew, cancel = Crew(made, assigned(made, exchange)), Cancel()
    victim, culprit, *_ = next(g for g in groups_at(exchange, (0, 1, 2), 3, SPEC.seed, 0) if len(g) > 1)
    local = crew.runs[culprit]._local
    assert local is not None
    contribute = local.contribute

    def spoiled(plan: Plan, send: Send) -> None:
        local._brought = [torch.full((sum(p.numel() for p in local._trained.values()),), bad)]
        contribute(plan, send)

    def bring() -> None:
        with suppress(Cancelled):  # in a pair it may have all that it waits for
            crew.runs[culprit].run_step(last, cancel)

    local.contribute = spoiled  # type: ignore[method-assign]
    thread = threading.Thread(target=bring)
    thread.start()
    with pytest.raises(PeerLost, match="not finite") as lost:
        crew.runs[victim].run_step(last, Cancel())
    cancel.set("seen")
    thread.join(HUNG_S)
    assert lost.value.peer == f"p{culprit}"


@pytest.mark.parametrize("rule", RULES)
def test_a_peer_whose_own_model_is_not_finite_says_so_and_brings_nothing(rule: str) -> None:
    made, exchange = case("gpt2"), replace(RULES[rule], deadline_s=0.3)
    crew = Crew(made, assigned(made, exchange))
    run, last = crew.runs[0], periods(exchange)[0]
    stage = run._stage
    with torch.no_grad():
        next(iter(stage.trained.values())).view(-1)[0] = torch.inf
    stage.apply = lambda scale: None  # type: ignore[method-assign]
    finish_step = stage.finish_step
    stage.finish_step = lambda: replace(finish_step(), finite=True)  # type: ignore[method-assign]
    report = run.run_step(last, Cancel())
    assert not report.stage.finite
    assert report.step == last
    assert not report.receipts
    assert not crew.hub.sent
