"""A worker's session as messages: each kind of the stream by its class, and what must hold among fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.errors import BadFrame
from atoll.messages import from_worker as told
from protos import atoll_control_pb2 as pb
from protos import coding
from protos.bounds import blob_hash, within
from protos.coding import CHECKS, CODES, Form

FROM_WORKER: Mapping[str, type] = {
    "heartbeat": told.Heartbeat,
    "codec_speeds": told.CodecSpeeds,
    "ops_probed": told.OpsProbed,
    "link_probed": told.LinkProbed,
    "peer_joined": told.PeerJoined,
    "loaded": told.Loaded,
    "failed": told.StageFailed,
    "ready": told.StepReady,
    "eval_ready": told.EvalReady,
    "stored": told.StateStored,
    "update_ready": told.UpdateReady,
    "client_evaluated": told.ClientEvaluated,
    "client_failed": told.ClientFailed,
    "consent": told.ConsentSaid,
    "copy_held": told.CopyHeld,
    "copy_stored": told.CopyStored,
    "leaving": told.Leaving,
}
"""Kinds of what a worker says that its coordinator acts upon, by the field of ``FromWorker``."""
_NAMES = {kind: name for name, kind in FROM_WORKER.items()}


def from_worker(message: pb.FromWorker) -> Any:
    """Return what a worker says. Raises BadFrame where a bound is broken or the kind is unknown."""
    body = message.WhichOneof("body")
    kind = FROM_WORKER.get(body or "")
    if kind is None:
        raise BadFrame(f"a session message of kind {body!r}, which does not belong here")
    return coding.read(kind, getattr(message, body or ""))


def to_coordinator(value: Any) -> pb.FromWorker:
    """Return the message of what a worker says."""
    name = _NAMES[type(value)]
    fields = coding.fields_of(value, pb.FromWorker.DESCRIPTOR.fields_by_name[name].message_type)
    body: dict[str, Any] = {name: fields}
    return pb.FromWorker(**body)


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


def _check_update(update: told.UpdateReady) -> None:
    if update.host is None or update.host.rows:
        blob_hash("update", update.update)


CHECKS.update(
    {
        told.Guest: _check_guest,
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


CODES["waits"] = Form(_waits, _written_waits)
CODES["host rows"] = Form(_host_rows, _written_host_rows)
