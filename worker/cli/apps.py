"""`atoll-worker apps`: apps that may run on this machine."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from atoll.errors import BadFrame, UsageError
from hostos.command_line import AsJson, out, print_json, shown_time
from protos.app_bundle import PROJECT, parse_app
from protos.app_signing import SCHEME
from protos.text_limits import clean
from worker.apps.store import AppStore
from worker.cli.options import StateDir
from worker.cli.running import signal_consent_changed
from worker.config import default_state_dir
from worker.manners.settings_file import read_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from worker.apps.store import KnownApp

MAX_SHOWN_CHARS = 10 << 20

apps = typer.Typer(help="Apps (foreign Python code) that may run on this machine.", no_args_is_help=True)

Hash = Annotated[
    str, typer.Argument(metavar="HASH", help="Hash that `apps list` shows, its first digits, or a publisher.")
]


def register(app: typer.Typer) -> None:
    """Add this module's commands to the `atoll-worker` command."""
    app.add_typer(apps, name="apps")


@apps.command("list", epilog="Example: atoll-worker apps list --json")
def list_apps(state_dir: StateDir = None, json: AsJson = False) -> int:
    """List the apps that this machine was asked to run, and which of them are allowed."""
    store = AppStore(state_dir or default_state_dir())
    known = store.known()
    if json:
        found = [asdict(a) | {"accepted": a.accepted, "files": _where(store, a.hash)} for a in known]
        print_json(found)
        return 0
    table = Table("hash", "app", "publisher", "asked for", "accepted", "to read it", box=None)
    signed = store.publishers()
    for app in known:
        given = app.accepted or (app.signer in signed and not app.refused)
        word = Text("yes", style="green") if given else "refused" if app.refused else "no"
        where = f"apps show {app.hash[:16]}" if store.code_dir(app.hash).is_dir() else "-"
        where = f"apps show {app.hash[:16]}" if store.offers.read(app.hash) is not None else where
        named = f"{app.name} {app.version}".strip() or "-"
        who = " ".join(filter(None, [app.publisher, f"({app.signer[:18]}...)" if app.signer else ""]))
        table.add_row(app.hash[:16], named, who or "-", shown_time(app.asked_s), word, where)
    out.print(table if known else "no app was requested; only a worker with --allow-apps gets requests")
    return 0


@apps.command(epilog="Example: atoll-worker apps show 3f6c0a91d2e47b58 mine/client.py")
def show(
    name: Hash,
    file: Annotated[str, typer.Argument(metavar="[FILE]", help="Print this file of the app.")] = "",
    state_dir: StateDir = None,
) -> int:
    """List an app's files, or print one, so that you can read them before you accept the app; until then none
    is unpacked."""
    store = AppStore(state_dir or default_state_dir())
    full = store.full_name(name)
    folder = store.code_dir(full)
    if folder.is_dir() and store.offers.read(full) is None:
        paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    else:
        files = store.offers.files(full)
    if file and file not in files:
        raise UsageError(f"app {full[:16]} holds no {file[:80]!r}; without a name this lists its files")
    if file:
        out.print(clean(files[file].decode(errors="replace"), MAX_SHOWN_CHARS, lines=True), soft_wrap=True)
        return 0
    for path, data in sorted(files.items()):
        out.print(f"{len(data):10,}  {path}", soft_wrap=True)
    _show_packages(files, state_dir or default_state_dir())
    return 0


@apps.command(epilog="Example: atoll-worker apps refuse 3f6c0a91d2e47b58")
def refuse(name: Hash, state_dir: StateDir = None) -> int:
    """Refuse an app for good, whoever signed it: its files are removed and no longer fetched."""
    folder = state_dir or default_state_dir()
    _show("refused", AppStore(folder).refuse(name), folder)
    return 0


@apps.command(epilog="Example: atoll-worker apps accept 3f6c0a91d2e47b58")
def accept(name: Hash, state_dir: StateDir = None) -> int:
    """Allow this app's Python code to run here from now on; any change to its files needs new consent.

    Given a publisher (`ed25519:...`) instead, allow every app that it signs, changed or new, without further
    questions. A running worker with --allow-apps that was asked for the app loads it at once.
    """
    folder = state_dir or default_state_dir()
    store = AppStore(folder)
    if name.startswith(SCHEME):
        _notify(f"accepted: all that {store.accept_publisher(name)} signs", folder)
    else:
        accepted = store.accept(name)
        with contextlib.suppress(UsageError, BadFrame):  # accepted before it was ever offered
            _show_packages(store.offers.files(accepted.hash), folder)
        _show("accepted", accepted, folder)
    return 0


@apps.command(epilog="Example: atoll-worker apps revoke 3f6c0a91d2e47b58")
def revoke(name: Hash, state_dir: StateDir = None) -> int:
    """Forbid this app, or all apps of this publisher, and stop those that are running. The files are
    deleted."""
    folder = state_dir or default_state_dir()
    store = AppStore(folder)
    if name.startswith(SCHEME):
        _notify(f"revoked: {store.revoke_publisher(name)}", folder)
    else:
        _show("revoked", store.revoke(name), folder)
    return 0


@apps.command(epilog="Example: atoll-worker apps publishers")
def publishers(state_dir: StateDir = None, json: AsJson = False) -> int:
    """List the publishers whose signed apps may run here."""
    found = AppStore(state_dir or default_state_dir()).publishers()
    if json:
        print_json([{"publisher": name, "accepted_s": at_s} for name, at_s in found.items()])
        return 0
    for name, at_s in found.items():
        out.print(f"{name}  since {shown_time(at_s)}", soft_wrap=True)
    if not found:
        out.print("no publisher is accepted; apps are, by their hash (`atoll-worker apps list`)")
    return 0


def _show_packages(files: Mapping[str, bytes], folder: Path) -> None:
    """What accepting an app would install here, beside this installation."""
    packages = parse_app(files.get(PROJECT, b""), PROJECT).packages
    if not packages:
        return
    source = read_settings(folder).get("app_packages") or ""
    origin = f"from {source}" if source else "which this worker does not do without --app-packages SOURCE"
    out.print(f"it installs packages of its own, beside this installation, {origin}:", soft_wrap=True)
    for package in packages:
        more = f" or {len(package.hashes) - 1} more" if len(package.hashes) > 1 else ""
        out.print(f"    {package}  sha256 {package.hashes[0]}{more}", soft_wrap=True)


def _where(store: AppStore, name: str) -> str:
    """Folder of an accepted app's files, empty where they are not unpacked."""
    folder = store.code_dir(name)
    return str(folder) if folder.is_dir() else ""


def _show(what: str, app: KnownApp, folder: Path) -> None:
    named = f" ({app.name} {app.version})" if app.name else ""
    _notify(f"{what} {app.hash}{named}", folder)


def _notify(words: str, folder: Path) -> None:
    notified = "; the running worker was notified" if signal_consent_changed(folder) else ""
    out.print(f"{words}{notified}", soft_wrap=True)
