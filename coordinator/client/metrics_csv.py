"""A job's metrics.csv for its owner: every row, and whether its step was taken back later. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from atoll.errors import StorageError

ROLLED_BACK = "rolled_back"
MOST_ROWS = 20_000_000  # of one job
COLUMNS = 4  # step, name, value, time_s


def marked(lines: Iterable[str]) -> Iterator[str]:
    """Yield the header and rows with one more column, ``rolled_back``: 1 where the step was done again.

    A row named ``rolled_back`` says that the job went back to its step: rows before it of later steps do not
    count. It is left out itself, and so is what a crash tore off. StorageError for more than ``MOST_ROWS``.
    """
    header, rows, taken_back = "", list[str](), bytearray()
    newest: dict[int, list[int]] = {}  # step -> numbers of the rows that count
    for line in lines:
        if not header:
            header = line
            yield f"{header},{ROLLED_BACK}"
            continue
        cells = line.split(",")
        if len(cells) != COLUMNS or not cells[0].isdigit():
            continue
        step = int(cells[0])
        if cells[1] == ROLLED_BACK:
            for later in [done for done in newest if done > step]:
                for number in newest.pop(later):
                    taken_back[number] = 1
            continue
        if len(rows) >= MOST_ROWS:
            raise StorageError(f"more than {MOST_ROWS} rows of metrics; read the file at the coordinator")
        newest.setdefault(step, []).append(len(rows))
        rows.append(line)
        taken_back.append(0)
    for row, back in zip(rows, taken_back, strict=True):
        yield f"{row},{back}"
