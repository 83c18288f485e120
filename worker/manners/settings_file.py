"""The one settings file of a worker: ``settings.toml`` in its state folder, for people and commands alike.

A command that changes a setting replaces the file; the daemon looks at it a few times a second, so that a
change takes effect without another way to talk to it (docs/decisions/037). Settings that are not in it have
their defaults. The token is never in it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit

from atoll.errors import StorageError, UsageError
from hostos.files.locked_json import read_object
from hostos.files.private_files import write_private

SETTINGS_FILE = "settings.toml"
OLDER_FILE = "worker.json"  # of 0.4.0 and before
MAX_FILE_BYTES = 64 << 10
HEAD = """# Settings of atoll-worker for this state folder; `atoll-worker config` explains each of them.
# A running worker takes up a change of its limits at once, all others when it joins next. Commands that
# change a setting leave comments of your own as they are.
"""


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings that were written, by name; nothing where none were.

    UsageError with the place where the file is not TOML; an older version's file that is damaged counts as
    absent.
    """
    path = folder / SETTINGS_FILE
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path} is larger than {MAX_FILE_BYTES >> 10} KiB; delete all but settings")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return read_object(folder / OLDER_FILE, MAX_FILE_BYTES)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path} cannot be read: {error}; correct that, or delete the file") from None


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Change the file to ``settings``; comments stay. StorageError when the disk refuses."""
    path = folder / SETTINGS_FILE
    try:
        document = tomlkit.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # there is none yet, or none to keep
        document = tomlkit.parse(HEAD)
    given = {name: value for name, value in settings.items() if value is not None}
    for name in [name for name in document if name not in given]:
        del document[name]
    for name, value in given.items():
        if document.get(name) != value:
            document[name] = list(value) if isinstance(value, tuple) else value
    write_private(path, tomlkit.dumps(document).encode())
    (folder / OLDER_FILE).unlink(missing_ok=True)


def stamp(folder: Path) -> tuple[int, int, int]:
    """Return what differs after every change of the file."""
    try:
        found = (folder / SETTINGS_FILE).stat()
    except OSError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_size, found.st_ino
