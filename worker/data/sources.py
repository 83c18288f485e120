"""Files that a data owner may register: IDX, safetensors, CSV, text; read piece by piece.

A source yields ``Piece`` after piece: for every SOURCE that the schema names, the next samples. Nothing
here holds more than a piece in memory, and every refusal names file, row or line, and column. The files
may be large but not hostile in kind: lengths, counts and nesting are bounded all the same.
"""

from __future__ import annotations

import csv
import gzip
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from atoll.errors import StorageError, UsageError
from atoll.idx import MAX_HEADER_BYTES, IdxHeader, check_length, looks_like_idx, parse_header
from hostos.files.refusals import disk

if TYPE_CHECKING:
    from worker.data.transforms import Array

FORMATS = ("idx", "safetensors", "csv", "text")
PIECE_BYTES = 8 << 20
PIECE_ROWS = 65_536
CSV_ROWS = 4_096
MAX_COLUMNS = 65_536
MAX_DOCUMENTS = 1_000_000
MAX_WINDOW = 1 << 24
PAGE = 0x0C  # form feed: parts the documents of one text file
GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class Piece:
    """The next samples of every source. ``done`` of the source's ``total_bytes`` are read.

    ``where(row, column)``: the place of sample ``row`` of this piece in words.
    """

    arrays: dict[str, Array]
    done: int
    where: Callable[[str, int, int | None], str]


class Source(Protocol):
    """A registered file or folder, opened."""

    format: str
    total_bytes: int
    described: str  # what it offers, for messages

    def pieces(self, wanted: Sequence[str]) -> Iterator[Piece]:
        """Yield all samples in order; UsageError for a SOURCE that is not there."""
        ...


@dataclass(frozen=True, slots=True)
class Form:
    """Form in which a source is written; "" as format: found from its name and first bytes."""

    format: str = ""
    delimiter: str = ","  # of a CSV file; and whether its first line names the columns
    header: bool = True


AS_FOUND = Form()


def open_source(path: Path, form: Form, wanted: Sequence[str]) -> Source:
    """Return the source at ``path``, of which ``wanted`` names the parts."""
    if not path.exists():
        raise UsageError(f"{path} does not exist; give a file or a folder")
    kind = form.format or _guess(path, wanted)
    with disk(f"read {path}", "check its permissions"):
        if kind == "idx":
            return IdxSource(path)
        if kind == "safetensors":
            return SafetensorsSource(path)
        if kind == "csv":
            tabs = path.suffix == ".tsv" and form.delimiter == ","
            return CsvSource(path, "\t" if tabs else form.delimiter, form.header)
        if kind == "text":
            return TextSource(path)
    raise UsageError(f"no format {form.format[:40]!r}; there are {', '.join(FORMATS)}")


def _guess(path: Path, wanted: Sequence[str]) -> str:
    if path.is_dir():
        return "idx" if set(wanted) & {p.name for p in path.iterdir() if p.is_file()} else "text"
    suffixes = [suffix.lower() for suffix in path.suffixes]
    for format_name, known in (("safetensors", {".safetensors"}), ("csv", {".csv", ".tsv"})):
        if known & set(suffixes[-1:]):
            return format_name
    with open_plain(path) as file:
        return "idx" if looks_like_idx(file.read(4)) else "text"


def open_plain(path: Path) -> IO[bytes]:
    """The file's content, unpacked where it is gzip."""
    return cast("IO[bytes]", gzip.open(path, "rb")) if _packed(path) else path.open("rb")


def _packed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == GZIP


def _rows_a_piece(sample_bytes: int) -> int:
    return max(1, min(PIECE_ROWS, PIECE_BYTES // max(1, sample_bytes)))


def _row(first: int) -> Callable[[str, int, int | None], str]:
    return lambda source, row, column: f"{source}, row {first + row + 1:,}"


# ---------------------------------------------------------------- arrays


class IdxSource:
    """An IDX file, whose SOURCE is ``value``; or a folder, where SOURCE names a file. Also gzipped."""

    format = "idx"

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.is_dir():
            found = sorted(p for p in path.iterdir() if p.is_file())
            self.files = {p.name: p for p in found}
        else:
            self.files = {"value": path}
        self.described = ", ".join(list(self.files)[:20])
        self.total_bytes = 0

    def pieces(self, wanted: Sequence[str]) -> Iterator[Piece]:
        missing = [name for name in wanted if name not in self.files]
        if missing:
            raise UsageError(f"{self.path} has no {missing[0]!r}; it has {self.described or 'no file'}")
        headers = {name: self._header(self.files[name]) for name in wanted}
        counts = {name: header.shape[0] for name, header in headers.items()}
        _same_count(counts)
        count = next(iter(counts.values()))
        self.total_bytes = sum(header.data_bytes for header in headers.values())
        rows = _rows_a_piece(max(header.data_bytes // max(1, count) for header in headers.values()))
        files = {name: open_plain(self.files[name]) for name in wanted}
        try:
            for name, file in files.items():
                file.read(headers[name].header_bytes)
            done = 0
            for first in range(0, count, rows):
                taken = min(rows, count - first)
                arrays = {name: _read(files[name], headers[name], taken, name) for name in wanted}
                done += sum(array.nbytes for array in arrays.values())
                yield Piece(arrays, done, _row(first))
        finally:
            for file in files.values():
                file.close()

    def _header(self, path: Path) -> IdxHeader:
        with open_plain(path) as file:
            header = parse_header(file.read(MAX_HEADER_BYTES), str(path))
        if not _packed(path):  # else the missing end shows as it is read
            check_length(header, path.stat().st_size, str(path))
        return header


def _read(file: IO[bytes], header: IdxHeader, rows: int, what: str) -> Array:
    sample = header.dtype.itemsize * prod(header.shape[1:])
    try:
        data = file.read(rows * sample)
    except (EOFError, OSError) as error:
        raise StorageError(f"{what} is damaged: {error}; fetch it again") from None
    if len(data) != rows * sample:
        raise UsageError(f"{what} ends {rows * sample - len(data):,} bytes early; fetch it again")
    flat = np.frombuffer(data, header.dtype).astype(header.dtype.newbyteorder("="), copy=False)
    found: Array = flat.reshape(rows, *header.shape[1:])
    return found


def _same_count(counts: dict[str, int]) -> None:
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        raise UsageError(
            f"the fields have unequal numbers of samples: {shown}; name files that belong together"
        )


class SafetensorsSource:
    """A safetensors file; SOURCE names a tensor [n, ...]."""

    format = "safetensors"

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            opened: Any = safe_open(path, framework="numpy")
        except (SafetensorError, IsADirectoryError) as error:
            raise UsageError(f"{path} is not a safetensors file: {error}") from None
        self._file = opened
        self.keys = tuple(opened.keys())
        self.described = ", ".join(self.keys[:20])
        self.total_bytes = 0

    def pieces(self, wanted: Sequence[str]) -> Iterator[Piece]:
        missing = [name for name in wanted if name not in self.keys]
        if missing:
            raise UsageError(f"{self.path} has no tensor {missing[0]!r}; it has {self.described}")
        slices = {name: self._file.get_slice(name) for name in wanted}
        for name, each in slices.items():
            if each.get_dtype() in ("BF16", "F8_E4M3", "F8_E5M2") or not each.get_shape():
                raise UsageError(
                    f"{self.path}: tensor {name!r} is {each.get_dtype()} {each.get_shape()}; store "
                    "float32 or integers with the samples along the first axis"
                )
        counts = {name: int(each.get_shape()[0]) for name, each in slices.items()}
        _same_count(counts)
        count = next(iter(counts.values()))
        sample = max(8 * prod(each.get_shape()[1:]) for each in slices.values())
        rows, done = _rows_a_piece(sample), 0
        self.total_bytes = self.path.stat().st_size
        for first in range(0, count, rows):
            arrays = {
                name: np.asarray(each[first : min(first + rows, count)]) for name, each in slices.items()
            }
            done += sum(array.nbytes for array in arrays.values())
            yield Piece(arrays, done, _row(first))


# ---------------------------------------------------------------- tables


class CsvSource:
    """A table; SOURCE names columns: ``age``, ``a,b``, ``x1..x9``, ``#3`` by number, ``*`` all others."""

    format = "csv"

    def __init__(self, path: Path, delimiter: str, header: bool) -> None:
        if len(delimiter) != 1:
            raise UsageError(f"delimiter {delimiter!r}; give one character, for example ';'")
        if path.is_dir():
            raise UsageError(f"{path} is a folder; give one CSV file")
        self.path, self.delimiter, self.header = path, delimiter, header
        self.total_bytes = path.stat().st_size
        with _CsvRows(path, delimiter) as rows:
            first = next(rows, None)
        if not first or len(first) > MAX_COLUMNS:
            raise UsageError(f"{path} has {len(first or ())} columns; give 1 to {MAX_COLUMNS}")
        self.columns = [c.strip() for c in first] if header else [str(i + 1) for i in range(len(first))]
        self.described = "columns " + ", ".join(self.columns[:20]) + (", ..." if len(first) > 20 else "")

    def pieces(self, wanted: Sequence[str]) -> Iterator[Piece]:
        chosen = self.chosen(wanted)
        with _CsvRows(self.path, self.delimiter) as rows:
            if self.header:
                next(rows, None)
            while True:
                taken, lines = self._take(rows)
                if not taken:
                    return
                cells = np.array(taken, object)
                arrays = {
                    name: cells[:, at[0]] if _single(name) else cells[:, at] for name, at in chosen.items()
                }
                yield Piece(arrays, min(rows.done, self.total_bytes), self._where(lines, chosen))

    def chosen(self, wanted: Sequence[str]) -> dict[str, list[int]]:
        """SOURCE -> column numbers, from 0."""
        named = {name: self._columns(name) for name in wanted if name != "*"}
        used = {at for columns in named.values() for at in columns}
        rest = [at for at in range(len(self.columns)) if at not in used]
        if "*" in wanted and not rest:
            raise UsageError(f"{self.path}: '*' takes the columns no other field names; there are none left")
        return {name: rest if name == "*" else named[name] for name in wanted}

    def _columns(self, source: str) -> list[int]:
        found: list[int] = []
        for part in (part.strip() for part in source.split(",")):
            first, dots, last = part.partition("..")
            at = self._column(first.strip())
            to = self._column(last.strip()) if dots else at
            if to < at:
                raise UsageError(f"{self.path}: {part!r} runs backwards; columns {at + 1} to {to + 1}")
            found += range(at, to + 1)
        return found

    def _column(self, name: str) -> int:
        if name.startswith("#") and name[1:].isdecimal() and 1 <= int(name[1:]) <= len(self.columns):
            return int(name[1:]) - 1
        at = [i for i, column in enumerate(self.columns) if column == name]
        if len(at) != 1:
            how = "no column" if not at else f"{len(at)} columns named"
            raise UsageError(
                f"{self.path} has {how} {name[:60]!r}; it has {self.described}; #3 is the third column"
            )
        return at[0]

    def _take(self, rows: _CsvRows) -> tuple[list[list[str]], list[int]]:
        taken: list[list[str]] = []
        lines: list[int] = []
        while len(taken) < CSV_ROWS and (row := next(rows, None)) is not None:
            line = rows.line
            if not row:
                continue  # an empty line
            if len(row) != len(self.columns):
                raise UsageError(
                    f"{self.path} line {line:,} has {len(row)} columns, the first line has "
                    f"{len(self.columns)}; mend the line or give --delimiter"
                )
            taken.append(row)
            lines.append(line)
        return taken, lines

    def _where(
        self, lines: Sequence[int], chosen: dict[str, list[int]]
    ) -> Callable[[str, int, int | None], str]:
        def where(source: str, row: int, column: int | None) -> str:
            columns = chosen[source]
            at = columns[column] if column is not None and column < len(columns) else columns[0]
            name = f", column {self.columns[at]!r}" if column is not None or len(columns) == 1 else ""
            return f"{self.path.name} line {lines[row]:,}{name}"

        return where


def _single(source: str) -> bool:
    """True when a SOURCE is one column as such, whose sample is a number and not a row of one."""
    return source != "*" and "," not in source and ".." not in source


class _CsvRows:
    """Rows of a table; errors name the line that cannot be decoded or parsed."""

    def __init__(self, path: Path, delimiter: str) -> None:
        self.path, self.done, self.line = path, 0, 0  # bytes read; line of the newest row
        self._file = open_plain(path)
        self._rows = csv.reader(self._lines(), delimiter=delimiter, strict=True)

    def __enter__(self) -> _CsvRows:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def __iter__(self) -> _CsvRows:
        return self

    def __next__(self) -> list[str]:
        try:
            row = next(self._rows)
        except csv.Error as error:
            raise UsageError(
                f"{self.path} line {self._rows.line_num:,}: {error}; mend its quotes or lengths"
            ) from None
        self.line = self._rows.line_num
        return row

    def _lines(self) -> Iterator[str]:
        for number, line in enumerate(self._file, 1):
            self.done += len(line)
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UsageError(
                    f"{self.path} line {number:,} is not UTF-8 (byte {error.start + 1}); convert the file"
                ) from None


# ---------------------------------------------------------------- text


class TextSource:
    """A text file, whose documents a form feed parts, or a folder, where each file is a document.

    SOURCE ``windows:LENGTH[,STRIDE]``: every full window of a document's bytes, none across two
    documents; ``documents:LENGTH``: a document's first bytes, filled up with 0; ``document``: the number
    of the document that the sample is of.
    """

    format = "text"
    described = "windows:LENGTH[,STRIDE], documents:LENGTH and document"

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.is_dir():
            found = (p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
            self.files = sorted(itertools.islice(found, MAX_DOCUMENTS + 1))
        else:
            self.files = [path]
        if not 1 <= len(self.files) <= MAX_DOCUMENTS:
            raise UsageError(f"{path} holds {len(self.files)} files; a text has 1 to {MAX_DOCUMENTS:,}")
        self.total_bytes = sum(p.stat().st_size for p in self.files)

    def pieces(self, wanted: Sequence[str]) -> Iterator[Piece]:
        cuts = [name for name in wanted if name != "document"]
        if len(cuts) != 1:
            raise UsageError(
                f"a text is cut in one way, the schema names {len(cuts)}; take one of {self.described}"
            )
        how, length, stride = _cut(cuts[0])
        done = first = 0
        for number, document in enumerate(self.documents()):
            done += len(document) + 1
            for samples in _samples(document, how, length, stride):
                which = np.full(len(samples), number, np.int64)
                arrays = {name: which if name == "document" else samples for name in wanted}
                yield Piece(arrays, min(done, self.total_bytes), _row(first))
                first += len(samples)
        if not first:
            raise UsageError(
                f"{self.path}: no document of {self.total_bytes:,} bytes in all gives a window of {length}"
            )

    def documents(self) -> Iterator[Array]:
        """Yield each document's bytes, without empty ones."""
        for path in self.files:
            data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
            parts: list[Array] = [data]
            if not self.path.is_dir():
                ends = np.flatnonzero(data == PAGE)
                if len(ends) > MAX_DOCUMENTS:
                    raise UsageError(f"{path} holds {len(ends):,} documents; at most {MAX_DOCUMENTS:,}")
                parts = [part[1 if at else 0 :] for at, part in enumerate(np.split(data, ends))]
            yield from (part for part in parts if len(part))


def _cut(source: str) -> tuple[str, int, int]:
    how, _, rest = source.partition(":")
    numbers = [part.strip() for part in rest.split(",")] if rest else []
    good = all(part.isdecimal() and 0 < int(part[:9]) <= MAX_WINDOW for part in numbers)
    if not good or (how, len(numbers)) not in {("windows", 1), ("windows", 2), ("documents", 1)}:
        raise UsageError(
            f"text source {source[:60]!r}; write {TextSource.described}, lengths of 1 to {MAX_WINDOW:,}"
        )
    return how, int(numbers[0]), int(numbers[-1])


def _samples(document: Array, how: str, length: int, stride: int) -> Iterator[Array]:
    if how == "documents":
        found = np.zeros((1, length), np.uint8)
        found[0, : min(length, len(document))] = document[:length]
        yield found
    elif len(document) >= length:
        windows = np.lib.stride_tricks.sliding_window_view(document, length)[::stride]
        rows = _rows_a_piece(length)
        for first in range(0, len(windows), rows):
            yield np.ascontiguousarray(windows[first : first + rows])
