"""One heap of things to happen, and processes that may die, freeze and start anew."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random

Act = Callable[[], None]


def digest(*parts: object) -> str:
    """Return 64 hex digits that stand for these values."""
    return sha256(repr(parts).encode()).hexdigest()


@dataclass
class Clock:
    """Simulated time; what is due at the same moment happens in the order in which it was asked for."""

    seed: int
    now_s: float = 1000.0
    random: Random = field(init=False)
    story: list[tuple[float, str]] = field(default_factory=list)
    _heap: list[tuple[float, int, Act]] = field(default_factory=list)
    _asked: int = 0

    def __post_init__(self) -> None:
        self.random = Random(self.seed)

    def after(self, delay_s: float, act: Act) -> None:
        """Do something ``delay_s`` from now."""
        self._asked += 1
        heapq.heappush(self._heap, (self.now_s + max(0.0, delay_s), self._asked, act))

    def step(self, until_s: float) -> bool:
        """Do the next thing; False when nothing is due before ``until_s``."""
        if not self._heap or self._heap[0][0] > until_s:
            self.now_s = max(self.now_s, until_s)
            return False
        self.now_s, _, act = heapq.heappop(self._heap)
        act()
        return True

    def tell(self, text: str) -> None:
        """Add a line to the story."""
        self.story.append((self.now_s, text))

    def fingerprint(self) -> str:
        """Return a hash of the whole story: the same seed twice gives the same one."""
        return digest(*self.story)


@dataclass
class Process:
    """What runs as one operating system's process; ``life`` counts its starts."""

    clock: Clock
    name: str
    life: int = 0
    alive: bool = False
    frozen: bool = False
    _held: list[tuple[int, Act]] = field(default_factory=list)

    def start(self) -> None:
        """Begin a life; whatever an earlier one had asked for never happens."""
        self.life += 1
        self.alive, self.frozen, self._held = True, False, []

    def kill(self) -> None:
        """End at once, as by kill -9."""
        self.alive = False

    def freeze(self) -> None:
        """Stop as by SIGSTOP: nothing is noticed, nothing happens, sockets stay open."""
        self.frozen = True

    def thaw(self) -> None:
        """Go on with all that came due meanwhile."""
        self.frozen = False
        held, self._held = self._held, []
        for life, act in held:
            self._run(life, act)

    def after(self, delay_s: float, act: Act) -> None:
        """Do something ``delay_s`` from now, if this life lasts so long."""
        life = self.life
        self.clock.after(delay_s, lambda: self._run(life, act))

    def _run(self, life: int, act: Act) -> None:
        if not self.alive or life != self.life:
            return
        if self.frozen:
            self._held.append((life, act))
        else:
            act()
