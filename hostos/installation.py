"""Refuses to start when a namesake shadows one of our seven packages.

Most of the names are common words: a user's own ``coordinator.py`` beside a job file, or another
distribution that pip wrote over ours, would otherwise surface as a puzzling ImportError later.
"""

from __future__ import annotations

from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

# One file of each package that a namesake is unlikely to have.
OWN_FILES = {
    "atoll": "opdag.py",
    "coordinator": "scheduler.py",
    "worker": "daemon.py",
    "hostos": "installation.py",
    "protos": "bounds.py",
    "strategies": "__init__.py",
    "compressors": "__init__.py",
}


def check_installation(path: Sequence[str] | None = None, home: Path | None = None) -> None:
    """Raise UsageError unless Python finds all seven packages in one folder, with our files in them.

    ``path`` is searched as ``sys.path`` is (None: ``sys.path`` itself); ``home`` is the folder the
    packages should be in (None: the one this file was loaded from). Nothing is imported.
    """
    home = (home or Path(__file__).parent.parent).resolve()
    for name, own_file in OWN_FILES.items():
        found = _origin(name, path)
        if found is None:
            # Editable installs may be served by an import hook that PathFinder does not know.
            found = home / name / "__init__.py"
        if found.parent != home / name:
            raise UsageError(
                f"{found} shadows Atoll's package {name!r} in {home}; rename it, start from another "
                f"folder, or install Atoll in a virtual environment of its own"
            )
        if not (home / name / own_file).is_file():
            raise UsageError(
                f"{home / name} is not Atoll's (it has no {own_file}): another distribution was "
                f"installed over it; reinstall Atoll in a virtual environment of its own"
            )


def check_beside(job_file: Path) -> None:
    """Raise UsageError when a namesake of one of our packages lies beside ``job_file``.

    A job file may import its neighbours, so its folder is searched before ours.
    """
    folder = job_file.resolve().parent
    home = Path(__file__).parent.parent.resolve()
    if folder == home:
        return
    for name in OWN_FILES:
        for namesake in (folder / f"{name}.py", folder / name / "__init__.py"):
            if namesake.is_file():
                raise UsageError(
                    f"{namesake} has the name of Atoll's package {name!r} and would be imported "
                    f"in its place; rename it"
                )


def _origin(name: str, path: Sequence[str] | None) -> Path | None:
    """Find where an import of ``name`` would be loaded from; None when the path holds none."""
    spec = PathFinder.find_spec(name, None if path is None else list(path))
    if spec is None:
        return None
    if spec.origin is not None:
        return Path(spec.origin).resolve()
    folders = list(spec.submodule_search_locations or [])  # a folder without __init__.py
    return Path(folders[0]).resolve() / "__init__.py" if folders else None
