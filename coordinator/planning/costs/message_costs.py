"""Cost of messages for their ends: seconds around a stage's forwards and backwards.

Threads beside the computing one handle them. On a machine with a second core they run beside it; on a
part of a core they keep it waiting, as much longer as the part is smaller. A message costs each end
some CPU time whatever its size, every further tensor in it a little more, and on a slow link every
byte. What trickles in wakes its reader for each packet, what comes fast is read many at a time.

What a message costs comes before it leaves, and after it has arrived. Its bytes are handled while they
travel: that keeps a stage that has other work from it, and costs one that waits for them nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from coordinator.planning.costs.quota import held_up_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.planning.costs.fleet import Device
    from coordinator.planning.costs.workload import StageLoad, Workload

ACTION_S = 5e-4
"""Around an action without messages: waking, queues."""
# CPU seconds, measured in the benchmarks' lab on an eighth to a half of a core, with TLS.
ACTION_CPU_S = 0.6e-3  # around an action without messages
MESSAGE_CPU_S = 0.8e-3  # of one end, all tensors of a hop; and ...
TENSOR_CPU_S = 0.2e-3  # ... every one but the first
BYTE_CPU_S = 17e-9  # and a byte on a link of up to ...
PACKETS_BPS = 15e6  # ... this rate; on faster ones more packets are read at a time ...
LEAST_SHARE = 0.09  # ... down to this part of it: copies, encryption
SCALE_RANGE = (0.05, 2.0)
"""Range of the ratio of training's measurement over the prediction here."""


def message_cpu_s(tensors: int = 1) -> float:
    """CPU seconds that one end spends on what a hop carries, but for its bytes."""
    return MESSAGE_CPU_S + (tensors - 1) * TENSOR_CPU_S


def bytes_cpu_s(n_bytes: float, rate_bps: float) -> float:
    """CPU seconds that one end spends on the bytes of a hop."""
    return n_bytes * BYTE_CPU_S * min(1.0, max(LEAST_SHARE, PACKETS_BPS / max(rate_bps, 1.0)))


def handled(work: Workload, devices: Sequence[Device]) -> Workload:
    """``work`` with the seconds that its messages take around the actions; ``devices`` by stage."""
    messages_s, bytes_s = [0.0] * len(work.stages), [0.0] * len(work.stages)
    for hop in (*work.forward, *work.backward):
        way = work.routes.get((hop.source, hop.target))
        if way is None:  # between two pieces of one device
            continue
        rate_bps = way.rate_bps
        for end in (hop.source, hop.target):
            messages_s[end] += message_cpu_s(hop.messages)
            bytes_s[end] += bytes_cpu_s(hop.n_bytes, rate_bps)

    def loaded(stage: StageLoad, at: int) -> StageLoad:
        # Of a micro-batch's forward and backward, which one is not told apart.
        device = devices[at]
        around_s = ACTION_S + held_up_s(ACTION_CPU_S + messages_s[at] / 2, device)
        after_s = held_up_s(bytes_s[at] / 2, device)
        scale = device.handling_scale
        return replace(stage, action_s=around_s * scale, bytes_s=after_s * scale)

    return replace(work, stages=tuple(loaded(stage, at) for at, stage in enumerate(work.stages)))
