"""Ops that a stage of a Plan runs, and values that it receives and sends: derived from the op-DAG and the
cut.

Planner and worker derive the same programs from the same inputs, so both ends of every link
agree by construction. Two rules keep sums independent of the cut (DESIGN section 3). The
gradient of a tensor used in several stages folds down the chain of its users, latest first. A
tied parameter's uses are added in descending op order, also down the chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

from atoll.bounded import MAX_OPS, MAX_STAGES, MAX_TENSOR_BYTES, Most, Name, Once, Within
from atoll.opdag import MAX_METRICS, LeafRef, OpDag, OpNode, Source, TensorMeta, leaf_refs, op_refs, rows_of
from atoll.standing import weights_behind

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence


@dataclass(frozen=True, slots=True)
class Received:
    """A value computed by an earlier stage.

    Its gradient first takes in the fold of the later users (from ``grad_from``, None when this
    stage is the last user), then this stage's own, and goes on to ``grad_to``.
    """

    op: int
    source: int  # stage that computes it
    requires_grad: bool
    grad_from: int | None
    grad_to: int
    meta: TensorMeta  # of the value and, in training, of its gradient
    # It follows from weights alone, so from frozen ones where the job freezes ``weights``, those of them that
    # require gradients: then it is a weight itself, and what follows from it too (``atoll.standing``).
    standing: bool = False
    weights: Annotated[tuple[Name, ...], Once()] = ()


@dataclass(frozen=True, slots=True)
class Produced:
    """A value this stage computes and later stages use; the fold of all their gradients comes
    from ``grad_from``, the earliest of them."""

    op: int
    targets: Annotated[tuple[int, ...], Most(MAX_STAGES)]
    requires_grad: bool
    grad_from: int


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A parameter held by several stages: partial sums go from the last holder down to the
    first, the total goes from the first to every other."""

    name: Name
    holders: Annotated[tuple[int, ...], Most(MAX_STAGES)]  # ascending; this stage is one of them
    index: int  # among the DAG's parameters: the edge of its messages, the same on every holder


@dataclass(frozen=True, slots=True)
class StageProgram:
    """Everything a worker needs to run one stage; positions are those of the whole DAG.

    ``ops`` is in ascending position order and holds the constant ops that the stage recomputes.
    """

    stage: int
    n_stages: Annotated[int, Within(1, MAX_STAGES)]
    ops: Annotated[tuple[tuple[int, OpNode], ...], Most(MAX_OPS)]
    constant_ops: Annotated[frozenset[int], Most(MAX_OPS)]
    received: tuple[Received, ...]
    produced: tuple[Produced, ...]
    inputs: Annotated[tuple[Name, ...], Once()]
    parameters: Annotated[tuple[Name, ...], Once()]
    buffers: Annotated[tuple[Name, ...], Once()]
    constants: Annotated[tuple[Name, ...], Once()]
    tied: tuple[TiedParameter, ...]
    loss: int | None  # position of the loss when this stage computes it
    # Name, position: those that this stage computes.
    metrics: Annotated[tuple[tuple[Name, int], ...], Most(MAX_METRICS)] = ()
    weight: int | None = None  # position of the loss's count, where the loss is a sum over one
    # Of a micro-batch; 0: the inputs have no common first dimension.
    rows: Annotated[int, Within(0, MAX_TENSOR_BYTES)] = 0
    tail: StageProgram | None = None  # of an evaluation, with another number of rows: see ``atoll.rows``

    @property
    def last(self) -> StageProgram | None:
        """The tail where the last held-out micro-batch goes through it: one of fewer rows than the others."""
        return self.tail if self.tail is not None and self.tail.rows < self.rows else None


class PiecePrograms(NamedTuple):
    """What a piece of a stage computes in training, and in an evaluation where there is one."""

    train: StageProgram
    evaluation: StageProgram | None


def programs_of(pieces: Iterable[PiecePrograms]) -> tuple[StageProgram, ...]:
    """Return all programs of these pieces."""
    return tuple(program for both in pieces for program in both if program is not None)


def stage_programs(dag: OpDag, starts: Sequence[int]) -> tuple[StageProgram, ...]:
    """Cut ``dag`` at ``starts`` (ascending, first 0) and derive every stage's program."""
    tails = (None,) * len(starts) if dag.tail is None else stage_programs(dag.tail, starts)
    bounds = [*starts, len(dag.ops)]
    n_stages = len(starts)
    owner = [0] * len(dag.ops)
    for stage in range(n_stages):
        for op in range(bounds[stage], bounds[stage + 1]):
            owner[op] = stage
    own = [
        [op for op in range(bounds[i], bounds[i + 1]) if op not in dag.constant_ops] for i in range(n_stages)
    ]
    users = _user_stages(dag, own, owner)
    behind = weights_behind(dag, users)
    recomputed = [_constants_needed(dag, ops) for ops in own]
    leaves = [
        dict.fromkeys(leaf for op in sorted({*own[i], *recomputed[i]}) for leaf in leaf_refs(dag.ops[op]))
        for i in range(n_stages)
    ]
    holders: dict[str, list[int]] = {}
    for stage in range(n_stages):
        for leaf in leaves[stage]:
            if leaf.source is Source.PARAMETER:
                holders.setdefault(leaf.name, []).append(stage)
    index = {name: at for at, name in enumerate(dag.parameters)}
    return tuple(
        StageProgram(
            stage=i,
            n_stages=n_stages,
            ops=tuple((op, dag.ops[op]) for op in sorted({*own[i], *recomputed[i]})),
            constant_ops=frozenset(recomputed[i]),
            received=_received(dag, i, users, owner, behind),
            produced=_produced(dag, i, users, owner),
            inputs=_names(leaves[i], Source.INPUT),
            parameters=_names(leaves[i], Source.PARAMETER),
            buffers=_names(leaves[i], Source.BUFFER),
            constants=_names(leaves[i], Source.CONSTANT),
            tied=tuple(
                TiedParameter(name, tuple(stages), index[name])
                for name, stages in holders.items()
                if len(stages) > 1 and i in stages
            ),
            loss=dag.loss if owner[dag.loss] == i else None,
            metrics=tuple(
                (name, dag.metrics[name]) for name in sorted(dag.metrics) if owner[dag.metrics[name]] == i
            ),
            weight=dag.weight if owner[dag.loss] == i else None,
            rows=rows_of(dag.inputs),
            tail=tails[i],
        )
        for i in range(n_stages)
    )


def _user_stages(dag: OpDag, own: list[list[int]], owner: list[int]) -> dict[int, list[int]]:
    """Position -> ascending later stages that read it, for values that cross a cut."""
    users: dict[int, list[int]] = {}
    for stage, ops in enumerate(own):
        read = {r for op in ops for r in op_refs(dag.ops[op]) if r not in dag.constant_ops}
        for r in read:
            if owner[r] != stage:
                users.setdefault(r, []).append(stage)
    return users


def _constants_needed(dag: OpDag, ops: list[int]) -> set[int]:
    """Constant ops that ``ops`` read, directly or not; alias groups stay whole."""
    group = {op: bounds for bounds in dag.unsplittable for op in range(*bounds)}
    needed: set[int] = set()
    stack = [r for op in ops for r in op_refs(dag.ops[op]) if r in dag.constant_ops]
    while stack:
        op = stack.pop()
        if op in needed:
            continue
        needed.add(op)
        stack.extend(op_refs(dag.ops[op]))
        if op in group:
            stack.extend(member for member in range(*group[op]) if member in dag.constant_ops)
    return needed


def _received(
    dag: OpDag,
    stage: int,
    users: dict[int, list[int]],
    owner: list[int],
    behind: dict[int, tuple[str, ...]],
) -> tuple[Received, ...]:
    found = []
    for op in sorted(users):
        chain = users[op]
        if stage in chain:
            at = chain.index(stage)
            found.append(
                Received(
                    op=op,
                    source=owner[op],
                    requires_grad=dag.ops[op].requires_grad,
                    grad_from=chain[at + 1] if at + 1 < len(chain) else None,
                    grad_to=chain[at - 1] if at else owner[op],
                    meta=dag.ops[op].outputs[0],
                    standing=op in behind,
                    weights=behind.get(op, ()),
                )
            )
    return tuple(found)


def _produced(dag: OpDag, stage: int, users: dict[int, list[int]], owner: list[int]) -> tuple[Produced, ...]:
    return tuple(
        Produced(op, tuple(users[op]), dag.ops[op].requires_grad, users[op][0])
        for op in sorted(users)
        if owner[op] == stage
    )


def _names(leaves: dict[LeafRef, None], source: Source) -> tuple[str, ...]:
    return tuple(leaf.name for leaf in leaves if leaf.source is source)


def given_by_others(program: StageProgram, frozen: Collection[str]) -> frozenset[int]:
    """Return the received values that follow from frozen weights alone; ``frozen``: names of parameters."""
    return frozenset(r.op for r in program.received if r.standing and all(n in frozen for n in r.weights))
