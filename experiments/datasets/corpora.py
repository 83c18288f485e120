"""Data sets that experiments use, from the files of their packages: MNIST's images, Brown's documents,
MovieLens's ratings. Letters in fonts: ``experiments.datasets.fonts``.

Pure: bytes by file name in, arrays and text out. What fetches the files is ``experiments.datasets.download``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll import idx
from atoll.errors import UsageError
from experiments.datasets import rdata

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

MNIST_SIZES = {"train": 60_000, "t10k": 10_000}
PIXELS = (28, 28)
MOVIELENS_SIZE = (100_004, 671)  # ratings, users
GENRES = "cats.txt"
PARTED = "\f"
"""Separator of the documents of one text file, also where a worker registers it."""


@dataclass(frozen=True)
class Mnist:
    """Handwritten digits: images uint8 [n, 28, 28], labels uint8 [n]."""

    images: Bytes
    labels: Bytes
    test_images: Bytes
    test_labels: Bytes


@dataclass(frozen=True, slots=True)
class Document:
    """A text of the Brown corpus."""

    name: str  # ca01 .. cr09
    genre: str
    text: str


@dataclass(frozen=True)
class Ratings:
    """Who gave which film how many stars: int64 [n] from 0 below ``n_users``, ``n_films``; float32 [n]."""

    users: NDArray[np.int64]
    films: NDArray[np.int64]
    stars: NDArray[np.float32]
    n_users: int
    n_films: int


def mnist(files: Mapping[str, bytes]) -> Mnist:
    """The four IDX files of the package. UsageError where one is not what MNIST is."""
    images, labels = _pair(files, "train")
    test_images, test_labels = _pair(files, "t10k")
    return Mnist(images, labels, test_images, test_labels)


def _pair(files: Mapping[str, bytes], which: str) -> tuple[Any, Any]:
    images = _parsed(files, f"{which}-images-idx3-ubyte")
    labels = _parsed(files, f"{which}-labels-idx1-ubyte")
    n = MNIST_SIZES[which]
    bytewise = images.dtype == labels.dtype == "uint8"
    if images.shape != (n, *PIXELS) or labels.shape != (n,) or not bytewise:
        raise UsageError(
            f"MNIST's {which} files hold {images.shape} and {labels.shape}; fetch them again: "
            "atoll data fetch mnist --again"
        )
    return images, labels


def _parsed(files: Mapping[str, bytes], name: str) -> Any:
    if name not in files:
        raise UsageError(f"MNIST's file {name} is missing; fetch it again: atoll data fetch mnist --again")
    return idx.parse(files[name], name)


def brown(files: Mapping[str, bytes]) -> tuple[Document, ...]:
    """The documents by name: words without their tags, a blank between words, a line a sentence.

    UsageError for a document without a genre.
    """
    pairs = (line.split() for line in files.get(GENRES, b"").decode("ascii", "replace").splitlines())
    genres = {pair[0]: pair[1] for pair in pairs if len(pair) >= 2}
    found = []
    for name in sorted(set(files) - {GENRES}):
        if name not in genres:
            raise UsageError(f"document {name} has no genre in {GENRES}: atoll data fetch brown --again")
        found.append(Document(name, genres[name], plain_text(files[name].decode("latin-1"))))
    return tuple(found)


def plain_text(tagged: str) -> str:
    """'The/at jury/nn ./.' -> 'The jury .'; empty lines are left out."""
    lines = (line.split() for line in tagged.splitlines())
    sentences = (" ".join(word.rpartition("/")[0] or word for word in line) for line in lines if line)
    return "".join(sentence + "\n" for sentence in sentences)


def movielens(files: Mapping[str, bytes]) -> Ratings:
    """The ratings of the table ``movielens`` in R's lazy-load database, in its order."""
    columns = rdata.table(files.get("Rdata.rdx", b""), files.get("Rdata.rdb", b""), "movielens")
    users, user = np.unique(rdata.numbers(columns, "userId"), return_inverse=True)
    films, film = np.unique(rdata.numbers(columns, "movieId"), return_inverse=True)
    stars = rdata.numbers(columns, "rating").astype(np.float32)
    if (len(stars), len(users)) != MOVIELENS_SIZE or not ((stars >= 0.5) & (stars <= 5.0)).all():
        raise UsageError(
            f"{len(stars):,} ratings by {len(users)} users, {MOVIELENS_SIZE[0]:,} by {MOVIELENS_SIZE[1]} "
            "were expected; fetch them again: atoll data fetch movielens --again"
        )
    return Ratings(user.astype(np.int64), film.astype(np.int64), stars, len(users), len(films))
