"""What holds for every test: a busy machine makes none of them fail."""

import asyncio
import functools
import gc
import inspect
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack

import pytest
import structlog
from hypothesis import HealthCheck, settings

# Examples are bounded in number; how long one takes says something of the machine only.
settings.register_profile("atoll", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("atoll")


def pytest_itemcollected(item: pytest.Item) -> None:
    """A test that is a coroutine runs on an event loop of its own."""
    test = getattr(item, "obj", None)
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(test):

        @functools.wraps(test)
        def run(**given: object) -> None:
            asyncio.run(test(**given))

        item.obj = run


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files of real processes and networks, which take longest: at the end of a run one of
    them would be left alone beside idle processes."""
    items.sort(key=lambda item: not item.nodeid.startswith(("tests/e2e/", "tests/lab/")))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without the collector of garbage. Everything imported and collected lives as long as the
    process, and looking through it again and again was a third of the time that collecting takes. After that
    it looks less often, for a syntax tree or a graph has many objects and few of them are garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 10, 10)
        gc.enable()


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """A command that a test runs sets its process up: a log, which goes to that test's error stream, and
    torch's threads and determinism. The next test finds none of it, in whatever order they come."""
    threads = _torch_threads()
    yield
    structlog.reset_defaults()
    if _torch_threads() != threads:
        sys.modules["torch"].set_num_threads(threads)
    if "torch" in sys.modules and sys.modules["torch"].get_deterministic_debug_mode():
        sys.modules["torch"].set_deterministic_debug_mode(0)


def _torch_threads() -> int:
    """As torch has them now, or will have them once it is imported; tests that need none start without it."""
    if "torch" in sys.modules:
        return int(sys.modules["torch"].get_num_threads())
    return int(os.environ.get("OMP_NUM_THREADS", 0)) or len(os.sched_getaffinity(0))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Bit-equality holds for one thread count on both sides; one is the fastest here."""
    import torch  # tests that need none of it start without it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What a test has opened, closed after it in reverse."""
    with ExitStack() as found:
        yield found
