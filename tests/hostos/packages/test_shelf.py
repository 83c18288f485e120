"""Environments of apps: fetched by pip from a folder, bounded, checked, removed in turn."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from atoll.errors import AccessDenied, BadFrame, StorageError, UsageError
from hostos.packages import shelf as module
from hostos.packages.fetching import NotFetched, _environment, checked_source, fetch
from hostos.packages.pinned import Pinned
from hostos.packages.shelf import Shelf
from tests.hostos.packages.made_wheels import make_wheel

ROOM = 1 << 20
pytest.importorskip("pip")


def test_a_package_is_installed_once_imported_by_who_appends_it_and_known_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.invalid/simple")
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "elsewhere"))
    package = make_wheel(tmp_path / "wheels", "tinymath", {"tinymath.py": "half = 21\n"})
    shelf = Shelf(tmp_path / "shelf", str(tmp_path / "wheels"), ROOM)
    with shelf.open([package]) as there:
        there.check()
        words = f"import sys; sys.path.append({str(there.site)!r}); import tinymath; print(tinymath.half)"
        found = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
        assert found.stdout == "21\n"
    assert find_spec("tinymath") is None  # this installation has none of it
    (tmp_path / "wheels" / "tinymath-1.0-py3-none-any.whl").unlink()
    with shelf.open([package]) as again:  # not fetched a second time
        assert again.site == there.site
        (again.site / "tinymath.py").chmod(0o600)
        (again.site / "tinymath.py").write_text("import os; os.abort()\n")
        with pytest.raises(AccessDenied, match=r"'tinymath.py' was changed"):
            again.check()
    with pytest.raises(NotFetched):  # what was changed is no environment any more
        shelf.open([package])
    assert not (tmp_path / "elsewhere").exists()


def test_a_wheel_of_another_hash_or_a_source_distribution_is_not_installed(tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "tiny", {"tiny.py": ""})
    (tmp_path / "wheels" / "other-1.0.tar.gz").write_bytes(b"setup.py would run")
    page = '<a href="https://index.invalid/tiny-1.0-py3-none-any.whl">x</a>'
    (tmp_path / "wheels" / "page.html").write_text(page)
    shelf = Shelf(tmp_path / "shelf", str(tmp_path / "wheels"), ROOM)
    wanted = [Pinned("tiny", "1.0", ("ab" * 32,)), Pinned("other", "1.0", ("ab" * 32,))]
    with pytest.raises(NotFetched, match=r"accepted hash .* tiny 1\.0, other 1\.0") as refused:
        shelf.open(wanted)
    assert str(tmp_path) not in str(refused.value)  # whoever runs the app reads it
    assert [path.name for path in (tmp_path / "shelf").iterdir()] == ["lock"]


def test_fetching_ends_at_its_time_its_bytes_and_when_its_run_does(tmp_path: Path) -> None:
    package = make_wheel(tmp_path / "wheels", "big", {"big.py": os.urandom(2 * ROOM)})
    for at, (room, stop, within_s) in enumerate(
        [(ROOM, False, 60.0), (8 * ROOM, True, 60.0), (8 * ROOM, False, 0.0)]
    ):
        scratch = tmp_path / str(at)
        scratch.mkdir()
        with pytest.raises(NotFetched):
            fetch([package], str(tmp_path / "wheels"), scratch, room, lambda stop=stop: stop, within_s)
        assert sum(path.stat().st_size for path in (scratch / "wheels").iterdir()) <= ROOM


def test_a_package_that_hides_a_module_of_this_installation_is_refused(tmp_path: Path) -> None:
    package = make_wheel(tmp_path / "wheels", "helper", {"helper.py": "", "torch/__init__.py": "stolen = 1"})
    with pytest.raises(BadFrame, match="'torch', which this Python"):
        Shelf(tmp_path / "shelf", str(tmp_path / "wheels"), ROOM).open([package])
    assert [path.name for path in (tmp_path / "shelf").iterdir()] == ["lock"]


def test_what_was_used_longest_ago_goes_first_and_never_what_a_run_has_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ENVIRONMENTS", 2)
    monkeypatch.setattr(
        module, "fetch", lambda packages, _, scratch, *more: _copied(packages[0].name, scratch)
    )
    shelf = Shelf(tmp_path / "shelf", "", ROOM)
    a, b = (shelf.open([make_wheel(tmp_path / name, name, {f"{name}.py": ""})]) for name in ("a", "b"))
    b.close()
    with shelf.open([make_wheel(tmp_path / "c", "c", {"c.py": ""})]) as c:
        assert (a.site.exists(), b.site.exists(), c.site.exists()) == (True, False, True)
        with pytest.raises(StorageError, match="end one"):
            shelf.open([make_wheel(tmp_path / "d", "d", {"d.py": ""})])
        assert a.site.exists()
        assert c.site.exists()
    a.close()


def _copied(name: str, scratch: Path) -> Path:
    target = scratch / "wheels"
    target.mkdir()
    [wheel] = (scratch.parent.parent / name).glob("*.whl")
    (target / wheel.name).write_bytes(wheel.read_bytes())
    return target


@pytest.mark.parametrize("source", [
    "https://user:secret@host/simple", "https://host/simple?token=secret", "http://host/simple", "file:///tmp",
    "ftp://host", "https://", "/no/such/folder", "", "--index-url", "https://host/a b",
])  # fmt: skip
def test_a_source_is_a_folder_or_an_address_without_secrets(source: str) -> None:
    with pytest.raises(UsageError):
        checked_source(source)


def test_pip_sees_no_configuration_of_the_machine_or_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PIP_INDEX_URL", "PIP_CONFIG_FILE", "AWS_SECRET", "PYTHONPATH", "https_proxy"):
        monkeypatch.setenv(name, "elsewhere")
    assert checked_source("https://host/simple") == "https://host/simple"
    assert checked_source("http://127.0.0.1:3141/root") == "http://127.0.0.1:3141/root"
    assert "elsewhere" not in _environment(tmp_path, away=False).values()
    assert _environment(tmp_path, away=True)["https_proxy"] == "elsewhere"
    assert _environment(tmp_path, away=True)["PIP_CONFIG_FILE"] == os.devnull
