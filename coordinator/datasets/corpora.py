"""Data sets that experiments use, from the files of their packages: MNIST's images, Brown's documents.

Pure: bytes by file name in, arrays and text out. What fetches the files is ``coordinator.datasets.download``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atoll import idx
from atoll.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

MNIST_SIZES = {"train": 60_000, "t10k": 10_000}
PIXELS = (28, 28)
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
