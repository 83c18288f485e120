"""Apps on this machine's disk: which ones its owner accepted, their code, parts and states.

In the state folder:

    apps/apps.json           bundle hash -> facts, accepted or not
    apps/publishers.json     publisher -> since when everything that it signs is accepted
    apps/offered/            bundles that nobody accepted yet (``worker.apps.offers``)
    apps/code/HASH           unpacked, of accepted apps alone
    apps/parts/RUN.X         what came
    apps/runs/HASH/RUN-NODE  Context.state of an app's run, kept until the run ends; another app finds none
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.errors import UsageError
from hostos.files.locked_json import changing, read_object
from protos.app_signing import checked_publisher, signer
from worker.apps.code import remove
from worker.apps.offers import Offers
from worker.config import make_state_dir

if TYPE_CHECKING:
    from protos import atoll_apps_pb2 as pb

MAX_FILE_BYTES = 16 << 20
MAX_ASKED = 200  # apps that were only asked for; the oldest are forgotten, never one that was decided on
MAX_TEXT_CHARS = 100  # of each of an app's words
STALE_RUN_S = 7 * 86400.0  # a run's state that was not asked for so long is removed
LEAST_PREFIX = 8
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class KnownApp:
    """An app that this machine was asked to run."""

    hash: str
    name: str = ""
    version: str = ""
    publisher: str = ""
    asked_s: float = 0.0  # wall clock, last time
    accepted_s: float = 0.0  # 0: not accepted
    signer: str = ""  # whose signature of it holds; "" nobody's
    refused_s: float = 0.0  # 0: not refused; whoever signed it

    @property
    def accepted(self) -> bool:
        return self.accepted_s > 0

    @property
    def refused(self) -> bool:
        return self.refused_s > 0


class AppStore:
    """The ``apps`` folder of one worker's state folder."""

    def __init__(self, state_dir: Path) -> None:
        self.root = state_dir / "apps"
        self.offers = Offers(self.root)

    def new_parts_dir(self, run: int) -> Path:
        """Folder of what a run sends until it ends; no other run, nor this one again, gets the same."""
        return self.root / "parts" / f"{run:x}.{secrets.token_hex(4)}"

    def code_dir(self, name: str) -> Path:
        """Folder of the app's unpacked files."""
        return self.root / "code" / name

    def runs_dir(self, name: str) -> Path:
        """Folder of Context.state of this app's runs, ``RUN-NODE`` each."""
        return self.root / "runs" / name

    def drop_state(self, name: str, run: int, node: int) -> None:
        """Remove Context.state of a run that has ended."""
        shutil.rmtree(self.runs_dir(name) / f"{run:x}-{node:x}", ignore_errors=True)
        with contextlib.suppress(OSError):
            self.runs_dir(name).rmdir()  # unless another run of the app has its own there

    # ------------------------------------------------------------ consent

    def known(self) -> list[KnownApp]:
        """Every app asked for or accepted, the newest first."""
        found = self._read()
        return sorted(found.values(), key=lambda app: max(app.asked_s, app.accepted_s), reverse=True)

    def is_accepted(self, name: str) -> bool:
        """True when this machine's owner accepted the app of this hash."""
        app = self._read().get(name)
        return app is not None and app.accepted

    def is_refused(self, name: str) -> bool:
        """True when this machine's owner refused the app of this hash."""
        app = self._read().get(name)
        return app is not None and app.refused

    def accepts(self, app: pb.AppIdentity) -> bool:
        """True when the owner accepted this app, by its hash or by the publisher that signed it, and did not
        refuse it."""
        if self.is_accepted(app.hash):
            return True
        if self.is_refused(app.hash):
            return False
        found = self.publishers()
        return bool(found) and signer(app) in found

    def asked(self, app: KnownApp) -> None:
        """Remember that this app was offered to this machine."""
        with self._changing() as found:
            before = found.get(app.hash) or KnownApp(app.hash)
            words = {key: getattr(app, key)[:MAX_TEXT_CHARS] for key in ("name", "version", "publisher")}
            found[app.hash] = replace(app, **words, accepted_s=before.accepted_s, refused_s=before.refused_s)

    def accept(self, name: str) -> KnownApp:
        """Accept an app by its hash, or by the first digits of one that was asked for.

        UsageError when that names no app, or several.
        """
        return self._decided(name, accepted_s=time.time(), refused_s=0.0)

    def refuse(self, name: str) -> KnownApp:
        """Refuse an app for good, whoever signed it, and remove its files. UsageError as ``accept``."""
        refused = self._decided(name, accepted_s=0.0, refused_s=time.time())
        self.drop_files(refused.hash)
        return refused

    def revoke(self, name: str) -> KnownApp:
        """Take an acceptance back. UsageError when there is none."""
        with self._changing() as found:
            full = self._full(name, found)
            before = found.get(full)
            if before is None or not before.accepted:
                raise UsageError(f"app {full[:12]} is not accepted; `atoll-worker apps list` shows what is")
            found[full] = replace(before, accepted_s=0.0)
        self.drop_files(full)
        return found[full]

    def _decided(self, name: str, *, accepted_s: float, refused_s: float) -> KnownApp:
        with self._changing() as found:
            full = self._full(name, found)
            known = found.get(full, KnownApp(full))
            found[full] = replace(known, accepted_s=accepted_s, refused_s=refused_s)
            return found[full]

    def full_name(self, name: str) -> str:
        """The hash that ``name`` stands for. UsageError when that names no app, or several."""
        return self._full(name, self._read())

    def drop_files(self, name: str) -> None:
        """Remove an app's files: nobody accepts it any more."""
        self.offers.drop(name)
        remove(self.code_dir(name))

    def publishers(self) -> dict[str, float]:
        """Publishers whose signed apps are accepted here, with the time (Unix) since when."""
        return _publishers(read_object(self.root / "publishers.json", MAX_FILE_BYTES))

    def accept_publisher(self, name: str) -> str:
        """Accept whatever this publisher signs, from now on. UsageError for what is not a publisher."""
        name = checked_publisher(name)
        with self._changing_publishers() as found:
            found[name] = time.time()
        return name

    def revoke_publisher(self, name: str) -> str:
        """Take that back; apps accepted by their hash stay accepted. UsageError when it was not accepted."""
        name = checked_publisher(name)
        with self._changing_publishers() as found:
            if found.pop(name, None) is None:
                raise UsageError(f"{name} is not accepted; `atoll-worker apps publishers` shows who is")
        for app in self.known():
            if app.signer == name and not app.accepted:
                self.drop_files(app.hash)
        return name

    @contextlib.contextmanager
    def _changing_publishers(self) -> Iterator[dict[str, float]]:
        make_state_dir(self.root.parent)
        with changing(self.root / "publishers.json", MAX_FILE_BYTES) as items:
            found = _publishers(items)
            yield found
            items.clear()
            items.update(found)

    def _full(self, name: str, found: Mapping[str, KnownApp]) -> str:
        name = name.strip().lower()
        if _HASH.fullmatch(name):
            return name
        matches = [h for h in found if h.startswith(name)] if len(name) >= LEAST_PREFIX else []
        if len(matches) != 1:
            raise UsageError(
                f"{name[:80]!r} names {len(matches)} of the apps that were asked for here; give at least "
                f"{LEAST_PREFIX} digits as `atoll-worker apps list` shows them, or all 64"
            )
        return matches[0]

    def _read(self) -> dict[str, KnownApp]:
        return _apps(read_object(self.root / "apps.json", MAX_FILE_BYTES))

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, KnownApp]]:
        """The apps to change, written back afterwards; the command and the daemon take turns."""
        make_state_dir(self.root.parent)
        with changing(self.root / "apps.json", MAX_FILE_BYTES) as items:
            found = _apps(items)
            yield found
            newest = sorted(found.values(), key=lambda app: app.asked_s, reverse=True)
            asked = [app for app in newest if not app.accepted and not app.refused][:MAX_ASKED]
            kept = [app for app in newest if app.accepted or app.refused] + asked
            items.clear()
            items.update({app.hash: asdict(app) for app in kept})

    # ------------------------------------------------------------ states of runs

    def sweep(self, now_s: float) -> None:
        """Remove arrays of runs that this process does not know, states of runs long ended, and files of apps
        that nobody accepts any more."""
        self.offers.sweep()
        publishers, known = self.publishers(), self._read()
        for code in _folders(self.root / "code"):
            asked = known.get(code.name, KnownApp(code.name))
            if not asked.accepted and (asked.refused or asked.signer not in publishers):
                remove(code)
        shutil.rmtree(self.root / "parts", ignore_errors=True)
        shutil.rmtree(self.root / "outbox", ignore_errors=True)
        for app in _folders(self.root / "runs"):
            for folder in _folders(app) if _HASH.fullmatch(app.name) else [app]:
                with contextlib.suppress(OSError):
                    if now_s - folder.stat().st_mtime > STALE_RUN_S:
                        shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                app.rmdir()


def _folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def _publishers(items: Mapping[str, Any]) -> dict[str, float]:
    """Nobody is trusted by a file that cannot be read."""
    try:
        return {checked_publisher(name): float(at_s) for name, at_s in items.items()}
    except (ValueError, TypeError, AttributeError, UsageError):
        return {}


def _apps(items: Mapping[str, Any]) -> dict[str, KnownApp]:
    """Nothing is accepted by a file that cannot be read."""
    try:
        return {name: KnownApp(**{**_facts(item), "hash": name}) for name, item in items.items()}
    except (ValueError, TypeError):
        return {}


def _facts(item: Any) -> dict[str, Any]:
    unknown = asdict(KnownApp(hash=""))
    return {name: type(value)(item[name]) for name, value in unknown.items() if name in item}
