"""Commands of `atoll` about the coordinator's journal while none runs: check, cut."""

from __future__ import annotations

import dataclasses
import json as json_format
import os
import time
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.errors import StorageError, UsageError
from coordinator.cli.options import StateDir
from coordinator.client.endpoint import default_state_dir
from hostos.command_line import AsJson, answer, out, print_json

if TYPE_CHECKING:
    from pathlib import Path

    from coordinator.services.recovery import Report

journal_app = typer.Typer(
    no_args_is_help=True, help="Check the coordinator's journal, or drop its damaged end."
)
Database = Annotated[str, typer.Option(metavar="URL", help="Journal database, as given to `atoll serve`.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands to the `atoll` command."""
    app.add_typer(journal_app, name="journal")


@journal_app.command("check", epilog="Example: atoll journal check --json | jq .damaged")
def journal_check(state_dir: StateDir = None, database: Database = "", json: AsJson = False) -> int:
    """Read the whole journal and report what it holds and what is damaged. Exit code 9 if a coordinator could
    not start from it.

    It changes nothing, and may be run while the coordinator runs.
    """
    from coordinator.services.recovery import check
    from coordinator.storage.journal import StoredJournal

    with closing(StoredJournal(_where(state_dir, database))) as journal:
        report = check(journal)
    if json:
        print_json(dataclasses.asdict(report))
    else:
        _show(report)
    return StorageError.exit_code if report.fold else 0


def _show(report: Report) -> None:
    of = ", ".join(f"{count} {kind}" for kind, count in report.kinds)
    out.print(f"{report.records} records, numbers {report.first} to {report.last}: {of}")
    out.print(f"{report.jobs} jobs, term {report.term}")
    for number, whole in report.snapshots:
        out.print(f"snapshot of record {number}: {'whole' if whole else 'damaged'}")
    covered = max((number for number, whole in report.snapshots if whole), default=0)
    for number, kind, why in report.damaged:
        harm = f"; harmless, the snapshot of record {covered} covers it" if number <= covered else ""
        out.print(f"record {number} ({kind}) is damaged: {why}{harm}")
    if report.damaged_records > len(report.damaged):
        out.print(f"and {report.damaged_records - len(report.damaged)} more")
    if report.fold:
        out.print(f"a coordinator cannot start: {report.fold}")
    else:
        out.print("a coordinator starts from it")


@journal_app.command("cut", epilog="Example: atoll journal cut 48113")
def journal_cut(
    number: Annotated[int, typer.Argument(min=1, metavar="NUMBER", help="First record to drop.")],
    state_dir: StateDir = None,
    database: Database = "",
    json: AsJson = False,
) -> None:
    """Drop a record and all later ones from the journal; they are saved to a file in the state folder.

    Stop the coordinator first. Jobs return to their state before that record.
    """
    from coordinator.storage.journal import Journal

    folder = state_dir or default_state_dir()
    saved = folder / f"journal-cut-{number}.jsonl"
    with closing(Journal(_where(state_dir, database))) as journal:
        journal.claim(time.time())
        kept = [snapshot.number for snapshot in journal.snapshots() if snapshot.number < number]
        first = next((row[0] for row in journal.rows()), 1)
        if not kept and first > 1 and journal.snapshots():
            raise UsageError(
                f"nothing is left before record {number}: those up to {first - 1} are in snapshots that hold "
                "later ones, too; restore the journal from a backup"
            )
        with saved.open("x") as file:
            for row in journal.rows(number - 1):
                file.write(json_format.dumps(list(row)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        dropped = journal.cut(number)
    words = f"{dropped} records are dropped from the journal and kept in {saved}"
    answer({"dropped": dropped, "saved": str(saved)}, words, json=json)


def _where(state_dir: Path | None, database: str) -> str:
    if database:
        return database
    file = (state_dir or default_state_dir()) / "journal.sqlite"
    if not file.exists():
        raise UsageError(f"there is no journal in {file.parent}; name its folder with --state-dir")
    return f"sqlite:///{file}"
