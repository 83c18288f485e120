"""A strategy that is formulas: what workers and coordinators run in the place of its owner's code.

It is a linear strategy like ours: its sums can be taken in any grouping, in whole numbers, of clients of a
population. An own array of an update counts once a client, whatever its samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from atoll.errors import JobFailed, UnsupportedOp, UsageError
from atoll.formulas import DELTA, GRADIENT, MEAN, RECEIVED, WEIGHT
from strategies import STRATEGIES
from strategies.layout import SHARED, Role, zeros
from strategies.linear import Linear
from strategies.own.computed import Computer
from strategies.sums import Contribution, Term
from strategies.values import ClientState, Correction, Facts, Uploads

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.formulas import DeclaredStrategy
    from strategies.fixed import Grid
    from strategies.layout import Array, Arrays, Layout, SlotMetas, Slots
    from strategies.sums import Sums
    from strategies.values import Broadcast, ClientUpdate, ServerState, Work

OWN = "the job owner's own"


@dataclass(frozen=True)
class ByFormula(Correction):
    """A gradient's formula with its values, by tensor and by name."""

    computer: Computer | None = None
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.computer is not None

    def mapped(self, convert: Callable[[Array], Any]) -> ByFormula:
        values = {
            tensor: {name: convert(array) for name, array in held.items()}
            for tensor, held in self.values.items()
        }
        return replace(self, values=values)

    def gradient(self, name: str, gradient: Any, weight: Any) -> Any:
        if self.computer is None or name not in self.values:
            return gradient
        values = {**self.values[name], GRADIENT: gradient, WEIGHT: weight}
        run = self.computer.run_arrays if isinstance(gradient, np.ndarray | np.generic) else self.computer.run
        return run(values)[GRADIENT]


@dataclass(frozen=True)
class Declared(Linear):
    """The strategy ``title``, which is ``own``. UsageError for the name of one of ours."""

    name: ClassVar[str] = "own"

    title: str
    own: DeclaredStrategy

    def __post_init__(self) -> None:
        if self.title in STRATEGIES:
            raise UsageError(f"a job's own strategy is called {self.title!r}, as one of ours; rename it")
        object.__setattr__(self, "name", self.title)
        object.__setattr__(self, "BY_SAMPLES", self.own.by_samples)

    @property
    def facts(self) -> Facts:
        own = self.own
        return Facts(
            f"{OWN}, by formulas: {own.summary}",
            OWN,
            needs_client_state=bool(own.client),
            sgd_only=own.reads_sgd,
            asynchronous=not (own.client or own.sent_up),
        )

    # What travels, and what is summed.

    def extra_down(self, layout: Layout) -> SlotMetas:
        return {name: layout.metas_of(Role.TRAINED) for name in self.own.sent_down}

    def extra_up(self, layout: Layout) -> SlotMetas:
        return {name: layout.metas_of(Role.TRAINED) for name in self.own.sent_up}

    def adapt(self, layout: Layout) -> Layout:
        return layout.with_roles(Role.STILL, self._copies(layout))

    def contribute(self, layout: Layout, update: ClientUpdate) -> Contribution:
        base = super().contribute(layout, update)
        own = {name: Term(1.0, update.extra[name]) for name in self.own.sent_up}
        return Contribution({**base.terms, **own}, base.scalars)

    def term_metas(self, layout: Layout) -> SlotMetas:
        return {**super().term_metas(layout), **self.extra_up(layout)}

    def grid(self, clients: int, samples: int) -> Grid:
        base = super().grid(clients, samples)
        return replace(base, weights={**base.weights, **dict.fromkeys(self.own.sent_up, clients)})

    def fit(self, layout: Layout) -> None:
        metas = layout.metas_of(Role.TRAINED).values()
        for what, computer in (
            (GRADIENT, self._gradient),
            ("after", self._after),
            ("step", self._at_server),
        ):
            try:
                if computer is not None:
                    computer.rehearse(metas)
            except UnsupportedOp as error:
                raise UnsupportedOp(f"strategy {self.title}, {what}(): {error}") from None

    # The client half.

    def client_init(self, layout: Layout) -> ClientState:
        return ClientState({name: zeros(layout, Role.TRAINED) for name in self.own.client})

    def _correction(self, layout: Layout, broadcast: Broadcast, state: ClientState) -> Correction:
        computer = self._gradient
        if computer is None:
            return Correction()
        slots = {RECEIVED: broadcast.weights, **broadcast.extra, **self._mine(layout, state)}
        read = computer.formula.reads & slots.keys()
        names = layout.names(Role.TRAINED)
        return ByFormula(
            computer=computer, values={n: {slot: slots[slot][n] for slot in read} for n in names}
        )

    def _own_start(self, layout: Layout, broadcast: Broadcast, state: ClientState) -> Arrays:
        return {into: broadcast.weights[name] for into, name in self._copies(layout).items()}

    def _copies(self, layout: Layout) -> dict[str, str]:
        """Names of the frozen tensors that a round sets, and of those whose received values they get."""
        found = {}
        for into, of in self.own.copies.items():
            names = [name for name in layout.names(*SHARED) if name.startswith(of)]
            pairs = {into + name.removeprefix(of): name for name in names}
            odd = [n for n, name in pairs.items() if layout.metas.get(n) != layout.metas[name]]
            if odd or not pairs:
                raise UsageError(f"strategy {self.title}: the model has no {(odd or [into])[0]!r} like {of}")
            if busy := [n for n in pairs if layout.roles[n] in SHARED]:
                raise UsageError(f"strategy {self.title}: {busy[0]!r} is trained; freeze what is a copy")
            found.update(pairs)
        return found

    def _uploads(self, work: Work) -> Uploads:
        mine = self._mine(work.layout, work.state)
        if self._after is None:
            return Uploads()
        first = work.done[0]
        slots = {WEIGHT: first.weights, DELTA: work.delta, RECEIVED: work.broadcast.weights}
        slots |= {**work.broadcast.extra, **mine}
        numbers = {
            "steps": first.steps, "lr": first.lr, "momentum": first.momentum, "samples": first.n_samples,
        }  # fmt: skip
        found = self._all(self._after, work.layout, slots, numbers)
        kept = {name: found.get(name, mine[name]) for name in self.own.client}
        return Uploads(extra={name: found[name] for name in self.own.sent_up}, kept=kept)

    def _mine(self, layout: Layout, state: ClientState) -> Slots:
        return {**self.client_init(layout).slots, **state.slots} if self.own.client else {}

    # The server half.

    def _slots(self, layout: Layout, weights: Arrays) -> Slots:
        return {name: zeros(layout, Role.TRAINED) for name in self.own.server}

    def _extra(self, state: ServerState) -> Slots:
        return {name: state.slots[name] for name in self.own.sent_down}

    def _step(self, state: ServerState, mean: Arrays, sums: Sums) -> tuple[Arrays, Slots]:
        if self._at_server is None:
            return super()._step(state, mean, sums)
        own = {name: sums.arrays[name] for name in self.own.sent_up}
        slots = {WEIGHT: state.weights, MEAN: mean, **state.slots, **own}
        numbers = {"clients": sums.clients, "n_clients": state.n_clients, "round": state.round}
        found = self._all(self._at_server, state.layout, slots, numbers)
        after = {name: found.get(name, state.slots[name]) for name in self.own.server}
        self._check_finite(state, after)
        return found[WEIGHT], after

    def _check_finite(self, state: ServerState, slots: Slots) -> None:
        for name, arrays in slots.items():
            if bad := [tensor for tensor, array in arrays.items() if not np.all(np.isfinite(array))]:
                where = f"round {state.round}: strategy {self.title}, step()"
                raise JobFailed(f"{where}: {name!r} of {bad[0]!r} is not finite")

    # Formulas.

    @cached_property
    def _gradient(self) -> Computer | None:
        return Computer(self.own.gradient) if self.own.gradient is not None else None

    @cached_property
    def _after(self) -> Computer | None:
        return Computer(self.own.after) if self.own.after is not None else None

    @cached_property
    def _at_server(self) -> Computer | None:
        return Computer(self.own.step) if self.own.step is not None else None

    def _all(
        self, computer: Computer, layout: Layout, slots: Slots, numbers: Mapping[str, float]
    ) -> dict[str, dict[str, Array]]:
        """Return the results for every trained tensor, by their name and the tensor's."""
        found: dict[str, dict[str, Array]] = {name: {} for name in computer.formula.results}
        read = computer.formula.reads
        for tensor, meta in layout.metas_of(Role.TRAINED).items():
            values: dict[str, Any] = {name: number for name, number in numbers.items() if name in read}
            values |= {name: np.asarray(slots[name][tensor], meta.dtype) for name in slots if name in read}
            for name, array in computer.run_arrays(values).items():
                found[name][tensor] = array
        return found
