"""The process that runs cases, and may die of one: each is named before it is begun.

Reads a line "SEED TARGET NUMBER" a case, or a case as JSON; writes "begin", "reached" as the op is about
to run, and "done STATUS DETAIL". What an op prints elsewhere does not get between these lines.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import warnings

import torch

from atoll import guards
from tests.fuzz.case import Case, case_of
from tests.fuzz.generate import case
from tests.fuzz.path import run

MOST_BYTES = 12 << 30  # of address space: what asks for more dies here, not of the machine's memory


def main() -> None:
    """Run the cases that standard input names until it ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # A test of the fuzz itself: does it find what a guard keeps out?
    guards.GUARDS.pop(os.environ.get("ATOLL_FUZZ_UNGUARDED", ""), None)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        print("begin", file=out)
        result = run(_named(line.strip()), lambda: print("reached", file=out))
        print("done", json.dumps([result.status, result.detail]), file=out)


def _named(line: str) -> Case:
    if line.startswith("["):
        return case_of(line)
    seed, target, number = line.split(" ")
    return case(int(seed), target, int(number))


if __name__ == "__main__":
    main()
