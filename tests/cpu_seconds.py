"""CPU seconds of each test file, with what it imports and the processes that it starts.

``python -m pytest -p tests.cpu_seconds PATHS`` prints the files that take the most. A busy machine stretches
wall time at will and CPU time far less, so these are the figures to compare before and after a change; under
``-n`` they would be those of other processes, so it counts without.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass

import pytest

LISTED = 25
STARTS = frozenset({"subprocess.Popen", "os.fork", "os.posix_spawn"})


@dataclass
class Taken:
    """CPU seconds of one file: its import, its tests, and processes that they started and awaited."""

    collected_s: float = 0.0
    own_s: float = 0.0
    children_s: float = 0.0
    started: int = 0
    tests: int = 0

    @property
    def sum_s(self) -> float:
        return self.collected_s + self.own_s + self.children_s


_files: dict[str, Taken] = defaultdict(Taken)
_started = 0


def _count(event: str, _: object) -> None:
    global _started
    _started += event in STARTS


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def pytest_configure() -> None:
    sys.addaudithook(_count)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, object, object]:
    before_s = time.process_time()
    found = yield
    if isinstance(collector, pytest.Module):
        _files[collector.nodeid].collected_s += time.process_time() - before_s
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    before = time.process_time(), _children_s(), _started
    found = yield
    taken = _files[item.nodeid.partition("::")[0]]
    taken.own_s += time.process_time() - before[0]
    taken.children_s += _children_s() - before[1]
    taken.started += _started - before[2]
    taken.tests += 1
    return found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    line = terminalreporter.write_line
    line("    sum  import     own  children  started  tests  file (CPU seconds)")
    for name, t in sorted(_files.items(), key=lambda pair: -pair[1].sum_s)[:LISTED]:
        seconds = f"{t.sum_s:7.2f} {t.collected_s:7.2f} {t.own_s:7.2f} {t.children_s:9.2f}"
        line(f"{seconds} {t.started:8d} {t.tests:6d}  {name}")
    line(f"{sum(t.sum_s for t in _files.values()):7.2f} of {len(_files)} files")
