"""The last step of a job as the page draws it, of the spans that its workers sent. Pure."""

from __future__ import annotations

from collections import defaultdict
from math import inf
from typing import TYPE_CHECKING, Any

from coordinator.dashboard.model import View

if TYPE_CHECKING:
    from collections.abc import Iterable

    from protos import atoll_control_pb2 as pb

MAX_SPANS = 4_000  # of a step
LAST_STEPS = 3  # asked for: the newest may be under way


def timeline_view(chunks: Iterable[pb.TraceChunk]) -> View:
    """The newest step of which every worker has sent spans, else the newest: by worker its spans in the
    coordinator's time, as [kind, micro-batch, start in s, end in s, peer, bytes]."""
    found: dict[int, dict[str, list[list[Any]]]] = defaultdict(lambda: defaultdict(list))
    stages: dict[str, int] = {}
    for chunk in chunks:
        stages[chunk.worker] = chunk.spans.stage
        for span in chunk.spans.spans:
            if inf > span.end_s >= span.start_s > -inf:
                start_s, end_s = (at + chunk.clock_offset_s for at in (span.start_s, span.end_s))
                row = [span.kind, span.micro, start_s, end_s, span.peer, span.bytes]
                found[span.step][chunk.worker].append(row)
    if not found:
        return View({"step": None, "ranks": []})
    whole = [step for step, ranks in found.items() if len(ranks) == len(stages)]
    step = max(whole or found)
    left, ranks = MAX_SPANS, []
    for worker, spans in sorted(found[step].items(), key=lambda item: (stages[item[0]], item[0])):
        shown = sorted(spans, key=lambda span: span[2])[:left]
        left -= len(shown)
        ranks.append({"worker": worker, "stage": stages[worker], "spans": shown})
    return View({"step": step, "ranks": ranks})
