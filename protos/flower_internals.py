"""The one file that knows Flower's insides; everything else uses ``flwr.app``, ``.clientapp`` and
``.serverapp`` alone. Checked against flwr 1.41.

It takes from inside the identity that a process's new messages carry and messages with
metadata of our making. It also takes the two types that ``Grid`` names in its signatures, how an app is
looked up, and the words of the strategy's log from which progress is read.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from flwr.app import Error, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.object_ref import load_app
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

LOG_NAME = "flwr"
SERVER_NODE = 1  # the id that Flower gives the server's side
# Flower's error codes (flwr.common.constant.ErrorCode).
CANNOT_LOAD, APP_RAISED, REPLY_UNAVAILABLE, NODE_UNAVAILABLE, APP_CRASHED = 1, 2, 4, 5, 8

_ROUND = frozenset({"[ROUND %s/%s]", "[ROUND %s]"})
_WAITING = "Waiting for nodes to connect: %d connected (minimum required: %d)."
_FROM_LEGACY = {"fit progress: (%s, %s, %s, %s)": 1, "initial parameters (loss, other metrics): %s, %s": 0}
"""Where its arguments name the loss; metrics follow."""
_SUMMARY = "[SUMMARY]"
_FROM_CLIENTS = "Aggregated MetricRecord: %s"
_FROM_SERVER = ("\t└──> MetricRecord: %s", "Initial global evaluation results: %s")


class AppNotLoaded(Exception):
    """A module:attribute that cannot be resolved."""


def take_identity(run: int, node: int) -> None:
    """Make messages of this process those of this run and node from now on; one app a process."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, node, run


def find_app(reference: str, folder: Path) -> Any:
    """The object that ``module:attribute`` names, its module found in ``folder`` first.

    Raises AppNotLoaded for an unknown attribute, and whatever importing the module raises.
    """
    return load_app(reference, AppNotLoaded, folder)


def named(message: Message, message_id: str) -> None:
    """Give a message its id, which Flower lets nobody else set."""
    message.metadata.__dict__["_message_id"] = message_id


def task_message(
    content: RecordDict,
    *,
    run: int,
    message_id: str,
    node: int,
    kind: str,
    group: str,
    created_s: float,
    ttl_s: float,
) -> Message:
    """The instruction as its receiver sees it."""
    metadata = Metadata(run, message_id, SERVER_NODE, node, "", group, created_s, ttl_s, kind, run, run)
    return make_message(metadata=metadata, content=content)


def reply_message(body: RecordDict | Error, to: Metadata, message_id: str, created_s: float) -> Message:
    """A reply to the instruction with metadata ``to``, as its receiver sees it."""
    metadata = Metadata(
        to.run_id,
        message_id,
        to.dst_node_id,
        to.src_node_id,
        to.message_id,
        to.group_id,
        created_s,
        max(to.ttl - (created_s - to.created_at), 1e-3),
        to.message_type,
        to.dst_task_id,
        to.src_task_id,
    )
    if isinstance(body, Error):
        return make_message(metadata=metadata, error=body)
    return make_message(metadata=metadata, content=body)


def run_of(run: int, name: str, version: str, bundle: str, config: dict[str, Any]) -> Run:
    """Run that ``Grid.run`` shows to an app."""
    found = Run.create_empty(run)
    found.fab_id, found.fab_version, found.fab_hash = name, version, bundle
    found.override_config = config
    return found


def node_info(node: int, name: str) -> NodeInfo:
    """Facts that ``Grid.get_nodes`` shows of a node."""
    return NodeInfo(node_id=node, name=name, status="online")


def progress_of(record: logging.LogRecord) -> tuple[str, Any] | None:
    """Parse a line of a strategy's log, or of a legacy server's: ("round", (n, of)), of 0 where it is not
    said; ("clients", metrics), ("server", metrics), ("waiting", (nodes, needed)), ("summary", ()) before a
    legacy run's history; None for every other line."""
    text, arguments = str(record.msg), record.args
    if not isinstance(arguments, tuple) or not arguments:
        # logging unwraps a single mapping argument.
        arguments = (arguments,)
    if text in _ROUND:
        numbers = [int(str(number)) for number in arguments]
        return "round", (numbers[0], numbers[1] if len(numbers) > 1 else 0)
    if text == _WAITING:
        return "waiting", arguments
    if text.endswith(_FROM_CLIENTS):
        return "clients", _metrics(arguments[0])
    if text in _FROM_SERVER:
        return "server", _metrics(arguments[0])
    if text in _FROM_LEGACY:
        loss, metrics = arguments[_FROM_LEGACY[text] :][:2]
        return "server", {"loss": loss, **_metrics(metrics)}
    return ("summary", ()) if text == _SUMMARY else None


def _metrics(record: Any) -> dict[str, Any]:
    return dict(record) if record is not None and hasattr(record, "keys") else {}
