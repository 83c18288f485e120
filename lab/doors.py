"""A home router's door: who may open a connection to a host that accepts none. Pure.

A TCP SYN or a UDP packet reaches a closed host only as the answer to one that this host sent
from that very port to that very peer and port. So hole punching works as it does through a
strict home router. Everything else of TCP belongs to a connection that is already open.
Other protocols (ping) are not answered.
"""

from __future__ import annotations

MAX_FLOWS = 65_536
_TCP, _UDP = 6, 17
_SYN, _ACK = 0x02, 0x10


class Door:
    """The open flows of one host that accepts no inbound connection."""

    def __init__(self) -> None:
        self.stands_open = False
        """Everybody may come in for now."""
        self._opened: dict[bytes, None] = {}  # oldest first

    def leaving(self, packet: bytes, offset: int) -> None:
        """Remember what the host itself opens; ``packet[offset:]`` is an IPv4 packet."""
        kind, ports = _first(packet, offset)
        if kind:
            # The far end's address and ports as they will look on the way back.
            key = packet[offset + 9 : offset + 10] + packet[offset + 16 : offset + 20] + ports[2:] + ports[:2]
            self._opened.pop(key, None)
            self._opened[key] = None
            if len(self._opened) > MAX_FLOWS:
                del self._opened[next(iter(self._opened))]

    def forget(self) -> None:
        """Nothing that the host opened is open any more."""
        self._opened.clear()

    def admits(self, packet: bytes, offset: int) -> bool:
        """Whether a packet for the host may come in."""
        if self.stands_open:
            return True
        protocol = packet[offset + 9]
        kind, ports = _first(packet, offset)
        if not kind:
            return protocol == _TCP
        key = packet[offset + 9 : offset + 10] + packet[offset + 12 : offset + 16] + ports
        return key in self._opened


def _first(packet: bytes, offset: int) -> tuple[bool, bytes]:
    """Whether a packet may be the first of its flow, and its two ports."""
    transport = offset + (packet[offset] & 15) * 4
    protocol = packet[offset + 9]
    ports = packet[transport : transport + 4]
    if protocol == _TCP:
        flags = packet[transport + 13] if len(packet) > transport + 13 else 0
        return flags & (_SYN | _ACK) == _SYN, ports
    return protocol == _UDP, ports
