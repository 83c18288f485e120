"""`atoll new`: a folder with a job file to start from."""

from __future__ import annotations

import re
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from atoll.errors import StorageError, UsageError
from hostos.command_line import AsJson, answer, quoted

JOB_FILE = "job.py"
NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,39}")
NAMED = 'name="my-job"'  # in every template


class Template(StrEnum):
    """Kinds of job files."""

    LANGUAGE = "language"
    VISION = "vision"
    FEDERATED = "federated"


def register(app: typer.Typer) -> None:
    """Add `atoll new`."""
    app.command(epilog="Example: atoll new my-job --template vision")(new)


def new(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder to create; its name is the job's.")
    ],
    template: Annotated[
        Template, typer.Option("--template", "-t", help="What the job trains to start with.")
    ] = Template.LANGUAGE,
    json: AsJson = False,
) -> None:
    """Write a job file to start from: small, plain PyTorch that trains on a CPU and downloads nothing."""
    path = write(folder, template)
    answer(
        {"job_file": str(path), "template": template.value},
        f"{path}: a job of the template {template.value}",
        "next:",
        f"  atoll dev {quoted(path)} --workers 2   train it on this machine",
        f"  atoll submit {quoted(path)} --watch    train it on a fleet",
        json=json,
    )


def write(folder: Path, template: Template) -> Path:
    """Write ``template`` into ``folder`` and return the job file's path.

    UsageError for a name that is none, or where there is a job file already; StorageError.
    """
    name = folder.resolve().name
    if not NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot be a job's name: give letters, digits, - _ and ., at most 40")
    path = folder / JOB_FILE
    text = resources.files("coordinator.cli.first.templates").joinpath(f"{template}.py").read_text()
    try:
        if folder.is_file():
            raise UsageError(f"{folder} is a file; give a folder to create")
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("x") as file:  # what somebody wrote is never overwritten
            file.write(text.replace(NAMED, f'name="{name}"'))
    except FileExistsError:
        raise UsageError(f"{path} already exists; give another folder") from None
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}; give another folder") from None
    return path
