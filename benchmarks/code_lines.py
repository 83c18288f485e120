"""Count code lines by package and wing: without comments, blanks, docstrings and generated code.

    python -m benchmarks.code_lines
    python -m benchmarks.code_lines --against 9125213 --json

A line counts when a token of code stands on it or runs over it; ``atoll demo`` is left out.
``--against`` reads the same files of a commit and prints the difference.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from benchmarks.harness import execute

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("atoll", "coordinator", "worker", "hostos", "protos", "strategies", "compressors")
BESIDE = ("lab", "experiments", "benchmarks", "examples", "tests")
GENERATED = ("_pb2.py", "_pb2_grpc.py")
DEMO = ("experiments/demo/", "coordinator/cli/demo/", "coordinator/demo/")

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
_NO_CODE |= {tokenize.ENCODING, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Return how many lines of ``source`` hold code; a string that is a whole statement is none."""
    lines: set[int] = set()
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NEWLINE:
            if any(part.type != tokenize.STRING for part in statement):
                lines.update(n for part in statement for n in range(part.start[0], part.end[0] + 1))
            statement = []
        elif token.type not in _NO_CODE:
            statement.append(token)
    return len(lines)


def wing_of(path: str) -> str:
    """Return the folder that a file counts under: the package's sub-package, or its hall."""
    parts = PurePosixPath(path).parts
    return "/".join(parts[:2]) if len(parts) > 2 else f"{parts[0]}/*"


def counted(files: Iterable[tuple[str, str]]) -> Counter[str]:
    """Return code lines by wing of (path, source)."""
    lines: Counter[str] = Counter()
    for path, source in files:
        if not path.endswith(GENERATED) and not path.startswith(DEMO):
            lines[wing_of(path)] += code_lines(source)
    return lines


def in_tree(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (path, source) of the working tree's Python files."""
    for package in (*PRODUCT, *BESIDE):
        for path in sorted((root / package).rglob("*.py")):
            yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


def in_commit(root: Path, commit: str) -> Iterator[tuple[str, str]]:
    """Yield (path, source) of a commit's Python files. CalledProcessError when git does not know it."""
    packed = subprocess.run(["git", "archive", commit], cwd=root, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            content = archive.extractfile(member)
            if content and member.name.endswith(".py") and member.name.split("/")[0] in (*PRODUCT, *BESIDE):
                yield member.name, content.read().decode("utf-8")


def totals(lines: Counter[str]) -> dict[str, int]:
    """Return lines by package, and of the product: the packages in the wheel."""
    packages: Counter[str] = Counter()
    for wing, count in lines.items():
        packages[wing.partition("/")[0]] += count
    return {
        "product": sum(packages[name] for name in PRODUCT),
        **{n: packages[n] for n in (*PRODUCT, *BESIDE)},
    }


def main() -> None:
    """Print the lines; end with one JSON object under ``--json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", metavar="COMMIT", help="compare with the files of this commit")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    now = counted(in_tree(ROOT))
    before = counted(in_commit(ROOT, options.against)) if options.against else now
    rows = {**totals(now), **dict(sorted(now.items()))}
    old = {**totals(before), **before}
    for name in dict.fromkeys((*rows, *sorted(before))):
        count, was = rows.get(name, 0), old.get(name, 0)
        print(f"{name:32} {count:7,}" + (f" {was:7,} {count - was:+7,}" if options.against else ""))
    if options.json:
        print(
            json.dumps(
                {"lines": rows, "against": options.against, "before": old if options.against else None}
            )
        )


if __name__ == "__main__":
    execute(main)
