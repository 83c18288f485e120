"""What the owner is sent, with workers by name: an id alone is an address, one among words is for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from atoll.worker_names import is_id, with_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from coordinator.membership.roster import Roster

Sent = TypeVar("Sent", bound=Any)


def names_of(roster: Roster) -> dict[str, str]:
    """Return the name of each worker that the coordinator knows, by id."""
    return {worker: known.introduction.name for worker, known in roster.workers.items()}


def in_names(message: Sent, names: Mapping[str, str]) -> Sent:
    """Replace ids among words by names in every text of a message, and return it."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING:
            if isinstance(value, str):
                if (text := spoken(value, names)) != value:
                    setattr(message, field.name, text)
            else:
                value[:] = [spoken(text, names) for text in value]
        elif field.type == field.TYPE_MESSAGE and not _is_map(field):
            for inner in value if hasattr(value, "append") else (value,):
                in_names(inner, names)
    return message


def spoken(text: str, names: Mapping[str, str]) -> str:
    """Return ``text`` with names for ids, unless it is an id and nothing else."""
    return text if is_id(text) else with_names(text, names)


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry
