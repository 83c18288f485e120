"""Output of a demo while it runs: its commands, and its progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

LINE_EVERY = 0.12  # of the whole: further apart are no two lines where there is no terminal


class Shown:
    """A progress bar below the commands on a terminal; plain lines elsewhere. Use it in ``with``."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self._clock = clock
        self._started_s = clock()
        self._last = -1.0  # share that a line told
        self._bar: Progress | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (
                BarColumn(bar_width=20),
                TextColumn("{task.percentage:3.0f} %"),
                TimeElapsedColumn(),
                TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            )
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task("", total=1.0)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def took_s(self) -> float:
        """Seconds since the demo began."""
        return self._clock() - self._started_s

    def command(self, text: str) -> None:
        """A command as a user would type it."""
        self.console.print(f"$ {text}", markup=False, soft_wrap=True)

    def say(self, what: RenderableType) -> None:
        """A line or a table of its own."""
        self.console.print(what, soft_wrap=isinstance(what, str) or not self.console.is_terminal)

    def progress(self, share: float, words: str) -> None:
        """Show the whole's progress, from 0 to 1, and what is being done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=share, description=words)
        elif share >= self._last + LINE_EVERY:
            self._last = share
            self.console.print(f"  {self.took_s:4.0f} s  {words}", markup=False, soft_wrap=True)
