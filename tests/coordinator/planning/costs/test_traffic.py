import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.job import Optimizer, OptimizerName, ParamGroup, TrainingSpec
from atoll.program import stage_programs
from coordinator.planning.costs.memory import MemoryModel, gradient_copies
from coordinator.planning.costs.traffic import Traffic
from tests.coordinator.planning.dags import chain_dag, gpt_like


def crossing_by_programs(dag, starts):
    """Forward and backward bytes by stage pair, as the workers' own programs have them."""
    forward, backward = {}, {}
    for program in stage_programs(dag, starts):
        for value in program.received:
            n_bytes = dag.ops[value.op].outputs[0].nbytes
            key = (value.source, program.stage)
            forward[key] = forward.get(key, 0) + n_bytes
            if value.requires_grad:
                key = (program.stage, value.grad_to)
                backward[key] = backward.get(key, 0) + n_bytes
    return forward, backward


@settings(max_examples=80, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), stages=st.integers(1, 6))
def test_a_cut_sends_what_the_stage_programs_send(seed, stages):
    dag = chain_dag(seed, 40, skips=0.4, tied=True)
    starts = (0, *sorted(random.Random(seed).sample(range(1, 40), stages - 1)))
    cut = Traffic(dag, Optimizer()).cut(starts)
    forward, backward = crossing_by_programs(dag, starts)
    assert {(h.source, h.target): h.n_bytes for h in cut.forward} == forward
    assert {(h.source, h.target): h.n_bytes for h in cut.backward} == backward
    tied = {t.name: t.holders for p in stage_programs(dag, starts) for t in p.tied}
    assert {t.name: t.holders for t in cut.tied} == tied


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), stages=st.integers(2, 6))
def test_the_loads_of_a_cut_are_its_hops_tensor_by_tensor(seed, stages):
    dag = chain_dag(seed, 40, skips=0.4)
    starts = (0, *sorted(random.Random(seed).sample(range(1, 40), stages - 1)))
    traffic = Traffic(dag, Optimizer())
    cut = traffic.cut(starts)
    hops = {(h.source, h.target): (h.n_bytes, h.messages) for h in (*cut.forward, *cut.backward)}
    loads = traffic.loads(starts)
    assert {(x.source, x.target): (x.n_bytes, len(x.tensors)) for x in loads} == hops
    direct = {(x.source, x.target): sum(t.direct for t in x.tensors) for x in loads}
    once = {}
    for program in stage_programs(dag, starts):
        for value in program.produced:
            if len(value.targets) == 1:
                for pair in ((program.stage, value.targets[0]), (value.targets[0], program.stage)):
                    once[pair] = once.get(pair, 0) + 1
    assert {pair: n for pair, n in direct.items() if n} == once


def test_live_bytes_count_every_skip_over_a_position():
    dag = chain_dag(5, 30, skips=0.5)
    traffic = Traffic(dag, Optimizer())
    for position in range(1, 30):
        cut = traffic.cut((0, position))
        assert sum(h.n_bytes for h in cut.forward) == traffic.live_bytes[position]


def test_a_frozen_tied_parameter_is_not_exchanged():
    dag = gpt_like(2)
    frozen = Optimizer(groups=(ParamGroup(("wte",), frozen=True),))
    assert Traffic(dag, frozen).cut((0, 10)).tied == ()
    assert len(Traffic(dag, Optimizer()).cut((0, 10)).tied) == 1


def test_a_tied_parameter_sends_a_sum_of_each_block_down_and_one_total_up():
    (tied,) = Traffic(gpt_like(2), Optimizer(), blocks=3).cut((0, 10)).tied
    assert (tied.sums(1, 0), tied.sums(0, 1), tied.sums(1, 1)) == (3, 1, 0)


def model(dag, n_micro=4, blocks=1, **optimizer):
    training = TrainingSpec(10, n_micro, blocks=blocks, optimizer=Optimizer(**optimizer))
    return MemoryModel(dag, training, Traffic(dag, training.optimizer))


def test_adamw_holds_four_copies_of_a_parameter_and_sgd_two():
    dag = chain_dag(1, 20, skips=0.0)
    weights = sum(p.meta.nbytes for p in dag.parameters.values())
    assert model(dag, name=OptimizerName.ADAMW).state_bytes(0, 20) == 4 * weights
    assert model(dag, name=OptimizerName.SGD).state_bytes(0, 20) == 2 * weights
    assert model(dag, name=OptimizerName.SGD, momentum=0.9).state_bytes(0, 20) == 3 * weights


def test_what_more_blocks_and_other_replicas_take_follows_from_the_gradients_alone():
    dag = gpt_like(2)
    one, several = model(dag), model(dag, blocks=3)
    shared = TrainingSpec(10, 4, blocks=3, replicas="2")
    joined = MemoryModel(dag, shared, Traffic(dag, shared.optimizer))
    for a, b in ((0, len(dag.ops)), (0, 10), (10, len(dag.ops))):
        once, tied = several.gradients(a, b)
        assert min(once, tied) > 0
        more = several.state_bytes(a, b) - one.state_bytes(a, b)
        assert gradient_copies(once, tied, 3, alone=True) == more
        more = joined.state_bytes(a, b) - one.state_bytes(a, b)
        assert gradient_copies(once, tied, 3, alone=False) == more


def test_a_tied_parameter_is_held_once_with_a_gradient_for_each_use():
    dag = gpt_like(1)
    memory = model(dag)
    tied = dag.parameters["wte"].meta.nbytes
    others = sum(p.meta.nbytes for name, p in dag.parameters.items() if name != "wte")
    assert memory.state_bytes(0, len(dag.ops)) == 4 * others + 5 * tied


def test_blocks_hold_the_sum_so_far_and_each_one_of_a_tied_parameter():
    dag = gpt_like(1)
    tied = dag.parameters["wte"].meta.nbytes
    others = sum(p.meta.nbytes for name, p in dag.parameters.items() if name != "wte")
    one, four = (model(dag, blocks=n).state_bytes(0, len(dag.ops)) for n in (1, 4))
    assert four - one == others + 2 * 3 * tied


def test_the_matrix_of_all_intervals_agrees_with_each_interval():
    dag = gpt_like(2)
    memory = model(dag)
    positions = np.array([0, *dag.cuttable(), len(dag.ops)])
    table = memory.matrix(positions, 3)
    draw = random.Random(2)
    for _ in range(300):
        a, b = sorted(draw.sample(range(len(positions)), 2))
        assert table[a, b] == pytest.approx(memory.bytes(int(positions[a]), int(positions[b]), 3))


def test_the_cap_is_the_most_that_fits():
    memory = model(chain_dag(3, 20), n_micro=64)
    fixed, each = memory.fixed_bytes(4, 12), memory.per_micro_bytes(4, 12)
    assert memory.in_flight_cap(4, 12, fixed + 2.5 * each) == 2
    assert memory.in_flight_cap(4, 12, fixed + 0.5 * each) == 0
    assert memory.in_flight_cap(4, 12, float("inf")) == 64
