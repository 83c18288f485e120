"""A data set dealt out to clients as files, for experiments: one file a client, a schema, and the map.

    OUT/client-00.safetensors ...     MNIST: image, label
    OUT/client-news.txt ...           Brown by genre; documents parted by form feeds
    OUT/schema.txt                    for `atoll-worker data add NAME FILE --schema-file`
    OUT/split.json                    how, seed, sizes, and the map's fingerprint

How a split is drawn is ``strategies.partition_data``'s matter.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.errors import StorageError, UsageError
from coordinator.datasets.corpora import PARTED, Document, Mnist
from strategies import partition_data

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_CLIENTS = 10_000
WINDOW = 128  # bytes of a sample of text
MAP = "split.json"
SCHEMA = "schema.txt"
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


@dataclass(frozen=True, slots=True)
class Part:
    """A client's share of a split."""

    client: str
    file: str
    samples: int  # images, or documents
    labels: dict[str, int]  # label or genre -> how many


@dataclass(frozen=True, slots=True)
class Split:
    """Record of what was written, as in ``split.json``."""

    data: str
    how: str
    seed: int
    fingerprint: str
    clients: tuple[Part, ...]


def parts_of(
    how: str, labels: NDArray[Any], owners: Sequence[Hashable], clients: int, seed: int
) -> list[NDArray[Any]]:
    """Sample numbers by client. ``owners``: whose sample each is, for natural splits; ``clients`` 0:
    as many as there are owners. UsageError for an unknown way or one that does not work out."""
    name, _, rest = how.partition(":")
    if not 0 <= clients <= MAX_CLIENTS:
        raise UsageError(f"{clients} clients; give 1 to {MAX_CLIENTS}")
    if name == "natural" and not rest:
        return partition_data.natural(owners, clients or None)
    if name == "documents" and not rest:
        return partition_data.natural(range(len(labels)), clients or None)
    if not clients:
        raise UsageError(f"--how {how[:40]} needs --clients; only natural splits know how many there are")
    number = _number(how, rest)
    n = len(labels)
    if (name == "iid" and number is None) or (name == "noise" and number is not None):
        return partition_data.iid(n, clients, seed)
    if name == "shards":
        return partition_data.shards(labels, clients, seed, _whole(how, 2.0 if number is None else number))
    if number is not None:
        if name == "dirichlet":
            return partition_data.dirichlet_niid_bench(labels, clients, number, seed)
        if name == "unbalanced":
            return partition_data.dirichlet_unbalanced(labels, clients, number, seed)
        if name == "labels":
            return partition_data.labels_per_client(labels, clients, _whole(how, number), seed)
        if name == "quantity":
            return partition_data.quantity_skew(n, clients, number, seed)
    raise UsageError(f"no way {how[:40]!r} to split; there are {', '.join(WAYS)}")


def split_images(data: Mnist, how: str, clients: int, seed: int, take: int, out: Path) -> Split:
    """Deal out ``take`` training images drawn by the seed (0: all, in their order)."""
    if not 0 <= take <= len(data.labels):
        raise UsageError(f"--take {take}; there are {len(data.labels):,} training images")
    if how in ("natural", "documents"):
        raise UsageError(f"--how {how} is for texts; MNIST's files do not tell who wrote a digit")
    images, labels = taken(data, take, seed)
    parts = parts_of(how, labels, (), clients, seed)
    noise = float(how.partition(":")[2]) if how.startswith("noise:") else 0.0
    _fresh(out)
    found = []
    for at, samples in enumerate(parts):
        mine: NDArray[Any] = images[samples]
        if noise:
            scaled = mine.astype(np.float32) / np.float32(255.0)
            mine = partition_data.feature_noise(scaled, at, len(parts), noise, seed)
        name = f"client-{at:02d}.safetensors"
        _save(out / name, {"image": mine, "label": labels[samples]})
        counts = Counter(labels[samples].tolist())
        found.append(
            Part(f"client-{at:02d}", name, len(samples), {str(k): counts[k] for k in sorted(counts)})
        )
    scaling = "" if noise else "|scale:1/255"
    schema = [f"image:float32[1,28,28]=image{scaling}", "label:int64=label"]
    return _finish(Split("mnist", how, seed, partition_data.fingerprint(parts), tuple(found)), schema, out)


def taken(data: Mnist, take: int, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """``take`` training images and their labels, drawn by ``seed``; 0: all, in their order."""
    if not take:
        return data.images, data.labels
    chosen = np.random.default_rng([seed, 1]).permutation(len(data.labels))[:take]
    return data.images[chosen], data.labels[chosen]


def split_texts(documents: Sequence[Document], how: str, clients: int, seed: int, out: Path) -> Split:
    """Deal out documents; a client of a natural split is called after its genre or document."""
    genres = [document.genre for document in documents]
    numbers = np.unique(genres, return_inverse=True)[1]
    if how.startswith("noise"):
        raise UsageError("--how noise adds noise to images; it does not apply to text")
    parts = parts_of(how, numbers, genres, clients, seed)
    _fresh(out)
    found = []
    for at, mine in enumerate(parts):
        chosen = [documents[int(i)] for i in mine]
        counts = Counter(document.genre for document in chosen)
        name = f"client-{at:02d}"
        if how == "natural" and len(counts) == 1:
            name = f"client-{chosen[0].genre}"
        _write(out / f"{name}.txt", PARTED.join(document.text for document in chosen))
        found.append(Part(name, f"{name}.txt", len(chosen), dict(sorted(counts.items()))))
    schema = [f"tokens:int64[{WINDOW}]=windows:{WINDOW}"]
    return _finish(Split("brown", how, seed, partition_data.fingerprint(parts), tuple(found)), schema, out)


def _finish(split: Split, schema: list[str], out: Path) -> Split:
    _write(out / SCHEMA, "\n".join(schema) + "\n")
    _write(out / MAP, json.dumps(asdict(split), indent=1) + "\n")
    return split


def _number(how: str, text: str) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        raise UsageError(f"--how {how[:40]}: {text[:20]!r} is no number") from None


def _whole(how: str, number: float) -> int:
    if number != int(number):
        raise UsageError(f"--how {how[:40]}: give a whole number")
    return int(number)


def _fresh(out: Path) -> None:
    """An empty folder: files of an older split among new ones would be registered by mistake."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if next(out.iterdir(), None) is not None:
            raise UsageError(f"{out} is not empty; give --out another folder")
    except OSError as error:
        raise StorageError(f"cannot write to {out}: {error.strerror}; give --out another folder") from None


def _save(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    from safetensors.numpy import save

    _write(path, save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))


def _write(path: Path, content: str | bytes) -> None:
    try:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror}; free some space or change --out"
        ) from None
