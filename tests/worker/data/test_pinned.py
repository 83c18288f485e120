"""A registered data set as micro-batches of a pipeline, and what its owner is asked before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from atoll.data import Rows, take
from atoll.dataset_spec import DataSpec, PinnedData
from atoll.errors import UsageError
from atoll.federated import ConsentWord as Word
from coordinator.storage.data_provider import sample_indices
from protos import atoll_control_pb2 as pb
from worker.data.pinned import PinnedRows
from worker.data.policy import OPEN, Policy, Terms, judge
from worker.data.registry import add_dataset

N, BATCH, N_MICRO = 13, 3, 2
TOKENS = np.arange(N * 5, dtype=np.int64).reshape(N, 5)
LABELS = np.linspace(0, 1, N, dtype=np.float32)
PINNED = PinnedData("w1", "diary", {"x": "text", "y": "mark"})
SPEC = DataSpec((), N, BATCH, 7, PINNED)
TERMS = Terms("job-1", "diary", "research", "ab" * 32, "ef" * 32, 0, 0)


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    save_file({"text": TOKENS, "mark": LABELS}, tmp_path / "diary.safetensors")
    add_dataset(tmp_path / "state", "diary", tmp_path / "diary.safetensors", [])
    return tmp_path / "state"


def test_the_samples_are_those_that_the_coordinator_would_send(state_dir: Path) -> None:
    asked = pb.BatchRequest(job="job-1", inputs=["y", "x"], first_step=4, count=3)
    found = list(PinnedRows(state_dir, SPEC, N_MICRO).batches(asked))
    served, _ = Rows({"x": TOKENS, "y": LABELS}, seed=7).materialise(BATCH)
    fields = {field.input: field for field in served.spec.fields}
    expected = [
        (
            step,
            micro,
            name,
            take(served.arrays[name], fields[name], sample_indices(served.spec, N_MICRO, step, micro)),
        )
        for step in (4, 5, 6)
        for micro in range(N_MICRO)
        for name in ("y", "x")
    ]
    assert [(b.step, b.micro, b.input) for b in found] == [each[:3] for each in expected]
    for batch, (*_, rows) in zip(found, expected, strict=True):
        assert (batch.dtype, tuple(batch.shape), batch.data) == (rows.dtype.name, rows.shape, rows.tobytes())


def test_only_some_micro_batches_may_be_asked_for(state_dir: Path) -> None:
    asked = pb.BatchRequest(job="job-1", inputs=["x"], first_step=0, count=1, first_micro=1, micros=1)
    assert [b.micro for b in PinnedRows(state_dir, SPEC, N_MICRO).batches(asked)] == [1]


@pytest.mark.parametrize(
    "wrong", [{"inputs": ["z"]}, {"count": 0}, {"count": 5000}, {"first_micro": 1, "micros": 2}]
)
def test_what_the_job_has_not_is_refused(state_dir: Path, wrong: dict[str, object]) -> None:
    asked = pb.BatchRequest(**{"job": "job-1", "inputs": ["x"], "first_step": 0, "count": 1, **wrong})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="there are \\['x', 'y'\\], 2 micro-batches a step"):
        list(PinnedRows(state_dir, SPEC, N_MICRO).batches(asked))


def test_another_set_under_the_same_name_is_no_longer_the_jobs(state_dir: Path) -> None:
    with pytest.raises(UsageError, match="13 samples here, the job was submitted for 12"):
        PinnedRows(state_dir, replace(SPEC, n_samples=12), N_MICRO)
    renamed = replace(PINNED, inputs={"x": "text", "y": "other"})
    with pytest.raises(UsageError, match="no field 'other'"):
        PinnedRows(state_dir, replace(SPEC, pinned=renamed), N_MICRO)


def test_no_rule_accepts_activations_and_bounds_of_updates_refuse_them() -> None:
    for rules in (("any",), ("owner:research",), (f"graph:{TERMS.graph}",)):
        verdict = judge(Policy(rules), TERMS, None, "")
        assert verdict.word is Word.AWAITED
        assert "activations of each sample" in verdict.reason
    assert judge(OPEN, TERMS, Word.GIVEN, "").word is Word.GIVEN
    assert judge(OPEN, TERMS, Word.REFUSED, "no").word is Word.REFUSED
    for policy in (
        Policy(min_clients=2),
        Policy(max_rounds=9),
        Policy(clip=1.0),
        Policy(clip=1.0, noise=1.0),
    ):
        verdict = judge(policy, TERMS, Word.GIVEN, "")
        assert verdict.word is Word.REFUSED
        assert "it bounds updates" in verdict.reason
