"""Names of a checkpoint's tensors where peers have states of their own. Data only.

The tensors of the first peer that is there have the names of the model's: whoever needs the model, or begins
without a state of its own, takes them. Those of every other peer are named ``NAME@PEER``, beside ``NAME``. A
parameter of the model may have such a name too, like ``up@2``, as long as no ``up`` is beside it
(``confused``).

Of replicas that exchange gradients by a rule, ``NAME@REPLICA`` is what that replica's rule keeps of a
parameter, beside the ``NAME`` that all hold.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.gradient_exchange import BESIDE, kept_name

if TYPE_CHECKING:
    from atoll.job import JobSpec
    from coordinator.messages.facts import Checkpoint

OF = BESIDE

Tensors = Mapping[str, str]
"""Name -> blob."""


def merged(before: Tensors, parts: Mapping[int, Tensors], peer_of: Callable[[int], int]) -> dict[str, str]:
    """Return a checkpoint of what each rank has stored; ``before``: whatever no step changes, from the
    checkpoint before; ``peer_of``: the peer that a rank is of."""
    found = model(before)
    first = min(map(peer_of, parts))
    for rank in sorted(parts):
        peer = peer_of(rank)
        of = "" if peer == first else f"{OF}{peer}"
        found.update({name + of: blob for name, blob in parts[rank].items()})
    return found


def own(tensors: Tensors, peer: int) -> dict[str, str]:
    """Return a peer's tensors by the model's names: its own where it has stored any."""
    mine = f"{OF}{peer}"
    its_own = {name: tensors[name + mine] for name in tensors if name + mine in tensors}
    return model(tensors) | its_own


def kept(tensors: Tensors, names: Iterable[str], replica: int) -> dict[str, str]:
    """Return what a replica's rule of exchange begins with, of the parameters with these ``names``: its own
    where it has stored any, else the first one's, whose shared part it takes."""
    candidates = ((kept_name(name, replica), kept_name(name, 0)) for name in names)
    found = (next((key for key in both if key in tensors), None) for both in candidates)
    return {key: tensors[key] for key in found if key is not None}


def model(tensors: Tensors) -> dict[str, str]:
    """Return what has the model's names."""
    return {name: blob for name, blob in tensors.items() if _of(name) not in tensors}


def begun_with(before: JobSpec, spec: JobSpec, held: Checkpoint) -> Checkpoint:
    """Return what a job begins with that goes on from what another has stored. Peers that gossiped hold
    models of their own; who exchange changes of one model all begin with the first peer's."""
    if _gossips(before) and not _gossips(spec):
        return replace(held, tensors=model(held.tensors))
    return held


def confused(names: Collection[str]) -> tuple[str, str] | None:
    """Return two of a model's names of which one reads as a peer's own of the other, None where no two do."""
    for name in sorted(names):
        base = _of(name)
        while base:  # with w@1 a peer's own of w, w@1@2 would read as a peer's own of that
            if base in names:
                return base, name
            base = _of(base)
    return None


def _of(name: str) -> str:
    """Return the name before ``@PEER``, "" where a name does not end so."""
    base, _, peer = name.rpartition(OF)
    return base if peer.isdecimal() else ""


def _gossips(spec: JobSpec) -> bool:
    exchange = spec.training.local_exchange
    return exchange is not None and exchange.gossips
