"""Workers in what people read: by the names that their owners gave them, in place of their ids."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

_ID = re.compile(r"\bw-[0-9a-f]{16}(?:/[1-9][0-9]?)?\b")  # a device of a machine has its number after it
SHOWN_OF_ID = 6  # characters, where two workers have one name


def is_id(text: str) -> bool:
    """Return whether a text is a worker's id and nothing else."""
    return _ID.fullmatch(text) is not None


def distinct(names: Mapping[str, str]) -> dict[str, str]:
    """Return a name for each id: its own, with the beginning of the id where another worker has the same, and
    the id where it has none."""
    held = Counter(names.values())
    return {
        worker: name if name and held[name] == 1 else _shown(worker, names) for worker, name in names.items()
    }


def with_names(text: str, names: Mapping[str, str]) -> str:
    """Return ``text`` with every id of ``names`` replaced by its name, "NAME (ID)" too."""
    shown = {worker: _shown(worker, names) for worker in set(_ID.findall(text))}
    for worker in shown:
        if name := names.get(worker):
            text = text.replace(f"{name} ({worker})", worker)
    return _ID.sub(lambda found: shown[found[0]], text)


def _shown(worker: str, names: Mapping[str, str]) -> str:
    name = names.get(worker)
    if not name:
        return worker
    machine, slash, device = worker.partition("/")
    alone = sum(other == name for other in names.values()) == 1
    return name if alone else f"{name} ({machine[:SHOWN_OF_ID]}{slash}{device})"
