"""An app that was offered to this worker: its bundle, fetched and unpacked, and what its owner can do."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING

from atoll.errors import BadFrame, StorageError
from protos import app_bundle
from protos import atoll_apps_pb2 as pb
from protos.app_signing import signer
from protos.text_limits import REASON_CHARS
from worker.apps.code import AppCode, unpack
from worker.apps.store import KnownApp
from worker.config import default_state_dir

if TYPE_CHECKING:
    from pathlib import Path

    from worker.apps.context import AppContext
    from worker.apps.parts import Parts
    from worker.cancel import Cancel


class OfferedApp:
    """The app of one run; not thread-safe."""

    def __init__(self, offer: pb.AppOffer, parts: Parts, context: AppContext) -> None:
        self._run, self._app = offer.run, offer.app
        self._parts, self._context = parts, context

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
        store.asked(
            KnownApp(app.hash, spec.name, spec.version, spec.publisher, time.time(), signer=signer(app))
        )
        return data

    def unpacked(self, data: bytes, outbox: Path) -> AppCode:
        """Its files, once its owner has accepted it. Raises StorageError."""
        store = self._context.store
        folder = store.code_dir(self._app.hash)
        try:
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            outbox.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot create {folder}: {error.strerror}") from None
        code = unpack(data, self._app.hash, folder)
        store.offers.drop(self._app.hash)
        return code

    def how_to_accept(self) -> str:
        """What its owner can do, who has not accepted it yet."""
        folder = self._context.config.state_dir
        option = "" if folder == default_state_dir() else f" --state-dir {folder}"
        return (
            "its owner has not accepted this app; read it and accept it there: "
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
