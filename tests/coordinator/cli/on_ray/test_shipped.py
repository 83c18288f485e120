"""A folder goes into a store in pieces, and comes out of it whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.errors import StorageError
from coordinator.cli.on_ray import shipped as module
from coordinator.cli.on_ray.shipped import linked, shipped, unpacked


class Store:
    """Stands for Ray's."""

    def __init__(self) -> None:
        self.held: list[bytes] = []

    def put(self, value: bytes) -> int:
        self.held.append(value)
        return len(self.held) - 1

    def get(self, reference: int) -> bytes:
        return self.held[reference]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "CHUNK_BYTES", 3)
    folder = tmp_path / "source"
    (folder / "mnist").mkdir(parents=True)
    (folder / "mnist" / "rows").write_bytes(b"12345678")
    (folder / "empty").touch()
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_what_is_unpacked_is_what_was_shipped_in_pieces_of_a_bounded_size(
    source: Path, tmp_path: Path
) -> None:
    store = Store()
    files = shipped(source, store.put)
    assert store.held == [b"123", b"456", b"78"]
    unpacked(files, tmp_path / "there" / "data", store.get)
    assert contents(tmp_path / "there" / "data") == contents(source)
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["data"]


def test_a_second_host_of_a_node_fetches_nothing(source: Path, tmp_path: Path) -> None:
    store = Store()
    files = shipped(source, store.put)
    unpacked(files, tmp_path / "data", store.get)
    store.held.clear()
    unpacked(files, tmp_path / "data", store.get)


def test_what_breaks_off_leaves_nothing(source: Path, tmp_path: Path) -> None:
    store = Store()
    files = shipped(source, store.put)

    def full(reference: int) -> bytes:
        if reference == 1:
            raise OSError(28, "No space left on device")
        return store.get(reference)

    with pytest.raises(StorageError, match="free some space"):
        unpacked(files, tmp_path / "there" / "data", full)
    assert list((tmp_path / "there").iterdir()) == []


def test_linked_files_are_on_the_disk_once(source: Path, tmp_path: Path) -> None:
    linked(source, tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(source)
    assert (tmp_path / "copy" / "mnist" / "rows").stat().st_ino == (source / "mnist" / "rows").stat().st_ino


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot copy"):
        linked(tmp_path / "none", tmp_path / "copy")
