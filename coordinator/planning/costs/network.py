"""Rates and delays of links between workers, and uplinks that several of them share."""

from __future__ import annotations

from dataclasses import dataclass

Pair = tuple[str, str]  # (source, target)


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """Rate and delay of one direction between two workers."""

    bandwidth_bps: float  # payload bits per second, > 0
    latency_s: float  # one way


@dataclass(frozen=True, slots=True)
class RelayLine:
    """A rate that all pairs which pass one relay share, both directions together."""

    name: str
    pairs: frozenset[Pair]
    bps: float


@dataclass(frozen=True, slots=True)
class Uplink:
    """A rate that a set of workers share towards everyone outside the set, each direction its own.

    One member: a host's own uplink. Several: a home router, a campus, a cluster's gateway.
    """

    name: str
    members: tuple[str, ...]
    up_bps: float
    down_bps: float
