"""A stage's programs and tensors as one process of a mesh has them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.mesh.calls import MeshCalls, stored_part
from atoll.mesh.layout import Inside
from atoll.mesh.share import Shared, Terms, held_whole, share_all, trained_names
from atoll.opdag import TensorMeta
from atoll.program import PiecePrograms, StageProgram
from atoll.rows import inputs_at
from compressors.moments import restored
from worker.stage.stage import every_program

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from atoll.job import TrainingSpec
    from atoll.mesh.group import Group
    from atoll.mesh.share import Stored
    from atoll.opdag import StateMeta


class ProcessShare:
    """What one of ``group.size`` processes computes and holds of a stage; ``StageShare``."""

    def __init__(
        self,
        pieces: Sequence[PiecePrograms],
        training: TrainingSpec,
        states: Mapping[str, StateMeta],
        group: Group,
        inside: Inside,
    ) -> None:
        self.group, self._states = group, states
        programs = every_program(pieces)
        parameters = {n: states[n] for p in programs for n in p.parameters}
        held, trained = held_whole(parameters, training), trained_names(parameters, training)

        def terms(program: StageProgram) -> Terms:
            return Terms(inside, group.size, metas_of(program, states), trained, held)

        shares = share_all(programs, terms)
        local = {id(whole): (whole, shared) for whole, shared in zip(programs, shares, strict=True)}
        self._of: dict[int, tuple[StageProgram, Shared]] = {}
        self.pieces = tuple(
            PiecePrograms(self._local(both.train, local), both.evaluation and self._evaluation(both, local))
            for both in pieces
        )
        self.stored: dict[str, Stored] = {}
        for shared in shares:
            self.stored |= shared.stored
        trains = [local[id(both.train)][1].summed for both in pieces]
        self.summed = frozenset(name for summed in trains for name in summed)
        """Parameters whose gradients of a step are parts of a sum."""
        own = {name: state.meta for name, state in states.items()}
        for name, way in self.stored.items():
            own[name] = TensorMeta(way.local(own[name].shape, group.size), own[name].dtype)
        self.states = {name: replace(state, meta=own[name]) for name, state in states.items()}

    def _local(self, program: StageProgram, local: Mapping[int, tuple[StageProgram, Shared]]) -> StageProgram:
        found = local[id(program)]
        self._of[id(found[1].program)] = found
        return found[1].program

    def _evaluation(
        self, both: PiecePrograms, local: Mapping[int, tuple[StageProgram, Shared]]
    ) -> StageProgram | None:
        if both.evaluation is None:
            return None
        whole, shared = local[id(both.evaluation)]
        tail = None if whole.last is None else self._local(whole.last, local)
        shared = replace(shared, program=replace(shared.program, tail=tail))
        self._of[id(shared.program)] = (whole, shared)
        return shared.program

    def shared(self, program: StageProgram) -> Shared:
        """Return a process's program with what it sends."""
        return self._of[id(program)][1]

    def calls(self, program: StageProgram) -> MeshCalls:
        """Return how a program's ops are called."""
        return MeshCalls(self.shared(program), self.group)

    def whole(self, program: StageProgram) -> tuple[StageProgram, Mapping[str, StateMeta]]:
        """Return the program as it is for all processes together, and what it says of its leaves."""
        return self._of[id(program)][0], self._states

    def way(self, name: str, shape: tuple[int, ...]) -> Stored | None:
        """Return how processes store a parameter's tensor of this shape; None: each stores all of it."""
        way = self.stored.get(name)
        return way if way is not None and shape == self._states[name].meta.shape else None

    def whole_state(self, name: str, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a parameter with its optimizer state, as they are without codes."""
        if name not in self.stored:
            return dict(stored)
        beside = {key: tensor for key, tensor in stored.items() if key != "value"}
        return {"value": stored["value"], **restored(beside, self._states[name].meta.shape)}

    def part(self, name: str, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this process's part of a parameter with its optimizer state."""
        found = self.whole_state(name, stored)
        ways = {key: self.way(name, tuple(tensor.shape)) for key, tensor in found.items()}
        return {
            key: tensor if (way := ways[key]) is None else stored_part(tensor, way, self.group)
            for key, tensor in found.items()
        }


def metas_of(program: StageProgram, states: Mapping[str, StateMeta]) -> dict[str, TensorMeta]:
    """Return the shapes of a program's named tensors, its inputs with as many rows as it has."""
    names = (*program.parameters, *program.buffers, *program.constants)
    inputs = {name: states[name].meta for name in program.inputs}
    found = {name: states[name].meta for name in names}
    return found | (inputs_at(inputs, program.rows) if program.rows else inputs)
