"""``atoll``, with a planner that is told half of what stages take of memory.

python -m tests.e2e.half_planner serve ...
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coordinator.cli.main import main
from coordinator.membership.roster import Roster

honest = Roster._device


def half(self: Roster, *arguments: Any, **named: Any) -> Any:
    device = honest(self, *arguments, **named)
    return replace(device, memory_scale=device.memory_scale / 2)


if __name__ == "__main__":
    Roster._device = half  # type: ignore[method-assign]
    main()
