"""What one side writes the other reads, and no bytes make the reader do worse than refuse."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.dataset_spec import DataField, DataSpec, Layout
from atoll.errors import AtollError, BadFrame, UsageError
from atoll.exchange import Exchange, PairTable
from atoll.job import (
    MAX_STANDBYS,
    Activations,
    JobSpec,
    Keeping,
    Optimizer,
    OptimizerName,
    ParamGroup,
    Precision,
    Recompute,
    Schedule,
    ScheduleKind,
    TrainingSpec,
)
from atoll.microbatch import ScheduleName
from atoll.opdag import (
    DTYPE_BYTES,
    Arg,
    Autocast,
    Kind,
    LeafRef,
    OpDag,
    OpNode,
    OpRef,
    Source,
    StateMeta,
    TensorMeta,
    TorchLiteral,
)
from atoll.plan import (
    LinkPrediction,
    LinkSpec,
    Plan,
    Prediction,
    Replica,
    StagePrediction,
    StageSpec,
    one_replica,
)
from atoll.program import StageProgram, stage_programs
from protos import atoll_job_pb2 as pb
from protos.convert import (
    content_hash,
    dag_bytes,
    dag_from_bytes,
    decode,
    encode,
    from_proto,
    to_proto,
)

NAMES = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1, max_size=6)
HASHES = st.binary(max_size=4).map(content_hash)
SMALL = st.integers(0, 2**40)
NUMBERS = st.floats(0, 1e6, allow_nan=False)
METAS = st.builds(
    TensorMeta,
    st.lists(st.integers(0, 64), max_size=4).map(tuple),
    st.sampled_from(sorted(DTYPE_BYTES)),
)
STATES = st.builds(StateMeta, METAS, st.booleans(), st.booleans())


def args(n_before: int, leaves: list[LeafRef]) -> st.SearchStrategy[Arg]:
    plain: list[st.SearchStrategy[Arg]] = [
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False),
        st.booleans(),
        st.text(max_size=8),
        st.none(),
        st.builds(TorchLiteral, st.sampled_from(["dtype", "device"]), NAMES),
    ]
    if n_before:
        plain.append(st.integers(0, n_before - 1).map(OpRef))
    if leaves:
        plain.append(st.sampled_from(leaves))
    return st.recursive(st.one_of(plain), lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)


@st.composite
def nodes(draw: st.DrawFn, position: int, leaves: list[LeafRef]) -> OpNode:
    return OpNode(
        name=f"op{position}",
        kind=draw(st.sampled_from(Kind)),
        target=draw(NAMES),
        args=draw(st.lists(args(position, leaves), max_size=3).map(tuple)),
        kwargs=draw(st.lists(st.tuples(NAMES, args(position, leaves)), max_size=2).map(tuple)),
        outputs=draw(st.lists(METAS, min_size=1, max_size=2).map(tuple)),
        is_tuple=draw(st.booleans()),
        requires_grad=draw(st.booleans()),
        grad_enabled=draw(st.booleans()),
        autocast=draw(st.none() | st.builds(Autocast, st.booleans(), st.sampled_from(["bfloat16"]))),
        random=draw(st.booleans()),
        flops_forward=draw(SMALL),
        flops_backward=draw(SMALL),
        bytes_moved=draw(SMALL),
        bytes_saved=draw(SMALL),
        module_path=draw(NAMES),
        source_line=draw(NAMES),
    )


@st.composite
def dags(draw: st.DrawFn) -> OpDag:
    inputs = draw(st.dictionaries(NAMES, METAS, min_size=1, max_size=2))
    parameters = draw(st.dictionaries(NAMES, STATES, min_size=1, max_size=3))
    buffers = draw(st.dictionaries(NAMES, STATES, max_size=2))
    constants = draw(st.dictionaries(NAMES, METAS, max_size=2))
    leaves = [
        LeafRef(source, name)
        for source, names in (
            (Source.INPUT, inputs),
            (Source.PARAMETER, parameters),
            (Source.BUFFER, buffers),
            (Source.CONSTANT, constants),
        )
        for name in names
    ]
    n_ops = draw(st.integers(1, 6))
    ops = tuple(draw(nodes(position, leaves)) for position in range(n_ops))
    return OpDag(
        ops=ops,
        inputs=inputs,
        parameters=parameters,
        buffers=buffers,
        constants=constants,
        loss=n_ops - 1,
        unsplittable=((0, n_ops),) if draw(st.booleans()) else (),
        constant_ops=frozenset({0}) if draw(st.booleans()) else frozenset(),
        aliases={"alias": draw(st.sampled_from(sorted(parameters)))} if draw(st.booleans()) else {},
        training=draw(st.booleans()),
    )


GROUPS = st.builds(
    ParamGroup,
    st.lists(NAMES, max_size=2).map(tuple),
    NUMBERS,
    st.none() | NUMBERS,
    st.booleans(),
    st.none() | st.sampled_from(OptimizerName),
)
OPTIMIZERS = st.builds(
    Optimizer,
    name=st.sampled_from(OptimizerName),
    lr=NUMBERS,
    weight_decay=NUMBERS,
    betas=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    eps=NUMBERS,
    momentum=NUMBERS,
    nesterov=st.booleans(),
    groups=st.lists(GROUPS, max_size=2).map(tuple),
    clip_norm=st.none() | NUMBERS,
)
TRAININGS = st.builds(
    TrainingSpec,
    steps=st.integers(1, 10**9),
    n_micro=st.integers(8, 4096),
    blocks=st.integers(1, 8),
    average_buffers=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    optimizer=OPTIMIZERS,
    schedule=st.builds(Schedule, st.sampled_from(ScheduleKind), st.integers(0, 1000), NUMBERS),
    precision=st.sampled_from(Precision),
    recompute=st.sampled_from(Recompute),
    activations=st.sampled_from(Activations),
    eval_every=st.integers(0, 100),
    eval_batches=st.integers(0, 100),
    checkpoint_every=st.integers(0, 100),
)
FIELDS = st.builds(
    DataField, NAMES, HASHES, st.sampled_from(Layout), st.integers(1, 64), st.integers(0, 64), SMALL
)
DATA = st.builds(
    DataSpec,
    st.lists(FIELDS, max_size=3).map(tuple),
    st.integers(1, 10**9),
    st.integers(1, 512),
    st.none() | st.integers(0, 2**64 - 1),
)
JOBS = st.builds(
    JobSpec,
    name=NAMES,
    training=TRAININGS,
    dag_hash=HASHES,
    eval_dag_hash=HASHES,
    tensors=st.dictionaries(NAMES, HASHES, max_size=3),
    data=DATA,
    eval_data=st.none() | DATA,
    partitioner=NAMES,
    schedule=NAMES,
    resume_of=NAMES,
    standbys=st.none() | st.integers(0, MAX_STANDBYS),
)
KEPT = Keeping(Recompute.FULL, Activations.INT4)
PAIR = (StageSpec(0, 2, 0, 1, "w1", 3), StageSpec(2, 5, 1, 4, "w2", 1, 4, keeping=KEPT))
LINK = (LinkSpec(0, 1, "topk", 4.0),)
ONE_AND_TWO = (Replica((0, 2), (StageSpec(0, 5, 0, 4, "w3", 0),)), Replica((2, 8), PAIR, LINK))
NESTED = Exchange("diloco", 50, "int8", 4.0, 2, 1, 0.5, 3.0, Exchange(), sites=(0, 1, 1))
GOSSIP = Exchange("saps", ratio=50.0, pairs=PairTable((0.0, 2.5, 1.5, 0.0), 2.0))
PLANS = st.builds(
    Plan,
    job=NAMES,
    version=st.integers(0, 2**32 - 1),
    dag_hash=HASHES,
    eval_dag_hash=HASHES | st.just(""),
    partitioner=NAMES,
    schedule=st.sampled_from(ScheduleName),
    n_micro=st.just(8),
    replicas=st.sampled_from([one_replica(8, PAIR, LINK), ONE_AND_TWO]),
    blocks=st.integers(1, 8),
    exchange=st.sampled_from([None, Exchange(), NESTED, GOSSIP]),
    left_out=st.lists(st.tuples(NAMES, NAMES), max_size=2).map(tuple),
    prediction=st.none()
    | st.builds(
        Prediction,
        step_s=NUMBERS,
        lower_bound_s=NUMBERS,
        bottleneck=NAMES,
        reason=NAMES,
        stages=st.just((StagePrediction("w1", 0.1, 0.5, 10, 20),)),
        links=st.just((LinkPrediction("w1", "w2", 100, 0.1),)),
        commit_s=NUMBERS,
        single_machine_s=st.none() | NUMBERS,
        single_machine=NAMES,
        notes=st.lists(NAMES, max_size=2).map(tuple),
    ),
)


@settings(max_examples=60, deadline=None)
@given(dags())
def test_a_dag_comes_back_equal_and_serialises_to_the_same_bytes(dag: OpDag) -> None:
    data = dag_bytes(dag)
    back = dag_from_bytes(data)
    assert repr(back.ops) == repr(dag.ops)  # repr tells True from 1 and 0.0 from -0.0
    assert back == dag
    assert dag_bytes(back) == data
    assert content_hash(data) == content_hash(dag_bytes(back))


@pytest.mark.parametrize("keeping", [Keeping(Recompute.AUTO), Keeping(activations=Activations.AUTO)])
def test_a_plan_says_what_each_stage_keeps(keeping: Keeping) -> None:
    only = one_replica(4, (StageSpec(0, 2, 0, 0, "w1", 3, keeping=keeping),))
    plan = Plan("job", 1, content_hash(b""), "", "even", ScheduleName.GPIPE, 4, only)
    with pytest.raises(BadFrame, match="leaves open"):
        from_proto(to_proto(plan))


def two_replicas() -> pb.Plan:
    plan = Plan("job", 1, "", "", "even", ScheduleName.GPIPE, 8, ONE_AND_TWO, exchange=NESTED)
    return to_proto(plan)


def test_a_plan_of_one_pipeline_travels_in_the_form_of_journals_without_replicas() -> None:
    message = to_proto(Plan("job", 1, "", "", "even", ScheduleName.GPIPE, 8, one_replica(8, PAIR, LINK)))
    assert [stage.workers for stage in message.stages] == [["w1"], ["w2"]]
    assert (len(message.links), len(message.replicas)) == (1, 0)
    message.ClearField("blocks")
    assert from_proto(message).blocks == 1


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda m: m.stages.add().CopyFrom(m.replicas[0].stages[0]), "2 replicas in the form of another"),
        (lambda m: m.replicas.pop(), "1 replicas in the form of another"),
        (lambda m: m.replicas[0].stages[0].workers.append("w9"), "a stage with 2 workers"),
        (lambda m: m.replicas[0].stages[0].ClearField("workers"), "a stage with 0 workers"),
        (lambda m: setattr(m.replicas[1], "stop", 9), "stop of a replica"),
        (lambda m: setattr(m.replicas[1], "start", 8), "start of a replica"),
        (lambda m: setattr(m, "blocks", 9), "blocks"),
        (lambda m: setattr(m.exchange, "every", 0), "Exchange.every = 0"),
        (lambda m: setattr(m.exchange, "quorum", float("nan")), "quorum"),
        (
            lambda m: m.exchange.inner.inner.CopyFrom(two_replicas().exchange.inner),
            "within the inner exchange",
        ),
    ],
)
def test_a_plan_with_replicas_that_cannot_be_is_refused(spoil: Any, why: str) -> None:
    message = two_replicas()
    from_proto(message)
    spoil(message)
    with pytest.raises(BadFrame, match=why):
        from_proto(message)


@settings(max_examples=60, deadline=None)
@given(TRAININGS, DATA, JOBS, PLANS, METAS)
def test_declarations_come_back_equal(
    training: TrainingSpec, data: DataSpec, job: JobSpec, plan: Plan, meta: TensorMeta
) -> None:
    for value in (training, data, job, meta):
        assert from_proto(to_proto(value)) == value  # type: ignore[call-overload]
    back = from_proto(to_proto(plan))
    assert (back, back.prediction) == (plan, plan.prediction)
    assert decode(Plan, encode(plan)) == plan
    assert decode(JobSpec, encode(job)) == job


def chain(n_ops: int, tied: bool = False) -> OpDag:
    meta = TensorMeta((4, 8), "float32")
    x = LeafRef(Source.INPUT, "x")
    ops = [
        OpNode(
            name=f"linear{i}",
            kind=Kind.PARAMETRIC,
            target="aten.linear.default",
            args=(OpRef(i - 1) if i else x, LeafRef(Source.PARAMETER, "w0" if tied else f"w{i}")),
            kwargs=(),
            outputs=(meta,),
            requires_grad=True,
        )
        for i in range(n_ops)
    ]
    return OpDag(
        ops=tuple(ops),
        inputs={"x": meta},
        parameters={f"w{i}": StateMeta(TensorMeta((8, 8), "float32"), True) for i in range(n_ops)},
        buffers={},
        constants={},
        loss=n_ops - 1,
    )


@pytest.mark.parametrize("tied", [False, True])
def test_every_stage_program_comes_back_equal(tied: bool) -> None:
    for program in stage_programs(chain(7, tied), [0, 2, 5]):
        assert from_proto(to_proto(program)) == program


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_mutated_bytes_of_a_dag_give_a_dag_or_our_error(data: st.DataObject) -> None:
    whole = dag_bytes(data.draw(dags()))
    for _ in range(5):  # to draw a graph takes longer than all of them
        raw = bytearray(whole)
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(raw) - 1))
            raw[at] = data.draw(st.integers(0, 255))
        if data.draw(st.booleans()):
            raw = raw[: data.draw(st.integers(0, len(raw)))]
        with contextlib.suppress(AtollError):
            dag_from_bytes(bytes(raw))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([Plan, StageProgram, JobSpec, TrainingSpec]))
def test_arbitrary_bytes_never_raise_anything_but_our_errors(raw: bytes, kind: type) -> None:
    with contextlib.suppress(AtollError):
        decode(kind, raw)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_mutated_stage_programs_are_read_or_refused(data: st.DataObject) -> None:
    program = stage_programs(chain(7, tied=True), [0, 2, 5])[1]
    raw = bytearray(to_proto(program).SerializeToString())
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(AtollError):
        decode(StageProgram, bytes(raw))


def test_an_argument_nested_too_deep_is_refused() -> None:
    arg: Arg = 1
    for _ in range(9):
        arg = (arg,)
    node = OpNode("a", Kind.NON_PARAMETRIC, "t", (arg,), (), (TensorMeta((), "float32"),))
    with pytest.raises(BadFrame, match="deeper than 8"):
        from_proto(to_proto(node))


def test_a_reference_to_a_later_op_is_refused() -> None:
    message = to_proto(chain(3))
    message.ops[1].args[0].op = 2
    with pytest.raises(BadFrame, match="does not come before"):
        from_proto(message)


def test_a_tensor_larger_than_the_bound_is_refused_with_its_size() -> None:
    meta = TensorMeta((2**17, 2**18), "float32")
    with pytest.raises(BadFrame, match="137438953472 bytes > 68719476736"):
        from_proto(to_proto(meta))


def test_a_zero_extent_does_not_hide_an_absurd_one() -> None:
    with pytest.raises(BadFrame, match="shape"):
        from_proto(pb.TensorMeta(shape=[0, 2**63], dtype="float32"))


def test_an_integer_beyond_64_bits_is_refused_before_it_travels() -> None:
    with pytest.raises(UsageError, match="64 bits"):
        to_proto(OpNode("a", Kind.LOSS, "t", (2**63,), (), ()))


def test_a_learning_rate_that_is_not_finite_is_refused() -> None:
    message = to_proto(TrainingSpec(steps=1, n_micro=1))
    message.optimizer.lr = math.nan
    with pytest.raises(BadFrame, match="lr = nan"):
        from_proto(message)


def test_a_stage_program_that_reads_what_it_was_not_given_is_refused() -> None:
    message = to_proto(stage_programs(chain(4), [0, 2])[1])
    del message.received[:]
    with pytest.raises(BadFrame, match="neither computed before nor received"):
        from_proto(message)
