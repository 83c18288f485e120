"""Partitioners against their definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from atoll.errors import UsageError
from strategies import partition_data as split

LABELS = np.random.default_rng(0).integers(0, 10, 3000)
SPLITS: dict[str, Callable[[int], list[Any]]] = {
    "iid": lambda seed: split.iid(3000, 7, seed),
    "dirichlet_niid_bench": lambda seed: split.dirichlet_niid_bench(LABELS, 10, 0.3, seed),
    "dirichlet_unbalanced": lambda seed: split.dirichlet_unbalanced(LABELS, 5, 0.5, seed),
    "labels_per_client": lambda seed: split.labels_per_client(LABELS, 12, 2, seed),
    "shards": lambda seed: split.shards(LABELS, 10, seed),
    "quantity_skew": lambda seed: split.quantity_skew(3000, 8, 0.5, seed),
}


@pytest.mark.parametrize("name", SPLITS)
def test_every_sample_goes_to_one_client_and_the_seed_decides_to_which(name: str) -> None:
    parts = SPLITS[name](1)
    assert sorted(np.concatenate(parts).tolist()) == list(range(3000))
    assert all(part.dtype == np.int64 and np.all(np.diff(part) > 0) for part in parts)
    assert split.fingerprint(parts) == split.fingerprint(SPLITS[name](1))
    assert split.fingerprint(parts) != split.fingerprint(SPLITS[name](2))


def reference_dirichlet(labels: Any, clients: int, beta: float, seed: int) -> list[Any]:
    """NIID-Bench's rule in its own order of words: classes, shuffle, shares, balance, cut."""
    draw, n = np.random.default_rng(seed), len(labels)
    while True:
        batches: list[list[int]] = [[] for _ in range(clients)]
        for k in range(10):
            members = draw.permutation(np.where(labels == k)[0])
            p = draw.dirichlet([beta] * clients)
            p = np.array([share * (len(held) < n / clients) for share, held in zip(p, batches, strict=True)])
            p = p / p.sum()
            at = (np.cumsum(p) * len(members)).astype(int)[:-1]
            batches = [h + part.tolist() for h, part in zip(batches, np.split(members, at), strict=True)]
        if min(map(len, batches)) >= 10:
            return [sorted(batch) for batch in batches]


@pytest.mark.parametrize("seed", range(3))
def test_the_dirichlet_split_is_niid_benchs(seed: int) -> None:
    found = split.dirichlet_niid_bench(LABELS, 10, 0.5, seed)
    assert [part.tolist() for part in found] == reference_dirichlet(LABELS, 10, 0.5, seed)
    assert min(map(len, found)) >= 10


def test_a_small_beta_gives_clients_few_classes_and_balancing_even_sizes() -> None:
    skewed = split.dirichlet_niid_bench(LABELS, 10, 0.1, 0)
    even = split.dirichlet_niid_bench(LABELS, 10, 1000.0, 0)

    def top_share(parts: list[Any]) -> float:
        return float(np.mean([np.bincount(LABELS[p]).max() / len(p) for p in parts]))

    assert top_share(skewed) > 0.5 > 0.2 > top_share(even)
    spread = [
        np.std([len(p) for p in make(LABELS, 5, 0.3, 1)])
        for make in (split.dirichlet_niid_bench, split.dirichlet_unbalanced)
    ]
    assert spread[0] < spread[1]


def test_labels_per_client_deals_each_class_equally_among_its_holders() -> None:
    parts = split.labels_per_client(LABELS, 12, 3, 0)
    held = [set(LABELS[part].tolist()) for part in parts]
    assert all(len(labels) == 3 and at % 10 in labels for at, labels in enumerate(held))
    for label in range(10):
        holders = [part for part, labels in zip(parts, held, strict=True) if label in labels]
        sizes = [int((LABELS[part] == label).sum()) for part in holders]
        assert max(sizes) - min(sizes) <= 1
    with pytest.raises(UsageError, match="no client holds class"):
        split.labels_per_client(LABELS, 3, 1, 0)


def test_shards_are_runs_of_the_samples_sorted_by_label() -> None:
    parts = split.shards(LABELS, 10, 0)
    assert all(len(part) == 300 for part in parts)
    order = {int(s): at for at, s in enumerate(np.argsort(LABELS, kind="stable"))}
    for part in parts:
        places = sorted(order[int(s)] // 150 for s in part)
        assert len(set(places)) == 2
        assert len(set(LABELS[part].tolist())) <= 4


def test_quantity_skew_has_unequal_sizes_of_one_mixture() -> None:
    sizes = [len(part) for part in SPLITS["quantity_skew"](0)]
    assert min(sizes) >= 10
    assert max(sizes) > 3 * min(sizes)


def test_natural_splits_part_no_owner() -> None:
    owners = ["ann", "bob", "ann", "cy", "bob", "ann", "di"]
    assert [p.tolist() for p in split.natural(owners)] == [[0, 2, 5], [1, 4], [3], [6]]
    joined = split.natural(owners, 2)
    assert sorted(map(len, joined)) == [3, 4]
    assert all({owners[i] for i in joined[0]}.isdisjoint({owners[i] for i in p}) for p in joined[1:])
    with pytest.raises(UsageError, match="4 pieces for 5"):
        split.natural(owners, 5)


def test_feature_noise_grows_with_the_clients_number() -> None:
    clean = np.zeros((200, 50), np.float32)
    stds = [float(split.feature_noise(clean, i, 5, 0.4, 0).std()) for i in range(5)]
    assert stds == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4], abs=0.01)
    assert split.feature_noise(clean, 2, 5, 0.4, 0).dtype == np.float32
    with pytest.raises(UsageError, match="client 5"):
        split.feature_noise(clean, 5, 5, 0.4, 0)


def test_what_cannot_be_split_is_refused_with_the_figures() -> None:
    with pytest.raises(UsageError, match="3 pieces for 5 clients"):
        split.iid(3, 5, 0)
    with pytest.raises(UsageError, match="lower the least"):
        split.dirichlet_niid_bench(LABELS[:50], 10, 0.5, 0)
    with pytest.raises(UsageError, match="1000 tries"):
        split.quantity_skew(100, 10, 0.001, 0)
