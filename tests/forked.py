"""Tests in several processes that are forked once all tests are imported and collected.

``python -m pytest -p tests.forked --processes 3 PATHS`` collects once, where processes of pytest-xdist each
collect everything, and its tests find what the parent has imported. A process takes a file at a time; the
files that took the longest at the last run come first, so that the processes end together. Reports go through
a pipe to the parent, which shows and counts them. A test that ends its process has failed, and the tests of
its file that were not run are named.

``--processes 0`` and runs of few files go as ever, in pytest's own process.
"""

from __future__ import annotations

import importlib
import json
import os
import selectors
import signal
import struct
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

CACHED = "atoll/seconds"  # of each file at its last run, in pytest's cache
FIRST = ("tests/e2e/", "tests/lab/")  # files of processes and networks, where no seconds are known
UNKNOWN_S = 1e6  # of such a file: before all others
# Imported by many tests late, as a file alone may do without: once here, not once in each process.
IMPORTED_BY_TESTS = (
    "torch._dynamo",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.bert.modeling_bert",
    "transformers.models.resnet.modeling_resnet",
)
OWN_OF_THE_PARENT = (
    "terminalreporter",
    "lfplugin",
    "nfplugin",
    "stepwiseplugin",
)  # they print, or write its cache
_NUMBER, _LENGTH = struct.Struct("!I"), struct.Struct("!I")
STARTED, REPORT, DONE = "started", "report", "done"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=0, help="forked processes that run the tests; 0: none")


@dataclass
class Child:
    """A forked process as its parent sees it."""

    pid: int
    pipe: int
    unread: bytearray = field(default_factory=bytearray)
    running: str = ""  # the test that it began last
    failed: bool = False  # a test of its
    done: bool = False
    code: int = 0  # it ended with

    def messages(self) -> Iterator[tuple[str, Any]] | None:
        """Return what it has said since the last call; None at the pipe's end."""
        data = os.read(self.pipe, 1 << 16)
        self.unread += data
        return self._split() if data else None

    def _split(self) -> Iterator[tuple[str, Any]]:
        while len(self.unread) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self.unread)[0]
            if len(self.unread) < end:
                return
            kind, value = json.loads(self.unread[_LENGTH.size : end])
            del self.unread[:end]
            yield kind, value


class Reporter:
    """Plugin of a forked process: sends its reports to the parent."""

    def __init__(self, config: pytest.Config, pipe: int) -> None:
        self._config, self._pipe = config, os.fdopen(pipe, "wb")

    def say(self, kind: str, value: object = None) -> None:
        data = json.dumps([kind, value], default=str).encode()
        try:
            self._pipe.write(_LENGTH.pack(len(data)) + data)
            self._pipe.flush()
        except BrokenPipeError:
            pytest.exit("the run's first process has ended")

    def finish(self) -> None:
        """Say that all is done; more will not be heard."""
        self.say(DONE)
        self._pipe.close()

    @pytest.hookimpl
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.say(STARTED, nodeid)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.say(REPORT, self._config.hook.pytest_report_to_serializable(config=self._config, report=report))


class Run:
    """One run's files, its processes, and what they have reported."""

    def __init__(self, session: pytest.Session) -> None:
        self.session, self.config = session, session.config
        self.files: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in session.items:
            self.files[item.nodeid.partition("::")[0]].append(item)
        known = self.config.cache.get(CACHED, {}) if self.config.cache else {}
        self.known: dict[str, float] = known
        self.order = sorted(self.files, key=self._expected_s, reverse=True)
        self.took_s: dict[str, float] = defaultdict(float)
        self.unfinished = {item.nodeid: item for item in session.items}

    def _expected_s(self, name: str) -> float:
        """Return the seconds of a file at its last run, else its number of tests."""
        guess = UNKNOWN_S if name.startswith(FIRST) and not self.known else 0.0
        return self.known.get(name, guess + len(self.files[name]))

    def start(self, count: int) -> list[Child] | Part:
        """Fork the processes and return them; in each of them, return its part of the run."""
        # A file's number is one read of four bytes, which the system never tears apart.
        work, numbers = os.pipe()
        os.write(numbers, b"".join(map(_NUMBER.pack, range(len(self.order)))))
        os.close(numbers)
        living, self._life = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        children: list[Child] = []
        for _ in range(count):
            reports, end = os.pipe()
            pid = os.fork()
            if not pid:
                for other in (reports, self._life, *(child.pipe for child in children)):
                    os.close(other)
                return Part(self, work, living, end)
            os.close(end)
            children.append(Child(pid, reports))
        os.close(work)
        os.close(living)
        return children

    def follow(self, children: Sequence[Child]) -> None:
        """Show and count what the processes report until all have ended."""
        try:
            with selectors.DefaultSelector() as ready:
                for child in children:
                    ready.register(child.pipe, selectors.EVENT_READ, child)
                while ready.get_map():
                    for key, _ in ready.select():
                        messages = key.data.messages()
                        if messages is None:
                            ready.unregister(key.fd)
                            self._ended(key.data)
                        for kind, value in messages or ():
                            self._hear(key.data, kind, value)
        finally:
            self.stop()
            for child in children:
                if not child.done:
                    with suppress(ProcessLookupError):
                        os.kill(child.pid, signal.SIGINT)
                child.code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        for child in children:
            if child.code and not child.failed:
                raise pytest.UsageError(f"a process ended with code {child.code}, though its tests passed")

    def stop(self) -> None:
        """Have each process end after the test that it runs."""
        if self._life >= 0:
            os.close(self._life)
            self._life = -1

    def _hear(self, child: Child, kind: str, value: Any) -> None:
        hook = self.config.hook
        if kind == DONE:
            child.done = True
        elif kind == STARTED:
            child.running = value
            hook.pytest_runtest_logstart(nodeid=value, location=self.unfinished[value].location)
        else:
            if isinstance(value["longrepr"], list):  # of a test that was skipped: pytest wants a tuple
                value["longrepr"] = tuple(value["longrepr"])
            report = hook.pytest_report_from_serializable(config=self.config, data=value)
            child.failed |= report.failed
            self._count(report)
            if report.when == "teardown":
                hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=tuple(report.location))
                del self.unfinished[report.nodeid]
                child.running = ""

    def _count(self, report: pytest.TestReport) -> None:
        self.took_s[report.nodeid.partition("::")[0]] += report.duration
        self.config.hook.pytest_runtest_logreport(report=report)
        if self.session.shouldfail or self.session.shouldstop:
            self.stop()

    def _ended(self, child: Child) -> None:
        """A pipe's end: a process that is not done was ended by its test."""
        if child.done or not child.running:
            return
        child.failed = True
        name = child.running.partition("::")[0]
        lost = [nodeid for nodeid in self.unfinished if nodeid.partition("::")[0] == name]
        text = "\n".join(["the process ended in this test; not run for that:", *lost[1:]])
        item = self.unfinished[child.running]
        for nodeid in lost:
            del self.unfinished[nodeid]
        self._count(
            pytest.TestReport(
                child.running, item.location, {item.name: 1}, outcome="failed", longrepr=text, when="call"
            )
        )

    def keep_seconds(self) -> None:
        """Remember how long each file took."""
        if self.config.cache is not None:
            self.config.cache.set(CACHED, {**self.known, **self.took_s})


@dataclass
class Part:
    """A forked process's own: descriptors of the files' numbers, the parent's life, and its reports."""

    run: Run
    numbers: int
    living: int
    reports: int

    def work(self) -> None:
        """Run files until none is left, the parent is gone, or a failure ends the run."""
        config, session = self.run.config, self.run.session
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # into a file that the processes would share
        for name in OWN_OF_THE_PARENT:
            config.pluginmanager.unregister(name=name)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        capture.start_global_capturing()
        reporter = Reporter(config, self.reports)
        config.pluginmanager.register(reporter)
        with selectors.DefaultSelector() as life:
            life.register(self.living, selectors.EVENT_READ)
            while number := os.read(self.numbers, _NUMBER.size):
                name = self.run.order[_NUMBER.unpack(number)[0]]
                items = self.run.files[name]
                for item, after in zip(items, (*items[1:], None), strict=True):
                    if life.select(0) or session.shouldfail or session.shouldstop:
                        return reporter.finish()
                    config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        return reporter.finish()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in forked processes, where they are asked for and worth it."""
    count = session.config.getoption("--processes")
    if session.testsfailed or session.config.option.collectonly or count < 2:
        return None
    run = Run(session)
    if len(run.files) < 2:
        return None
    if threading.active_count() > 1:
        names = sorted(thread.name for thread in threading.enumerate())
        raise pytest.UsageError(f"importing the tests has started threads, which forking loses: {names}")
    _import_early()
    found = run.start(min(count, len(run.files)))
    if isinstance(found, Part):
        found.work()
        return True
    run.follow(found)
    run.keep_seconds()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    if run.unfinished:
        raise pytest.UsageError(
            f"{len(run.unfinished)} tests were not run, first {next(iter(run.unfinished))}"
        )
    return True


def _import_early() -> None:
    """Import what tests import late; some of it prints as it is imported."""
    if "transformers" not in sys.modules:
        return  # a few tests without models
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        for name in IMPORTED_BY_TESTS:
            importlib.import_module(name)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)
