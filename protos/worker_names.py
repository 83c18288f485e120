"""Workers in what people read: by the names that their owners gave them, in place of their ids."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

_ID = re.compile(r"\bw-[0-9a-f]{16}\b")
SHOWN_OF_ID = 6  # characters, where two workers have one name


def is_id(text: str) -> bool:
    """Return whether a text is a worker's id and nothing else."""
    return _ID.fullmatch(text) is not None


def distinct(names: Mapping[str, str]) -> dict[str, str]:
    """Return a name for each id: its own, with the beginning of the id where another worker has the same, and
    the id where it has none."""
    held = Counter(names.values())
    return {
        worker: (name if held[name] == 1 else f"{name} ({worker[:SHOWN_OF_ID]})") if name else worker
        for worker, name in names.items()
    }


def with_names(text: str, names: Mapping[str, str]) -> str:
    """Return ``text`` with every id of ``names`` replaced by its name, "NAME (ID)" too."""
    for worker in dict.fromkeys(_ID.findall(text)):
        name = names.get(worker)
        if name:
            twice = sum(other == name for other in names.values()) > 1
            shown = f"{name} ({worker[:SHOWN_OF_ID]})" if twice else name
            text = text.replace(f"{name} ({worker})", shown).replace(worker, shown)
    return text
