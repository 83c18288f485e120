"""The session's messages: pb2 from the coordinator to events, and refusals of what breaks a bound.

What the coordinator sends is checked like any peer's: a worker lends its machine, it does not trust.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from atoll.messages import from_worker as told
from atoll.messages import to_worker as asked
from protos import atoll_control_pb2 as pb
from protos.bounds import within
from protos.coding import CHECKS
from protos.session import TO_WORKER, check_reconfigure, check_replay, to_worker
from worker.session import events

if TYPE_CHECKING:
    from collections.abc import Iterable

    from worker.manners.limits import Limits

MEGA = 1e6
TURNS = {"participate": "load", "train_round": "train", "evaluate_round": "evaluate"}
"""Orders of a federated job, by what is being done then."""
ANSWERED = frozenset({"assign", "reconfigure", "commit", *TURNS})
"""Messages that must be answered even when refused, or a job would wait for ever."""
_OWN = (events.Assign, events.Reconfigure, events.Participate, events.ProbeOps)
KINDS = {
    **TO_WORKER,
    **dict(zip(("assign", "reconfigure", "participate", "probe_ops"), _OWN, strict=True)),
}
"""Messages of the stream by the field of ``ToWorker``, as far as this process reads them."""
Beside = (
    asked.PeerLink
    | asked.Revoked
    | asked.KeepCopies
    | asked.StoreCopy
    | asked.Standbys
    | asked.TrustAuthorities
)
"""What the coordinator says that no session has to do with; PeerLink: a peer that may connect from now on."""


def event_from(message: pb.ToWorker) -> events.Event | Beside:
    """The event that a message stands for. Raises BadFrame when it breaks a bound."""
    event: events.Event | Beside = to_worker(message, KINDS)
    if isinstance(event, events.Assign | events.Reconfigure):
        for entry in event.message.peers:
            entry.peer.ClearField("relay")  # what computes is given no key
    if isinstance(event, events.Assign):
        event.message.ClearField("holders")  # and asks nobody but this process
    return event


def refusal(message: pb.ToWorker, reason: str) -> told.StageFailed | told.ClientFailed:
    """The answer to a message of ``ANSWERED`` that breaks a bound."""
    body = message.WhichOneof("body") or ""
    refused = getattr(message, body)
    if body in TURNS:
        return told.ClientFailed(refused.job, getattr(refused, "round", 0), reason, TURNS[body])
    return told.StageFailed(refused.job, refused.plan_version, getattr(refused, "step", 0), reason)


def links_of(peers: Iterable[asked.RankPeer]) -> tuple[asked.PeerLink, ...]:
    """The ways to peers, each once."""
    return tuple({peer.link.worker: peer.link for peer in peers}.values())


def ranks_of(peers: Iterable[asked.RankPeer]) -> dict[str, int]:
    """Ranks of peers, by their workers."""
    return {peer.link.worker: peer.rank for peer in peers}


def measured(ready: told.StepReady, goodputs: Iterable[told.Goodput], beside_s: float) -> told.StepReady:
    """Add what the links to the step's peers measured, and the seconds that their messages took of the cores
    that compute; a peer that was not measured is left out."""
    codecs = {link.peer: link for link in ready.links}
    links = [
        replace(found, dense_bytes=used.dense_bytes, encode_s=used.encode_s, decode_s=used.decode_s)
        if (used := codecs.get(found.peer))
        else found
        for found in goodputs
    ]
    return replace(ready, handling_s=ready.handling_s + beside_s, links=tuple(links))


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


def _check_assign(assign: events.Assign) -> None:
    if assign.replay is not None:
        check_replay(assign.replay, assign.first_step, assign.version, piped=assign.piped)
    if assign.local is not None:
        within("steps", assign.steps, assign.first_step, asked.MAX_STEP)


CHECKS.update({events.Assign: _check_assign, events.Reconfigure: check_reconfigure})
