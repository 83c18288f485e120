"""Pages made from code hold everything; diagrams show what the machines do."""

from __future__ import annotations

import dataclasses
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from compressors.catalogue import CODECS
from coordinator.client.job_file import load_job
from docs.pages import build, decisions, diagrams, phases, reference
from protos import telemetry
from strategies import STRATEGIES
from strategies.selectors import SELECTORS

ROOT = Path(__file__).resolve().parents[2]
PAGES = {path: make() for path, make in reference.PAGES.items()}


# ---------------------------------------------------------------- reference


@pytest.mark.parametrize(("path", "command"), list(reference.commands()), ids=lambda value: str(value))
def test_every_command_and_option_is_in_the_reference(path: str, command: object) -> None:
    _, heading, rest = PAGES["reference/commands.md"].partition(f"\n## `{path}`\n")
    assert heading
    section = rest.partition("\n## ")[0]
    options = [name for p in getattr(command, "params", ()) for name in p.opts if name.startswith("--")]
    assert [name for name in options if f"`{name}`" not in section] == []


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("strategies", [*STRATEGIES, *SELECTORS]),
        ("codecs", list(CODECS)),
        ("configuration", [kind.__name__ for kind in reference.PROCESSES]),
        ("job-file", [kind.__name__ for kind in reference.JOB_FILE]),
    ],
)
def test_every_strategy_codec_and_kind_of_setting_has_a_heading(page: str, names: list[str]) -> None:
    headings = re.findall(r"^## `(.+)`$", PAGES[f"reference/{page}.md"], re.MULTILINE)
    assert headings == names


def test_every_metric_and_event_is_in_the_reference() -> None:
    page = PAGES["reference/metrics.md"]
    names = [metric.name for metric in telemetry.METRICS] + [event.value for event in telemetry.Event]
    assert [name for name in names if f"`{name}`" not in page] == []


DATACLASSES = {kind.__name__: kind for kind in (*reference.PROCESSES, *reference.JOB_FILE)}


@pytest.mark.parametrize(("heading", "kind"), [*DATACLASSES.items(), *STRATEGIES.items(), *SELECTORS.items()])
def test_every_field_has_a_row_with_its_type(heading: str, kind: type) -> None:
    [section] = [
        text.partition(f"\n## `{heading}`\n")[2] for text in PAGES.values() if f"\n## `{heading}`\n" in text
    ]
    rows = re.findall(r"^\| `(\w+)` \| `[^`]+` \|", section.partition("\n## ")[0], re.MULTILINE)
    assert rows == [field.name for field in dataclasses.fields(kind)]


def test_comments_beside_a_field_are_its_meaning_and_suppressions_are_not() -> None:
    page = PAGES["reference/configuration.md"]
    assert "| `entry_port` | `int` | `7700` | 0: any free one |" in page
    assert "noqa" not in page


# ---------------------------------------------------------------- state diagrams


class Light(Enum):
    """Phases of a machine that only this test has."""

    RED = "red"
    GREEN = "green"
    BROKEN = "broken"
    STORED = "stored"


@dataclass(frozen=True)
class Lamp:
    phase: Light = Light.RED
    before: Light = Light.RED
    tries: int = 0


class Switched: ...


class Lifted: ...


def _switch(lamp: Lamp, event: object) -> tuple[Lamp, list[str]]:
    tried = replace(lamp, tries=lamp.tries + 1)
    if tried.tries > 3:
        return _give_up(tried, Light.BROKEN), ["gave up"]
    if lamp.phase in (Light.RED, Light.BROKEN):
        return replace(tried, phase=Light.GREEN), []
    return replace(tried, phase=Light.RED), []


def _give_up(lamp: Lamp, phase: Light) -> Lamp:
    return replace(lamp, phase=phase)


def _lift(lamp: Lamp, event: object) -> tuple[Lamp, list[str]]:
    return replace(lamp, phase=lamp.before), []


LAMP: diagrams.Table = {
    (Light.RED, Switched): _switch,
    (Light.GREEN, Switched): _switch,
    (Light.GREEN, Lifted): _lift,
    (Light.STORED, Switched): _switch,
}


def test_a_handlers_next_phases_depend_on_the_phase_it_begins_in() -> None:
    assert phases.targets(_switch, Light.RED) == {Light.GREEN, Light.BROKEN}
    assert phases.targets(_switch, Light.GREEN) == {Light.RED, Light.BROKEN}


def test_a_phase_that_the_source_does_not_show_is_unknown() -> None:
    assert phases.targets(_lift, Light.GREEN) == {phases.UNKNOWN}
    assert phases.targets(lambda lamp, event: lamp, Light.GREEN) == {phases.UNKNOWN}


def test_a_diagram_has_an_arrow_for_each_change_that_can_be_reached() -> None:
    assert diagrams.diagram(LAMP).splitlines() == [
        "stateDiagram-v2",
        "    [*] --> red",
        '    state "red" as red',
        '    state "green" as green',
        '    state "broken" as broken',
        "    red --> broken: Switched",
        "    green --> broken: Switched",
        "    red --> green: Switched",
        "    green --> red: Switched",
    ]
    assert "| green | `Lifted` | depends on the state |" in diagrams.rows(LAMP)


@pytest.mark.parametrize("name", diagrams.MACHINES)
def test_every_phase_of_a_machines_table_is_drawn_unless_nothing_leads_there(name: str) -> None:
    table = diagrams.table(name)
    found = diagrams.arrows(table)
    drawn = set(re.findall(r'state "(.+)" as', diagrams.diagram(table)))
    in_table = {phase.value for phase, _ in table}
    foreign = {"gathering", "awaiting consent", "aggregating"} if name == "job" else set()
    assert in_table - drawn == foreign  # a job cut into stages shares its phases' names with federated ones
    pairs = {(arrow.before.value, arrow.event) for arrow in found}
    assert pairs == {(p.value, e.__name__) for p, e in table if p.value in drawn}


@pytest.mark.parametrize(
    ("name", "before", "event", "after"),
    [
        ("member", "joined", "Admitted", {"pool"}),
        ("member", "assigned", "Released", {"pool"}),
        ("member", "draining", "Released", {"left"}),
        ("job", "queued", "Picked", {"profiling"}),
        ("job", "planning", "Planned", {"loading"}),
        ("job", "training", "PlanChange", {"loading", "paused", "failed", "finished"}),
        ("federated-job", "queued", "Begin", {"gathering"}),
        ("federated-job", "training", "Interrupted", {"paused"}),
        ("session", "connecting", "Welcome", {"idle"}),
        ("session", "loading", "Loaded", {"ready", "standing by"}),
        ("session", "draining", "Drained", {"gone"}),
    ],
)
def test_well_known_changes_are_found(name: str, before: str, event: str, after: set[str]) -> None:
    found = diagrams.arrows(diagrams.table(name))
    ends = {a.after.value for a in found if a.after and (a.before.value, a.event) == (before, event)}
    assert ends == after


def test_the_architecture_asks_for_every_machines_diagram() -> None:
    asked = re.findall(r"<!-- states: (\S+) -->", (ROOT / "docs" / "ARCHITECTURE.md").read_text())
    assert sorted(asked) == sorted(diagrams.MACHINES)


# ---------------------------------------------------------------- tutorials


def _tutorial_lines() -> list[str]:
    """Commands of the tutorials, as a reader would type them."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs" / "tutorials").glob("*.md")))
    return re.findall(r"^ {4}(atoll(?:-worker)? [^>&\n]+)", text, re.MULTILINE)


@pytest.mark.parametrize("line", _tutorial_lines())
def test_every_command_of_a_tutorial_is_understood(line: str) -> None:
    path, command = max(
        ((path, command) for path, command in reference.commands() if f"{line} ".startswith(f"{path} ")),
        key=lambda found: len(found[0]),
    )
    arguments = shlex.split(line.replace("$i", "00"))[len(path.split()) :]
    command.make_context(path, arguments)


@pytest.mark.parametrize("page", ["model-owner", "data-owner"])
def test_the_job_file_of_a_tutorial_makes_a_job(page: str, tmp_path: Path) -> None:
    blocks = re.findall(
        r"```python\n(.+?)```", (ROOT / "docs" / "tutorials" / f"{page}.md").read_text(), re.DOTALL
    )
    [source] = [block for block in blocks if "\ndef job():" in block]
    (tmp_path / "job.py").write_text(source)
    job = load_job(tmp_path / "job.py")
    assert job.module(**job.example_inputs).ndim == 0


# ---------------------------------------------------------------- decisions and navigation


def test_the_index_has_every_decision_by_its_title() -> None:
    page = decisions.index()
    files = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md"))
    assert list(decisions.decisions()) == files
    assert [name for name in files if f"]({name})" not in page] == []


def test_the_navigation_has_every_page() -> None:
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    written = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    pages = {*reference.PAGES, *(name for name in written if not name.startswith("decisions/")), build.INDEX}
    assert pages | set(build.ROOT_PAGES) == set(_named(nav))


def _named(nav: list[Any]) -> Iterator[str]:
    """Pages of a navigation, without the headings that stand above them."""
    for entry in nav:
        for page in entry.values() if isinstance(entry, dict) else [entry]:
            if isinstance(page, list):
                yield from _named(page)
            else:
                yield page


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Three of them:\n- one\n- two\n", "Three of them:\n\n- one\n- two\n"),
        ("Steps:\n1. one\n2. two\n", "Steps:\n\n1. one\n2. two\n"),
        ("- one\nmore of it\n- two\n", "- one\nmore of it\n- two\n"),
        ("```\nls\n- l\n```\n", "```\nls\n- l\n```\n"),
        ("| a |\n|---|\n- one\n", "| a |\n|---|\n- one\n"),
    ],
)
def test_a_list_that_follows_a_paragraph_gets_the_empty_line_that_markdown_needs(
    before: str, after: str
) -> None:
    assert build.spaced(before) == after
