"""Docs name every command, option, exit code, metric and setting that exists, and events no others."""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import click
import pytest
import typer

from atoll import errors
from atoll.data import ByteText, Rows
from atoll.job import Job, Optimizer, ParamGroup, Schedule, TrainingSpec
from benchmarks import report
from compressors.catalogue import CODECS, Use
from coordinator.cli import main as cli
from coordinator.client import fleet_file
from coordinator.planning import planner
from docs.pages import reference
from experiments.exchanges import EXCHANGES
from protos import telemetry
from worker.cli import main as worker_cli

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def _commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        if command.invoke_without_command:
            yield path, command
        for name, inner in command.commands.items():
            yield from _commands(inner, f"{path} {name}")
    else:
        yield path, command


HELPS = ("--help", "--help-all")  # of every command
COMMANDS = [
    *_commands(typer.main.get_command(cli.app), "atoll"),
    *_commands(typer.main.get_command(worker_cli.app), "atoll-worker"),
]


def _section(path: str) -> str:
    """The part of docs/cli.md under a command's heading, and the common options."""
    text = (DOCS / "cli.md").read_text()
    start = text.find(f"### `{path}")
    assert start >= 0, f"docs/cli.md has no heading for `{path}`"
    end = text.find("\n##", start)
    part = text[start : end if end >= 0 else len(text)]
    if "#common-options" in part:
        common = text.index("## Common options")
        part += text[common : text.index("\n## ", common + 1)]
    return part


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[path for path, _ in COMMANDS])
def test_every_command_and_option_is_in_the_docs(path: str, command: click.Command) -> None:
    section = _section(path)
    options = [name for p in command.params if isinstance(p, click.Option) for name in p.opts]
    missing = [
        name for name in options if name.startswith("--") and name not in HELPS and f"`{name}`" not in section
    ]
    assert missing == [], f"docs/cli.md, {path}: options missing"


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[path for path, _ in COMMANDS])
def test_every_help_has_a_sentence_and_an_example(path: str, command: click.Command) -> None:
    assert command.help
    assert command.epilog is not None
    assert path in command.epilog


def test_every_exit_code_is_documented() -> None:
    text = (DOCS / "cli.md").read_text()
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.AtollError)]
    for code in {0, 130, *(kind.exit_code for kind in kinds)}:
        assert f"| {code} | " in text


def _rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the tables under a heading, without their heads."""
    text = (DOCS / page).read_text()
    start = text.index(f"\n## {heading}\n") + 1
    part = text[start:].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip("| ") for cell in row] for row in rows[1:]]


def _quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_docs_have_every_metric_with_its_labels_and_no_other() -> None:
    told = {_quoted(row[0])[0]: tuple(_quoted(row[1])) for row in _rows("metrics.md", "Prometheus")}
    assert told == {metric.name: metric.labels for metric in telemetry.METRICS}


def test_the_docs_have_every_event_and_no_other() -> None:
    told = [name for row in _rows("metrics.md", "Events") for name in _quoted(row[0])]
    assert sorted(told) == sorted(event.value for event in telemetry.Event)


def test_every_event_is_emitted_somewhere() -> None:
    call = re.compile(r"(?:[lL]og|say|note|info|warning)\(\s*(?:telemetry\.)?(?:Event|Name)\.([A-Z_]+)")
    sources = [
        path.read_text()
        for room in ("coordinator", "protos", "hostos")
        for path in (ROOT / room).rglob("*.py")
    ]
    emitted = {name for text in sources for name in call.findall(text)}
    assert sorted(set(telemetry.Event.__members__) - emitted) == []


@pytest.mark.parametrize(
    ("heading", "keys"),
    [
        ("`[[device]]`", fleet_file._DEVICE_KEYS),
        ("`[[group]]`", fleet_file._GROUP_KEYS),
        ("`[[link]]`", fleet_file._LINK_KEYS),
    ],
)
def test_the_docs_have_every_key_of_a_fleet_file_and_no_other(heading: str, keys: set[str]) -> None:
    told = {_quoted(row[0])[0]: row[1] for row in _rows("fleet-files.md", heading)}
    assert told.keys() == keys
    for key, (standard, _, _) in fleet_file._RATES.items():
        assert told.get(key, f"{standard:g}") == f"{standard:g}"


def test_the_docs_have_every_default_of_a_fleet_file() -> None:
    text = (DOCS / "fleet-files.md").read_text()
    section = text[text.index("\n## `[default]`") :]
    assert [key for key in fleet_file._DEFAULT_KEYS if f"`{key}`" not in section] == []


@pytest.mark.parametrize("kind", [Job, TrainingSpec, Optimizer, Schedule, ParamGroup, Rows, ByteText])
def test_every_field_a_job_file_may_set_is_documented(kind: type) -> None:
    text = (DOCS / "job-files.md").read_text()
    assert [f.name for f in fields(kind) if f.name not in text] == []


def test_every_partitioner_and_schedule_is_documented() -> None:
    text = (DOCS / "cli.md").read_text() + (DOCS / "glossary.md").read_text()
    assert [name for name in (*planner.PARTITIONERS, *planner.SCHEDULES) if name not in text] == []


@pytest.mark.parametrize("name", CODECS)
def test_every_codec_has_a_row_in_the_table_that_says_what_it_is_valid_for(name: str) -> None:
    text = (DOCS / "compression.md").read_text()
    table = text[text.index("## All codecs") : text.index("\n**Owner of a residual")]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith(f"| `{name}` |")]
    assert len(rows) == 1, f"docs/compression.md: {len(rows)} rows for {name}"
    uses = "".join(use.value[0].upper() for use in Use if use in CODECS[name].valid_for)
    assert rows[0][2] == uses
    stateless = rows[0][3] == "none"
    assert stateless == (not CODECS[name].stateful)
    for word, holds in (("unbiased", CODECS[name].unbiased), ("linear", CODECS[name].linear)):
        assert holds == (word in rows[0][1] or (word == "unbiased" and CODECS[name].exact))


@pytest.mark.parametrize("name", EXCHANGES)
def test_every_exchange_rule_has_a_row_with_its_facts(name: str) -> None:
    rows = [row for row in _rows("data-parallel.md", "All rules") if row[0] == f"`{name}`"]
    assert len(rows) == 1, f"docs/data-parallel.md: {len(rows)} rows for {name}"
    facts = EXCHANGES[name]
    assert rows[0][2:5] == [facts.content.value, facts.partners.value, "yes" if facts.exact else "no"]


def test_the_docs_have_no_row_of_an_exchange_rule_that_is_none() -> None:
    assert {_quoted(row[0])[0] for row in _rows("data-parallel.md", "All rules")} == EXCHANGES.keys()


def test_links_between_the_docs_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    made = {DOCS / page for page in (*reference.PAGES, "decisions/index.md")}
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
        if (page.parent / target).resolve() not in made
    ]
    assert broken == []


def test_files_that_contributors_are_sent_to_exist() -> None:
    named = re.findall(
        r"`([\w./]+(?:\.py|\.proto|\.md|\.toml|\.txt|/))`", (ROOT / "CONTRIBUTING.md").read_text()
    )
    assert len(named) > 40
    assert [name for name in named if "NAME" not in name and not (ROOT / name).exists()] == []


def test_the_table_of_promises_is_written_from_its_files() -> None:
    rows = report.promises((ROOT / report.PROMISES).read_text())
    known = report.figures((ROOT / report.FIGURES).read_text())
    assert sorted(known) == sorted(row.id for row in rows)
    assert (ROOT / report.TABLE).read_text() == report.table(rows, known), "run python -m benchmarks.report"


def test_every_command_of_a_promise_names_files_that_exist() -> None:
    commands = [
        report.located(command.run)  # finds the test files
        for row in report.promises((ROOT / report.PROMISES).read_text())
        for command in row.commands
    ]
    modules = {name for line in commands for name in re.findall(r"-m ((?:benchmarks|tests)\.\S+)", line)}
    assert len(modules) > 15
    assert [
        m for m in modules if not any((ROOT / m.replace(".", "/")).parent.glob(f"{m.split('.')[-1]}*"))
    ] == []
    targets = {name for line in commands for name in re.findall(r"make (\w+)", line)}
    makefile = (ROOT / "Makefile").read_text()
    assert [name for name in targets if f"\n{name}:" not in makefile] == []
    jobs = {name for line in commands for name in re.findall(r"--job (\S+)", line)}
    assert [name for name in jobs if not (ROOT / name).exists()] == []


def test_the_architecture_has_a_row_for_every_wing() -> None:
    table = (DOCS / "ARCHITECTURE.md").read_text().partition("## Packages and wings")[2].partition("\n## ")[0]
    for package in ("coordinator", "worker"):
        rows = table.partition(f"**{package}**")[2].partition("\n| **")[0]
        named = {name for row in rows.splitlines() for name in _quoted(row.split(" | ")[0])}
        wings = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
        assert wings - named == set(), package


def test_decisions_are_numbered_without_a_gap() -> None:
    numbers = sorted(int(path.name[:3]) for path in (DOCS / "decisions").glob("*.md"))
    assert numbers == list(range(1, len(numbers) + 1))


def test_rows_of_tables_have_as_many_cells_as_their_heads() -> None:
    """A row with one cell more shifts what stands in it under another head."""
    wrong = []
    for path in (*ROOT.glob("*.md"), *DOCS.rglob("*.md")):
        cells = 0
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if not line.startswith("|"):
                cells = 0
                continue
            found = re.sub(r"`[^`]*`", "", line).replace(r"\|", "").count("|")
            cells = cells or found
            if found != cells:
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {found - 1} cells, not {cells - 1}")
    assert wrong == []
