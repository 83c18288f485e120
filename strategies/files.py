"""Names of what a round's files hold, and what both ends expect of them.

    weights/NAME        the broadcast's weights, or the update's delta
    extra/SLOT/NAME     the strategy's own arrays
    sum/TERM/NAME       a host's sums in whole numbers, of several clients

Values and their codecs are ``compressors.model_file``'s; a strategy knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from atoll.errors import BadUpdate
from atoll.opdag import TensorMeta
from strategies.base import Strategy
from strategies.checking import check_update
from strategies.layout import SHARED, Role
from strategies.linear import TRAINED
from strategies.values import Broadcast, ClientState, ClientUpdate

if TYPE_CHECKING:
    from strategies.checking import Limits
    from strategies.fixed import FixedSums
    from strategies.layout import Array, Arrays, Layout
    from strategies.linear import Linear

WEIGHTS, EXTRA, SUM = "weights/", "extra/", "sum/"
T = TypeVar("T")


def joined(weights: Mapping[str, T], slots: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    """Arrays, or their metas, under the names they have in a file."""
    return {**{WEIGHTS + name: array for name, array in weights.items()}, **slot_arrays(slots, EXTRA)}


def parted(arrays: Arrays) -> tuple[dict[str, Array], dict[str, dict[str, Array]]]:
    """The inverse of ``joined``; a slot without arrays is not among the slots. BadUpdate for a name of
    neither form."""
    for name in arrays:
        if not name.startswith(WEIGHTS) and not (name.startswith(EXTRA) and "/" in name.removeprefix(EXTRA)):
            raise BadUpdate(f"a tensor named {name[:80]!r}; names begin with {WEIGHTS} or {EXTRA}SLOT/")
    weights = {n.removeprefix(WEIGHTS): array for n, array in arrays.items() if n.startswith(WEIGHTS)}
    return weights, slots_of(arrays, EXTRA)


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


def judged(
    strategy: Strategy,
    layout: Layout,
    at_round: int,
    arrays: Arrays,
    reported: tuple[int, int, Mapping[str, float], Mapping[str, float]],
    client: str,
    limits: Limits,
) -> ClientUpdate:
    """The update in a file's ``arrays``; ``reported``: samples, steps, the strategy's numbers and metrics, by
    its client. Raises BadUpdate for one that does not count."""
    n_samples, steps, scalars, metrics = reported
    delta, extra = parted(arrays)
    slots = {slot: extra.get(slot, {}) for slot in strategy.extra_up(layout)}
    update = ClientUpdate(at_round, n_samples, steps, delta, slots, scalars, metrics, client)
    check_update(strategy, layout, at_round, update, limits)
    return update


def sums_metas(rule: Linear, layout: Layout) -> dict[str, TensorMeta]:
    """Return the tensors in every file of sums; ``layout`` as ``adapt`` left it."""
    metas = {
        term: {name: TensorMeta(meta.shape, "int64") for name, meta in held.items()}
        for term, held in rule.term_metas(layout).items()
    }
    return slot_arrays(metas, SUM)


def sums_arrays(sums: FixedSums) -> dict[str, Array]:
    """A host's sums as their file's arrays; loads, scalars and clients travel in the message beside them."""
    return slot_arrays(sums.arrays, SUM)


def sums_slots(rule: Linear, layout: Layout, arrays: Arrays) -> dict[str, dict[str, Array]]:
    """The inverse of ``sums_arrays``, with the terms that have no array too."""
    terms: dict[str, dict[str, Array]] = {term: {} for term in rule.term_metas(layout)}
    for name, array in arrays.items():
        term, _, rest = name.removeprefix(SUM).partition("/")
        terms[term][rest] = array
    return terms


def trained_supports(supports: Mapping[str, T]) -> dict[tuple[str, str], T]:
    """Positions of coded deltas, by the term and name that their sums have."""
    return {(TRAINED, name.removeprefix(WEIGHTS)): held for name, held in supports.items()}


def slot_arrays(slots: Mapping[str, Mapping[str, T]], prefix: str = "") -> dict[str, T]:
    """Slots alone, as ``SLOT/NAME`` behind a prefix: what a client or a server keeps."""
    return {f"{prefix}{slot}/{name}": one for slot, held in slots.items() for name, one in held.items()}


def slots_of(arrays: Arrays, prefix: str = "") -> dict[str, dict[str, Array]]:
    """The inverse of ``slot_arrays``; names without the prefix are left out."""
    slots: dict[str, dict[str, Array]] = {}
    for name, array in arrays.items():
        if name.startswith(prefix):
            slot, _, rest = name.removeprefix(prefix).partition("/")
            slots.setdefault(slot, {})[rest] = array
    return slots


def client_state_of(arrays: Arrays) -> ClientState:
    """The inverse of ``slot_arrays`` for a client."""
    return ClientState(slots_of(arrays))
