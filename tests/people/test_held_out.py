"""Held-out figures are means over all held-out rows, each once: against closed forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.data import Rows, held_out_indices, take
from atoll.errors import UsageError
from atoll.federated import NO_FLOORS, Federated, Floors
from atoll.job import Job, TrainingSpec
from atoll.program import stage_programs
from atoll.rows import at_rows, same_form
from atoll.sampling import split
from coordinator.aggregation.central_evaluation import CentralEvaluation
from coordinator.capture.capture import capture
from coordinator.capture.self_check import self_check
from coordinator.client.prepare import Prepared, prepare
from coordinator.planning.costs.traffic import Traffic
from coordinator.planning.evaluation_cut import evaluation_intervals
from coordinator.storage.blob_store import BlobStore
from protos.convert import dag_bytes, dag_from_bytes, from_proto, to_proto
from tests.inprocess.federation import LocalFederation, local_model
from tests.inprocess.pipeline import LocalPipeline
from tests.people.loop import SGD

BATCH = 16


class Level(nn.Module):
    """Its loss is the mean square of y; as a metric it computes the mean of y before that."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.first, self.second = nn.Linear(1, 3, bias=False), nn.Linear(3, 1, bias=False)
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        level = y.mean()
        flat = self.second(torch.tanh(self.first(x))).view(y.shape[0], 1)
        return {
            "level": level,
            "loss": ((self.w * x + flat - y) ** 2).mean(),
            "half": (y / 2).sum() / y.shape[0],
        }


class Tokens(nn.Module):
    """A sum over targets with its count, beside a share of right ones."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.table(x)
        count = (y != -100).sum()
        right = ((logits.argmax(-1) == y) & (y != -100)).sum() / count
        total = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")
        return {"loss": total, "weight": count, "accuracy": right}


class FixedRows(Level):
    """A module that knows how many rows it gets."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return super().forward(x.view(BATCH, 1), y)


def rows(n: int) -> dict[str, Tensor]:
    return {"x": torch.ones(n, 1), "y": torch.arange(n, dtype=torch.float32).reshape(n, 1) ** 2 % 101}


def job(module: nn.Module, n: int, batches: int = 1000, batch: int = BATCH) -> Job:
    return Job(
        module=module,
        example_inputs={name: value[:batch] for name, value in rows(batch).items()},
        data=Rows(rows(batch * 2), held_out=rows(n)),
        training=TrainingSpec(steps=1, n_micro=2, optimizer=SGD, eval_batches=batches),
        metrics=("level", "half"),
    )


@dataclass(frozen=True)
class Figures:
    loss: float
    level: float
    half: float


def exact(n: int) -> Figures:
    y = rows(n)["y"].double()
    return Figures(float((y**2).mean()), float(y.mean()), float(y.mean()) / 2)


def pipeline_of(prepared: Prepared, *cut: int) -> LocalPipeline:
    blobs = {blob.hash: blob for blob in prepared.blobs}
    named = prepared.spec.tensors.items()
    tensors = {name: safetensors.torch.load(b"".join(blobs[key].read(0))) for name, key in named}
    dag, evaluation = prepared.graphs.dag, prepared.graphs.eval_dag
    live = Traffic(evaluation, SGD).live_bytes
    intervals = evaluation_intervals(dag, (0, *cut), range(len(cut) + 1), evaluation, live)
    assert intervals is not None
    programs = stage_programs(dag, (0, *cut))
    evaluations = stage_programs(evaluation, [start for start, _ in intervals])
    return LocalPipeline(programs, prepared.spec.training, tensors, eval_programs=evaluations)


def held_out(prepared: Prepared, given: Job) -> list[dict[str, Tensor]]:
    """The micro-batches as the data provider sends them."""
    spec = prepared.spec.eval_data
    _, found = given.data.materialise(BATCH)
    assert spec is not None
    assert found is not None
    batches = []
    for micro in range(prepared.spec.training.eval_batches):
        samples = held_out_indices(found.spec, micro)
        arrays = {f.input: take(found.arrays[f.blob], f, samples) for f in found.spec.fields}
        batches.append({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})
    return batches


@pytest.mark.parametrize("n", [28, 6, 32, 33])
def test_a_pipeline_evaluates_every_held_out_row_once(n: int) -> None:
    given = job(Level(), n)
    prepared = prepare(given)
    batches = held_out(prepared, given)
    assert [len(batch["x"]) for batch in batches] == [BATCH] * (n // BATCH) + [n % BATCH] * (n % BATCH > 0)
    whole = pipeline_of(prepared).figures(batches)
    assert whole.loss == pytest.approx(exact(n).loss, rel=1e-6)
    assert whole.metrics["level"] == pytest.approx(exact(n).level, rel=1e-6)
    assert whole.metrics["half"] == pytest.approx(exact(n).half, rel=1e-6)
    if not n % BATCH or n < BATCH:
        return
    for cut in prepared.graphs.dag.cuttable()[1:3]:
        pipeline = pipeline_of(prepared, cut)
        found = pipeline.figures(batches)
        assert found == whole


def test_a_bound_on_batches_looks_at_so_many_full_ones_and_says_so() -> None:
    given, words = job(Level(), 28, batches=1), list[str]()
    prepared = prepare(given, tell=words.append)
    assert prepared.graphs.eval_dag.tail is None
    assert pipeline_of(prepared).figures(held_out(prepared, given)).metrics["level"] == exact(16).level
    prepared = prepare(job(Level(), 28), tell=words.append)
    assert "held-out figures are of 28 of 28 rows, in 2 micro-batches (eval_batches = 1000)" in words


def test_a_model_that_runs_with_no_other_number_of_rows_is_evaluated_on_full_batches() -> None:
    words: list[str] = []
    prepared = prepare(job(FixedRows(), 28), tell=words.append)
    assert prepared.spec.training.eval_batches == 1
    assert any("of 16 of 28 rows" in word for word in words)
    with pytest.raises(UsageError, match="6 held-out samples are fewer than a micro-batch of 16"):
        prepare(job(FixedRows(), 6))


def test_weights_count_in_evaluation_too() -> None:
    torch.manual_seed(2)
    x = torch.randint(0, 8, (10, 5))
    y = x.masked_fill(torch.arange(5)[None] >= torch.randint(1, 6, (10, 1)), -100)
    y[4:8] = -100  # of a micro-batch, whose metric is 0 / 0
    net = Tokens()
    given = Job(
        module=net,
        example_inputs={"x": x[:4], "y": y[:4]},
        data=Rows({"x": x, "y": y}, held_out={"x": x, "y": y}),
        training=TrainingSpec(steps=1, n_micro=1, optimizer=SGD, eval_batches=3),
        metrics=("accuracy",),
    )
    prepared = prepare(given)
    found = pipeline_of(prepared).figures([{"x": x[a : a + 4], "y": y[a : a + 4]} for a in (0, 4, 8)])
    logits = net.table(x).detach()
    counted = y != -100
    assert found.loss == pytest.approx(float(F.cross_entropy(logits.flatten(0, 1), y.flatten())), rel=1e-6)
    right = (logits.argmax(-1) == y)[counted].double().mean()
    assert found.metrics["accuracy"] == pytest.approx(float(right), rel=1e-6)


# ---------------------------------------------------------------- clients, the owner's own data


def federation(clients: dict[str, int], floors: Floors | None = None, batch: int = BATCH) -> LocalFederation:
    training = TrainingSpec(steps=1, n_micro=1, optimizer=SGD)
    found = capture(Level(), rows(batch), training, ("level",))
    data = {name: {k: v.numpy() for k, v in rows(n).items()} for name, n in clients.items()}
    model = local_model(found.train, found.evaluation, found.state, training)
    return LocalFederation(model, Federated(), data, floors=floors)


@pytest.mark.parametrize(("n", "batch"), [(285, 16), (310, 16), (90, 16), (173, 16), (200, 64)])
def test_a_client_evaluates_every_held_out_row_once(n: int, batch: int) -> None:
    found = federation({"a": n, "b": 40}, batch=batch).evaluate_clients(["a"])["a"]
    held = split(n, 0.1, 0, "a").held_out
    y = rows(n)["y"].numpy()[held].astype(np.float64)
    assert found.n_samples == len(held)
    assert found.metrics["level"] == pytest.approx(y.mean(), rel=1e-6)
    assert found.loss == pytest.approx((y**2).mean(), rel=1e-6)


def test_no_mean_on_a_client_is_of_fewer_rows_than_its_owner_demands() -> None:
    """17 rows in batches of 16 leave one: it shares with the batch before, or is not looked at."""
    sizes: list[int] = []

    def evaluated(floors: Floors) -> int:
        made = federation({"a": 170, "b": 40}, floors)
        right = made.trainer._evaluator_of
        made.trainer._evaluator_of = lambda n: sizes.append(n) or right(n)  # type: ignore[assignment, func-returns-value]
        return made.evaluate_clients(["a"])["a"].n_samples

    assert (evaluated(Floors()), set(sizes)) == (17, {9, 8})
    sizes.clear()
    assert (evaluated(Floors(batch=9)), set(sizes)) == (16, {16})
    sizes.clear()
    assert (evaluated(NO_FLOORS), set(sizes)) == (17, {16, 1})


def test_the_owners_own_data_are_evaluated_to_the_last_row(tmp_path: Any) -> None:
    given = job(Level(), 28)
    prepared = prepare(given)
    store = BlobStore(tmp_path)
    for blob in prepared.blobs:
        store.put(b"".join(blob.read(0)))
    central = CentralEvaluation(prepared.spec, prepared.graphs.eval_dag, store)
    found = central.run({})
    assert found.n_samples == 28
    assert found.loss == pytest.approx(exact(28).loss, rel=1e-6)
    assert found.metrics["level"] == pytest.approx(exact(28).level, rel=1e-6)


# ---------------------------------------------------------------- programs at other numbers of rows


@pytest.mark.parametrize("wanted", [1, 5, 16, 17, 40])
def test_a_program_is_derived_for_any_number_of_rows(wanted: int) -> None:
    found = capture(Level(), rows(BATCH), metrics=("level", "half"))
    assert found.evaluation.tail is not None
    (program,) = stage_programs(found.evaluation, (0,))
    derived = at_rows(program, wanted)
    own = capture(Level(), rows(wanted), metrics=("level", "half"), tail=False)
    assert [(n.target, n.args, n.outputs) for _, n in derived.ops] == [
        (n.target, n.args, n.outputs) for n in own.evaluation.ops
    ]


def test_what_is_no_multiple_of_the_rows_is_not_guessed() -> None:
    class LessOne(Level):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            found = super().forward(x, y)
            return {**found, "half": y.sum() / (y.shape[0] - 1)}

    (program,) = stage_programs(capture(LessOne(), rows(BATCH), metrics=("half",)).evaluation, (0,))
    with pytest.raises(UsageError, match="15 with 16 rows is 16 with 17, and not known with 5"):
        at_rows(program, 5)


def test_a_tail_survives_the_wire_and_is_checked_there_and_against_the_module() -> None:
    module = Level()
    found = capture(module, rows(BATCH), metrics=("level",))
    self_check(module, found, rows(BATCH))
    dag = found.evaluation
    read = dag_from_bytes(dag_bytes(dag))
    assert read.tail is not None
    assert same_form(read, read.tail)
    assert read.tail.inputs == dag.tail.inputs  # type: ignore[union-attr]
    for program in stage_programs(dag, (0, 2)):
        again = from_proto(to_proto(program))
        assert again == program
