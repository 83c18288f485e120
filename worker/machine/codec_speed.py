"""Speeds of this machine's codecs, for the coordinator's choice: measured when there is time, then
remembered.

Measured after joining, before and between stages, on the thread that computes them and by the clock
that training counts them by. Each codec works for at least 60 ms of processor time, so that a quota
shows as it will in training, where a short burst would fit into what is left of a period. What the
budget does not reach is asked again at the next occasion. Figures are forgotten after a week, since
neighbours change.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import structlog
import torch

from atoll.errors import AtollError
from atoll.few_bits import Packed, pack, unpack
from atoll.job import Activations, Place
from compressors import catalogue, speed
from worker.elsewhere.shelf import FileShelf

if TYPE_CHECKING:
    from pathlib import Path

    from worker.machine.speed_file import Kept

log = structlog.get_logger()

METHOD = "sustained at work, values read late, files past the cache"
"""Figures of another way of measuring are not comparable."""
MAX_AGE_S = 7 * 86_400.0  # of what is kept
BUDGET_S = 2.5  # of one occasion, and one codec more
RATIO = 16.0  # for codecs whose speed depends on it
BEHIND = 64  # tensors of 1 MiB between writing a value, or a file, and reading it
FIRST = ("eden", "topk", "int8_block", "fp16", "bf16", "lossless")
"""Codecs that plans choose from: measured before anything else may begin, while the budget lasts."""

BROKEN = (RuntimeError, ImportError, OSError, TypeError, ValueError, ArithmeticError, AtollError)

Rates = dict[str, tuple[float, float]]
"""Codec -> dense bytes a second, encoding and decoding."""


KEPT = {activations.rate: bits for activations, bits in ((Activations.INT8, 8), (Activations.INT4, 4))}
"""Bits of saved activations, by the name under which their packing is reported: plans price it."""


def link_codecs() -> tuple[str, ...]:
    """Codecs that a plan may put on a link, most wanted first; ``none`` has nothing to measure."""
    able = [name for name in catalogue.link_codecs() if name != "none"]
    return tuple(sorted(able, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST)))


class CodecGauge:
    """Speeds of the link codecs on ``device``, as far as they are known.

    Begins with what was ``kept`` of the same ``circumstances`` (versions, device, threads, cores),
    none of it older than MAX_AGE_S. ``run`` belongs to one thread; ``rates`` may be read from any.
    ``now``: Unix seconds; ``at_work``: the clock of codecs at work (``CpuMeter.at_work_s``). ``scratch``:
    folder for what stages put on a disk.
    """

    def __init__(
        self,
        kept: Kept,
        circumstances: Mapping[str, object],
        device: torch.device | str = "cpu",
        clock: Callable[[], float] = time.perf_counter,
        now: Callable[[], float] = time.time,
        at_work: Callable[[], float] = time.perf_counter,
        scratch: Path | None = None,
    ) -> None:
        self._scratch = scratch
        self._kept, self._device, self._clock, self._now = kept, device, clock, now
        self._at_work = at_work
        self._key = {**{name: str(value) for name, value in circumstances.items()}, "method": METHOD}
        self._known = _read(kept.read(), self._key, now())  # codec -> encode, decode, when
        self._failed: set[str] = set()

    @property
    def rates(self) -> Rates:
        """Speeds that are known by now."""
        return {name: (encode, decode) for name, (encode, decode, _) in sorted(self._known.items())}

    @property
    def left(self) -> tuple[str, ...]:
        """Not known, most wanted first; a codec that failed is not tried again by this process."""
        codecs, first = link_codecs(), len(FIRST)
        disk = (Place.DISK.rate,) if self._scratch is not None else ()
        names = (*codecs[:first], *KEPT, *disk, *codecs[first:])
        return tuple(n for n in names if n not in self._known and n not in self._failed)

    def run(
        self,
        check: Callable[[], None] = lambda: None,
        wanted_elsewhere: Callable[[], bool] = lambda: False,
        budget_s: float = BUDGET_S,
    ) -> bool:
        """Measure what is left, for at most ``budget_s`` and one codec more, and keep it for the next
        start. ``check`` may raise, between codecs. False where others waited: once the first codecs
        are known they come before the rest."""
        started_s, before = self._clock(), len(self._known)
        tensor = None
        try:
            for name in self.left:
                check()
                if self._clock() - started_s > budget_s:
                    break
                if name not in (*KEPT, Place.DISK.rate, *FIRST) and wanted_elsewhere():
                    return False
                tensor = speed.sample(1 << 18, 0).to(self._device) if tensor is None else tensor
                self._measure(name, tensor)
            return True
        finally:
            if found := len(self._known) - before:
                log.info("codecs.measured", codecs=found, took_s=round(self._clock() - started_s, 3))
                kept = {"for": self._key, "bytes_per_s": self._known}
                self._kept.write(json.dumps(kept, indent=1).encode() + b"\n")

    def _measure(self, name: str, tensor: torch.Tensor) -> None:
        try:
            if name in KEPT:
                rate = speed.sustained(
                    packing(KEPT[name], tensor, self._at_work), tensor, clock=self._at_work
                )
            elif name == Place.DISK.rate:
                shelf = FileShelf(self._scratch, tensor.device)
                rate = speed.sustained(putting(shelf, tensor, self._at_work), tensor, clock=self._at_work)
            else:
                rate = speed.sustained_on(name, tensor, RATIO, clock=self._at_work)
        except BROKEN as error:  # one broken library must not keep a worker out
            log.warning("codec.not_measured", codec=name, reason=f"{type(error).__name__}: {error}")
            self._failed.add(name)
            return
        # A new mapping: ``rates`` may be read meanwhile.
        entry = (rate.encode_bytes_per_s, rate.decode_bytes_per_s, self._now())
        self._known = {**self._known, name: entry}


def packing(
    bits: int, tensor: torch.Tensor, clock: Callable[[], float]
) -> Iterator[tuple[float, float, int]]:
    """(seconds packing, seconds unpacking, bytes) of one tensor in few bits, time after time. As in a step,
    what is read was written some time before: a value that is still in the processor's caches is packed 1.3
    times as fast."""
    values = itertools.cycle([tensor.clone() for _ in range(BEHIND)])
    kept = deque[Packed](maxlen=BEHIND)
    for value in values:
        start_s = clock()
        kept.append(pack(value, bits))
        packed_s = clock()
        unpack(kept[0], tensor.dtype)
        yield packed_s - start_s, clock() - packed_s, kept[0].data.nbytes


def putting(
    shelf: FileShelf, tensor: torch.Tensor, clock: Callable[[], float]
) -> Iterator[tuple[float, float, int]]:
    """(seconds writing, seconds reading, bytes) of one tensor in a file, time after time. As in a backward,
    what is read was written some time before: the newest is still in the processor's caches."""
    data = tensor.view(torch.uint8).view(-1)
    while True:
        start_s = clock()
        number = shelf.put(data)
        written_s = clock()
        shelf.get(max(0, number - BEHIND))
        yield written_s - start_s, clock() - written_s, data.nbytes


def _read(data: bytes, key: Mapping[str, str], now_s: float) -> dict[str, tuple[float, float, float]]:
    """Return what was kept lately for these circumstances; nothing of others, or where it is damaged."""
    try:
        kept: Any = json.loads(data)
        if kept["for"] != key:
            return {}
        entries = {str(n): (float(e), float(d), float(at)) for n, (e, d, at) in kept["bytes_per_s"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    if not all(math.isfinite(rate) and rate > 0 for e, d, _ in entries.values() for rate in (e, d)):
        return {}
    # A clock that was set back since leaves an age below 0: of unknown length, so too old.
    return {name: entry for name, entry in entries.items() if 0.0 <= now_s - entry[2] < MAX_AGE_S}
