"""``lab check``: every pair of a scenario measured against its file."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lab.tun import LabError
from lab.world import Lab

PORT = 5201
PATIENCE_S = 90.0


@dataclass(frozen=True, slots=True)
class PairFigures:
    """One direction, asked for and measured."""

    source: str
    target: str
    asked_mbit: float
    mbit: float
    asked_rtt_ms: float
    rtt_ms: float  # smallest of the exchanges
    reachable: bool  # False: the target accepts no inbound connection, and so it was

    @property
    def rate_share(self) -> float:
        """Measured payload rate over the file's."""
        return self.mbit / self.asked_mbit


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All pairs of one run."""

    pairs: tuple[PairFigures, ...]
    router_cpu_share: float  # of one core, while rates were measured
    router_cpu_s_per_gbit: float
    priority: str


def check(
    lab: Lab,
    window_s: float = 2.0,
    warmup_s: float = 1.0,
    told: Callable[[PairFigures], None] = lambda _: None,
) -> CheckReport:
    """Measure every ordered pair alone, one after the other."""
    names = lab.scenario.host_names
    meters = {host: _serve(lab, host) for host in names}
    pairs, start = [], lab.stats()
    for source in names:
        for target in names:
            if source != target:
                pairs.append(measure_pair(lab, source, target, window_s, warmup_s))
                told(pairs[-1])
    end = lab.stats()
    for meter in meters.values():
        lab.kill(meter)
        if meter.stdout is not None:
            meter.stdout.close()
    carried = sum(f.bytes for f in end.flows.values()) - sum(f.bytes for f in start.flows.values())
    cpu_s = end.router_cpu_s - start.router_cpu_s
    share = cpu_s / (end.at_s - start.at_s)
    return CheckReport(tuple(pairs), share, cpu_s / max(carried * 8e-9, 1e-9), end.priority)


def measure_pair(lab: Lab, source: str, target: str, window_s: float, warmup_s: float) -> PairFigures:
    """Rate and round trip from ``source`` to ``target``; a meter must be serving in the target."""
    asked, rtt = lab.scenario.bottleneck_mbit(source, target), lab.scenario.round_trip_ms(source, target)
    if not lab.scenario.host(target).inbound:
        return PairFigures(source, target, asked, 0.0, rtt, 0.0, reachable=False)
    address = lab.address(target)
    # A start on a long path overshoots; what was lost then is delivered late, all at once.
    warmup_s, window_s = max(warmup_s, 0.02 * rtt), max(window_s, 0.01 * rtt)
    trips = _meter(lab, source, "rtt", address, str(PORT), "10")
    rate = _meter(lab, source, "rate", address, str(PORT), f"{window_s}", f"{warmup_s}")
    return PairFigures(source, target, asked, rate["mbit"], rtt, trips["min_ms"], reachable=True)


def _serve(lab: Lab, host: str) -> subprocess.Popen[str]:
    meter = lab.python(host, "-m", "lab.meter", "serve", str(PORT), stdout=subprocess.PIPE, text=True)
    if meter.stdout is None or not meter.stdout.readline():
        raise LabError(f"the meter in {host} did not start")
    return meter


def _meter(lab: Lab, host: str, *arguments: str) -> dict[str, float]:
    process = lab.python(
        host, "-m", "lab.meter", *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, words = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        lab.kill(process)
        raise LabError(f"meter {' '.join(arguments)} in {host}: no result in {PATIENCE_S:g} s") from None
    if process.returncode:
        raise LabError(f"meter {' '.join(arguments)} in {host}: {words.strip().splitlines()[-1:]}")
    found: dict[str, float] = json.loads(out)
    return found


def worst(pairs: Sequence[PairFigures]) -> PairFigures | None:
    """The reachable pair farthest below its rate."""
    return min((pair for pair in pairs if pair.reachable), key=lambda pair: pair.rate_share, default=None)
