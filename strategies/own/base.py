"""A strategy as its owner writes it: formulas for one tensor, and the arrays that they need beside the model.

    @own_strategy
    class Proximal(OwnStrategy):
        "The local loss holds on to the received weights."

        name = "proximal"
        mu: float = 0.01

        def gradient(self, at):
            return at.gradient + (at.weight - at.received) * self.mu

It is captured at submit (``strategies.own.captured``): its ops travel, its code does not. How to write one:
docs/own-strategies.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, dataclass_transform

from atoll.errors import UsageError
from atoll.federated import checked_name
from strategies import STRATEGIES
from strategies.options import typed

if TYPE_CHECKING:
    from strategies.options import Option

GROUP = "atoll.strategies"


class Values:
    """The values that a formula may read, by name: tensors of the model's shape, or single numbers."""

    def __init__(self, method: str, values: Mapping[str, Any]) -> None:
        self._method, self._values = method, values

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._values:
            raise UsageError(f"{self._method}() reads at.{name}; there are {', '.join(self._values)}")
        return self._values[name]


@dataclass(frozen=True)
class OwnStrategy:
    """A strategy of its owner's; fields of a subclass are its options. What no method says is FedAvg.

    Every name in ``SERVER``, ``CLIENT`` and ``SENT_UP`` stands for one array a trained tensor, of its shape,
    zero before the first round. ``SENT_DOWN``: arrays of ``SERVER`` that every client receives. ``COPIES``:
    frozen modules of the model that hold, in a round, the weights another module began it with:
    ``{"teacher.": "net."}``.
    """

    name: ClassVar[str] = ""
    SERVER: ClassVar[tuple[str, ...]] = ()
    SENT_DOWN: ClassVar[tuple[str, ...]] = ()
    CLIENT: ClassVar[tuple[str, ...]] = ()
    SENT_UP: ClassVar[tuple[str, ...]] = ()
    COPIES: ClassVar[Mapping[str, str]] = {}
    BY_SAMPLES: ClassVar[bool] = True  # means are weighted by samples; else every client counts once

    def gradient(self, at: Values) -> Any:
        """Return the gradient of a local step, before it is clipped and the optimizer sees it.

        ``at``: gradient, weight, received (the weight as the round began), SENT_DOWN, CLIENT.
        """
        return at.gradient

    def after(self, at: Values) -> Mapping[str, Any]:
        """Return a client's arrays after its local steps: all of SENT_UP, and of CLIENT those that change.

        ``at``: weight, received, delta (their difference), SENT_DOWN, CLIENT; steps, lr, momentum, samples.
        """
        return {}

    def step(self, at: Values) -> Mapping[str, Any]:
        """Return the next "weight", and of SERVER what changes.

        ``at``: weight, mean (of the deltas), SERVER, SENT_UP (sums over the clients that answered); clients
        (that answered), n_clients (of the federation), round.
        """
        return {"weight": at.weight + at.mean}


Kind = TypeVar("Kind", bound=type[OwnStrategy])
_KNOWN: dict[str, type[OwnStrategy]] = {}


@dataclass_transform(frozen_default=True)
def own_strategy(kind: Kind) -> Kind:
    """Make a subclass of ``OwnStrategy`` a frozen dataclass that jobs of this process can name. UsageError
    for a name that is taken."""
    if not issubclass(kind, OwnStrategy):
        raise UsageError(f"{kind.__name__} is not an OwnStrategy; derive it from strategies.own.OwnStrategy")
    made: Any = dataclass(frozen=True)(kind)
    name = checked_name(f"{kind.__name__}.name", made.name)
    if name in STRATEGIES:
        raise UsageError(f"{kind.__name__}.name = {name!r}; that is one of ours, give it another name")
    _KNOWN[name] = made
    return kind


def own_names() -> list[str]:
    """Return the names of the strategies that this process defines or that installed packages declare."""
    return sorted({*_KNOWN, *(point.name for point in entry_points(group=GROUP))})


def make_own(name: str, options: Mapping[str, Option]) -> OwnStrategy:
    """Return the owner's strategy of this name. UsageError for a name that nobody declares, or options that
    it does not have."""
    kind = _KNOWN.get(name) or _installed(name)
    if kind is None:
        raise UsageError(
            f"no strategy {name[:64]!r}; ours are {', '.join(sorted(STRATEGIES))}, yours "
            f"{', '.join(own_names()) or 'none'}: define it in the job file with @own_strategy, or install a "
            f"package that declares it under the entry points {GROUP!r} (docs/own-strategies.md)"
        )
    return kind(**typed(kind, options))


def _installed(name: str) -> type[OwnStrategy] | None:
    found = next(iter(entry_points(group=GROUP, name=name)), None)
    if found is None:
        return None
    try:
        kind = found.load()
    except Exception as error:
        raise UsageError(f"strategy {name}: {found.value} does not load: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, OwnStrategy) and kind.name == name):
        raise UsageError(f"strategy {name}: {found.value} is not a class of that name made by @own_strategy")
    return kind
