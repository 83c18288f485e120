"""Count the files that a change of each kind touches, by an example of it.

    python -m benchmarks.reach
    python -m benchmarks.reach --commit HEAD~3 --json

An example is a patch in ``tests/benchmarks/reach/``: a whole change with its docs and a test that it works;
``tests/benchmarks/test_reach.py`` applies each to a copy of the tree and runs its test. What ``make protos``
writes is not counted. ``--commit`` counts the files of a commit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from atoll.errors import AtollError
from benchmarks.code_lines import GENERATED, PRODUCT, ROOT
from benchmarks.harness import execute

EXAMPLES = ROOT / "tests" / "benchmarks" / "reach"
AIMS = {"job_option": 5, "worker_option": 5, "plan_change": 3, "message": 4}
"""Product files that a change of a kind may touch."""


def touched(patch: str) -> list[str]:
    """Return the files that a patch of ``git diff`` changes."""
    return sorted(set(re.findall(r"^diff --git a/\S+ b/(\S+)$", patch, re.MULTILINE)))


def part_of(path: str) -> str:
    """Return what a file counts as: product, tests, docs, generated or beside."""
    if path.endswith((*GENERATED, "_pb2.pyi")):
        return "generated"
    top = path.partition("/")[0]
    return "product" if top in PRODUCT else top if top in ("tests", "docs") else "beside"


def reach(files: Iterable[str]) -> Counter[str]:
    """Return how many of the files belong to each part."""
    return Counter(part_of(path) for path in files)


def example(kind: str) -> str:
    """Return the example of a kind: its patch."""
    return (EXAMPLES / f"{kind}.patch").read_text(encoding="utf-8")


def apply(kind: str, tree: Path) -> None:
    """Apply the example of a kind to a copy of the tree, and regenerate what its messages need.

    AtollError says which place of the example does not fit the tree any more.
    """
    command = ["git", "apply", "-C1", str(EXAMPLES / f"{kind}.patch")]
    # The copy is no part of a repository around it.
    outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, env=outside)
    if done.returncode:
        raise AtollError(
            f"{kind}.patch does not fit the tree any more; mend it in {EXAMPLES.relative_to(ROOT)}:\n"
            + done.stderr.strip()
        )
    protos = [path for path in touched(example(kind)) if path.endswith(".proto")]
    if protos:
        compiler = [sys.executable, "-m", "grpc_tools.protoc", "-I.", "--python_out=.", *protos]
        subprocess.run(compiler, cwd=tree, check=True, capture_output=True)


def _commit(name: str) -> list[str]:
    command = ["git", "show", "--format=", "--name-only", name]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def _show(name: str, files: Iterable[str], aim: int | None) -> Mapping[str, object]:
    files = sorted(files)
    found = reach(files)
    others = ", ".join(f"{part} {count}" for part, count in sorted(found.items()) if part != "product")
    print(
        f"{name:16} {found['product']:3} product files" + (f" (at most {aim})" if aim else "") + f"; {others}"
    )
    for path in files:
        if part_of(path) == "product":
            print(f"  {path}")
    return {**found, "aim": aim, "files": files}


def main() -> None:
    """Print the files of each example, or of a commit; end with one JSON object under ``--json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", help="count the files of this commit instead")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.commit:
        shown = {options.commit: _show(options.commit, _commit(options.commit), None)}
    else:
        shown = {kind: _show(kind, touched(example(kind)), aim) for kind, aim in AIMS.items()}
    if options.json:
        print(json.dumps(shown))


if __name__ == "__main__":
    execute(main)
