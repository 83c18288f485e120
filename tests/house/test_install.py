"""The wheel, installed as people install tools: by pipx and by uv, each in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


def ran(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def installers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of `pipx` and `uv`; skipped where the index does not answer."""
    folder = tmp_path_factory.mktemp("installers")
    ran(sys.executable, "-m", "venv", folder)
    command = [folder / "bin" / "pip", "install", "--quiet", "pipx", "uv"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no package index answers: {done.stderr[-200:]}")
    return folder / "bin"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    ran(sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", folder, folder / "source")
    [path] = folder.glob("atoll-*.whl")
    return path


@pytest.mark.parametrize("how", ["pipx", "uv"])
def test_both_commands_run_and_the_doctor_has_words(
    how: str, installers: Path, wheel: Path, tmp_path: Path
) -> None:
    commands = tmp_path / "bin"
    if how == "pipx":
        pinned = f"--constraint {ROOT / 'constraints.txt'}"
        places = {"PIPX_HOME": str(tmp_path / "pipx"), "PIPX_BIN_DIR": str(commands)}
        ran(installers / "pipx", "install", "--pip-args", pinned, str(wheel), **places)
    else:
        places = {"UV_TOOL_DIR": str(tmp_path / "uv"), "UV_TOOL_BIN_DIR": str(commands)}
        ran(installers / "uv", "tool", "install", "--constraints", ROOT / "constraints.txt", wheel, **places)
    assert {"atoll", "atoll-worker"} <= {path.name for path in commands.iterdir()}
    home = {"HOME": str(tmp_path), "PYTHONPATH": ""}
    assert "serve" in ran(commands / "atoll", "--help", **home)
    assert "doctor" in ran(commands / "atoll-worker", "--help", **home)
    done = subprocess.run(
        [commands / "atoll-worker", "doctor", "127.0.0.1:1"],
        capture_output=True,
        text=True,
        env={**os.environ, **home},
        check=False,
    )
    assert done.returncode == 5, done.stderr
    assert "GFLOP/s" in done.stdout, "it has looked at the machine, with torch"
    assert "is `atoll serve` running there" in done.stdout
