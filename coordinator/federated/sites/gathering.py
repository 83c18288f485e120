"""A round with gateways: who is one, who has its update summed there, and who sends it itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.federated import AUTO_GATEWAYS, SITE
from atoll.messages.to_worker import Blob, EvaluateRound, KeptUpdate, TrainRound
from coordinator.federated.sites.books import SUM_OF, Sites, SiteSum
from coordinator.messages.instructions import HostSums
from protos.devices import machine_of

if TYPE_CHECKING:
    from coordinator.federated.state import Client, FederationState
    from coordinator.messages.events import UpdateReady
    from coordinator.messages.instructions import Model


def books(state: FederationState) -> Sites:
    """The round's gateways. LookupError outside of a round that has them."""
    if state.sites is None:
        raise LookupError(f"{state.job}: round {state.round} has no gateways")
    return state.sites


def opened(state: FederationState) -> FederationState:
    """Open a round of the clients that are chosen: each site's gateway stays the one before, if it can."""
    sites: dict[str, list[Client]] = {}
    for name in state.chosen:
        client = state.clients[name]
        if client.site:
            sites.setdefault(client.site, []).append(client)
    via, gateways = dict[str, str](), dict(state.gateways)
    for site, clients in sites.items():
        if (gateway := _gateway(state, clients, gateways.get(site, ""))) is None:
            continue
        members = [client.worker for client in clients if _allows(client, gateway)]
        if len(members) > 1:
            gateways[site] = gateway
            via |= dict.fromkeys(members, gateway)
    words = "; ".join(
        f"{gateway} sums for {sum(other == gateway for other in via.values())} clients of its site"
        for gateway in sorted(set(via.values()))
    )
    return replace(state, sites=Sites(via), orders={}, gateways=gateways, assignment=words)


def _gateway(state: FederationState, clients: Collection[Client], before: str) -> str | None:
    """The client that the most others of its site let see their updates; of several, the one before, else the
    one with the fastest uplink."""
    wanted = state.federated.rule.gateways
    named = None if wanted == AUTO_GATEWAYS else frozenset(wanted.split(","))
    may = [c for c in clients if named is None or not named.isdisjoint((c.worker, c.called))]

    def order(client: Client) -> tuple[int, bool, float, str]:
        allowed = sum(_allows(other, client.worker) for other in clients)
        return -allowed, client.worker != before, -client.uplink_bps, client.worker

    return min(may, key=order).worker if may else None


def _allows(client: Client, gateway: str) -> bool:
    """Whether a data owner lets a gateway of its site see its updates; its own machine it always lets."""
    own = machine_of(client.worker) == machine_of(gateway)
    return own or not {SITE, gateway}.isdisjoint(client.gateways)


def gateway_called(name: str) -> str:
    """The worker that sent what has this name among updates."""
    return name.removeprefix(SUM_OF)


def sum_called(state: FederationState, name: str) -> SiteSum | None:
    """The sum of that name among updates; None where it is a client's."""
    gateway = name.removeprefix(SUM_OF)
    return None if gateway == name else books(state).sums.get(gateway)


def drawn(state: FederationState) -> dict[str, int]:
    """Samples that each client of the round may count: all gateways and the coordinator sum on their grid."""
    most = state.federated.rule.max_samples
    return {name: min(state.clients[name].n_samples, most) for name in state.chosen}


def pending(state: FederationState) -> dict[str, tuple[str, ...]]:
    """By gateway, the clients whose updates it has not answered for."""
    sites, found = books(state), dict[str, list[str]]()
    for name in sorted(state.updates.keys() & sites.via.keys() - sites.summed):
        found.setdefault(sites.via[name], []).append(name)
    return {gateway: tuple(names) for gateway, names in found.items()}


def sums_for(state: FederationState, gateway: str) -> bool:
    """Whether a gateway is here, and has not failed as one."""
    client = state.clients[gateway]
    return client.present and bool(client.site) and not client.out


def gathers(state: FederationState, names: Iterable[str]) -> tuple[KeptUpdate, ...]:
    """What a gateway is to fetch."""
    most, found = drawn(state), []
    for name in names:
        update, (codec, ratio) = state.updates[name], state.ratios[name]
        blob = Blob(update.update, update.update_bytes)
        known = (update.n_samples, most[name], update.steps, codec, ratio, update.scalars)
        found.append(KeptUpdate(name, blob, *known))
    return tuple(found)


def taken(state: FederationState, gateway: str, update: UpdateReady) -> FederationState:
    """Take a gateway's sum; its bytes are counted with one of its members, the gateway itself if it is in."""
    sites, host = books(state), update.host
    members = tuple(sorted(host.rows)) if host is not None else ()
    if not members:
        return state
    carrier = gateway if gateway in members else members[0]
    own = state.updates[carrier]
    carried = replace(
        own, upload_bytes=own.upload_bytes + update.upload_bytes, upload_s=own.upload_s + update.upload_s
    )
    sums = {**sites.sums, gateway: SiteSum(members, update)}
    return replace(state, sites=replace(sites, sums=sums), updates={**state.updates, carrier: carried})


def directly(state: FederationState, names: Iterable[str]) -> tuple[FederationState, tuple[str, ...]]:
    """Ask clients for their updates themselves; returns those that are not here to be asked."""
    sites, wanted = books(state), frozenset(names)
    here = frozenset(name for name in wanted if state.clients[name].present and not state.clients[name].out)
    via = {name: gateway for name, gateway in sites.via.items() if name not in wanted}
    left = replace(sites, via=via, again=sites.again | here)
    updates = {name: update for name, update in state.updates.items() if name not in wanted}
    return replace(state, sites=left, updates=updates), tuple(sorted(wanted - here))


def blobs(state: FederationState) -> set[str]:
    """Blobs of the sums that came."""
    return set() if state.sites is None else {held.update.update for held in state.sites.sums.values()}


def sums(state: FederationState) -> dict[str, HostSums]:
    """The sums that came, by what they are called among updates."""
    found = {}
    for gateway, held in books(state).sums.items():
        host = held.update.host
        if host is not None:
            samples = {name: state.updates[name].n_samples for name in held.members}
            found[SUM_OF + gateway] = HostSums(held.update.update, samples, host.loads, host.sums)
    return found


def met(state: FederationState, worker: str, message: object) -> tuple[str, ...]:
    """Workers that a message has a client fetch from, or keep something for."""
    match message:
        case TrainRound(model=model, gateway=gateway, gathers=kept):
            found = {model.holder, gateway, *(update.client for update in kept)}
        case EvaluateRound(model=model):
            found = {model.holder}
        case _:
            return ()
    return tuple(sorted((found & state.clients.keys()) - {worker}))


def with_holder(state: FederationState, worker: str, model: Model) -> Model:
    """A broadcast as a client of a site fetches it: from its gateway, if that is another one and here."""
    gateway = state.gateways.get(state.clients[worker].site, "")
    known = state.clients.get(gateway)
    if gateway == worker or known is None or not known.ready or known.site != state.clients[worker].site:
        return model
    return replace(model, holder=gateway)
