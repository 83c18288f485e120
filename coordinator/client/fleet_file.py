"""Reads a fleet described in a file, for ``atoll plan --fleet``; docs/fleet-files.md has every key.

Unknown keys, names and impossible values are refused, each with the place and what would be right.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from atoll.errors import UsageError
from atoll.messages.from_worker import MAX_PROCESSES
from compressors.catalogue import CODECS
from coordinator.planning.costs.codec_costs import SPEED_RANGE
from coordinator.planning.costs.fleet import LOSS_HOURS, TCP_SHARE, Device, Fleet, LinkEstimate, Mesh, Uplink

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

MAX_DEVICES = 4096
MBIT = (0.01, 1e6)
MS = (0.0, 30_000.0)
_RATES = {
    "memory_mib": (8192.0, 1.0, 1e9),
    "memory_gbps": (10.0, 1e-3, 1e6),
    "op_overhead_us": (20.0, 0.0, 1e6),
    "coordinator_ms": (10.0, *MS),
    "coordinator_mbit": (100.0, *MBIT),
}
_DEFAULT_KEYS = {"mbit", "ms", "gflops", "codec_gbps", "payload_share", "loss_hours", *_RATES}
_DEVICE_KEYS = {
    "name", "group", "gflops", "codec_gbps", "up_mbit", "down_mbit", "devices", "inside_gbps", "inside_us",
    *_RATES,
}  # fmt: skip
_GROUP_KEYS = {"name", "mbit", "ms", "up_mbit", "down_mbit"}
_LINK_KEYS = {"from", "to", "mbit", "ms", "one_way"}

Table = Mapping[str, object]


def read_fleet(path: str | Path) -> Fleet:
    """The fleet described in ``path``; UsageError says what is wrong where."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"fleet file {path}: cannot be read ({error}); give a TOML file") from error
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"fleet file {path}: not TOML: {error}") from error
    return parse_fleet(document, str(path))


def parse_fleet(document: Table, where: str = "fleet") -> Fleet:
    """The fleet of a parsed document; UsageError says what is wrong where."""
    _only(document, {"default", "device", "group", "link"}, where)
    default = _table(document.get("default", {}), f"{where}: default")
    _only(default, _DEFAULT_KEYS, f"{where}: default")
    groups = _named(document, "group", _GROUP_KEYS, where)
    tables = _named(document, "device", _DEVICE_KEYS, where)
    if not 1 <= len(tables) <= MAX_DEVICES:
        raise UsageError(f"{where}: {len(tables)} devices; a fleet has 1 to {MAX_DEVICES} [[device]] entries")
    clash = set(groups) & set(tables)
    if clash:
        raise UsageError(f"{where}: {min(clash)!r} names both a device and a group; rename one")
    devices = tuple(_device(name, table, default, groups, where) for name, table in tables.items())
    members = {g: [i for i, d in enumerate(devices) if d.site == g] for g in groups}
    members.update({d.worker: [i] for i, d in enumerate(devices)})
    bandwidth, latency = _matrices(document, default, groups, members, len(devices), where)
    uplinks = _uplinks(tables, groups, members, devices, where)
    share = _number(default, "payload_share", f"{where}: default", TCP_SHARE, 0.01, 1.0)
    hours = _number(default, "loss_hours", f"{where}: default", LOSS_HOURS, 0.01, 1e6)
    return Fleet(devices, bandwidth, latency, uplinks, share, losses_per_s=1.0 / (3600.0 * hours))


def _device(name: str, table: Table, default: Table, groups: Mapping[str, Table], where: str) -> Device:
    here = f"{where}: device {name}"
    group = table.get("group", "")
    if not isinstance(group, str) or (group and group not in groups):
        raise UsageError(f"{here}: group {group!r} is not one of {sorted(groups)}")
    value = {}
    for key, (standard, low, high) in _RATES.items():
        usual = _number(default, key, f"{where}: default", standard, low, high)
        value[key] = _number(table, key, here, usual, low, high)
    mesh = _mesh(table, here)
    return Device(
        mesh=mesh,
        worker=name,
        memory_limit_bytes=int(value["memory_mib"] * 2**20) * (mesh.size if mesh else 1),
        name=name,
        site=group,
        gflops=_gflops(table.get("gflops", default.get("gflops", 50.0)), here),
        memory_gbps=value["memory_gbps"],
        op_overhead_s=value["op_overhead_us"] * 1e-6,
        coordinator=LinkEstimate(value["coordinator_mbit"] * 1e6, value["coordinator_ms"] * 1e-3),
        codec_speeds={
            **_codec_speeds(default.get("codec_gbps", {}), f"{where}: default"),
            **_codec_speeds(table.get("codec_gbps", {}), here),
        },
    )


def _mesh(table: Table, here: str) -> Mesh | None:
    """The devices of one member: how many, and how fast they are joined."""
    count = _number(table, "devices", here, 1.0, 1.0, float(MAX_PROCESSES))
    if count != int(count):
        raise UsageError(f"{here}: devices = {count:g}; give a whole number")
    rate = _number(table, "inside_gbps", here, 10.0, 1e-3, 1e5)
    latency_us = _number(table, "inside_us", here, 20.0, 0.0, 1e6)
    return Mesh(int(count), latency_us * 1e-6, rate * 1e9) if count > 1 else None


def _gflops(value: object, here: str) -> dict[str, float]:
    rates: Mapping[str, object] = value if isinstance(value, Mapping) else {"": value}
    found: dict[str, float] = {}
    for name, rate in rates.items():
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 1e-3 <= rate <= 1e7:
            raise UsageError(f"{here}: gflops {name} = {rate!r}; give a number from 0.001 to 1e7")
        found[str(name)] = float(rate)
    return found


def _codec_speeds(value: object, here: str) -> dict[str, tuple[float, float]]:
    """Codec -> bytes/s of (encoding, decoding)."""
    low, high = (bound / 1e9 for bound in SPEED_RANGE)
    found: dict[str, tuple[float, float]] = {}
    for name, pair in _table(value, f"{here}: codec_gbps").items():
        if name not in CODECS:
            raise UsageError(f"{here}: codec_gbps names {name!r}; codecs are {', '.join(sorted(CODECS))}")
        rates = pair if isinstance(pair, Sequence) and len(pair) == 2 else ()
        good = [
            r for r in rates if isinstance(r, int | float) and not isinstance(r, bool) and low <= r <= high
        ]
        if len(good) != 2:
            raise UsageError(
                f"{here}: codec_gbps {name} = {pair!r}; give [encode, decode] in GB/s, each from {low:g} "
                f"to {high:g}"
            )
        found[name] = (good[0] * 1e9, good[1] * 1e9)
    return found


def _matrices(
    document: Table,
    default: Table,
    groups: Mapping[str, Table],
    members: Mapping[str, Sequence[int]],
    n: int,
    where: str,
) -> tuple[Floats, Floats]:
    here = f"{where}: default"
    bandwidth = np.full((n, n), _number(default, "mbit", here, 100.0, *MBIT) * 1e6)
    latency = np.full((n, n), _number(default, "ms", here, 20.0, *MS) * 1e-3)

    def put(sources: Sequence[int], targets: Sequence[int], table: Table, place: str) -> None:
        at = np.ix_(sources, targets)
        if "mbit" in table:
            bandwidth[at] = _number(table, "mbit", place, 0.0, *MBIT) * 1e6
        if "ms" in table:
            latency[at] = _number(table, "ms", place, 0.0, *MS) * 1e-3

    for name, table in groups.items():
        put(members[name], members[name], table, f"{where}: group {name}")
    for i, entry in enumerate(_entries(document, "link", where)):
        place = f"{where}: link {i + 1}"
        _only(entry, _LINK_KEYS, place)
        ends = []
        for key in ("from", "to"):
            if entry.get(key) not in members:
                raise UsageError(f"{place}: {key} = {entry.get(key)!r}; name a device or group of this file")
            ends.append(members[str(entry[key])])
        put(ends[0], ends[1], entry, place)
        if not entry.get("one_way", False):
            put(ends[1], ends[0], entry, place)
    np.fill_diagonal(bandwidth, inf)
    np.fill_diagonal(latency, 0.0)
    return bandwidth, latency


def _uplinks(
    tables: Mapping[str, Table],
    groups: Mapping[str, Table],
    members: Mapping[str, Sequence[int]],
    devices: Sequence[Device],
    where: str,
) -> tuple[Uplink, ...]:
    found = []
    for kind, named in (("device", tables), ("group", groups)):
        for name, table in named.items():
            if "up_mbit" in table or "down_mbit" in table:
                place = f"{where}: {kind} {name}"
                up = _number(table, "up_mbit", place, inf, *MBIT) * 1e6
                down = _number(table, "down_mbit", place, inf, *MBIT) * 1e6
                found.append(Uplink(name, tuple(devices[i].worker for i in members[name]), up, down))
    return tuple(found)


def _named(document: Table, kind: str, keys: set[str], where: str) -> dict[str, Table]:
    found: dict[str, Table] = {}
    for i, table in enumerate(_entries(document, kind, where)):
        name = table.get("name")
        if not isinstance(name, str) or not name or len(name) > 64:
            raise UsageError(f"{where}: {kind} {i + 1} needs a name of 1 to 64 letters, not {name!r}")
        if name in found:
            raise UsageError(f"{where}: two entries [[{kind}]] are named {name!r}; rename one")
        _only(table, keys, f"{where}: {kind} {name}")
        found[name] = table
    return found


def _entries(document: Table, kind: str, where: str) -> list[Table]:
    entries = document.get(kind, [])
    if not isinstance(entries, list):
        raise UsageError(f"{where}: write [[{kind}]], one for each, not [{kind}]")
    return [_table(entry, f"{where}: {kind}") for entry in entries]


def _table(value: object, where: str) -> Table:
    if not isinstance(value, Mapping):
        raise UsageError(f"{where}: expected a table, not {value!r}")
    return value


def _only(table: Table, keys: set[str], where: str) -> None:
    unknown = sorted(set(table) - keys)
    if unknown:
        raise UsageError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(sorted(keys))}")


def _number(table: Table, key: str, where: str, default: float, low: float, high: float) -> float:
    value = table.get(key, default)
    if key not in table:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise UsageError(f"{where}: {key} = {value!r}; give a number from {low:g} to {high:g}")
    return float(value)
