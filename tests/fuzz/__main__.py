"""`python -m tests.fuzz`: hostile ops for as long, or as many a op, as is asked.

python -m tests.fuzz --seconds 3600              an hour, by a seed that is printed
python -m tests.fuzz --seed 7 --rounds 20        20 cases of each op
python -m tests.fuzz --op lstm --op _weight_norm --rounds 500
python -m tests.fuzz --case '["aten.div.Tensor_mode", ...]'    one that was found
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator

from tests.fuzz.case import Case, case_of
from tests.fuzz.generate import targets
from tests.fuzz.supervisor import CHECKING, Finding, Report, Supervisor, drawn

ENOUGH = 20  # cases of an op that reach its kernel


def main() -> int:
    """Run; 0 when nothing was found, 1 otherwise."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="default: drawn, and printed")
    parser.add_argument("--seconds", type=float, help="begin no case after this long")
    parser.add_argument(
        "--rounds", type=int, help="cases of each op; default 20, or as many as fit --seconds"
    )
    parser.add_argument(
        "--op", action="append", default=[], help="only ops whose name contains this; again and again"
    )
    parser.add_argument("--case", action="append", default=[], help="a case as JSON, as a finding shows it")
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    print(f"seed {seed}; {CHECKING or 'no checking allocator on this system'}", flush=True)
    with Supervisor(_show_finding) as supervisor:
        report = supervisor.run(_progress(_lines(options, seed)))
    _show(report)
    if options.json:
        print(json.dumps(_summary(report, seed)))
    return 1 if report.findings else 0


def _lines(options: argparse.Namespace, seed: int) -> Iterator[tuple[str, str, Case]]:
    if options.case:
        for text in options.case:
            case = case_of(text)
            yield case.target, case.text(), case
        return
    ends_s = time.monotonic() + options.seconds if options.seconds else float("inf")
    rounds = options.rounds if options.rounds or options.seconds else ENOUGH
    numbers = range(rounds) if rounds else itertools.count()
    for line in drawn(seed, targets(options.op), numbers):
        if time.monotonic() > ends_s:
            return
        yield line


def _progress(lines: Iterator[tuple[str, str, Case]]) -> Iterator[tuple[str, str, Case]]:
    said_s = time.monotonic()
    for at, line in enumerate(lines):
        if time.monotonic() - said_s > 30.0:
            said_s = time.monotonic()
            print(f"{at} cases", file=sys.stderr, flush=True)
        yield line


def _show(report: Report) -> None:
    names = report.reached
    enough = sum(count >= ENOUGH for count in names.values())
    print(f"{report.cases} cases: " + ", ".join(f"{n} {s}" for s, n in report.status.most_common()))
    print(f"{enough} of {len(names)} ops reached by {ENOUGH} cases or more")
    for name, count in sorted(names.items(), key=lambda item: item[1]):
        if count < ENOUGH:
            print(f"  {count:3d} {name}: {report.refusals.get(name, '')[:160]}")


def _show_finding(finding: Finding) -> None:
    print(f"{finding.kind}: {finding.detail}\n  python -m tests.fuzz --case '{finding.case}'", flush=True)


def _summary(report: Report, seed: int) -> dict[str, object]:
    return {
        "seed": seed,
        "cases": report.cases,
        **report.status,
        "ops": len(report.reached),
        "ops_reached": sum(count >= ENOUGH for count in report.reached.values()),
        "findings": [[f.kind, f.case, f.detail] for f in report.findings],
    }


if __name__ == "__main__":
    sys.exit(main())
