"""Tickets for the relays that this coordinator uses: its own, and those on other hosts."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from atoll.messages.to_worker import RelayOffer
from coordinator.config import Relaying
from coordinator.messages.instructions import Addresses, RelayUse
from protos import atoll_control_pb2 as pb
from protos.relay_tickets import Ticket, pair_id, seal, ticket_key

SERIAL_BYTES = 8


@dataclass(frozen=True, slots=True)
class RelayWays:
    """Makes a ticket whenever a worker is to meet a peer. ``addresses``: an empty host is this one."""

    key: bytes
    addresses: Addresses
    config: Relaying
    clock: Callable[[], float]

    def way(self, worker: str, peer: str, use: RelayUse) -> RelayOffer | None:
        """Return ``worker``'s way to ``peer``, None without a relay."""
        if not self.addresses:
            return None
        ticket = Ticket(
            pair=pair_id(self.key, worker, peer),
            serial=secrets.token_bytes(SERIAL_BYTES),
            dials=use.dials,
            expires_s=int(self.clock() + self.config.ticket_s),
            max_bytes=self.config.ticket_bytes,
            max_connections=self.config.ticket_connections,
        )
        sealed = seal(self.key, ticket)
        key, lasts_s = ticket_key(self.key, sealed), self.config.ticket_s
        return RelayOffer(self.addresses, sealed, key, use.dials, use.after_s, lasts_s)


def relay_addresses(addresses: Addresses) -> list[pb.Address]:
    """The relays' addresses as workers get them."""
    return [pb.Address(host=host, port=port) for host, port in addresses]
