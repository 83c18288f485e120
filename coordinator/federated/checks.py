"""What a federated job's parts must be to each other; asked at submit on the owner's machine, and again by
the coordinator. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.compression import EXACT
from atoll.errors import UsageError
from atoll.federated import BCRS, Federated, FederatedSpec, parse_uplink
from compressors.catalogue import Use, codec
from coordinator.federated.selection import selector_of
from strategies.checking import check_optimizer
from strategies.privacy.private import strategy_of
from strategies.wrapped import NET

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from atoll.job import JobSpec, TrainingSpec
    from strategies.base import Strategy

ERROR_FEEDBACK = "error_feedback"
WRAPPERS = {"vhl": "Vhl", "fedimpro": "FedImpro", "moon": "Moon"}
"""Rules that change the loss, and the class of ``strategies.NAME_module`` that wraps the owner's net."""


PERSONAL = ("ditto",)
"""Strategies with a whole personal model, which common tensors that are local would not fit."""


def check_federated(rule: Federated, training: TrainingSpec) -> Strategy:
    """The strategy of a federated job; UsageError for what no round could be run with."""
    found = strategy_of(rule)
    selector_of(rule)
    check_optimizer(found, training.optimizer)
    if training.n_micro != 1:
        raise UsageError(
            f"n_micro = {training.n_micro}; a local step of a federated job is one micro-batch: set "
            "n_micro=1 and make the example inputs larger"
        )
    if training.compress != "off":
        raise UsageError(
            f"compress = {training.compress} is about links between stages; a federated job's updates are "
            "coded as Federated(uplink=...) says"
        )
    if rule.clients and rule.clients < found.min_updates:
        raise UsageError(f"{rule.strategy} needs {found.min_updates} updates a round; raise clients to that")
    check_uplink(rule)
    if rule.local and rule.strategy in PERSONAL:
        raise UsageError(
            f"{rule.strategy} keeps a model of its own for each client; leave out local=, or take fedavg"
        )
    if rule.strategy == "fedrep" and not rule.local:
        raise UsageError("fedrep trains a head of each client's own; name it: Federated(local=('head.*',))")
    return found


def check_uplink(rule: Federated) -> None:
    """UsageError for an uplink codec that there is not, or that cannot carry an update."""
    wanted = parse_uplink(rule.uplink)
    if wanted.mode in EXACT:
        return
    if wanted.mode != BCRS:
        facts = codec(wanted.mode)
        keeps_state = facts.shared_state or (facts.stateful and facts.name != ERROR_FEEDBACK)
        if Use.DELTA not in facts.valid_for or keeps_state:
            raise UsageError(
                f"codec {facts.name} cannot carry a round's update; take topk:32, int8_block or another of "
                "docs/compression.md that is made for changes of a model"
            )
        if wanted.ratio is not None and not facts.rated:
            raise UsageError(f"codec {facts.name} takes no ratio; write uplink={facts.name!r}")
        if facts.exact:
            return
    if rule.strategy == "opwa" and rule.error_feedback:
        raise UsageError(
            "opwa and error feedback both restore what sparsification leaves out; set error_feedback=False, "
            "or take another strategy for clients that return"
        )


def check_inputs(inputs: Mapping[str, str], wanted: Collection[str]) -> None:
    """UsageError unless every input of the model is fed from a field of the registered data."""
    missing, extra = sorted(set(wanted) - set(inputs)), sorted(set(inputs) - set(wanted))
    if missing or extra:
        raise UsageError(
            f"Registered(inputs=...) names {sorted(inputs)}, the model takes {sorted(wanted)}: missing "
            f"{missing}, not known {extra}; map each argument of forward() to a field of the data"
        )


def check_wrapped(strategy: Strategy, tensors: Collection[str]) -> None:
    """UsageError unless a rule that changes the loss has its wrapper around the owner's net."""
    wrapper = WRAPPERS.get(strategy.name)
    marked = any(name.startswith(NET) for name in tensors)
    if wrapper is not None and not marked:
        raise UsageError(
            f"{strategy.name} changes the local loss: wrap the net in the job file, "
            f"`from strategies.{strategy.name}_module import {wrapper}` (docs/federated.md shows how)"
        )


def check_spec(spec: JobSpec) -> None:
    """All of the above that a submitted job shows; UsageError for what cannot be."""
    federated = spec.federated
    if federated is None:
        return
    strategy = check_federated(federated.rule, spec.training)
    check_wrapped(strategy, spec.tensors)
    if federated.rule.evaluate_every and not spec.eval_dag_hash:
        raise UsageError("the job has no evaluation graph; set evaluate_every=0 or submit it again")


def exported_prefix(spec: FederatedSpec | None) -> str:
    """What the names of exported tensors begin with inside the job: a wrapper's are not the owner's."""
    if spec is None or spec.rule.strategy not in WRAPPERS:
        return ""
    return NET
