"""Which optimizer steps each parameter, and the tensors of state that it keeps for it. Pure.

Muon is for matrices between embedding and head alone; what else a group that names it matches is stepped
by AdamW. So a parameter's optimizer depends on the whole graph: ``StateMeta.hidden_matrix`` says at every
stage what capture found there.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from atoll.job import OptimizerName

if TYPE_CHECKING:
    from collections.abc import Mapping

    from atoll.job import Optimizer
    from atoll.opdag import StateMeta

MUON_STEPS = 5
"""Newton-Schulz iterations of an update, torch's own number."""
_MUONS = frozenset({"float32", "float64", "bfloat16", "float16"})

State = dict[str, tuple[int, ...]]
"""Names of an optimizer's tensors for a parameter, as a checkpoint has them, with their shapes."""


def optimizer_of(name: str, state: StateMeta, spec: Optimizer) -> OptimizerName:
    """Return the optimizer that steps a parameter.

    A group that names Muon gives it every matrix (two dims) that it matches, an embedding or a head too; the
    job's own Muon takes hidden matrices alone.
    """
    group = spec.group_of(name)
    own = group.optimizer if group is not None else None
    found = own or spec.name
    if found is not OptimizerName.MUON:
        return found
    takes = len(state.meta.shape) == 2 if own is not None else state.hidden_matrix
    return found if takes and state.meta.dtype in _MUONS else OptimizerName.ADAMW


def optimizers_of(states: Mapping[str, StateMeta], spec: Optimizer) -> dict[str, OptimizerName]:
    """Return ``optimizer_of`` of each parameter."""
    return {name: optimizer_of(name, state, spec) for name, state in states.items()}


def muon_words(states: Mapping[str, StateMeta], spec: Optimizer) -> str:
    """Return what Muon steps of the trained parameters of a graph; "" where the job does not name it."""
    if OptimizerName.MUON not in spec.names.values():
        return ""
    groups = {name: spec.group_of(name) for name in states}
    trained = {
        name: state
        for name, state in states.items()
        if state.requires_grad and not ((group := groups[name]) is not None and group.frozen)
    }
    own = [n for n, found in optimizers_of(trained, spec).items() if found is OptimizerName.MUON]
    own_elements, elements = (sum(trained[n].meta.elements for n in names) for names in (own, trained))
    share = own_elements / max(1, elements)
    rest = "" if len(own) == len(trained) else f"; {len(trained) - len(own)} others have another optimizer"
    return f"muon steps {len(own)} matrices, {100 * share:.0f} % of the trained parameters{rest}"


def uniform(spec: Optimizer) -> bool:
    """Return whether one optimizer steps every parameter, whatever it is in the graph."""
    return spec.name is not OptimizerName.MUON and all(
        group.optimizer in (None, spec.name) for group in spec.groups
    )


def state_shapes(optimizer: OptimizerName, shape: tuple[int, ...], momentum: float) -> State:
    """Return what ``optimizer`` keeps for a parameter of ``shape``, all in float32 where the parameter is."""
    if optimizer is OptimizerName.ADAMW:
        return {"exp_avg": shape, "exp_avg_sq": shape, "step": ()}
    if optimizer is OptimizerName.ADAFACTOR and len(shape) > 1:  # of the last two dims
        return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1]), "step": ()}
    if optimizer is OptimizerName.ADAFACTOR:
        return {"variance": shape, "step": ()}
    if optimizer is OptimizerName.LION:
        return {"exp_avg": shape}
    if optimizer is OptimizerName.MUON or (optimizer is OptimizerName.SGD and momentum > 0.0):
        return {"momentum_buffer": shape}
    return {}


def state_elements(optimizer: OptimizerName, shape: tuple[int, ...], momentum: float) -> int:
    """Return the elements of ``state_shapes``, counters aside."""
    kept = state_shapes(optimizer, shape, momentum)
    return sum(prod(each) for key, each in kept.items() if key != "step")


def workspace_elements(optimizer: OptimizerName, shape: tuple[int, ...], dtype: str = "float32") -> int:
    """Return the elements of float32 that an optimizer's step of a parameter makes and drops again.

    Of Muon X, the next X, X X^T and its square; Lion and Adafactor make the update, Adafactor of a vector
    also its squares. AdamW's and SGD's functions make none, but for the decayed gradient of 16-bit weights
    under SGD on a CPU, and Nesterov's.
    """
    if optimizer is OptimizerName.SGD and dtype in ("bfloat16", "float16"):
        return prod(shape)
    if optimizer is OptimizerName.MUON:
        m, n = sorted(shape)
        return 2 * m * n + 2 * m * m
    if optimizer is OptimizerName.ADAFACTOR:
        return prod(shape) * (1 if len(shape) > 1 else 2)
    return prod(shape) if optimizer is OptimizerName.LION else 0


def muon_flops(shape: tuple[int, ...]) -> float:
    """Return the floating-point operations of Muon's iterations on an m x n matrix, m <= n.

    10 (2 m^2 n + m^3): each has products of m x n by n x m, of m x m by m x m and of m x m by m x n.
    """
    m, n = sorted(shape)
    return 2.0 * MUON_STEPS * (2.0 * m * m * n + float(m) ** 3)
