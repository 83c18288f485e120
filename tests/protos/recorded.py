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
from atoll.exchange import Exchange, PairTable, Receipt
from atoll.federated import DatasetFacts, Federated, FederatedSpec, FieldFacts
from atoll.held_out import Figures
from atoll.job import (
    JobSpec,
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
from atoll.program import Produced, Received, StageProgram, TiedParameter

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
STAGES = (StageSpec(0, 2, 0, 1, "w1", 3, 2), StageSpec(2, 5, 1, 4, "w2", 1, 4))
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
    Recompute.SELECTIVE,
    2,
)
REPLICAS = replace(
    PLAN,
    replicas=(Replica((0, 2), (StageSpec(0, 5, 0, 4, "w3", 0),)), Replica((2, 8), STAGES, (LINK,))),
    exchange=EXCHANGE,
    absent=frozenset({2, 1}),
)


def declared() -> dict[str, Message]:
    """What jobs and plans are made of."""
    from protos.convert import to_proto

    values: dict[str, Any] = {
        "dag": dag(tail=dag(2)),
        "dag of training": dag(training=True),
        "training": TRAINING,
        "training, least": TrainingSpec(1, 1),
        "data": DATA,
        "federated": replace(FEDERATED, rule=Federated(min_clients=1)),
        "job": JOB,
        "job, least": JobSpec("j", TrainingSpec(1, 1), HASH, "", {}, DATA, None),
        "federated job": replace(JOB, federated=FEDERATED, data=DataSpec((), 0, 4, None)),
        "plan": PLAN,
        "plan of replicas": REPLICAS,
        "plan, least": Plan("j", 0, HASH, "", "even", ScheduleName.GPIPE, 1, one_replica(1, STAGES[:1])),
        "program": program(tail=program(2)),
        "program, least": replace(program(), loss=None, weight=None, metrics=(), tied=(), rows=0),
    }
    return {name: to_proto(value) for name, value in values.items()}


class Graphs:
    """A graph store of one job."""

    def programs(self, plan: Plan) -> Any:
        return SimpleNamespace(train=(program(), program()), evaluation=(program(2), program(2)))

    def graphs(self, dag_hash: str, eval_dag_hash: str) -> Any:
        states = dag().parameters | dag().buffers | {"mask": StateMeta(META), "x": StateMeta(META)}
        return SimpleNamespace(train=dag(), evaluation=dag(), states=lambda: states)


def to_workers() -> dict[str, Message]:
    """What a coordinator says to a worker."""
    from coordinator.messages import instructions as do
    from coordinator.messages.events import Blob
    from coordinator.messages.facts import Era
    from coordinator.planning.costs.op_seconds import Probe
    from coordinator.services.wire import probe_ops_message, to_worker
    from protos import atoll_control_pb2 as pb

    def way(peer: str, use: do.RelayUse) -> pb.RelayWay:
        relays = [pb.Address(port=7702), pb.Address(host="192.0.2.1", port=7702)]
        return pb.RelayWay(
            addresses=relays,
            ticket=b"t" * 91,
            key=b"k" * 32,
            dial=use.dials,
            after_s=use.after_s,
            lasts_s=60.0,
        )

    relay = do.RelayUse(True, 2.5)
    addresses = (("192.0.2.1", 7701), ("h", 7))
    expected = do.ExpectPeer("w-2", addresses, True, relay)
    peers = (do.RankPeer(1, "w-2", addresses, True, relay), do.RankPeer(2, "w-3", (), False))
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
        "probe link": do.ProbeLink(7, "w-2", addresses, True, 1.5, 4096, relay),
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
    probe = Probe("linear", 0, node, (META,), ((LeafRef(Source.PARAMETER, "w"), META),))
    found["probe ops"] = probe_ops_message(do.ProbeOps(7, "j", ("linear", "gone"), "bf16"), {"linear": probe})
    found["welcome"] = pb.ToWorker(
        welcome=pb.Welcome(worker="w-1", heartbeat_s=0.5, time_s=1e9, idle_heartbeat_s=5.0, term=7)
    )
    found["probe ops, none"] = probe_ops_message(do.ProbeOps(7, "", (), "fp32"), {})
    return found


def from_workers() -> dict[str, Message]:
    """What a worker says to its coordinator."""
    from compressors.container import Stored
    from protos import atoll_control_pb2 as pb
    from protos import coding
    from strategies.fixed import FixedSums, Grid
    from strategies.values import ClientUpdate
    from worker.federated import orders
    from worker.links.codec_use import CodecUse
    from worker.machine.op_probe import OpTiming
    from worker.manners.limits import Limits
    from worker.session import instructions as do
    from worker.session import wire, wire_federated
    from worker.session.state import Phase, Session
    from worker.spans import Span
    from worker.stage.reports import LongWait, StageReport, StepReport
    from worker.transport.contract import Goodput, Way
    from worker.transport.frames import Direction, MessageKey

    receipt = Receipt(3, 0, (0, 2), (0, 2), 0.5, 10, 20, "ab" * 16, totals={0: "01" * 16, 2: "02" * 16})
    report = StepReport(
        4,
        StageReport((1.5, 2.5), (0.5,), True, b"gradient", (4.0, 3.0)),
        0.1,
        0.2,
        0.3,
        0.4,
        0.5,
        b"messages",
        receipt,
    )
    ready = wire.step_ready("job-1", 3, report, True, {"w-2": CodecUse(80, 9, 0.25, 0.125)})
    wire.add_measured(ready.ready, [Goodput("w-2", 10, 0.5, 0.01, 4e6)], 0.25)
    nothing = StepReport(4, StageReport((), (), False), 0.0, 0.0, 0.0, 0.0)
    grid = Grid({"trained": 6000.0}, {"samples": 6000.0})
    rows = (orders.Row("c1", 60, 6, 0.5, 0.25, 178_000, 0.125),)
    sums = FixedSums(grid, {}, {"trained": 2**60}, {"samples": 2**60}, 1)
    host = orders.HostAnswer(Stored(HASH, 17), sums, rows, {"c9": "the local loss is nan"}, True)
    order = orders.TrainOrder(3, orders.ModelRef(HASH), "none", 1.0, 7, "order", ("c1",), 100, 6000)
    own = ClientUpdate(3, 60, 6, {}, {}, {"drift": 0.5}, {"loss": 1.5})
    found = {"": orders.Evaluated(9, 0.5, {"accuracy": 0.75})}
    clients = {
        "c1": orders.Evaluated(9, 0.5, {"accuracy": 0.75}),
        "c2": orders.Evaluated(3, 1.5, {"accuracy": 0.25}),
    }
    key = MessageKey("job-1", 3, 9, 2, 4, Direction.FORWARD)
    held = wire.held_stage(Session(phase=Phase.WAITING, job="job-1", assigned=3, eras=((0, 3),), step=12))
    guest = wire.guest_limits(
        Limits(cpu_percent=50.0, upload_mbit=10, download_mbit=20), "nights", 1 << 30, True
    )
    facts = DatasetFacts("digits", 60, (FieldFacts("image", "float32", (28, 28)),))
    copy = pb.CopyHeld(job="job-1", name="j.3", bytes=10, fetched_bytes=4, took_s=0.5, error="why")
    device = pb.DeviceFacts(
        kind="cpu",
        model="m",
        threads=2,
        memory_bytes=1 << 34,
        memory_limit_bytes=1 << 33,
        torch_version="2.13",
        python_version="3.12",
        atoll_version="0.7",
        platform="linux",
        cores=1.5,
        quota_period_s=0.1,
        instructions="AVX2",
        memory_in_figures=True,
        own_memory_bytes=1 << 29,
    )
    said: dict[str, Message] = {
        "introduction": pb.FromWorker(
            introduction=pb.Introduction(
                protocol=9,
                name="box",
                device=device,
                peer_addresses=[pb.Address(host="h", port=7)],
                site="s",
                codecs=["int8"],
                incarnation=5,
                codec_speeds=wire.speeds_to_proto({"int8": (2e9, 1e9)}),
                datasets=[coding.write(facts, pb.DatasetFacts)],
                held=held,
                guest=guest,
                copies=[copy],
                copy_bytes=99,
            )
        ),
        "introduction, least": pb.FromWorker(
            introduction=pb.Introduction(protocol=9, name="box", device=pb.DeviceFacts(kind="cpu"))
        ),
        "heartbeat": pb.FromWorker(
            heartbeat=pb.Heartbeat(
                sequence=4,
                worker_time_s=1e9,
                job="job-1",
                plan_version=3,
                step=9,
                progress=7,
                memory_bytes=10,
                waits_for="w-2",
                waits_s=1.5,
                waits_what="forward",
                waits_step=9,
                logged_from=2,
                guest=guest,
                memory_peak_bytes=11,
            )
        ),
        "heartbeat, least": pb.FromWorker(
            heartbeat=pb.Heartbeat(worker_time_s=1e9, guest=pb.GuestLimits(compute_share=1.0))
        ),
        "codec speeds": wire.codec_speeds({"int8": (2e9, 1e9), "fp8": (3e9, 2e9)}),
        "ops probed": wire.ops_probed(7, {"linear": OpTiming(0.5, 0.25)}, "why"),
        "link probed": wire.link_probed(7, "w-2", 0.01, 1e8, "why"),
        "peer joined": wire.peer_joined("w-2", Way.RELAYED, "r:1"),
        "peer gone": wire.peer_joined("w-2", None, ""),
        "loaded": wire.loaded("job-1", 3, 0.5, "p" * 64, {"c1": 60}, [(b"gradient", b"messages")], 0.25),
        "loaded, least": wire.loaded("j", 0, 0.0),
        "failed": wire.to_proto(do.StageFailed("job-1", 3, 9, "why", "w-2", 1 << 30)),
        "ready": ready,
        "ready, least": wire.step_ready("j", 0, nothing, False, {}),
        "eval ready": wire.eval_ready("job-1", 3, 9, Figures(0.0, {"accuracy": 0.5}), Figures(2.5)),
        "eval ready elsewhere": wire.eval_ready("job-1", 3, 9, None),
        "stored": wire.state_stored("job-1", 3, 9, {"w": HASH, "b": OTHER}, "why", kept=True),
        "spans": wire.spans("job-1", 3, 1, [Span("send", 9, 2, 0.5, 0.75, "w-2", 100)])[0],
        "log": wire.waiting(LongWait(key, "w-2", 12.5)),
        "update": wire_federated.update_ready(
            "job-1", order, orders.Update(own, 0.25, Stored(HASH, 17), 1.5, 17, 0.1, 18, 0.2)
        ),
        "update of a host": wire_federated.update_ready(
            "job-1", order, orders.Update(host, 0.25, Stored(HASH, 17), 1.5, 17, 0.1, 18, 0.2)
        ),
        "update of nobody": wire_federated.update_ready(
            "job-1", order, orders.Update(replace(host, stored=None, rows=()), 0.0, None, 1.5, 0, 0.0, 0, 0.0)
        ),
        "evaluated": wire_federated.client_evaluated("job-1", 3, orders.Assessment(found, 0.5, 18, 0.2)),
        "evaluated clients": wire_federated.client_evaluated(
            "job-1", 3, orders.Assessment(clients, 0.5, 18, 0.2)
        ),
        "client failed": wire.to_proto(do.ClientFailed("job-1", 3, "why", "train")),
        "refused ops": wire.to_proto(do.Refused(7, "", "busy")),
        "refused link": wire.to_proto(do.Refused(7, "w-2", "busy")),
        "leaving": wire.to_proto(do.Leaving("why")),
        "consent": pb.FromWorker(
            consent=pb.Consent(job="job-1", version=2, word="given", reason="why", graph=HASH)
        ),
        "copy held": pb.FromWorker(copy_held=copy),
        "copy stored": pb.FromWorker(copy_stored=pb.CopyStored(job="job-1", name="j.3", error="why")),
    }
    return said


def over_the_pipe() -> dict[str, Message]:
    """What a compute process reports to the daemon."""
    from worker.session import events as ev
    from worker.session.pipe_events import posted

    said: Any = from_workers()
    events: dict[str, ev.Event] = {
        "stage loaded": ev.StageLoaded("job-1", 3, said["loaded"]),
        "step done": ev.StepDone("job-1", 3, 4, said["ready"]),
        "step applied": ev.StepApplied("job-1", 3, 9),
        "evaluation done": ev.EvalDone("job-1", 3, 9, said["eval ready"]),
        "state stored": ev.Stored("job-1", 3, 9, said["stored"]),
        "state kept": ev.Kept("job-1", 3, 9, said["stored"]),
        "joined": ev.Joined("job-1", 3, said["loaded"]),
        "update stored": ev.UpdateStored("job-1", 3, said["update"], "order"),
        "round evaluated": ev.RoundEvaluated("job-1", 3, said["evaluated"]),
        "probed": ev.Probed(said["ops probed"]),
        "stage broke": ev.StageBroke("job-1", 3, 9, "why", "w-2", False, 1 << 30),
        "turn broke": ev.TurnBroke("job-1", 3, "train", "why"),
    }
    return {name: posted(event) for name, event in events.items()}


def written() -> dict[str, Message]:
    """All of them by a name each."""
    return {**declared(), **to_workers(), **from_workers(), **over_the_pipe()}


def frame_of(message: Message) -> list[str]:
    """A message's kind, and its bytes in hex."""
    return [message.DESCRIPTOR.name, message.SerializeToString(deterministic=True).hex()]


def recorded() -> dict[str, list[str]]:
    """What the same messages were before."""
    found: dict[str, list[str]] = json.loads(FRAMES.read_text())
    return found


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(frame_of(said))}" for name, said in written().items()]
    FRAMES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
