"""Log lines of a compute process: printed as this worker's own, within a budget."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any

import structlog

from atoll.errors import BadFrame
from hostos.budget import Budget
from protos.text_limits import clean

if TYPE_CHECKING:
    from protos import atoll_compute_pb2 as pb

log = structlog.get_logger()

LEVELS = frozenset({"debug", "info", "warning", "error", "critical", "exception"})
BURST, PER_S = 1 << 20, 64 << 10  # characters
EVENT = re.compile(r"[a-z][a-z_.]{0,60}")


class ChildLog:
    """Prints what is not too much; the rest is left out."""

    def __init__(self) -> None:
        self._budget = Budget(BURST, PER_S)

    def write(self, m: pb.ComputeLog) -> None:
        """Print an event. Raises BadFrame for what is none."""
        if m.level not in LEVELS or not EVENT.fullmatch(m.event):
            raise BadFrame("an event of no kind in the log")
        if not self._budget.take(time.monotonic(), len(m.fields_json) + 100):
            return
        try:
            fields: dict[str, Any] = json.loads(m.fields_json)
        except (ValueError, RecursionError):
            raise BadFrame("an event with damaged fields in the log") from None
        if not isinstance(fields, dict):
            raise BadFrame("an event without fields in the log")
        shown = {
            clean(key, 60): value
            if isinstance(value, int | float | bool)
            else clean(str(value), 8000, lines=True)
            for key, value in fields.items()
            if key not in ("event", "level")
        }
        getattr(log, "error" if m.level == "exception" else m.level)(m.event, **shown)
