"""The inside plan of each member of several devices: the fastest that fits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atoll.mesh.layout import Inside
from atoll.mesh.rules import goes_round
from atoll.ops import GROUPED
from coordinator.planning.inside.costs import InsideCosts, inside_costs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from atoll.job import Keeping, TrainingSpec
    from atoll.opdag import OpDag
    from coordinator.planning.costs.fleet import Device, Mesh
    from coordinator.planning.costs.memory import MemoryModel
    from coordinator.planning.costs.op_seconds import Costs
    from coordinator.planning.inside.costs import Divisions


@dataclass
class Insides:
    """Inside plans of a graph, each computed once; ``memory``: of the graph on one device; ``divisions``: of
    the graph in other forms of what is kept, and in other trainings, which share them."""

    dag: OpDag
    training: TrainingSpec
    keeping: Keeping
    memory: MemoryModel
    divisions: Divisions = field(default_factory=dict)
    _known: dict[tuple[Inside, int], InsideCosts] = field(default_factory=dict)

    def of_size(self, size: int) -> list[InsideCosts]:
        """Return every kind for so many processes."""
        for kind in self._kinds:
            if (kind, size) not in self._known:
                found = inside_costs(self.dag, self.training, self.keeping, kind, size, self.divisions)
                self._known[kind, size] = found
        return [self._known[kind, size] for kind in self._kinds]

    @property
    def _kinds(self) -> list[Inside]:
        """Kinds that differ for this graph."""
        ops = self.dag.ops
        alike = set[Inside]()
        if not any(node.target == GROUPED for node in ops):
            alike.add(Inside.EXPERTS)
        if not any(goes_round(node) for node in ops):
            alike.add(Inside.RING)
        return [kind for kind in Inside if kind not in alike]

    def priced(
        self, devices: Sequence[Device], alone: Sequence[Costs], kinds: Mapping[str, Inside]
    ) -> tuple[list[InsideCosts | None], list[Costs]]:
        """Return the inside plan of each device, None where it is one, and costs on all it is; ``alone``: on
        one of them; ``kinds``: of workers whose kind is given. Peers with steps of their own use the first
        device only."""
        insides: list[InsideCosts | None] = []
        priced = []
        for device, costs in zip(devices, alone, strict=True):
            mesh = device.mesh if self.training.local_exchange is None else None
            best = None
            if mesh is not None and device.worker in kinds:
                options = self.of_size(mesh.size)
                best = next(option for option in options if option.kind is kinds[device.worker])
            elif mesh is not None:
                best = self.best(device, mesh, costs, len(devices))
            insides.append(best)
            priced.append(costs if best is None or mesh is None else best.costs(costs, mesh))
        return insides, priced

    def fastest(self, mesh: Mesh, alone: Costs) -> list[tuple[float, InsideCosts]]:
        """Return every kind with the seconds of a micro-batch of the whole model, the fastest first."""
        found = []
        for option in self.of_size(mesh.size):
            costs = option.costs(alone, mesh)
            found.append((float((costs.forward_s + costs.backward_s).sum()), option))
        return sorted(found, key=lambda each: each[0])

    def best(self, device: Device, mesh: Mesh, alone: Costs, among: int) -> InsideCosts:
        """Return the fastest kind whose processes hold their part of the model, where ``among`` devices hold
        as much each; the one of the least memory where none does."""
        options = [option for _, option in self.fastest(mesh, alone)]

        def need(option: InsideCosts) -> float:
            return option.memory.bytes(0, len(self.dag.ops), 1)

        room = (option for option in options if need(option) <= device.model_limit_bytes * among)
        return next(room, None) or min(options, key=need)

    def times(self, inside: InsideCosts | None) -> float:
        """Return how much more of the model a process's memory holds than one device's own would."""
        if inside is None:
            return 1.0
        n_ops = len(self.dag.ops)
        return self.memory.bytes(0, n_ops, 1) / max(1.0, inside.memory.bytes(0, n_ops, 1))
