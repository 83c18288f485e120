"""Splits of one data set among clients: each sample to one client, from a seed.

Every function returns one ascending int64 array of sample numbers a client. Which split a paper means
differs by implementation (NIID-Bench fills clients evenly in its Dirichlet split, flwr_datasets does
not), so the names say whose it is, and ``fingerprint`` names the very map. Source: papers/federated.md 5.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

from atoll.errors import UsageError
from atoll.messages.from_worker import MAX_CLIENTS

if TYPE_CHECKING:
    from strategies.layout import Array

    Parts = list[Array]

MAX_TRIES = 1000
WAYS = {
    "iid": "equal random parts",
    "dirichlet:BETA": "label skew as NIID-Bench defines it",
    "unbalanced:BETA": "the same without its balancing",
    "labels:COUNT": "COUNT labels a client",
    "shards[:EACH]": "runs of samples sorted by label, EACH (2) a client",
    "quantity:BETA": "unequal sizes of one mixture",
    "noise:LEVEL": "equal parts, noise that grows with the client's number up to LEVEL (images)",
    "natural": "by genre, never parted; the default of texts",
    "documents": "by document, never parted",
}


def parts_of(
    how: str, labels: Array, owners: Sequence[Hashable], clients: int, seed: int, least: int = 10
) -> Parts:
    """Sample numbers by client. ``owners``: whose sample each is, for natural splits; ``clients`` 0:
    as many as there are owners. ``least``: samples of a client where sizes are drawn.
    UsageError for an unknown way or one that does not work out."""
    name, _, rest = how.partition(":")
    if not 0 <= clients <= MAX_CLIENTS:
        raise UsageError(f"{clients} clients; give 1 to {MAX_CLIENTS}")
    if name == "natural" and not rest:
        return natural(owners, clients or None)
    if name == "documents" and not rest:
        return natural(range(len(labels)), clients or None)
    if not clients:
        raise UsageError(f"--how {how[:40]} needs --clients; only natural splits know how many there are")
    number = _number(how, rest)
    n = len(labels)
    if (name == "iid" and number is None) or (name == "noise" and number is not None):
        return iid(n, clients, seed)
    if name == "shards":
        return shards(labels, clients, seed, _whole(how, 2.0 if number is None else number))
    if number is not None:
        if name == "dirichlet":
            return dirichlet_niid_bench(labels, clients, number, seed, least)
        if name == "unbalanced":
            return dirichlet_unbalanced(labels, clients, number, seed, least)
        if name == "labels":
            return labels_per_client(labels, clients, _whole(how, number), seed)
        if name == "quantity":
            return quantity_skew(n, clients, number, seed, least)
    raise UsageError(f"no way {how[:40]!r} to split; there are {', '.join(WAYS)}")


def iid(n: int, clients: int, seed: int) -> Parts:
    """Equal parts of one permutation, larger by one sample for the first n mod ``clients``."""
    _check(n, clients)
    return _sorted(np.array_split(np.random.default_rng(seed).permutation(n), clients))


def dirichlet_niid_bench(labels: Array, clients: int, beta: float, seed: int, least: int = 10) -> Parts:
    """Label skew as NIID-Bench defines it.

    For each class: its samples shuffled, p ~ Dir(beta, .., beta) over the clients, p_j = 0 for clients
    that hold N / clients or more already, renormalised, cut at floor(cumsum(p) n_c). Again from the start
    until every client has ``least``. UsageError after 1000 tries.
    """
    return _dirichlet(labels, clients, beta, seed, least, balanced=True)


def dirichlet_unbalanced(labels: Array, clients: int, beta: float, seed: int, least: int = 10) -> Parts:
    """The same without the balancing step, as flwr_datasets has it by default: sizes vary much more."""
    return _dirichlet(labels, clients, beta, seed, least, balanced=False)


def labels_per_client(labels: Array, clients: int, count: int, seed: int) -> Parts:
    """NIID-Bench's "#label = count": client i holds class i mod C and count - 1 other classes drawn at
    random; each class is dealt equally among those who hold it.

    UsageError where a class would have no holder (fewer clients than classes), which NIID-Bench leaves
    out silently.
    """
    _check(len(labels), clients)
    classes = np.unique(labels)
    if not 1 <= count <= len(classes):
        raise UsageError(f"{count} labels a client; there are {len(classes)}")
    draw = np.random.default_rng(seed)
    held = []
    for client in range(clients):
        own = client % len(classes)
        others = np.delete(np.arange(len(classes)), own)
        held.append({own, *draw.choice(others, count - 1, replace=False).tolist()})
    parts: list[list[Array]] = [[] for _ in range(clients)]
    for at, label in enumerate(classes):
        holders = [client for client in range(clients) if at in held[client]]
        if not holders:
            raise UsageError(f"no client holds class {label}; take more clients or labels each")
        mine = draw.permutation(np.flatnonzero(labels == label))
        for client, part in zip(holders, np.array_split(mine, len(holders)), strict=True):
            parts[client].append(part)
    return _sorted([np.concatenate(part) for part in parts])


def shards(labels: Array, clients: int, seed: int, per_client: int = 2) -> Parts:
    """McMahan's: samples sorted by label, cut into ``per_client`` * ``clients`` equal shards, each client
    gets ``per_client`` of them at random."""
    _check(len(labels), clients * per_client)
    cut = np.array_split(np.argsort(labels, kind="stable"), clients * per_client)
    order = np.random.default_rng(seed).permutation(len(cut)).reshape(clients, per_client)
    return _sorted([np.concatenate([cut[at] for at in mine]) for mine in order])


def quantity_skew(n: int, clients: int, beta: float, seed: int, least: int = 10) -> Parts:
    """p ~ Dir(beta, .., beta) over the clients, one permutation of all samples cut at floor(cumsum(p) n);
    drawn again until every client has ``least``."""
    _check_skew(n, clients, beta, least)
    draw = np.random.default_rng(seed)
    order = draw.permutation(n)
    for _ in range(MAX_TRIES):
        parts = np.split(order, _cuts(draw.dirichlet(np.full(clients, beta)), n))
        if min(map(len, parts)) >= least:
            return _sorted(parts)
    raise _hopeless(clients, beta, least)


def natural(owners: Sequence[Hashable], clients: int | None = None) -> Parts:
    """Split by author, document or writer: ``owners[i]`` of sample i; no owner's samples are divided.

    ``clients`` None: one client an owner, in the order of first appearance. Else owners are joined:
    largest first, each to the client that holds least.
    """
    groups: dict[Hashable, list[int]] = {}
    for at, owner in enumerate(owners):
        groups.setdefault(owner, []).append(at)
    found = [np.array(group, np.int64) for group in groups.values()]
    if clients is None:
        return found
    _check(len(found), clients)
    parts: list[list[Array]] = [[] for _ in range(clients)]
    sizes = [0] * clients
    for group in sorted(found, key=lambda group: (-len(group), int(group[0]))):
        least = sizes.index(min(sizes))
        parts[least].append(group)
        sizes[least] += len(group)
    return _sorted([np.concatenate(part) for part in parts])


def feature_noise(features: Array, client: int, clients: int, level: float, seed: int) -> Array:
    """``features`` of one client with N(0, s^2) added, s = level * client / (clients - 1).

    Client 0 has clean data. NIID-Bench's text calls this figure a variance; its code, and this, take it
    as a standard deviation.
    """
    if not 0 <= client < clients or level < 0.0:
        raise UsageError(f"noise {level:g} for client {client} of {clients}; from 0 to {clients - 1}")
    std = level * client / max(1, clients - 1)
    noise = np.random.default_rng([seed, client]).normal(0.0, std, features.shape)
    return np.asarray(features + noise, features.dtype)


def fingerprint(parts: Parts) -> str:
    """SHA-256 of the map: what a result names."""
    digest = sha256(np.array([len(part) for part in parts], "<i8").tobytes())
    for part in parts:
        digest.update(np.ascontiguousarray(part, "<i8").tobytes())
    return digest.hexdigest()


def _number(how: str, text: str) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        raise UsageError(f"--how {how[:40]}: {text[:20]!r} is not a number") from None


def _whole(how: str, number: float) -> int:
    if number != int(number):
        raise UsageError(f"--how {how[:40]}: give a whole number")
    return int(number)


def _dirichlet(labels: Array, clients: int, beta: float, seed: int, least: int, *, balanced: bool) -> Parts:
    n = len(labels)
    _check_skew(n, clients, beta, least)
    draw = np.random.default_rng(seed)
    by_class = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    for _ in range(MAX_TRIES):
        parts: list[list[Array]] = [[] for _ in range(clients)]
        sizes = np.zeros(clients, np.int64)
        for members in by_class:
            mine = draw.permutation(members)
            shares = draw.dirichlet(np.full(clients, beta))
            if balanced:
                shares = shares * (sizes < n / clients)
            if not shares.sum() > 0.0:  # all weight fell on clients that are full
                break
            for client, part in enumerate(np.split(mine, _cuts(shares / shares.sum(), len(mine)))):
                parts[client].append(part)
                sizes[client] += len(part)
        if sizes.sum() == n and sizes.min() >= least:
            return _sorted([np.concatenate(part) for part in parts])
    raise _hopeless(clients, beta, least)


def _cuts(shares: Array, n: int) -> Array:
    cuts: Array = (np.cumsum(shares) * n).astype(np.int64)[:-1]
    return cuts


def _sorted(parts: Sequence[Array]) -> Parts:
    return [np.sort(part).astype(np.int64) for part in parts]


def _check(n: int, clients: int) -> None:
    if not 1 <= clients <= n:
        raise UsageError(f"{n} pieces for {clients} clients; give each at least one")


def _check_skew(n: int, clients: int, beta: float, least: int) -> None:
    _check(n, clients)
    if not (np.isfinite(beta) and beta > 0.0) or least < 0 or least * clients > n:
        raise UsageError(
            f"{n} samples for {clients} clients, {least} each at least, beta {beta:g} > 0; lower the least"
        )


def _hopeless(clients: int, beta: float, least: int) -> UsageError:
    return UsageError(
        f"no split with beta {beta:g} gave all {clients} clients {least} samples in {MAX_TRIES} tries; "
        "raise beta or lower the least"
    )
