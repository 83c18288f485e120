"""A job's timeline in the Chrome trace format, which Perfetto opens.

One process row per worker, one thread row per lane: computing, and each direction of each link.
Times are the coordinator's clock in microseconds from the job's first span. A send is joined to
its receive by an arrow. Source of the format: "Trace Event Format", phases X, M, s and f.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

COMPUTE = "compute"
NAMES = {
    "F": "forward",
    "B": "backward",
    "opt": "optimizer",
    "wait": "wait",
    "eval": "evaluate",
    "load": "load",
    "save": "save",
}


MICRO_BATCH = ("F", "B", "I", "W")


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """A span of one worker, in the coordinator's time."""

    worker: str
    stage: int
    kind: str  # F | B | I | W | send | recv | opt | wait | eval | load | save
    step: int
    micro: int
    start_s: float
    end_s: float
    plan_version: int = 0
    peer: str = ""  # of send and recv
    bytes: int = 0


def chrome_trace(
    job: str, spans: Iterable[TraceSpan], names: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The trace as one JSON-ready value; ``names`` gives workers a name for people.

    Spans may come in any order; one that ends before it begins counts as instantaneous.
    """
    ordered = sorted(spans, key=lambda span: (span.start_s, span.end_s, span.worker, span.kind))
    workers = list(dict.fromkeys(span.worker for span in sorted(ordered, key=lambda s: (s.stage, s.worker))))
    pid = {worker: number for number, worker in enumerate(workers, 1)}
    rows = _rows(ordered, names or {})
    tids: dict[str, dict[str, int]] = {worker: {COMPUTE: 0} for worker in workers}
    for span, row in zip(ordered, rows, strict=True):
        tids[span.worker].setdefault(row, len(tids[span.worker]))
    origin_s = ordered[0].start_s if ordered else 0.0
    events = list(_labels(ordered, pid, tids, names or {}))
    placed = []
    for span, row in zip(ordered, rows, strict=True):
        event = _event(span, pid[span.worker], tids[span.worker][row], origin_s)
        placed.append((span, event))
        events.append(event)
    events.extend(_arrows(placed))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"job": job}}


def _rows(ordered: list[TraceSpan], names: Mapping[str, str]) -> list[str]:
    """The lane of each span; spans that overlap on one link get lanes of their own."""
    free_at: dict[tuple[str, str], list[float]] = defaultdict(list)
    found = []
    for span in ordered:
        base = _lane(span, names)
        lanes = free_at[span.worker, base]
        number = next((n for n, end_s in enumerate(lanes) if end_s <= span.start_s), len(lanes))
        if number == len(lanes):
            lanes.append(span.end_s)
        lanes[number] = max(span.start_s, span.end_s)
        found.append(base if number == 0 else f"{base} ({number + 1})")
    return found


def _lane(span: TraceSpan, names: Mapping[str, str]) -> str:
    peer = names.get(span.peer, span.peer)
    if span.kind == "send":
        return f"to {peer}"
    if span.kind == "recv":
        return f"from {peer}"
    return COMPUTE


def _labels(
    ordered: list[TraceSpan],
    pid: Mapping[str, int],
    tids: Mapping[str, Mapping[str, int]],
    names: Mapping[str, str],
) -> Iterable[dict[str, Any]]:
    stages: dict[str, set[int]] = defaultdict(set)
    for span in ordered:
        stages[span.worker].add(span.stage)
    for worker, number in pid.items():
        held = ", ".join(str(stage) for stage in sorted(stages[worker]))
        label = f"{names.get(worker, worker)}, stage {held}"
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": label}}
        yield {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}
        for row, tid in tids[worker].items():
            yield {"ph": "M", "name": "thread_name", "pid": number, "tid": tid, "args": {"name": row}}
            yield {
                "ph": "M",
                "name": "thread_sort_index",
                "pid": number,
                "tid": tid,
                "args": {"sort_index": tid},
            }


def _event(span: TraceSpan, pid: int, tid: int, origin_s: float) -> dict[str, Any]:
    moved = span.kind in ("send", "recv")
    name = (
        f"{span.kind} {span.micro}" if moved or span.kind in MICRO_BATCH else NAMES.get(span.kind, span.kind)
    )
    facts: dict[str, Any] = {
        "step": span.step,
        "micro": span.micro,
        "stage": span.stage,
        "plan_version": span.plan_version,
    }
    if moved:
        facts |= {"peer": span.peer, "bytes": span.bytes}
    return {
        "ph": "X",
        "name": name,
        "cat": "link" if moved else COMPUTE,
        "pid": pid,
        "tid": tid,
        "ts": _us(span.start_s - origin_s),
        "dur": _us(max(0.0, span.end_s - span.start_s)),
        "args": facts,
    }


def _arrows(placed: list[tuple[TraceSpan, dict[str, Any]]]) -> Iterable[dict[str, Any]]:
    """The n-th send from a to b of a (step, micro) and the n-th receive of it are one message."""
    sent: dict[tuple[str, str, int, int, int], list[dict[str, Any]]] = defaultdict(list)
    got: dict[tuple[str, str, int, int, int], list[dict[str, Any]]] = defaultdict(list)
    for span, event in placed:
        if span.kind == "send":
            sent[span.worker, span.peer, span.plan_version, span.step, span.micro].append(event)
        elif span.kind == "recv":
            got[span.peer, span.worker, span.plan_version, span.step, span.micro].append(event)
    number = 0
    for key, sends in sent.items():
        for begin, end in zip(sends, got.get(key, []), strict=False):
            number += 1
            common = {"name": "message", "cat": "link", "id": number}
            yield common | {"ph": "s", "pid": begin["pid"], "tid": begin["tid"], "ts": begin["ts"]}
            yield common | {"ph": "f", "bp": "e", "pid": end["pid"], "tid": end["tid"], "ts": end["ts"]}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
