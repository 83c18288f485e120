"""The compute process's log: events go to the daemon, which writes them into the worker's."""

from __future__ import annotations

import json
from collections.abc import Callable, MutableMapping
from typing import Any

import structlog

from protos import atoll_compute_pb2 as pb

MAX_FIELDS_CHARS = 8000


def log_to(send: Callable[[pb.FromCompute], None]) -> None:
    """Send every event of structlog from now on."""

    def sent(_: object, level: str, fields: MutableMapping[str, Any]) -> str:
        event = str(fields.pop("event", ""))
        text = json.dumps(dict(fields), default=str)
        if len(text) > MAX_FIELDS_CHARS:
            text = json.dumps({"text": text[:MAX_FIELDS_CHARS]})
        send(pb.FromCompute(log=pb.ComputeLog(level=level, event=event, fields_json=text)))
        raise structlog.DropEvent

    structlog.configure(
        processors=[structlog.processors.format_exc_info, sent],
        wrapper_class=structlog.make_filtering_bound_logger(0),
        cache_logger_on_first_use=False,
    )
