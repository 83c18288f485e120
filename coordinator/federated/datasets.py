"""Data sets that workers have registered: whether one feeds a model, and whose a job's pinned data are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from atoll.errors import UsageError

if TYPE_CHECKING:
    from atoll.dataset_spec import DataSpec
    from atoll.federated import DatasetFacts
    from atoll.opdag import TensorMeta
    from coordinator.membership.roster import Roster

NAMES_SHOWN = 6


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
