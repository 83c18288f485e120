"""Wheels that want more than to be read."""

from __future__ import annotations

import stat
import zipfile
from pathlib import Path

import pytest

from atoll.errors import BadFrame, UsageError
from hostos.packages.pinned import parse
from hostos.packages.wheels import chosen, shadowing, table_of, unpack
from tests.hostos.packages.made_wheels import make_wheel

ROOM = 1 << 20


def only(folder: Path) -> list[Path]:
    return list(folder.glob("*.whl"))


def test_modules_are_unpacked_and_scripts_pth_files_and_caches_are_not(tmp_path: Path) -> None:
    make_wheel(tmp_path, "tiny", {
        "tiny/__init__.py": "x = 1\n",
        "tiny.pth": "import os; os.abort()\n",
        "tiny/__pycache__/__init__.cpython-311.pyc": "evil",
        "tiny-1.0.data/purelib/tiny/more.py": "y = 2\n",
        "tiny-1.0.data/scripts/pip": "#!python\n",
        "tiny-1.0.data/data/etc/passwd": "root\n",
        "tiny-1.0.data/headers/tiny.h": "int x;\n",
    })  # fmt: skip
    files = unpack(only(tmp_path), ROOM, tmp_path / "site")
    there = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.*")}
    assert {name for name in files if "dist-info" not in name} == {"tiny/__init__.py", "tiny/more.py"}
    assert {name for name in there if "dist-info" not in name} == {"tiny/__init__.py", "tiny/more.py"}
    assert unpack(only(tmp_path), ROOM) == files  # what they prove without being written


@pytest.mark.parametrize("name", ["../out.py", "/out.py", "a/../../out.py", "a\\b.py", "C:out.py", "a//b.py"])
def test_no_name_leads_outside(tmp_path: Path, name: str) -> None:
    make_wheel(tmp_path / "w", "tiny", {name: "x"})
    with pytest.raises(BadFrame, match="not a plain file inside"):
        unpack(only(tmp_path / "w"), ROOM, tmp_path / "a" / "site")
    assert not list(tmp_path.rglob("out.py"))


def test_a_link_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        entry = zipfile.ZipInfo("tiny.py")
        entry.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(entry, "/etc/passwd")
    with pytest.raises(BadFrame, match="not a plain file inside"):
        unpack([path], ROOM, tmp_path / "site")


def test_a_wheel_that_unpacks_to_more_than_there_is_room_for_is_refused_before_it_is_written(
    tmp_path: Path,
) -> None:
    make_wheel(tmp_path, "bomb", {"bomb.py": b"0" * (8 * ROOM)})
    [path] = only(tmp_path)
    assert path.stat().st_size < ROOM // 32
    with pytest.raises(BadFrame, match="take more than 1048576 bytes"):
        unpack([path], ROOM, tmp_path / "site")
    assert not (tmp_path / "site").exists()


def test_two_wheels_may_share_the_same_file_and_no_other_one_of_its_name(tmp_path: Path) -> None:
    make_wheel(tmp_path / "a", "a", {"both/__init__.py": "", "both/a.py": ""})
    make_wheel(tmp_path / "a", "b", {"both/__init__.py": "", "both/b.py": ""})
    assert "both/b.py" in unpack(sorted(only(tmp_path / "a")), ROOM, tmp_path / "site")
    make_wheel(tmp_path / "a", "c", {"both/a.py": "stolen"})
    with pytest.raises(BadFrame, match="another wheel's"):
        unpack(sorted(only(tmp_path / "a")), ROOM, tmp_path / "other")


@pytest.mark.parametrize(("file", "shadowed"), [
    ("torch/__init__.py", "torch"), ("grpc.py", "grpc"), ("worker/apps/child.py", "worker"), ("os.py", "os"),
    ("google/__init__.py", "google"), ("numpy.cpython-311-x86_64-linux-gnu.so", "numpy"),
    ("flwr/x.py", "flwr"), ("google/mine/__init__.py", ""), ("mine/torch.py", ""),
    ("mine.libs/libgomp.so", ""),
])  # fmt: skip
def test_modules_of_this_installation_cannot_be_brought_along(file: str, shadowed: str) -> None:
    if shadowed == "flwr":
        pytest.importorskip("flwr")
    assert shadowing({"mine/__init__.py": 0, "mine-1.0.dist-info/METADATA": 0, file: 0}) == shadowed


def test_only_a_wheel_of_an_accepted_hash_is_chosen(tmp_path: Path) -> None:
    package = make_wheel(tmp_path, "tiny", {"tiny.py": "x = 1"})
    assert chosen(tmp_path, [package]) == only(tmp_path)
    make_wheel(tmp_path, "tiny", {"tiny.py": "x = 2"})
    with pytest.raises(BadFrame, match="none of the hashes"):
        chosen(tmp_path, [package])
    (tmp_path / "more.txt").touch()
    with pytest.raises(BadFrame, match=r"'more.txt' is not a wheel"):
        chosen(tmp_path, [package])


def test_a_folder_of_wheels_is_written_as_an_apps_table(tmp_path: Path) -> None:
    import tomllib

    packages = [make_wheel(tmp_path, name, {f"{name}.py": ""}) for name in ("big", "tiny")]
    found = tomllib.loads(table_of(tmp_path))["tool"]["atoll"]["packages"]
    assert list(parse(found, "here")) == packages
    make_wheel(tmp_path, "tiny", {}, version="2.0")
    with pytest.raises(UsageError, match="two versions"):
        table_of(tmp_path)
