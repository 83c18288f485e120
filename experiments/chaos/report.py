"""A run of chaos in words, and as values for scripts. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from coordinator.cli.views.format import DIM
from experiments.chaos.kinds import Kind
from experiments.chaos.promises import Promise, Seen, pauses_s

VERDICTS = {
    True: Text("held", style="green"),
    False: Text("BROKEN", style="bold red"),
    None: Text("not seen", style=DIM),
}


def values(seed: int, seen: Seen, promises: Sequence[Promise]) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {
        "seed": seed,
        "held": held(promises),
        "jobs": [{"job": t.job, "state": t.state, "steps": t.steps} for t in seen.trained],
        "undisturbed_step_s": seen.step_s,
        "deeds": [asdict(deed) for deed in seen.deeds],
        "promises": [asdict(promise) for promise in promises],
        "pauses_s": pauses(seen),
    }


def held(promises: Sequence[Promise]) -> bool:
    """Return whether no promise is broken."""
    return not any(promise.held is False for promise in promises)


def pauses(seen: Seen) -> Mapping[Kind, float]:
    """Return the median pause between two commits that each kind caused, seconds."""
    return {kind: statistics.median(gaps) for kind, gaps in sorted(pauses_s(seen).items())}


def view(promises: Sequence[Promise]) -> Table:
    """Return the verdicts as a table."""
    table = Table("promise", "", "", box=None, pad_edge=False)
    for promise in promises:
        table.add_row(promise.name, VERDICTS[promise.held], Text(promise.words))
    return table


def deeds_line(seen: Seen) -> str:
    """Return what was done, and how long training stood still by kind."""
    counts = {kind: sum(deed.kind is kind for deed in seen.deeds) for kind in Kind}
    done = ", ".join(f"{count} x {kind}" for kind, count in counts.items() if count) or "nothing"
    stood = ", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in pauses(seen).items())
    return f"done: {done}" + (f"; longest pause between commits, median: {stood}" if stood else "")
