"""Records of a run for people: log lines, metric points, CSV, TensorBoard, trace spans.

All of it is bounded, none of it decides anything: a full disk here stops no job.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import structlog
from google.protobuf.message import DecodeError

from atoll.errors import UsageError
from coordinator.loggers.plugin import Logger, RunFacts, open_logger
from protos import atoll_control_pb2 as pb

MAX_POINTS = 200_000  # of one job, kept in memory for watchers
MAX_FIELDS_CHARS = 8192
RECENT_STEPS, RECENT_SPANS = 4, 50_000  # of spans in memory, for who looks at the last step
CSV_PIECE_BYTES = 256 << 10
BOARD = "tensorboard"  # whose files stand beside ours, where it is installed
_LENGTH = struct.Struct("<I")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Point:
    """Value of a metric after ``step`` committed steps."""

    step: int
    name: str
    value: float
    time_s: float


class Logs:
    """The newest log lines, numbered from the start of the process."""

    def __init__(self, keep: int) -> None:
        self._lines: deque[tuple[int, str, pb.LogLine]] = deque(maxlen=keep)
        self._next = 0

    def add(self, time_s: float, level: str, event: str, source: str, job: str, fields: Any) -> None:
        """Keep a line; ``job`` "" where it concerns none."""
        text = fields if isinstance(fields, str) else json.dumps(fields, default=str)
        line = pb.LogLine(
            time_s=time_s,
            level=level,
            event=event,
            source=source,
            fields_json=text[:MAX_FIELDS_CHARS],
            job=job,
        )
        self._lines.append((self._next, job, line))
        self._next += 1

    def after(self, number: int, job: str) -> tuple[int, list[pb.LogLine]]:
        """Lines of ``job`` ("" for all) from ``number`` on, and the number to go on with."""
        return self._next, [
            line for at, of, line in self._lines if at >= number and (not job or of in (job, ""))
        ]


@dataclass
class RunLog:
    """Files of a job under ``folder``: metrics.csv, TensorBoard events, spans."""

    folder: Path
    trace_bytes: int
    points: list[Point] = field(default_factory=list)
    first_point: int = 0  # number of points[0]; older ones were dropped
    _recent: deque[pb.TraceChunk] = field(default_factory=deque)
    _recent_spans: int = 0
    _csv: IO[str] | None = None
    _board: Logger | None = None
    _spans: IO[bytes] | None = None
    _spans_size: int = 0
    _broken: bool = False

    def measured(self, point: Point) -> None:
        """Keep a metric point and write it to the files."""
        self.points.append(point)
        if len(self.points) > MAX_POINTS:
            dropped = len(self.points) // 2
            del self.points[:dropped]
            self.first_point += dropped
        self._guard(lambda: self._write_point(point))

    def since(self, number: int) -> tuple[int, list[Point]]:
        """Points from ``number`` on, and the number to go on with."""
        return self.first_point + len(self.points), self.points[max(0, number - self.first_point) :]

    def traced(self, chunk: pb.TraceChunk) -> None:
        """Store spans; the older half is deleted when ``trace_bytes`` are reached."""
        self._keep(chunk)
        if self.trace_bytes:
            self._guard(lambda: self._write_spans(chunk))

    def _keep(self, chunk: pb.TraceChunk) -> None:
        self._recent.append(chunk)
        self._recent_spans += len(chunk.spans.spans)
        oldest = newest_step(chunk) - RECENT_STEPS
        while self._recent and (self._recent_spans > RECENT_SPANS or newest_step(self._recent[0]) < oldest):
            self._recent_spans -= len(self._recent.popleft().spans.spans)

    def recent(self, steps: int) -> list[pb.TraceChunk]:
        """Return the chunks in memory with a span of the newest ``steps`` steps, oldest first."""
        newest = max(map(newest_step, self._recent), default=0)
        return [chunk for chunk in self._recent if newest_step(chunk) > newest - steps]

    def chunks(self) -> Iterator[pb.TraceChunk]:
        """Every kept chunk, oldest first; a torn end is left out."""
        if self._spans is not None:
            self._guard(self._spans.flush)
        for name in ("spans.old", "spans"):
            path = self.folder / name
            if not path.exists():
                continue
            with path.open("rb") as file:
                while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
                    body = file.read(_LENGTH.unpack(head)[0])
                    try:
                        yield pb.TraceChunk.FromString(body)
                    except DecodeError:
                        return  # the end was torn off by a crash

    def metrics(self) -> Iterator[bytes]:
        """Yield metrics.csv in pieces, as long as it is when that begins; nothing where there is none."""
        path = self.folder / "metrics.csv"
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            left = os.fstat(file.fileno()).st_size
            while left > 0 and (data := file.read(min(left, CSV_PIECE_BYTES))):
                left -= len(data)
                yield data

    def flush(self) -> None:
        """Hand everything to the system."""
        for file in (self._csv, self._spans):
            if file is not None:
                self._guard(file.flush)

    def close(self) -> None:
        """Flush and close the files; they are opened again when needed."""
        for file in (self._csv, self._spans):
            if file is not None:
                self._guard(file.close)
        if (board := self._board) is not None:
            self._guard(lambda: board.close(""))
        self._csv = self._board = self._spans = None

    def _guard(self, work: Any) -> None:
        try:
            work()
        except OSError as error:
            if not self._broken:
                log.warning("runlog.failed", folder=str(self.folder), error=error.strerror)
            self._broken = True

    def _write_point(self, point: Point) -> None:
        if self._csv is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / "metrics.csv"
            fresh = not path.exists()
            self._csv = path.open("a", encoding="utf-8")
            if fresh:
                self._csv.write("step,name,value,time_s\n")
            self._board = _open_board(self.folder)
        self._csv.write(f"{point.step},{point.name},{point.value!r},{point.time_s:.3f}\n")
        if self._board is not None:
            self._board.add(point.step, {point.name: point.value}, point.time_s)

    def _write_spans(self, chunk: pb.TraceChunk) -> None:
        body = chunk.SerializeToString()
        if self._spans is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._spans = (self.folder / "spans").open("ab")
            self._spans_size = self._spans.tell()
        if self._spans_size + len(body) > self.trace_bytes // 2:
            full, self._spans = self._spans, None  # what fails from here on leaves no closed file behind
            full.close()
            (self.folder / "spans").replace(self.folder / "spans.old")
            self._spans = (self.folder / "spans").open("wb")
            self._spans_size = 0
        self._spans.write(_LENGTH.pack(len(body)) + body)
        self._spans_size += _LENGTH.size + len(body)


def newest_step(chunk: pb.TraceChunk) -> int:
    """Return the newest step that a chunk has a span of."""
    return max((span.step for span in chunk.spans.spans), default=0)


class RunLogs:
    """RunLogs by job, opened when first needed."""

    def __init__(self, root: Path, trace_bytes: int) -> None:
        self._root, self._trace_bytes = root, trace_bytes
        self._jobs: dict[str, RunLog] = {}

    def of(self, job: str) -> RunLog:
        """The job's RunLog; UsageError for a name that is not a plain file name."""
        if job not in self._jobs:
            if not job or "/" in job or job.startswith("."):
                raise UsageError(f"job {job[:80]!r} is not a name of a job")
            self._jobs[job] = RunLog(self._root / job, self._trace_bytes)
        return self._jobs[job]

    def forget(self, job: str) -> Path:
        """Close the job's files; returns their folder, which is to be deleted. UsageError as ``of``."""
        run = self.of(job)
        run.close()
        del self._jobs[job]
        return run.folder

    def flush(self) -> None:
        for run in self._jobs.values():
            run.flush()

    def close(self) -> None:
        for run in self._jobs.values():
            run.close()


def _open_board(folder: Path) -> Logger | None:
    try:
        return open_logger(BOARD, RunFacts(folder.name, folder.name, folder))
    except UsageError:
        return None  # the extra atoll[tensorboard] is not installed
