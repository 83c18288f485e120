"""Work's messages: pb2 from a worker to events, instructions to pb2. What arrives is bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Any

from atoll.bounded import MAX_ITEMS, MAX_NAME_CHARS, MAX_STAGES
from atoll.errors import BadFrame
from atoll.exchange import DIGEST_BYTES as ROUND_DIGEST_BYTES
from atoll.federated import MAX_SAMPLES, ConsentWord, DatasetFacts, checked_name
from atoll.job import MOST_LOCAL_STEPS
from atoll.opdag import op_refs
from atoll.program import stage_programs
from coordinator.membership.roster import MAX_MEMORY_BYTES, MIN_MEMORY_BYTES
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.facts import MOST_REPLAYED
from coordinator.planning.costs.op_seconds import Probe
from coordinator.services.blob_rights import leaves_of, most_bytes
from coordinator.storage.graph_store import GraphStore, leaf_metas
from protos import atoll_control_pb2 as pb
from protos import atoll_job_pb2 as job_pb
from protos import bounds, coding
from protos.bounds import DIGEST_BYTES
from protos.convert import metas_to_proto, state_to_proto, to_proto
from protos.text_limits import clean
from strategies.partition_data import MAX_CLIENTS

MAX_ADDRESSES = 16
MAX_REASON_CHARS = 4096
MAX_PAUSED_CHARS = 300
MAX_RATE_BPS = 1e15
LEAST_SHARE = 0.001
MAX_CODECS = 100
MAX_LOSSES = max(4096, MOST_LOCAL_STEPS)  # micro-batches of a step, or steps of a period
MAX_RELAY_CHARS = 270  # HOST:PORT
MAX_SECONDS = 30 * 86_400.0
MAX_MOVED_BYTES = 1 << 44
MAX_DATASETS = 256  # a worker
MAX_FIGURES = 64  # scalars, and metrics, of one message
MAX_DRAWN = 4096  # clients of a round
MAX_TERMS = 64  # of a host's sums
MAX_WHY_CHARS = 200  # a client
MAX_COPIES = 1024  # of one worker
MAX_COPY_NAME_CHARS = 200

# ---------------------------------------------------------------- from a worker


def introduction_from(m: pb.Introduction) -> ev.Introduction:
    """Who a worker says it is; BadFrame when a bound is broken."""
    device = m.device
    return ev.Introduction(
        name=clean(m.name, 60),
        incarnation=m.incarnation,
        kind=clean(device.kind, 16),
        model=clean(device.model, 200),
        threads=device.threads,
        cores=device.cores,
        quota_period_s=device.quota_period_s,
        memory_bytes=device.memory_bytes,
        memory_limit_bytes=device.memory_limit_bytes,
        torch_version=clean(device.torch_version, 60),
        python_version=clean(device.python_version, 60),
        atoll_version=clean(device.atoll_version, 60),
        platform=clean(device.platform, 200),
        instructions=clean(device.instructions, 60),
        addresses=tuple(
            (a.host and bounds.host("host", a.host), bounds.within("port", a.port, 1, 65535))
            for a in bounds.count("peer addresses", m.peer_addresses, MAX_ADDRESSES)
        ),
        site=clean(m.site, 100),
        codecs=tuple(clean(c, 60) for c in bounds.count("codecs", m.codecs, MAX_CODECS)),
        codec_speeds=_speeds(m.codec_speeds),
        datasets=_datasets(m.datasets),
        held=_held(m.held) if m.HasField("held") else None,
        guest=_guest(m.guest) if m.HasField("guest") else ev.UNLIMITED,
        copies=tuple(_copy_held(copy) for copy in bounds.count("copies", m.copies, MAX_COPIES)),
        copy_bytes=m.copy_bytes,
        memory_in_figures=device.memory_in_figures,
        own_memory_bytes=bounds.within("own_memory_bytes", device.own_memory_bytes, 0, MAX_MEMORY_BYTES),
    )


def _copy_stored(m: pb.CopyStored) -> ev.CopyStored:
    name = clean(m.name, MAX_COPY_NAME_CHARS)
    return ev.CopyStored(bounds.name("job", m.job), name, clean(m.error, MAX_REASON_CHARS))


def _copy_held(m: pb.CopyHeld) -> ev.CopyHeld:
    return ev.CopyHeld(
        bounds.name("job", m.job),
        clean(m.name, MAX_COPY_NAME_CHARS),
        _moved("bytes of a copy", m.bytes),
        _moved("fetched bytes of a copy", m.fetched_bytes),
        _seconds("took_s", m.took_s),
        clean(m.error, MAX_REASON_CHARS),
    )


def _guest(m: pb.GuestLimits) -> ev.Guest:
    def rate(what: str, bps: float) -> float:
        return bounds.number(what, bps, 0.0, MAX_RATE_BPS) or inf

    memory = m.memory_limit_bytes
    if memory:
        bounds.within("memory_limit_bytes", memory, MIN_MEMORY_BYTES, MAX_MEMORY_BYTES)
    return ev.Guest(
        compute_share=bounds.number("compute_share", m.compute_share, LEAST_SHARE, 1.0),
        upload_bps=rate("upload_bps", m.upload_bps),
        download_bps=rate("download_bps", m.download_bps),
        memory_limit_bytes=memory,
        paused=clean(m.paused, MAX_PAUSED_CHARS),
        apps_only=m.apps_only,
    )


def _held(m: pb.HeldStage) -> ev.Held:
    return ev.Held(bounds.name("job", m.job), m.plan_version, m.step, m.loaded, m.ready)


def _speeds(listed: Sequence[pb.CodecSpeed]) -> dict[str, tuple[float, float]]:
    return {
        clean(bounds.name("codec", s.codec), 60): (s.encode_bytes_per_s, s.decode_bytes_per_s)
        for s in bounds.count("codec speeds", listed, MAX_CODECS)
    }


def _datasets(listed: Sequence[pb.DatasetFacts]) -> tuple[DatasetFacts, ...]:
    found = tuple(coding.read(DatasetFacts, m) for m in bounds.count("data sets", listed, MAX_DATASETS))
    if len({facts.name for facts in found}) < len(found):
        raise BadFrame("a data set's name repeats")
    return found


def _figures(what: str, values: Mapping[str, float]) -> dict[str, float]:
    """Named numbers of a peer, sorted by name; whether they are finite, their reader judges."""
    bounds.count(what, values, MAX_FIGURES)
    return {bounds.name(f"name in {what}", name): values[name] for name in sorted(values)}


def message_from(message: pb.FromWorker) -> ev.PeerMessage | None:
    """The event for a message; None for spans and log lines, which decide nothing.

    BadFrame when a bound is broken or the kind is unknown.
    """
    body = message.WhichOneof("body")
    if body in ("spans", "log"):
        return None
    read = _READERS.get(body or "")
    if read is None:
        raise BadFrame(f"a session message of kind {body!r}, which does not belong here")
    found: ev.PeerMessage = read(getattr(message, body or ""))
    return found


def tensors_from(messages: Iterable[job_pb.TensorBlob]) -> dict[str, str]:
    """Names to blob hashes; BadFrame when a bound is broken."""
    listed = bounds.count("tensors", list(messages), MAX_ITEMS)
    return {bounds.name("tensor name", t.name): bounds.blob_hash("tensor blob", t.blob) for t in listed}


def _heartbeat(m: pb.Heartbeat) -> ev.Heartbeat:
    job = bounds.text("job", m.job, MAX_NAME_CHARS)
    what, seconds = clean(m.waits_what, 24), bounds.number("waits_s", m.waits_s, 0.0, MAX_SECONDS)
    waits = ev.Waits(clean(m.waits_for, MAX_NAME_CHARS), what, m.waits_step, seconds) if what else None
    guest = _guest(m.guest) if m.HasField("guest") else ev.UNLIMITED
    figures_of = (m.worker_time_s, job, m.plan_version, m.step, m.progress, m.memory_bytes)
    peak = bounds.within("memory_peak_bytes", m.memory_peak_bytes, 0, MAX_MEMORY_BYTES)
    return ev.Heartbeat(*figures_of, waits, m.logged_from, guest, peak)


def _ops_probed(m: pb.OpsProbed) -> ev.OpsProbed:
    timings = {
        bounds.name("signature", t.signature): (t.forward_s, t.backward_s)
        for t in bounds.count("op timings", m.timings, MAX_ITEMS)
    }
    return ev.OpsProbed(m.request, timings, clean(m.error, MAX_REASON_CHARS))


def _link_probed(m: pb.LinkProbed) -> ev.LinkProbed:
    peer = bounds.name("peer", m.peer)
    return ev.LinkProbed(m.request, peer, m.rtt_s, m.bandwidth_bps, clean(m.error, MAX_REASON_CHARS))


def _peer_joined(m: pb.PeerJoined) -> ev.PeerJoined:
    if m.way not in ("", "local", "direct", "reversed", "relayed"):
        raise BadFrame(f"joined {m.way[:40]!r}; possible are local, direct, reversed, relayed")
    return ev.PeerJoined(bounds.name("peer", m.peer), m.way, clean(m.relay, MAX_RELAY_CHARS))


def _ready(m: pb.StepReady) -> ev.StepReady:
    return ev.StepReady(
        job=m.job,
        version=m.plan_version,
        step=m.step,
        losses=tuple(bounds.count("losses", m.losses, MAX_LOSSES)),
        square_norms=tuple(bounds.count("squared norms", m.square_norms, MAX_ITEMS)),
        finite=m.finite,
        forward_s=m.forward_s,
        backward_s=m.backward_s,
        waited_s=m.waited_s,
        optimizer_s=m.optimizer_s,
        handling_s=m.handling_s,
        weights=tuple(bounds.count("weights of losses", m.weights, MAX_LOSSES)),
        links=tuple(
            ev.Goodput(
                peer=bounds.name("peer", g.peer),
                n_bytes=g.bytes,
                busy_s=g.busy_s,
                rtt_s=g.rtt_s,
                dense_bytes=g.dense_bytes,
                encode_s=g.encode_s,
                decode_s=g.decode_s,
                quickest_bps=g.quickest_bps,
            )
            for g in bounds.count("link figures", m.links, MAX_STAGES)
        ),
        digest=_digest(m.digest),
        receipt=_receipt(m.receipt) if m.HasField("receipt") else None,
    )


def _receipt(m: pb.ExchangeReceipt) -> ev.RoundReceipt:
    return ev.RoundReceipt(
        m.round,
        tuple(bounds.count("ranks of a round", m.included, MAX_STAGES)),
        bounds.number("share of a round", m.share, 0.0, 1.0),
        m.sent_bytes,
        m.received_bytes,
        bounds.text("digest of a round", m.digest, MAX_NAME_CHARS),
        {total.owner: _total(total) for total in bounds.count("totals of a round", m.totals, MAX_STAGES)},
    )


def _total(m: pb.OwnedTotal) -> str:
    if len(m.digest) != ROUND_DIGEST_BYTES:
        raise BadFrame(f"a digest of a total of {len(m.digest)} bytes, not {ROUND_DIGEST_BYTES}")
    return m.digest.hex()


def _digest(m: pb.StepDigest) -> ev.Digest:
    for name, value in (("gradients", m.gradients), ("inputs", m.inputs)):
        if len(value) not in (0, DIGEST_BYTES):
            raise BadFrame(f"a digest of {name} of {len(value)} bytes, not {DIGEST_BYTES}")
    return ev.Digest(m.gradients.hex(), m.inputs.hex())


def _eval_ready(m: pb.EvalReady) -> ev.EvalReady:
    loss = m.loss if m.HasField("loss") else None
    coded = m.coded_loss if m.HasField("coded_loss") else None
    return ev.EvalReady(m.job, m.plan_version, m.step, loss, coded, _figures("metrics", m.metrics))


def _stored(m: pb.StateStored) -> ev.StateStored:
    error = clean(m.error, MAX_REASON_CHARS)
    return ev.StateStored(m.job, m.plan_version, m.step, tensors_from(m.tensors), error, kept=m.kept)


def _failed(m: pb.StageFailed) -> ev.StageFailed:
    reason = clean(m.reason, MAX_REASON_CHARS)
    lost = bounds.name("lost peer", m.lost_peer) if m.lost_peer else ""
    n_bytes = bounds.within("memory_bytes", m.memory_bytes, 0, MAX_MEMORY_BYTES)
    return ev.StageFailed(m.job, m.plan_version, m.step, reason, lost, n_bytes)


def _update_ready(m: pb.UpdateReady) -> ev.UpdateReady:
    host = _host_rows(m) if m.order else None
    return ev.UpdateReady(
        job=bounds.name("job", m.job),
        round=m.round,
        update=bounds.blob_hash("update", m.update.hash) if host is None or host.rows else "",
        update_bytes=m.update.size,
        n_samples=m.n_samples,
        steps=m.steps,
        scalars=_figures("scalars", m.scalars),
        metrics=_figures("metrics", m.metrics),
        square_loss=m.square_loss,
        train_s=_seconds("train_s", m.train_s),
        upload_bytes=_moved("upload_bytes", m.upload_bytes),
        upload_s=_seconds("upload_s", m.upload_s),
        download_bytes=_moved("download_bytes", m.download_bytes),
        download_s=_seconds("download_s", m.download_s),
        host=host,
    )


def _host_rows(m: pb.UpdateReady) -> ev.HostRows:
    rows = {
        checked_name("client", r.client): ev.Row(
            r.n_samples, r.steps, r.loss, r.square_loss, _seconds("seconds", r.seconds)
        )
        for r in bounds.count("clients", m.rows, MAX_DRAWN)
    }
    bounds.count("refused clients", m.refused, MAX_DRAWN)
    refused = {checked_name("client", who): clean(why, MAX_WHY_CHARS) for who, why in m.refused.items()}
    loads, sums = (dict(bounds.count("bounds of sums", held, MAX_TERMS)) for held in (m.loads, m.sums))
    return ev.HostRows(rows, refused, loads, sums, m.stateful)


def _loaded(m: pb.Loaded) -> ev.Loaded:
    clients = {
        checked_name("client", e.client): bounds.within("samples of a client", e.n_samples, 1, MAX_SAMPLES)
        for e in bounds.count("clients of a population", m.clients, MAX_CLIENTS)
    }
    digests = tuple(map(_digest, bounds.count("repeated steps", m.repeated_digests, 2 * MOST_REPLAYED)))
    population, fetched_s = clean(m.population, 64), _seconds("fetched_s", m.fetched_s)
    return ev.Loaded(m.job, m.plan_version, m.took_s, population, clients, digests, fetched_s)


def _client_evaluated(m: pb.ClientEvaluated) -> ev.ClientEvaluated:
    return ev.ClientEvaluated(
        job=bounds.name("job", m.job),
        round=m.round,
        n_samples=m.n_samples,
        loss=m.loss,
        metrics=_figures("metrics", m.metrics),
        took_s=_seconds("took_s", m.took_s),
        download_bytes=_moved("download_bytes", m.download_bytes),
        download_s=_seconds("download_s", m.download_s),
        rows={
            checked_name("client", r.client): ev.EvaluatedRow(
                r.n_samples, r.loss, _figures("metrics", r.metrics)
            )
            for r in bounds.count("clients", m.rows, MAX_CLIENTS)
        },
    )


def _client_failed(m: pb.ClientFailed) -> ev.ClientFailed:
    job = bounds.name("job", m.job)
    return ev.ClientFailed(job, m.round, clean(m.reason, MAX_REASON_CHARS), clean(m.during, 16))


def _consent(m: pb.Consent) -> ev.ConsentSaid:
    word = bounds.one_of("consent", m.word, ConsentWord)
    graph = bounds.blob_hash("graph", m.graph) if m.graph else ""
    return ev.ConsentSaid(bounds.name("job", m.job), word, clean(m.reason, MAX_REASON_CHARS), graph)


def _moved(what: str, value: int) -> int:
    """Bytes of one round: a job's sums of them must go into the 64 bits that its owner is shown."""
    return bounds.within(what, value, 0, MAX_MOVED_BYTES)


def _seconds(what: str, value: float) -> float:
    return bounds.number(what, value, 0.0, MAX_SECONDS)


_READERS: dict[str, Callable[[Any], ev.PeerMessage]] = {
    "heartbeat": _heartbeat,
    "codec_speeds": lambda m: ev.CodecSpeeds(_speeds(m.speeds)),
    "ops_probed": _ops_probed,
    "link_probed": _link_probed,
    "peer_joined": _peer_joined,
    "loaded": _loaded,
    "failed": _failed,
    "ready": _ready,
    "eval_ready": _eval_ready,
    "stored": _stored,
    "update_ready": _update_ready,
    "client_evaluated": _client_evaluated,
    "client_failed": _client_failed,
    "consent": _consent,
    "copy_held": _copy_held,
    "copy_stored": _copy_stored,
    "leaving": lambda m: ev.Leaving(clean(m.reason, MAX_REASON_CHARS)),
}

# ---------------------------------------------------------------- to a worker


Way = Callable[[str, do.RelayUse], pb.RelayWay | None]
"""Makes a worker's way to a peer by relays."""


def no_way(peer: str, use: do.RelayUse) -> None:
    """Return that there is no relay."""


def to_worker(message: do.Message, graphs: GraphStore, way: Way = no_way) -> pb.ToWorker:
    """The pb2 form of what the scheduler wants said. Reads DAGs for Assign, KeepCopies and Participate."""
    match message:
        case do.StepCommit():
            return pb.ToWorker(commit=_commit(message))
        case do.StepStart(job, version, step):
            return pb.ToWorker(start=pb.StepStart(job=job, plan_version=version, step=step))
        case do.StepDiscard():
            discard = pb.StepDiscard(
                job=message.job,
                plan_version=message.version,
                step=message.step,
                reason=message.reason,
            )
            return pb.ToWorker(discard=discard)
        case do.Release(job, version, reason):
            return pb.ToWorker(release=pb.Release(job=job, plan_version=version, reason=reason))
        case do.Participate():
            return pb.ToWorker(participate=_participate(message, graphs))
        case do.TrainRound():
            train = pb.TrainRound(
                job=message.job,
                round=message.round,
                model=_model(message.model),
                codec=message.codec,
                ratio=message.ratio,
                deadline_s=message.deadline_s,
                seed=message.seed,
                order=message.order,
                clients=message.clients,
                drawn=message.drawn,
                drawn_samples=message.drawn_samples,
            )
            return pb.ToWorker(train_round=train)
        case do.EvaluateRound(job, at_round, model, deadline_s, clients):
            evaluate = pb.EvaluateRound(
                job=job, round=at_round, model=_model(model), deadline_s=deadline_s, clients=clients
            )
            return pb.ToWorker(evaluate_round=evaluate)
        case do.RoundTaken(job, at_round, taken, reason, clients):
            verdict = pb.RoundTaken(job=job, round=at_round, taken=taken, reason=reason, clients=clients)
            return pb.ToWorker(round_taken=verdict)
        case do.Dismiss(reason, for_good):
            return pb.ToWorker(dismiss=pb.Dismiss(reason=reason, for_good=for_good))
        case do.ProbeLink():
            probe = pb.ProbeLink(
                request=message.request,
                peer=_peer(message.peer, message, way),
                seconds=message.seconds,
                max_bytes=message.max_bytes,
                dial=message.dial,
            )
            return pb.ToWorker(probe_link=probe)
        case do.Revoked(worker, reason):
            return pb.ToWorker(revoked=pb.Revoked(worker=worker, reason=reason))
        case do.TrustAuthorities(ca_pem, left_s):
            return pb.ToWorker(authorities=pb.Authorities(ca_pem=ca_pem, left_s=left_s))
        case do.ExpectPeer():
            expected = _peer(message.peer, message, way)
            return pb.ToWorker(expect_peer=pb.ExpectPeer(peer=expected, dial=message.dial))
        case do.StoreCopy(job, name, blobs):
            return pb.ToWorker(store_copy=pb.StoreCopy(job=job, name=name, blobs=blobs))
        case do.KeepCopies(copies):
            kept = [_copy(copy, graphs, message.holders, way) for copy in copies]
            return pb.ToWorker(keep_copies=pb.KeepCopies(copies=kept))
        case do.Assign():
            return pb.ToWorker(assign=_assign(message, graphs, way))
        case do.Reconfigure():
            return pb.ToWorker(reconfigure=_reconfigure(message, way))
        case do.StandbysHere(job, version, peers, checks):
            peers_of = _peers(peers, way)
            beside = pb.Standbys(job=job, plan_version=version, peers=peers_of, checks=checks)
            return pb.ToWorker(standbys=beside)
        case do.ProbeOps():
            raise TypeError("op probes need their job's DAG: use probe_ops_message")


def probe_ops_message(message: do.ProbeOps, probes: dict[str, Probe]) -> pb.ToWorker:
    """The ops to time, with the shapes they need."""
    ops = [_probe(probes[signature]) for signature in message.signatures if signature in probes]
    return pb.ToWorker(probe_ops=pb.ProbeOps(request=message.request, ops=ops, precision=message.precision))


def _probe(probe: Probe) -> pb.ProbeOp:
    assert len(op_refs(probe.node)) == len(probe.op_inputs)  # noqa: S101 - the worker pairs them
    return pb.ProbeOp(
        signature=probe.signature,
        op=to_proto(probe.node),
        op_inputs=[to_proto(meta) for meta in probe.op_inputs],
        leaves=metas_to_proto({leaf.name: meta for leaf, meta in probe.leaves}),
    )


def _commit(message: do.StepCommit) -> pb.StepCommit:
    commit = pb.StepCommit(
        job=message.job,
        plan_version=message.version,
        step=message.step,
        gradient_scale=message.gradient_scale,
        store=message.store,
        evaluate=message.evaluate,
        last=message.last,
        evaluate_coded=message.evaluate_coded,
        replay_from=message.replay_from,
        keep=message.keep,
    )
    if message.relink is not None:
        commit.relink.CopyFrom(
            pb.Relink(
                plan_version=message.relink.version,
                first_step=message.relink.first_step,
                links=[to_proto(link) for link in message.relink.links],
            )
        )
    return commit


def _assign(message: do.Assign, graphs: GraphStore, way: Way) -> pb.Assign:
    plan, rank = message.plan, message.rank
    both = graphs.programs(plan)
    found = graphs.graphs(plan.dag_hash, plan.eval_dag_hash)
    mine = (both.train[rank], *both.evaluation[rank : rank + 1])
    states, tensors = leaf_metas(mine, found.states())
    assign = pb.Assign(
        job=message.job,
        plan_version=plan.version,
        training=to_proto(message.spec.training),
        program=to_proto(both.train[rank]),
        plan=to_proto(plan),
        peers=_peers(message.peers, way),
        tensors=[job_pb.TensorBlob(name=name, blob=message.tensors[name]) for name in tensors],
        metas=state_to_proto(states),
        data=to_proto(message.spec.data),
        first_step=message.first_step,
        holders=[pb.ExpectPeer(peer=_peer(h.peer, h, way), dial=h.dial) for h in message.holders],
        rank=rank,
    )
    if both.evaluation:
        assign.eval_program.CopyFrom(to_proto(both.evaluation[rank]))
    if message.spec.eval_data is not None:
        assign.eval_data.CopyFrom(to_proto(message.spec.eval_data))
    if message.replay is not None:
        assign.replay.CopyFrom(_replay(message.replay))
    return assign


def _copy(
    copy: do.StageCopy, graphs: GraphStore, holders: Mapping[str, do.ExpectPeer], way: Way
) -> pb.StageCopy:
    """The blobs of a stage's tensors, each once, with the most bytes that it may have; of a snapshot those
    that its rank stores."""
    most: dict[str, int] = {}
    for name, state in leaves_of(graphs, copy.plan, copy.rank).items():
        if copy.holder and name not in copy.tensors:
            continue
        blob = copy.tensors[name]
        most[blob] = max(most.get(blob, 0), most_bytes(state.meta, local=copy.plan.local))
    blobs = [pb.BlobRef(hash=blob, size=size) for blob, size in most.items()]
    found = [holders[copy.holder]] if copy.holder in holders else []
    return pb.StageCopy(
        job=copy.job,
        name=copy.name,
        blobs=blobs,
        working=bool(copy.holder),
        holders=[pb.ExpectPeer(peer=_peer(h.peer, h, way), dial=h.dial) for h in found],
    )


def _replay(replay: do.Replay) -> pb.Replay:
    eras = [
        pb.PlanEra(
            plan_version=era.version,
            first_step=era.first_step,
            links=[to_proto(link) for link in era.links],
        )
        for era in replay.eras
    ]
    return pb.Replay(
        first_step=replay.first_step,
        eras=eras,
        gradient_scales=replay.scales,
        stores=replay.stores,
        standby=replay.standby,
    )


def _reconfigure(message: do.Reconfigure, way: Way) -> pb.Reconfigure:
    return pb.Reconfigure(
        job=message.job,
        plan_version=message.plan.version,
        base_version=message.base,
        step=message.step,
        plan=to_proto(message.plan),
        peers=_peers(message.peers, way),
        standby=message.standby,
        store=message.store,
    )


def _peers(peers: Iterable[do.RankPeer], way: Way) -> list[pb.RankPeer]:
    return [pb.RankPeer(rank=p.rank, peer=_peer(p.worker, p, way), dial=p.dial) for p in peers]


def _participate(message: do.Participate, graphs: GraphStore) -> pb.Participate:
    spec = message.spec
    assert spec.federated is not None  # noqa: S101 - the scheduler says so
    found = graphs.graphs(spec.dag_hash, spec.eval_dag_hash)
    programs = tuple(
        stage_programs(dag, [0])[0] for dag in (found.train, found.evaluation) if dag is not None
    )
    states, tensors = leaf_metas(programs, found.states())
    sent = pb.Participate(
        job=message.job,
        version=message.version,
        training=to_proto(spec.training),
        federated=to_proto(spec.federated),
        program=to_proto(programs[0]),
        metas=state_to_proto(states),
        tensors=[job_pb.TensorBlob(name=name, blob=message.tensors[name]) for name in tensors],
        batch=spec.data.batch,
        owner=message.owner,
    )
    if len(programs) > 1:
        sent.eval_program.CopyFrom(to_proto(programs[1]))
    return sent


def _model(model: do.Model) -> pb.Model:
    sent = pb.Model(full=pb.BlobRef(hash=model.full.hash, size=model.full.size), base=model.base)
    if model.delta is not None:
        sent.delta.CopyFrom(pb.BlobRef(hash=model.delta.hash, size=model.delta.size))
    return sent


def _peer(worker: str, paths: do.ProbeLink | do.ExpectPeer | do.RankPeer, way: Way) -> pb.PeerAddress:
    addresses = [pb.Address(host=host, port=port) for host, port in paths.addresses]
    relay = way(worker, paths.relay) if paths.relay is not None else None
    return pb.PeerAddress(worker=worker, addresses=addresses, relay=relay)
