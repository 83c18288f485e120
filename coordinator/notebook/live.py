"""Where a run's progress is shown: a display of Jupyter that is updated, a terminal's bar, or lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from coordinator.notebook.progress import Progress


class Show(Protocol):
    """Shows one update after another."""

    def __call__(self, progress: Progress, losses: list[float]) -> None: ...


class _Html:
    """What Jupyter shows: the newest update alone."""

    def __init__(self, progress: Progress, losses: list[float]) -> None:
        self._progress, self._losses = progress, losses

    def __repr__(self) -> str:
        return str(self._progress)

    def _repr_html_(self) -> str:
        return self._progress.shown(self._losses)


@contextmanager
def showing() -> Iterator[Show]:
    """Show updates where this program's output goes."""
    if _in_jupyter():
        yield _in_cell()
        return
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal or console.is_dumb_terminal:
        yield _lines(console)
        return
    text = TextColumn("{task.description}", markup=False)
    with Bar(text, BarColumn(), TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("")

        def show(progress: Progress, losses: list[float]) -> None:
            bar.update(task, description=str(progress), completed=progress.step, total=progress.steps or 1)

        yield show


def _in_jupyter() -> bool:
    """Whether this is a kernel of Jupyter: its shell alone has one."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def _in_cell() -> Show:
    from IPython import display

    new: Any = display.display

    shown: list[Any] = []

    def show(progress: Progress, losses: list[float]) -> None:
        made = _Html(progress, losses)
        if shown:
            shown[0].update(made)
        else:
            shown.append(new(made, display_id=True))

    return show


def _lines(console: Console) -> Show:
    last: list[tuple[str, int, str]] = []

    def show(progress: Progress, losses: list[float]) -> None:
        seen = (progress.state, progress.step, progress.reason)
        if last != [seen]:
            last[:] = [seen]
            console.print(str(progress), soft_wrap=True)

    return show
