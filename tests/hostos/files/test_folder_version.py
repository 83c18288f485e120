"""State folders of another version are refused with the remedy, and stay as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.errors import StorageError
from coordinator import server
from coordinator.cli.main import app
from hostos.command_line import run
from hostos.files.folder_version import VERSION_FILE, claim_version, raise_version
from worker import config
from worker.cli.main import app as worker_app


def version_in(folder: Path) -> str:
    return (folder / VERSION_FILE).read_text().strip()


def files_in(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize("current", [1, 7])
def test_a_new_folder_gets_the_version_of_whoever_makes_it(current: int, tmp_path: Path) -> None:
    claim_version(tmp_path, current, ("blobs",))
    claim_version(tmp_path, current, ("blobs",))
    assert version_in(tmp_path) == str(current)
    assert (tmp_path / VERSION_FILE).stat().st_mode & 0o777 == 0o600


def test_a_folder_in_use_without_a_version_is_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("")
    with pytest.raises(StorageError, match=r"is of version 1 .* reads version 2: finish its jobs with"):
        claim_version(tmp_path, 2, ("journal", "blobs"))
    assert files_in(tmp_path) == {"journal": ""}
    claim_version(tmp_path, 1, ("journal", "blobs"))
    assert version_in(tmp_path) == "1"


@pytest.mark.parametrize(("found", "remedy"), [(3, "finish its jobs with"), (5, "update Atoll, or choose")])
def test_an_older_and_a_newer_folder_are_refused_with_what_to_do(
    found: int, remedy: str, tmp_path: Path
) -> None:
    (tmp_path / VERSION_FILE).write_text(f"{found}\n")
    with pytest.raises(StorageError, match=f"is of version {found} .* reads version 4: {remedy}"):
        claim_version(tmp_path, 4, ())
    assert version_in(tmp_path) == str(found)


@pytest.mark.parametrize("found", [2, 3, 4])
def test_a_folder_that_can_be_read_as_it_is_keeps_its_version_until_somebody_goes_on_in_it(
    found: int, tmp_path: Path
) -> None:
    (tmp_path / VERSION_FILE).write_text(f"{found}\n")
    claim_version(tmp_path, 4, (), oldest=2)
    assert version_in(tmp_path) == str(found)
    raise_version(tmp_path, 4)
    assert version_in(tmp_path) == "4"


@pytest.mark.parametrize("found", [1, 5])
def test_a_folder_older_than_the_oldest_or_newer_is_refused(found: int, tmp_path: Path) -> None:
    (tmp_path / VERSION_FILE).write_text(f"{found}\n")
    with pytest.raises(StorageError, match=f"is of version {found} .* reads version 4"):
        claim_version(tmp_path, 4, (), oldest=2)
    assert version_in(tmp_path) == str(found)


@pytest.mark.parametrize("text", ["", "one", "-1", "1.0", "\x00"])
def test_a_damaged_version_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / VERSION_FILE).write_text(text)
    with pytest.raises(StorageError, match="damaged"):
        claim_version(tmp_path, 1, ())


def newer(folder: Path, version: int) -> dict[str, str]:
    """A folder of the version after ``version``, and the files in it."""
    folder.mkdir(mode=0o700)
    (folder / VERSION_FILE).write_text(f"{version + 1}\n")
    return files_in(folder)


def test_a_coordinator_does_not_start_on_a_newer_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "state"
    before = newer(folder, server.FOLDER_VERSION)
    assert run(app, ["serve", "--listen", "127.0.0.1:0", "--state-dir", str(folder)]) == 9
    assert "update Atoll, or choose another --state-dir" in capsys.readouterr().err
    assert files_in(folder) == before


@pytest.mark.parametrize(
    "command",
    [
        ["join", "127.0.0.1:1", "--token", "atoll1_AA"],
        ["data", "add", "heart", "{here}/heart.csv", "--schema", "x:float32=age"],
    ],
    ids=["join", "data add"],
)
def test_a_worker_neither_joins_from_a_newer_folder_nor_adds_data_to_it(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "heart.csv").write_text("age\n41\n")
    folder = tmp_path / "state"
    before = newer(folder, config.FOLDER_VERSION)
    arguments = [part.format(here=tmp_path) for part in command]
    assert run(worker_app, [*arguments, "--state-dir", str(folder)]) == 9
    assert "update Atoll, or choose another --state-dir" in capsys.readouterr().err
    assert files_in(folder) == before
