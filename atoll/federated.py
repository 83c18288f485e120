"""Federated training as its owner declares it, and what a data owner lets others know.

    Job(module, example_inputs, Registered("digits", {"images": "image", "labels": "label"}),
        TrainingSpec(steps=20, n_micro=1), federated=Federated("fedavg", clients=5))

The training data never leaves the clients: a job names a data set that each of them registered
under the same name, and which of its fields feeds which input of the model. ``TrainingSpec.steps``
counts rounds, its optimizer is the clients' local one, its schedule goes over the rounds. Which
strategies, selectors and codecs there are, this package does not know.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, cast

from atoll.bounded import Coded, Inline, Most, Name, Sorted, Unset, Within
from atoll.compression import ADATOPK, AUTO, OFF, Compression
from atoll.data import Materialised, Rows, check_seed
from atoll.dataset_spec import DataSpec, PinnedData
from atoll.errors import UsageError
from atoll.fields import check_fields, described
from atoll.formulas import DeclaredStrategy
from atoll.opdag import DTYPE_BYTES
from atoll.opdag import MAX_METRICS as MAX_METRICS
from atoll.privacy import Privacy, SamplePrivacy, check_private, check_samples
from atoll.secure import Secure, check_secure

if TYPE_CHECKING:
    from atoll.data import DataSource

Option = float | int | bool | str

AUTO_GATEWAYS = "auto"
SITE = "site"
"""A data owner's leave for every gateway of its worker's own site."""
BCRS = "bcrs"
"""An uplink mode: Top-K, each client's ratio from its measured uplink; the slowest's as given, or the least
with which all end together."""
ONLY_OWNER = "owner"
"""A pin to the only worker that has registered the data set."""
MAX_OPTIONS = 64
MAX_PATTERN = 256
MAX_FIELDS = 64
MAX_DIMS = 8
MAX_SAMPLES = 2**40
COUNTED_SAMPLES = 1_000_000
"""Default of ``max_samples``: above what one owner holds of the usual federated data sets (all of MNIST has
60,000 images), so that hardly an honest one is turned down. It is also what a liar may claim: the owner of
a small federation lowers it."""
MOST_COUNTED = 10**9
"""The highest ``max_samples``: weighted sums of the largest deltas allowed still are finite in float32."""
CONSENT_S = 3 * 86_400.0
"""Default of ``consent_s``: a data owner asked on a Friday answers on the Monday."""
STALENESS = 0.5
"""Default of ``staleness``: FedBuff's 1/sqrt(1 + t) (Nguyen 2022, App. E; Xie 2019 has the same family)."""
MAX_STALENESS = 20
MAX_RESIDUAL_ROUNDS = 10
"""A client drawn for half of the rounds misses so many in a row once in 1,000 times; ``bandwidth_aware``, as
it comes, lets nobody wait longer."""
MIN_BATCH = 3
"""Smallest micro-batch by default: mean and variance of two samples reveal both, those of three do not."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


class ConsentWord(StrEnum):
    """A data owner's word on a job that names its data."""

    AWAITED = "awaited"
    GIVEN = "given"
    REFUSED = "refused"


class Downlink(StrEnum):
    """Coding of the model on its way down; every form gives the clients the same bits."""

    OFF = "off"
    LOSSLESS = "lossless"
    DELTA = "delta"  # lossless, against the broadcast before where a client still holds that


Options = Annotated[Mapping[Name, Annotated[Option, Coded("option")]], Sorted(), Most(MAX_OPTIONS)]


@dataclass(frozen=True, slots=True)
class Federated:
    """Settings of a federation's training. UsageError for a figure out of its range.

    ``uplink``: off | lossless | CODEC[:RATIO] | bcrs[:RATIO], as ``atoll.compression`` writes ratios.
    """

    strategy: str = "fedavg"
    options: Options = field(default_factory=dict)
    local_epochs: int = 1
    local_steps: int = 0  # at most so many a round; 0 = no cap
    clients: int = 0  # a round, asynchronous: that train at a time; 0 = all that hold the data
    min_clients: int = 2  # with fewer updates a round is not aggregated; data owners have a floor
    deadline_s: float = 600.0  # of a round's training, and of its evaluation
    evaluate_every: int = 1  # rounds; evaluation on the clients; 0 = never
    held_out: float = 0.1  # share of each client's own data kept for it, drawn by the job's seed
    selector: str = "random"
    selector_options: Options = field(default_factory=dict)
    uplink: str = OFF
    error_feedback: bool = True
    downlink: str = Downlink.OFF.value
    # That a client may register: no claim weighs more.
    max_samples: Annotated[int, Unset(COUNTED_SAMPLES)] = COUNTED_SAMPLES
    # Tensors that each client keeps for itself, by shell wildcards: ("head.*",).
    local: Annotated[tuple[str, ...], Most(MAX_OPTIONS)] = ()
    # For data owners' consent, while too few take part; then the job fails.
    consent_s: Annotated[float, Unset(CONSENT_S)] = CONSENT_S
    privacy: Privacy | None = None  # of each client's data, beside secure= against the coordinator as well
    # Asynchronous: so many updates make the next model, whoever sent them; 0: rounds wait for all chosen.
    buffer: int = 0
    staleness: float | None = None  # 0.5: an update of t models ago weighs (1 + t) ** -staleness
    max_staleness: int | None = None  # 20: an older one is refused
    own: DeclaredStrategy | None = None  # formulas of a strategy that is none of ours, captured at submit
    sample_privacy: SamplePrivacy | None = None  # of each sample, by noise inside each client
    secure: Secure | None = None  # the coordinator sees sums of updates alone: docs/secure-aggregation.md
    # Workers of one --site send one sum: "auto", or the gateways' names with commas; "": each for itself.
    gateways: str = ""

    @property
    def asynchronous(self) -> bool:
        """Whether clients train each at their own pace, and no round waits for any of them."""
        return self.buffer > 0

    @property
    def shows_losses(self) -> bool:
        """Whether figures of single clients leave them."""
        return self.privacy is None and self.secure is None and self.sample_privacy is None

    def weight(self, models: int) -> float:
        """Share that an update counts with whose model is so many ``models`` old."""
        return float((1.0 + models) ** -(STALENESS if self.staleness is None else self.staleness))

    @property
    def oldest(self) -> int:
        """Models ago that an update may have begun."""
        return MAX_STALENESS if self.max_staleness is None else self.max_staleness

    def __post_init__(self) -> None:
        check_fields(self)
        for name, value, low, high in (
            ("local_epochs", self.local_epochs, 1, 10_000),
            ("local_steps", self.local_steps, 0, 10**8),
            ("clients", self.clients, 0, 4096),
            ("min_clients", self.min_clients, 1, 4096),
            ("evaluate_every", self.evaluate_every, 0, 10**9),
            ("max_samples", self.max_samples, 1, MOST_COUNTED),
            ("buffer", self.buffer, 0, 4096),
            ("max_staleness", self.oldest, 0, 10**6),
        ):
            if type(value) is not int or not low <= value <= high:
                raise UsageError(f"{name} = {value!r}; give a whole number from {low} to {high}")
        _within("deadline_s", self.deadline_s, 0.1, 7 * 86_400.0)
        _within("consent_s", self.consent_s, 1.0, 90 * 86_400.0)
        _within("held_out", self.held_out, 0.0, 0.9)
        _within("staleness", STALENESS if self.staleness is None else self.staleness, 0.0, 10.0)
        if self.clients and self.clients < self.min_clients and not self.asynchronous:
            raise UsageError(
                f"{self.clients} clients a round cannot bring the {self.min_clients} updates of "
                "min_clients; raise clients or lower min_clients"
            )
        if self.asynchronous and self.buffer < self.min_clients:
            raise UsageError(
                f"a buffer of {self.buffer} updates is less than min_clients = {self.min_clients}; "
                "raise buffer or lower min_clients"
            )
        if self.evaluate_every and self.held_out == 0.0:
            raise UsageError("held_out = 0 leaves clients nothing to evaluate on; set evaluate_every=0")
        for what, name in (("strategy", self.strategy), ("selector", self.selector)):
            checked_name(what, name)
        for what, options in (("options", self.options), ("selector_options", self.selector_options)):
            _check_options(what, options)
        parse_uplink(self.uplink)
        if not isinstance(self.local, tuple) or len(self.local) > MAX_OPTIONS:
            raise UsageError(
                f"local = {str(self.local)[:64]}; give a tuple of at most {MAX_OPTIONS} patterns"
            )
        if bad := [p for p in self.local if not isinstance(p, str) or not 1 <= len(p) <= MAX_PATTERN]:
            raise UsageError(f"local: {str(bad[0])[:64]!r}; give patterns of 1 to {MAX_PATTERN} characters")
        if self.privacy is not None:
            check_private(self.privacy, self.clients, self.selector, self.evaluate_every)
        if self.sample_privacy is not None:
            check_samples(self.evaluate_every, self.privacy)
        if self.secure is not None:
            uplink = parse_uplink(self.uplink).mode
            rest = (self.clients, self.selector, self.evaluate_every, uplink, self.buffer)
            check_secure(*rest, self.privacy)
        if self.gateways:
            _check_gateways(self)
        if self.downlink not in {mode.value for mode in Downlink}:
            raise UsageError(f"downlink {self.downlink[:64]!r}; give off, lossless or delta")


@dataclass(frozen=True, slots=True)
class Floors:
    """A data owner's floors for everything that leaves its machine. UsageError for a figure out of its
    range."""

    batch: int = MIN_BATCH  # samples in a micro-batch, so in every mean and statistic; of a class in one
    samples: int = 10  # that an update was trained on
    steps: int = 2  # that an update was trained for
    clients: int = 2  # updates in a round: the job's min_clients
    counted: bool = True  # numbers about the data beside an update are few; False: not counted
    statistics: int = 0  # as many a round the data set's owner allows anyway

    def __post_init__(self) -> None:
        for name, value in (
            ("--min-batch", self.batch),
            ("--min-samples", self.samples),
            ("--min-steps", self.steps),
            ("--min-clients", self.clients),
        ):
            if type(value) is not int or not 1 <= value <= 10**9:
                raise UsageError(f"{name} = {value!r}; give a whole number from 1")
        if type(self.statistics) is not int or not 0 <= self.statistics <= 10**9:
            raise UsageError(f"--allow-statistics = {self.statistics!r}; give a whole number from 0")


NO_FLOORS = Floors(batch=1, samples=1, steps=1, clients=1, counted=False)
"""Floors of experiments on public data."""


@dataclass(frozen=True, slots=True)
class FederatedSpec:
    """The part of a federated job that travels: ``data``, registered on the clients, and which of its
    fields feeds each input of the model. ``rule.strategy``'s options are the server's and the clients'."""

    rule: Annotated[Federated, Inline()]
    data: str
    # Input of the model -> field of the data.
    inputs: Annotated[Mapping[Name, Name], Sorted(), Most(MAX_FIELDS)]

    def __post_init__(self) -> None:
        checked_name("data set", self.data)
        if not 1 <= len(self.inputs) <= MAX_FIELDS:
            raise UsageError(f"{len(self.inputs)} inputs of data set {self.data}; 1 to {MAX_FIELDS}")
        for name in (*self.inputs, *self.inputs.values()):
            checked_name("input or field", name)


@dataclass(frozen=True)
class Registered:
    """Training data that stays where it is: each client has registered it as ``name``.

    ``inputs`` maps every input of the model to a field of the data. ``held_out`` is the job owner's own
    data for evaluation: ``Rows``, another source, or arrays by input.

    ``pin`` is for a job that is cut into stages: the worker that has the data computes all that reads them,
    the others what is between. "owner": the only worker that has registered such a set; else its name.
    ``seed``: of the order of its samples then; None: as stored.

    ``stand_in(owner, owners)`` returns arrays by field in the place of an owner's data; ``owner`` counts from
    0. `atoll dev` registers them for its workers, and nothing else calls it.
    """

    name: str
    inputs: Mapping[str, str]
    held_out: DataSource | Mapping[str, object] | None = None
    pin: str = ""
    seed: int | None = 0
    stand_in: Callable[[int, int], Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        inputs: Any = self.inputs
        if not isinstance(inputs, Mapping):
            raise UsageError(
                f"Registered: inputs = {described(inputs)}; give a dict of the field of the data for each "
                'argument of forward(), {"x": "image"}'
            )
        if not isinstance(self.pin, str):
            raise UsageError(f'Registered: pin = {described(self.pin)}; give "owner", or a worker\'s name')
        check_seed(self.seed)

    def materialise(self, batch: int) -> tuple[Materialised, Materialised | None]:
        """No training data, and the owner's held-out data in stored order."""
        spec = DataSpec((), 0, batch, None)
        if self.pin:
            worker = "" if self.pin == ONLY_OWNER else self.pin
            spec = DataSpec((), 0, batch, self.seed, PinnedData(worker, self.name, dict(self.inputs)))
        train = Materialised(spec, {})
        if self.held_out is None:
            return train, None
        held = self.held_out
        source = Rows(cast("Any", held), seed=None) if isinstance(held, Mapping) else held
        found, _ = source.materialise(batch)
        return train, dataclasses.replace(found, spec=dataclasses.replace(found.spec, shuffle_seed=None))


@dataclass(frozen=True, slots=True)
class FieldFacts:
    """Field of a registered data set: dtype and shape of a single sample."""

    name: str
    dtype: str
    shape: Annotated[tuple[int, ...], Most(MAX_DIMS)]

    def __post_init__(self) -> None:
        checked_name("field", self.name)
        if self.dtype not in DTYPE_BYTES:
            raise UsageError(f"field {self.name}: dtype {self.dtype[:32]!r}; one of {', '.join(DTYPE_BYTES)}")
        if len(self.shape) > MAX_DIMS or any(not 1 <= extent < 2**32 for extent in self.shape):
            raise UsageError(f"field {self.name}: shape {self.shape}; at most {MAX_DIMS} extents from 1")


@dataclass(frozen=True, slots=True)
class DatasetFacts:
    """All that leaves a data owner's machine before training: name, size and fields."""

    name: str
    n_samples: Annotated[int, Within(1, MAX_SAMPLES)]
    fields: Annotated[tuple[FieldFacts, ...], Most(MAX_FIELDS)]

    def __post_init__(self) -> None:
        checked_name("data set", self.name)
        if not 1 <= self.n_samples <= MAX_SAMPLES:
            raise UsageError(f"data set {self.name} has {self.n_samples} samples; 1 to {MAX_SAMPLES}")
        if not 1 <= len(self.fields) <= MAX_FIELDS:
            raise UsageError(f"data set {self.name} has {len(self.fields)} fields; 1 to {MAX_FIELDS}")
        if len({f.name for f in self.fields}) < len(self.fields):
            raise UsageError(f"data set {self.name} names a field twice; give each its own name")

    def field(self, name: str) -> FieldFacts | None:
        """The field called ``name``."""
        return next((f for f in self.fields if f.name == name), None)


def parse_uplink(text: str) -> Compression:
    """The parsed ``uplink``; its mode is off, lossless, bcrs or a codec's name. UsageError otherwise."""
    parsed = Compression.parse(text)
    if parsed.mode in (AUTO, ADATOPK) or parsed.independent:
        raise UsageError(f"uplink {text[:64]!r}; give off, lossless, CODEC:RATIO or bcrs[:RATIO]")
    return parsed


def residual_counts(left_in: int, at_round: int) -> bool:
    """Return whether the residual of the update of round ``left_in`` is added to that of ``at_round``.

    Older than ``MAX_RESIDUAL_ROUNDS`` it was left by a model too far back, and by one that is still to come
    if the rounds began anew: both are dropped.
    """
    return 0 <= at_round - left_in <= MAX_RESIDUAL_ROUNDS


def checked_name(what: str, name: str) -> str:
    """``name`` when it has 1 to 64 letters, digits, ``_ . -`` and begins with a letter or ``_``."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise UsageError(
            f"{what} {str(name)[:64]!r}; use up to 64 letters, digits, _ . - and begin with a letter"
        )
    return name


def _check_gateways(rule: Federated) -> None:
    if any(not 1 <= len(name) <= 64 or not name.isprintable() for name in rule.gateways.split(",")):
        raise UsageError(
            f"gateways = {rule.gateways[:64]!r}; give {AUTO_GATEWAYS}, or names of workers with commas "
            "between them"
        )
    for given, what in (
        (rule.buffer, "buffer=: an asynchronous job takes each update when it comes, and a sum has one time"),
        (
            rule.privacy is not None,
            "privacy=: the coordinator clips updates, and a gateway would see them",
        ),
        (rule.secure is not None, "secure=: sums of masked updates at a gateway are not built"),
    ):
        if given:
            raise UsageError(f"gateways= cannot be combined with {what}; leave one of them out")


def _check_options(what: str, options: Mapping[str, Option]) -> None:
    if len(options) > MAX_OPTIONS:
        raise UsageError(f"{len(options)} {what}; at most {MAX_OPTIONS}")
    for name, value in options.items():
        checked_name(f"name in {what}", name)
        if type(value) not in (bool, int, float, str):
            raise UsageError(f"{what}: {name} is a {type(value).__name__}; give a number, a bool or a word")
        if isinstance(value, str) and len(value) > 256:
            raise UsageError(f"{what}: {name} has {len(value)} characters; at most 256")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise UsageError(f"{what}: {name} = {value}; at most 64 bits")


def _within(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise UsageError(f"{name} = {value:g}; give a number from {low:g} to {high:g}")
