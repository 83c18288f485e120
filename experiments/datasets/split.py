"""A data set dealt out to clients as files, for experiments: one file a client, a schema, and the map.

    OUT/client-00.safetensors ...     MNIST: image, label
    OUT/client-news.txt ...           Brown by genre; documents parted by form feeds
    OUT/client-slant.safetensors ...  fonts by writer: image, label; MovieLens by user: user, film, stars
    OUT/schema.txt                    for `atoll-worker data add NAME FILE --schema-file`
    OUT/split.json                    how, seed, sizes, and the map's fingerprint

How a split is drawn is ``strategies.partition_data``'s matter.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.errors import UsageError
from experiments.datasets.corpora import PARTED, Document, Mnist, Ratings
from experiments.datasets.fonts import Writers
from hostos.files.refusals import disk
from strategies import partition_data

if TYPE_CHECKING:
    from numpy.typing import NDArray

WINDOW = 128  # bytes of a sample of text
MAP = "split.json"
SCHEMA = "schema.txt"


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


def split_images(data: Mnist, how: str, clients: int, seed: int, take: int, out: Path) -> Split:
    """Deal out ``take`` training images drawn by the seed (0: all, in their order)."""
    if not 0 <= take <= len(data.labels):
        raise UsageError(f"--take {take}; there are {len(data.labels):,} training images")
    if how in ("natural", "documents"):
        raise UsageError(f"--how {how} is for texts; MNIST's files do not tell who wrote a digit")
    images, labels = taken(data, take, seed)
    parts = partition_data.parts_of(how, labels, (), clients, seed)
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
    parts = partition_data.parts_of(how, numbers, genres, clients, seed)
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


@dataclass(frozen=True)
class Owned:
    """Samples that somebody made: arrays of equal length, and whose each sample is, by number."""

    name: str
    arrays: dict[str, NDArray[Any]]
    labels: NDArray[Any]
    owners: NDArray[np.int64]
    owner_names: tuple[str, ...]
    owner_field: str
    schema: tuple[str, ...]

    def whole(self, out: Path) -> Path:
        """Write everything and a field of owners into one file, for `data part --how natural`."""
        _fresh(out)
        path = out / f"{self.name}.safetensors"
        _save(path, {**self.arrays, self.owner_field: self.owners})
        field = self.owner_field
        known = [] if field in self.arrays else [f"{field}:int64={field}"]
        _write(out / SCHEMA, "\n".join([*self.schema, *known]) + "\n")
        return path


def of_writers(found: Writers) -> Owned:
    """Letters in fonts, owned by their fonts."""
    arrays = {"image": found.images, "label": found.labels}
    schema = ("image:float32[1,28,28]=image|scale:1/255", "label:int64=label")
    return Owned("fonts", arrays, found.labels, found.writers, found.names, "writer", schema)


def of_ratings(found: Ratings) -> Owned:
    """Stars of films, owned by who gave them; split by label, a label is a number of half stars."""
    arrays: dict[str, NDArray[Any]] = {"user": found.users, "film": found.films, "stars": found.stars}
    schema = ("user:int64=user", "film:int64=film", "stars:float32=stars")
    halves = np.rint(2 * found.stars).astype(np.int64)
    names = tuple(f"{user:03d}" for user in range(found.n_users))
    return Owned("movielens", arrays, halves, found.users, names, "user", schema)


def split_owned(data: Owned, how: str, clients: int, seed: int, out: Path) -> Split:
    """Deal out samples; a client of a natural split that has one owner's alone is called after it."""
    if how.startswith(("noise", "documents")):
        raise UsageError(f"--how {how[:40]} does not apply to {data.name}")
    parts = partition_data.parts_of(how, data.labels, data.owners.tolist(), clients, seed)
    _fresh(out)
    found = []
    for at, mine in enumerate(parts):
        owners = np.unique(data.owners[mine])
        alone = how == "natural" and len(owners) == 1
        name = f"client-{data.owner_names[owners[0]]}" if alone else f"client-{at:02d}"
        _save(out / f"{name}.safetensors", {field: array[mine] for field, array in data.arrays.items()})
        counts = Counter(data.labels[mine].tolist())
        found.append(
            Part(name, f"{name}.safetensors", len(mine), {str(k): counts[k] for k in sorted(counts)})
        )
    split = Split(data.name, how, seed, partition_data.fingerprint(parts), tuple(found))
    return _finish(split, list(data.schema), out)


def _finish(split: Split, schema: list[str], out: Path) -> Split:
    _write(out / SCHEMA, "\n".join(schema) + "\n")
    _write(out / MAP, json.dumps(asdict(split), indent=1) + "\n")
    return split


def _fresh(out: Path) -> None:
    """An empty folder: files of an older split among new ones would be registered by mistake."""
    with disk(f"write to {out}", "give --out another folder"):
        out.mkdir(parents=True, exist_ok=True)
        if next(out.iterdir(), None) is not None:
            raise UsageError(f"{out} is not empty; give --out another folder")


def _save(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    from safetensors.numpy import save

    _write(path, save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))


def _write(path: Path, content: str | bytes) -> None:
    with disk(f"write {path}", "free some space or change --out"):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
