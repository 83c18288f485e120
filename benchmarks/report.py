"""Table of what is promised: the commands that show it and their newest figures, as docs/acceptance.md.

    python -m benchmarks.report                      # write the table
    python -m benchmarks.report --check              # exit code 1 when the table is stale
    python -m benchmarks.report --list
    python -m benchmarks.report --run commit oracle  # run these promises' commands, keep their figures

docs/promises.toml holds the promises, docs/figures.json the figures. A command that skips leaves its figure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from atoll.errors import UsageError
from benchmarks.harness import execute, machine

ROOT = Path(__file__).resolve().parents[1]
PROMISES = "docs/promises.toml"
FIGURES = "docs/figures.json"
TABLE = "docs/acceptance.md"
HEAD = """# Acceptance

Each promise is shown by commands that run in a fresh clone. `python -m benchmarks.report --run ID` runs
them and writes this page, made from `docs/promises.toml` and `docs/figures.json`. A figure in **bold**
misses its promise. The machines are shared: their speed, and with it every figure bound by the processor,
varies by up to 2.5 times within hours. Under `machine`, `loop` is the time of a million additions in Python.

`make test` takes minutes in three processes (`TEST_PROCESSES=N`). On a machine that can build the lab (root,
`/dev/net/tun`, the `ip` command) it includes the lab's `wan` tests. `make test-all` adds the slow ones,
`make bench` runs every benchmark. Tests that need a GPU skip without one.
"""
PYTHON = ".venv/bin/python"
_TEST = re.compile(r"(?:\w+/)*test_\w+\.py")
_SUMMARY = re.compile(r"^=*\s*(\d+ (?:passed|failed|error|skipped).*?) in ([\d.]+)s", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Command:
    """One shell command of a promise, and how its figure is read; see the head of docs/promises.toml."""

    run: str
    figure: str = ""
    pattern: str = ""
    slow: bool = False
    at_least: Mapping[str, float] = field(default_factory=dict)
    at_most: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Promise:
    """One row of the table."""

    id: str
    area: str
    promise: str
    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """Newest figure of a promise; "-" where there is none yet."""

    figure: str = "-"
    date: str = ""
    machine: str = ""
    commit: str = ""
    seed: int | None = None


class NothingMeasured(UsageError):
    """A command that skipped, or printed no figure."""


def promises(text: str) -> list[Promise]:
    """Return the promises of a TOML file's text. UsageError where one lacks a field or an id repeats."""
    found = []
    for entry in tomllib.loads(text)["promise"]:
        try:
            commands = tuple(Command(**command) for command in entry.pop("command"))
            found.append(Promise(**entry, commands=commands))
        except (KeyError, TypeError) as error:
            raise UsageError(f"{PROMISES}, {entry.get('id', 'no id')}: {error}") from None
    ids = [promise.id for promise in found]
    if repeated := {name for name in ids if ids.count(name) > 1}:
        raise UsageError(f"{PROMISES}: ids that repeat: {', '.join(sorted(repeated))}")
    return found


def figures(text: str) -> dict[str, Figure]:
    """Return id -> figure of a JSON file's text."""
    return {name: Figure(**entry) for name, entry in json.loads(text).items()}


# ---------------------------------------------------------------- the table


def located(command: str, root: Path = ROOT) -> str:
    """Return a command with the paths of its test files. UsageError unless exactly one file has each name."""
    return _TEST.sub(lambda found: _path_of(found[0], root), command)


def _path_of(name: str, root: Path) -> str:
    paths = [path.relative_to(root).as_posix() for path in sorted((root / "tests").rglob(Path(name).name))]
    paths = [path for path in paths if f"/{path}".endswith(f"/{name}")]
    if len(paths) != 1:
        raise UsageError(f"{PROMISES} names {name}; files of that name: {', '.join(paths) or 'none'}")
    return paths[0]


def table(rows: Sequence[Promise], known: Mapping[str, Figure], root: Path = ROOT) -> str:
    """Return the page: one table an area, one row a promise."""
    parts = [HEAD]
    for area in dict.fromkeys(row.area for row in rows):
        parts.append(
            f"\n## {area}\n\n| promise | command | newest figure | date | machine |\n|---|---|---|---|---|\n"
        )
        parts += [_row(row, known.get(row.id, Figure()), root) for row in rows if row.area == area]
    return "".join(parts)


def _row(row: Promise, figure: Figure, root: Path) -> str:
    commands = (f"`{located(c.run, root)}`{' (slow)' if c.slow else ''}" for c in row.commands)
    cells = (row.promise, "<br>".join(commands), figure.figure, figure.date, figure.machine)
    shown = (cell.replace("|", chr(92) + "|").replace("\n", "; ") for cell in cells)
    return f"| {' | '.join(shown)} |\n"


# ---------------------------------------------------------------- running


def measure(promise: Promise, root: Path = ROOT) -> Figure:
    """Run a promise's commands one after the other. NothingMeasured where one skips."""
    where = _described()
    found = [_run(command, root) for command in promise.commands]
    seeds = [seed for _, seed in found if seed is not None]
    return Figure(
        figure="; ".join(text for text, _ in found),
        date=datetime.now(UTC).date().isoformat(),
        machine=where,
        commit=_commit(root),
        seed=seeds[0] if seeds else 0,
    )


def _described() -> str:
    facts = machine()
    return (
        f"{facts['cpus']} cores, loop {facts['loop_ms']} ms, load {facts['load1']}, Python {facts['python']}"
    )


def _commit(root: Path) -> str:
    """Return the short hash, with "+" where tracked files differ from it."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _run(command: Command, root: Path) -> tuple[str, int | None]:
    """Return a command's figure and seed. What the command started beside itself ends with it."""
    line = located(command.run, root)
    print(f"$ {line}", flush=True)
    begun_s = time.monotonic()
    with subprocess.Popen(  # noqa: S602 - lines of a committed file
        line.replace(PYTHON, sys.executable),
        shell=True,
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    ) as process:
        lines: list[str] = []
        reader = threading.Thread(target=_read, args=(process, lines))
        reader.start()  # what is started beside the command keeps its output open: do not wait for that
        try:
            code = process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            reader.join()
    return figure_of(command, "".join(lines), code, time.monotonic() - begun_s)


def _read(process: subprocess.Popen[str], lines: list[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)


def figure_of(command: Command, output: str, code: int, took_s: float) -> tuple[str, int | None]:
    """Return the figure and seed in a command's output, the figure bold where it misses the promise.

    NothingMeasured where the command skipped, or where what the figure needs is not in its output.
    """
    named = re.search(r"--seed[ =](\d+)", command.run)
    seed = int(named[1]) if named else None
    if command.figure:
        found = _last_object(output)
        if isinstance(found, dict):
            seed = found.get("seed", seed)
        text, holds = _formatted(command.figure, found), _within(command, found)
    else:
        text, holds = _counted(command, output, took_s), True
    text = text if code == 0 else f"exit code {code}: {text}"
    return (text if holds and code == 0 else f"**{text}**"), seed


def _counted(command: Command, output: str, took_s: float) -> str:
    if command.pattern:
        matches = list(re.finditer(command.pattern, output))
        return ", ".join(matches[-1].groups()) if matches else "did not end well"
    summaries = _SUMMARY.findall(output)
    if not summaries:
        return f"passes in {took_s:.0f} s"
    counts, seconds = summaries[-1]
    told = ", ".join(re.findall(r"\d+ (?:passed|failed|errors?|skipped)", counts))
    if "passed" not in told and "failed" not in told and "error" not in told:
        raise NothingMeasured(f"{command.run}: {told}")
    return f"{told} in {float(seconds):.0f} s"


def _last_object(output: str) -> Any:
    lines = [line for line in output.splitlines() if line.strip()]
    try:
        found = json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError):
        raise NothingMeasured("the last line is not JSON") from None
    if isinstance(found, dict) and "skipped" in found:
        raise NothingMeasured(f"skipped: {found['skipped']}")
    return found


def _formatted(template: str, found: Any) -> str:
    try:
        return template.format(*found) if isinstance(found, list) else template.format(**found)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise NothingMeasured(f"the JSON lacks what the figure shows: {error!r}") from None


def _within(command: Command, found: Any) -> bool:
    at_least = all(_value(name, found) >= bound for name, bound in command.at_least.items())
    return at_least and all(_value(name, found) <= bound for name, bound in command.at_most.items())


def _value(name: str, found: Any) -> float:
    return float(_formatted(f"{{{name}}}", found))


def run_all(wanted: Sequence[Promise], root: Path = ROOT) -> int:
    """Run promises, storing each figure as it comes; return how many gave none."""
    missing = 0
    for promise in wanted:
        try:
            found = measure(promise, root)
        except NothingMeasured as error:
            missing += 1
            print(f"{promise.id}: figure left as it was: {error}", flush=True)
            continue
        known = figures((root / FIGURES).read_text())
        kept = {name: asdict(figure) for name, figure in {**known, promise.id: found}.items()}
        (root / FIGURES).write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
        print(f"{promise.id}: {found.figure}", flush=True)
    return missing


def main(argv: Sequence[str] | None = None) -> int:
    """Write the table; exit code 1 when it is stale (--check) or a promise gave no figure (--run)."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--run", nargs="+", metavar="ID", default=[], help="run these promises' commands first")
    made.add_argument("--list", action="store_true", help="print ids and commands")
    made.add_argument("--check", action="store_true", help="compare with the page, write nothing")
    options = made.parse_args(argv)
    rows = promises((ROOT / PROMISES).read_text())
    by_id = {row.id: row for row in rows}
    if unknown := [name for name in options.run if name not in by_id]:
        raise UsageError(f"no promise {', '.join(unknown)}; there are {', '.join(by_id)}")
    if options.list:
        for row in rows:
            print(f"{row.id}: {row.promise}", *(f"    {located(c.run)}" for c in row.commands), sep="\n")
        return 0
    missing = run_all([by_id[name] for name in options.run])
    page = table(rows, figures((ROOT / FIGURES).read_text()))
    if options.check:
        fresh = (ROOT / TABLE).read_text() == page
        print(f"{TABLE} is {'fresh' if fresh else 'stale: run python -m benchmarks.report'}")
        return int(not fresh)
    (ROOT / TABLE).write_text(page)
    return int(missing > 0)


if __name__ == "__main__":
    execute(main)
