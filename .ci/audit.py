"""Known vulnerabilities of what is locked: pip-audit for each lock, and the Dockerfile's base image.

    python .ci/audit.py PIP_AUDIT LOCK ...

Exit code 1 when there are any, 0 when there are none, and when no advisory service is reachable: that is
said, and nothing is concluded from it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ANSWER_WITHIN_S = 600
LINES_SHOWN = 2


def findings(pip_audit: str, lock: str) -> list[str] | None:
    """Advisories for one lock, a line each; None when the service gave no answer."""
    command = [pip_audit, "--requirement", lock, "--no-deps", "--disable-pip", "--format", "json"]
    try:
        done = subprocess.run(
            [*command, "--progress-spinner", "off"], capture_output=True, text=True, timeout=ANSWER_WITHIN_S
        )
        listed = json.loads(done.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, ValueError, KeyError) as error:
        words = done.stderr.strip().splitlines() if not isinstance(error, subprocess.TimeoutExpired) else []
        print(f"{lock}: no answer of the advisory service, so nothing is known of it now")
        print("\n".join(f"  {line[:200]}" for line in words[-LINES_SHOWN:]))
        return None
    found = [(one, advisory) for one in listed for advisory in one.get("vulns", ())]
    return [
        f"{lock}: {one['name']} {one['version']}: {advisory['id']}, fixed in "
        + (", ".join(advisory["fix_versions"]) or "no version yet")
        for one, advisory in found
    ]


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
    pip_audit, *locks = sys.argv[1:]
    answers = {lock: findings(pip_audit, lock) for lock in locks}
    lines = dict.fromkeys(line for answer in answers.values() for line in answer or ())
    print("\n".join(lines) or "no advisory found" * all(answer is not None for answer in answers.values()))
    print(base_image())
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
