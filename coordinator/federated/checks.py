"""What a federated job's parts must be to each other, and to the data that workers have registered. Asked at
submit on the owner's machine, and again by the coordinator. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from atoll.compression import EXACT
from atoll.errors import UsageError
from atoll.federated import BCRS, Federated, FederatedSpec, parse_uplink
from compressors.catalogue import Use, codec
from coordinator.federated.selection import selector_of
from strategies.checking import check_optimizer
from strategies.linear import Linear
from strategies.privacy.private import COVERED, strategy_of
from strategies.secure.vector import secured
from strategies.selection import Selector
from strategies.wrapped import NET

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from atoll.dataset_spec import DataSpec
    from atoll.federated import DatasetFacts
    from atoll.job import JobSpec, TrainingSpec
    from atoll.opdag import TensorMeta
    from coordinator.membership.roster import Roster
    from strategies.base import Strategy

ERROR_FEEDBACK = "error_feedback"
NAMES_SHOWN = 6
WRAPPERS = {"vhl": "Vhl", "fedimpro": "FedImpro", "moon": "Moon"}
"""Rules that change the loss, and the class of ``strategies.NAME_module`` that wraps the owner's net."""


PERSONAL = ("ditto",)
"""Strategies with a whole personal model, which common tensors that are local would not fit."""


def check_federated(rule: Federated, training: TrainingSpec) -> Strategy:
    """The strategy of a federated job; UsageError for what no round could be run with."""
    found = strategy_of(rule)
    if rule.secure is not None:
        secured(found)
    if rule.sample_privacy is not None and rule.strategy not in COVERED:
        raise UsageError(
            f"sample_privacy= around {rule.strategy} is not proven: it may send more than what its noised "
            f"gradients made; take one of {', '.join(COVERED)}"
        )
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
    check_asynchronous(rule, found)
    if rule.gateways:
        check_gateways(found)
    if rule.local and rule.strategy in PERSONAL:
        raise UsageError(
            f"{rule.strategy} keeps a model of its own for each client; leave out local=, or take fedavg"
        )
    if rule.strategy == "fedrep" and not rule.local:
        raise UsageError("fedrep trains a head of each client's own; name it: Federated(local=('head.*',))")
    return found


def check_asynchronous(rule: Federated, strategy: Strategy) -> None:
    """UsageError for what needs a round whose clients all begin with one model."""
    if not rule.asynchronous:
        if strategy.facts.needs_base:
            raise UsageError(
                f"{rule.strategy} is for an asynchronous job; give Federated(buffer=1, min_clients=1), or "
                "take fedavg"
            )
        return
    if rule.privacy is not None:
        raise UsageError(
            "privacy is accounted by rounds whose clients are drawn, and an asynchronous job has none; leave "
            "out buffer= or privacy="
        )
    if not strategy.facts.asynchronous:
        raise UsageError(
            f"{rule.strategy} reads the state of one round, and an asynchronous job has updates of several; "
            "leave out buffer=, or take fedavg, fedavgm, fedprox, fedasync or another without such a state"
        )
    if rule.buffer < strategy.min_updates:
        raise UsageError(f"{rule.strategy} needs {strategy.min_updates} updates a sum; raise buffer to that")
    if type(selector_of(rule)).ask is not Selector.ask:
        raise UsageError(
            f"selector {rule.selector} asks clients for their loss before a round, and an asynchronous job "
            "has none; take random, oort or bandwidth_aware"
        )
    if parse_uplink(rule.uplink).mode == BCRS:
        raise UsageError(
            "uplink bcrs plans that all end together, and an asynchronous job waits for nobody; take topk:32 "
            "or another codec"
        )


def check_gateways(strategy: Strategy) -> None:
    """UsageError for a strategy whose updates a gateway cannot add."""
    core = strategy.core
    if not isinstance(core, Linear):
        raise UsageError(
            f"{core.name} needs individual updates, and a gateway sends a sum; leave out gateways=, or take "
            "fedavg or another strategy that sums"
        )
    core.grid(1, 1)


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


# ---------------------------------------------------------------- registered data


def misfit(
    facts: DatasetFacts, fields: Mapping[str, str], inputs: Mapping[str, TensorMeta], batch: int
) -> str | None:
    """Why a registered data set cannot feed the model, None when it can; ``fields``: of the data, by input.

    A field's dtype must go into the input's without loss, its shape must be that of one sample.
    """
    for name, meta in inputs.items():
        found = facts.field(fields.get(name, ""))
        if found is None:
            names = ", ".join(f.name for f in facts.fields)
            return f"{facts.name} has no field {fields.get(name)!r} for input {name!r}; it has {names}"
        if (batch, *found.shape) != meta.shape:
            return (
                f"field {found.name!r} of {facts.name} has samples of shape {found.shape}, input {name!r} "
                f"takes {meta.shape[1:]}"
            )
        if found.dtype != meta.dtype and not _goes_into(found.dtype, meta.dtype):
            return f"field {found.name!r} of {facts.name} is {found.dtype}, input {name!r} takes {meta.dtype}"
    return None


def _goes_into(stored: str, taken: str) -> bool:
    try:
        return np.can_cast(np.dtype(stored), np.dtype(taken), "safe")
    except TypeError:  # bfloat16 and the like
        return False


def pinned_to(data: DataSpec, roster: Roster, inputs: Mapping[str, TensorMeta]) -> DataSpec:
    """Return pinned data with the worker that has them and the number of their samples.

    UsageError where no worker of the pool has such a set, several have and none is named, or it does not fit
    the model.
    """
    pinned = data.pinned
    if pinned is None:
        return data
    known = {
        worker: next((facts for facts in one.introduction.datasets if facts.name == pinned.data), None)
        for worker, one in roster.workers.items()
        if not one.member.gone and not one.quarantined
    }
    held = {worker: facts for worker, facts in known.items() if facts is not None}
    if pinned.worker:
        held = {
            worker: facts
            for worker, facts in held.items()
            if pinned.worker in (worker, roster.workers[worker].introduction.name)
        }
    if len(held) != 1:
        raise UsageError(_unclear(pinned.data, pinned.worker, [roster.label(worker) for worker in held]))
    ((worker, facts),) = held.items()
    wrong = misfit(facts, pinned.inputs, inputs, data.batch)
    if wrong is None and facts.n_samples < data.batch:
        wrong = f"{facts.name} has {facts.n_samples} samples, a micro-batch {data.batch}; make that smaller"
    if wrong is not None:
        raise UsageError(f"{roster.label(worker)}: {wrong}")
    return replace(data, n_samples=facts.n_samples, pinned=replace(pinned, worker=worker))


def _unclear(data: str, asked: str, held: list[str]) -> str:
    if not held:
        who = f"no worker named {asked!r}" if asked else "no worker of the pool"
        return (
            f"{who} has registered data set {data!r}; its owner does that with `atoll-worker data add {data} "
            "PATH`, and must have joined"
        )
    shown = ", ".join(sorted(held)[:NAMES_SHOWN])
    return f"{len(held)} workers have registered {data!r}: {shown}; name one, Registered(..., pin=NAME)"
