"""A job that goes on from another is held to what its checkpoint has; names that cannot be told apart."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.errors import UsageError
from atoll.federated import Federated, FederatedSpec
from atoll.job import JobSpec, TrainingSpec
from atoll.opdag import OpDag, StateMeta, TensorMeta
from benchmarks.commit import WIDTH, chain, submission
from coordinator.storage.blob_store import BlobStore
from coordinator.storage.graph_store import GraphStore
from protos.convert import dag_bytes

WEIGHT = TensorMeta((WIDTH, WIDTH), "float32")
MASK = TensorMeta((8, WIDTH), "bool")


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path)


def job(store: BlobStore, evaluation: OpDag | None = None, **changed: TensorMeta) -> JobSpec:
    """Two layers and a constant, ``changed`` by name."""
    spec, blobs = submission(2, TrainingSpec(steps=3, n_micro=2))
    for data in blobs.values():
        store.put(data)
    metas = {"w0": WEIGHT, "w1": WEIGHT, "mask": MASK} | changed
    dag = replace(
        chain(2),
        parameters={name: StateMeta(metas[name], True) for name in ("w0", "w1")},
        constants={"mask": metas["mask"]},
    )
    return replace(
        spec,
        dag_hash=store.put(dag_bytes(dag)),
        eval_dag_hash=store.put(dag_bytes(evaluation)) if evaluation is not None else "",
        tensors={**spec.tensors, "mask": spec.tensors["w0"]},
        resume_of="job-1",
    )


def test_the_same_tensors_are_taken_whatever_else_the_graphs_hold(store: BlobStore) -> None:
    GraphStore(store).check(job(store, evaluation=chain(2)), job(store))


@pytest.mark.parametrize(
    ("name", "meta", "words"),
    [
        ("w1", TensorMeta((WIDTH, 8), "float32"), "there float32 (256, 256), here float32 (256, 8)"),
        ("w0", TensorMeta((WIDTH, WIDTH), "float64"), "there float32 (256, 256), here float64 (256, 256)"),
        ("mask", TensorMeta((8, 8), "bool"), "there bool (8, 256), here bool (8, 8)"),
    ],
)
def test_another_shape_or_dtype_is_refused_by_name(
    name: str, meta: TensorMeta, words: str, store: BlobStore
) -> None:
    changed = job(store, **{name: meta})
    expected = f"job-1 holds another model: 1 tensors differ, first {name}, {words}"
    with pytest.raises(UsageError, match=re.escape(expected)):
        GraphStore(store).check(changed, job(store))


def test_a_federated_job_brings_constants_of_its_own(store: BlobStore) -> None:
    federated = FederatedSpec(Federated(), "digits", {"x": "x"})
    before, after = (
        replace(job(store, mask=mask), federated=federated) for mask in (MASK, TensorMeta((8, 8), "bool"))
    )
    GraphStore(store).check(after, before)


@pytest.mark.parametrize("other", ["w0@2", "w0@1@2"])
def test_a_name_that_reads_as_a_peers_own_of_another_is_refused(other: str, store: BlobStore) -> None:
    spec = job(store)
    GraphStore(store).check(replace(spec, tensors={**spec.tensors, "up@2": spec.tensors["w0"]}))
    both = replace(spec, tensors={**spec.tensors, other: spec.tensors["w0"]})
    with pytest.raises(UsageError, match=f"tensors 'w0' and '{other}'.*rename the module or parameter of"):
        GraphStore(store).check(both)
    GraphStore(store).check(replace(both, federated=FederatedSpec(Federated(), "digits", {"x": "x"})))
