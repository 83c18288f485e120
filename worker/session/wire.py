"""The session's messages: pb2 from the coordinator to events, our answers to pb2.

What the coordinator sends is checked like any peer's: a worker lends its machine, it does not
trust.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from atoll.bounded import MAX_ITEMS, MAX_STAGES
from atoll.errors import BadFrame
from atoll.exchange import Exchange
from atoll.messages import from_worker as told
from atoll.messages.to_worker import MAX_STEP, MAX_VERSION, Replay, Revoked, StoreCopy, TrustAuthorities
from protos import atoll_control_pb2 as pb
from protos import bounds, coding
from protos.relay_tickets import MAC_BYTES, TICKET_BYTES
from protos.session import check_replay, to_coordinator, to_worker
from worker.links.codec_use import CodecUse
from worker.session import events, wire_federated
from worker.session.state import Session, held
from worker.stage.assignment import PeerLink
from worker.transport.contract import Paths, RelayOffer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from atoll.held_out import Figures
    from worker.manners.limits import Limits
    from worker.spans import Span
    from worker.stage.reports import LongWait, StepReport
    from worker.transport.contract import Goodput

MAX_RELAY_S = 60.0
MAX_ADDRESSES = 16
MEGA = 1e6
MAX_PROBES = 20_000
MAX_PROBE_S = 60.0
MAX_PROBE_BYTES = 1 << 30
MAX_SPANS_A_MESSAGE = 2000
MAX_REASON_CHARS = 2000
MAX_HOLDERS = 16
MAX_COPIES = 1024
MAX_BLOB_BYTES = 1 << 44
ANSWERED = frozenset({"assign", "reconfigure", "commit", "participate", "train_round", "evaluate_round"})
"""Messages that must be answered even when refused, or a job would wait for ever."""


@dataclass(frozen=True, slots=True)
class AssignedStage:
    """A stage to load, as it was assigned: the compute process alone looks into ``message``. ``holders``: who
    keeps copies of its tensors, the nearest first."""

    message: pb.Assign
    links: tuple[PeerLink, ...]
    holders: tuple[PeerLink, ...] = ()


@dataclass(frozen=True, slots=True)
class ReconfiguredStage:
    """What changes for a stage that is held: the compute process alone looks into ``message``."""

    message: pb.Reconfigure
    links: tuple[PeerLink, ...]


@dataclass(frozen=True, slots=True)
class LinkRequest:
    """A peer to measure, and for how long."""

    paths: Paths
    seconds: float
    max_bytes: int


@dataclass(frozen=True, slots=True)
class PeerExpected:
    """A peer that may connect to us from now on, to measure; not an event of the session."""

    peer: str
    paths: Paths


@dataclass(frozen=True, slots=True)
class CopyAsked:
    """A stage's part of a checkpoint to be kept on disk; ``blobs``: with the most bytes that each has.
    ``working``: also while a stage is computed, from the ``holders``."""

    job: str
    name: str
    blobs: Mapping[str, int]
    working: bool = False
    holders: tuple[PeerLink, ...] = ()


@dataclass(frozen=True, slots=True)
class CopiesAsked:
    """All copies that this worker is to keep; not an event of the session."""

    copies: tuple[CopyAsked, ...]


@dataclass(frozen=True, slots=True)
class StandbysExpected:
    """Workers that repeat the steps of neighbours' ranks, by name; not an event of the session."""

    job: str
    ranks: Mapping[str, int]
    links: tuple[PeerLink, ...]
    checks: bool = False  # they compare; else they stand by


Beside = PeerExpected | Revoked | CopiesAsked | StoreCopy | StandbysExpected | TrustAuthorities
"""What the coordinator says that no session has to do with."""


# ---------------------------------------------------------------- from the coordinator


def event_from(message: pb.ToWorker) -> events.Event | Beside:
    """The event that a message stands for. Raises BadFrame when it breaks a bound."""
    body = message.WhichOneof("body")
    if body is None:
        raise BadFrame("the coordinator sent a message of a kind this worker does not know; update it")
    read = _READERS.get(body)
    event: events.Event | Beside = to_worker(message) if read is None else read(getattr(message, body))
    return event


def refusal(message: pb.ToWorker, reason: str) -> told.StageFailed | told.ClientFailed:
    """The answer to a message of ``ANSWERED`` that breaks a bound."""
    match message.WhichOneof("body"):
        case "participate":
            return told.ClientFailed(message.participate.job, 0, reason, "load")
        case "train_round":
            return told.ClientFailed(message.train_round.job, message.train_round.round, reason, "train")
        case "evaluate_round":
            order = message.evaluate_round
            return told.ClientFailed(order.job, order.round, reason, "evaluate")
    if message.WhichOneof("body") == "commit":
        return told.StageFailed(message.commit.job, message.commit.plan_version, message.commit.step, reason)
    if message.WhichOneof("body") == "reconfigure":
        refused = message.reconfigure
        return told.StageFailed(refused.job, refused.plan_version, refused.step, reason)
    return told.StageFailed(message.assign.job, message.assign.plan_version, 0, reason)


def _welcome(m: pb.Welcome) -> events.Welcome:
    return events.Welcome(
        bounds.name("worker", m.worker),
        bounds.number("heartbeat", m.heartbeat_s, 0.01, 3600.0),
        bounds.number("idle heartbeat", m.idle_heartbeat_s, 0.0, 3600.0),
        m.term,
    )


def _assign(m: pb.Assign) -> events.Assign:
    links = neighbours(m)
    peers = frozenset(link.worker for link in links)
    job = bounds.name("job", m.job)
    eras = _replayed(m) if m.HasField("replay") else ()
    holders = tuple(
        PeerLink(*_peer(holder)) for holder in bounds.count("holders", list(m.holders), MAX_HOLDERS)
    )
    m.ClearField("holders")  # what computes asks nobody but this process
    work = AssignedStage(m, links, holders)
    exchange = coding.read(Exchange, m.plan.exchange) if m.plan.HasField("exchange") else None
    if exchange is None or not exchange.local:
        return events.Assign(job, m.plan_version, peers, m.first_step, work, eras, m.replay.standby)
    steps = bounds.within("steps", m.training.steps, m.first_step, MAX_STEP)
    return events.Assign(job, m.plan_version, peers, m.first_step, work, eras, exchange=exchange, steps=steps)


def _keep_copies(m: pb.KeepCopies) -> CopiesAsked:
    return CopiesAsked(
        tuple(
            CopyAsked(
                bounds.name("job", copy.job),
                bounds.name("copy", copy.name),
                {
                    bounds.blob_hash("blob", b.hash): bounds.within(
                        "bytes of a blob", b.size, 0, MAX_BLOB_BYTES
                    )
                    for b in bounds.count("blobs of a copy", list(copy.blobs), MAX_ITEMS)
                },
                copy.working,
                tuple(PeerLink(*_peer(h)) for h in bounds.count("holders", list(copy.holders), MAX_HOLDERS)),
            )
            for copy in bounds.count("copies", list(m.copies), MAX_COPIES)
        )
    )


def _replayed(m: pb.Assign) -> tuple[tuple[int, int], ...]:
    """(first step, version) of the steps that a stage is to repeat."""
    replay = coding.read(Replay, m.replay)
    check_replay(replay, m.first_step, m.plan_version)
    return tuple((era.first_step, era.version) for era in replay.eras)


def _reconfigure(m: pb.Reconfigure) -> events.Reconfigure:
    links = neighbours(m)
    return events.Reconfigure(
        bounds.name("job", m.job),
        bounds.within("plan version", m.plan_version, m.base_version + 1, MAX_VERSION),
        m.base_version,
        bounds.within("step", m.step, 0, MAX_STEP),
        frozenset(link.worker for link in links),
        ReconfiguredStage(m, links),
        m.standby,
    )


def _standbys(m: pb.Standbys) -> StandbysExpected:
    links = neighbours(m)
    ranks = {entry.peer.worker: entry.rank for entry in m.peers}
    return StandbysExpected(bounds.name("job", m.job), ranks, links, m.checks)


def neighbours(m: pb.Assign | pb.Reconfigure | pb.Standbys) -> tuple[PeerLink, ...]:
    """The peers of a stage, each once; their relays' tickets stay here. Raises BadFrame."""
    links: dict[str, PeerLink] = {}
    for entry in bounds.count("peers", list(m.peers), MAX_STAGES):
        name, paths = _peer(entry)
        links[name] = PeerLink(name, paths)
        entry.peer.ClearField("relay")  # what computes is given no key
    return tuple(links.values())


def _ops(m: pb.ProbeOps) -> events.ProbeOps:
    bounds.count("ops to time", m.ops, MAX_PROBES)
    return events.ProbeOps(m.request, m)


def _link(m: pb.ProbeLink) -> events.ProbeLink:
    peer, paths = _peer(m)
    seconds = bounds.number("probe seconds", m.seconds, 0.0, MAX_PROBE_S)
    max_bytes = bounds.within("probe bytes", m.max_bytes, 0, MAX_PROBE_BYTES)
    return events.ProbeLink(m.request, peer, LinkRequest(paths, seconds, max_bytes))


def _expect_peer(m: pb.ExpectPeer) -> PeerExpected:
    return PeerExpected(*_peer(m))


def _peer(m: pb.RankPeer | pb.ProbeLink | pb.ExpectPeer) -> tuple[str, Paths]:
    name = bounds.name("peer", m.peer.worker)
    addresses = tuple(
        (bounds.host("host", a.host), bounds.within("port", a.port, 1, 65535))
        for a in bounds.count("addresses", list(m.peer.addresses), MAX_ADDRESSES)
    )
    relay = _relay(m.peer.relay) if m.peer.HasField("relay") else None
    return name, Paths(addresses, m.dial, relay)


def _relay(m: pb.RelayWay) -> RelayOffer:
    if len(m.ticket) != TICKET_BYTES or len(m.key) != MAC_BYTES:
        raise BadFrame(f"a relay's ticket of {len(m.ticket)} bytes with a key of {len(m.key)}")
    addresses = tuple(
        (a.host and bounds.host("relay's host", a.host), bounds.within("relay's port", a.port, 1, 65535))
        for a in bounds.count("relays", list(m.addresses), MAX_ADDRESSES)
    )
    after_s = bounds.number("seconds before a relay", m.after_s, 0.0, MAX_RELAY_S)
    return RelayOffer(
        addresses, m.ticket, m.key, m.dial, after_s, bounds.number("seconds of a ticket", m.lasts_s, 0.0)
    )


_READERS: Mapping[str, Any] = {
    "welcome": _welcome,
    "probe_ops": _ops,
    "probe_link": _link,
    "assign": _assign,
    "reconfigure": _reconfigure,
    "standbys": _standbys,
    "expect_peer": _expect_peer,
    "keep_copies": _keep_copies,
    "participate": wire_federated.invited,
    "train_round": wire_federated.train_asked,
    "evaluate_round": wire_federated.evaluation_asked,
}


# ---------------------------------------------------------------- to the coordinator


def to_proto(message: object) -> pb.FromWorker:
    """A message of the session machine as pb2; ready-made pb2 messages pass through."""
    return message if isinstance(message, pb.FromWorker) else to_coordinator(message)


def held_stage(state: Session) -> pb.HeldStage | None:
    """The stage that a session holds, for its introduction."""
    found = held(state)
    if found is None:
        return None
    return pb.HeldStage(
        job=found.job,
        plan_version=found.version,
        step=found.step,
        loaded=found.loaded,
        ready=found.ready,
    )


def step_ready(
    job: str,
    version: int,
    report: StepReport,
    norms_wanted: bool,
    codecs: Mapping[str, CodecUse],
) -> told.StepReady:
    """A step's result, without what the daemon measured (``add_measured``); ``codecs`` by peer. Norms travel
    only where the gradient is clipped."""
    stage, receipt = report.stage, report.receipt
    return told.StepReady(
        job=job,
        version=version,
        step=report.step,
        losses=stage.losses,
        weights=stage.weights,
        square_norms=stage.square_norms if norms_wanted else (),
        forward_s=report.forward_s,
        backward_s=report.backward_s,
        waited_s=report.waited_s,
        links=tuple(
            told.Goodput(peer, 0, 0.0, 0.0, used.dense_bytes, used.encode_s, used.decode_s)
            for peer, used in codecs.items()
        ),
        finite=stage.finite,
        optimizer_s=report.optimizer_s,
        handling_s=report.handling_s,
        digest=told.Digest(stage.digest.hex(), report.inputs.hex()),
        receipt=None
        if receipt is None
        else told.RoundReceipt(
            receipt.round,
            receipt.included,
            receipt.share,
            receipt.sent_bytes,
            receipt.received_bytes,
            receipt.digest,
            receipt.totals,
        ),
    )


def wait_fields(wait: LongWait) -> dict[str, object]:
    """Fields of a log line about what a stage has been waiting for."""
    key = wait.key
    return {
        "peer": wait.peer,
        "direction": key.direction.name.lower(),
        "step": key.step,
        "micro": key.micro,
        "edge": key.edge,
        "waited_s": round(wait.waited_s),
    }


def waiting(wait: LongWait) -> pb.FromWorker:
    """The same for the job's log."""
    fields = json.dumps(wait_fields(wait))
    line = pb.WorkerLog(level="warning", event="stage.waits", job=wait.key.job, fields_json=fields)
    return pb.FromWorker(log=line)


def add_measured(ready: pb.StepReady, measured: Iterable[Goodput], beside_s: float) -> None:
    """Add what the links to the step's peers measured, and the seconds that their messages took of the cores
    that compute; a peer that was not measured is left out."""
    ready.handling_s += beside_s
    codecs = {link.peer: link for link in ready.links}
    del ready.links[:]
    for found in measured:
        link = ready.links.add(peer=found.peer)
        if found.peer in codecs:
            link.CopyFrom(codecs[found.peer])
        link.bytes, link.busy_s, link.rtt_s = found.bytes, found.busy_s, found.rtt_s
        link.quickest_bps = found.quickest_bps


def eval_ready(
    job: str, version: int, step: int, found: Figures | None, coded: Figures | None = None
) -> told.EvalReady:
    """The evaluation after ``step`` is done; only the stage with the loss knows what came of it."""
    loss, metrics = (None, {}) if found is None else (found.loss, found.metrics)
    return told.EvalReady(job, version, step, loss, None if coded is None else coded.loss, metrics)


def speeds_to_proto(rates: Mapping[str, tuple[float, float]]) -> list[pb.CodecSpeed]:
    """Dense bytes a second by codec."""
    return [
        pb.CodecSpeed(codec=name, encode_bytes_per_s=encode, decode_bytes_per_s=decode)
        for name, (encode, decode) in sorted(rates.items())
    ]


def spans(job: str, version: int, stage: int, recorded: Sequence[Span]) -> list[pb.FromWorker]:
    """A timeline in messages of bounded size."""
    return [
        pb.FromWorker(
            spans=pb.Spans(
                job=job,
                plan_version=version,
                stage=stage,
                spans=[
                    pb.Span(
                        kind=s.kind,
                        step=s.step,
                        micro=s.micro,
                        start_s=s.start_s,
                        end_s=s.end_s,
                        peer=s.peer,
                        bytes=s.bytes,
                    )
                    for s in recorded[at : at + MAX_SPANS_A_MESSAGE]
                ],
            )
        )
        for at in range(0, len(recorded), MAX_SPANS_A_MESSAGE)
    ]


def guest_limits(limits: Limits, paused: str, memory_limit_bytes: int, apps_only: bool) -> told.Guest:
    """What the coordinator is to know of this machine's limits."""
    return told.Guest(
        limits.cpu_share,
        limits.upload_mbit * MEGA or inf,
        limits.download_mbit * MEGA or inf,
        memory_limit_bytes,
        paused,
        apps_only,
    )
