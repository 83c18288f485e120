"""Ways to train a job, compared: a table for people, plain values for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Column
from rich.text import Text

from coordinator.cli.views.facts import FactTable
from coordinator.cli.views.format import DIM, add_row, in_bytes, in_seconds

if TYPE_CHECKING:
    from coordinator.planning.ways import Way

Names = Mapping[str, str]
SHOWN = 6  # machines by name


def ways_view(ways: Sequence[Way], names: Names, batch: int) -> RenderableType:
    """The ways as ``compare_ways`` ranks them; ``batch`` samples a micro-batch."""
    heads = "samples/s", "a step", "sent a day", "memory", "same model", "counts"
    table = FactTable("", Column("way", no_wrap=True), *heads, header_style=DIM)
    possible = [way for way in ways if not way.why_not]
    for at, way in enumerate(possible):
        add_row(
            table,
            "*" if at == 0 else "",
            way.text,
            f"{way.micros_per_s * batch:.3g}",
            in_seconds(way.step_s),
            in_bytes(way.bytes_a_day),
            f"{way.memory_share:.0%}",
            "yes" if way.exact else "no",
            "1" if way.exact else f"{way.efficiency:.2f}",
        )
    parts: list[RenderableType] = [Text("ways to train, the best first"), table]
    best = possible[0]
    parts.append(Text(f"{best.text}: {_who(best, names)}"))
    if any(not way.exact for way in possible):
        parts.append(
            Text(
                "counts: worth of a sample beside an exact way's, measured on the demo's text "
                "(docs/data-parallel.md); the order is by samples/s times that",
                style=DIM,
            )
        )
    parts += [Text(f"{way.text}: {way.options}", style=DIM) for way in possible]
    parts += [Text(f"{way.kind}: {way.why_not}", style=DIM) for way in ways if way.why_not]
    return Group(*parts)


def _who(way: Way, names: Names) -> str:
    """Machines of a way, and the micro-batches that each replica takes of a step."""
    named = [" > ".join(names.get(worker, worker) for worker in replica) for replica in way.workers]
    shown = ", ".join(named[:SHOWN]) + (f" and {len(named) - SHOWN} more" if len(named) > SHOWN else "")
    runs = [(len(list(run)), micros) for micros, run in groupby(way.micros)]
    if len(way.micros) < 2:
        return shown
    taken = ", ".join(f"{count} x {micros}" if count > 1 else str(micros) for count, micros in runs)
    return f"{shown}; micro-batches a step: {taken}"


def ways_values(ways: Sequence[Way], batch: int) -> list[dict[str, object]]:
    """The ways for ``--json``."""
    return [
        {
            "way": way.kind.value,
            "text": way.text,
            "options": way.options,
            "samples_per_s": way.micros_per_s * batch,
            "step_s": way.step_s,
            "bytes_a_day": way.bytes_a_day,
            "memory_share": way.memory_share,
            "same_model": way.exact,
            "efficiency": way.efficiency,
            "workers": [list(replica) for replica in way.workers],
            "micro_batches": list(way.micros),
            "why_not": way.why_not,
        }
        for way in ways
    ]
