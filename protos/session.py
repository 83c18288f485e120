"""A worker's session as messages: each kind of the stream by its class, and what must hold among fields."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, get_args

import protos.convert  # noqa: F401 - it registers how fields of graphs and plans are read
from atoll.errors import BadFrame
from atoll.messages import from_worker as told
from atoll.messages import to_worker as asked
from atoll.opdag import leaf_refs
from protos import atoll_control_pb2 as pb
from protos import coding
from protos.bounds import blob_hash, within
from protos.coding import CHECKS, CODES, Form
from protos.relay_tickets import MAC_BYTES, TICKET_BYTES

_SAID = {kind.__name__: kind for kind in get_args(told.Message)}
FROM_WORKER: Mapping[str, type] = {
    field.name: _SAID[kind.name]
    for field in pb.FromWorker.DESCRIPTOR.fields
    if (kind := field.message_type) is not None and kind.name in _SAID
}
"""Kinds of what a worker says that its coordinator acts upon, by the field of ``FromWorker``."""
TO_WORKER: Mapping[str, type] = {
    "welcome": asked.Welcome,
    "probe_ops": asked.ProbeOps,
    "probe_link": asked.ProbeLink,
    "expect_peer": asked.PeerLink,
    "assign": asked.Assign,
    "reconfigure": asked.Reconfigure,
    "standbys": asked.Standbys,
    "participate": asked.Participate,
    "keep_copies": asked.KeepCopies,
    "start": asked.StepStart,
    "commit": asked.StepCommit,
    "discard": asked.StepDiscard,
    "release": asked.Release,
    "round_taken": asked.RoundTaken,
    "secure_order": asked.SecureOrder,
    "train_round": asked.TrainRound,
    "evaluate_round": asked.EvaluateRound,
    "dismiss": asked.Dismiss,
    "revoked": asked.Revoked,
    "authorities": asked.TrustAuthorities,
    "store_copy": asked.StoreCopy,
}
"""The same of what a coordinator says."""
_NAMES = {kind: name for kinds in (FROM_WORKER, TO_WORKER) for name, kind in kinds.items()}


def from_worker(message: pb.FromWorker) -> Any:
    """Return what a worker says. Raises BadFrame where a bound is broken or the kind is unknown."""
    body = message.WhichOneof("body")
    kind = FROM_WORKER.get(body or "")
    if kind is None:
        raise BadFrame(f"a session message of kind {body!r}, which does not belong here")
    return coding.read(kind, getattr(message, body or ""))


def to_worker(message: pb.ToWorker, kinds: Mapping[str, type] = TO_WORKER) -> Any:
    """Return what a coordinator says, as one of ``kinds``. Raises BadFrame where a bound is broken or the
    kind is unknown."""
    body = message.WhichOneof("body")
    if body is None:
        raise BadFrame("the coordinator sent a message of a kind this worker does not know; update it")
    return coding.read(kinds[body], getattr(message, body))


def to_coordinator(value: Any) -> pb.FromWorker:
    """Return the message of what a worker says."""
    return pb.FromWorker(**_body(value, pb.FromWorker.DESCRIPTOR))


def said_to_worker(value: Any) -> pb.ToWorker:
    """Return the message of what a coordinator says."""
    return pb.ToWorker(**_body(value, pb.ToWorker.DESCRIPTOR))


def _body(value: Any, descriptor: Any) -> dict[str, Any]:
    name = _NAMES[type(value)]
    return {name: coding.fields_of(value, descriptor.fields_by_name[name].message_type)}


# ---------------------------------------------------------------- checks and irregular fields


def _check_guest(guest: told.Guest) -> None:
    if guest.memory_limit_bytes:
        within("memory_limit_bytes", guest.memory_limit_bytes, told.MIN_MEMORY_BYTES, told.MAX_MEMORY_BYTES)


def _check_introduction(introduction: told.Introduction) -> None:
    if len({facts.name for facts in introduction.datasets}) < len(introduction.datasets):
        raise BadFrame("a data set's name repeats")


def _check_joined(joined: told.PeerJoined) -> None:
    if joined.way not in ("", "local", "direct", "reversed", "relayed"):
        raise BadFrame(f"joined {joined.way[:40]!r}; possible are local, direct, reversed, relayed")


def _check_held_weights(held: told.HeldWeights) -> None:
    size, n_bytes = told.HASH_BYTES, len(held.hashes)
    within("HeldWeights", n_bytes, 0, told.MAX_HELD_WEIGHTS * size)
    hashes = [held.hashes[at : at + size] for at in range(0, n_bytes, size)]
    if n_bytes % size or any(a >= b for a, b in pairwise(hashes)):
        raise BadFrame("hashes of held weights that are not whole or do not ascend")


def _check_update(update: told.UpdateReady) -> None:
    if update.host is None or update.host.rows:
        blob_hash("update", update.update)


def _check_commit(commit: asked.StepCommit) -> None:
    within("StepCommit.replay_from", commit.replay_from, 0, commit.step + 1)
    if commit.relink is not None:
        within("Relink.version", commit.relink.version, commit.version + 1, asked.MAX_VERSION)
        within("Relink.first_step", commit.relink.first_step, commit.step + 2, asked.MAX_STEP)


def _check_assign(assign: asked.Assign) -> None:
    within("Assign.rank", assign.rank, 0, len(assign.plan.places) - 1)


def check_reconfigure(change: Any) -> None:
    """A version after the one that it may have been given under. Raises BadFrame."""
    within("Reconfigure.version", change.version, change.base + 1, asked.MAX_VERSION)


def _check_planned(change: asked.Reconfigure) -> None:
    plan = change.plan
    if (plan.job, plan.version) != (change.job, change.version):
        raise BadFrame(f"plan of {plan.job} version {plan.version} said to be version {change.version}")


def _check_relay(offer: asked.RelayOffer) -> None:
    if len(offer.ticket) != TICKET_BYTES or len(offer.key) != MAC_BYTES:
        raise BadFrame(f"a relay's ticket of {len(offer.ticket)} bytes with a key of {len(offer.key)}")


def _check_op(op: asked.OpProbe) -> None:
    missing = [leaf.name for leaf in leaf_refs(op.node) if leaf.name not in op.leaves]
    if missing:
        raise BadFrame(f"op {op.node.target} to time lacks the shape of {missing[:3]}")


def check_replay(replay: asked.Replay, end: int, version: int, *, piped: bool = False) -> None:
    """Steps to repeat are those before ``end``, under versions before ``version``; of a standby later ones
    follow. ``piped``: own steps and rounds of a peer. Raises BadFrame."""
    first, standby = replay.first_step, replay.standby
    if piped:
        _check_repeated(replay, end, version)
        return
    within("commits of a pipeline's steps", len(replay.commits), 0, 0)
    steps = within("steps to repeat", end - first, int(not standby), told.MAX_REPEATED)
    within("gradient scales", len(replay.scales), steps, steps)
    for step in replay.stores:
        within("step to store after", step, first + 1, end)
    eras = replay.eras
    if not eras or eras[0].first_step > first:
        raise BadFrame(f"no version for step {first}, from which on a stage is to be repeated")
    if any(b.first_step <= a.first_step or b.version <= a.version for a, b in pairwise(eras)):
        raise BadFrame("versions of steps to repeat that do not ascend")
    if not standby:
        within("first step of a version", eras[-1].first_step, 0, end - 1)
        within("version of a step to repeat", eras[-1].version, 0, version - 1)


def _check_repeated(replay: asked.Replay, end: int, version: int) -> None:
    """Commits in the order of their steps, a round behind the own steps of its period. Raises BadFrame."""
    commits = replay.commits
    within("steps to repeat", len(commits), int(not replay.standby), told.MAX_REPEATED)
    within("gradient scales", len(replay.scales), 0, 0)
    within("versions beside commits", len(replay.eras), 0, 0)
    least, own, said = replay.first_step, False, 0
    for commit in commits:
        _check_commit(commit)
        if commit.relink is not None:
            raise BadFrame(f"step {commit.step} to repeat changes links")
        # A round has the number of its period's last step, which may be the one before.
        within("step to repeat", commit.step, least - (own and not commit.own), end)
        within("version of a step to repeat", commit.version, said, version - (not replay.standby))
        least, own, said = commit.step + 1, commit.own, commit.version


CHECKS.update(
    {
        asked.Assign: _check_assign,
        asked.Reconfigure: _check_planned,
        asked.RelayOffer: _check_relay,
        asked.OpProbe: _check_op,
        asked.StepCommit: _check_commit,
        told.Guest: _check_guest,
        told.HeldWeights: _check_held_weights,
        told.Introduction: _check_introduction,
        told.PeerJoined: _check_joined,
        told.UpdateReady: _check_update,
    }
)


def _waits(message: pb.Heartbeat) -> told.Waits | None:
    return coding.read(told.Waits, message) if message.waits_what else None


def _written_waits(waits: told.Waits | None) -> dict[str, Any]:
    return {} if waits is None else coding.fields_of(waits, pb.Heartbeat.DESCRIPTOR)


def _host_rows(message: pb.UpdateReady) -> told.HostRows | None:
    return coding.read(told.HostRows, message) if message.order else None


def _written_host_rows(host: told.HostRows | None) -> dict[str, Any]:
    return {} if host is None else coding.fields_of(host, pb.UpdateReady.DESCRIPTOR)


CODES["whole"] = Form(lambda message: message, lambda held: {})
CODES["waits"] = Form(_waits, _written_waits)
CODES["host rows"] = Form(_host_rows, _written_host_rows)
