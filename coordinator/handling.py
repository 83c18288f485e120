"""What messages take of their ends: seconds around a stage's forwards and backwards.

Threads beside the computing one handle them. On a machine with a second core they run beside it; on a
part of a core they keep it waiting, as much longer as the part is smaller. A message costs each end
some CPU time whatever its size, and on a slow line more with every byte: what trickles in wakes its
reader for each packet, what comes fast is read many packets at a time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.fleet import Device
    from coordinator.workload import Workload

ACTION_S = 5e-4
"""Around an action without messages: waking, queues."""
MESSAGE_CPU_S = 1.2e-3  # of one end, a message of any size; with TLS
BYTE_CPU_S = 25e-9  # and a byte on a line of up to ...
PACKETS_BPS = 10e6  # ... this rate; on faster ones more packets are read at a time ...
LEAST_SHARE = 0.15  # ... down to this part of it: copies, encryption
SCALE_RANGE = (0.05, 1.0)
"""Of what training measured over what is foretold here. Never more: connections in use also take CPU time
as it passes, which a step's measurement counts as its messages', the more the slower the step."""


def message_cpu_s(n_bytes: float, rate_bps: float) -> float:
    """CPU seconds that one end spends on one message. Measured in benchmarks' lab on quota'd cores."""
    share = min(1.0, max(LEAST_SHARE, PACKETS_BPS / max(rate_bps, 1.0)))
    return MESSAGE_CPU_S + n_bytes * BYTE_CPU_S * share


def action_seconds(cpu_s: float, device: Device) -> float:
    """Seconds around one action whose messages take ``cpu_s``; a device that has not told its cores
    (0) is taken for one with enough of them."""
    held_up = cpu_s / device.cores * min(1.0, 2.0 - device.cores) if 0.0 < device.cores < 2.0 else 0.0
    return (ACTION_S + held_up) * device.handling_scale


def handled(work: Workload, devices: Sequence[Device]) -> Workload:
    """``work`` with the seconds that its messages take around the actions; ``devices`` by stage."""
    cpu_s = [0.0] * len(work.stages)
    for hop in (*work.forward, *work.backward):
        taken = message_cpu_s(hop.n_bytes, work.routes[hop.source, hop.target].rate_bps)
        cpu_s[hop.source] += taken
        cpu_s[hop.target] += taken
    # Of a micro-batch's forward and backward, which one is not told apart.
    stages = tuple(
        replace(stage, action_s=action_seconds(cpu / 2, device))
        for stage, cpu, device in zip(work.stages, cpu_s, devices, strict=True)
    )
    return replace(work, stages=stages)
