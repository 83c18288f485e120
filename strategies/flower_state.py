"""A strategy's server state as one ArrayRecord, so that a Flower run can go on where another one ended.

Keys: ``model/NAME`` for every tensor, in order; ``slots/SLOT/NAME`` for the strategy's own; ``roles`` (uint8
[2, tensors]: before and after the strategy's changes); ``facts`` (int64: version, round, clients); ``rule``
(its name and options as text). Every array is a plain one: safetensors or ``numpy.savez`` keep it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np

from atoll.errors import BadUpdate, UsageError
from strategies import flower_records as words
from strategies.base import Strategy
from strategies.files import slot_arrays, slots_of
from strategies.layout import SHARED, Layout, Role, meta_of
from strategies.values import ServerState

if TYPE_CHECKING:
    from flwr.app import ArrayRecord

    from strategies.layout import Array, Arrays

VERSION = 1
MODEL, SLOTS = "model/", "slots/"
ROLES: tuple[Role, ...] = (Role.TRAINED, Role.AVERAGED, Role.TOLD, Role.LOCAL, Role.STILL)
"""The position is the saved code: append, never reorder."""


def saved_state(rule: Strategy, state: ServerState, before: Layout, model: Arrays) -> ArrayRecord:
    """``before``: the roles as ``init`` was given them; ``model``: every tensor after the last round."""
    codes = [[ROLES.index(layout.roles[n]) for n in model] for layout in (before, state.layout)]
    arrays: dict[str, Array] = {
        "rule": np.frombuffer(_title(rule).encode(), np.uint8),
        "facts": np.array([VERSION, state.round, state.n_clients], np.int64),
        "roles": np.array(codes, np.uint8),
        **{MODEL + name: array for name, array in model.items()},
        **slot_arrays(state.slots, SLOTS),
    }
    return words.to_record(arrays)


def load_state(rule: Strategy, saved: ArrayRecord) -> tuple[ServerState, Layout, Mapping[str, Array]]:
    """(state, roles before the strategy's changes, whole model). UsageError for a record of another strategy,
    or one that is not whole."""
    try:
        arrays = words.from_record(saved)
        title = arrays["rule"].astype(np.uint8).tobytes().decode()
        version, at_round, n_clients = (int(value) for value in arrays["facts"])
        model = {key.removeprefix(MODEL): a for key, a in arrays.items() if key.startswith(MODEL)}
        before, after = (
            Layout(
                {n: meta_of(a) for n, a in model.items()},
                {n: ROLES[c] for n, c in zip(model, row, strict=True)},
            )
            for row in arrays["roles"]
        )
    except (KeyError, ValueError, IndexError, BadUpdate) as error:
        raise UsageError(f"this is not a saved state: {error!r}; give what save() returned") from None
    if title != _title(rule):
        raise UsageError(f"saved by {title[:200]!r}; resume it with the same strategy, not {_title(rule)!r}")
    if version != VERSION or at_round < 0 or n_clients < 1:
        raise UsageError(f"saved state of version {version}, round {at_round}; this side reads {VERSION}")
    held = {name: model[name] for name in after.names(*SHARED, Role.TOLD)}
    state = ServerState(at_round, after, held, slots_of(arrays, SLOTS), n_clients)
    return state, before, model


def _title(rule: Strategy) -> str:
    options = {field.name: getattr(rule, field.name) for field in fields(rule)}
    return f"{rule.name} {words.options_text(options)}"
