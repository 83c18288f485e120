"""Bundles: the same files give the same hash, and nothing a bundle says leads outside its folder."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import BadFrame, UsageError
from protos import app_bundle
from protos.app_bundle import (
    IGNORED,
    ignore_results,
    make_bundle,
    missing_dependencies,
    parse_pairs,
    read_app,
    with_overrides,
)
from worker.apps.code import unpack

PROJECT = """
[project]
name = "mine"
version = "1.2.3"
[tool.flwr.app]
publisher = "me"
{more}
[tool.flwr.app.components]
serverapp = "mine.server:app"
clientapp = "mine.client:app"
[tool.flwr.app.config]
rounds = 3
[tool.flwr.app.config.opt]
lr = 0.5
"""


def app_in(folder: Path, more: str = "") -> Path:
    package = folder / "mine"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT.format(more=more))
    for name in ("__init__", "server", "client"):
        (package / f"{name}.py").write_text(f"# {name}\n")
    return folder


def names(data: bytes) -> list[str]:
    return zipfile.ZipFile(BytesIO(data)).namelist()


def zipped(
    *entries: tuple[str, bytes], mode: int = stat.S_IFREG | 0o644, how: int = zipfile.ZIP_STORED
) -> bytes:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", how) as archive:
        for name, data in entries:
            entry = zipfile.ZipInfo(name)
            entry.external_attr, entry.compress_type, entry.create_system = mode << 16, how, 3
            archive.writestr(entry, data)
    return buffer.getvalue()


def refused(data: bytes, folder: Path) -> str:
    with pytest.raises(BadFrame) as error:
        unpack(data, hashlib.sha256(data).hexdigest(), folder / "code")
    assert list(folder.iterdir()) == []
    return str(error.value)


def test_the_same_files_make_the_same_bytes_wherever_and_whenever(tmp_path: Path) -> None:
    first, second = app_in(tmp_path / "a"), app_in(tmp_path / "b")
    for path in second.rglob("*.py"):
        os.utime(path, (1, 1))
        path.chmod(0o700)
    assert make_bundle(first).hash == make_bundle(second).hash
    (second / "mine" / "client.py").write_text("# other\n")
    assert make_bundle(first).hash != make_bundle(second).hash


def test_what_goes_in_is_what_flower_takes(tmp_path: Path) -> None:
    app = app_in(tmp_path / "app")
    for name in (
        "README.md", "LICENSE", "mine/conf.yaml", "mine/data.bin", "test_mine.py", "mine/x_test.py",
        ".git/a.py", "mine/__pycache__/a.py", "build/a.py", "mine/build/kept.py", "data/a.json",
        "out/b.json", "other/pyvenv.cfg", "kept.json", "mine/kept.json",
    ):  # fmt: skip
        (app / name).parent.mkdir(parents=True, exist_ok=True)
        (app / name).write_text("x")
    for part in ("client", "server"):
        (app / "mine" / f"{part}.py").write_text("app = None\n")
    (app / ".gitignore").write_text("# ours\nout/\n/kept.json\n")
    (app / "mine" / "link.py").symlink_to("/etc/passwd")
    ours = names(make_bundle(app).data)
    assert ours == [
        "LICENSE", "README.md", "data/a.json", "mine/__init__.py", "mine/build/kept.py", "mine/client.py",
        "mine/conf.yaml", "mine/kept.json", "mine/server.py", "pyproject.toml",
    ]  # fmt: skip
    command = [str(Path(sys.executable).with_name("flwr")), "build", "--app", str(app)]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    (fab,) = tmp_path.glob("*.fab")
    theirs = sorted(names(fab.read_bytes()))
    assert [name for name in theirs if not name.startswith((".info/", ".git/"))] == ours


def test_fab_include_narrows(tmp_path: Path) -> None:
    app = app_in(tmp_path / "app", 'fab-include = ["mine/*.py"]')
    (app / "notes.md").write_text("x")
    assert "notes.md" not in names(make_bundle(app).data)
    without = app_in(tmp_path / "without", 'fab-exclude = ["mine/client.py"]')
    assert "mine/client.py" not in names(make_bundle(without).data)
    with pytest.raises(UsageError, match=r"matches 'data/\*\.txt'"):
        make_bundle(app_in(tmp_path / "other", 'fab-include = ["mine/*.py", "data/*.txt"]'))


def test_what_a_run_wrote_is_no_part_of_the_app(tmp_path: Path) -> None:
    app = app_in(tmp_path / "app")
    (app / "config.json").write_text("{}")
    before = make_bundle(app)
    assert ignore_results(app, before) == []
    assert not (app / IGNORED).exists()
    for name in ("final_model.json", "out/[1] run.jsonl", "mine/late.py"):
        (app / name).parent.mkdir(exist_ok=True)
        (app / name).write_text("{}")
    assert ignore_results(app, before) == ["final_model.json", "out/[1] run.jsonl"]
    assert make_bundle(app).hash != before.hash  # code that appeared is an edit
    (app / "mine" / "late.py").unlink()
    assert make_bundle(app).hash == before.hash
    (app / "config.json").write_text("{ }")
    assert make_bundle(app).hash != before.hash


def test_a_module_that_atolls_own_would_hide_is_refused(tmp_path: Path) -> None:
    app = app_in(tmp_path / "app")
    (app / "mine" / "worker.py").write_text("")  # not at the root
    make_bundle(app)
    (app / "worker.py").write_text("")
    with pytest.raises(UsageError, match="'worker' at its root"):
        make_bundle(app)
    hidden = (("pyproject.toml", PROJECT.encode()), ("protos/a.py", b""))
    (tmp_path / "un").mkdir()
    assert "'protos' at its root" in refused(zipped(*hidden), tmp_path / "un")


def test_missing_dependencies_are_named_as_pip_takes_them(tmp_path: Path) -> None:
    app = app_in(tmp_path / "app")
    text = (app / "pyproject.toml").read_text()
    wanted = '["numpy>=1", "no-such-package[x]>=2,<3", "other-package; sys_platform == \'win32\'"]'
    (app / "pyproject.toml").write_text(
        text.replace("[tool.flwr.app]", f"dependencies = {wanted}\n[tool.flwr.app]", 1)
    )
    assert missing_dependencies(read_app(app)) == ["no-such-package[x]>=2,<3"]


def test_an_app_that_is_too_large_names_its_largest_file(tmp_path: Path) -> None:
    app = app_in(tmp_path / "app")
    (app / "mine" / "weights.json").write_bytes(b"1" * (11 << 20))
    with pytest.raises(UsageError, match=r"largest is mine/weights\.json with 11534336"):
        make_bundle(app)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"no \[project\]"),
        (
            "[project]\nname = 1\nversion = '1'\n[tool.flwr.app]\na='a'\n[tool.flwr.app.components]\na=1",
            "components|name",
        ),
        (PROJECT.replace("mine.server:app", "mine.server"), "serverapp"),
        (PROJECT.replace("mine.client:app", "worker.client:app"), "Atoll itself uses"),
        (PROJECT.replace("rounds = 3", "rounds = [3]"), "rounds is list"),
        ("[[[", "not TOML"),
    ],
)
def test_a_project_file_that_lacks_something_says_what(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text.replace("{more}", ""))
    with pytest.raises(UsageError, match=words):
        read_app(tmp_path)


def test_config_is_flat_and_overrides_are_checked(tmp_path: Path) -> None:
    config = read_app(app_in(tmp_path / "app")).config
    assert config == {"rounds": 3, "opt.lr": 0.5}
    changed = with_overrides(config, ["rounds=5 opt.lr=1e-3"])
    assert changed == {"rounds": 5, "opt.lr": 1e-3}
    (tmp_path / "more.toml").write_text("rounds = 7\n")
    assert with_overrides(config, [str(tmp_path / "more.toml")])["rounds"] == 7
    with pytest.raises(UsageError, match=r"no 'round'.*opt.lr, rounds"):
        with_overrides(config, ["round=5"])
    for wrong in ("rounds", "rounds=five", "rounds=[1]"):
        with pytest.raises(UsageError, match="--run-config"):
            with_overrides(config, [wrong])
    assert parse_pairs(["a='x y' b=true"], "--x") == {"a": "x y", "b": True}


def test_a_bundle_comes_out_as_it_went_in(tmp_path: Path) -> None:
    bundle = make_bundle(app_in(tmp_path / "app"))
    code = unpack(bundle.data, bundle.hash, tmp_path / "code")
    assert code.spec == bundle.spec
    assert make_bundle(tmp_path / "code").hash == bundle.hash
    unpack(bundle.data, bundle.hash, tmp_path / "code")  # and again over it
    assert sorted(p.name for p in tmp_path.iterdir()) == ["app", "code"]


@pytest.mark.parametrize(
    "name",
    [
        "../evil.py",
        "/etc/evil.py",
        "a/../../evil.py",
        "a//b.py",
        "./a.py",
        "a\\b.py",
        "C:/a.py",
        "",
        "a/",
        "x" * 500,
        "a\n.py",
        "mine/__pycache__/client.cpython-311.pyc",
    ],
)
def test_names_that_lead_outside_are_refused_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    assert "not a plain file" in refused(zipped((name, b"x")), tmp_path) or name == ""


@pytest.mark.parametrize(
    "name", ["native.so", "mine/client.pyc", "evil.pth", "x.PYD", "mine/data.bin", "run.sh"]
)
def test_what_nobody_can_read_before_accepting_it_is_refused(tmp_path: Path, name: str) -> None:
    assert "an app holds text alone" in refused(zipped((name, b"x")), tmp_path)


@pytest.mark.parametrize("name", ["mine/native.so", "client.pyc", "mine/evil.pth"])
def test_an_apps_owner_hears_at_once_that_compiled_files_are_not_taken(tmp_path: Path, name: str) -> None:
    app = app_in(tmp_path / "app")
    (app / name).write_bytes(b"x")
    with pytest.raises(UsageError, match=r"is compiled or a \.pth file, which no worker takes"):
        make_bundle(app)
    (app / ".gitignore").write_text(f"{name}\n")
    assert name not in names(make_bundle(app).data)


def test_links_doubles_and_compressed_files_are_refused(tmp_path: Path) -> None:
    link = zipped(("a.py", b"/etc/passwd"), mode=stat.S_IFLNK | 0o777)
    assert "not a plain file" in refused(link, tmp_path)
    assert "not a plain file" in refused(zipped(("a.py", b""), ("A.py", b"")), tmp_path)
    assert "not a plain file" in refused(zipped(("a.py", b"0" * 10**6), how=zipfile.ZIP_DEFLATED), tmp_path)


def test_too_many_too_large_or_other_bytes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadFrame, match="announced was aaaaaaaaaaaa"):
        unpack(zipped(("a.py", b"")), "a" * 64, tmp_path / "code")
    monkeypatch.setattr(app_bundle, "MAX_FILES", 2)
    assert "3 files" in refused(zipped(*((f"{n}.py", b"") for n in range(3))), tmp_path)
    monkeypatch.setattr(app_bundle, "MAX_BUNDLE_BYTES", 10)
    assert "more than 10 bytes" in refused(zipped(("a.py", b"x" * 11)), tmp_path)


@given(st.binary(max_size=400))
def test_no_bytes_whatever_do_more_than_be_refused(data: bytes) -> None:
    with pytest.raises(BadFrame):
        unpack(data, hashlib.sha256(data).hexdigest(), Path("/nonexistent/code"))
