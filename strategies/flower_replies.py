"""A Flower reply as the update that a strategy expects. Nothing here is trusted: names, shapes and numbers
are checked by ``strategies.checking`` afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import MetricRecord, RecordDict

from atoll.errors import BadUpdate
from strategies import flower_records as words
from strategies.base import Strategy
from strategies.files import slots_of
from strategies.layout import Role
from strategies.values import ClientUpdate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strategies.layout import Array, Arrays
    from strategies.values import ServerState

IGNORED = (Role.STILL, Role.TOLD)
"""Roles of tensors that a plain ClientApp sends back and that no client changes."""

Counted = tuple[ClientUpdate, MetricRecord]
"""A reply that counts, and its own metrics without ours."""


def serves_any_client(rule: Strategy) -> bool:
    """Return whether an unmodified ClientApp does all that the strategy needs of a client: plain local
    training."""
    return rule.trains_plainly and not rule.facts.needs_client_state and not rule.facts.changes_loss


def read_reply(rule: Strategy, state: ServerState, node: str, content: RecordDict, examples: str) -> Counted:
    """The reply of ``node``, whose samples are the metric ``examples``. BadUpdate where it is none."""
    if len(content.array_records) != 1 or len(content.metric_records) != 1:
        kinds = len(content.array_records), len(content.metric_records)
        raise BadUpdate(f"{kinds[0]} records of arrays and {kinds[1]} of metrics; expected one of each")
    [arrays], [metrics] = content.array_records.values(), content.metric_records.values()
    if words.STEPS not in metrics and not serves_any_client(rule):
        raise BadUpdate(f"{rule.name} has a client half; answer with strategies.flower.local_round")
    received = words.from_record(arrays)
    own = MetricRecord({n: v for n, v in metrics.items() if not n.startswith(words.OWN)})
    update = ClientUpdate(
        round=state.round,
        n_samples=words.whole_number(metrics, examples),
        steps=words.whole_number(metrics, words.STEPS) if words.STEPS in metrics else 1,
        delta=_delta(state, received),
        extra=slots_of(received, f"{words.EXTRA}/"),
        scalars={s.name: _number(metrics, words.OWN + s.name) for s in rule.scalars_up()},
        metrics={name: float(value) for name, value in own.items() if not isinstance(value, list)},
        client=node,
    )
    return update, own


def common_metrics(found: Sequence[Counted]) -> list[RecordDict]:
    """The metrics that every reply has: a mean over some of them would say something else."""
    common = set.intersection(*(set(metrics) for _, metrics in found))
    return [
        RecordDict({"metrics": MetricRecord({n: v for n, v in metrics.items() if n in common})})
        for _, metrics in found
    ]


def _delta(state: ServerState, received: Arrays) -> Mapping[str, Array]:
    """Weights less those that were sent."""
    delta = {}
    for name, array in received.items():
        if name.startswith(f"{words.EXTRA}/") or state.layout.roles.get(name) in IGNORED:
            continue
        sent = state.weights.get(name)
        alike = sent is not None and sent.shape == array.shape and sent.dtype == array.dtype
        with np.errstate(all="ignore"):  # what is not finite is refused by name afterwards
            delta[name] = array - sent if alike else array
    return delta


def _number(metrics: MetricRecord, key: str) -> float:
    value = metrics.get(key)
    if not isinstance(value, int | float):
        raise BadUpdate(f"{key} = {value!r}; a number")
    return float(value)
