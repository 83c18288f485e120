"""Runs cases in pairs of child processes and says what killed, hung or told them apart.

The two children of a pair differ in what freshly allocated memory holds (``MALLOC_PERTURB_``): a result
that differs was made of memory that was not the op's own. glibc's checking allocator is preloaded where it
exists, so that a write past a result's end ends the child.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.fuzz.case import Case
from tests.fuzz.shrink import smaller

CHECKING = next(
    (str(p) for p in Path("/").glob("lib/*/libc_malloc_debug.so.0")), ""
)  # glibc 2.34 and newer; MALLOC_CHECK_ alone does nothing there
PERTURBED = ("85", "170")
HANG_S = 30.0  # of the child's own processor time, for one case
IDLE_HANG_S = 300.0  # without any: it waits for something that never comes
SHRINK_TRIES = 30
RENEWED_AFTER = 10_000  # cases; what torch caches of each shape grows
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Finding:
    """A case that did what no op may: "died", "hung" or "differs"."""

    kind: str
    case: str  # JSON, as python -m tests.fuzz --case takes it
    detail: str


@dataclass(slots=True)
class Report:
    """What a run saw. ``reached``: by op, the cases that passed all checks and came to the kernel."""

    cases: int = 0
    status: Counter[str] = field(default_factory=Counter)
    reached: Counter[str] = field(default_factory=Counter)
    ran: Counter[str] = field(default_factory=Counter)
    refusals: dict[str, str] = field(default_factory=dict)  # op -> the last reason
    findings: list[Finding] = field(default_factory=list)


class Child:
    """One process that runs the cases it is given, one after another."""

    def __init__(self, perturb: str) -> None:
        environment = {**os.environ, "MALLOC_PERTURB_": perturb, "MALLOC_CHECK_": "3", "OMP_NUM_THREADS": "1"}
        if CHECKING:
            environment["LD_PRELOAD"] = CHECKING
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env=environment,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._in, self._out, self._err = self.process.stdin, self.process.stdout, self.process.stderr
        os.set_blocking(self._err.fileno(), False)
        self._read = b""  # of the child's output, not a whole line yet or not taken
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._out, selectors.EVENT_READ)

    def begin(self, line: str) -> None:
        """Name the next case."""
        with contextlib.suppress(BrokenPipeError):  # it died; ``result`` says so
            self._in.write(f"{line}\n".encode())
            self._in.flush()

    def result(self) -> tuple[str, str, bool]:
        """(status, detail, whether the op was reached) of the case begun: also "died" and "hung"."""
        reached = False
        while True:
            line = self._line()
            if line is None:
                return "hung", f"more than {HANG_S:g} s of processor time", reached
            if not line:
                code = self.process.wait()
                return "died", f"signal {-code}" if code < 0 else f"exit {code}: {self._errors()}", reached
            if line.startswith("reached"):
                reached = True
            elif line.startswith("done "):
                status, detail = json.loads(line[5:])
                return status, detail, reached

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self._selector.close()
        for stream in (self._in, self._out, self._err):
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _line(self) -> str | None:
        """The next line; "" at the end, None of a child that hangs."""
        started_s, waited_s = self._cpu_s(), time.monotonic()
        while b"\n" not in self._read:
            if self._selector.select(timeout=1.0):
                chunk = os.read(self._out.fileno(), 1 << 16)
                if not chunk:
                    return ""
                self._read += chunk
            elif self._cpu_s() - started_s > HANG_S or time.monotonic() - waited_s > IDLE_HANG_S:
                return None
        line, _, self._read = self._read.partition(b"\n")
        return line.decode(errors="replace")

    def _cpu_s(self) -> float:
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(times.user + times.system)

    def _errors(self) -> str:
        try:
            return (self._err.read() or b"")[-500:].decode(errors="replace")
        except BlockingIOError:
            return ""


class Supervisor:
    """Pairs of children, renewed when one dies; the last pair ends with the context."""

    def __init__(
        self, said: Callable[[Finding], None] = lambda finding: None, *, shrink_tries: int = SHRINK_TRIES
    ) -> None:
        self.report = Report()
        self._said, self._shrink_tries = said, shrink_tries
        self._pair: list[Child] = []
        self._given = 0  # cases, to this pair

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, lines: Iterable[tuple[str, str, Case]]) -> Report:
        """Run (op, line, case) one after another; a finding is repeated alone and made smaller."""
        self.report = Report()
        for target, line, case in lines:
            self._one(target, line, case)
        return self.report

    def close(self) -> None:
        """End the children."""
        for child in self._pair:
            child.close()
        self._pair = []

    def _one(self, target: str, line: str, case: Case) -> None:
        results = self._results(line)
        report = self.report
        report.cases += 1
        status, detail, reached = results[0]
        report.status[status] += 1
        report.reached[target] += reached
        report.ran[target] += status == "ran"
        if status == "refused":
            report.refusals[target] = detail
        kind, why = verdict(results)
        if kind:
            self._found(kind, why, case)

    def _results(self, line: str) -> list[tuple[str, str, bool]]:
        if self._given >= RENEWED_AFTER:
            self.close()
        self._given += 1
        if not self._pair:
            self._given = 0
            self._pair = [Child(perturb) for perturb in PERTURBED]
        for child in self._pair:
            child.begin(line)
        results = [child.result() for child in self._pair]
        if any(status in ("died", "hung") for status, _, _ in results):
            self.close()
        return results

    def _found(self, kind: str, why: str, case: Case) -> None:
        """Repeat alone; where that gives the same, shrink; else name the case it showed at."""
        self.close()
        if self._again(case) != kind:
            self._note(Finding(f"{kind}, not when repeated alone", case.text(), why))
            return
        tries = 0
        progress = True
        while progress and tries < self._shrink_tries:
            progress = False
            for candidate in smaller(case):
                tries += 1
                if self._again(candidate) == kind:
                    case, progress = candidate, True
                    break
                if tries >= self._shrink_tries:
                    break
        self._note(Finding(kind, case.text(), why))

    def _note(self, finding: Finding) -> None:
        self.report.findings.append(finding)
        self._said(finding)

    def _again(self, case: Case) -> str:
        return verdict(self._results(case.text()))[0]


def verdict(results: Sequence[tuple[str, str, bool]]) -> tuple[str, str]:
    """("", "") of a pair of results that are as they should be, else what is wrong, and how."""
    for status, detail, _ in results:
        if status in ("died", "hung"):
            return status, detail
    (one, detail, _), (other, detail_other, _) = results
    if one != other or (one == "ran" and detail != detail_other):
        return "differs", f"{one} {detail} and {other} {detail_other}"
    return "", ""


def drawn(seed: int, targets: Sequence[str], numbers: Iterable[int]) -> Iterator[tuple[str, str, Case]]:
    """Cases round by round: each op's first, each op's second ..."""
    from tests.fuzz.generate import case

    for number in numbers:
        for target in targets:
            yield target, f"{seed} {target} {number}", case(seed, target, number)
