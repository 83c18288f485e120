"""What a user's coordinator or worker keeps, other users of the machine cannot read."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.errors import StorageError
from coordinator.messages.facts import Record
from coordinator.storage.blob_store import BlobStore
from coordinator.storage.journal import Journal
from hostos.files.private_files import private_file, private_folder, state_folder, write_private
from worker.apps.store import AppStore
from worker.cli.running import only_one
from worker.config import make_config, remember
from worker.data.registry import add_dataset

KNOWN = ("identity",)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_a_new_folder_is_its_users_alone(tmp_path: Path) -> None:
    state_folder(tmp_path / "a" / "b", KNOWN)
    assert mode(tmp_path / "a" / "b") == 0o700


@pytest.mark.parametrize("before", [0o755, 0o750, 0o777, 0o701])
@pytest.mark.parametrize("content", ["", "identity"])
def test_an_open_folder_of_an_earlier_start_is_closed(tmp_path: Path, before: int, content: str) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(before)
    if content:
        (folder / content).mkdir()
    state_folder(folder, KNOWN)
    assert mode(folder) == 0o700


def test_a_folder_of_other_things_is_left_as_it_is_and_refused(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home").chmod(0o755)
    (tmp_path / "home" / "letters").touch()
    with pytest.raises(StorageError, match=r"mode 0755.*holds other things \('letters'\).*home/atoll"):
        state_folder(tmp_path / "home", KNOWN)
    assert mode(tmp_path / "home") == 0o755
    (tmp_path / "home").chmod(0o700)  # as the words say
    state_folder(tmp_path / "home", KNOWN)


def test_a_folder_whose_name_is_no_text_is_refused_and_not_made(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")  # of an old disk; in the C locale any letter beyond ASCII
    with pytest.raises(StorageError, match=r"caf.udce9' has bytes .* no text .*; set LC_ALL=C.UTF-8, or"):
        state_folder(folder, KNOWN)
    assert not list(tmp_path.iterdir())


def test_an_open_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o755)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(StorageError, match=r"mode 0755, owner \d+\).*have its owner chmod 700"):
        private_folder(tmp_path)


def test_a_file_system_without_modes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setattr(Path, "chmod", lambda *_: None)
    with pytest.raises(StorageError, match="cannot close it"):
        private_folder(tmp_path)


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageError, match="choose another --state-dir"):
            state_folder(place, KNOWN)


def test_a_file_is_made_closed_or_closed_and_keeps_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"kept")
    (tmp_path / "old").chmod(0o644)
    for name in ("old", "new"):
        private_file(tmp_path / name)
        assert mode(tmp_path / name) == 0o600
    assert (tmp_path / "old").read_bytes() == b"kept"
    write_private(tmp_path / "old", b"new")
    assert ((tmp_path / "old").read_bytes(), mode(tmp_path / "old")) == (b"new", 0o600)


def test_a_journal_is_its_users_alone_and_an_older_one_becomes_so(tmp_path: Path) -> None:
    files = [tmp_path / f"journal.sqlite{suffix}" for suffix in ("", "-wal", "-shm")]
    for before in (None, 0o644):
        if before is not None:
            files[0].chmod(before)
        journal = Journal(files[0])
        journal.append([Record("kind", 1.0, {})])
        assert {mode(path) for path in files if path.exists()} == {0o600}
        journal.close()


def test_blobs_are_their_users_alone_and_older_ones_become_so(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir(mode=0o755)
    BlobStore(tmp_path / "blobs")
    assert mode(tmp_path / "blobs") == mode(tmp_path / "blobs" / "partial") == 0o700


def test_a_workers_folder_is_closed_by_whatever_comes_first(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir(mode=0o755)
    with only_one(tmp_path / "lock"):
        assert mode(tmp_path / "lock") == 0o700
    remember(make_config({"host": "lab", "state_dir": tmp_path / "settings"}, {}))
    assert mode(tmp_path / "settings") == 0o700
    assert mode(tmp_path / "settings" / "settings.toml") == 0o600
    (tmp_path / "table.csv").write_text("x\n1\n")
    add_dataset(tmp_path / "own", "own", tmp_path / "table.csv", ["x:float32=x"])
    assert mode(tmp_path / "own") == mode(tmp_path / "own" / "data") == 0o700
    AppStore(tmp_path / "apps").accept("ab" * 32)
    assert mode(tmp_path / "apps") == mode(tmp_path / "apps" / "apps") == 0o700
