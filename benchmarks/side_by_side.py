"""Five small jobs of three owners on six real workers, side by side and as they came, beside the simulator.

Two machines a home, each home behind one line. Each job trains alone first: its bits, and its seconds, of
which ``benchmarks.shared_fleet`` makes what it expects. Then all five are submitted in the same order under
``srsf`` and under ``fifo``. A third run is disturbed: a worker is killed, a sixth job that waits is
cancelled, the coordinator is killed and started again.

  python -m benchmarks.side_by_side --json
  python -m benchmarks.side_by_side --scale 0.2 --json    # fifth of the steps: bits and orderings alone

Wrong values: bits that differ from the job's own, a job that did not finish. Seconds are judged on a quiet
machine alone (``error`` and ``gain`` in the figures).
"""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from benchmarks.harness import (
    ROOT,
    CommandFailed,
    LabFleet,
    conclude,
    execute,
    fitting,
    machine,
    need_lab,
    parser,
)
from benchmarks.shared_fleet import Links, SharedFleet, TraceJob, at_most
from coordinator.planning.baselines import GIVEN_CUT
from coordinator.sharing.claims import Machine
from coordinator.sharing.policies import POLICIES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

    from lab.scenario import Scenario

SETTINGS = ("WIDTH=64", "LAYERS=4", "n_micro=4", "checkpoint_every=10", "spot_checks=0")
TRAINING = "training"
ENDED = ("finished", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class Small:
    """A job: whose, on how many workers, how many steps."""

    name: str
    owner: str
    workers: int
    steps: int


# The second needs more workers than the first leaves: under FIFO the short ones behind it wait for both.
JOBS = (
    Small("long", "alpha", 3, 300),
    Small("large", "beta", 4, 200),
    Small("three", "gamma", 3, 80),
    Small("one", "alpha", 1, 60),
    Small("two", "beta", 2, 60),
)
CANCELLED = Small("unwanted", "gamma", 4, 100)


@dataclass(slots=True)
class Ran:
    """Jobs of one run: names at the coordinator, seconds from submission to end, and what was seen."""

    jobs: dict[str, str] = field(default_factory=dict)
    submitted_s: dict[str, float] = field(default_factory=dict)
    ended_s: dict[str, float] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    at_once: int = 0  # most jobs that had workers at the same time
    begun: list[str] = field(default_factory=list)  # in the order of their first committed step
    crossing: dict[str, int] = field(default_factory=dict)  # bytes a step over its homes' busiest line

    def took_s(self) -> dict[str, float]:
        """Return by job the seconds from its submission to its end."""
        return {name: self.ended_s[name] - self.submitted_s[name] for name in self.ended_s}


class SharingFleet(LabFleet):
    """A fleet under a policy that trains one job file's model as several jobs; a host's group is its site."""

    def __init__(self, scenario: str, policy: str, job: str, settings: Sequence[str]) -> None:
        super().__init__(scenario)
        self._policy, self._job, self._settings = policy, job, settings

    def __enter__(self) -> Self:
        super().__enter__()
        owners = {one.owner for one in (*JOBS, CANCELLED)}
        self._tokens = {name: self.atoll("owner", "create", name, "--json")["token"] for name in owners}
        state, pipe = str(self.folder / "coordinator"), subprocess.PIPE
        command = [self.python, "-m", "benchmarks.small_jobs", state, self._job, *self._settings]
        started = self.lab.popen(
            self.home, command, stdin=pipe, stdout=pipe, text=True, env=self._environment(), cwd=ROOT
        )
        self._client = self._stack.enter_context(started)  # ends with its standard input
        positions = self._answer()["cuttable"]
        self._cuts = {one.workers: evenly(positions, one.workers) for one in (*JOBS, CANCELLED)}
        return self

    def _serve_options(self) -> list[str]:
        return ["--policy", self._policy]

    def _worker(self, host: str) -> list[str]:
        return [*super()._worker(host), "--site", self.scenario.host(host).group or host]

    def _ask(self, **asked: Any) -> dict[str, Any]:
        assert self._client.stdin is not None
        self._client.stdin.write(json.dumps(asked) + "\n")
        self._client.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._client.stdout is not None
        line = self._client.stdout.readline()
        if not line:
            raise CommandFailed(f"what submits jobs ended with {self._client.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def look(self, ran: Ran) -> dict[str, dict[str, Any]]:
        """Take in the state of a run's jobs; returns them by the run's own names."""
        names = {job: name for name, job in ran.jobs.items()}
        status = self.status()
        sites = {w["worker"]: self.scenario.host(w["name"]).group for w in status["workers"]}
        found = {names[j["job"]]: j for j in status["jobs"] if j["job"] in names}
        ran.at_once = max(
            ran.at_once, sum(bool(j["step"]) and j["state"] == TRAINING for j in found.values())
        )
        for name, job in found.items():
            ran.states[name] = job["state"]
            if job["step"] and name not in ran.begun:
                ran.begun.append(name)
            if job["state"] in ENDED:
                ran.ended_s.setdefault(name, time.time())
            if job["state"] == TRAINING and job["plan"]:
                ran.crossing[name] = crossing_bytes(job["plan"], sites)
        return found

    def begin(self, asked: Sequence[Small]) -> Ran:
        """Submit jobs one after the other."""
        ran, every = Ran(), (*JOBS, CANCELLED)
        for one in asked:
            lr = 1e-3 * (1 + [other.name for other in every].index(one.name))  # each has bits of its own
            options = {"token": self._tokens[one.owner], "cut": self._cuts[one.workers], "steps": one.steps}
            ran.jobs[one.name] = str(self._ask(submit=one.name, lr=lr, **options)["job"])
            ran.submitted_s[one.name] = time.time()
        return ran

    def finish(self, ran: Ran) -> Ran:
        """Wait until all have ended."""
        self._wait(lambda: bool(self.look(ran)) and len(ran.ended_s) == len(ran.jobs), "jobs", "coordinator")
        return ran

    def weights(self, job: str) -> dict[str, torch.Tensor]:
        """Return a job's result."""
        path = self.folder / f"{job}.safetensors"
        self._ask(export=job, to=str(path))
        return load_file(path)

    def lose(self, worker: str) -> None:
        """End all processes of a worker at once."""
        name = next(w["name"] for w in self.status()["workers"] if w["worker"] == worker)
        self.lab.kill(self._daemons.pop(1 + self.scenario.join_order.index(name)))

    def restart(self) -> None:
        """Kill the coordinator and start it again on its folder."""
        self.lab.kill(self._daemons.pop(0))
        self._serve()
        self._daemons.insert(0, self._daemons.pop())


def evenly(positions: Sequence[int], count: int) -> str:
    """Return the partitioner that makes so many even stages."""
    return GIVEN_CUT + ",".join(str(positions[len(positions) * at // count]) for at in range(1, count))


def crossing_bytes(plan: Mapping[str, Any], sites: Mapping[str, str | None]) -> int:
    """Return the most bytes a step that one site's line carries of a plan, in one direction."""
    lines = Counter[tuple[str | None, str]]()
    for link in plan["prediction"]["links"]:
        source, target = sites[link["source"]], sites[link["target"]]
        if source != target:
            lines[source, "up"] += int(link["bytes_per_step"])
            lines[target, "down"] += int(link["bytes_per_step"])
    return max(lines.values(), default=0)


# ---------------------------------------------------------------- the simulator


def expected(
    scenario: Scenario, policy: str, asked: Sequence[Small], alone: Mapping[str, float], ran: Ran
) -> dict[str, float]:
    """Return by job the seconds to its end as the simulator has them, from the seconds alone and the moments
    at which this run's jobs were submitted."""
    mbit = min(group.uplink.up_mbit or 1e3 for group in scenario.groups)
    links = Links(byte_s=8e-6 / mbit, eta_s=0.0, latency_s=0.02)
    first_s = min(ran.submitted_s.values())
    trace = []
    for one in asked:
        size, each_s = float(ran.crossing.get(one.name, 0)), alone[one.name] / one.steps
        sent_s = size * links.byte_s + links.latency_s if size else 0.0
        at_s, compute_s = ran.submitted_s[one.name] - first_s, max(each_s - sent_s, 0.1 * each_s)
        # Jobs without standbys give no workers to others.
        job = TraceJob(
            one.name, at_s, one.steps, compute_s, size, one.workers, one.workers, one.owner, stays=True
        )
        trace.append(job)
    machines = [Machine(host, scenario.host(host).group or host) for host in scenario.join_order]
    simulated = SharedFleet(
        trace, machines, POLICIES[policy], admits=at_most(len(asked)), links=links, together=False
    )  # fmt: skip
    return simulated.run()


# ---------------------------------------------------------------- runs


def differing(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that are not the same bits."""
    names = sorted({*found, *wanted})
    return [n for n in names if n not in found or n not in wanted or not torch.equal(found[n], wanted[n])]


def disturbed(fleet: SharingFleet, asked: Sequence[Small]) -> Ran:
    """Train all beside one that is cancelled, with a worker killed and the coordinator started again."""
    ran = fleet.begin([*asked, CANCELLED])
    longest = asked[0].name

    def goes_on(step: int) -> bool:
        return bool((found := fleet.look(ran).get(longest)) and found["step"] > step)

    fleet._wait(lambda: goes_on(5), "some steps", "coordinator")
    fleet._output("cancel", ran.jobs[CANCELLED.name])
    fleet.lose(fleet.look(ran)[longest]["stages"][-1]["worker"])
    fleet._wait(lambda: fleet.look(ran)[longest]["plan_version"] > 1, "another plan", "coordinator")
    before = fleet.look(ran)[longest]["step"]
    fleet.restart()
    fleet._wait(lambda: goes_on(before), "steps after the restart", "coordinator")
    return fleet.finish(ran)


@dataclass(slots=True)
class Comparison:
    """The runs' figures, and what is wrong with them."""

    asked: Sequence[Small]
    alone_s: dict[str, float] = field(default_factory=dict)
    bits: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def alone(self, fleet: SharingFleet) -> None:
        """Train each job by itself."""
        for one in self.asked:
            ran = fleet.finish(fleet.begin([one]))
            self.alone_s[one.name] = ran.took_s()[one.name]
            self.bits[one.name] = fleet.weights(ran.jobs[one.name])
            print(f"  alone  {one.name:<6} {self.alone_s[one.name]:8.1f} s", flush=True)

    def under(self, fleet: SharingFleet, policy: str) -> None:
        """Train all under a policy, and show their seconds beside the simulator's."""
        ran = fleet.finish(fleet.begin(self.asked))
        took_s, simulated = ran.took_s(), expected(fleet.scenario, policy, self.asked, self.alone_s, ran)
        for one in self.asked:
            real, thought = took_s[one.name], simulated[one.name]
            print(
                f"  {policy:<6} {one.name:<6} {one.owner:<6} {one.workers} workers {real:8.1f} s, "
                f"{thought:8.1f} simulated ({real / thought - 1.0:+.0%})",
                flush=True,
            )
        self.runs[policy] = {
            "took_s": {name: round(seconds, 2) for name, seconds in took_s.items()},
            "simulated_s": {name: round(seconds, 2) for name, seconds in simulated.items()},
            "mean_s": round(mean(took_s.values()), 2),
            "simulated_mean_s": round(mean(simulated.values()), 2),
            "error": round(max(abs(took_s[name] / simulated[name] - 1.0) for name in took_s), 3),
            "at_once": ran.at_once,
            "begun": ran.begun,
            "same_bits": self._same(fleet, ran, policy),
        }

    def hurt(self, fleet: SharingFleet) -> None:
        """Train all with what happens to a fleet in between."""
        ran = disturbed(fleet, self.asked)
        same = self._same(fleet, ran, "disturbed")
        self.runs["disturbed"] = {"same_bits": same, "states": ran.states}
        if ran.states.get(CANCELLED.name) != "cancelled":
            self.wrong.append(f"{CANCELLED.name} ended {ran.states.get(CANCELLED.name)}")
        print(f"  disturbed: {same} of {len(self.asked)} have their own bits, {ran.states}", flush=True)

    def _same(self, fleet: SharingFleet, ran: Ran, what: str) -> int:
        """Count the jobs that finished with the bits of themselves alone; note the others."""
        same = 0
        for one in self.asked:
            if ran.states.get(one.name) != "finished":
                self.wrong.append(f"{what}: {one.name} ended {ran.states.get(one.name)}")
            elif names := differing(fleet.weights(ran.jobs[one.name]), self.bits[one.name]):
                self.wrong.append(f"{what}: {one.name} has other bits in {', '.join(names[:3])}")
            else:
                same += 1
        return same


def main() -> int:
    """Print each job's seconds; exit code 1 where bits differ or a job did not finish."""
    options = parser(__doc__ or "", scenario="six_shared", job="examples/gpt.py")
    options.add_argument("--scale", type=float, default=1.0, help="times the steps of each job")
    args = options.parse_args()
    need_lab(args.json)
    scenario = (args.scenario or ["six_shared"])[0]
    settings = [*fitting(SETTINGS, args.job), f"seed={args.seed}", "eval_batches=0"]
    found = Comparison([replace(one, steps=max(10, round(args.scale * one.steps))) for one in JOBS])
    for policy in ("srsf", "fifo"):
        with SharingFleet(scenario, policy, args.job, settings) as fleet:
            fleet.finish(fleet.begin([found.asked[1]]))  # measures ops and links, which later jobs find
            if policy == "srsf":
                found.alone(fleet)
            found.under(fleet, policy)
            if policy == "srsf":
                found.hurt(fleet)
    runs = found.runs
    gain, simulated = (runs["fifo"][key] / runs["srsf"][key] for key in ("mean_s", "simulated_mean_s"))
    print(f"mean: {gain:.2f} times better than FIFO, {simulated:.2f} simulated", flush=True)
    figures = {
        "runs": runs,
        "alone_s": {name: round(seconds, 2) for name, seconds in found.alone_s.items()},
        "gain": round(gain, 3),
        "simulated_gain": round(simulated, 3),
        "machine": machine(),
        "seed": args.seed,
    }
    return conclude(figures, args.json, "; ".join(found.wrong))


if __name__ == "__main__":
    execute(main)
