"""The certificate authority of this coordinator, and its exchange for a new one while everybody works on.

STATE/ca/ca.pem, ca-key.pem    the authority that the coordinator's own certificates are of
STATE/ca/next/                 the one that takes its place: certificate, key, and
    exchange.json              when the exchange began, when the older one ends
    holders                    workers whose certificate is of the new one, one a line

During an exchange both are trusted. The coordinator goes on showing certificates of the older one, which
all who joined before know, and signs workers' with the new one; join tokens name both. At the end the new
one takes the older one's files: key before certificate, so that a crash leaves what the next start completes.
"""

from __future__ import annotations

import datetime as dt
import json
import shutil
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.errors import StorageError, UsageError
from hostos.files.private_files import private_folder, write_private
from protos.credentials import Authority, Identity

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NEXT, EXCHANGE, HOLDERS = "next", "exchange.json", "holders"
MAX_OVERLAP_S = 365 * 86_400.0
MAX_HOLDERS_BYTES = 16 << 20


class Authorities:
    """The authority in force, and during an exchange the one that takes its place (``ca/next``)."""

    def __init__(self, folder: Path, lifetime: dt.timedelta, now_s: float) -> None:
        """Open or create it. Raises StorageError when the disk refuses or something is damaged."""
        self._folder, self._lifetime = folder, lifetime
        self._next: Authority | None = None
        self.began_s = self.ends_s = 0.0
        self._holders: set[str] = set()
        self.changed: Callable[[], None] = lambda: None  # called once others are trusted than before
        self._shown = self._opened()
        self.end_if_due(now_s)

    def _opened(self) -> Authority:
        beside = self._folder / NEXT
        if not (beside / EXCHANGE).exists():
            # An exchange that had not begun when a crash came, or had already ended.
            shutil.rmtree(beside, ignore_errors=True)
            return Authority.open(self._folder, self._lifetime)
        try:
            noted = json.loads((beside / EXCHANGE).read_text())
            self.began_s, self.ends_s = float(noted["began_s"]), float(noted["ends_s"])
            with suppress(FileNotFoundError), (beside / HOLDERS).open("rb") as file:
                self._holders = set(file.read(MAX_HOLDERS_BYTES).decode("ascii", "replace").split())
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StorageError(
                f"{beside / EXCHANGE} cannot be read ({error}); restore the folder from a backup"
            ) from None
        if not (beside / "ca.pem").exists():
            raise StorageError(f"{beside / 'ca.pem'} is missing; restore the folder from a backup")
        self._next = made = Authority.open(beside, self._lifetime)
        if (self._folder / "ca-key.pem").read_bytes() == made.key_pem:
            return self._take_over(made)  # a crash came in the middle of it
        return Authority.open(self._folder, self._lifetime)

    # ------------------------------------------------------------ what others see

    @property
    def exchanging(self) -> bool:
        return self._next is not None

    @property
    def newest(self) -> Authority:
        """The one that signs workers' certificates."""
        return self._next or self._shown

    @property
    def trusted(self) -> tuple[Authority, ...]:
        """All that are trusted now, the newest first."""
        return (self._shown,) if self._next is None else (self._next, self._shown)

    @property
    def trusted_pem(self) -> bytes:
        """Their certificates, one after the other."""
        return b"".join(authority.certificate_pem for authority in self.trusted)

    def left_s(self, now_s: float) -> float:
        """Seconds for which the older one is trusted yet; 0 where there is none."""
        return max(0.0, self.ends_s - now_s) if self.exchanging else 0.0

    def holds_newest(self, worker: str) -> bool:
        """True when the worker's certificate is of the newest authority, as far as is known."""
        return not self.exchanging or worker in self._holders

    # ------------------------------------------------------------ certificates

    def server_identity(self, now: dt.datetime | None = None) -> Identity:
        """A fresh key and certificate for the coordinator's own ports, of the authority that all know."""
        return replace(self._shown.server_identity(now), ca_pem=self.trusted_pem)

    def sign(self, csr_pem: bytes, worker: str, now: dt.datetime | None = None) -> bytes:
        """Certificate of the newest authority. Raises AccessDenied for a malformed request, StorageError."""
        certificate = self.newest.sign(csr_pem, worker, now)
        if self.exchanging and worker not in self._holders:
            try:
                with (self._folder / NEXT / HOLDERS).open("a", encoding="ascii") as file:
                    file.write(f"{worker}\n")
            except OSError as error:
                raise StorageError(f"cannot write to {self._folder / NEXT}: {error.strerror}") from None
            self._holders.add(worker)
        return certificate

    # ------------------------------------------------------------ the exchange

    def rotate(self, overlap_s: float, now_s: float) -> None:
        """Begin to exchange the authority; both are trusted for ``overlap_s``, 0: the new one alone, at once.

        Raises UsageError during an exchange and for an impossible time, StorageError.
        """
        if self.exchanging:
            raise UsageError(
                "the authority is being exchanged already; `atoll ca show` says until when, `atoll ca drop` "
                "ends it"
            )
        if not 0 <= overlap_s <= MAX_OVERLAP_S:
            raise UsageError(f"an overlap of {overlap_s} s; give 0 to {MAX_OVERLAP_S:.0f} s")
        beside = self._folder / NEXT
        shutil.rmtree(beside, ignore_errors=True)
        private_folder(beside)
        made = Authority.open(beside, self._lifetime)
        noted = {"began_s": now_s, "ends_s": now_s + overlap_s}
        write_private(beside / EXCHANGE, json.dumps(noted).encode())
        self._next, self._holders = made, set()
        self.began_s, self.ends_s = now_s, now_s + overlap_s
        if not self.end_if_due(now_s):
            self.changed()

    def end_if_due(self, now_s: float) -> bool:
        """End an exchange whose time is over; True when it ended now. Raises StorageError."""
        if not self.exchanging or now_s < self.ends_s:
            return False
        self.drop()
        return True

    def drop(self) -> None:
        """Trust the older authority no more. Raises UsageError without an exchange, StorageError."""
        if self._next is None:
            raise UsageError("there is one authority; `atoll ca rotate` begins to exchange it")
        self._shown = self._take_over(self._next)
        self.changed()

    def _take_over(self, made: Authority) -> Authority:
        write_private(self._folder / "ca-key.pem", made.key_pem)
        write_private(self._folder / "ca.pem", made.certificate_pem)
        # First of all what says that there is an exchange: the rest of the folder means nothing without it.
        (self._folder / NEXT / EXCHANGE).unlink(missing_ok=True)
        shutil.rmtree(self._folder / NEXT, ignore_errors=True)
        self._next, self._holders = None, set()
        self.began_s = self.ends_s = 0.0
        return made
