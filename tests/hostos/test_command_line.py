"""Groups of options: each field is an option of the command, which gets them as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.errors import StorageError
from hostos.command_line import AsJson, run, with_groups

if TYPE_CHECKING:
    import pytest


@dataclass(frozen=True)
class Place:
    """Where something is."""

    host: Annotated[str | None, typer.Argument(metavar="HOST")] = None
    port: Annotated[int, typer.Option("--port", "-p", min=1)] = 7700
    tags: Annotated[list[str] | None, typer.Option("--tag")] = None


def app_with(seen: list[object]) -> typer.Typer:
    app = typer.Typer(name="look")

    @app.command(epilog="Example: look at lab")
    @with_groups
    def at(place: Place, name: Annotated[str, typer.Option()] = "n", *, json: AsJson = False) -> int:
        """Look at a place."""
        seen.extend((place, name, json))
        return 3

    @app.command()
    def fail() -> None:
        raise StorageError("the disk is full")

    return app


def test_a_group_is_given_as_one_value_made_from_its_options():
    seen: list[object] = []
    assert run(app_with(seen), ["at", "lab", "--json", "-p", "9", "--tag", "a", "--tag", "b"]) == 3
    assert seen == [Place("lab", 9, ["a", "b"]), "n", True]


def test_options_of_a_group_have_their_defaults_and_bounds(capsys: pytest.CaptureFixture[str]):
    seen: list[object] = []
    app = app_with(seen)
    assert run(app, ["at"]) == 3
    assert seen == [Place(), "n", False]
    assert run(app, ["at", "--port", "0"]) == 2
    assert "--port" in capsys.readouterr().err


def test_help_names_the_options_of_a_group_in_the_order_of_declaration(capsys: pytest.CaptureFixture[str]):
    assert run(app_with([]), ["at", "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("--port") < shown.index("--tag") < shown.index("--name") < shown.index("--json")


def test_an_error_of_ours_is_a_line_and_an_exit_code(capsys: pytest.CaptureFixture[str]):
    assert run(app_with([]), ["fail"]) == StorageError.exit_code
    assert capsys.readouterr().err == "error: the disk is full\n"
