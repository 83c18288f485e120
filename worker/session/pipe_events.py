"""Events of the computation on the pipe between the daemon and its compute process."""

from __future__ import annotations

from typing import Any

from atoll.errors import BadFrame
from protos import atoll_compute_pb2 as pb
from protos.bounds import name
from protos.text_limits import clean
from worker.session import events as ev

MAX_REASON_CHARS = 2000
MAX_KEY_CHARS = 64
_MESSAGES: dict[type, tuple[str, ...]] = {
    ev.StageLoaded: ("loaded",),
    ev.StepDone: ("ready",),
    ev.StepApplied: (),
    ev.EvalDone: ("eval_ready",),
    ev.Stored: ("stored",),
    ev.Kept: ("stored",),
    ev.Joined: ("loaded",),
    ev.UpdateStored: ("update_ready",),
    ev.RoundEvaluated: ("client_evaluated",),
    ev.Probed: ("ops_probed",),
    ev.StageBroke: (),
    ev.TurnBroke: (),
}
"""Events of a compute process, each with the message to the coordinator that it carries."""
_KINDS = {kind.__name__: kind for kind in _MESSAGES}


def posted(event: ev.Event) -> pb.Posted:
    """Encode an event."""
    return pb.Posted(
        kind=type(event).__name__,
        job=getattr(event, "job", ""),
        plan_version=getattr(event, "version", 0),
        step=getattr(event, "step", getattr(event, "round", 0)),
        message=getattr(event, "message", None),
        reason=getattr(event, "reason", "")[:MAX_REASON_CHARS],
        lost_peer=getattr(event, "lost_peer", ""),
        during=getattr(event, "during", ""),
        memory_bytes=getattr(event, "memory_bytes", 0),
    )


def _check_message(m: pb.Posted, message: Any) -> None:
    """The session goes by the event, the coordinator by its message: they are of one job and step."""
    for field, value in (
        ("job", m.job), ("plan_version", m.plan_version), ("step", m.step), ("round", m.step),
    ):  # fmt: skip
        found = getattr(message, field, value)
        if found != value:
            of = field.replace("_", " ")
            raise BadFrame(f"a message of {of} {str(found)[:60]!r} in an event of {of} {value!r}")


def event_of(m: pb.Posted) -> ev.Event:
    """Decode an event. Raises BadFrame for what no compute process of ours sends."""
    kind: Any = _KINDS.get(m.kind)
    if kind is None:
        raise BadFrame(f"an event of kind {m.kind[:60]!r}")
    body = m.message.WhichOneof("body") or ""
    if body not in (_MESSAGES[kind] or ("",)):
        raise BadFrame(f"{m.kind} with a message of kind {body!r}")
    fields: dict[str, Any] = {}
    if kind is not ev.Probed:
        fields["job"] = name("job", m.job)
        if body:
            _check_message(m, getattr(m.message, body))
    if "version" in kind.__slots__:
        fields["version"] = m.plan_version
    for step in ("step", "round"):
        if step in kind.__slots__:
            fields[step] = m.step
    if "message" in kind.__slots__:
        fields["message"] = m.message
    if "key" in kind.__slots__:
        fields["key"] = clean(m.message.update_ready.order, MAX_KEY_CHARS)
    if "reason" in kind.__slots__:
        fields["reason"] = clean(m.reason, MAX_REASON_CHARS)
    if "lost_peer" in kind.__slots__:
        fields["lost_peer"] = clean(m.lost_peer, 100)
    if "memory_bytes" in kind.__slots__:
        fields["memory_bytes"] = m.memory_bytes
    if "during" in kind.__slots__:
        fields["during"] = clean(m.during, 20)
    event: ev.Event = kind(**fields)
    return event


def turn_over(event: ev.Event) -> str | None:
    """Return the turn of a federated job that an event ends; a job joined again may be in another."""
    match event:
        case ev.Joined():
            return "load"
        case ev.UpdateStored():
            return "train"
        case ev.RoundEvaluated():
            return "evaluate"
        case ev.TurnBroke(during=during):
            return during
    return None
