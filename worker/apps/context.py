"""What the runs of apps on one worker share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from hostos.budget import Budget
from protos import atoll_apps_pb2 as pb
from protos.text_limits import LINE_CHARS, LINES_CHARS, LINES_CHARS_PER_S
from worker.apps.store import AppStore

if TYPE_CHECKING:
    from worker.config import WorkerConfig

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class AppContext:
    """Everything that the runs on this worker share."""

    config: WorkerConfig
    store: AppStore
    accepts: Callable[[pb.AppIdentity], bool]
    send: Callable[[pb.FromNode], None]
    epoch: Callable[[], int]  # rises with every new stream: what was under way is sent again
    make_room: Callable[[], None] = lambda: None  # called before an app's code is loaded
    printing: Budget = field(default_factory=lambda: Budget(LINES_CHARS, LINES_CHARS_PER_S))

    def printed(self, run: str, line: str) -> None:
        """Log what an app printed, as far as all apps here together may fill the log."""
        if self.printing.take(time.monotonic(), len(line) + LINE_CHARS):
            left_out = self.printing.refused()
            more = {"left_out_before": left_out} if left_out else {}
            log.info("app.printed", run=run, line=line, **more)
