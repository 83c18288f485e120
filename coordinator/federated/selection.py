"""Who takes part in a federated round, and with which codec and ratio each sends its update. Pure.

Selectors and BCRS are those of ``strategies``. This file gives them what was measured of the clients:
expected seconds of a round (smoothed; the median of the others for a client not seen yet), of its
download and training, and uplinks. Ratios are planned for whole rounds: all updates in at one time.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, TypeVar

from atoll.compression import OFF
from atoll.errors import StorageError
from atoll.federated import BCRS, Federated, parse_uplink
from atoll.opdag import TensorMeta
from compressors.catalogue import codec, takes
from compressors.sparse_sizes import whole_size
from coordinator.federated.state import Client, FederationState
from strategies.bcrs import EVEN, PLANNED, Ratios, Uplink, bcrs, even_base, spread
from strategies.oort import OortState, Seen
from strategies.privacy.sampling import drawn, in_slot
from strategies.selection import Candidate, Outcome, Selector, candidates_of, smoothed
from strategies.selectors import make_selector

BCRS_CODEC = "topk"
NONE = "none"
BASE = 32.0
"""The slowest's ratio where none is given and none lets all end together, or the lines are hardly known."""
TRIPS_TO_SEE = 6.0
CLOSEST = 0.04
"""Finish times are planned no closer than this, however far they stray: it costs the slowest's update."""
ROUND_TRIPS = 2  # of an upload and of a round, in which nothing is sent
UNKNOWN_BPS = 20e6  # of an uplink: the same for all until one is measured
LEAST_SAMPLES = 1

T = TypeVar("T")


def selector_of(rule: Federated) -> Selector:
    """The selector that a job names; UsageError for an unknown one or an option out of bounds."""
    return make_selector(rule.selector, rule.selector_options)


def candidates(state: FederationState) -> dict[str, Candidate]:
    """Clients that could take part now."""
    share = 1.0 - state.federated.rule.held_out
    samples = {name: max(LEAST_SAMPLES, int(count * share)) for name, count in state.members.items()}
    seconds = {name: client.round_s for name, client in state.clients.items() if not client.roster}
    return candidates_of(samples, {**seconds, **state.client_s})


def places(state: FederationState) -> int:
    """How many of them a round takes."""
    wanted, here = state.federated.rule.clients, len(state.members)
    return min(wanted, here) if wanted else here


def to_ask(state: FederationState) -> tuple[str, ...]:
    """Whose loss the selector needs before it chooses; empty where everybody takes part anyway."""
    count = places(state)
    if count == len(state.members):
        return ()
    return _Named(state).asked(candidates(state), count)


def chosen(state: FederationState, losses: Mapping[str, float]) -> tuple[tuple[str, ...], Any]:
    """The round's participants, ascending, and the selector's next state."""
    rule = state.federated.rule
    if rule.privacy is not None and rule.privacy.tree:
        names = {client: state.called(client) for client in state.members}
        return in_slot(names, state.round, rule.privacy.tree, state.job), None
    if rule.privacy is not None:
        secret = f"{state.secret}/{state.round}/{state.attempt}" if state.secret else ""
        return drawn(state.members, rule.privacy.sampling, rule.clients, secret), None
    return _Named(state).chosen(candidates(state), places(state), state.spec.training.seed, losses)


def next_ones(state: FederationState, idle: Collection[str], count: int) -> tuple[tuple[str, ...], Any]:
    """Who of ``idle`` trains next in an asynchronous job, at most ``count``, and the selector's next state.
    Each draw has a seed of its own: a model has several."""
    able = {name: found for name, found in candidates(state).items() if name in idle}
    seed = seed_of(state.spec.training.seed, "orders", state.orders_given)
    return _Named(state).chosen(able, count, seed, {})


def seed_of(seed: int, client: str, at_round: int) -> int:
    """Seed of the codec and the strategy for one client in one round: 64 bits of a SHA-256."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{client}/{at_round}".encode()).digest()[:8], "big")


def learnt(state: FederationState, outcomes: Mapping[str, Outcome]) -> Any:
    """The selector's state after the round's participants have answered."""
    return _Named(state).learnt(outcomes)


class _Named:
    """A job's selector, which knows clients by their names: the same are drawn when the job runs again."""

    def __init__(self, state: FederationState) -> None:
        self._selector, self._round = selector_of(state.federated.rule), state.round
        self._seed = state.spec.training.seed
        self._before = self._selector.init() if state.selector is None else state.selector
        called = {client: state.called(client) for client in {*state.clients, *state.members}}
        often = Counter(called.values())  # a population may call its clients as others call themselves
        self._names = {client: name for client, name in called.items() if often[name] == 1}
        self._clients = {name: client for client, name in self._names.items()}

    def asked(self, able: Mapping[str, Candidate], count: int) -> tuple[str, ...]:
        return self._back(self._selector.ask(self._by_name(able), count, self._round, self._seed))

    def chosen(
        self, able: Mapping[str, Candidate], count: int, seed: int, losses: Mapping[str, float]
    ) -> tuple[tuple[str, ...], Any]:
        names, after = self._selector.choose(
            self._before, self._by_name(able), count, self._round, seed, self._by_name(losses)
        )
        return self._back(names), after

    def learnt(self, outcomes: Mapping[str, Outcome]) -> Any:
        return self._selector.learn(self._before, self._round, self._by_name(outcomes))

    def _by_name(self, of: Mapping[str, T]) -> dict[str, T]:
        return {self._names.get(client, client): value for client, value in of.items()}

    def _back(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(self._clients.get(name, name) for name in names))


# ---------------------------------------------------------------- codecs


@dataclasses.dataclass(frozen=True, slots=True)
class Coding:
    """Codec and ratio of each participant's update, why where that was a choice, and the spread of finish
    times by plan where all are to end together."""

    by_client: Mapping[str, tuple[str, float]]
    reason: str = ""
    spread: float | None = None


def coding(state: FederationState, names: tuple[str, ...]) -> Coding:
    """How the round's participants send their updates."""
    wanted = parse_uplink(state.federated.rule.uplink)
    if wanted.mode != BCRS:
        return Coding(dict.fromkeys(names, even_coding(state.federated.rule)))
    known = any(state.clients[name].uplink_bps for name in names)
    if not known or not any(meta.nbytes for meta in state.up):
        return Coding(dict.fromkeys(names, even_coding(state.federated.rule)))
    base = wanted.ratio or (None if all(_seen(state.clients[name]) for name in names) else BASE)
    uplinks = {name: _uplink(state, name) for name in names}
    found = by_uplink(state.up, uplinks, base, max(CLOSEST, min(PLANNED, EVEN - state.strayed)))
    chosen = {name: (BCRS_CODEC, found.ratios[name]) for name in names}
    return Coding(chosen, found.reason, found.spread if base is None else None)


def even_coding(rule: Federated) -> tuple[str, float]:
    """Codec and ratio of an update where all clients' are alike: as long as no uplink is known, and of a
    population's clients, which have none of their own."""
    wanted = parse_uplink(rule.uplink)
    if wanted.mode == OFF:
        return NONE, 1.0
    return (BCRS_CODEC, wanted.ratio or BASE) if wanted.mode == BCRS else (wanted.mode, wanted.ratio or 1.0)


def strayed(state: FederationState) -> float:
    """How much wider the round's finish times came than planned, smoothed; one laggard counts as no more
    than what is allowed."""
    if state.spread is None:
        return state.strayed
    took = [state.clients[name].took_s for name in state.updates]
    if len(took) < len(state.chosen) or min(took) <= 0.0:
        return state.strayed
    wider = spread(took) - state.spread
    return smoothed(state.strayed, max(0.0, min(EVEN, wider)))


def update_bytes(up: Sequence[TensorMeta], ratio: float) -> float:
    """Of one update under BCRS's codec: as ``compressors.model_file`` codes it, top-k over each tensor as a
    whole, and small tensors as they are."""
    facts = codec(BCRS_CODEC)
    return sum(
        min(float(meta.nbytes), whole_size(meta, ratio)) if takes(facts, meta) else float(meta.nbytes)
        for meta in up
    )


def by_uplink(
    up: Sequence[TensorMeta], uplinks: Mapping[str, Uplink], base: float | None, within: float = PLANNED
) -> Ratios:
    """BCRS's ratios for updates of the tensors ``up``, at least one, the slowest's being ``base``; None: the
    least with which all end ``within`` that share of each other, or else as close as lines allow."""
    dense = float(sum(meta.nbytes for meta in up))
    wire = partial(update_bytes, up)
    if base is None:
        shares = sorted({within, PLANNED, EVEN})
        found = (even_base(uplinks, dense, wire, share) for share in shares)
        base = next((ratio for ratio in found if ratio is not None), BASE)
    return bcrs(uplinks, dense, base, wire)


def _uplink(state: FederationState, name: str) -> Uplink:
    """What is known of a client's round; one that was in none yet is taken for a middling one.

    Before the upload: the word that the round begins, the model's download, the training; after it the
    answer that it arrived, and the word that it did. A model that the client holds already, since it
    evaluated it, is not fetched.
    """
    client, others = state.clients[name], state.clients.values()
    fetches = state.model is None or client.model != state.model.full.hash
    before_s = client.train_s or _middling([c.train_s for c in others], 0.0)
    if fetches:
        before_s += client.download_s or _middling([c.download_s for c in others], 0.0)
    rate_bps = client.uplink_bps or _middling([c.uplink_bps for c in others], UNKNOWN_BPS)
    return Uplink(rate_bps, ROUND_TRIPS * 2.0 * client.latency_s, before_s)


def _seen(client: Client) -> bool:
    """False while its uploads were but a few round trips long: they show how TCP starts, not how fast the
    line is, and a line taken for slow would have everybody wait for all that it could send. One that has
    sent nothing yet holds nobody up."""
    return not client.uplink_bps or client.uplink_s >= TRIPS_TO_SEE * 2.0 * client.latency_s


def _middling(figures: Iterable[float], unknown: float) -> float:
    """The median of those that were measured."""
    known = [figure for figure in figures if figure > 0.0]
    return median(known) if known else unknown


# ---------------------------------------------------------------- a selector's state in the journal


def selector_to_json(state: Any) -> Any:
    """A selector's state as JSON-ready values."""
    if isinstance(state, OortState):
        return {"oort": dataclasses.asdict(state)}
    return {"last": dict(state)} if isinstance(state, Mapping) else None


def selector_from_json(value: Any) -> Any:
    """What ``selector_to_json`` wrote; StorageError when it is damaged."""
    if value is None:
        return None
    try:
        if "last" in value:
            return {str(name): int(at) for name, at in value["last"].items()}
        oort = value["oort"]
        seen = {name: Seen(**known) for name, known in oort["seen"].items()}
        return OortState(seen, float(oort["percentile"]), tuple(oort["gathered"]))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise StorageError(f"the journal holds a damaged selector state: {error}") from error
