"""What a simulated worker keeps of what its stage sent, and how a newcomer asks for it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Wanted:
    """Who takes over a stage asks a neighbour what it sent in a step."""

    by: str
    job: str
    version: int
    step: int
    forwards: int  # or, in an exchange of replicas, whose part


@dataclass(frozen=True)
class Kept:
    """The answer; ``value`` None: it is not there any more."""

    sender: str
    job: str
    version: int
    step: int
    forwards: int  # or, in an exchange of replicas, whose part
    value: str | None


@dataclass
class SendLog:
    """Messages of one stage from step ``since`` on, of at most ``most`` steps."""

    job: str = ""
    since: int = 0
    most: int = 1000
    messages: dict[tuple[int, int], tuple[int, str]] = field(default_factory=dict)  # with their versions

    def add(self, version: int, step: int, forwards: int, value: str) -> None:
        """Keep a message; that of a step which began anew replaces the first one."""
        self.messages[step, forwards] = version, value

    def trim(self, replay_from: int, step: int) -> None:
        """Forget what nobody asks for any more, and what there is no room for after ``step``."""
        self.since = max(self.since, replay_from, step + 1 - self.most)
        self.messages = {key: held for key, held in self.messages.items() if key[0] >= self.since}

    def find(self, wanted: Wanted) -> str | None:
        """Return what was sent, None where it is not there."""
        version, value = self.messages.get((wanted.step, wanted.forwards), (0, None))
        return value if (wanted.job, wanted.version) == (self.job, version) else None
