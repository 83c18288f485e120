"""Known vulnerabilities of what is locked: pip-audit for each lock, and the Dockerfile's base image.

    python .ci/audit.py PIP_AUDIT LOCK ...

Exit code 0 when every requirement of every lock was looked up and none has an advisory, 1 when there are
advisories, 2 when there are none but something was not looked up: then nothing is known of it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ANSWER_WITHIN_S = 600
LINES_SHOWN, NAMES_SHOWN = 2, 5
CLEAN, FOUND, UNKNOWN = 0, 1, 2
_LOCKED = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)\s*==", re.MULTILINE)


@dataclass(frozen=True)
class Answer:
    """Answer for one lock: its requirements, the advisories as a line each, those that nobody looked up."""

    locked: int
    advisories: tuple[str, ...]
    skipped: tuple[str, ...]


def findings(pip_audit: str, lock: str) -> Answer:
    """Ask the advisory service for one lock."""
    locked = {_plain(name) for name in _LOCKED.findall(Path(lock).read_text())}
    command = [pip_audit, "--requirement", lock, "--no-deps", "--disable-pip", "--format", "json"]
    try:
        done = subprocess.run(
            [*command, "--progress-spinner", "off"], capture_output=True, text=True, timeout=ANSWER_WITHIN_S
        )
        listed = json.loads(done.stdout)["dependencies"]
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError) as error:
        words = (
            [str(error)]
            if not isinstance(error, ValueError | KeyError | TypeError)
            else done.stderr.splitlines()
        )
        print(f"{lock}: no answer of the advisory service")
        print("\n".join(f"  {line[:200]}" for line in words[-LINES_SHOWN:]))
        listed = []
    # A requirement that pip-audit could not look up stands there with a reason and without advisories.
    looked_up = {_plain(one["name"]) for one in listed if "vulns" in one}
    advisories = [
        f"{lock}: {one['name']} {one['version']}: {advisory['id']}, fixed in "
        + (", ".join(advisory["fix_versions"]) or "no version yet")
        for one in listed
        for advisory in one.get("vulns", ())
    ]
    return Answer(len(locked), tuple(advisories), tuple(sorted(locked - looked_up)))


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def base_image() -> str:
    """What is to be said of the image that the Dockerfile begins with."""
    found = re.search(r"^ARG BASE=(\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    base = found[1] if found else "?"
    if "@sha256:" in base:
        return f"base image: {base}"
    how = f"give --build-arg BASE={base}@sha256:... (docs/supply-chain.md)"
    return f"base image: {base} is a tag, which moves; {how}"


def main() -> int:
    """Audit the locks that are named."""
    pip_audit, *locks = sys.argv[1:] or [""]
    answers = {lock: findings(pip_audit, lock) for lock in locks}
    lines = list(dict.fromkeys(line for answer in answers.values() for line in answer.advisories))
    print("\n".join(lines) or "no advisory found")
    print(base_image())
    unknown = not locks
    for lock, answer in answers.items():
        if answer.skipped or not answer.locked:
            unknown = True
            more = len(answer.skipped) - NAMES_SHOWN
            named = ", ".join(answer.skipped[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
            print(
                f"{lock}: {len(answer.skipped)} of {answer.locked} requirements were not looked up"
                f"{f' ({named})' if named else ''}: nothing is known of them"
            )
    if unknown:
        print("the audit is not complete, so it does not pass; run it where the advisory service answers")
    return FOUND if lines else UNKNOWN if unknown else CLEAN


if __name__ == "__main__":
    sys.exit(main())
