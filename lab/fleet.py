"""A scenario as the fleet file that ``atoll plan --fleet`` reads."""

from __future__ import annotations

import json

from lab.scenario import Scenario, Uplink

CORE_GFLOPS = 25.0  # float32 matmul of one core of the machines the lab was built on
UNLIMITED_MBIT = 100_000.0
DEFAULT_MEMORY_MIB = 1024.0


def fleet_of(scenario: Scenario, core_gflops: float = CORE_GFLOPS) -> str:
    """The TOML text: workers in join order, shared uplinks, every ordered pair's own rate and delay.

    Speeds are CPU shares times ``core_gflops``; where real ones matter, let the workers be probed.
    """
    lines = [
        f"# {scenario.name}: {scenario.title}",
        f"# Written by: python -m lab show {scenario.name} --fleet",
        "",
    ]
    for name in scenario.join_order:
        host = scenario.host(name)
        lines += [
            "[[devices]]",
            f"name = {_text(name)}",
            f"memory_mib = {host.memory_mib or DEFAULT_MEMORY_MIB:g}",
        ]
        lines += [f"gflops = {(host.cpu or 1.0) * core_gflops:g}"]
        if host.group is not None:
            lines.append(f"site = {_text(host.group)}")
        if name != scenario.coordinator:
            rate = scenario.bottleneck_mbit(name, scenario.coordinator)
            delay_ms = scenario.round_trip_ms(name, scenario.coordinator) / 2
            lines.append(f"coordinator = {{ mbit = {rate:g}, ms = {delay_ms:g} }}")
        lines.append("")
    for group in scenario.groups:
        members = [name for name in scenario.join_order if scenario.host(name).group == group.name]
        lines += _uplink(group.name, members, group.uplink)
    for name in scenario.join_order:
        lines += _uplink(f"{name} line", [name], scenario.host(name).uplink)
    for source in scenario.join_order:
        for target in scenario.join_order:
            if source != target:
                link = scenario.link(source, target)
                ends = f"from = {_text(source)}\nto = {_text(target)}"
                lines += ["[[links]]", ends, f"mbit = {link.mbit:g}", f"ms = {link.ms:g}", ""]
    return "\n".join(lines)


def _text(value: str) -> str:
    return json.dumps(value)


def _uplink(name: str, members: list[str], uplink: Uplink) -> list[str]:
    if not members or (uplink.up_mbit is None and uplink.down_mbit is None):
        return []
    rates = (
        f"up_mbit = {uplink.up_mbit or UNLIMITED_MBIT:g}\ndown_mbit = {uplink.down_mbit or UNLIMITED_MBIT:g}"
    )
    return ["[[uplinks]]", f"name = {_text(name)}", f"members = {json.dumps(members)}", rates, ""]
