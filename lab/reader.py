"""Reads a scenario file: every key checked, every error says where and what would be right."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, cast

from atoll.errors import UsageError
from lab.scenario import Group, Host, Link, Scenario, Uplink, find_scenario

MAX_HOSTS = 250
CONGESTION = ("bbr", "reno", "cubic")
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,23}")
_MBIT = (0.01, 100_000.0)
_MS = (0.0, 10_000.0)


def read_scenario(name_or_path: str | Path) -> Scenario:
    """Read a shipped scenario by name, or any file; UsageError says what is wrong where."""
    path = find_scenario(name_or_path)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not a TOML file: {error}") from error
    return parse_scenario(document, path.stem, str(path))


def parse_scenario(document: Mapping[str, object], name: str, where: str = "scenario") -> Scenario:
    """The Scenario of a parsed TOML document; see docs/lab.md for the keys."""
    top = _Table(document, where)
    groups = tuple(_group(key, table) for key, table in top.tables("groups"))
    group_names = {group.name for group in groups}
    hosts = tuple(_host(key, table, group_names) for key, table in top.tables("hosts"))
    if not 1 <= len(hosts) <= MAX_HOSTS:
        raise UsageError(f"{where}: {len(hosts)} hosts; a scenario has 1 to {MAX_HOSTS}")
    names = [host.name for host in hosts]
    if clash := group_names & set(names):
        raise UsageError(f"{where}: {sorted(clash)[0]!r} is both a host and a group; rename one")
    workers = [host.name for host in hosts if host.worker]
    scenario = Scenario(
        name=top.text("name", name),
        hosts=hosts,
        groups=groups,
        links=_links(top, hosts),
        coordinator=top.choice("coordinator", names, names[0]),
        join_order=tuple(top.names("join_order", workers)),
        title=top.text("title", ""),
        notes=top.text("notes", "").strip(),
        congestion=top.choice("congestion", CONGESTION, "bbr"),
        mtu=int(top.number("mtu", 9000, 576, 65_000)),
        seed=int(top.number("seed", 1, 0, 2**31)),
    )
    top.finish()
    return scenario


class _Table:
    """A TOML table whose keys are taken one by one; what is left over is an error."""

    def __init__(self, table: Mapping[str, object], where: str) -> None:
        self.left = dict(table)
        self.known: list[str] = []
        self.where = where

    def take(self, key: str) -> object | None:
        self.known.append(key)
        return self.left.pop(key, None)

    def wrong(self, key: str, value: object, wanted: str) -> UsageError:
        return UsageError(f"{self.where}: {key} = {value!r}; wanted {wanted}")

    def number(self, key: str, default: float, low: float, high: float) -> float:
        value = self.optional(key, low, high)
        return default if value is None else value

    def optional(self, key: str, low: float, high: float) -> float | None:
        value = self.take(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.wrong(key, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self.take(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, value, "a text")
        return default if value is None else value

    def flag(self, key: str, default: bool) -> bool:
        value = self.take(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return default if value is None else value

    def choice(self, key: str, allowed: Iterable[str], default: str) -> str:
        value = self.text(key, default)
        if value not in (choices := list(allowed)):
            raise self.wrong(key, value, f"one of {', '.join(choices)}")
        return value

    def names(self, key: str, allowed: list[str]) -> list[str]:
        """A list naming each of ``allowed`` once, in any order; missing is their own order."""
        value = self.take(key)
        if value is None:
            return allowed
        if not isinstance(value, list) or sorted(map(str, value)) != sorted(allowed):
            raise self.wrong(key, value, f"every worker host once: {', '.join(allowed)}")
        return [str(item) for item in value]

    def table(self, key: str) -> _Table | None:
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, value, "a table")
        return _Table(cast("dict[str, object]", value), f"{self.where}: {key}")

    def tables(self, key: str) -> list[tuple[str, _Table]]:
        outer = self.table(key)
        if outer is None:
            return []
        for name in outer.left:
            if not _NAME.fullmatch(name):
                raise UsageError(
                    f"{outer.where}: name {name!r}; wanted lower-case letters, digits, - and _ (24)"
                )
        found = [(name, outer.table(name)) for name in list(outer.left)]
        return [(name, table) for name, table in found if table is not None]

    def finish(self) -> None:
        if self.left:
            known = ", ".join(sorted(set(self.known)))
            raise UsageError(f"{self.where}: unknown key {sorted(self.left)[0]!r}; known: {known}")


def _uplink(table: _Table) -> Uplink:
    return Uplink(
        up_mbit=table.optional("up_mbit", *_MBIT),
        down_mbit=table.optional("down_mbit", *_MBIT),
        both_mbit=table.optional("both_mbit", *_MBIT),
        buffer_ms=table.number("uplink_buffer_ms", 200.0, 1.0, _MS[1]),
    )


def _group(name: str, table: _Table) -> Group:
    group = Group(name, _uplink(table))
    table.finish()
    return group


def _host(name: str, table: _Table, groups: set[str]) -> Host:
    group = table.text("group", "") or None
    if group is not None and group not in groups:
        raise table.wrong(
            "group", group, f"a table in [groups]: {', '.join(sorted(groups)) or 'there is none'}"
        )
    host = Host(
        name=name,
        group=group,
        cpu=table.optional("cpu", 0.01, 256),
        memory_mib=table.optional("memory_mib", 1, 2**30),
        inbound=table.flag("inbound", True),
        threads=int(table.number("threads", 1, 1, 256)),
        worker=table.flag("worker", True),
        uplink=_uplink(table),
    )
    table.finish()
    return host


def _link(table: _Table, base: Link) -> Link:
    """``base`` with the table's figures; the buffer follows the delay unless it is given."""
    ms = table.number("ms", base.ms, *_MS)
    buffer_ms = table.optional("buffer_ms", 1.0, _MS[1])
    return Link(
        mbit=table.number("mbit", base.mbit, *_MBIT),
        ms=ms,
        loss=table.number("loss", base.loss, 0.0, 0.99),
        # Twice the round trip of a symmetric pair, as home routers have it or more.
        buffer_ms=max(200.0, 4 * ms) if buffer_ms is None else buffer_ms,
    )


def _links(top: _Table, hosts: tuple[Host, ...]) -> dict[tuple[str, str], Link]:
    """Every ordered pair: the default, then each entry of [[links]] in file order over it."""
    default = top.table("default") or _Table({}, f"{top.where}: default")
    base = _link(default, Link(mbit=100.0, ms=10.0))
    default.finish()
    pairs = {(a.name, b.name): base for a in hosts for b in hosts if a is not b}
    entries = top.take("links") or []
    if not isinstance(entries, list):
        raise top.wrong("links", entries, "a list of tables: [[links]]")
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            raise top.wrong("links", entry, "a table")
        table = _Table(cast("dict[str, object]", entry), f"{top.where}: link {number}")
        sources, targets, both_ways = _ends(table, hosts)
        # A set of ends that meets itself (an island's inside) has each direction anyway.
        chosen = {(a, b) for a in sources for b in targets if a != b}
        chosen |= {(b, a) for a, b in chosen} if both_ways else set()
        figures = {pair: _link(_Table(table.left, table.where), pairs[pair]) for pair in sorted(chosen)}
        pairs.update(figures)
        _link(table, base)
        table.finish()
    return pairs


def _ends(table: _Table, hosts: tuple[Host, ...]) -> tuple[list[str], list[str], bool]:
    """The two ends of a [[links]] entry as host lists; an end is a host or a group."""
    members: dict[str, list[str]] = {host.name: [host.name] for host in hosts}
    for host in hosts:
        if host.group is not None:
            members.setdefault(host.group, []).append(host.name)
    between = table.take("between")
    if between is not None:
        ends: list[object] = between if isinstance(between, list) else [between]
    else:
        ends = [table.take("from"), table.take("to")]
    inside = table.take("inside")
    if inside is not None:
        ends, between = [inside, inside], inside
    if len(ends) != 2 or not all(isinstance(end, str) and end in members for end in ends):
        raise table.wrong(
            "ends", ends, 'between = ["a", "b"], from/to or inside = "group", of known hosts or groups'
        )
    return members[str(ends[0])], members[str(ends[1])], between is not None


def with_link(scenario: Scenario, source: str, target: str, link: Link) -> Scenario:
    """The scenario after a live change of one direction."""
    scenario.link(source, target)
    return replace(scenario, links={**scenario.links, (source, target): link})


def dump_scenario(scenario: Scenario) -> dict[str, object]:
    """A resolved scenario as JSON values; ``undump_scenario`` is its inverse."""
    document = {field.name: getattr(scenario, field.name) for field in fields(scenario) if field.init}
    links = [[source, target, asdict(link)] for (source, target), link in scenario.links.items()]
    hosts, groups = [asdict(host) for host in scenario.hosts], [asdict(group) for group in scenario.groups]
    return document | {
        "links": links,
        "hosts": hosts,
        "groups": groups,
        "join_order": list(scenario.join_order),
    }


def undump_scenario(document: Mapping[str, Any]) -> Scenario:
    """The scenario of ``dump_scenario``; the lab's own files only, so shapes are trusted."""
    hosts = tuple(Host(**{**host, "uplink": Uplink(**host["uplink"])}) for host in document["hosts"])
    groups = tuple(Group(group["name"], Uplink(**group["uplink"])) for group in document["groups"])
    links = {(source, target): Link(**figures) for source, target, figures in document["links"]}
    order = tuple(document["join_order"])
    return Scenario(**{**document, "hosts": hosts, "groups": groups, "links": links, "join_order": order})
