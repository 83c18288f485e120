"""A line that falls from 50 to 5 Mbit/s and rises again while a job trains over it.

Two workers train a GPT cut in two with `--compress auto`. At two steps of the run the lab changes
the line, which nobody is told; the trace shows what the run makes of it: the rate that training's
own transfers show, the codecs, and the seconds of each step. Steps are counted from the
one in flight when the line changes.

  python -m benchmarks.link_adaptation --json
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.harness import (
    CommandFailed,
    LabFleet,
    execute,
    fitting,
    machine,
    need_lab,
    parser,
    settings_options,
    steady,
)

SCENARIO = "changing_line"
SLOW_AT, FAST_AT, STEPS = 16, 44, 84
FAST_MBIT, SLOW_MBIT = 50.0, 5.0
SETTINGS = ("LENGTH=128", "N_MICRO=8", "eval_batches=0", "LEARNING_RATE=3e-4")


@dataclass(frozen=True)
class Seen:
    """One link in one committed step."""

    codec: str
    ratio: float
    measured_mbit: float
    sent_bytes: int
    dense_bytes: int
    reason: str


@dataclass
class Trace:
    """What a run showed, by steps committed."""

    changes: list[tuple[int, float]] = field(default_factory=list)  # (steps committed, Mbit/s)
    links: dict[int, dict[str, Seen]] = field(default_factory=dict)
    step_s: list[float] = field(default_factory=list)
    log: list[dict[str, Any]] = field(default_factory=list)  # link.changed
    judged: list[dict[str, Any]] = field(default_factory=list)  # links.judged

    def wire(self, step: int) -> tuple[tuple[str, float], ...]:
        """Codec and ratio of every link after ``step`` steps, as last heard."""
        known = max((s for s in self.links if s <= step), default=None)
        return (
            () if known is None else tuple((x.codec, x.ratio) for _, x in sorted(self.links[known].items()))
        )

    def first_change_after(self, step: int) -> int | None:
        """Steps from ``step`` to the first step that runs with other codecs."""
        firsts = [line["first_step"] for line in self.log if line["first_step"] > step]
        return min(firsts) - step if firsts else None


def run(fleet: LabFleet, job: str, compress: str, settings: tuple[str, ...], steps: int = STEPS) -> Trace:
    """Train; change the line at its steps; return the trace."""
    a, b = fleet.scenario.join_order
    options = settings_options((*settings, f"steps={steps}"))
    submitted = fleet.atoll(
        "submit", job, "--partitioner", "even", "--compress", compress, *options, "--detach", "--json"
    )
    name = submitted["job"]
    trace, due = Trace(), [(FAST_AT, FAST_MBIT), (SLOW_AT, SLOW_MBIT)]
    last: dict[str, Any] = {}
    for update in watch(fleet, name):
        last = update
        while due and update["step"] >= due[-1][0]:
            _, mbit = due.pop()
            fleet.lab.set_link(a, b, mbit=mbit)
            trace.changes.append((update["step"], mbit))
        if update["links"]:
            trace.links[update["step"]] = {
                f"{fleet_name(fleet, x['source'])}>{fleet_name(fleet, x['target'])}": Seen(
                    x["codec"],
                    x["ratio"],
                    round(x["measured_bps"] / 1e6, 2),
                    int(x["bytes_per_step"]),
                    int(x["dense_bytes_per_step"]),
                    x["reason"],
                )
                for x in update["links"]
            }
    if last.get("state") != "finished":
        raise CommandFailed(
            f"{name} ended {last.get('state')}: {last.get('reason')} {fleet.log('coordinator')}"
        )
    trace.step_s = fleet._metrics(name)["step_s"]
    lines = fleet._lines("logs", name, "--json")
    trace.log = [_fields(line) for line in lines if line["event"] == "link.changed"]
    trace.judged = [_fields(line) for line in lines if line["event"] == "links.judged"]
    return trace


def watch(fleet: LabFleet, job: str) -> Iterator[dict[str, Any]]:
    """The updates of a job as they come."""
    with fleet._command("watch", job, "--json") as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)


def fleet_name(fleet: LabFleet, worker: str) -> str:
    """The host of a worker id."""
    if not hasattr(fleet, "names_seen"):
        fleet.names_seen = {w["worker"]: w["name"] for w in fleet.status()["workers"]}  # type: ignore[attr-defined]
    return str(fleet.names_seen.get(worker, worker))  # type: ignore[attr-defined]


def _fields(line: dict[str, Any]) -> dict[str, Any]:
    found = line.get("fields") or json.loads(line.get("fields_json") or "{}")
    return dict(found)


def settled(trace: Trace, start: int, end: int) -> int | None:
    """Steps from ``start`` until the codecs are those of step ``end``; None while none were heard."""
    last = trace.wire(end)
    heard = [step for step in sorted(trace.links) if start <= step <= end]
    others = [step for step in heard if trace.wire(step) != last]
    if not heard:
        return None
    return (max(others) + 1 if others else start) - start


def label(seen: Seen) -> str:
    """topk:31.2, bf16, none."""
    return f"{seen.codec}:{seen.ratio:.3g}" if seen.ratio > 1 else seen.codec


def show(trace: Trace) -> None:
    """The trace as a table, one line a step."""
    print("step  line Mbit/s  step s  links: codec, measured Mbit/s, KB a step")
    line = FAST_MBIT
    changes = dict(trace.changes)
    for step, links in sorted(trace.links.items()):
        line = changes.get(step, line)
        took = trace.step_s[step - 1] if 0 < step <= len(trace.step_s) else float("nan")
        words = [
            f"{name} {label(x)} {x.measured_mbit:.1f} {x.sent_bytes // 1000}"
            for name, x in sorted(links.items())
        ]
        print(f"{step:>4}  {line:>11.0f}  {took:>6.2f}  {'   '.join(words)}")
    for entry in trace.log:
        print(
            f"from step {entry['first_step']}: {entry['before']} -> {entry['after']}: {entry['reason'][:200]}"
        )


def main() -> None:
    """Run it, print the trace, and with --json the figures."""
    options = parser(__doc__, scenario=SCENARIO, job="examples/gpt.py")
    options.add_argument("--compress", default="auto")
    options.add_argument("--set", action="append", default=[], help="job override, e.g. N_MICRO=4")
    args = options.parse_args()
    need_lab(args.json)
    rows = []
    for scenario in args.scenario or [SCENARIO]:
        with LabFleet(scenario) as fleet:
            usual = fitting((*SETTINGS, f"SEED={4711 + args.seed}"), args.job)
            trace = run(fleet, args.job, args.compress, (*usual, *args.set))
        show(trace)
        row = figures(trace)
        print(json.dumps(row, indent=1))
        rows.append({"scenario": scenario, **row, "trace": _plain(trace)})
    print(f"machine {machine()}, seed {args.seed}")
    if args.json:
        print(json.dumps(rows))


def figures(trace: Trace) -> dict[str, Any]:
    """How soon the codecs changed after each change of the line, and what a step took in each part."""
    (down, _), (up, _) = trace.changes
    return {
        "steps_to_first_change_down": trace.first_change_after(down),
        "steps_to_first_change_up": trace.first_change_after(up),
        "steps_to_last_change_down": settled(trace, down, up),
        "steps_to_last_change_up": settled(trace, up, len(trace.step_s)),
        "codecs": {
            "fast": trace.wire(down),
            "slow": trace.wire(up),
            "fast_again": trace.wire(len(trace.step_s)),
        },
        "step_s": {
            "fast": round(steady(trace.step_s[:down]), 3),
            "slow_before_change": round(max(trace.step_s[down : down + 6]), 3),
            "slow": round(steady(trace.step_s[up - 10 : up]), 3),
            "fast_again": round(steady(trace.step_s[-10:]), 3),
        },
        "changes": len(trace.log),
    }


def _plain(trace: Trace) -> dict[str, Any]:
    return {
        "changes": trace.changes,
        "step_s": trace.step_s,
        "links": {
            step: {name: asdict(x) for name, x in links.items()} for step, links in trace.links.items()
        },
        "log": trace.log,
    }


if __name__ == "__main__":
    execute(main)
