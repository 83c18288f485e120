"""A coordinator that shows a fleet made up from a seed, for tests of the page and for its pictures."""

from __future__ import annotations

import datetime
import json
import math
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self

import grpc

from coordinator.client.endpoint import Endpoint
from protos import PROTOCOL_VERSION
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc

GIB = 1 << 30
NOW_S = 1_796_000_000.0
HOSTILE = "<script>alert(1)</script>"
SITES = {"hall-west": 38, "hall-east": 26, "lab-oslo": 17, "homes-no": 21, "homes-de": 12, "uni-bergen": 4}
PEOPLE = [
    "alice",
    "bob",
    "carol",
    "dave",
    "eve",
    "frank",
    "grace",
    "heidi",
    "ivan",
    "judy",
    "mallory",
    "niaj",
    "olivia",
    "peggy",
    "rupert",
    "sybil",
]
GPUS = (
    ("cuda", "NVIDIA RTX 3060", 12, 9800.0),
    ("cuda", "NVIDIA RTX 4090", 24, 41000.0),
    ("cuda", "NVIDIA A100", 40, 98000.0),
    ("cpu", "", 16, 310.0),
)
STAGES = 4


@dataclass
class World:
    """What the coordinator shows; tests change it and call ``stir``."""

    status: pb.StatusReply = field(default_factory=pb.StatusReply)
    updates: dict[str, pb.JobUpdate] = field(default_factory=dict)
    csv: dict[str, str] = field(default_factory=dict)
    checkpoints: dict[str, list[pb.Checkpoint]] = field(default_factory=dict)
    lines: list[pb.LogLine] = field(default_factory=list)
    credits: list[pb.Credit] = field(default_factory=list)
    chunks: list[pb.TraceChunk] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self.turn = 0
        self.over = False  # streams end, without an error

    def stir(self) -> None:
        """Wake all streams."""
        with self._changed:
            self.turn += 1
            self._changed.notify_all()

    def wait(self, turn: int, context: Any) -> bool:
        """Return whether anything happened after ``turn``; False when the caller left or all is over."""
        with self._changed:
            while self.turn == turn and not self.over and context.is_active():
                self._changed.wait(0.05)
        return not self.over and bool(context.is_active())


class _Entry(rpc.EntryServicer):
    def Hello(self, request: pb.HelloRequest, context: Any) -> pb.HelloReply:
        return pb.HelloReply(protocol=PROTOCOL_VERSION, version="0.9.0", time_s=1.0)


class _Owner(rpc.OwnerServicer):
    def __init__(self, world: World) -> None:
        self.world = world

    def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        self.world.calls.append("Status")
        return self.world.status

    def Watch(self, request: pb.JobRequest, context: Any) -> Iterator[pb.JobUpdate]:
        self.world.calls.append("Watch")
        if request.job not in self.world.updates:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no job {request.job!r}; the newest are: none")
        shown = None
        while True:
            turn, update = self.world.turn, self.world.updates[request.job]
            if update != shown:
                shown = pb.JobUpdate()
                shown.CopyFrom(update)
                yield shown
            if update.state in ("finished", "failed", "cancelled") or not self.world.wait(turn, context):
                return

    def Logs(self, request: pb.LogsRequest, context: Any) -> Iterator[pb.LogLine]:
        self.world.calls.append("Logs")
        sent = 0
        while True:
            turn = self.world.turn
            for line in self.world.lines[sent:]:
                yield line
                sent += 1
            if not request.follow or not self.world.wait(turn, context):
                return

    def Metrics(self, request: pb.JobRequest, context: Any) -> Iterator[pb.FileChunk]:
        self.world.calls.append("Metrics")
        yield pb.FileChunk(data=self.world.csv.get(request.job, "").encode())

    def Checkpoints(self, request: pb.CheckpointsRequest, context: Any) -> pb.CheckpointList:
        return pb.CheckpointList(checkpoints=self.world.checkpoints.get(request.job, []))

    def Credits(self, request: pb.CreditsRequest, context: Any) -> pb.CreditList:
        return pb.CreditList(credits=self.world.credits)

    def Trace(self, request: pb.TraceRequest, context: Any) -> Iterator[pb.TraceChunk]:
        yield from (chunk for chunk in self.world.chunks if chunk.spans.job == request.job)


class PicturedCoordinator:
    """The made-up coordinator on loopback, without TLS. Use it in ``with``."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.port = 0
        self._server: grpc.Server | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint("127.0.0.1", self.port)

    def start(self) -> None:
        self.world.over = False
        self._server = grpc.server(ThreadPoolExecutor(max_workers=64), options=[("grpc.so_reuseport", 0)])
        rpc.add_EntryServicer_to_server(_Entry(), self._server)
        rpc.add_OwnerServicer_to_server(_Owner(self.world), self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        self.world.over = True
        self.world.stir()
        if self._server is not None:
            self._server.stop(0).wait()
            self._server = None


# ---------------------------------------------------------------- the picture


def worker_id(number: int) -> str:
    return f"w-{number:016x}"


def pictured(seed: int = 7, hostile: bool = False) -> World:
    """A fleet of 118 workers at six places, and five jobs."""
    draw = random.Random(seed)
    world = World()
    workers = _workers(draw)
    if hostile:
        if not os.environ.get("ATOLL_PICTURES"):  # those are for people
            workers[0].name = HOSTILE
        workers[0].reason = "<img src=x onerror=alert(2)>"
        world.lines.append(
            pb.LogLine(
                time_s=NOW_S, level="info", event="worker.state", fields_json=json.dumps({"why": HOSTILE})
            )
        )
    world.status = pb.StatusReply(
        workers=workers, links=_links(draw, workers), version="0.9.0", uptime_s=3 * 86400 + 7400
    )
    for update in (_pipeline(draw, workers), _replicas(draw, workers), _federated(draw, workers), *_ended()):
        world.updates[update.job] = update
        world.csv[update.job] = _csv(draw, update)
        row = world.status.jobs.add()
        row.CopyFrom(update)
        row.ClearField("plan")
    world.checkpoints["gpt2-medium-1"] = [
        pb.Checkpoint(step=s, at_s=NOW_S - (353 - s) * 1.1, bytes=int(4.2 * GIB), tensors=436, best=s == 320)
        for s in (160, 240, 320, 350)
    ]
    world.credits = _given(draw, workers)
    world.chunks = _spans()
    world.lines += _lines(draw, workers)
    return world


def _workers(draw: random.Random) -> list[pb.WorkerStatus]:
    workers = []
    for site, count in SITES.items():
        for _ in range(count):
            number = len(workers)
            kind, model, memory, gflops = draw.choices(GPUS, (5, 3, 1, 3))[0]
            name = f"{PEOPLE[number]}" if number < len(PEOPLE) else f"{site}-{number:03d}"
            worker = pb.WorkerStatus(
                worker=worker_id(number),
                name=name,
                state=draw.choices(("pool", "assigned"), (2, 5))[0],
                device=pb.DeviceFacts(
                    kind=kind,
                    model=model or "Intel Core i7-9700",
                    threads=8,
                    memory_bytes=memory * GIB,
                    memory_limit_bytes=int(memory * GIB * draw.choice((0.5, 0.8, 0.9))),
                    torch_version="2.13.0",
                    python_version="3.12.4",
                    atoll_version="0.9.0",
                    platform="Linux-6.8.0-x86_64",
                ),
                gflops=gflops * draw.uniform(0.8, 1.1),
                seen_s_ago=0.3,
                site=site,
                address=f"10.{number % 7}.2.{number}:41{number:03d}",
            )
            if worker.state == "assigned":
                worker.job, worker.stage = draw.choice((("brown-fedavg-4", -1), ("vision-diloco-2", 0)))
            workers.append(worker)
    for number in range(STAGES + 1):  # of the pipeline, and its standby
        workers[number].state, workers[number].job, workers[number].stage = (
            "assigned",
            "gpt2-medium-1",
            number,
        )
    workers[4].stage = -1
    for number in range(6, 12):
        workers[number].state, workers[number].job, workers[number].stage = (
            "assigned",
            "vision-diloco-2",
            number % 2,
        )
    workers[2].waits_for, workers[2].waits_s = worker_id(1), 3.2
    workers[2].waits_what, workers[2].waits_step = "activations", 353
    for number, state, reason in (
        (31, "suspect", "no sign of life for 2.1 s"),
        (57, "suspect", "its connection ended; it has 10 s to come back"),
        (64, "dead", "silent for 14 s"),
        (71, "draining", "asked to leave at 13:47"),
        (90, "quarantined", "step 311: its gradients differ from two others in a spot check"),
        (102, "dead", "silent for 14 s"),
    ):
        workers[number].state, workers[number].reason = state, reason
    workers[40].guest.CopyFrom(pb.GuestLimits(paused="by its owner", compute_share=0.5))
    return workers


def _links(draw: random.Random, workers: list[pb.WorkerStatus]) -> list[pb.LinkStatus]:
    found = []
    shown = [*workers[:12], *workers[16::9]]
    for source in shown:
        for target in shown:
            if source.worker == target.worker:
                continue
            near = source.site == target.site
            rate = draw.uniform(600e6, 940e6) if near else 10 ** draw.uniform(6.6, 8.1)
            found.append(
                pb.LinkStatus(
                    source=source.worker,
                    target=target.worker,
                    bandwidth_bps=rate,
                    latency_s=0.0004 if near else draw.uniform(0.008, 0.06),
                    way="direct" if near else draw.choice(("direct", "reversed", "relayed")),
                    shared="" if near else draw.choice(("", "uplink of homes-no")),
                )
            )
    return found


def _figures(update: pb.JobUpdate, loss: float, held_out: float, best: float, best_step: int) -> None:
    update.loss, update.eval_loss, update.best_eval_loss, update.best_step = loss, held_out, best, best_step


def _pipeline(draw: random.Random, workers: list[pb.WorkerStatus]) -> pb.JobUpdate:
    update = pb.JobUpdate(
        job="gpt2-medium-1",
        name="gpt2-medium",
        state="training",
        reason="",
        step=353,
        steps=600,
        step_s=1.07,
        eta_s=264.0,
        samples_per_s=29.9,
        commit_s=0.012,
        checkpoint_step=350,
        plan_version=3,
        spot_checks="2 steps were repeated by others, all the same",
        loss_now="losing stage 1 would cost the job most: 52 s",
        best_checkpoint=320,
        eval_rows=512,
        held_out_rows=2048,
        eval_metrics=[pb.Figure(name="accuracy", value=0.412)],
    )
    _figures(update, 3.1874, 3.2410, 3.2302, 320)
    names = [worker_id(n) for n in range(STAGES)]
    codecs = (("none", 1.0), ("int8_block", 3.9), ("none", 1.0))
    rates = ((890e6, 640e6), (40e6, 37.5e6), (96e6, 61e6))
    for number, worker in enumerate(names):
        stage = update.stages.add(stage=number, worker=worker)
        stage.busy_share = (0.97, 0.91, 0.78, 0.88)[number]
        stage.forward_s, stage.backward_s = 0.031, 0.064
        stage.planned_bytes, stage.measured_bytes = int(5.1 * GIB), int((4.8 + 0.3 * number) * GIB)
        stage.replace_s = (38.0, 52.0, 4.2, 41.0)[number]
        stage.replace_why = (
            "an idle worker loads the checkpoint of step 350 and repeats 3 steps",
            "an idle worker loads the checkpoint over 40 Mbit/s and repeats 3 steps",
            "its standby takes over, 1 step behind",
            "an idle worker loads the checkpoint of step 350 and repeats 3 steps",
        )[number]
        stage.copy = "in the store" if number != 2 else "with its standby"
    update.stages[2].standby, update.stages[2].standby_why = (
        worker_id(4),
        "1 step behind; takes 12 % of its machine",
    )
    for number, ((codec, ratio), (can, used)) in enumerate(zip(codecs, rates, strict=True)):
        for back in (False, True):
            ends = (names[number], names[number + 1])
            dense = 8 << 20
            update.links.add(
                source=ends[back],
                target=ends[not back],
                bps=used * (0.8 if back else 1),
                measured_bps=can,
                bytes_per_step=int(dense / ratio),
                dense_bytes_per_step=dense,
                codec=codec,
                ratio=ratio,
                reason="" if ratio == 1 else "the link is the bottleneck without it",
            )
    plan = update.plan
    plan.job, plan.version, plan.dag_hash = update.job, 3, "9f31c27be1d04a55" * 4
    plan.partitioner, plan.schedule, plan.n_micro = "op_fence", "zero-bubble", 16
    borders = (0, 212, 398, 604, 781)
    for number, worker in enumerate(names):
        stage = plan.stages.add(start=borders[number], stop=borders[number + 1], workers=[worker])
        stage.warmup, stage.keeping.recompute = 4 - number, "selective"
    plan.left_out.add(worker=worker_id(9), why="behind 4 Mbit/s; with it a step would take 3.9 s")
    found = plan.prediction
    found.step_s, found.lower_bound_s, found.commit_s, found.single_machine_s = 1.13, 1.02, 0.011, 3.4
    found.single_machine, found.bottleneck = worker_id(1), f"link {workers[1].name} > {workers[2].name}"
    found.reason = (
        "the link between hall-west and homes-no carries 2.1 MiB each way a micro-batch at 40 Mbit/s"
    )
    for number, worker in enumerate(names):
        found.stages.add(
            worker=worker,
            compute_s=0.9,
            busy_share=(0.95, 0.9, 0.8, 0.86)[number],
            memory_bytes=int(5.1 * GIB),
            memory_limit_bytes=(8 + 2 * number) * GIB,
        )
    _training(update)
    return update


def _training(update: pb.JobUpdate) -> None:
    training = update.training
    training.steps, training.n_micro, training.seed, training.precision = (
        update.steps,
        update.plan.n_micro,
        7,
        "bf16",
    )
    training.optimizer.name, training.optimizer.lr, training.optimizer.weight_decay = "adamw", 3e-4, 0.1
    training.optimizer.beta1, training.optimizer.beta2, training.optimizer.eps = 0.9, 0.95, 1e-8
    training.optimizer.clip_norm = 1.0
    training.schedule.kind, training.schedule.warmup_steps, training.schedule.final = "cosine", 60, 0.1
    training.recompute, training.compress, training.spot_checks = "auto", "auto", 0.005
    training.eval_every, training.eval_batches = 40, 8


def _replicas(draw: random.Random, workers: list[pb.WorkerStatus]) -> pb.JobUpdate:
    update = pb.JobUpdate(
        job="vision-diloco-2",
        name="vision-diloco",
        state="training",
        step=4100,
        steps=20000,
        step_s=0.21,
        eta_s=3339.0,
        samples_per_s=610.0,
        plan_version=1,
        exchange="3 peers exchange by diloco every 50 steps in int8_block; the last period: 3 of 3, in 4.1 s",
    )
    _figures(update, 1.4211, 1.5002, 1.4988, 4000)
    plan = update.plan
    plan.job, plan.version, plan.n_micro, plan.partitioner, plan.schedule = (
        update.job,
        1,
        24,
        "op_fence",
        "1f1b",
    )
    plan.dag_hash = "51b4c8d2" * 8
    for number in range(3):
        replica = plan.replicas.add(start=8 * number, stop=8 * number + 8)
        for at in range(2):
            worker = worker_id(6 + 2 * number + at)
            replica.stages.add(start=90 * at, stop=90 * at + 90, workers=[worker], warmup=2 - at)
            update.stages.add(stage=at, worker=worker, busy_share=draw.uniform(0.7, 0.95), planned_bytes=GIB)
            plan.prediction.stages.add(
                worker=worker, busy_share=0.9, memory_bytes=GIB, memory_limit_bytes=4 * GIB, compute_s=0.2
            )
        for back in (False, True):
            ends = (worker_id(6 + 2 * number), worker_id(7 + 2 * number))
            update.links.add(
                source=ends[back], target=ends[not back], bps=2e8, measured_bps=8e8, bytes_per_step=5 << 20
            )
    for number in range(3):
        source, target = worker_id(6 + 2 * number), worker_id(6 + 2 * ((number + 1) % 3))
        update.links.add(source=source, target=target, bps=3e7, measured_bps=1e8, bytes_per_step=420_000)
    plan.exchange.rule, plan.exchange.every, plan.exchange.codec = "diloco", 50, "int8_block"
    found = plan.prediction
    found.step_s, found.lower_bound_s, found.bottleneck = 0.2, 0.19, f"stage 1 on {workers[9].name}"
    found.reason = "its device computes for 0.19 s of each step"
    _training(update)
    return update


def _federated(draw: random.Random, workers: list[pb.WorkerStatus]) -> pb.JobUpdate:
    update = pb.JobUpdate(
        job="brown-fedavg-4",
        name="brown-fedavg",
        state="training",
        step=18,
        steps=60,
        step_s=41.0,
        eta_s=1722.0,
    )
    update.loss = 4.77
    found = update.federated
    found.strategy, found.data = "fedavg", "brown"
    found.chosen, found.arrived, found.dropped, found.round_s = 20, 13, 2, 41.0
    found.clients_loss, found.central_loss = 4.91, 4.83
    found.central_metrics.add(name="accuracy", value=0.232)
    found.bytes_up, found.bytes_down = 3_100_000_000, 5_400_000_000
    found.pace = "bcrs: slower uplinks send fewer elements, so that all arrive within 40 s"
    states = (
        ["trained"] * 13
        + ["training"] * 5
        + ["dropped"] * 2
        + ["ready"] * 6
        + ["refused", "awaiting consent"]
    )
    for number, state in enumerate(states):
        client = found.clients.add(
            worker=worker_id(60 + number),
            state=state,
            n_samples=draw.randrange(180, 4200),
            codec="topk",
            ratio=draw.choice((4.0, 8.0, 16.0, 31.0)),
            uplink_bps=10 ** draw.uniform(6, 8),
            train_s=draw.uniform(12, 33),
            bytes_up=draw.randrange(800_000, 9_000_000),
            bytes_down=11_000_000,
        )
        client.loss = draw.uniform(4.4, 5.6)
        if state == "dropped":
            client.reason = "no update within 60 s"
        if state == "refused":
            client.reason = "its owner refused: model is public"
    return update


def _ended() -> list[pb.JobUpdate]:
    done = pb.JobUpdate(
        job="bert-tiny-3", name="bert-tiny", state="finished", step=2000, steps=2000, checkpoint_step=2000
    )
    _figures(done, 2.0114, 2.1041, 2.1041, 2000)
    failed = pb.JobUpdate(
        job="llama-1b-1",
        name="llama-1b",
        state="failed",
        step=0,
        steps=1000,
        reason="stage 2 needs 11.2 GiB; the largest free worker, judy, has 8.0: lower the batch",
    )
    return [done, failed]


def _csv(draw: random.Random, update: pb.JobUpdate) -> str:
    rows = ["step,name,value,time_s"]
    end = update.loss or 6.0
    for step in range(1, update.step + 1):
        at_s = NOW_S - (update.step - step) * (update.step_s or 1.0)
        value = end + (10.8 - end) * math.exp(-5.5 * step / max(1, update.step)) + draw.gauss(0, 0.05)
        rows.append(f"{step},loss,{value!r},{at_s:.3f}")
        if step % 40 == 0 and not update.HasField("federated"):
            rows.append(f"{step},eval_loss,{value + 0.06 + draw.gauss(0, 0.01)!r},{at_s:.3f}")
        if update.HasField("federated"):
            rows += [
                f"{step},participants,{draw.randrange(14, 20)},{at_s:.3f}",
                f"{step},dropped,{draw.choice((0, 0, 1, 2, 3))},{at_s:.3f}",
                f"{step},bytes_up,{draw.randrange(120, 240) * 1_000_000},{at_s:.3f}",
                f"{step},bytes_down,{300_000_000},{at_s:.3f}",
                f"{step},round_s,{draw.uniform(36, 60)!r},{at_s:.3f}",
                f"{step},clients_loss,{value + 0.1!r},{at_s:.3f}",
                f"{step},eval_loss,{value + 0.05!r},{at_s:.3f}",
            ]
    return "\n".join(rows) + "\n"


def _given(draw: random.Random, workers: list[pb.WorkerStatus]) -> list[pb.Credit]:
    found = []
    for day in range(34, -1, -1):
        date = (datetime.date(2026, 11, 30) - datetime.timedelta(days=day)).isoformat()
        for number, worker in enumerate(workers):
            if draw.random() < 0.45 or number % 40 < day - 20:
                continue
            hours = draw.uniform(0.5, 11)
            found.append(
                pb.Credit(
                    day=date,
                    worker=worker.worker,
                    name=worker.name,
                    owner="research",
                    useful=pb.WorkDone(
                        steps=int(hours * 3000),
                        samples=int(hours * 96000),
                        computed_ms=int(hours * 3.6e6),
                        received_bytes=int(hours * 4e9),
                        sent_bytes=int(hours * 3e9),
                        energy_mj=int(hours * 1e9) if number % 3 == 0 else None,
                    ),
                    discarded=pb.WorkDone(steps=draw.choice((0, 0, 0, 1, 4))),
                )
            )
    return found


def _spans() -> list[pb.TraceChunk]:
    """Two steps of the pipeline: forwards, then backwards as they come back, with sends and receives."""
    chunks = []
    for step in (351, 352):
        for stage in range(STAGES):
            chunk = pb.TraceChunk(worker=worker_id(stage), clock_offset_s=NOW_S)
            spans = chunk.spans
            spans.job, spans.stage, spans.plan_version = "gpt2-medium-1", stage, 3
            clock_s, begin_s = 0.0, 1.1 * step
            order = [("F", micro) for micro in range(4 - stage)]
            for micro in range(8):
                order += [("B", micro)] + ([("F", micro + 4 - stage)] if micro + 4 - stage < 8 else [])
            for kind, micro in order:
                ready = (
                    (0.045 * (micro + stage))
                    if kind == "F"
                    else 0.2 + 0.085 * micro + 0.06 * (STAGES - stage)
                )
                clock_s = max(clock_s, ready)
                took = 0.031 if kind == "F" else 0.052
                spans.spans.add(
                    kind=kind,
                    step=step,
                    micro=micro,
                    start_s=begin_s + clock_s,
                    end_s=begin_s + clock_s + took,
                )
                clock_s += took
                peer = stage + (1 if kind == "F" else -1)
                if 0 <= peer < STAGES:
                    at_s, wire_s = begin_s + clock_s, 0.028
                    size = 1 << 19
                    spans.spans.add(
                        kind="send", step=step, micro=micro, start_s=at_s, end_s=at_s + wire_s,
                        peer=worker_id(peer), bytes=size,
                    )  # fmt: skip
            at_s = begin_s + clock_s
            spans.spans.add(kind="opt", step=step, start_s=at_s, end_s=at_s + 0.02)
            chunks.append(chunk)
    return chunks


def _lines(draw: random.Random, workers: list[pb.WorkerStatus]) -> list[pb.LogLine]:
    def line(ago_s: float, level: str, event: str, source: str, job: str, **fields: Any) -> pb.LogLine:
        return pb.LogLine(
            time_s=NOW_S - ago_s,
            level=level,
            event=event,
            source=source,
            job=job,
            fields_json=json.dumps(fields),
        )

    here = "coordinator"
    first = "gpt2-medium-1"
    return [
        line(900, "info", "job.submitted", here, first, name="gpt2-medium", steps=600),
        line(890, "info", "ops.probed", here, first, worker=worker_id(1), ops=781),
        line(
            871, "info", "plan.made", here, first, stages=4, predicted_s=1.13, bottleneck="link bob > carol"
        ),
        line(860, "info", "job.state", here, first, state="training"),
        line(
            410,
            "warning",
            "worker.state",
            here,
            "",
            worker=worker_id(64),
            state="dead",
            reason="silent for 14 s",
        ),
        line(
            408,
            "warning",
            "job.reconfigured",
            here,
            first,
            ranks="2",
            why="stage 2 passed to carol",
            version=3,
        ),
        line(260, "info", "checkpoint.stored", here, first, step=320, bytes=int(4.2 * GIB)),
        line(
            190,
            "info",
            "standby.chosen",
            here,
            first,
            worker=worker_id(4),
            rank=2,
            why="a loss would cost 52 s",
        ),
        line(
            120, "info", "round.closed", here, "brown-fedavg-4", round=18, arrived=17, dropped=2, took_s=41.0
        ),
        line(
            64,
            "warning",
            "client.dropped",
            here,
            "brown-fedavg-4",
            worker=worker_id(78),
            why="no update within 60 s",
        ),
        line(
            40, "info", "links.judged", here, first, link="bob > carol", codec="int8_block", why="bottleneck"
        ),
        line(
            12,
            "warning",
            "worker.state",
            here,
            "",
            worker=worker_id(31),
            state="suspect",
            reason="no sign of life",
        ),
        line(3, "info", "checkpoint.stored", here, first, step=350, bytes=int(4.2 * GIB)),
    ]
