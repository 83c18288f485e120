"""Reference pages: every command, strategy, codec, metric and setting, as the code declares them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

import click
import typer

from atoll import data, federated, job, privacy, secure
from compressors.catalogue import CODECS, Codec
from coordinator import config as coordinator_config
from coordinator.cli import main as coordinator_cli
from protos import telemetry
from strategies import STRATEGIES, Strategy
from strategies.selectors import SELECTORS
from worker import config as worker_config
from worker.cli import main as worker_cli

JOB_FILE = (
    job.Job, job.TrainingSpec, job.Optimizer, job.ParamGroup, job.Schedule, data.Rows, data.ByteText,
    federated.Registered, federated.Federated, privacy.Privacy, secure.Secure,
)  # fmt: skip
PROCESSES = (
    coordinator_config.CoordinatorConfig, coordinator_config.Liveness, coordinator_config.Probing,
    coordinator_config.Adaptation, worker_config.WorkerConfig, federated.Floors,
)  # fmt: skip
"""Dataclasses whose fields are settings."""
_SUPPRESSION = re.compile(r"^noqa(: [A-Z0-9, ]+)?( - )?")


# ---------------------------------------------------------------- commands


def commands() -> Iterator[tuple[str, click.Command]]:
    """Yield every command of both programs with the words that call it."""
    for name, app in (("atoll", coordinator_cli.app), ("atoll-worker", worker_cli.app)):
        yield from _below(name, typer.main.get_command(app))


def _below(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        if command.invoke_without_command:
            yield path, command
        for name, inner in command.commands.items():
            yield from _below(f"{path} {name}", inner)
    else:
        yield path, command


def _commands_page() -> str:
    parts = [_head("Commands", "How to use them together: [command line](../cli.md).")]
    for path, command in commands():
        with click.Context(command, info_name=path) as context:
            usage = " ".join([path, *command.collect_usage_pieces(context)])
        parts.append(f"## `{path}`\n\n{command.help or ''}\n\n```\n{usage}\n```\n\n{command.epilog or ''}")
        given = [_parameter(p) for p in command.params]  # those that few need too
        parts.append(_table(("option", "default", "meaning"), given))
    return "\n\n".join(parts)


def _parameter(parameter: click.Parameter) -> tuple[str, str, str]:
    help_text = str(getattr(parameter, "help", None) or "")
    if isinstance(parameter, click.Argument):
        return f"`{parameter.make_metavar(click.Context(click.Command('')))}`", "", help_text
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    variable = f" Environment: `{parameter.envvar}`." if isinstance(parameter.envvar, str) else ""
    default = "" if parameter.default in (None, "", False) else f"`{parameter.default}`"
    return names, default, help_text + variable


# ---------------------------------------------------------------- strategies and codecs


def _strategies_page() -> str:
    parts = [
        _head("Strategies", "Which one when, and what they reach: [federated training](../federated.md).")
    ]
    for name, kind in STRATEGIES.items():
        parts.append(f"## `{name}`\n\n{_sentence([kind.FACTS.summary])} Source: {kind.FACTS.source}.")
        parts.append(_module_text(kind))
        parts.append(_sentence(_needs(kind)))
        parts.append(_settings(kind))
    parts.append("# Selectors\n\nWho takes part in a round: `Federated(selector=..., selector_options=...)`.")
    for name, selector in SELECTORS.items():
        parts.append(f"## `{name}`\n\n{_module_text(selector)}\n\n{_settings(selector)}")
    return "\n\n".join(parts)


def _needs(kind: type[Strategy]) -> Iterator[str]:
    facts = kind.FACTS
    yield (
        "linear: partial sums give the aggregate" if facts.linear else "not linear, needs individual updates"
    )
    if facts.linear and not facts.bounded:
        yield "no sums in whole numbers"
    yield "the server need not see single updates" if facts.secure else "the server sees single updates"
    if facts.needs_client_state:
        yield "clients keep state between rounds"
    if facts.sgd_only:
        yield "local optimizer SGD"
    if facts.needs_start_loss:
        yield "clients evaluate the received weights first"
    if facts.changes_loss:
        yield "the job file wraps the module"


def _codecs_page() -> str:
    parts = [_head("Codecs", "How links get theirs, and what each costs: [compression](../compression.md).")]
    for name, codec in CODECS.items():
        parts.append(f"## `{name}`\n\n{_sentence([codec.summary])} Source: {codec.source}.")
        parts.append(_sentence(_traits(codec)))
    return "\n\n".join(parts)


def _traits(codec: Codec) -> Iterator[str]:
    yield "valid for " + ", ".join(sorted(use.value for use in codec.valid_for))
    yield "bit for bit" if codec.exact else "lossy"
    traits = {
        "takes a ratio": codec.rated,
        "linear": codec.linear,
        "unbiased": codec.unbiased,
        "keeps a state": codec.stateful,
        "decoding needs that state": codec.shared_state,
    }
    yield from (words for words, holds in traits.items() if holds)


# ---------------------------------------------------------------- metrics and settings


def _metrics_page() -> str:
    metrics = [(f"`{m.name}`", _codes(m.labels), m.help) for m in telemetry.METRICS]
    return "\n\n".join(
        (
            _head("Metrics and events", "How to read them: [metrics and events](../metrics.md)."),
            "## Prometheus\n\n" + _table(("metric", "labels", "meaning"), metrics),
            "## Events of the log\n\n" + _codes(event.value for event in telemetry.Event),
        )
    )


def _settings_page(title: str, about: str, kinds: Iterable[type]) -> str:
    return "\n\n".join(
        (_head(title, about), *(f"## `{k.__name__}`\n\n{_doc(k)}\n\n{_settings(k)}" for k in kinds))
    )


def _settings(kind: type) -> str:
    """Return a table of a dataclass's fields: type, default, and the comment that stands beside it."""
    rows = []
    for field in dataclasses.fields(kind):
        owner = next(base for base in kind.__mro__ if field.name in inspect.get_annotations(base))
        typed, default, comment = _declared(owner)[field.name]
        rows.append((f"`{field.name}`", f"`{typed}`", f"`{default}`" if default else "", comment))
    return _table(("field", "type", "default", "meaning"), rows) if rows else "No options."


@cache
def _declared(kind: type) -> dict[str, tuple[str, str, str]]:
    source = textwrap.dedent(inspect.getsource(kind))
    [node] = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)  # noqa: S101 - it is the source of a class
    lines = source.splitlines()
    found = {}
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            beside = [_comment(line) for line in lines[part.lineno - 1 : part.end_lineno]]
            comment = " ".join(filter(None, beside))
            found[part.target.id] = (ast.unparse(part.annotation), _default(part.value), comment)
    return found


def _comment(line: str) -> str:
    return _SUPPRESSION.sub("", line.partition("  # ")[2].strip())


def _default(value: ast.expr | None) -> str:
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        named = {word.arg: word.value for word in value.keywords}
        made = named.get("default_factory")
        if isinstance(made, ast.Lambda):
            return ast.unparse(made.body)
        return f"{ast.unparse(made)}()" if made is not None else _default(named.get("default"))
    return ast.unparse(value) if value is not None else ""


# ---------------------------------------------------------------- words


def _head(title: str, about: str) -> str:
    return f"# {title}\n\nMade from the code. {about}"


def _sentence(parts: Iterable[str]) -> str:
    text = ", ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _doc(kind: type) -> str:
    return inspect.getdoc(kind) or ""


def _module_text(kind: type) -> str:
    """Return what the file of a class says of it, formulas as they stand there."""
    text = inspect.getdoc(inspect.getmodule(kind)) or ""
    return f"```text\n{text}\n```"


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    shown = [head, ["---"] * len(head), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in shown) if len(shown) > 2 else ""


PAGES: dict[str, Callable[[], str]] = {
    "reference/commands.md": _commands_page,
    "reference/job-file.md": lambda: _settings_page(
        "Job file", "How to write one: [job files](../job-files.md).", JOB_FILE
    ),
    "reference/configuration.md": lambda: _settings_page(
        "Configuration",
        "Bounds and intervals of the two daemons; options of their commands set some.",
        PROCESSES,
    ),
    "reference/strategies.md": _strategies_page,
    "reference/codecs.md": _codecs_page,
    "reference/metrics.md": _metrics_page,
}
"""Path below docs/ -> function that returns the page."""
