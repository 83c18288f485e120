"""R's lazy-load databases: what R writes is read, and what it would not write is refused without harm."""

from __future__ import annotations

import bz2
import lzma
import random
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from atoll.errors import UsageError
from experiments.datasets import corpora, rdata

NIL = struct.pack(">i", 254)
ATTRIBUTES, TAG = 0x200, 0x400


def header(version: int = 3) -> bytes:
    words = struct.pack(">iii", version, 0x040301, 0x030500)
    return b"X\n" + words + (struct.pack(">i", 5) + b"UTF-8" if version == 3 else b"")


def text(value: str) -> bytes:
    return struct.pack(">ii", 9, len(value)) + value.encode()


def strings(values: list[str]) -> bytes:
    return struct.pack(">ii", 16, len(values)) + b"".join(map(text, values))


def integers(values: list[int], attributes: bytes = b"") -> bytes:
    flags = 13 | (ATTRIBUTES if attributes else 0)
    return struct.pack(f">ii{len(values)}i", flags, len(values), *values) + attributes


def reals(values: list[float]) -> bytes:
    return struct.pack(f">ii{len(values)}d", 14, len(values), *values)


def pairs(**items: bytes) -> bytes:
    found = b""
    for name, value in items.items():
        found += struct.pack(">i", 2 | TAG) + struct.pack(">i", 1) + text(name) + value
    return found + NIL


def named(items: Mapping[str, bytes], *more: bytes) -> bytes:
    body = struct.pack(">ii", 19 | ATTRIBUTES, len(items)) + b"".join(items.values())
    return body + pairs(names=strings(list(items)), **dict(zip(("class",), more, strict=False)))


def sequence(first: int, length: int) -> bytes:
    facts = pairs(a=struct.pack(">i", 1) + text("compact_intseq"), b=struct.pack(">i", 1) + text("base"))
    return struct.pack(">i", 238) + facts + reals([float(length), float(first), 1.0]) + NIL


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "zlib": lambda raw: struct.pack(">I", len(raw)) + zlib.compress(raw),
    "bzip2": lambda raw: struct.pack(">I", len(raw)) + b"2" + bz2.compress(raw),
    "xz": lambda raw: struct.pack(">I", len(raw)) + b"Z" + lzma.compress(
        raw, lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2, "preset": 6}]
    ),
}  # fmt: skip


def database(frames: Mapping[str, bytes], packer: str = "zlib", version: int = 3) -> tuple[bytes, bytes]:
    data, places = b"", {}
    for name, frame in frames.items():
        entry = PACKERS[packer](header(version) + frame)
        places[name] = integers([len(data), len(entry)])
        data += entry
    index = header(version) + named(
        {"variables": named(places), "references": named({}), "compressed": integers([1])}
    )
    return zlib.compress(index), data


def frame(n: int = 5) -> bytes:
    levels = pairs(levels=strings(["Drama", "War"]))
    columns = {
        "userId": integers(list(range(n))),
        "rating": reals([0.5 * (at % 10 + 1) for at in range(n)]),
        "title": strings([f"film {at}" for at in range(n)]),
        "genres": integers([1 + at % 2 for at in range(n)], levels),
        "movieId": sequence(7, n),
    }
    return named(columns, strings(["data.frame"]))


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("version", [2, 3])
def test_columns_of_a_table_are_read(packer: str, version: int) -> None:
    found = rdata.table(
        *database({"other": integers([1]), "movielens": frame()}, packer, version), "movielens"
    )
    assert list(found) == ["userId", "rating", "title", "genres", "movieId"]
    assert found["title"] == [f"film {at}" for at in range(5)]
    columns = {
        name: rdata.numbers(found, name).tolist() for name in ("userId", "rating", "genres", "movieId")
    }
    assert columns["userId"] == list(range(5))
    assert columns["rating"] == [0.5, 1.0, 1.5, 2.0, 2.5]
    assert columns["genres"] == [0, 1, 0, 1, 0]
    assert columns["movieId"] == [7, 8, 9, 10, 11]
    with pytest.raises(UsageError, match="no column of numbers 'title'"):
        rdata.numbers(found, "title")


def test_a_table_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(UsageError, match=r"no table 'movies'; it has movielens, other"):
        rdata.table(*database({"other": frame(), "movielens": frame()}), "movies")


@pytest.mark.parametrize(
    "damage",
    {
        "a vector longer than its bytes": struct.pack(">ii", 14, 2**31 - 1),
        "a list longer than its bytes": struct.pack(">ii", 19, 2**31 - 1),
        "a negative length": struct.pack(">ii", 13, -5),
        "a closure": struct.pack(">i", 3) + NIL * 3,
        "external code": struct.pack(">i", 21) + NIL,
        "deep nesting": struct.pack(">ii", 19, 1) * 200 + NIL,
        "an endless pair list": struct.pack(">i", 2) + NIL + struct.pack(">i", 13),
        "a reference to nothing": struct.pack(">i", 255 | 7 << 8),
        "a sequence of terabytes": sequence(1, 2**40),
        "nothing": b"",
    }.items(),
    ids=lambda item: item[0],
)
def test_what_no_table_is_is_refused(damage: tuple[str, bytes]) -> None:
    with pytest.raises(UsageError):
        rdata.table(*database({"movielens": damage[1]}), "movielens")


def test_an_entry_that_unpacks_to_more_than_it_may_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdata, "MAX_BYTES", 10_000)
    with pytest.raises(UsageError, match=r"unpacks to more than 10,000 bytes"):
        rdata.table(*database({"movielens": frame(2000)}), "movielens")


def test_random_damage_is_an_error_or_a_table_and_nothing_else() -> None:
    index, data = database({"movielens": frame(50)})
    raw = bytearray(zlib.decompress(index))
    draw = random.Random(4711)
    for _ in range(500):
        bad = bytearray(raw)
        for _ in range(3):
            bad[draw.randrange(len(bad))] = draw.randrange(256)
        try:
            rdata.table(zlib.compress(bytes(bad)), data, "movielens")
        except UsageError:
            continue


def test_ratings_are_counted_from_zero_and_have_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    files = dict(zip(("Rdata.rdx", "Rdata.rdb"), database({"movielens": frame()}), strict=True))
    with pytest.raises(UsageError, match="expected; fetch them again"):
        corpora.movielens(files)
    monkeypatch.setattr(corpora, "MOVIELENS_SIZE", (5, 5))
    found: Any = corpora.movielens(files)
    assert (found.n_users, found.n_films, found.films.tolist()) == (5, 5, [0, 1, 2, 3, 4])
    assert found.stars.dtype == np.float32
