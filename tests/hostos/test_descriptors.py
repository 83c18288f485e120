"""A process's limit of open files."""

from __future__ import annotations

import subprocess
import sys

import pytest

from atoll.errors import UsageError
from hostos.descriptors import WORKER, enough

resource = pytest.importorskip("resource")

LOWERED = """
import resource
from hostos.descriptors import raise_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256))
print(*(raise_limit(wanted) for wanted in (32, 128, 100, 10_000)))
"""


def test_the_limit_rises_to_what_is_wanted_or_to_the_hard_one_and_never_falls() -> None:
    ran = subprocess.run([sys.executable, "-c", LOWERED], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["64", "128", "128", "256"]


def test_a_worker_with_too_few_descriptors_is_told_how_many_it_needs() -> None:
    enough(WORKER)
    with pytest.raises(UsageError, match=f"may hold {WORKER - 1} .* at least {WORKER}: raise"):
        enough(WORKER - 1)
