"""Fetching an app's wheels from where this machine's owner says, in a process under limits.

pip chooses the wheel that fits this Python, and checks its hash. It gets a list that we wrote, no
configuration of the machine, its user or the environment, and builds nothing.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from atoll.errors import AtollError, UsageError
from hostos.app_guard import Guarded
from hostos.files.refusals import disk
from hostos.packages import bounded_pip
from hostos.packages.pinned import Pinned, normal, requirements

WITHIN_S = 900.0
_LOOK_S = 0.1
_TAIL_BYTES = 4000
_WORDS = ("download", "--quiet", "--no-input", "--disable-pip-version-check", "--no-cache-dir", "--no-deps",
          "--only-binary", ":all:", "--require-hashes", "--progress-bar", "off")  # fmt: skip
_OF_THE_WAY = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
               "https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY")  # fmt: skip


class NotFetched(AtollError):
    """Packages could not be fetched; ``output``: the end of what pip printed, for this machine's log."""

    def __init__(self, words: str, output: str = "") -> None:
        super().__init__(words)
        self.output = output


def checked_source(source: str) -> str:
    """Return where wheels come from: an absolute folder, or the address of an index. UsageError."""
    if "://" not in source:
        folder = Path(source).expanduser()
        if not source or not folder.is_dir():
            raise UsageError(
                f"packages from {source[:80]!r}: no such folder; give a folder of wheels or https://HOST/simple"
            )
        return str(folder.resolve())
    parts = urlsplit(source)
    try:
        near = parts.hostname == "localhost" or ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        near = False
    if not parts.hostname or parts.scheme not in ("https", "http") or (parts.scheme == "http" and not near):
        raise UsageError(f"packages from {source[:80]!r}: give a folder of wheels or https://HOST/simple")
    if "@" in parts.netloc or parts.query or parts.fragment or not source.isprintable() or " " in source:
        raise UsageError(
            "packages from an address with a password or a query: processes and logs would show it; give a "
            "folder that `pip download` filled"
        )
    return source


def fetch(
    packages: Sequence[Pinned],
    source: str,
    scratch: Path,
    most_bytes: int,
    stop: Callable[[], bool] = lambda: False,
    within_s: float = WITHIN_S,
) -> Path:
    """Fetch a wheel for each package; returns their folder below ``scratch``, which is an empty folder.

    Raises NotFetched, also where that would take more than ``most_bytes`` on the disk, ``within_s`` or
    once ``stop`` returns true; StorageError, UsageError.
    """
    if importlib.util.find_spec("pip") is None:
        raise UsageError("pip is not installed beside Atoll there; `python -m ensurepip` installs it")
    wheels, home = scratch / "wheels", scratch / "home"
    with disk(f"fetch packages into {scratch}", "free space there"):
        for folder in (wheels, home):
            folder.mkdir(mode=0o700)
        (home / "packages.txt").write_text(requirements(packages))
        where = _where(source, packages, home)
        with (home / "output").open("wb") as output:
            guarded = Guarded(
                [
                    *(sys.executable, "-P", bounded_pip.__file__, str(most_bytes), str(int(within_s) + 1)),
                    *(*_WORDS, "--dest", str(wheels), "-r", str(home / "packages.txt"), *where),
                ],
                (),
                _environment(home, "://" in source),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                wrong = _awaited(guarded, scratch, most_bytes, stop, time.monotonic() + within_s)
            finally:
                guarded.end()
    code = guarded.process.returncode
    if wrong or code:
        named = ", ".join(map(str, packages[:8])) + (" and more" if len(packages) > 8 else "")
        wrong = wrong or "no wheel with an accepted hash for this Python was found for one of"
        raise NotFetched(f"{wrong} {named}", _tail(home / "output"))
    return wheels


def _where(source: str, packages: Sequence[Pinned], home: Path) -> list[str]:
    if "://" in source:
        return ["--index-url", source, "--retries", "2"]
    # Of the folder only wheels by these names: pip would follow a page's links to anywhere.
    links, wanted = home / "links", {package.name for package in packages}
    links.mkdir()
    for path in Path(source).glob("*.whl"):
        if normal(path.name.split("-")[0]) in wanted:
            (links / path.name).symlink_to(path)
    return ["--no-index", "--find-links", str(links)]


def _environment(home: Path, away: bool) -> dict[str, str]:
    shown = ("PATH", "LANG", "LD_LIBRARY_PATH", *(_OF_THE_WAY if away else ()))
    kept = {name: os.environ[name] for name in shown if name in os.environ}
    return {**kept, "HOME": str(home), "TMPDIR": str(home), "PIP_CONFIG_FILE": os.devnull}


def _awaited(
    guarded: Guarded, scratch: Path, most_bytes: int, stop: Callable[[], bool], until_s: float
) -> str:
    """Wait for the end; returns why it was not waited for."""
    while True:
        with suppress(subprocess.TimeoutExpired):
            guarded.process.wait(_LOOK_S)
            return ""
        if stop():
            return "the run ended before there were"
        if time.monotonic() > until_s:
            return "it took too long to fetch"
        if size_of(scratch) > most_bytes:
            return f"more than {most_bytes} bytes for"


def size_of(folder: Path) -> int:
    """Return the bytes of the files below a folder; what vanishes meanwhile counts nothing."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_size
    return total


def _tail(path: Path) -> str:
    try:
        return path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
    except OSError:
        return ""
