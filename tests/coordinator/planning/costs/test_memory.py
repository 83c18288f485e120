"""Terms of a stage's memory, and the planner's queries over all intervals, which agree with them."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from math import prod

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from atoll.execute import Executor
from atoll.job import Optimizer, OptimizerName, ParamGroup, Precision, TrainingSpec
from atoll.opdag import OpDag, leaf_refs
from atoll.program import stage_programs
from atoll.stage_memory import BESIDE, BESIDE_BYTES
from coordinator.capture.capture import capture
from coordinator.planning.costs.fleet import Device
from coordinator.planning.costs.memory import MemoryModel, Together
from coordinator.planning.costs.traffic import Traffic
from tests.coordinator.planning.dags import chain_dag, gpt_like
from tests.models import gpt2

NAMES = (
    "weights", "gradients", "optimizer", "activations", "boundary", "largest op", "messages",
    "optimizer temporaries",
)  # fmt: skip


def model(dag: OpDag, optimizer: Optimizer | None = None, **training: object) -> MemoryModel:
    spec = TrainingSpec(10, 4, optimizer=optimizer or Optimizer(), **training)  # type: ignore[arg-type]
    return MemoryModel(dag, spec, Traffic(dag, spec.optimizer))


@cache
def gpt2s() -> OpDag:
    example = gpt2()
    return capture(example.module, example.example_inputs).train


def intervals(dag: OpDag, seed: int, count: int = 60) -> list[tuple[int, int]]:
    draw, positions = random.Random(seed), [0, *dag.cuttable(), len(dag.ops)]
    pairs = (sorted(draw.sample(positions, 2)) for _ in range(count))
    return [(a, b) for a, b in pairs]


@pytest.mark.parametrize("training", [{}, {"blocks": 3}, {"blocks": 2, "replicas": "2"}])
@pytest.mark.parametrize(
    "optimizer",
    [
        Optimizer(),
        Optimizer(OptimizerName.SGD, momentum=0.9),
        Optimizer(OptimizerName.SGD, clip_norm=1.0),
        Optimizer(groups=(ParamGroup(("h.0.*", "p1*"), optimizer=OptimizerName.SGD),)),
    ],
)
def test_the_terms_add_up_to_what_the_planner_counts(
    optimizer: Optimizer, training: dict[str, object]
) -> None:
    for dag in (gpt_like(2), chain_dag(3, 30, skips=0.3)):
        memory = model(dag, optimizer, **training)
        for a, b in intervals(dag, seed=1):
            terms = memory.terms(a, b, 2)
            assert tuple(terms) == NAMES
            assert min(terms.values()) >= 0.0
            assert sum(terms.values()) == pytest.approx(memory.bytes(a, b, 2))


def test_several_intervals_hold_what_they_share_once_and_add_up_to_their_terms() -> None:
    for dag in (gpt_like(2), chain_dag(3, 30, skips=0.3, tied=True)):
        memory = model(dag)
        for a, b in intervals(dag, seed=1):
            one, two = Together(memory, [(a, b)]), [(2, None)]
            assert one.bytes(two) == pytest.approx(memory.bytes(a, b, 2))  # type: ignore[arg-type]
            assert one.trained() == memory.trained(a, b)
            rest = [(x, y) for x, y in ((0, a), (b, len(dag.ops))) if x < y]
            if len(rest) == 2:
                both = Together(memory, rest)
                terms = both.terms([(2, None), (1, None)])
                assert sum(terms.values()) == pytest.approx(both.bytes([(2, None), (1, None)]))
                used = {r for x, y in rest for node in dag.ops[x:y] for r in leaf_refs(node)}
                held = sum(dag.parameters[r.name].meta.nbytes for r in used if r.name in dag.parameters)
                assert terms["weights"] == held
                assert both.trained()[0] == held


def test_both_ends_of_a_tied_model_hold_the_table_once_and_send_no_sum_of_it() -> None:
    dag = gpt_like(2)
    memory, table = model(dag), dag.parameters["wte"].meta.nbytes
    uses = [op for op, node in enumerate(dag.ops) if any(r.name == "wte" for r in leaf_refs(node))]
    ends = [(0, uses[0] + 1), (uses[-1], len(dag.ops))]
    apart = [memory.terms(a, b, 1) for a, b in ends]
    both = Together(memory, ends).terms([(1, None), (1, None)])
    assert [terms["messages"] for terms in (*apart, both)] == [table, table, 0.0]
    for name in ("weights", "optimizer"):
        assert both[name] == sum(terms[name] for terms in apart) - table * (1 + (name == "optimizer"))
    assert both["gradients"] == sum(terms["gradients"] for terms in apart)  # one for each use


def test_the_last_piece_of_a_pipeline_has_one_micro_batch_and_the_others_what_is_left() -> None:
    dag = gpt_like(2)
    memory, ends = model(dag), [(0, 3), (len(dag.ops) - 4, len(dag.ops))]
    both = Together(memory, ends)
    for limit in (both.bytes([(n, None), (1, None)]) for n in (1, 2, 3)):
        caps = both.caps(limit, ends=True)
        assert caps[1] == 1
        assert both.bytes([(caps[0], None), (1, None)]) <= limit
        assert caps[0] == 4 or both.bytes([(caps[0] + 1, None), (1, None)]) > limit
    assert both.caps(both.bytes([(1, None), (1, None)]) - 1.0, ends=True) == [0, 0]
    assert both.caps(1e15, ends=True) == [4, 4]


def test_muon_keeps_four_bytes_of_a_hidden_matrix_and_eight_of_the_rest() -> None:
    dag = gpt2s()
    memory, adamws = model(dag, Optimizer(OptimizerName.MUON)), model(dag)
    hidden, others = (
        sum(s.meta.nbytes for s in dag.parameters.values() if s.hidden_matrix is wanted)
        for wanted in (True, False)
    )
    assert memory.terms(0, len(dag.ops), 1)["optimizer"] == hidden + 2 * others
    assert adamws.terms(0, len(dag.ops), 1)["optimizer"] == 2 * (hidden + others)
    shapes = [s.meta.shape for s in dag.parameters.values() if s.hidden_matrix]
    largest = max(8 * (m * n + min(m, n) ** 2) for m, n in shapes)  # two of it and of its square, float32
    assert memory.update_bytes(0, len(dag.ops)) == largest > adamws.update_bytes(0, len(dag.ops))
    for a, b in intervals(dag, seed=2):
        terms = memory.terms(a, b, 2)
        assert sum(terms.values()) == pytest.approx(memory.bytes(a, b, 2))
        assert min(terms.values()) >= 0.0
        rest = [(x, y) for x, y in ((0, a), (b, len(dag.ops))) if x < y]
        held = {
            leaf.name for x, y in rest for node in dag.ops[x:y] for leaf in leaf_refs(node)
        } & dag.parameters.keys()
        states = [dag.parameters[name] for name in held]
        wanted = sum(s.meta.nbytes * (1 if s.hidden_matrix else 2) for s in states)
        if len(rest) == 2:  # the tied table counts once
            assert Together(memory, rest).stepped()[0] == wanted


@pytest.mark.parametrize("name", [OptimizerName.ADAFACTOR, OptimizerName.LION])
def test_adafactor_keeps_a_row_and_a_column_of_a_matrix_and_lion_one_average(name: OptimizerName) -> None:
    dag = gpt2s()
    memory = model(dag, Optimizer(name))
    shapes = [state.meta.shape for state in dag.parameters.values()]
    factored = sum(sum(s) if len(s) == 2 else s[0] for s in shapes)
    wanted = 4 * (factored if name is OptimizerName.ADAFACTOR else sum(map(prod, shapes)))
    assert memory.terms(0, len(dag.ops), 1)["optimizer"] == wanted
    assert memory.update_bytes(0, len(dag.ops)) >= 4 * max(map(prod, shapes))


def test_the_terms_of_the_state_are_those_of_its_parameters() -> None:
    dag = gpt_like(2)
    memory = model(dag)
    weights = sum(meta.meta.nbytes for meta in dag.parameters.values())
    tied = dag.parameters["wte"].meta.nbytes
    terms = memory.terms(0, len(dag.ops), 1)
    assert terms["optimizer"] == 2 * weights
    assert terms["gradients"] == weights + tied  # one for each use
    assert terms["weights"] == weights


def test_the_largest_op_makes_a_gradient_of_its_whole_table() -> None:
    dag = gpt_like(2)
    table = dag.parameters["wte"].meta.nbytes
    embedding = next(op for op, node in enumerate(dag.ops) if any(r.name == "wte" for r in leaf_refs(node)))
    precisions = (Precision.FP32, Precision.BF16)
    found = [model(dag, precision=p).terms(embedding, embedding + 1, 1)["largest op"] for p in precisions]
    assert found[0] == table + dag.ops[embedding].outputs[0].nbytes
    assert found[1] - found[0] == table / 2


def test_a_sum_travels_of_a_parameter_that_is_trained_inside_and_outside_alone() -> None:
    dag = gpt_like(2)
    memory, end = model(dag), len(dag.ops)
    table = dag.parameters["wte"].meta.nbytes
    middle = dag.cuttable()[len(dag.cuttable()) // 2]
    assert [memory.terms(a, b, 1)["messages"] for a, b in ((0, middle), (middle, end), (0, end))] == [
        table, table, 0.0,
    ]  # fmt: skip
    first = dag.cuttable()[1]
    assert memory.terms(first, middle, 1)["messages"] == 0.0  # neither use is there


def test_a_stage_holds_no_less_for_more_ops_boundaries_and_sums_that_travel_aside() -> None:
    dag = gpt_like(3)
    memory = model(dag)
    positions = [0, *dag.cuttable(), len(dag.ops)]

    def bare(a: int, b: int) -> float:
        terms = memory.terms(a, b, 1)
        return sum(terms[name] for name in ("weights", "gradients", "optimizer", "largest op"))

    for a in positions[:-1:5]:
        sizes = [bare(a, b) for b in positions if b > a]
        assert sizes == sorted(sizes)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_all_queries_of_intervals_agree(clip_norm: float | None) -> None:
    """The table is exact; how far a stage may reach errs on the safe side; the cap is the most that fits."""
    for dag in (gpt_like(2), chain_dag(7, 40, skips=0.3)):
        memory = model(dag, Optimizer(clip_norm=clip_norm))
        positions = np.array([0, *dag.cuttable(), len(dag.ops)])
        table = memory.matrix(positions, 2)
        draw = random.Random(5)
        whole = memory.bytes(0, len(dag.ops), 2)
        for share in (0.2, 0.4, 0.7, 1.5):
            far = memory.farthest(positions, share * whole, 2)
            for at in range(len(positions) - 1):
                for stop in range(at + 1, int(far[at]) + 1):
                    assert table[at, stop] <= share * whole
        for _ in range(200):
            a, b = sorted(draw.sample(range(len(positions)), 2))
            start, stop = int(positions[a]), int(positions[b])
            assert table[a, b] == pytest.approx(memory.bytes(start, stop, 2))
            limit = draw.uniform(0.5, 2.0) * memory.bytes(start, stop, 1)
            cap = memory.in_flight_cap(start, stop, limit)
            assert cap == 0 or memory.bytes(start, stop, cap) <= limit * (1 + 1e-12)
            assert cap == memory.n_micro or memory.bytes(start, stop, cap + 1) > limit


def test_what_a_worker_takes_beside_a_model_is_not_the_models_to_use() -> None:
    described = Device("w", 400 << 20)
    real = replace(described, beside=BESIDE, heap_share=0.25, memory_scale=1.25)
    assert described.model_limit_bytes == 400 << 20
    assert real.model_limit_bytes == ((400 << 20) / 1.25 - BESIDE_BYTES) / 1.25
    assert replace(real, memory_limit_bytes=1 << 20).model_limit_bytes == 0.0


def test_micro_batches_that_wait_for_their_weight_gradients_keep_what_these_need_alone() -> None:
    dag = gpt_like(2)
    n = len(dag.ops)
    plain, under_autocast = model(dag), model(dag, precision=Precision.BF16)
    kept, waiting = plain.bytes(0, n, 1), plain.bytes(0, n, 3, 1) - plain.bytes(0, n, 1, 1)
    assert 0.0 < waiting < 2 * plain.per_micro_bytes(0, n)
    assert kept <= plain.bytes(0, n, 1, 1) <= plain.bytes(0, n, 3, 1) <= plain.bytes(0, n, 3, 3)
    assert plain.bytes(0, n, 3, 3) == plain.bytes(0, n, 3, 5)
    assert under_autocast.bytes(0, n, 3) < under_autocast.bytes(0, n, 3, 3)
    assert under_autocast.bytes(0, n, 3, 1) < under_autocast.bytes(0, n, 3, 3)
    assert sum(plain.terms(0, n, 3, 1).values()) == pytest.approx(plain.bytes(0, n, 3, 1))


def test_a_frozen_base_in_bf16_takes_two_bytes_a_weight_and_neither_gradient_nor_moments() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16).requires_grad_(False)
            self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return (self.base(x.bfloat16()).float() + self.up(self.down(x))).square().mean()

    found = capture(Adapted(), {"x": torch.ones(4, 64)}).train
    assert found.parameters["base.weight"].meta.dtype == "bfloat16"
    terms = model(found).terms(0, len(found.ops), 1)
    adapter = 2 * 4 * 64 * 4
    assert terms["weights"] == 2 * 64 * 64 + adapter
    assert terms["gradients"] == adapter
    assert terms["optimizer"] == 2 * adapter

    executor = Executor(stage_programs(found, [0])[0])
    state = {name: tensor.detach() for name, tensor in Adapted().state_dict().items()}
    executor.load(state, frozen=["base.weight"])
    executor.forward(0, 0, {"x": torch.ones(4, 64)}, {})
    executor.backward(0, {})
    assert executor.gradient("base.weight") is None
    assert executor.gradient("up.weight") is not None
    assert set(executor.uses) == {"down.weight", "up.weight"}


def test_a_rule_that_sends_positions_holds_more_the_more_it_sends() -> None:
    """Peaks of two ranks were 3.8 copies beside the gradients at a ratio of 100, 5.5 at 4 (decision 070)."""
    dag = gpt_like(2)

    def beside(how: str) -> float:
        exact, own = (
            model(dag, replicas="2", blocks=2, exchange=exchange).state_bytes(0, len(dag.ops))
            for exchange in ("exact", how)
        )
        return own - exact

    copy = beside("mean:int8_block") / 3
    assert beside("gtopk:100") == pytest.approx(2.09 * copy)
    assert beside("ok_topk:4") == pytest.approx(4.25 * copy)
