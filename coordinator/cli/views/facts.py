"""Tables on a terminal that are lines of facts in a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Column


class FactTable(Table):
    """A table on a terminal; elsewhere a line for each row, however long, such as
    ``worker w-1: name fast1, state pool``. It has no lines between its cells, unless ``options`` say so."""

    def __init__(self, *heads: Column | str, **options: Any) -> None:
        super().__init__(*heads, **{"box": None, "pad_edge": False, **options})

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.is_terminal:
            yield from super().__rich_console__(console, options)
            return
        heads = [str(column.header) for column in self.columns]
        for cells in zip(*([str(cell) for cell in column.cells] for column in self.columns), strict=True):
            yield Text(line_of(heads, cells), no_wrap=True, overflow="ignore")


def line_of(heads: Sequence[str], cells: Sequence[str]) -> str:
    """Return a row as a line; a first column without a heading is a mark, unless none has one."""
    subject, mark = 0, ""
    if any(heads) and not heads[0]:
        subject, mark = 1, f"{cells[0]} " if cells[0] else ""
    values = [plain_cell(cell) for cell in cells[subject + 1 :]]
    facts = [
        f"{head} {value}".strip() for head, value in zip(heads[subject + 1 :], values, strict=True) if value
    ]
    line = f"{mark}{heads[subject]} {cells[subject]}".strip()
    return f"{line}: {', '.join(facts)}" if facts else line


def plain_cell(cell: str) -> str:
    """A cell without its bar."""
    return cell.lstrip("█·").strip()
