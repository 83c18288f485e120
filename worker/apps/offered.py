"""An app that was offered to this worker: its bundle, fetched and unpacked, and what its owner can do."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING

import structlog

from atoll.errors import BadFrame, UsageError
from hostos.files.refusals import disk
from hostos.packages import pinned
from hostos.packages.fetching import NotFetched, checked_source
from hostos.packages.shelf import Shelf
from protos import app_bundle
from protos import atoll_apps_pb2 as pb
from protos.app_signing import signer
from protos.text_limits import REASON_CHARS, clean
from worker.apps.code import AppCode, unpack
from worker.apps.store import KnownApp
from worker.config import default_state_dir

if TYPE_CHECKING:
    from pathlib import Path

    from hostos.packages.pinned import Pinned
    from hostos.packages.shelf import Environment
    from worker.apps.context import AppContext
    from worker.apps.parts import Parts
    from worker.cancel import Cancel

log = structlog.get_logger()


class OfferedApp:
    """The app of one run; not thread-safe."""

    def __init__(self, offer: pb.AppOffer, parts: Parts, context: AppContext) -> None:
        self._run, self._app = offer.run, offer.app
        self._parts, self._context = parts, context
        self._packages: tuple[Pinned, ...] = ()
        self._environment: Environment | None = None

    def fetched(self, ended: Cancel) -> bytes:
        """The app's bundle, looked at and remembered as asked for."""
        app, store = self._app, self._context.store
        most = app_bundle.MAX_BUNDLE_BYTES + app_bundle.MAX_FILES * 2 * app_bundle.MAX_PATH_CHARS
        if app.size > most:
            raise BadFrame(f"an app bundle of {app.size} bytes; at most {most} are accepted")
        data = store.offers.read(app.hash)
        if data is None:
            self._parts.fetch(self._run, {app.hash: app.size}, ended)
            data = self._parts.cache.path(app.hash).read_bytes()
        spec, _ = app_bundle.opened(data, app.hash)
        if spec.client != app.client:
            raise BadFrame(f"the app's ClientApp is {spec.client}, announced was {app.client[:200]}")
        self._packages = spec.packages
        store.asked(
            KnownApp(app.hash, spec.name, spec.version, spec.publisher, time.time(), signer=signer(app))
        )
        return data

    def unpacked(self, data: bytes, outbox: Path) -> AppCode:
        """Its files, once its owner has accepted it. Raises StorageError."""
        store = self._context.store
        folder = store.code_dir(self._app.hash)
        with disk(f"create {folder}"):
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            outbox.mkdir(mode=0o700, parents=True, exist_ok=True)
        code = unpack(data, self._app.hash, folder)
        store.offers.drop(self._app.hash)
        return code

    def install(self, code: AppCode, ended: Cancel) -> None:
        """Have the packages that it brings, and this installation lacks, in a folder of theirs, ``site``.

        Raises NotFetched, UsageError where this machine's owner allows none, BadFrame, StorageError.
        """
        self.close()
        wanted = pinned.lacking(code.spec.packages)
        if wanted:
            self._environment = self._installed(wanted, ended)

    @property
    def site(self) -> str:
        """The folder that its process appends to its path, "" where it needs none."""
        return str(self._environment.site) if self._environment is not None else ""

    def check(self, code: AppCode) -> None:
        """Raise AccessDenied unless its files and packages are those that were accepted."""
        code.check()
        if self._environment is not None:
            self._environment.check()

    def close(self) -> None:
        """Let its packages be removed once there is no room for them."""
        environment, self._environment = self._environment, None
        if environment is not None:
            environment.close()

    def _installed(self, wanted: list[Pinned], ended: Cancel) -> Environment:
        config, named = self._context.config, ", ".join(map(str, wanted))
        if not config.app_packages:
            raise UsageError(
                f"the app brings packages ({named}), and this worker installs none; its owner may allow it, "
                "from a folder of wheels or an index: `atoll-worker join --allow-apps --app-packages DIR`"
            )
        log.info("app.packages", run=f"{self._run:x}", packages=named)
        try:
            source = checked_source(config.app_packages)
        except UsageError as error:
            log.warning("app.packages_not_fetched", run=f"{self._run:x}", reason=str(error))
            raise UsageError("its owner's source of packages cannot be used; see that worker's log") from None
        try:
            root = self._context.store.root / "packages"
            return Shelf(root, source, config.app_packages_bytes).open(wanted, lambda: ended.is_set)
        except NotFetched as error:
            # What pip printed has this machine's folders and addresses: it stays here.
            output = clean(error.output, REASON_CHARS, lines=True)
            log.warning("app.packages_not_fetched", run=f"{self._run:x}", reason=str(error), output=output)
            raise

    def how_to_accept(self) -> str:
        """What its owner can do, who has not accepted it yet."""
        folder = self._context.config.state_dir
        option = "" if folder == default_state_dir() else f" --state-dir {folder}"
        brings = f" (and the {len(self._packages)} packages that it brings)" if self._packages else ""
        return (
            f"its owner has not accepted this app{brings}; read it and accept it there: "
            f"`atoll-worker apps show {self._app.hash[:16]}{option}`, "
            f"`atoll-worker apps accept {self._app.hash[:16]}{option}`" + self._or_its_publisher(option)
        )

    def _or_its_publisher(self, option: str) -> str:
        who = signer(self._app)
        return f", or all that {who} signs: `atoll-worker apps accept {who}{option}`" if who else ""

    def how_to_install(self, code: AppCode | None) -> str:
        """What it lacks here, "" where that is nothing."""
        lacking = app_bundle.missing_dependencies(code.spec) if code is not None else []
        if not lacking:
            return ""
        return f"\nnot installed there: `pip install {shlex.join(lacking)}`"[:REASON_CHARS]
