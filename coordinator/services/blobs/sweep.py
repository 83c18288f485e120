"""Blobs that nothing needs, and uploads that broke off, do not stay for ever.

What an owner uploads waits for its job, what a worker uploads for the message that names it; after
``unneeded_blob_s`` without either it goes, as do the beginnings of blobs whose rest never came. What a
journalled fact or a round under way refers to stays, however old.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from protos.telemetry import Event

if TYPE_CHECKING:
    from coordinator.shell import Shell

EVERY_S = 3600.0


async def sweep(shell: Shell) -> tuple[int, int]:
    """Once; how many files went, and their bytes."""
    keep = shell.scheduler.blobs_in_flight()
    # Files have the time of the machine's own clock.
    before_s = time.time() - shell.config.unneeded_blob_s
    stale = shell.chains.prune(keep)
    keep |= shell.chains.deltas(keep)
    spent = await asyncio.to_thread(shell.blobs.discard, stale)
    swept, freed = await asyncio.to_thread(shell.blobs.sweep, keep, before_s)
    swept, freed = swept + len(stale), freed + spent
    if swept:
        shell.note(Event.BLOBS_DELETED, blobs=swept, freed_bytes=freed, reason="nothing needed them")
    return swept, freed


async def sweep_for_ever(shell: Shell) -> None:
    """At the start, and from time to time."""
    while True:
        try:
            await sweep(shell)
        except OSError as error:  # a disk that refuses now is asked again later
            shell.note(Event.STORAGE_FAILED, "warning", reason=f"no sweep of the blob store: {error}")
        await asyncio.sleep(EVERY_S)
