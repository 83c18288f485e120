"""Machines with other workers, compared: words with the remedy, plain values for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from coordinator.cli.views.format import DIM, in_seconds

if TYPE_CHECKING:
    from coordinator.planning.readings import Reading

NAMED = 6  # sites
MOST_LISTED = 16  # devices of one `atoll-worker join`


def readings_view(readings: Sequence[Reading]) -> RenderableType:
    """The best reading that is worth it with its remedy first, then each of the others in a line."""
    parts: list[RenderableType] = []
    for at, reading in enumerate(readings):
        if reading.way.why_not:
            why = f"{_workers(reading)}: not planned, as {reading.way.why_not}"
            parts.append(Text(why, style=DIM))
            continue
        given = reading.given
        took = f"{in_seconds(given.step_s)} ({given.text})" if given else "no room"
        beside = f"the workers of the fleet file: {took}"
        if at == 0 and reading.better:
            parts.append(Text(f"{reading_words(reading)}, {reading.gain:.3g} times as fast as {beside}"))
            parts.append(Text(remedy(reading)))
        else:
            parts.append(Text(f"{reading_words(reading)}, beside {beside}", style=DIM))
    return Group(*parts)


def reading_words(reading: Reading) -> str:
    """Who is a worker in a reading, and seconds of its step."""
    return f"{_workers(reading)}: {in_seconds(reading.way.step_s)} a step ({reading.way.text})"


def remedy(reading: Reading) -> str:
    """How to start the workers of a reading, and what its plan needs besides."""
    options = f", and the job with {reading.way.options}" if reading.way.options else ""
    kind = "one worker" if reading.joined else "a worker per card"
    devices = _devices(reading, "+" if reading.joined else ",")
    hosts = " (on several hosts with torchrun, docs/sites.md)" if reading.joined else ""
    start = f"start {_named(reading.sites)} as {kind}, `atoll-worker join HOST:PORT --devices {devices}`"
    return f"{start}{hosts}{options}"


def readings_values(readings: Sequence[Reading]) -> list[dict[str, object]]:
    """The readings for ``--json``."""
    return [
        {
            "sites": list(reading.sites),
            "cards": list(reading.cards),
            "joined": reading.joined,
            "step_s": None if reading.way.why_not else reading.way.step_s,
            "way": reading.way.text,
            "options": reading.way.options,
            "given_step_s": reading.given.step_s if reading.given else None,
            "given_way": reading.given.text if reading.given else "",
            "gain": reading.gain,
            "better": reading.better,
            "remedy": "" if reading.way.why_not else remedy(reading),
            "why_not": reading.way.why_not,
        }
        for reading in readings
    ]


def _workers(reading: Reading) -> str:
    """Sites with what they are in a reading."""
    if reading.joined:
        cards = ", ".join(dict.fromkeys(str(count) for count in reading.cards))
        each = "each one worker" if len(reading.sites) > 1 else "one worker"
        return f"{_named(reading.sites)} as {each} of {cards} cards"
    each = "each " if len(reading.sites) > 1 else ""
    counts = ", ".join(dict.fromkeys(str(count) for count in reading.cards))
    return f"{_named(reading.sites)} as {each}{counts} workers, one per card"


def _named(sites: Sequence[str]) -> str:
    more = f" and {len(sites) - NAMED} more" if len(sites) > NAMED else ""
    return ", ".join(sites[:NAMED]) + more


def _devices(reading: Reading, between: str) -> str:
    """The list of devices where it is short and the same for all sites, else all GPUs."""
    counts = set(reading.cards)
    if len(counts) == 1 and (count := max(counts)) <= MOST_LISTED:
        return between.join(f"cuda:{number}" for number in range(count))
    return "all+" if reading.joined else "all"
