"""What a run of a Flower app is, and what its machine may want done. Data only."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from atoll.errors import BadFrame
from protos import atoll_apps_pb2 as pb
from protos import bounds
from protos.app_bundle import MAX_CONFIG_KEYS
from protos.app_signing import KEY_BYTES, SIGNATURE_BYTES
from protos.telemetry import Event as Name
from protos.text_limits import clean, plain

HASH_CHARS = 64
MAX_KEY_BYTES = 64
MAX_TEXT_CHARS, MAX_REFERENCE_CHARS = 200, 1000
MAX_BEGIN_BYTES = 4 << 20


class View(Protocol):
    """The fleet as the scheduler has it."""

    def free(self) -> list[str]:
        """Workers without work, in join order."""
        ...

    def connected(self) -> int: ...

    def name_of(self, worker: str) -> str: ...


class Standing(StrEnum):
    """Where a worker stands in a run."""

    PREPARING = "preparing"  # was offered the app
    READY = "ready"
    REFUSED = "refused"
    NODE = "node"


# ---------------------------------------------------------------- what the shell is to do


@dataclass(frozen=True, slots=True)
class TellNode:
    worker: str
    message: pb.ToNode


@dataclass(frozen=True, slots=True)
class TellOwner:
    run: int
    message: pb.ToApp


@dataclass(frozen=True, slots=True)
class Lend:
    """The worker is busy with this run from now on."""

    worker: str
    run: int


@dataclass(frozen=True, slots=True)
class GiveBack:
    worker: str
    run: int
    reason: str


@dataclass(frozen=True, slots=True)
class DropParts:
    """The run needs these no more (None: any), as far as ``holder`` held them (None: whoever did):
    "" the owner, a worker that sent them, or the message whose reply they belong to."""

    run: int
    hashes: frozenset[str] | None
    holder: str | None


@dataclass(frozen=True, slots=True)
class HandOver:
    """What the worker sent belongs to the reply to ``message`` from now on."""

    run: int
    worker: str
    message: str
    hashes: frozenset[str]


@dataclass(frozen=True, slots=True)
class Say:
    event: Name
    level: str
    fields: dict[str, Any]


Instruction = TellNode | TellOwner | Lend | GiveBack | DropParts | HandOver | Say

# ---------------------------------------------------------------- state


@dataclass(slots=True)
class Place:
    """One worker in one run."""

    worker: str
    standing: Standing
    refusal: pb.AppRefused | None = None
    capacity: int = 1  # nodes that it may be
    seats: dict[int, int] = field(default_factory=dict)  # partition -> node that it is
    under_way: dict[str, pb.AppTask] = field(default_factory=dict)


@dataclass(slots=True)
class Run:
    """One run of one app."""

    run: int
    app: pb.AppIdentity
    key: bytes = b""  # its owner's; without one a run whose owner is there cannot be taken over
    owner: str = ""  # name of the token that opened it
    opened_s: float = 0.0
    places: dict[str, Place] = field(default_factory=dict)
    partitions: int = 0  # 0: has not begun
    owned: dict[int, str] = field(default_factory=dict)  # partition -> worker that has or had it last
    config: dict[str, pb.AppValue] = field(default_factory=dict)
    owner_gone_s: float | None = None
    waiting: dict[str, str] = field(default_factory=dict)  # message under way -> worker
    answered: dict[str, str] = field(default_factory=dict)  # reply with arrays not yet taken in -> worker

    where: dict[int, str] = field(default_factory=dict)  # node that takes part -> its worker

    def hosts(self) -> list[Place]:
        """Workers that take part, in the order of their first partitions."""
        found = [p for p in self.places.values() if p.standing is Standing.NODE]
        return sorted(found, key=lambda place: min(place.seats))

    def free(self) -> list[int]:
        """Partitions that no node has now: those that nobody had, then those of lost ones."""
        taken = {partition for place in self.hosts() for partition in place.seats}
        free = [partition for partition in range(self.partitions) if partition not in taken]
        return sorted(free, key=lambda partition: partition in self.owned)


def node_id(worker: str, number: int = 0) -> int:
    """The id of a worker's node ``number``, the same in every run and after every restart: 63 bits of a
    hash."""
    name = f"node:{worker}" if not number else f"node:{worker}:{number}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1 or 2


def checked_opening(request: pb.AppOpen) -> pb.AppOpen:
    """The opening when its figures and names are possible; BadFrame otherwise."""
    app = request.app
    if request.run == 0 or len(app.hash) != HASH_CHARS:
        raise BadFrame("a run without a number or without its app's hash")
    if len(request.key) > MAX_KEY_BYTES:
        raise BadFrame(f"a run's key of {len(request.key)} bytes; at most {MAX_KEY_BYTES} are accepted")
    if len(app.signer) not in (0, KEY_BYTES) or len(app.signature) not in (0, SIGNATURE_BYTES):
        raise BadFrame("the app's signature has a length that none has")
    for what, text in (("name", app.name), ("version", app.version), ("publisher", app.publisher)):
        if len(text) > MAX_TEXT_CHARS or not plain(text):
            raise BadFrame(f"the app's {what} {clean(text, 40)!r}; up to {MAX_TEXT_CHARS} plain characters")
    if len(app.client) > MAX_REFERENCE_CHARS or not plain(app.client):
        raise BadFrame(f"the app's ClientApp {clean(app.client, 40)!r}; write module:attribute")
    return request


def checked_begin(request: pb.AppBegin) -> pb.AppBegin:
    """The beginning when every node can hear of it; BadFrame otherwise."""
    bounds.count("run_config", request.run_config, MAX_CONFIG_KEYS)
    if request.ByteSize() > MAX_BEGIN_BYTES:
        raise BadFrame(f"a run_config of {request.ByteSize()} bytes; at most {MAX_BEGIN_BYTES} are accepted")
    return request


def checked_task(task: pb.AppTask, most_bytes: int) -> pb.AppTask:
    """The task when its figures are possible; BadFrame otherwise."""
    if not task.message or len(task.message) > 100 or len(task.kind) > 200 or len(task.group) > 1000:
        raise BadFrame("a message whose id, type or group is empty or too long")
    if len(task.content) > most_bytes:
        raise BadFrame(f"a message of {len(task.content)} bytes; at most {most_bytes} are accepted")
    return task
