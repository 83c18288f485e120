"""Where codec speeds are kept between two starts of a worker."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from typing import Protocol

import structlog

log = structlog.get_logger()

FILE = "codec_speed.json"
MAX_BYTES = 64 << 10


class Kept(Protocol):
    """A small text that outlives the process."""

    def read(self) -> bytes:
        """Return what was written last; empty when nothing was, or it is too large."""

    def write(self, data: bytes) -> None:
        """Keep this instead."""


class SpeedFile:
    """``Kept`` in the state folder."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / FILE

    def read(self) -> bytes:
        try:
            return self._path.read_bytes() if self._path.stat().st_size <= MAX_BYTES else b""
        except OSError:
            return b""

    def write(self, data: bytes) -> None:
        scratch = self._path.with_name(f".{FILE}.{secrets.token_hex(4)}")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            scratch.write_bytes(data)
            scratch.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)
            log.warning("codecs.not_remembered", reason=str(error))
