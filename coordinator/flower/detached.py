"""Runs of apps without a terminal: what this machine knows of them, their output, and how they are ended.

    STATE/flower-runs/RUN/run.json      what runs and how it stands; its process alone writes it
    STATE/flower-runs/RUN/output.log    what the command would have shown, its end
    STATE/flower-runs/RUN/lock          held as long as that process lives, with its number

RUN is the run's number as the coordinator shows it. Whoever reads these files needs no coordinator.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from atoll.errors import StorageError, UsageError
from hostos.files.folder_lock import FolderLock, Holder, holder_of
from hostos.files.locked_json import read_object
from hostos.files.private_files import private_folder, write_private
from protos.text_limits import REASON_CHARS

FOLDER, RECORD, OUTPUT, LOCK = "flower-runs", "run.json", "output.log", "lock"
OLDER = "output.1.log"
MAX_RECORD_BYTES = 1 << 20
MAX_OUTPUT_BYTES = 16 << 20  # of each of the two files of output
MAX_ENDED = 50  # runs that are remembered after their end
STARTS_WITHIN_S = 60.0  # a run without a process may still be starting so long
STOPS_WITHIN_S = 20.0  # then its process is killed
LOOK_EVERY_S = 0.1
ROUNDS_EVERY_S = 0.5  # so often at most a round is written down
PIECE_BYTES = 1 << 16
_RUN = re.compile(r"[0-9a-f]{1,16}")


class Stage(StrEnum):
    """How far a run has come."""

    STARTING = "starting"
    WAITING = "waiting"  # for nodes
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"  # its process was killed


OVER = frozenset({Stage.DONE, Stage.FAILED, Stage.STOPPED, Stage.LOST})


@dataclass(frozen=True, slots=True)
class Detached:
    """A run of this machine, as its record has it."""

    run: str
    app: str
    version: str
    hash: str
    folder: str
    where: str  # HOST:PORT of the coordinator; "" a simulation on this machine
    started_s: float
    nodes: int = 0  # that take part; before it begins, that were asked for
    stage: Stage = Stage.STARTING
    round: int = 0
    rounds: int = 0
    reason: str = ""
    code: int | None = None
    ended_s: float = 0.0


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Detached:
        """The record, LOST where no process is left of a run that has not ended. UsageError without one."""
        holder = holder_of(self.path / LOCK)  # before the record: it is written before the lock goes
        items = read_object(self.path / RECORD, MAX_RECORD_BYTES)
        try:
            found = Detached(**{**items, "stage": Stage(items["stage"])})
        except (KeyError, TypeError, ValueError):
            raise UsageError(f"{self.path} holds no run that can be read; remove it") from None
        young = found.stage is Stage.STARTING and abs(time.time() - found.started_s) < STARTS_WITHIN_S
        if found.stage in OVER or holder is not None or young:
            return found
        return replace(found, stage=Stage.LOST, reason="its process was killed, or this machine restarted")

    def write(self, record: Detached) -> None:
        """Replace the record. StorageError."""
        write_private(self.path / RECORD, json.dumps(asdict(record), indent=1).encode() + b"\n")

    def output(self, follow: bool = False) -> Iterator[bytes]:
        """What the run printed, as far as it is kept; ``follow``: and goes on printing until it has ended."""
        path = self.path / OUTPUT
        with suppress(OSError), (self.path / OLDER).open("rb") as older:
            while piece := older.read(PIECE_BYTES):
                yield piece
        try:
            file = path.open("rb")
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}") from None
        try:
            while True:
                over = not follow or self.read().stage in OVER
                while piece := file.read(PIECE_BYTES):
                    yield piece
                moved = os.fstat(file.fileno()).st_ino != path.stat().st_ino
                if moved:
                    yield file.read()
                    file.close()
                    file = path.open("rb")
                elif over:
                    return
                else:
                    time.sleep(LOOK_EVERY_S)
        finally:
            file.close()

    def stop(self) -> bool:
        """End the run's process, in order where it can; False when none is left."""
        for number in (signal.SIGTERM, signal.SIGKILL):  # each once: the first starts to clean up
            holder = holder_of(self.path / LOCK)
            if holder is None or holder.process is None:
                return number is signal.SIGKILL
            with suppress(ProcessLookupError):
                os.kill(holder.process, number)
            until_s = time.monotonic() + STOPS_WITHIN_S
            while holder_of(self.path / LOCK) is not None and time.monotonic() < until_s:
                time.sleep(LOOK_EVERY_S)
        return True


# ---------------------------------------------------------------- all of them


def runs(state_dir: Path) -> list[Detached]:
    """Every run that is remembered, the newest first."""
    found = []
    for path in _folders(state_dir):
        with suppress(UsageError):
            found.append(RunFolder(path).read())
    return sorted(found, key=lambda record: record.started_s, reverse=True)


def find(state_dir: Path, prefix: str) -> RunFolder | None:
    """The run whose number begins so, the newest for ""; None when this machine has none.

    UsageError for what is not a number, and when several begin so.
    """
    if prefix and not _RUN.fullmatch(prefix):
        raise UsageError(f"{prefix[:40]!r} is not a run; `atoll flower list` shows them")
    found = [record.run for record in runs(state_dir) if record.run.startswith(prefix)]
    if prefix and len(found) > 1 and prefix not in found:
        raise UsageError(f"{len(found)} runs begin with {prefix}: {', '.join(found[:4])}; give more digits")
    if not found:
        return None
    return RunFolder(state_dir / FOLDER / (prefix if prefix in found else found[0]))


def begin(
    state_dir: Path, record: Detached, module: str, setup: Mapping[str, Any]
) -> tuple[RunFolder, subprocess.Popen[bytes]]:
    """Start ``module`` as a process of its own for this run; it reads ``setup`` and then does the rest.

    StorageError when the folder cannot be written.
    """
    _forget_oldest(state_dir)
    folder = RunFolder(state_dir / FOLDER / record.run)
    private_folder(folder.path)
    folder.write(record)
    try:
        with (folder.path / OUTPUT).open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(folder.path)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,  # neither Ctrl+C nor the terminal's end reaches it
            )
            assert process.stdin is not None  # noqa: S101 - a pipe
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(json.dumps(setup).encode())
    except OSError as error:
        raise StorageError(f"cannot start a run in {folder.path}: {error.strerror}") from None
    threading.Thread(target=process.wait, daemon=True).start()  # while this process lives, it is no zombie
    return folder, process


def _folders(state_dir: Path) -> list[Path]:
    home = state_dir / FOLDER
    return [path for path in home.iterdir() if _RUN.fullmatch(path.name)] if home.is_dir() else []


def _forget_oldest(state_dir: Path) -> None:
    over = [record.run for record in runs(state_dir) if record.stage in OVER]
    for run in over[MAX_ENDED - 1 :]:
        shutil.rmtree(state_dir / FOLDER / run, ignore_errors=True)


# ---------------------------------------------------------------- the process of a run


class Keeper:
    """The record and the output of one run, kept by the process that runs it; use it in ``with``."""

    def __init__(self, folder: RunFolder, clock: Callable[[], float] = time.time) -> None:
        """UsageError when another process runs it."""
        self._folder, self._clock = folder, clock
        self._lock = FolderLock(folder.path / LOCK, _refusal)
        self._record = folder.read()
        self._written_s = 0.0

    def __enter__(self) -> Self:
        reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor in (1, 2):
            os.dup2(writing, descriptor)
        os.close(writing)
        output = Output(self._folder.path)
        self._pump = threading.Thread(target=output.take, args=(reading,), name="atoll-output", daemon=True)
        self._pump.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Write the last of the output down, and let the run go."""
        sys.stdout.flush()
        sys.stderr.flush()
        nothing = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(nothing, descriptor)
        os.close(nothing)
        self._pump.join(STOPS_WITHIN_S)  # somebody it left behind may hold the pipe
        self._lock.release()

    def heard(self, event: Mapping[str, Any]) -> None:
        """Write an event of the run down, as far as it says how the run stands."""
        now_s, before = time.monotonic(), self._record
        match event["event"]:
            case "waiting" if before.stage in (Stage.STARTING, Stage.WAITING):
                reason = str(event["reason"])[:REASON_CHARS]
                self._record = replace(before, stage=Stage.WAITING, reason=reason)
            case "nodes":
                self._record = replace(before, nodes=len(event["nodes"]))
            case "fleet":
                self._record = replace(before, nodes=int(event["nodes"]))
            case "started":
                self._record = replace(before, stage=Stage.RUNNING, reason="")
            case "round":
                self._record = replace(before, round=int(event["round"]), rounds=int(event["rounds"]))
        same_stage = self._record.stage is before.stage
        if self._record == before or (same_stage and now_s - self._written_s < ROUNDS_EVERY_S):
            return
        self._written_s = now_s
        self._folder.write(self._record)

    def ended(self, stage: Stage, code: int, reason: str = "") -> None:
        """Write down how the run ended."""
        record = replace(self._record, stage=stage, code=code, reason=reason[:REASON_CHARS])
        self._folder.write(replace(record, ended_s=self._clock()))


class Output:
    """The newest bytes that a run printed, in two files of which the older goes."""

    def __init__(self, folder: Path, max_bytes: int = MAX_OUTPUT_BYTES) -> None:
        self._path, self._older, self._max_bytes = folder / OUTPUT, folder / OLDER, max_bytes

    def take(self, descriptor: int) -> None:
        """Write down what comes from a pipe until nobody holds its other end; it is then closed."""
        with os.fdopen(descriptor, "rb", buffering=0) as pipe:
            file = self._path.open("ab", buffering=0)
            try:
                while piece := pipe.read(PIECE_BYTES):
                    if file.tell() + len(piece) > self._max_bytes:
                        file.close()
                        self._path.replace(self._older)
                        file = self._path.open("ab", buffering=0)
                    with suppress(OSError):  # a full disk must not stop the run, whose pipe would fill
                        file.write(piece)
            finally:
                file.close()


def _refusal(holder: Holder) -> str:
    return f"process {holder.process or '?'} runs it already"
