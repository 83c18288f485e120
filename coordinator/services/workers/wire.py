"""Work's messages: pb2 from a worker to events, instructions to pb2. What arrives is bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from atoll.job import Precision
from atoll.messages import to_worker as asked
from atoll.program import programs_of, stage_programs
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages import peer_tensors
from coordinator.services.blobs.rights import leaves_of, most_bytes
from coordinator.storage.graph_store import GraphStore, leaf_metas
from protos import atoll_control_pb2 as pb
from protos import coding
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


Way = Callable[[str, do.RelayUse], asked.RelayOffer | None]
"""Makes a worker's way to a peer by relays."""


def no_way(peer: str, use: do.RelayUse) -> None:
    """Return that there is no relay."""


def to_worker(message: do.Message, graphs: GraphStore, way: Way = no_way) -> pb.ToWorker:
    """The pb2 form of what the scheduler wants sent. Reads DAGs for Assign, KeepCopies and Participate."""
    match message:
        case do.Participate():
            return said_to_worker(_participate(message, graphs))
        case do.ProbeLink(request, link, seconds, most):
            return said_to_worker(asked.ProbeLink(request, _link(link, way), seconds, most))
        case do.ExpectPeer():
            return said_to_worker(_link(message, way))
        case do.KeepCopies(copies):
            kept = tuple(_copy(copy, graphs, message.holders, way) for copy in copies)
            return said_to_worker(asked.KeepCopies(kept))
        case do.Assign():
            return said_to_worker(_assign(message, graphs, way))
        case do.Reconfigure(job, plan, base, step, peers, standby, store, joining):
            ranks = _peers(peers, way)
            change = asked.Reconfigure(job, plan.version, base, step, plan, ranks, standby, store, joining)
            return said_to_worker(change)
        case do.StandbysHere(job, version, peers, checks):
            return said_to_worker(asked.Standbys(job, version, _peers(peers, way), checks))
        case do.ProbeOps():
            raise TypeError("op probes need their job's DAG: use probe_ops_message")
    return said_to_worker(message)


def probe_ops_message(message: do.ProbeOps, probes: Mapping[str, asked.OpProbe]) -> pb.ToWorker:
    """The ops to time, with the shapes they need."""
    ops = tuple(probes[signature] for signature in message.signatures if signature in probes)
    return said_to_worker(asked.ProbeOps(message.request, ops, Precision(message.precision)))


def _assign(message: do.Assign, graphs: GraphStore, way: Way) -> asked.Assign:
    plan, rank, spec = message.plan, message.rank, message.spec
    first, *further = pieces = graphs.programs(plan)[rank]
    found = graphs.graphs(plan.dag_hash, plan.eval_dag_hash)
    states, names = leaf_metas(programs_of(pieces), found.states())
    kept = peer_tensors.kept(message.tensors, names, plan.places[rank].replica) if plan.keeps else {}
    return asked.Assign(
        job=message.job,
        version=plan.version,
        training=spec.training,
        program=first.train,
        eval_program=first.evaluation,
        plan=plan,
        peers=_peers(message.peers, way),
        tensors={name: message.tensors[name] for name in names} | kept,
        states=states,
        data=spec.data,
        eval_data=spec.eval_data,
        first_step=message.first_step,
        replay=message.replay,
        holders=tuple(_link(holder, way) for holder in message.holders),
        rank=rank,
        further=tuple(asked.FurtherPiece(*both) for both in further),
        owner=spec.owner if spec.data.pinned is not None else "",
        joining=message.joining,
    )


def _copy(
    copy: do.StageCopy, graphs: GraphStore, holders: Mapping[str, do.ExpectPeer], way: Way
) -> asked.StageCopy:
    """The blobs of a stage's tensors, each once, with the most bytes that it may have; of a snapshot those
    that its rank stores."""
    most: dict[str, int] = {}
    for name, state in leaves_of(graphs, copy.plan, copy.rank).items():
        if copy.holder and name not in copy.tensors:
            continue
        blob = copy.tensors[name]
        most[blob] = max(most.get(blob, 0), most_bytes(state.meta, local=copy.plan.local))
    found = [holders[copy.holder]] if copy.holder in holders else []
    links = tuple(_link(holder, way) for holder in found)
    return asked.StageCopy(copy.job, copy.name, most, bool(copy.holder), links)


def _peers(peers: Iterable[do.RankPeer], way: Way) -> tuple[asked.RankPeer, ...]:
    return tuple(asked.RankPeer(peer.rank, _link(peer.link, way)) for peer in peers)


def _participate(message: do.Participate, graphs: GraphStore) -> asked.Participate:
    spec = message.spec
    assert spec.federated is not None  # noqa: S101 - the scheduler says so
    found = graphs.graphs(spec.dag_hash, spec.eval_dag_hash)
    programs = tuple(
        stage_programs(dag, [0])[0] for dag in (found.train, found.evaluation) if dag is not None
    )
    states, names = leaf_metas(programs, found.states())
    return asked.Participate(
        job=message.job,
        version=message.version,
        training=spec.training,
        federated=spec.federated,
        program=programs[0],
        eval_program=programs[1] if len(programs) > 1 else None,
        states=states,
        tensors={name: message.tensors[name] for name in names},
        batch=spec.data.batch,
        owner=message.owner,
        client=message.client,
    )


def _link(link: do.ExpectPeer, way: Way) -> asked.PeerLink:
    relay = way(link.peer, link.relay) if link.relay is not None else None
    return asked.PeerLink(link.peer, asked.Paths(link.addresses, link.dial, relay))
