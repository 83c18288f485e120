"""Names of the devices that one machine lends: each is a worker of its own, all under one certificate.

The first has the machine's id, as the only device of a machine has; the others that id, a slash and their
number. A certificate names the machine: whoever shows it speaks for its devices and no others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from atoll.errors import AccessDenied

MAX_DEVICES = 16
"""Of one machine: what one certificate may enter into a fleet."""
DEVICE_METADATA = "atoll-device"
_NUMBER = re.compile(r"[1-9][0-9]?")


def device_name(machine: str, number: int) -> str:
    """The worker id of a machine's device, counted from 0."""
    return f"{machine}/{number}" if number else machine


def machine_of(worker: str) -> str:
    """The id of the machine whose device a worker is."""
    return worker.partition("/")[0]


def device_metadata(number: int) -> tuple[tuple[str, str], ...]:
    """Metadata by which a call is one of this device."""
    return ((DEVICE_METADATA, str(number)),) if number else ()


def named_in(machine: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The worker id of a call by ``machine``. AccessDenied for a number that no device has."""
    number = dict(metadata or ()).get(DEVICE_METADATA, "")
    if not number:
        return machine
    if not isinstance(number, str) or not _NUMBER.fullmatch(number) or int(number) >= MAX_DEVICES:
        raise AccessDenied(f"device {number[:20]!r} of {machine}; a machine has 1 to {MAX_DEVICES} devices")
    return device_name(machine, int(number))
