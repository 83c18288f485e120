"""Running a Flower app from a command: on the coordinator's workers, or on workers of this command's own."""

from __future__ import annotations

import os
import re
import sys
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from atoll.errors import AtollError
from coordinator.cli.local_fleet import LocalFleet
from coordinator.client.endpoint import default_state_dir
from coordinator.flower.launcher import AppCommand, Wish
from coordinator.flower.packages import installed
from coordinator.flower.progress import Shown
from hostos.allotted import threads_each
from hostos.command_line import err, print_json
from protos.app_bundle import IGNORED, Bundle, ignore_results

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from coordinator.client.endpoint import Endpoint

LOADS_WITHIN_S = 600.0  # an app on a fresh worker
_ENV = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def run_app(
    endpoint: Endpoint,
    wish: Wish,
    *,
    json: bool,
    heard: Callable[[Mapping[str, Any]], None] = lambda event: None,
    joined: Callable[[], None] = lambda: None,
) -> None:
    """Run an app to its end and show what happens; ``heard`` is called with every event, ``joined`` while the
    ServerApp's process starts. Raises what ended it."""
    if not json:
        spec, bundle = wish.bundle.spec, wish.bundle
        err.print(
            f"{spec.name} {spec.version}, {bundle.files} files, {len(bundle.data)} bytes, hash {bundle.hash}"
        )
    try:
        _follow(endpoint, wish, json, heard, joined)
    finally:
        _set_aside(wish.folder, wish.bundle)


@contextmanager
def local_nodes(wish: Wish, workers: int) -> Iterator[tuple[Endpoint, Wish, Callable[[], None]]]:
    """A coordinator and workers of this machine for one run, which are its nodes in turn; the address, the
    wish to run there, and what waits until they have joined."""
    workers = min(workers, wish.nodes)
    threads = threads_each(workers)
    options = ["--allow-apps", "--apps-only", "--accept-app", wish.bundle.hash, "--threads", str(threads)]
    options += ["--app-nodes", str(-(-wish.nodes // workers)), "--sandbox", "off"]
    options += [word for name in sorted(os.environ) for word in ("--app-env", name) if _ENV.fullmatch(name)]
    options += ["--app-packages", wish.packages] if wish.packages else []
    # Which host has which node changes nothing.
    with LocalFleet(workers, options, in_order=False, awaited=False) as fleet:
        yield fleet.client.endpoint, replace(wish, wait_s=LOADS_WITHIN_S, own=workers), fleet.joined


def _follow(
    endpoint: Endpoint,
    wish: Wish,
    json: bool,
    heard: Callable[[Mapping[str, Any]], None],
    joined: Callable[[], None],
) -> None:
    shown = Shown()
    output = sys.stderr if json else None
    with (
        installed(wish, default_state_dir() / "app-packages") as packages,
        AppCommand(endpoint, wish, output, packages) as command,
    ):
        joined()
        for event in command.events():
            heard(event)
            if json:
                print_json(event)
                continue
            for line in shown.take(event):
                err.print(line)
    if not json:
        err.print(shown.summary())


def _set_aside(folder: Path, bundle: Bundle) -> None:
    """What the run left in the app's folder is not the app: its hash, which people accepted, stays."""
    try:
        found = ignore_results(folder, bundle)
    except (OSError, AtollError) as error:
        err.print(f"{folder}: what the run wrote there counts as the app's: {error}")
        return
    if found:
        named = ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
        err.print(f"{named} in {folder}: results, no part of the app (named in {IGNORED})")
