"""The web page beside a fleet of this machine's own; whatever becomes of it, the fleet goes on."""

from __future__ import annotations

import json as jsonlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.cli.local_fleet import COORDINATOR
from coordinator.cli.processes import LEAVE_S
from hostos.command_line import err, out

if TYPE_CHECKING:
    from coordinator.cli.first.ending import EndedTogether

NEEDS = ("starlette", "uvicorn", "jinja2")


def has_page() -> bool:
    """Whether the extra `dashboard` is installed."""
    return all(find_spec(name) is not None for name in NEEDS)


@contextmanager
def shown_page(together: EndedTogether, folder: Path, quiet: bool) -> Iterator[bool]:
    """Serve the page of the coordinator in ``folder``, print its address; False where it does not start."""
    command = ["-m", "coordinator.cli", "dashboard", "--listen", "127.0.0.1:0", "--json"]
    command += ["--state-dir", str(folder / COORDINATOR)]
    with (folder / "page.log").open("w") as log:
        process = together.start("", command, stdout=subprocess.PIPE, stderr=log)
    assert process.stdout is not None  # noqa: S101 - it was started with a pipe
    try:
        line = process.stdout.readline()
        if line and not quiet:
            out.print(f"page: {jsonlib.loads(line)['url']}")
        elif not line:
            err.print(f"the page did not start; {folder / 'page.log'} says why")
        yield bool(line)
    finally:
        process.terminate()
        try:
            process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
