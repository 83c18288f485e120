"""Keeps an eye on the settings file and on this machine, and says what holds now whenever that changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from atoll.errors import AtollError
from worker.manners.applied import Applied, write_applied
from worker.manners.limits import Limits, limits_from
from worker.manners.settings_file import read_settings, stamp
from worker.manners.verdict import Conditions, Verdict, judge

if TYPE_CHECKING:
    from collections.abc import Mapping

log = structlog.get_logger()

LOOK_S = 0.2  # between two looks at the file
CONDITIONS_EVERY = 10  # looks between two at the machine
COUNTED_EVERY = 50  # looks between two notes of the day's bytes alone


@dataclass(frozen=True, slots=True)
class Manners:
    """What holds now: limits, memory budgets in bytes (0: what is free), and why it must not work ("": it
    may)."""

    limits: Limits = field(default_factory=Limits)
    memory_bytes: int = 0
    gpu_memory_bytes: int = 0
    paused: str = ""


class Keeper:
    """``look`` once, then ``start``. ``changed`` is called with what holds, in the thread that looks;
    ``today``: a day, ISO 8601, and the bytes sent and received on it."""

    def __init__(
        self,
        folder: Path,
        conditions: Conditions,
        changed: Callable[[Manners], None],
        today: Callable[[], tuple[str, int]],
        memory_of: Callable[[Mapping[str, Any]], tuple[int, int]],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """``memory_of(settings)``: checked budgets of memory and GPU memory, bytes."""
        self._folder, self._conditions, self._changed, self._today = folder, conditions, changed, today
        self._memory_of, self._now = memory_of, now
        self._stamp: tuple[int, int, int] | None = None
        self._manners = Manners()
        self._limits, self._memory = Limits(), (0, 0)
        self._verdict = Verdict()
        self._error = ""
        self._looks = 0
        self._applied: Applied | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="atoll-manners", daemon=True)

    @property
    def manners(self) -> Manners:
        """What held at the last look."""
        return self._manners

    def start(self) -> None:
        """Look again and again."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(LOOK_S * 5)
        if self._applied is not None:
            day, nbytes = self._today()
            self._note(replace(self._applied, day=day, day_bytes=nbytes))

    def look(self) -> None:
        """Look once at the file and, now and then or when it has changed, at the machine."""
        found = stamp(self._folder)
        fresh = found != self._stamp
        if fresh:
            self._stamp = found
            self._read()
        self._looks += 1
        if not fresh and self._looks % CONDITIONS_EVERY:
            return
        before, limits = self._verdict, self._limits
        day, nbytes = self._today()
        verdict = self._verdict = judge(limits, self._conditions, self._now(), nbytes, before)
        if verdict.unknown != before.unknown and verdict.unknown:
            log.warning("limits.unknown", not_told=list(verdict.unknown))
        manners = Manners(limits, *self._memory, paused=verdict.paused)
        if manners != self._manners:
            self._manners = manners
            self._changed(manners)
        applied = Applied(found, verdict.paused, verdict.unknown, day, nbytes, self._error)
        known = self._applied
        counted = known is not None and applied == replace(known, day=day, day_bytes=nbytes)
        if not counted or self._looks % COUNTED_EVERY == 0:
            self._note(applied)

    def _note(self, applied: Applied) -> None:
        if applied != self._applied:
            self._applied = applied
            write_applied(self._folder, applied)

    def _read(self) -> None:
        """Take in the file; where it is damaged, what held before holds on."""
        try:
            settings = read_settings(self._folder)
            self._limits, self._memory, self._error = limits_from(settings), self._memory_of(settings), ""
        except AtollError as error:
            self._error = str(error)
            log.error("limits.refused", reason=self._error)

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_S):
            try:
                self.look()
            except AtollError as error:  # a full disk
                log.warning("limits.not_written", reason=str(error))
