"""One message of each kind that travels, every field of it set, and one with as little as there may be.

``written()`` makes them with the product's own writers; ``recorded.json`` holds what those of an earlier
commit made of the same values.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from atoll.dataset_spec import DataField, DataSpec, Layout
from atoll.exchange import Exchange, PairTable
from atoll.federated import Federated, FederatedSpec
from atoll.job import (
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
    Mask,
    Outlook,
    Plan,
    Prediction,
    Replica,
    StagePrediction,
    StageSpec,
    one_replica,
)
from atoll.program import PiecePrograms, Produced, Received, StageProgram, TiedParameter

if TYPE_CHECKING:
    from google.protobuf.message import Message

FRAMES = Path(__file__).with_name("recorded.json")
HASH, OTHER, THIRD = "a" * 64, "b" * 64, "c" * 64
META = TensorMeta((4, 8), "float32")
ARGS: tuple[Arg, ...] = (
    LeafRef(Source.PARAMETER, "w"),
    TorchLiteral("dtype", "float32"),
    -7,
    0.25,
    True,
    "mean",
    None,
    (1, (2, "x"), ()),
)
NODE = OpNode(
    "linear",
    Kind.PARAMETRIC,
    "aten.linear.default",
    ARGS,
    (("bias", None), ("p", 0.5)),
    (META, META),
    True,
    True,
    True,
    Autocast(True, "bfloat16"),
    True,
    11,
    12,
    13,
    15,
    14,
    "transformer.h.0",
    "model.py:41",
)
LAST = replace(NODE, name="loss", kind=Kind.LOSS, args=(OpRef(0),), outputs=(TensorMeta((), "float32"),))
LAST = replace(LAST, is_tuple=False, autocast=None)


def dag(rows: int = 4, *, training: bool = False, tail: OpDag | None = None) -> OpDag:
    """Two ops with one leaf of each kind."""
    x = TensorMeta((rows, 8), "int64")
    node = replace(NODE, outputs=(TensorMeta((rows, 8), "float32"), META))
    return OpDag(
        ops=(node, LAST),
        inputs={"x": x, "ids": x},
        parameters={"w": StateMeta(META, True), "frozen": StateMeta(META)},
        buffers={"mean": StateMeta(META, False, True)},
        constants={"mask": META},
        loss=1,
        unsplittable=((0, 2),),
        constant_ops=frozenset({0}),
        aliases={"head.w": "w", "a": "mask"},
        training=training,
        metrics={} if training else {"accuracy": 1},
        weight=1,
        tail=tail,
    )


def program(rows: int = 4, tail: StageProgram | None = None) -> StageProgram:
    """The third of four stages."""
    return StageProgram(
        stage=2,
        n_stages=4,
        ops=((3, replace(NODE, args=(OpRef(2), *ARGS))), (5, LAST)),
        constant_ops=frozenset({5, 3}),
        received=(Received(0, 0, True, 3, 1, META), Received(2, 1, False, None, 1, META)),
        produced=(Produced(3, (3,), True, 3),),
        inputs=("x",),
        parameters=("w",),
        buffers=("mean",),
        constants=("mask",),
        tied=(TiedParameter("w", (0, 2), 4),),
        loss=5,
        metrics=(("accuracy", 5),),
        weight=5,
        rows=rows,
        tail=tail,
    )


LINK = LinkSpec(1, 0, "topk", 8.0, Mask.SAME, "the slowest link")
TRAINING = TrainingSpec(
    steps=1000,
    n_micro=8,
    seed=2**64 - 1,
    optimizer=Optimizer(
        OptimizerName.SGD,
        0.1,
        0.01,
        (0.8, 0.95),
        1e-7,
        0.9,
        True,
        (ParamGroup(("*.bias", "norm*"), 2.0, 0.5, True), ParamGroup(("w",))),
        1.5,
    ),
    schedule=Schedule(ScheduleKind.COSINE, 10, 0.2),
    precision=Precision.BF16,
    recompute=Recompute.FULL,
    activations=Activations.INT8,
    eval_every=10,
    eval_batches=3,
    checkpoint_every=50,
    compress="auto:8",
    blocks=2,
    average_buffers=True,
    replicas="2",
    exchange="diloco",
    local_steps=5,
    spot_checks=0.25,
)
DATA = DataSpec(
    (DataField("x", HASH, Layout.WINDOWS, 16, 8, 1), DataField("y", OTHER, Layout.ROWS)), 99, 4, 2**63
)
FEDERATED = FederatedSpec(
    Federated(
        "fedavgm",
        {"momentum": 0.5, "nesterov": True, "rounds": -3, "mode": "x"},
        2,
        30,
        10,
        3,
        60.0,
        4,
        0.2,
        "bandwidth_aware",
        {"share": 0.5},
        "topk:16",
        False,
        "delta",
        500,
        ("head.*", "norm"),
        3600.0,
    ),
    "digits",
    {"labels": "label", "images": "image"},
)
JOB = JobSpec(
    "gpt",
    TRAINING,
    HASH,
    OTHER,
    {"w": HASH, "mask": OTHER},
    DATA,
    replace(DATA, shuffle_seed=None),
    "even",
    "gpipe",
    "job-7",
    ("mask", "a"),
    None,
    "ann",
    3,
)
STAGES = (
    StageSpec(0, 2, 0, 1, "w1", 3, 2),
    StageSpec(2, 5, 1, 4, "w2", 1, 4, keeping=Keeping(Recompute.SELECTIVE, Activations.INT4)),
)
PREDICTION = Prediction(
    2.5,
    1.5,
    "link w1>w2",
    "slow",
    (StagePrediction("w1", 0.1, 0.5, 10, 20, 0.2, 0.3, 5, 6, (("adam", 7),), 1.25),),
    (LinkPrediction("w1", "w2", 100, 0.1, 400, 0.3),),
    0.05,
    9.5,
    "w2",
    ("one", "two"),
    Outlook(2.75, 30.0, 1e-4, "w9", 3.0),
)
EXCHANGE = Exchange(
    "diloco",
    50,
    "int8",
    4.0,
    2,
    1,
    0.5,
    3.0,
    Exchange(),
    1 << 20,
    (1.5, 2.5),
    (0, 1),
    PairTable((0.0, 2.5, 1.5, 0.0), 2.0),
)
PLAN = Plan(
    "job-1",
    7,
    HASH,
    OTHER,
    "op_fence",
    ScheduleName.GPIPE,
    8,
    one_replica(8, STAGES, (LINK, LinkSpec(0, 1))),
    (("w9", "too slow"),),
    PREDICTION,
    2,
)
REPLICAS = replace(
    PLAN,
    replicas=(Replica((0, 2), (StageSpec(0, 5, 0, 4, "w3", 0),)), Replica((2, 8), STAGES, (LINK,))),
    exchange=EXCHANGE,
    absent=frozenset({2, 1}),
)


class Graphs:
    """A graph store of one job."""

    def programs(self, plan: Plan) -> Any:
        return ((PiecePrograms(program(), program(2)),),) * 2

    def graphs(self, dag_hash: str, eval_dag_hash: str) -> Any:
        states = dag().parameters | dag().buffers | {"mask": StateMeta(META), "x": StateMeta(META)}
        return SimpleNamespace(train=dag(), evaluation=dag(), states=lambda: states)


def to_workers() -> dict[str, Message]:
    """What a coordinator says to a worker."""
    from atoll.messages import to_worker as asked
    from coordinator.messages import instructions as do
    from coordinator.messages.events import Blob
    from coordinator.messages.facts import Era
    from coordinator.services.workers.wire import probe_ops_message, to_worker
    from protos.session import said_to_worker

    def way(peer: str, use: do.RelayUse) -> asked.RelayOffer:
        relays = (("", 7702), ("192.0.2.1", 7702))
        return asked.RelayOffer(relays, b"t" * 75, b"k" * 32, use.dials, use.after_s, 60.0)

    relay = do.RelayUse(True, 2.5)
    addresses = (("192.0.2.1", 7701), ("h", 7))
    expected = do.ExpectPeer("w-2", addresses, True, relay)
    peers = (do.RankPeer(1, expected), do.RankPeer(2, do.ExpectPeer("w-3", (), False)))
    eras = (Era(3, 2, ()), Era(5, 6, (LINK,)))
    replay = do.Replay(4, eras, (1.0, 0.5), (5, 6), True)
    tensors = {"w": HASH, "mean": OTHER, "mask": THIRD}
    assign = do.Assign("job-1", JOB, PLAN, 1, 9, tensors, peers, replay, (expected,))
    model = do.Model(Blob(HASH, 10), Blob(OTHER, 5), THIRD)
    copy = do.StageCopy("job-1", "j.3.0-5", PLAN, 1, tensors, "w-2")
    commit = do.StepCommit("job-1", 3, 5, 0.5, True, True, True, do.Relink(4, 7, (LINK,)), True, 4, True)
    federated = replace(JOB, federated=FEDERATED, data=DataSpec((), 0, 4, None))
    messages: dict[str, Any] = {
        "assign": assign,
        "assign, least": do.Assign("j", JOB, PLAN, 0, 0, tensors, ()),
        "reconfigure": do.Reconfigure("job-1", PLAN, 3, 9, peers, True, True),
        "standbys": do.StandbysHere("job-1", 3, peers, True),
        "start": do.StepStart("job-1", 3, 9),
        "commit": commit,
        "commit, least": do.StepCommit("j", 0, 0, 0.0, False, False, False),
        "discard": do.StepDiscard("job-1", 3, 9, "why"),
        "release": do.Release("job-1", 3, "why"),
        "participate": do.Participate("job-1", 2, federated, tensors, "ann"),
        "train round": do.TrainRound(
            "job-1", 3, model, "topk", 8.0, 60.0, 7, "order", ("c1", "c2"), 100, 6000
        ),
        "train round, least": do.TrainRound("j", 0, do.Model(Blob(HASH, 1)), "none", 1.0, 0.0, 0),
        "evaluate round": do.EvaluateRound("job-1", 3, model, 60.0, ("c1",)),
        "round taken": do.RoundTaken("job-1", 3, True, "why", ("c1",)),
        "dismiss": do.Dismiss("why", True),
        "probe link": do.ProbeLink(7, expected, 1.5, 4096),
        "expect peer": expected,
        "expect peer, least": do.ExpectPeer("w-2", (), False),
        "revoked": do.Revoked("w-2", "why"),
        "authorities": do.TrustAuthorities(b"pem", 60.0),
        "keep copies": do.KeepCopies((copy,), {"w-2": expected}),
        "keep no copies": do.KeepCopies(()),
        "store copy": do.StoreCopy("job-1", "j.3.0-5", (HASH, OTHER)),
    }
    graphs: Any = Graphs()
    found: dict[str, Message] = {name: to_worker(said, graphs, way) for name, said in messages.items()}
    node = replace(NODE, args=(OpRef(0), LeafRef(Source.PARAMETER, "w")))
    probe = asked.OpProbe("linear", node, (META,), {"w": META})
    found["probe ops"] = probe_ops_message(do.ProbeOps(7, "j", ("linear", "gone"), "bf16"), {"linear": probe})
    found["welcome"] = said_to_worker(asked.Welcome("w-1", 0.5, 5.0, 7, 1e9))
    found["probe ops, none"] = probe_ops_message(do.ProbeOps(7, "", (), "fp32"), {})
    return found


def frame_of(message: Message) -> list[str]:
    """A message's kind, and its bytes in hex."""
    return [message.DESCRIPTOR.name, message.SerializeToString(deterministic=True).hex()]


def recorded() -> dict[str, list[str]]:
    """What the same messages were before."""
    found: dict[str, list[str]] = json.loads(FRAMES.read_text())
    return found
