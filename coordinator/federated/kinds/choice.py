"""The kind of a round, by the job's settings and state: the only place that tells kinds apart."""

from __future__ import annotations

from coordinator.federated.kinds.flowing import Flow
from coordinator.federated.kinds.gathered import SiteRound
from coordinator.federated.kinds.hosted import PopulationRound
from coordinator.federated.kinds.masked import SecureRound
from coordinator.federated.kinds.round import Round
from coordinator.federated.state import FederationState


def round_of(state: FederationState) -> Round:
    """The kind of the round in flight."""
    if state.federated.rule.asynchronous:
        return Flow()
    if state.secure is not None:
        return SecureRound()
    if state.sites is not None:
        return SiteRound()
    return Round() if state.cohort is None else PopulationRound()
