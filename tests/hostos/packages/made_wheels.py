"""Small wheels, written by hand."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path

from hostos.packages.pinned import Pinned


def make_wheel(
    folder: Path, name: str, files: Mapping[str, str | bytes], version: str = "1.0", tag: str = "py3-none-any"
) -> Pinned:
    """Write a wheel with these files; returns it pinned."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    about = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for inside, text in {**files, **about}.items():
            archive.writestr(inside, text)
    return Pinned(name, version, (hashlib.sha256(path.read_bytes()).hexdigest(),))
