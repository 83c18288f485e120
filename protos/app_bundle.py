"""A Flower app as one file: what goes in, its name by content, and how it is safely taken apart.

A bundle is a zip of the app's folder with nothing compressed, files in the order of their names
and one fixed date, so the same files give the same bytes and the same SHA-256 everywhere. That
hash is what a worker's owner accepts before any of the app's Python runs there.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

from atoll.errors import BadFrame, UsageError
from hostos.packages import pinned
from hostos.packages.pinned import Pinned

MAX_BUNDLE_BYTES = 10 << 20  # Flower's own bound for an app
MAX_FILES = 2000
MAX_PATH_CHARS = 400
MAX_CONFIG_KEYS = 1000
MAX_DEPENDENCIES = 200
PROJECT = "pyproject.toml"
INCLUDE = ("*.py", "*.toml", "*.md", "*.yaml", "*.yml", "*.json", "*.jsonl", "/LICENSE")  # as Flower bundles
EXCLUDE = (
    ".*/", "__pycache__/", "*_test.py", "test_*.py", "/build/", "/dist/", "/eggs/", "/lib/", "/lib64/",
    "/parts/", "*.egg", "*.egg-info/", "/env/", "venv/", "/ENV/", "/env.bak/", "venv.bak/",
)  # fmt: skip
SUFFIXES = frozenset({".py", ".toml", ".md", ".yaml", ".yml", ".json", ".jsonl"})  # of INCLUDE
COMPILED = frozenset({".so", ".pyd", ".dll", ".dylib", ".pyc", ".pyo", ".pth", ".o", ".a", ".exe"})
"""Suffixes of what nobody can read before accepting it, or what Python runs of itself."""
IGNORED = ".atollignore"
RESULTS = frozenset({".json", ".jsonl", ".md", ".yaml", ".yml"})
"""Suffixes of what a run may leave; code that appears during a run is an edit."""
OURS = frozenset({"atoll", "coordinator", "worker", "hostos", "protos", "strategies", "compressors"})
_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_DATE = (1980, 1, 1, 0, 0, 0)
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MARKER = re.compile(r";")  # of an environment: whether it is needed here is not judged
_GLOB = re.compile(r"[\\*?\[\]! ]")
_PAIR = re.compile(r"""\s*([^\s=]+)\s*=\s*('[^']*'|"[^"]*"|\S+)""")
ConfigValue = bool | int | float | str


@dataclass(frozen=True, slots=True)
class AppSpec:
    """Declarations of an app's pyproject.toml. ``config`` is flat: a table's keys are joined by dots."""

    name: str
    version: str
    publisher: str
    server: str  # module:attribute
    client: str
    config: Mapping[str, ConfigValue]
    dependencies: tuple[str, ...] = ()  # as [project] lists them; nobody installs them
    packages: tuple[Pinned, ...] = ()  # of [tool.atoll.packages]; machines whose owners allow it install them


@dataclass(frozen=True, slots=True)
class Bundle:
    """An app's files as one content-addressed piece."""

    spec: AppSpec
    data: bytes
    hash: str
    files: int


# ---------------------------------------------------------------- reading an app


def read_app(folder: Path) -> AppSpec:
    """The app in ``folder``. UsageError says what its pyproject.toml lacks."""
    path = folder / PROJECT
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}; give the folder of a Flower app, the one with its {PROJECT}"
        ) from None
    return parse_app(text, str(path))


def parse_app(text: bytes, where: str) -> AppSpec:
    """The app that a pyproject.toml describes; UsageError names ``where`` and what is wrong."""
    try:
        found = tomllib.loads(text.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{where} is not TOML: {error}") from None
    project, app = _table(found, where, "project"), _table(found, where, "tool", "flwr", "app")
    components = _table(app, where, "components")
    return AppSpec(
        name=_text(project, "name", where),
        version=_text(project, "version", where),
        publisher=_text(app, "publisher", where) if "publisher" in app else "",
        server=_reference(components, "serverapp", where),
        client=_reference(components, "clientapp", where),
        config=flat(_table(app, where, "config")) if "config" in app else {},
        dependencies=_dependencies(project, where),
        packages=pinned.parse(_packages(found, where), f"{where}: [tool.atoll.packages]"),
    )


def _dependencies(project: Mapping[str, Any], where: str) -> tuple[str, ...]:
    found = project.get("dependencies", [])
    if not isinstance(found, list) or len(found) > MAX_DEPENDENCIES:
        raise UsageError(f"{where}: dependencies must be a list of at most {MAX_DEPENDENCIES}")
    for item in found:
        if not isinstance(item, str) or len(item) > 200 or not item.isprintable():
            raise UsageError(f"{where}: {str(item)[:80]!r} is not a dependency")
    return tuple(found)


def _packages(found: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    for name in ("tool", "atoll", "packages"):
        found = found.get(name, {})
        if not isinstance(found, dict):
            raise UsageError(f"{where}: {name} of [tool.atoll.packages] is not a table")
    return found


def missing_dependencies(spec: AppSpec) -> list[str]:
    """Return an app's requirements whose packages are not installed here; versions are not compared."""
    missing = []
    for requirement in spec.dependencies:
        name = _PACKAGE.match(requirement)
        try:
            if name is not None and not _MARKER.search(requirement):
                distribution(name.group())
        except PackageNotFoundError:
            missing.append(requirement)
    return missing


def _table(found: Mapping[str, Any], where: str, *names: str) -> Mapping[str, Any]:
    for name in names:
        found = found.get(name, {})
        if not isinstance(found, dict):
            raise UsageError(f"{where}: {name} is not a table")
    if not found and names[-1] != "config":
        raise UsageError(f"{where} has no [{'.'.join(names)}]; is it a Flower app? `flwr new` makes one")
    return found


def _text(table: Mapping[str, Any], key: str, where: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value or len(value) > 200 or not value.isprintable():
        raise UsageError(f"{where}: {key} = {str(value)[:80]!r}; give 1 to 200 printable characters")
    return value


def _reference(table: Mapping[str, Any], key: str, where: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not _REFERENCE.fullmatch(value):
        raise UsageError(f"{where}: {key} = {str(value)[:80]!r}; write module:attribute, as in my.client:app")
    root = re.split(r"[.:]", value, maxsplit=1)[0]
    if root in OURS:
        raise UsageError(f"{where}: {key} is in a module {root!r}, a name that Atoll itself uses; rename it")
    return value


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, ConfigValue]:
    """Nested tables as one level. UsageError for values that are no int, float, bool or string."""
    found: dict[str, ConfigValue] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            found |= flat(value, f"{name}.")
        elif isinstance(value, bool | int | float | str):
            found[name] = value
        else:
            raise UsageError(
                f"config {name} is {type(value).__name__}; int, float, bool or string is possible"
            )
    if len(found) > MAX_CONFIG_KEYS:
        raise UsageError(f"{len(found)} config keys; at most {MAX_CONFIG_KEYS} are possible")
    return found


def with_overrides(config: Mapping[str, ConfigValue], items: Sequence[str]) -> dict[str, ConfigValue]:
    """The config with ``--run-config`` items: 'key=value key2="a b"' or one .toml file.

    UsageError for an unknown key or a value that is not TOML.
    """
    changed = parse_pairs(items, "--run-config")
    unknown = sorted(changed.keys() - config.keys())
    if unknown:
        known = ", ".join(sorted(config)) or "none"
        raise UsageError(
            f"--run-config: the app has no {unknown[0]!r} in [tool.flwr.app.config]; it has {known}"
        )
    return {**config, **changed}


def parse_pairs(items: Sequence[str], option: str) -> dict[str, ConfigValue]:
    """Parse an option's items: 'key=value key2="a b"', or the name of a .toml file. UsageError."""
    found: dict[str, ConfigValue] = {}
    for item in items:
        if item.endswith(".toml") and "=" not in item:
            try:
                found |= flat(tomllib.loads(Path(item).expanduser().read_text()))
            except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
                raise UsageError(f"{option} {item}: {error}") from None
            continue
        rest = _PAIR.sub("", item).strip()
        if rest:
            raise UsageError(f"{option}: {rest[:80]!r} is not KEY=VALUE; write 'lr=0.1 name=\"a b\"'")
        for key, value in _PAIR.findall(item):
            found[key] = _value(key, value, option)
    return found


def _value(key: str, text: str, option: str) -> ConfigValue:
    try:
        return flat(tomllib.loads(f"value = {text}"))["value"]
    except (tomllib.TOMLDecodeError, KeyError, UsageError):
        raise UsageError(
            f"{option} {key}={text[:60]}: a number, true, false or a quoted string is possible"
        ) from None


# ---------------------------------------------------------------- making a bundle


def make_bundle(folder: Path) -> Bundle:
    """The app's files, chosen as Flower chooses them. UsageError when they are too large or too many."""
    spec = read_app(folder)
    app = tomllib.loads((folder / PROJECT).read_text())["tool"]["flwr"]["app"]
    files = sorted(_files(folder, app).items())
    for name, _ in files:
        _check_root(name, str(folder))
    if len(files) > MAX_FILES:
        raise UsageError(
            f"{folder} holds {len(files)} files; an app has at most {MAX_FILES}: use fab-exclude"
        )
    total = sum(path.stat().st_size for _, path in files)
    if total > MAX_BUNDLE_BYTES:
        name, path = max(files, key=lambda entry: entry[1].stat().st_size)
        raise UsageError(
            f"the app's files take {total} bytes, the largest is {name} with {path.stat().st_size}; an app "
            f"has at most {MAX_BUNDLE_BYTES}, weights and data stay outside: use fab-exclude"
        )
    data = _zipped(files)
    return Bundle(spec, data, hashlib.sha256(data).hexdigest(), len(files))


def _check_root(name: str, where: str) -> None:
    """Refuse a module at the app's root that Atoll's own would hide. UsageError."""
    root = PurePosixPath(name).parts[0]
    module = root.removesuffix(".py") if root == name else root
    if module in OURS and name.endswith(".py"):
        raise UsageError(f"{where}: a module {module!r} at its root is hidden by Atoll's own; rename it")


def _zipped(files: Sequence[tuple[str, Path]]) -> bytes:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, path in files:
            entry = zipfile.ZipInfo(name, _DATE)
            entry.create_system = 3
            entry.external_attr = (stat.S_IFREG | 0o644) << 16
            archive.writestr(entry, path.read_bytes())
    return buffer.getvalue()


def _patterns(app: Mapping[str, Any], key: str) -> list[str]:
    found = app.get(key, [])
    if not isinstance(found, list) or not all(isinstance(p, str) and p.strip() for p in found):
        raise UsageError(f"[tool.flwr.app] {key} must be a list of patterns")
    return found


def _files(folder: Path, app: Mapping[str, Any]) -> dict[str, Path]:
    """Regular files by their path in the app; links are left out, they may lead anywhere.

    What ``.gitignore`` and ``.atollignore`` name stays out, ``fab-include`` narrows, as Flower's does.
    """
    from pathspec import GitIgnoreSpec  # comes with flwr, which only some machines have

    spec = GitIgnoreSpec.from_lines
    unwanted = [*_ignored(folder), *_patterns(app, "fab-exclude"), *EXCLUDE]
    wanted, narrow = spec(INCLUDE), _patterns(app, "fab-include")
    drop, only = spec(unwanted), spec(narrow or ["*"])
    found: dict[str, Path] = {}
    for root, folders, names in os.walk(folder):
        inside = Path(root).relative_to(folder).as_posix()
        prefix = "" if inside == "." else f"{inside}/"
        folders[:] = [
            name
            for name in folders
            if not drop.match_file(f"{prefix}{name}/") and not (Path(root) / name / "pyvenv.cfg").exists()
        ]
        for name in names:
            path, relative = Path(root) / name, f"{prefix}{name}"
            chosen = wanted.match_file(relative) and only.match_file(relative)
            chosen = relative == PROJECT or (chosen and not drop.match_file(relative))
            if chosen and path.is_file() and not path.is_symlink():
                found[relative] = path
            elif path.suffix.lower() in COMPILED and not drop.match_file(relative):
                raise UsageError(
                    f"{folder}: {relative} is compiled or a .pth file, which no worker takes: an app is what "
                    "a machine's owner can read. Leave it out (fab-exclude), or have it installed on workers"
                )
    for pattern in narrow:
        if not any(spec([pattern]).match_file(name) for name in found):
            raise UsageError(
                f"fab-include: no file that an app may hold matches {pattern!r}; an app may hold "
                f"{', '.join(INCLUDE)}"
            )
    return found


def _ignored(folder: Path) -> list[str]:
    lines: list[str] = []
    for name in (".gitignore", IGNORED):
        try:
            lines += (folder / name).read_text(errors="replace").splitlines()
        except OSError:
            continue
    return lines


def ignore_results(folder: Path, bundle: Bundle) -> list[str]:
    """Name the files that a run of ``bundle`` wrote into its folder in ``.atollignore``, so that they are no
    part of the app; returns them. OSError when it cannot be written."""
    before = {entry.filename for entry in zipfile.ZipFile(BytesIO(bundle.data)).infolist()}
    app = tomllib.loads((folder / PROJECT).read_text())["tool"]["flwr"]["app"]
    new = sorted(
        name for name in _files(folder, app).keys() - before if PurePosixPath(name).suffix in RESULTS
    )
    if new:
        path = folder / IGNORED
        head = "" if path.exists() else "# Written by runs, so no part of the app: as in .gitignore.\n"
        with path.open("a") as file:
            file.write(head + "".join(f"/{_GLOB.sub(_escaped, name)}\n" for name in new))
    return new


def _escaped(found: re.Match[str]) -> str:
    return "\\" + found.group()


# ---------------------------------------------------------------- taking one apart


def opened(data: bytes, expected: str) -> tuple[AppSpec, dict[str, bytes]]:
    """Read a bundle: its declarations, and its files by their path.

    BadFrame when its hash is not ``expected``, or a name leads outside, is not a plain file, appears
    twice, or a bound is broken.
    """
    if len(data) > MAX_BUNDLE_BYTES + MAX_FILES * 2 * MAX_PATH_CHARS:
        raise BadFrame(f"an app bundle of {len(data)} bytes; at most {MAX_BUNDLE_BYTES} are accepted")
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise BadFrame(f"the app bundle hashes to {found[:12]}, announced was {expected[:12]}")
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            entries = _checked(archive)
            contents = {entry.filename: archive.read(entry) for entry in entries}
            for name in contents:
                _check_root(name, "the app")
        return parse_app(contents.get(PROJECT, b""), f"the app's {PROJECT}"), contents
    except (zipfile.BadZipFile, ValueError, EOFError, RuntimeError) as error:
        raise BadFrame(f"app bundle {expected[:12]} is not a readable zip: {error}") from None
    except UsageError as error:
        raise BadFrame(f"app bundle {expected[:12]}: {error}") from None


def _checked(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    entries = archive.infolist()
    if len(entries) > MAX_FILES:
        raise BadFrame(f"an app bundle of {len(entries)} files; at most {MAX_FILES} are accepted")
    seen: set[str] = set()
    for entry in entries:
        name = entry.filename
        path = PurePosixPath(name)
        mode = entry.external_attr >> 16
        plain = stat.S_ISREG(mode) and entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 1
        odd = (
            not name
            or len(name) > MAX_PATH_CHARS
            or not name.isprintable()
            or path.is_absolute()
            or path.as_posix() != name
            or any(part in ("..", ".", "__pycache__") or "\\" in part or ":" in part for part in path.parts)
        )
        if odd or not plain or name.lower() in seen:
            raise BadFrame(f"app bundle holds {name[:80]!r}, which is not a plain file inside the app")
        if path.suffix not in SUFFIXES and name != "LICENSE":
            raise BadFrame(
                f"app bundle holds {name[:80]!r}; an app holds text alone ({', '.join(sorted(SUFFIXES))}), "
                "nothing compiled and no .pth file"
            )
        seen.add(name.lower())
    if sum(entry.file_size for entry in entries) > MAX_BUNDLE_BYTES:
        raise BadFrame(f"an app's files take more than {MAX_BUNDLE_BYTES} bytes")
    return entries
