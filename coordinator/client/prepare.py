"""A Job made ready to submit: captured, proven against its module, its data materialised.

Runs on the owner's machine; what comes out is a JobSpec without code and the blobs it names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
import torch

from atoll.arrays import array_of, dtype_name, tensor_of
from atoll.calls import Shapes
from atoll.data import Materialised, sample_indices, take
from atoll.dataset_spec import DataSpec, PinnedData
from atoll.dataset_spec import Layout as Order
from atoll.errors import UsageError
from atoll.federated import Federated, FederatedSpec, Floors, Registered
from atoll.fields import described
from atoll.indices import Range, index_ranges
from atoll.job import Job, JobSpec, TrainingSpec
from atoll.opdag import FLOATING, OpDag, TensorMeta
from atoll.optimizers import muon_words
from atoll.program import stage_programs
from atoll.rows import dag_at_rows
from coordinator.capture.capture import Captured, capture
from coordinator.capture.self_check import CheckResult, self_check
from coordinator.capture.torch_export import meta_of, modes_in_words
from coordinator.client.transfer import PIECE_BYTES
from coordinator.client.weights import with_weights
from coordinator.federated.checks import check_federated, check_inputs, check_spec, check_wrapped
from coordinator.planning.codecs.ratios import check_compression
from coordinator.planning.search.pins import check_pinned
from protos.blob_transfer import LocalBlob
from protos.convert import dag_bytes
from protos.tensor_files import VALUE, blob_head
from strategies.counted import check_measured, check_numbers, returned_numbers, values_of
from strategies.flora import FLoRA
from strategies.layout import Layout, own_parts
from strategies.lora_module import check_scaling
from strategies.own.captured import with_own
from strategies.privacy.private import settled, strategy_of
from strategies.returned import check_returned

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.generic]

Telling = Callable[[str], None]
TRAINING, HELD_OUT = "training data", "held-out data"  # as messages name them


@dataclass(frozen=True)
class Graphs:
    """Input of a plan from a model: both op-DAGs, and each as the blob it travels in."""

    dag: OpDag
    eval_dag: OpDag
    blob: LocalBlob
    eval_blob: LocalBlob

    @classmethod
    def of(cls, captured: Captured) -> Graphs:
        """The graphs of a capture."""
        dag, eval_dag = captured.train, captured.evaluation
        blobs = [LocalBlob.of(partial(dag_bytes, found), PIECE_BYTES) for found in (dag, eval_dag)]
        return cls(dag, eval_dag, *blobs)


@dataclass(frozen=True)
class Prepared:
    """A submission (``spec``) and the bytes that it names (``blobs``)."""

    spec: JobSpec
    blobs: tuple[LocalBlob, ...]
    graphs: Graphs
    notice: str = ""  # of what data owners will refuse unless they allow it

    @property
    def upload_bytes(self) -> int:
        return sum(blob.size for blob in {blob.hash: blob for blob in self.blobs}.values())


def prepare(
    job: Job,
    *,
    partitioner: str = "op_fence",
    schedule: str = "auto",
    resume_of: str = "",
    standbys: int | None = None,
    tell: Telling = lambda what: None,
) -> Prepared:
    """Capture ``job``, check the capture against the module, and collect its blobs.

    Raises CaptureError and SelfCheckError naming what differs, UsageError for data that does
    not fit the model's inputs or for a compression that links cannot do.
    """
    check_compression(job.training.compression)
    federated = federated_spec(job)
    pinned_data(job)
    if words := with_weights(job):
        tell(words)
    tell("materialising the data")
    data, held_out = materialised(job)
    tell("capturing the model as an op-DAG")
    for words in modes_in_words(job.module):
        tell(words)
    captured, training = captured_with(job, held_out)
    if training != job.training:
        tell(held_out_words(job.training, training, held_out))
    if words := muon_words(captured.train.parameters, training.optimizer):
        tell(words)
    notice = check_graphs(federated.rule, captured) if federated is not None else ""
    for dag, rows, what in ((captured.train, data, TRAINING), (captured.evaluation, held_out, HELD_OUT)):
        for words in check_values(dag, rows, what) if rows is not None else ():
            tell(words)
    tell(f"checking {len(captured.train.ops)} ops against the module")
    inputs = captured.train.inputs
    away = isinstance(job.data, Registered)
    batches = [dict(job.example_inputs)] if away else [micro_batch(data, inputs, at) for at in (0, 1)]
    checked = self_check(job.module, captured, batches[0], second=batches[-1])
    for words in loss_words(captured, checked, data):
        tell(words)
    tell("hashing weights and data")
    blobs: list[LocalBlob] = []
    graphs = Graphs.of(captured)
    tensors = {name: tensor_blob(tensor) for name, tensor in captured.state.items()}
    data_spec = _store(data, blobs)
    eval_spec = _store(held_out, blobs) if held_out is not None else None
    spec = JobSpec(
        name=job.name,
        training=training,
        dag_hash=graphs.blob.hash,
        eval_dag_hash=graphs.eval_blob.hash,
        tensors={name: blob.hash for name, blob in sorted(tensors.items())},
        data=data_spec,
        eval_data=eval_spec,
        partitioner=partitioner,
        schedule=schedule,
        resume_of=resume_of,
        standbys=standbys,
        hidden=tuple(sorted(set(tensors) - set(job.module.state_dict()))),
        federated=federated,
    )
    check_spec(spec)
    return Prepared(spec, (graphs.blob, graphs.eval_blob, *tensors.values(), *blobs), graphs, notice)


def capture_graphs(job: Job) -> Graphs:
    """The op-DAGs of ``job``'s model, for planning; raises CaptureError, and what ``with_weights`` does."""
    with_weights(job)
    return Graphs.of(captured_of(job, tail=False))


def captured_of(job: Job, *, tail: bool) -> Captured:
    """The capture of ``job``'s model; raises CaptureError. ``tail``: as of ``capture``."""
    sums = job.federated is None
    return capture(job.module, job.example_inputs, job.training, job.metrics, sums=sums, tail=tail)


def captured_with(job: Job, held_out: Materialised | None) -> tuple[Captured, TrainingSpec]:
    """The capture, and the training with as many ``eval_batches`` as there are: the last of them may have
    fewer rows, where the model can be evaluated with those. Clients have numbers of rows of their own."""
    batch, training = batch_size(job.example_inputs), job.training
    n_samples = held_out.spec.n_samples if held_out is not None else 0
    wanted = min(training.eval_batches, -(-n_samples // batch))
    rest = max(0, wanted * batch - n_samples) and n_samples % batch
    captured = captured_of(job, tail=bool(rest) or job.federated is not None)
    last = _at_rows(captured.evaluation, rest) if rest else None
    if rest and last is None:
        wanted -= 1
    if job.federated is None:
        captured = replace(captured, evaluation=replace(captured.evaluation, tail=last))
    if training.eval_batches and not wanted:
        raise UsageError(
            f"{n_samples} held-out samples are fewer than a micro-batch of {batch}, and the model cannot be "
            f"evaluated with {n_samples}; give at least {batch}, or set eval_batches=0"
        )
    return captured, replace(training, eval_batches=wanted)


def _at_rows(dag: OpDag, rows: int) -> OpDag | None:
    try:
        return dag_at_rows(dag, rows)
    except UsageError:
        return None


def held_out_words(asked: TrainingSpec, found: TrainingSpec, held_out: Materialised | None) -> str:
    """Say how much is evaluated where that is less than was asked for."""
    spec = held_out.spec if held_out is not None else DataSpec((), 0, 1)
    rows = min(spec.n_samples, found.eval_batches * spec.batch)
    return (
        f"held-out figures are of {rows} of {spec.n_samples} rows, in {found.eval_batches} micro-batches "
        f"(eval_batches = {asked.eval_batches})"
    )


def loss_words(captured: Captured, checked: CheckResult, data: Materialised) -> list[str]:
    """Say what a step's loss is where that is not plain: a sum over a count, or means of unequal counts."""
    if captured.train.weight is not None:
        each = f"{checked.total / checked.weight:.4g} each" if checked.weight else "none in this batch"
        return [f"the loss is a sum over its weight: {checked.weight:g} in the checked batch, {each}"]
    ignored = {
        node.args[4] if len(node.args) > 4 else -100
        for node in captured.train.ops
        if node.target == "aten.cross_entropy_loss.default" and (len(node.args) < 4 or node.args[3] == 1)
    }
    arrays = [data.arrays[f.blob] for f in data.spec.fields]
    whole = [array for array in arrays if np.issubdtype(array.dtype, np.signedinteger)]
    if not any(_holds(array.reshape(-1), index) for index in ignored for array in whole):
        return []
    return [
        "targets are left out of the loss (ignore_index), and micro-batches count alike whatever is left: "
        "for a mean over targets return their sum as loss and their number as weight"
    ]


def _holds(flat: Array, number: object) -> bool:
    """Whether a number is in an array, which may be larger than memory."""
    return any(bool(np.any(flat[at : at + PIECE_BYTES] == number)) for at in range(0, len(flat), PIECE_BYTES))


def check_graphs(rule: Federated, captured: Captured) -> str:
    """Refuse at once what every client would refuse: UnsupportedOp names the buffer, metric or loss that
    would take data home. Returns what data owners will refuse unless they allow it, empty for nothing."""
    dags = (captured.train, captured.evaluation)
    metas = {name: meta_of(tensor, f"tensor {name!r}") for name, tensor in captured.state.items()}
    strategy = strategy_of(rule)
    programs = [stage_programs(dag, (0,))[0] for dag in dags]
    check_returned(programs, captured.train.inputs, metas, strategy, Floors())
    whole = Layout.of_state({**captured.train.parameters, **captured.train.buffers})
    layout = strategy.adapt(own_parts(whole, rule.local))
    strategy.fit(layout)
    numbers = returned_numbers(layout, captured.train.buffers, strategy)
    values = values_of(captured.train.inputs)
    try:
        check_numbers(numbers, Floors(), values, None, 1)
        check_measured(len(captured.evaluation.metrics), Floors(), values)
    except UsageError as error:
        return f"data owners will refuse this job unless they allow it: {error}"
    return ""


def federated_spec(job: Job) -> FederatedSpec | None:
    """Return a federated job's specification for its clients; None for a job that is cut into stages.

    UsageError for data that are here although clients train, or the other way round, for rules that do
    not go together, and for a wrapper that is missing.
    """
    if job.federated is None:
        if isinstance(job.data, Registered) and not job.data.pin:
            raise UsageError(
                f"data set {job.data.name} is registered on clients: give Job(federated=Federated(...)) to "
                'train on each of them, or Registered(..., pin="owner") to cut the model around one'
            )
        return None
    if not isinstance(job.data, Registered):
        raise UsageError(
            f"a federated job's data stay on the clients, this one brings {type(job.data).__name__}; name "
            "the registered set with data=Registered(NAME, inputs={...})"
        )
    if job.data.pin:
        raise UsageError("Registered(pin=...) is for jobs that are cut into stages; leave it out here")
    rule = settled(with_own(job.federated), job.training.steps)
    strategy = check_federated(rule, job.training)
    check_inputs(job.data.inputs, job.example_inputs)
    check_wrapped(strategy, [name for name, _ in job.module.named_parameters()])
    if isinstance(strategy, FLoRA):
        check_scaling(job.module, strategy.scaling)
    return FederatedSpec(rule, job.data.name, dict(job.data.inputs))


def pinned_data(job: Job) -> PinnedData | None:
    """Return the data of a job whose samples stay with one worker, None for any other. UsageError for what
    cannot be trained so."""
    if not isinstance(job.data, Registered) or not job.data.pin:
        return None
    check_inputs(job.data.inputs, job.example_inputs)
    check_pinned(job.training)
    return job.data.materialise(1)[0].spec.pinned


def materialised(job: Job) -> tuple[Materialised, Materialised | None]:
    """The job's data, checked against the model's inputs; UsageError says which does not fit."""
    batch = batch_size(job.example_inputs)
    inputs = {name: meta_of(tensor, f"input {name!r}") for name, tensor in job.example_inputs.items()}
    found = job.data.materialise(batch)
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], Materialised):
        raise UsageError(
            f"{type(job.data).__name__}.materialise() returned {described(found)}; return training data and "
            "held-out data or None, as Rows does"
        )
    data = _as_arrays(found[0])
    held_out = None if found[1] is None else _as_arrays(found[1])
    if not isinstance(job.data, Registered):
        check_data(data, inputs, TRAINING)
    if job.training.eval_batches and held_out is None:
        raise UsageError(
            f"eval_batches = {job.training.eval_batches}, but the data source holds nothing out; give it "
            f"held-out data or set eval_batches=0"
        )
    if held_out is not None:
        check_data(held_out, inputs, HELD_OUT)
    return data, held_out


def _as_arrays(data: Materialised) -> Materialised:
    """The data of a source, which may be the job file's own, as arrays that can be stored."""
    arrays = {name: array_of(f"data: {name!r}", value) for name, value in data.arrays.items()}
    return replace(data, arrays=arrays)


def batch_size(example_inputs: Mapping[str, torch.Tensor]) -> int:
    """The micro-batch size: the common first dimension of the example inputs."""
    sizes = {name: tuple(tensor.shape) for name, tensor in example_inputs.items()}
    first = {shape[0] for shape in sizes.values() if shape}
    if len(first) != 1 or not all(sizes.values()):
        raise UsageError(
            f"example inputs {sizes} must all have the micro-batch size as their first dimension; "
            f"move fixed tensors into the module"
        )
    return int(first.pop())


def check_data(data: Materialised, inputs: Mapping[str, TensorMeta], what: str) -> None:
    """UsageError unless ``data`` gives each input a micro-batch of its shape."""
    given = {field.input for field in data.spec.fields}
    if given != set(inputs):
        odd = (("missing", set(inputs) - given), ("unknown", given - set(inputs)))
        raise UsageError(
            f"{what} gives {', '.join(sorted(given))}, the model takes {', '.join(sorted(inputs))}: "
            + "; ".join(f"{word} {', '.join(sorted(names))}" for word, names in odd if names)
            + "; name the data after forward()'s arguments"
        )
    samples = sample_indices(data.spec, 1, 0, 0)
    for field in data.spec.fields:
        array = data.arrays[field.blob]
        found = take(array, field, samples)
        meta = inputs[field.input]
        if found.shape != meta.shape:
            raise UsageError(
                f"{what}: a micro-batch of {field.input!r} has shape {found.shape}, the example input "
                f"{meta.shape}; make them equal"
            )
        stored = dtype_name(found)
        if stored in FLOATING and meta.dtype not in FLOATING:
            raise UsageError(
                f"{what}: {field.input!r} is stored as {stored}, the model takes {meta.dtype}; "
                f"convert the data"
            )
        _check_range(f"{what}: {field.input!r}", array, meta.dtype)


def _check_range(what: str, array: Array, wanted: str) -> None:
    """UsageError for whole numbers that the model's input cannot hold: they would wrap around unseen."""
    if array.dtype.kind not in "iu" or wanted in FLOATING or not array.size:
        return
    low, high = (0, 1) if wanted == "bool" else (np.iinfo(wanted).min, np.iinfo(wanted).max)
    least, most = int(array.min()), int(array.max())
    if not low <= least <= most <= high:
        raise UsageError(
            f"{what} holds {least} to {most}, the model takes {wanted}, {low} to {high}; give the example "
            "input a wider type"
        )


def check_values(dag: OpDag, data: Materialised, what: str) -> list[str]:
    """Return words on values that are not finite. UsageError for an index beyond what the model has, in any
    row: workers would refuse the step that it comes to."""
    states = {name: state.meta for name, state in {**dag.parameters, **dag.buffers}.items()}
    (program,) = stage_programs(dag, (0,))
    metas = {**states, **dag.constants, **dag.inputs}
    ranges = index_ranges(program, Shapes(program, metas, dag.inputs)).inputs
    found = []
    for field in data.spec.fields:
        array = data.arrays[field.blob]
        unit = "row" if field.layout is Order.ROWS else "place"
        if (bounds := ranges.get(field.input)) is not None and array.dtype.kind in "iu":
            odd = _first(array, partial(_outside, bounds=bounds))
            if odd is not None:
                besides = "" if bounds.besides is None else f", and {bounds.besides} for none"
                raise UsageError(
                    f"{what}: {field.input!r} holds the index {array[odd]}, first in {unit} {odd[0]}; the "
                    f"model takes {bounds.low} to {bounds.high - 1}{besides}"
                )
        most = _largest(dag.inputs[field.input].dtype)
        if array.dtype.kind == "f" and (odd := _first(array, partial(_beyond, most=most))) is not None:
            ends = "; a step whose loss is not finite ends the job" if what == TRAINING else ""
            place = f"first in {unit} {odd[0]} of {len(array)}"
            beyond = f", beyond {dag.inputs[field.input].dtype}" if np.isfinite(array[odd]) else ""
            found.append(f"{what}: {field.input!r} holds {array[odd]}{beyond}, {place}{ends}")
    return found


def _largest(dtype: str) -> float:
    """Return the largest number of an input's type; a larger one becomes infinite on its way to it."""
    return torch.finfo(getattr(torch, dtype)).max if dtype in FLOATING else math.inf


def _beyond(piece: NDArray[Any], most: float) -> NDArray[np.bool_]:
    most = min(most, float(np.finfo(piece.dtype).max))  # float16 compares with nothing larger
    found: NDArray[np.bool_] = ~(np.isfinite(piece) & (np.abs(piece) <= most))
    return found


def _outside(piece: Array, bounds: Range) -> NDArray[np.bool_]:
    wrong = np.less(piece, bounds.low) | np.greater_equal(piece, bounds.high)
    found: NDArray[np.bool_] = wrong if bounds.besides is None else wrong & (piece != bounds.besides)
    return found


def _first(array: Array, odd: Callable[[Array], NDArray[np.bool_]]) -> tuple[int, ...] | None:
    """Return the place of the first odd value of an array, which may be larger than memory."""
    rows = max(1, PIECE_BYTES * len(array) // max(1, array.nbytes))
    for at in range(0, len(array), rows):
        wrong = odd(array[at : at + rows])
        if wrong.any():
            first, *rest = np.unravel_index(int(wrong.argmax()), wrong.shape)
            return at + int(first), *map(int, rest)
    return None


def micro_batch(data: Materialised, inputs: Mapping[str, TensorMeta], micro: int) -> dict[str, torch.Tensor]:
    """A micro-batch of the first step as the workers will see it."""
    samples = sample_indices(data.spec, micro + 1, 0, micro)
    return {
        field.input: tensor_of(take(data.arrays[field.blob], field, samples)).to(
            getattr(torch, inputs[field.input].dtype)
        )
        for field in data.spec.fields
    }


def _store(data: Materialised, blobs: list[LocalBlob]) -> DataSpec:
    made = {key: _array_blob(array) for key, array in data.arrays.items()}
    blobs.extend(made.values())
    return data.stored({key: blob.hash for key, blob in made.items()})


def tensor_blob(tensor: torch.Tensor) -> LocalBlob:
    """A tensor as the blob that it travels in: a safetensors file of one, read in pieces."""
    data = tensor.detach().reshape(-1)
    return _blob(data[:0], tensor.shape, lambda: data.cpu().contiguous().view(torch.uint8).numpy())


def _blob(like: torch.Tensor, shape: Sequence[int], bytes_of: Callable[[], NDArray[np.uint8]]) -> LocalBlob:
    """Return a blob of ``bytes_of()``, the values of a tensor of this shape; ``like``: one of no elements."""
    # The file format's own name of the type.
    named = json.loads(safetensors.torch.save({VALUE: like})[8:])[VALUE]
    head = blob_head(named["dtype"], shape, math.prod(shape) * like.element_size())

    def read(offset: int) -> Iterator[bytes]:
        if offset < len(head):
            yield head[offset:]
        numbers = bytes_of()
        for at in range(max(0, offset - len(head)), len(numbers), PIECE_BYTES):
            yield numbers[at : at + PIECE_BYTES].tobytes()

    return LocalBlob.streamed(read)


def _array_blob(array: Array) -> LocalBlob:
    """An array as the blob that it travels in, read in pieces: it may be a map of a large file."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return _blob(tensor_of(flat[:0]), array.shape, lambda: flat.view(np.uint8))
