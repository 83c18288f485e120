"""The fleet that is disturbed: one that this command starts, or processes that it may disturb."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from atoll.errors import UsageError
from coordinator.cli.processes import Start, start_here
from coordinator.client.endpoint import find_endpoint
from coordinator.messages.facts import Fact, from_record
from coordinator.storage.journal import StoredJournal, read
from experiments.chaos.kinds import COORDINATOR
from experiments.chaos.members import Member, serves

if TYPE_CHECKING:
    from coordinator.cli.local_fleet import LocalFleet
    from coordinator.client.client import Client

JOURNAL = "journal.sqlite"


@dataclass(frozen=True, slots=True)
class Fleet:
    """``members``: who may be disturbed, by name. ``start_again`` None: somebody else starts what was killed.
    ``journal``: the coordinator's, where it can be read; ``ended`` names members that are to be started."""

    client: Client
    members: Mapping[str, Member]
    start_again: Callable[[str], None] | None
    journal: Path | None
    ended: Callable[[], Sequence[str]] = tuple

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the workers."""
        return tuple(name for name in self.members if name != COORDINATOR)

    def end(self) -> None:
        """Ask every member to leave: what started one elsewhere does not pass a signal on."""
        for member in self.members.values():
            process = member.process()
            if process is not None:
                with suppress(psutil.NoSuchProcess):
                    process.terminate()


def own(local: LocalFleet) -> Fleet:
    """Return the fleet that this command has started."""
    members = {name: Member(name, local.folder / name) for name in (COORDINATOR, *local.names)}
    journal = local.folder / COORDINATOR / JOURNAL
    return Fleet(local.client, members, local.start_again, journal, local.ended)


def given(folders: Sequence[Path], *, not_mine: bool) -> dict[str, Member]:
    """Return who runs from these state folders. UsageError unless it is said that they may be disturbed, and
    for a folder that nobody runs from."""
    members: dict[str, Member] = {}
    for folder in folders:
        name = COORDINATOR if serves(folder) else folder.resolve().name
        member = Member(name, folder)
        process = member.process()
        if process is None:
            raise UsageError(
                f"no coordinator or worker runs from {folder}; give the --state-dir of one that does"
            )
        if not not_mine:
            raise UsageError(
                f"process {process.pid} runs from {folder} and was not started by this command: it would be "
                "disturbed, and whoever counts on it; say that it may be with --not-mine, or leave --attach "
                "out to disturb a fleet of this command's own"
            )
        if name in members:
            raise UsageError(f"two of the folders are called {name}; give folders of different names")
        members[name] = member
    return members


def attached(client: Client, members: Mapping[str, Member]) -> Fleet:
    """Return the fleet of these members. UsageError for a coordinator that ``client`` does not speak with."""
    coordinator = members.get(COORDINATOR)
    if coordinator is None:
        return Fleet(client, members, None, None)
    address = find_endpoint(None, None, coordinator.folder).address
    if address != client.endpoint.address:
        raise UsageError(f"{coordinator.folder} is that of {address}, not of {client.endpoint.address}")
    journal = coordinator.folder / JOURNAL
    return Fleet(client, members, None, journal if journal.is_file() else None)


def started_by(prefix: str) -> Start:
    """Return what starts this Python on a host with the words of ``prefix`` in front, {host} in it its name,
    and on this machine where the host has none."""

    def start(host: str, arguments: Sequence[str], **streams: Any) -> subprocess.Popen[str]:
        if not host:
            return start_here(host, arguments, **streams)
        command = [*filled(prefix, host=host), sys.executable, "-P", *arguments]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, text=True, start_new_session=True, **streams
        )

    return start


def filled(command: str, **names: str) -> list[str]:
    """Return a command's words with names in place of {host}, {one}, {other}. UsageError for other braces."""
    try:
        return [word.format(**names) for word in shlex.split(command)]
    except (ValueError, KeyError, IndexError) as error:
        raise UsageError(f"{command!r} is not a command with {{{'}, {'.join(names)}}}: {error}") from None


@dataclass(slots=True)
class Facts:
    """Facts of a journal, read as it grows: what snapshots hold is dropped from it."""

    journal: Path | None
    found: list[Fact] = field(default_factory=list)
    _after: int = 0

    def look(self) -> None:
        """Read what is new. StorageError when the journal cannot be read."""
        if self.journal is None:
            return
        with closing(StoredJournal(self.journal)) as journal:
            for row in journal.rows(self._after):
                self._after = row.number
                fact = from_record(read(row))
                if fact is not None:
                    self.found.append(fact)

    def of(self, job: str) -> list[Fact]:
        """Return the facts of a job."""
        return [fact for fact in self.found if getattr(fact, "job", "") == job]
