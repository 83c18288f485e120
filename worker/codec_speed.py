"""How fast this machine's codecs are, for the coordinator's choice: measured once, then remembered.

Measured as a worker joins, before it can hold a stage, with the threads that will compute. Each
rate is the best of two short runs. Where other programs run at the same time even the best may
read too slow; under a quota of processor time a burst fits into what was saved up and reads too
fast for what can be kept up. So the figures are forgotten after a month; training's own messages
show what a link takes.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import structlog

from atoll.errors import AtollError
from compressors import catalogue, speed
from compressors.catalogue import Use

if TYPE_CHECKING:
    from pathlib import Path

    import torch

log = structlog.get_logger()

FILE = "codec_speed.json"
MAX_FILE_BYTES = 64 << 10
MAX_AGE_S = 30 * 86_400.0  # of what is kept
BUDGET_S = 0.6
RATIO = 16.0  # for codecs whose speed depends on it
FIRST = ("fp16", "bf16", "int8_block", "topk", "lossless", "int4_block")
"""Most asked for; the rest are measured while the budget lasts."""

BROKEN = (RuntimeError, ImportError, OSError, TypeError, ValueError, ArithmeticError, AtollError)

Rates = dict[str, tuple[float, float]]
"""Codec -> dense bytes a second, encoding and decoding."""


def link_codecs() -> tuple[str, ...]:
    """Codecs that a link may carry, most wanted first."""
    able = [
        name
        for name, codec in catalogue.CODECS.items()
        if name != "none" and not codec.shared_state and codec.valid_for & {Use.ACTIVATION, Use.GRADIENT}
    ]
    return tuple(sorted(able, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST)))


def codec_speeds(
    state_dir: Path,
    circumstances: Mapping[str, object],
    device: torch.device | str = "cpu",
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
    now: Callable[[], float] = time.time,
) -> Rates:
    """Speeds of the link codecs on ``device``; from ``state_dir`` where they were measured in the
    same ``circumstances`` (versions, device, threads) less than MAX_AGE_S ago, at most ``budget_s``
    and one codec more where not. A codec that fails is left out, and then nothing is kept: what was
    amiss once (memory, a library) must not hide that codec for a month. ``now``: Unix seconds."""
    wanted = link_codecs()
    key = {**{name: str(value) for name, value in circumstances.items()}, "codecs": " ".join(wanted)}
    path = state_dir / FILE
    known = _read(path, key, now())
    if known is not None:
        return known
    found, failed = _measure(wanted, device, budget_s, clock)
    if failed:
        log.warning("codecs.not_remembered", reason=f"not measured: {', '.join(failed)}")
    else:
        _write(path, {"for": key, "measured_s": now(), "bytes_per_s": found})
    return found


def _measure(
    wanted: tuple[str, ...], device: torch.device | str, budget_s: float, clock: Callable[[], float]
) -> tuple[Rates, list[str]]:
    """What was measured, and what failed."""
    started_s = clock()
    tensor = speed.sample(1 << 18, 0).to(device)
    found: Rates = {}
    failed: list[str] = []
    for name in wanted:
        if clock() - started_s > budget_s:
            break
        try:
            rate = speed.measure_on(name, tensor, RATIO)
        except BROKEN as error:  # one broken library must not keep a worker out
            log.warning("codec.not_measured", codec=name, reason=f"{type(error).__name__}: {error}")
            failed.append(name)
            continue
        found[name] = (rate.encode_bytes_per_s, rate.decode_bytes_per_s)
    log.info("codecs.measured", codecs=len(found), took_s=round(clock() - started_s, 3))
    return found, failed


def _read(path: Path, key: Mapping[str, str], now_s: float) -> Rates | None:
    """What was kept for these circumstances of late; None for anything else, damage included."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return None
        kept: Any = json.loads(path.read_text())
        # A clock that was set back since leaves an age below 0: of unknown length, so too old.
        if kept["for"] != key or not 0.0 <= now_s - float(kept["measured_s"]) < MAX_AGE_S:
            return None
        rates = {str(name): (float(e), float(d)) for name, (e, d) in kept["bytes_per_s"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    sound = all(math.isfinite(rate) and rate > 0 for pair in rates.values() for rate in pair)
    return rates if sound and rates else None


def _write(path: Path, value: Mapping[str, object]) -> None:
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch.write_text(json.dumps(value, indent=1) + "\n")
        scratch.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        log.warning("codecs.not_remembered", reason=str(error))
