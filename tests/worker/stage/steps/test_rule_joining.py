"""Replicas that exchange gradients by a rule, over real links: the bits of the rule in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from atoll.errors import PlanError
from atoll.exchange import Exchange
from atoll.gradient_exchange import kept_name
from atoll.job import Optimizer
from strategies.exchanges.base import is_own
from tests.inprocess.replicas import LocalReplicas
from tests.parameters import each_once
from tests.worker.stage.steps.crew import TRAINING, Case, Crew, case, cut_evenly
from tests.worker.stage.steps.test_gradient_joining import assigned, exchanged, loss_of, without
from tests.worker.stage.steps.test_local_steps import Counted
from worker.cancel import Cancel, Cancelled
from worker.stage.assignment import check
from worker.stage.reports import StepReport
from worker.stage.steps.expected import step_arrivals
from worker.transport.contract import PeerLost
from worker.transport.frames import Direction

pytestmark = pytest.mark.usefixtures("one_thread")
FOUR = replace(TRAINING, steps=4, blocks=4, optimizer=Optimizer(lr=3e-3, weight_decay=0.01, clip_norm=0.5))
INT8 = Exchange("mean", codec="int8_block", bucket_bytes=4096)
RULES = {
    "int8": INT8,
    "int4, one bucket": replace(INT8, codec="int4_block", bucket_bytes=1 << 22),
    "fp16": replace(INT8, codec="fp16"),
    "powersgd": Exchange("powersgd", ratio=4.0, bucket_bytes=4096),
    "acp_sgd": Exchange("acp_sgd", ratio=4.0, bucket_bytes=4096),
    "random_k": Exchange("random_k", ratio=4.0, bucket_bytes=4096),
    "gtopk": Exchange("gtopk", ratio=4.0, bucket_bytes=4096),
    "ok_topk": Exchange("ok_topk", ratio=4.0, bucket_bytes=4096),
    "demo": Exchange("demo", ratio=4.0, bucket_bytes=4096),
    "acp_sgd, one bucket": Exchange("acp_sgd", ratio=8.0),
}
Cuts = Sequence[tuple[tuple[int, int], Sequence[int]]]


def cuts_of(made: Case, *replicas: tuple[int, int]) -> Cuts:
    """Replicas of (micro-batches, stages)."""
    found, first = [], 0
    for micros, stages in replicas:
        found.append(((first, first + micros), cut_evenly(made.dag, stages)))
        first += micros
    return found


def both(made: Case, cuts: Cuts, exchange: Exchange) -> tuple[Crew, LocalReplicas]:
    given = assigned(made, FOUR, cuts, exchange=exchange)
    reference = LocalReplicas(given[0].plan, made.dag, FOUR, made.tensors, states=made.states)
    return Crew(made, given), reference


def stepped(crew: Crew, reference: LocalReplicas, step: int) -> None:
    """Compute and apply a step on the crew and in one process: losses and norms are the same."""
    expected = reference.step(step, [crew.made.batches.of(step, micro) for micro in range(FOUR.n_micro)])
    reports = [r for r in crew.all("run_step", step, Cancel()) if isinstance(r, StepReport)]
    assert loss_of(reports) == expected.loss
    first = [run.assignment.replica == 0 for run in crew.runs]
    norms = [n for r, mine in zip(reports, first, strict=True) for n in r.stage.square_norms if mine]
    assert tuple(norms) == expected.square_norms
    crew.all("apply", step, expected.gradient_scale)


def same(crew: Crew, reference: LocalReplicas) -> None:
    """Parameters, optimizers and what the rule keeps have the same bits."""
    assert reference.rule is not None
    held = reference.snapshot()
    kept = {
        kept_name(name, number): one
        for number, of in enumerate(reference.rule.kept)
        for name, one in of.items()
    }
    seen = set()
    for run in crew.runs:
        for name, tensors in {**run._stage.snapshot(), **run.snapshot()}.items():
            seen.add(name)
            for key, value in tensors.items():
                if key != "owner":
                    nothing = torch.zeros_like(value)
                    assert torch.equal(value, {**held, **kept}[name].get(key, nothing)), (name, key)
    assert seen == held.keys() | kept.keys()


@pytest.mark.parametrize(
    ("rule", "replicas"),
    each_once(RULES, [((2, 1), (2, 1)), ((1, 2), (3, 1)), ((2, 3), (1, 2), (1, 1))]),
)
def test_replicas_end_in_the_bits_of_the_rule_in_one_process(
    replicas: tuple[tuple[int, int], ...], rule: str
) -> None:
    made = case("gpt2")
    crew, reference = both(made, cuts_of(made, *replicas), RULES[rule])
    for step in range(FOUR.steps):
        stepped(crew, reference, step)
    same(crew, reference)


def test_a_step_that_is_done_again_changes_nothing_of_what_is_kept() -> None:
    made, cuts = case("gpt2"), cuts_of(case("gpt2"), (2, 2), (2, 1))
    crew, reference = both(made, cuts, INT8)
    stepped(crew, reference, 0)
    for looks in (3, 9):  # within the step, and while it is waited for others
        with pytest.raises(Cancelled):
            crew.runs[0].run_step(1, Counted(looks))
        crew.runs[0].discard()
    crew = restarted(crew, made, cuts, 1)
    stepped(crew, reference, 1)
    for run in crew.runs:  # all of it, and then not committed
        run.discard()
    crew = restarted(crew, made, cuts, 2)
    stepped(crew, reference, 2)
    same(crew, reference)


def restarted(crew: Crew, made: Case, cuts: Cuts, step: int, exchange: Exchange = INT8) -> Crew:
    """A crew that goes on from what another would store, under these cuts."""
    stored = {key: held for run in crew.runs for key, held in run.snapshot().items()}
    given = [replace(one, first_step=step) for one in assigned(made, FOUR, cuts, exchange=exchange)]
    return Crew(made, given, tensors=[{**made.tensors, **stored}] * len(given))


@pytest.mark.parametrize(
    ("rule", "later"),
    each_once(
        ["int8", "powersgd", "acp_sgd", "random_k", "gtopk", "ok_topk", "demo"],
        [((2, 2), (2, 1)), ((3, 1), (1, 3)), ((2, 2), (1, 1), (1, 1))],
    ),
)
def test_a_restored_job_goes_on_with_what_was_left_out_under_any_cut(
    later: tuple[tuple[int, int], ...], rule: str
) -> None:
    made = case("gpt2")
    crew, before = both(made, cuts_of(made, (2, 2), (2, 1)), RULES[rule])
    for step in range(2):
        stepped(crew, before, step)
    held = before.snapshot()
    crew = restarted(crew, made, cuts_of(made, *later), 2, RULES[rule])
    plan = crew.runs[0].assignment.plan
    reference = LocalReplicas(plan, made.dag, FOUR, {**made.tensors, **held}, states=made.states)
    assert before.rule is not None
    assert reference.rule is not None
    # Who has stored nothing begins with what all keep alike, which the first has.
    first = before.rule.kept[0]
    shared = {name: {k: v for k, v in one.items() if not is_own(k)} for name, one in first.items()}
    reference.rule.kept[:] = [*before.rule.kept, shared][: len(later)]
    for step in (2, 3):
        stepped(crew, reference, step)
    same(crew, reference)


@pytest.mark.parametrize("rule", ["int8", "gtopk", "ok_topk", "demo"])
def test_replicas_that_are_left_go_on_with_what_they_kept(rule: str) -> None:
    """The last one alone exchanges nothing: what it kept is over with the exchange."""
    made = case("gpt2")
    crew, before = both(made, cuts_of(made, (1, 1), (2, 2), (1, 1)), RULES[rule])
    stepped(crew, before, 0)
    without(crew, 0, ((0, 2), (2, 4)), 1)
    plan, held = crew.runs[0].assignment.plan, before.snapshot()
    reference = LocalReplicas(plan, made.dag, FOUR, {**made.tensors, **held}, states=made.states)
    assert before.rule is not None
    assert reference.rule is not None
    reference.rule.kept[:] = before.rule.kept[1:]
    stepped(crew, reference, 1)
    same(crew, reference)
    without(crew, 1, ((0, 4),), 2)
    plan = crew.runs[0].assignment.plan
    alone = LocalReplicas(plan, made.dag, FOUR, {**made.tensors, **reference.snapshot()}, states=made.states)
    stepped(crew, alone, 2)
    assert not any(run._stage.kept.of(name) for run in crew.runs for name in made.states)


def test_the_bytes_of_an_exchange_are_a_quarter_of_exact_ones() -> None:
    made, sent = case("gpt2"), {}
    for exchange in (Exchange(), replace(INT8, bucket_bytes=1 << 22)):
        crew = Crew(made, assigned(made, FOUR, cuts_of(made, (2, 1), (2, 1)), exchange=exchange))
        crew.all("run_step", 0, Cancel())
        sent[exchange.rule] = sum(exchanged(crew).values())
    parts = 2.5 / 2.0  # of exact sums: a replica that does not begin the step sends its two blocks apart
    print(f"exact {sent['sum']} bytes, int8_block {sent['mean']}, a {sent['sum'] / sent['mean']:.2f}th")
    assert 3.8 * parts < sent["sum"] / sent["mean"] < 4.0 * parts


def test_what_is_no_message_of_the_round_is_its_senders_fault() -> None:
    made = case("gpt2")
    crew = Crew(made, assigned(made, FOUR, cuts_of(made, (2, 1), (2, 1)), exchange=INT8))
    first, second = crew.runs[0], crew.links[1]
    for arrival in step_arrivals(first.assignment, 0):
        if arrival.key.direction is Direction.PART:
            second.send("r0.0", arrival.key, torch.zeros(64, dtype=torch.uint8))
    with pytest.raises(PeerLost) as lost:
        first.run_step(0, Cancel())
    assert lost.value.peer == "r1.0"


@pytest.mark.parametrize("rule", ["int8", "gtopk", "ok_topk", "demo"])
def test_a_gradient_that_is_not_finite_is_seen_by_all(rule: str) -> None:
    made = case("gpt2")
    name = next(n for n, state in made.states.items() if state.requires_grad and len(state.meta.shape) == 2)
    broken = made.tensors[name]["value"].clone()
    broken[0, 0] = torch.nan
    tensors = [{**made.tensors, name: {"value": broken}}, made.tensors]
    given = assigned(made, FOUR, cuts_of(made, (2, 1), (2, 1)), exchange=RULES[rule])
    crew = Crew(made, given, tensors=tensors)
    reports = [r for r in crew.all("run_step", 0, Cancel()) if isinstance(r, StepReport)]
    assert [report.stage.finite for report in reports] == [False, False]


def test_a_parameter_that_nothing_reaches_is_not_stepped() -> None:
    made = case("gpt2")
    crew, _ = both(made, cuts_of(made, (2, 1), (2, 1)), INT8)
    unused = crew.runs[0].assignment.buckets[0].names[0]
    for one in crew.runs:
        parts = one._stage.parts

        def without_it(of: str, parts: Callable[[str], Mapping[int, Tensor | None]] = parts) -> object:
            return dict.fromkeys(parts(of)) if of == unused else parts(of)

        one._stage.parts = without_it  # type: ignore[method-assign, assignment]
    crew.all("run_step", 0, Cancel())
    assert all(one._stage.trained[unused].grad is None for one in crew.runs)


@pytest.mark.parametrize(
    "wrong",
    [
        replace(INT8, every=2),
        replace(INT8, quorum=0.5),
        replace(INT8, codec="topk"),
        replace(INT8, inner=Exchange(), sites=(0, 0)),
    ],
)
def test_an_exchange_that_no_worker_runs_is_refused(wrong: Exchange) -> None:
    made = case("mlp")
    given = assigned(made, FOUR, cuts_of(made, (2, 1), (2, 1)), exchange=wrong)
    with pytest.raises(PlanError):
        check(given[0], "r0.0")
