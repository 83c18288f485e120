"""`make audit` passes when everything was looked up and nothing was found, not because nobody looked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "audit.py"
LOCK = "numpy==2.4.6 \\\n    --hash=sha256:00\ngrpcio==1.85.1 ; python_version >= '3.11'\n"
FINE = [{"name": "numpy", "version": "2.4.6", "vulns": []}, {"name": "grpcio", "version": "1", "vulns": []}]
ADVISORY = {"id": "PYSEC-1", "fix_versions": ["2.4.7"]}


def audited(folder: Path, answer: Any, lock: str = LOCK) -> tuple[int, str]:
    """Exit code and words, with a pip-audit that gives ``answer``."""
    fake, path = folder / "pip-audit", folder / "runtime.txt"
    fake.write_text(f"#!{sys.executable}\nprint({json.dumps(answer)!r})\n")
    fake.chmod(0o755)
    path.write_text(lock)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(fake), str(path)], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_an_audit_of_everything_without_an_advisory_passes(tmp_path: Path) -> None:
    assert audited(tmp_path, {"dependencies": FINE})[0] == 0


def test_an_advisory_fails_the_audit(tmp_path: Path) -> None:
    code, words = audited(tmp_path, {"dependencies": [{**FINE[0], "vulns": [ADVISORY]}, FINE[1]]})
    assert code == 1
    assert "numpy 2.4.6: PYSEC-1, fixed in 2.4.7" in words


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("no JSON of an audit", "2 of 2 requirements were not looked up"),
        ({"dependencies": []}, "2 of 2 requirements were not looked up"),
        ({"dependencies": [FINE[0]]}, "1 of 2 requirements were not looked up (grpcio)"),
        (
            {"dependencies": [{"name": n, "skip_reason": "not on the index"} for n in ("numpy", "grpcio")]},
            "2 of 2 requirements were not looked up (grpcio, numpy)",
        ),
    ],
)
def test_an_audit_that_skipped_something_does_not_pass(tmp_path: Path, answer: Any, said: str) -> None:
    code, words = audited(tmp_path, answer)
    assert code == 2, words
    assert said in words
    assert "the audit is not complete" in words


def test_an_audit_of_an_empty_lock_does_not_pass(tmp_path: Path) -> None:
    assert audited(tmp_path, {"dependencies": []}, lock="# nothing\n")[0] == 2
