"""A registered data set that is parted among clients, and what a host reports of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from atoll.errors import StorageError, UsageError
from worker.data.population import LIST, ROWS, load_population, name_owner, part_dataset
from worker.data.registry import add_dataset, dataset_folder

N = 300


@pytest.fixture
def state(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    path = tmp_path / "data.safetensors"
    label = draw.integers(0, 5, N)
    save_file({"x": draw.normal(size=(N, 4)).astype(np.float32), "label": label}, path)
    add_dataset(tmp_path / "state", "digits", path, [])
    return tmp_path / "state"


@pytest.mark.parametrize("how", ["iid", "dirichlet:0.1", "labels:2", "shards", "quantity:0.5", "natural"])
def test_every_sample_belongs_to_one_client_and_the_same_seed_parts_alike(state: Path, how: str) -> None:
    clients = 0 if how == "natural" else 20
    found = part_dataset(state, "digits", how, clients, seed=3)
    rows = found.rows_of()
    assert sorted(np.concatenate(list(rows.values())).tolist()) == list(range(N))
    assert {name: len(mine) for name, mine in rows.items()} == found.clients
    assert min(found.clients.values()) >= 1
    again = part_dataset(state, "digits", how, clients, seed=3)
    assert again.sha256 == found.sha256
    if how != "natural":
        assert part_dataset(state, "digits", how, clients, seed=4).sha256 != found.sha256


def test_natural_clients_are_the_values_of_a_field(state: Path) -> None:
    found = part_dataset(state, "digits", "natural", field="label")
    assert set(found.clients) == {f"client-{label}" for label in range(5)}


def test_an_owner_of_another_name_is_a_population_of_one(state: Path) -> None:
    assert load_population(state, "digits") is None
    found = name_owner(state, "digits", "clinic-7")
    assert found.clients == {"clinic-7": N}
    assert found.rows.tolist() == list(range(N))


@pytest.mark.parametrize(
    ("how", "clients", "field", "why"),
    [
        ("noise:0.1", 4, "", "changes or needs files"),
        ("dirichlet:0.1", 4, "x", "needs --by FIELD"),
        ("iid", 0, "", "needs --clients"),
        ("best", 4, "", "no way 'best'"),
    ],
)
def test_what_cannot_be_parted_is_refused(state: Path, how: str, clients: int, field: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        part_dataset(state, "digits", how, clients, field=field)
    assert load_population(state, "digits") is None


@pytest.mark.parametrize("damage", ["rows", "list", "name"])
def test_damage_is_named(state: Path, damage: str) -> None:
    part_dataset(state, "digits", "iid", 4)
    folder = dataset_folder(state, "digits")
    if damage == "rows":
        (folder / ROWS).write_bytes(b"short")
    elif damage == "list":
        (folder / LIST).write_text("{")
    else:
        listed = json.loads((folder / LIST).read_text())
        listed["clients"]["../x"] = listed["clients"].pop("client-00")
        (folder / LIST).write_text(json.dumps(listed))
    with pytest.raises(StorageError, match="part it again"):
        load_population(state, "digits")
