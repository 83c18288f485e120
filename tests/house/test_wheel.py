"""The wheel holds exactly the seven packages, with their schema and types."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEVEN = {"atoll", "coordinator", "worker", "hostos", "protos", "strategies", "compressors"}


def test_the_project_file_names_the_seven_packages_and_both_commands() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {name.removesuffix("*") for name in found} == SEVEN
    assert project["project"]["scripts"] == {
        "atoll": "coordinator.cli.main:main",
        "atoll-worker": "worker.cli.main:main",
    }
    assert project["project"]["license"] == "Apache-2.0"


def test_every_package_has_its_types_and_ships_the_marker() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["*"]
    assert [top for top in sorted(SEVEN) if not (ROOT / top / "py.typed").is_file()] == []


def test_every_dependency_has_a_lower_bound_and_a_tested_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tested = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    for requirement in project["dependencies"]:
        name, bound, _ = requirement.partition(">=")
        assert bound, f"{requirement} has no lower bound"
        assert name.lower().replace("_", "-") in tested, f"{name} is not in constraints.txt"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, since building leaves its traces in the folder it builds from."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", str(folder), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    [path] = folder.glob("atoll-*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.slow
def test_the_wheel_holds_exactly_the_seven_packages(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == SEVEN
    assert {"protos/atoll_job.proto", "protos/atoll_control.proto"} <= set(names)
    assert {f"{top}/py.typed" for top in SEVEN} <= set(names)
    assert not [name for name in names if "test" in name.lower().split("/")]
    sources = {str(p.relative_to(ROOT)) for top in SEVEN for p in (ROOT / top).rglob("*.py")}
    assert sources <= set(names)


@pytest.mark.slow
def test_the_demo_runs_from_the_wheel_alone(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    environment = {"PYTHONPATH": str(tmp_path / "site"), "HOME": str(tmp_path / "none"), "PATH": os.defpath}
    command = [sys.executable, "-P", "-m", "coordinator.cli", "demo", "--keep", str(tmp_path / "kept")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 stages on 2 workers" in done.stdout
    assert "all checks hold" in done.stdout
    module = "import coordinator.cli.demo.run, sys; sys.stdout.write(coordinator.cli.demo.run.__file__)"
    found = subprocess.run(
        [sys.executable, "-P", "-c", module], env=environment, capture_output=True, text=True
    )
    assert Path(found.stdout).is_relative_to(tmp_path / "site")
