"""Work's messages: pb2 from a worker to events, instructions to pb2. What arrives is bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from atoll.opdag import op_refs
from atoll.program import stage_programs
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.planning.costs.op_seconds import Probe
from coordinator.services.blob_rights import leaves_of, most_bytes
from coordinator.storage.graph_store import GraphStore, leaf_metas
from protos import atoll_control_pb2 as pb
from protos import atoll_job_pb2 as job_pb
from protos import coding
from protos.convert import metas_to_proto, state_to_proto, to_proto
from protos.session import from_worker, said_to_worker

# ---------------------------------------------------------------- from a worker


def introduction_from(m: pb.Introduction) -> ev.Introduction:
    """Who a worker says it is; BadFrame when a bound is broken."""
    return coding.read(ev.Introduction, m)


def message_from(message: pb.FromWorker) -> ev.PeerMessage | None:
    """The event for a message; None for spans and log lines, which decide nothing.

    BadFrame when a bound is broken or the kind is unknown.
    """
    if message.WhichOneof("body") in ("spans", "log"):
        return None
    found: ev.PeerMessage = from_worker(message)
    return found


# ---------------------------------------------------------------- to a worker


Way = Callable[[str, do.RelayUse], pb.RelayWay | None]
"""Makes a worker's way to a peer by relays."""


def no_way(peer: str, use: do.RelayUse) -> None:
    """Return that there is no relay."""


def to_worker(message: do.Message, graphs: GraphStore, way: Way = no_way) -> pb.ToWorker:
    """The pb2 form of what the scheduler wants sent. Reads DAGs for Assign, KeepCopies and Participate."""
    match message:
        case do.Participate():
            return pb.ToWorker(participate=_participate(message, graphs))
        case do.ProbeLink():
            probe = pb.ProbeLink(
                request=message.request,
                peer=_peer(message.peer, message, way),
                seconds=message.seconds,
                max_bytes=message.max_bytes,
                dial=message.dial,
            )
            return pb.ToWorker(probe_link=probe)
        case do.ExpectPeer():
            expected = _peer(message.peer, message, way)
            return pb.ToWorker(expect_peer=pb.ExpectPeer(peer=expected, dial=message.dial))
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
    return said_to_worker(message)


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
        assign.replay.CopyFrom(coding.write(message.replay, pb.Replay))
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


def _peer(worker: str, paths: do.ProbeLink | do.ExpectPeer | do.RankPeer, way: Way) -> pb.PeerAddress:
    addresses = [pb.Address(host=host, port=port) for host, port in paths.addresses]
    relay = way(worker, paths.relay) if paths.relay is not None else None
    return pb.PeerAddress(worker=worker, addresses=addresses, relay=relay)
