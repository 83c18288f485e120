"""What runs is what was accepted: the files on the disk are compared before every start."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.errors import AccessDenied
from protos.app_bundle import Bundle, make_bundle
from worker.apps.code import AppCode, unpack

PROJECT = """
[project]
name = "app"
version = "1"
[tool.flwr.app.components]
serverapp = "app.server:app"
clientapp = "app.client:app"
"""


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    source = tmp_path / "source"
    (source / "app" / "deep").mkdir(parents=True)
    (source / "pyproject.toml").write_text(PROJECT)
    (source / "app" / "client.py").write_text("app = print\n")
    (source / "app" / "deep" / "empty.py").write_text("")
    return make_bundle(source)


@pytest.fixture
def code(tmp_path: Path, bundle: Bundle) -> AppCode:
    return unpack(bundle.data, bundle.hash, tmp_path / "code")


def writable(folder: Path) -> Path:
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o700)
    return folder


def test_unpacked_files_are_read_only_and_pass(code: AppCode) -> None:
    code.check()
    for path in (code.folder, *code.folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o500 if path.is_dir() else 0o400)


def link(folder: Path) -> None:
    (folder / "app" / "client.py").unlink()
    (folder / "app" / "client.py").symlink_to(folder / "app" / "deep" / "empty.py")


def swap(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda folder: (folder / "app" / "client.py").write_text("app = input\n"), "client.py' was changed"),
        (
            lambda folder: (folder / "app" / "client.py").write_text("app = evil()\n"),
            "client.py' was changed",
        ),
        (lambda folder: (folder / "app" / "client.py").unlink(), "client.py' vanished"),
        (lambda folder: (folder / "app" / "json.py").write_text(""), "json.py' appeared"),
        (lambda folder: os.mkfifo(folder / "pipe"), "pipe' appeared"),
        (link, "client.py' was changed"),
        (swap, "a link stands"),
        (shutil.rmtree, "cannot be read"),
    ],
)
def test_whatever_changed_since_is_named_and_does_not_pass(
    code: AppCode, bundle: Bundle, change: Callable[[Path], object], word: str
) -> None:
    change(writable(code.folder))
    with pytest.raises(AccessDenied, match=word):
        code.check()
    # The next run has the accepted files again.
    unpack(bundle.data, bundle.hash, code.folder).check()
    code.check()


def test_compiled_files_are_removed_and_never_believed(code: AppCode) -> None:
    cache = writable(code.folder) / "app" / "__pycache__"
    cache.mkdir()
    (cache / "client.cpython-311.pyc").write_bytes(b"anything")
    (code.folder / "app").chmod(0o500)
    code.check()
    assert not cache.exists()
    assert stat.S_IMODE((code.folder / "app").stat().st_mode) == 0o500


def test_files_that_are_there_are_not_written_again_under_a_run_that_uses_them(
    code: AppCode, bundle: Bundle
) -> None:
    before = (code.folder / "app" / "client.py").stat().st_ino
    unpack(bundle.data, bundle.hash, code.folder)
    assert (code.folder / "app" / "client.py").stat().st_ino == before
