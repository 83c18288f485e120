"""Names of what a round's files hold, and what both ends expect of them.

    weights/NAME        the broadcast's weights, or the update's delta
    extra/SLOT/NAME     the strategy's own arrays

Values and their codecs are ``compressors.model_file``'s; a strategy knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from atoll.errors import BadUpdate
from strategies.base import Strategy
from strategies.layout import SHARED, Role
from strategies.values import Broadcast, ClientState, ClientUpdate

if TYPE_CHECKING:
    from atoll.opdag import TensorMeta
    from strategies.layout import Array, Arrays, Layout, Slots

WEIGHTS, EXTRA = "weights/", "extra/"
T = TypeVar("T")


def joined(weights: Mapping[str, T], slots: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    """Arrays, or their metas, under the names they have in a file."""
    own = {f"{EXTRA}{slot}/{name}": array for slot, arrays in slots.items() for name, array in arrays.items()}
    return {**{WEIGHTS + name: array for name, array in weights.items()}, **own}


def parted(arrays: Arrays) -> tuple[dict[str, Array], dict[str, dict[str, Array]]]:
    """The inverse of ``joined``; a slot without arrays is not among the slots. BadUpdate for a name of
    neither form."""
    weights: dict[str, Array] = {}
    slots: dict[str, dict[str, Array]] = {}
    for name, array in arrays.items():
        slot, mark, rest = name.removeprefix(EXTRA).partition("/")
        if name.startswith(WEIGHTS):
            weights[name.removeprefix(WEIGHTS)] = array
        elif name.startswith(EXTRA) and mark:
            slots.setdefault(slot, {})[rest] = array
        else:
            raise BadUpdate(f"a tensor named {name[:80]!r}; names begin with {WEIGHTS} or {EXTRA}SLOT/")
    return weights, slots


def broadcast_metas(rule: Strategy, layout: Layout) -> dict[str, TensorMeta]:
    """Return the tensors in every broadcast's file; ``layout`` as ``adapt`` left it."""
    return joined(layout.metas_of(*SHARED, Role.TOLD), rule.extra_down(layout))


def update_metas(rule: Strategy, layout: Layout) -> dict[str, TensorMeta]:
    """Return the tensors in every update's file."""
    return joined(layout.metas_of(*SHARED), rule.extra_up(layout))


def lossy_names(layout: Layout) -> frozenset[str]:
    """The names in an update's file that may lose something: deltas of trained tensors. Running statistics
    are small, and a strategy's own arrays (SCAFFOLD's controls) are kept by the client as they were before
    any codec."""
    return frozenset(WEIGHTS + name for name in layout.names(Role.TRAINED))


def broadcast_arrays(broadcast: Broadcast) -> dict[str, Array]:
    """A broadcast as its file's arrays."""
    return joined(broadcast.weights, broadcast.extra)


def broadcast_of(at_round: int, arrays: Arrays) -> Broadcast:
    """The broadcast of ``at_round`` from its file's arrays."""
    weights, slots = parted(arrays)
    return Broadcast(at_round, weights, slots)


def update_arrays(update: ClientUpdate) -> dict[str, Array]:
    """An update's arrays; its numbers travel in the message beside them."""
    return joined(update.delta, update.extra)


def slot_arrays(slots: Slots) -> dict[str, Array]:
    """Slots alone, as ``SLOT/NAME``: what a client or a server keeps."""
    return {f"{slot}/{name}": array for slot, arrays in slots.items() for name, array in arrays.items()}


def client_state_of(arrays: Arrays) -> ClientState:
    """The inverse of ``slot_arrays`` for a client."""
    slots: dict[str, dict[str, Array]] = {}
    for name, array in arrays.items():
        slot, _, rest = name.partition("/")
        slots.setdefault(slot, {})[rest] = array
    return ClientState(slots)
