"""Scenarios: a small internet described in a TOML file, resolved to one Link per ordered pair.

A link's figures are one direction's: ``mbit`` (10^6 bits of IP packets per second), ``ms``
(one-way delay), ``loss`` (share of packets, each on its own) and ``buffer_ms`` (the longest a
packet may wait for the link before it is dropped). A host or a group may have an *uplink*: a
rate up and a rate down that all its flows share, or one rate that both directions share. A
group's uplink is crossed only by traffic that leaves or enters the group. The path of a packet is

    sender's up -> sender's group up -> the pair's own rate -> delay
    -> receiver's group down -> receiver's down
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from atoll.errors import UsageError

SHIPPED = Path(__file__).parent / "scenarios"


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two hosts."""

    mbit: float  # > 0
    ms: float = 0.0  # one way
    loss: float = 0.0  # [0, 1)
    buffer_ms: float = 200.0


@dataclass(frozen=True, slots=True)
class Uplink:
    """Rates shared by all flows of a host or a group; None is not limited."""

    up_mbit: float | None = None
    down_mbit: float | None = None
    both_mbit: float | None = None  # up and down together: a half-duplex line
    buffer_ms: float = 200.0

    def up(self, owner: str) -> list[tuple[str, float | None, float]]:
        """The limits on the way out, each (server name, mbit, buffer_ms)."""
        return [
            (f"{owner}:up", self.up_mbit, self.buffer_ms),
            (f"{owner}:both", self.both_mbit, self.buffer_ms),
        ]

    def down(self, owner: str) -> list[tuple[str, float | None, float]]:
        """The limits on the way in."""
        return [
            (f"{owner}:both", self.both_mbit, self.buffer_ms),
            (f"{owner}:down", self.down_mbit, self.buffer_ms),
        ]


@dataclass(frozen=True, slots=True)
class Group:
    """Hosts behind one gateway: an island."""

    name: str
    uplink: Uplink = Uplink()


@dataclass(frozen=True, slots=True)
class Host:
    """One machine of the scenario."""

    name: str
    group: str | None = None
    cpu: float | None = None  # share of one core; None is not limited
    memory_mib: float | None = None  # the planner's budget for training state, not enforced
    inbound: bool = True  # False: nobody can open a connection to it
    threads: int = 1  # torch threads
    worker: bool = True  # False: a host for the coordinator alone
    uplink: Uplink = Uplink()


@dataclass(frozen=True, slots=True)
class Scenario:
    """A whole world; ``links`` holds every ordered pair of hosts."""

    name: str
    hosts: tuple[Host, ...]
    groups: tuple[Group, ...]
    links: Mapping[tuple[str, str], Link]
    coordinator: str
    join_order: tuple[str, ...]
    title: str = ""
    notes: str = ""
    congestion: str = "bbr"
    mtu: int = 9000
    seed: int = 1
    host_by_name: Mapping[str, Host] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "host_by_name", {host.name: host for host in self.hosts})

    def host(self, name: str) -> Host:
        """The host of that name; UsageError names those there are."""
        if name not in self.host_by_name:
            raise UsageError(f"no host {name!r} in scenario {self.name}; hosts: {', '.join(self.host_names)}")
        return self.host_by_name[name]

    @property
    def host_names(self) -> tuple[str, ...]:
        """All hosts in file order."""
        return tuple(self.host_by_name)

    def group(self, host: str) -> Group | None:
        """The group a host belongs to."""
        name = self.host(host).group
        return next((group for group in self.groups if group.name == name), None)

    def link(self, source: str, target: str) -> Link:
        """The pair's own link, shared uplinks aside."""
        self.host(source), self.host(target)
        return self.links[source, target]

    def path(self, source: str, target: str) -> tuple[tuple[str, float, float], ...]:
        """The rate limits a packet meets, in order: (server name, mbit, buffer_ms)."""
        sender, receiver = self.host(source), self.host(target)
        out_group, in_group = self.group(source), self.group(target)
        crosses = sender.group != receiver.group or sender.group is None
        pair = self.link(source, target)
        limits = sender.uplink.up(f"host:{source}")
        if crosses and out_group is not None:
            limits += out_group.uplink.up(f"group:{out_group.name}")
        limits.append((f"pair:{source}>{target}", pair.mbit, pair.buffer_ms))
        if crosses and in_group is not None:
            limits += in_group.uplink.down(f"group:{in_group.name}")
        limits += receiver.uplink.down(f"host:{target}")
        return tuple((name, mbit, buffer_ms) for name, mbit, buffer_ms in limits if mbit is not None)

    def bottleneck_mbit(self, source: str, target: str) -> float:
        """The rate one flow alone can reach."""
        return min(mbit for _, mbit, _ in self.path(source, target))

    def round_trip_ms(self, a: str, b: str) -> float:
        """The two one-way delays; queues and serialisation come on top."""
        return self.link(a, b).ms + self.link(b, a).ms

    @property
    def cpu_total(self) -> float:
        """Sum of the quotas, in cores."""
        return sum(host.cpu or 0.0 for host in self.hosts)


def find_scenario(name_or_path: str | Path) -> Path:
    """The file of a shipped scenario (by name) or any path; UsageError lists the shipped ones."""
    path = Path(name_or_path)
    if path.suffix == ".toml" and path.is_file():
        return path
    shipped = SHIPPED / f"{name_or_path}.toml"
    if shipped.is_file():
        return shipped
    raise UsageError(
        f"no scenario {str(name_or_path)!r}; give a .toml file or one of: {', '.join(shipped_names())}"
    )


def shipped_names() -> list[str]:
    """Names of the scenarios in lab/scenarios."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))
