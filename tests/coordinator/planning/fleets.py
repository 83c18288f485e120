"""Random and named fleets for planner tests."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from coordinator.planning.costs.fleet import TCP_SHARE, Device, Fleet, LinkEstimate, Uplink

MIB = 2**20


def random_fleet(seed: int, n: int, memory_mib: tuple[float, float] = (50, 200)) -> Fleet:
    """``n`` devices of different speed on different lines, some behind one uplink."""
    draw = random.Random(seed)
    devices = tuple(
        Device(
            f"w{i}",
            int(draw.uniform(*memory_mib) * MIB),
            gflops={"": draw.uniform(2.0, 16.0)},
            memory_gbps=draw.uniform(2.0, 10.0),
            coordinator=LinkEstimate(1e8, draw.uniform(0.001, 0.05)),
        )
        for i in range(n)
    )
    rate = np.array([[10 ** draw.uniform(6.5, 9.0) for _ in range(n)] for _ in range(n)])
    delay = np.array([[draw.uniform(0.0005, 0.06) for _ in range(n)] for _ in range(n)])
    uplinks = [
        Uplink(f"w{i}", (f"w{i}",), 10 ** draw.uniform(7, 8.5), 10 ** draw.uniform(7, 8.5)) for i in range(n)
    ]
    if n >= 3:
        members = tuple(f"w{i}" for i in sorted(draw.sample(range(n), 2)))
        uplinks.append(Uplink("home", members, 10 ** draw.uniform(6.8, 8), 10 ** draw.uniform(6.8, 8)))
    return Fleet(devices, rate, (delay + delay.T) / 2, tuple(uplinks))


def two_islands(memory_mib: float = 40.0) -> Fleet:
    """Two fast and two slow devices that joined alternately; 8 Mbit/s between the islands."""
    names = ("fast1", "slow1", "fast2", "slow2")
    devices = tuple(
        Device(
            name,
            int(memory_mib * MIB),
            gflops={"": 8.0 if name[0] == "f" else 4.0},
            memory_gbps=4.0,
            coordinator=LinkEstimate(1e8, 0.005 if name[0] == "f" else 0.045),
        )
        for name in names
    )
    near = np.array([[a[0] == b[0] for b in names] for a in names])
    uplinks = (Uplink("fast", ("fast1", "fast2"), 8e6, 8e6), Uplink("slow", ("slow1", "slow2"), 8e6, 8e6))
    return Fleet(devices, np.where(near, 200e6, 8e6), np.where(near, 0.005, 0.04), uplinks, TCP_SHARE)


def eight_hosts(slow: tuple[float, ...] = (5.0, 5.0, 5.0, 5.0)) -> Fleet:
    """Four devices of 10 GFLOP/s and four slower ones on parts of a core, joined alternately, 29 MiB each;
    8 Mbit/s between the islands."""
    names = tuple(f"{side}{i}" for i in range(4) for side in "ab")
    devices = tuple(
        Device(
            name,
            29 * MIB,
            gflops={"": 10.0 if name[0] == "a" else slow[int(name[1])]},
            cores=0.25 if name[0] == "a" else 0.125,
            coordinator=LinkEstimate(8e6, 0.001 if name[0] == "a" else 0.04),
        )
        for name in names
    )
    near = np.array([[a[0] == b[0] for b in names] for a in names])
    uplinks = tuple(Uplink(side, tuple(n for n in names if n[0] == side), 8e6, 8e6) for side in "ab")
    return Fleet(devices, np.where(near, 198e6, 7.9e6), np.where(near, 0.0015, 0.041), uplinks)


def islands(
    seed: int, n_islands: int, size: int, memory_mib: float, gflops: tuple[float, float] = (20.0, 60.0)
) -> tuple[Fleet, list[int]]:
    """Islands of ``size`` devices in random join order, and each device's island."""
    draw = np.random.default_rng(seed)
    n = n_islands * size
    home = np.empty(n, dtype=np.int64)
    home[draw.permutation(n)] = np.arange(n) // size
    near = home[:, None] == home[None, :]
    rate = np.where(near, 1e9, 2e7) * draw.uniform(0.7, 1.3, (n, n))
    delay = np.where(near, 0.001, 0.03) * draw.uniform(0.7, 1.3, (n, n))
    devices = tuple(
        Device(f"w{i}", int(memory_mib * MIB), gflops={"": float(draw.uniform(*gflops))}, memory_gbps=20.0)
        for i in range(n)
    )
    uplinks = tuple(
        Uplink(f"site{k}", tuple(f"w{i}" for i in np.flatnonzero(home == k)), 5e7, 5e7)
        for k in range(n_islands)
    )
    return Fleet(devices, rate, delay, uplinks), home.tolist()


def same_links(devices: Sequence[Device], bps: float, latency_s: float = 0.002) -> Fleet:
    """These devices with the same link between any two of them."""
    n = len(devices)
    apart = ~np.eye(n, dtype=bool)
    return Fleet(tuple(devices), np.where(apart, bps, np.inf), np.where(apart, latency_s, 0.0))
