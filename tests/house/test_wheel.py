"""The wheel holds exactly the seven packages, with their schema and types."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import typer

import atoll
from atoll.errors import UsageError
from coordinator.cli import main as cli
from coordinator.cli.main import ITS_COMMANDS
from hostos import command_line

ROOT = Path(__file__).resolve().parents[2]
SEVEN = {"atoll", "coordinator", "worker", "hostos", "protos", "strategies", "compressors"}


def test_the_project_file_names_the_seven_packages_and_both_commands() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {name.removesuffix("*") for name in found} == SEVEN
    assert project["project"]["scripts"] == {
        "atoll": "coordinator.cli.__main__:main",
        "atoll-worker": "worker.cli.__main__:main",
    }
    assert project["project"]["license"] == "Apache-2.0"


def test_what_experiments_need_is_of_the_same_version_and_no_worker_installs_it() -> None:
    main = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    project = tomllib.loads((ROOT / "experiments" / "pyproject.toml").read_text())["project"]
    assert project["version"] == atoll.__version__
    assert project["dependencies"] == [f"atoll[coordinator]=={atoll.__version__}"]
    assert tuple(project["entry-points"]["atoll.commands"]) == ITS_COMMANDS
    text = " ".join(main["dependencies"]).lower()
    found = [name for name in ("matplotlib", "sqlalchemy", "networkx", "scipy", "prometheus") if name in text]
    assert found == []


def test_what_is_missing_is_named_with_its_installation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    for loaded in [
        name for name in sys.modules if name.startswith(("coordinator.server", "coordinator.storage"))
    ]:
        monkeypatch.delitem(sys.modules, loaded)
    assert command_line.run(cli.app, ["serve"]) == 2
    assert "pip install '.[coordinator]'" in capsys.readouterr().err
    group = typer.main.get_command(cli.app)
    assert isinstance(group, cli.Commands)
    monkeypatch.delitem(group.commands, "demo")
    with pytest.raises(UsageError, match=r"pip install \./experiments"):
        group.resolve_command(typer.Context(group), ["demo"])


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
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["coordinator"]]:
        name, bound, _ = requirement.partition(">=")
        assert bound, f"{requirement} has no lower bound"
        assert name.lower().replace("_", "-") in tested, f"{name} is not in constraints.txt"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since building leaves its traces in the folder it builds from."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", str(folder)]
    subprocess.run([*command, str(source), str(source / "experiments")], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(wheels: Path) -> zipfile.ZipFile:
    [path] = wheels.glob("atoll-*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def experiments(wheels: Path) -> zipfile.ZipFile:
    [path] = wheels.glob("atoll_experiments-*.whl")
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
def test_the_wheel_of_experiments_holds_all_of_them_and_nothing_else(experiments: zipfile.ZipFile) -> None:
    names = {name for name in experiments.namelist() if ".dist-info/" not in name}
    sources = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "experiments").rglob("*.py")
        if "build" not in path.parts
    }
    assert names == sources | {"experiments/py.typed"}


@pytest.mark.slow
def test_the_demo_runs_from_the_wheels_alone(
    wheel: zipfile.ZipFile, experiments: zipfile.ZipFile, tmp_path: Path
) -> None:
    wheel.extractall(tmp_path / "site")
    experiments.extractall(tmp_path / "site")
    environment = {"PYTHONPATH": str(tmp_path / "site"), "HOME": str(tmp_path / "none"), "PATH": os.defpath}
    command = [sys.executable, "-P", "-m", "coordinator.cli", "demo", "--keep", str(tmp_path / "kept")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 stages on 2 workers" in done.stdout
    assert "all checks hold" in done.stdout
    module = "import experiments.demo.run, sys; sys.stdout.write(experiments.demo.run.__file__)"
    found = subprocess.run(
        [sys.executable, "-P", "-c", module], env=environment, capture_output=True, text=True
    )
    assert Path(found.stdout).is_relative_to(tmp_path / "site")
