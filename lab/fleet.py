"""A scenario as the fleet file that ``atoll plan --fleet`` reads."""

from __future__ import annotations

import json

from lab.scenario import Scenario, Uplink

CORE_GFLOPS = 100.0  # float32 matmul of one core of the machines the lab was built on
CORE_MEMORY_GBPS = 10.0
OP_OVERHEAD_US = 20.0
DEFAULT_MEMORY_MIB = 8192.0
SEGMENT_HEADER_BYTES = 52  # IPv4 and TCP with time stamps
FRAMING_SHARE = 0.985  # what TLS, HTTP/2 and the product's own header leave


def fleet_of(scenario: Scenario, core_gflops: float = CORE_GFLOPS) -> str:
    """The TOML text: workers in join order, groups and lines, every direction's own rate and delay.

    A device's speed is its CPU share times one core's figures; where real ones matter, let the
    workers be probed. Loss is not in it: the planner reads rates as they are.
    """
    payload_share = (scenario.mtu - SEGMENT_HEADER_BYTES) / scenario.mtu * FRAMING_SHARE
    lines = [f"# {scenario.name}: {scenario.title}"]
    lines += ["[default]", f"payload_share = {payload_share:.4f}", ""]
    for group in scenario.groups:
        if any(scenario.host(name).group == group.name for name in scenario.join_order):
            lines += ["[[group]]", f"name = {json.dumps(group.name)}", *_uplink(group.uplink), ""]
    for name in scenario.join_order:
        lines += [*_device(scenario, name, core_gflops), ""]
    for source in scenario.join_order:
        for target in scenario.join_order:
            if source != target:
                link = scenario.link(source, target)
                ends = f"from = {json.dumps(source)}\nto = {json.dumps(target)}\none_way = true"
                lines += ["[[link]]", ends, f"mbit = {link.mbit:g}", f"ms = {link.ms:g}", ""]
    return "\n".join(lines)


def _device(scenario: Scenario, name: str, core_gflops: float) -> list[str]:
    host = scenario.host(name)
    share = host.cpu or 1.0
    lines = ["[[device]]", f"name = {json.dumps(name)}"]
    lines += [f"group = {json.dumps(host.group)}"] if host.group is not None else []
    lines += [
        f"memory_mib = {host.memory_mib or DEFAULT_MEMORY_MIB:g}",
        f"gflops = {share * core_gflops:g}",
        f"memory_gbps = {share * CORE_MEMORY_GBPS:g}",
        f"op_overhead_us = {OP_OVERHEAD_US / share:g}",
    ]
    if name == scenario.coordinator:
        lines.append("coordinator_ms = 0")
    else:
        rate = scenario.bottleneck_mbit(name, scenario.coordinator)
        delay_ms = scenario.round_trip_ms(name, scenario.coordinator) / 2
        lines += [f"coordinator_mbit = {rate:g}", f"coordinator_ms = {delay_ms:g}"]
    return lines + _uplink(host.uplink)


def _uplink(uplink: Uplink) -> list[str]:
    # A fleet file has no half-duplex lines: each direction gets the whole rate.
    rates = {"up_mbit": uplink.up_mbit, "down_mbit": uplink.down_mbit}
    if uplink.both_mbit is not None:
        rates = {key: min(rate or uplink.both_mbit, uplink.both_mbit) for key, rate in rates.items()}
    return [f"{key} = {rate:g}" for key, rate in rates.items() if rate is not None]
