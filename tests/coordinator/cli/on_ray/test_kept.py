"""A worker that is kept: started, started again, ended. A small program stands for the daemon."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.cli.on_ray import kept as module
from coordinator.cli.on_ray.kept import Kept, Order
from coordinator.cli.on_ray.shipped import ShippedFile
from tests.patience import eventually

# Ends with the codes that it was given, one a start; then it joins, and stays until it is asked to leave.
DAEMON = """
import json, os, pathlib, signal, sys
state = pathlib.Path(sys.argv[sys.argv.index("--state-dir") + 1])
state.mkdir(exist_ok=True)
starts = state / "starts"
number = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (number + 1))
codes = [int(word) for word in sys.argv[1].split(",") if word]
print(os.environ.get("ATOLL_TOKEN", "no token"), file=sys.stderr)
if number < len(codes):
    sys.exit(codes[number])
(state / "process").write_text(str(os.getpid()))
print(json.dumps({"event": "worker.joined"}), file=sys.stderr, flush=True)
signal.sigwait({signal.SIGTERM})
"""


@pytest.fixture
def keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Kept]]:
    monkeypatch.setattr(
        module, "PROGRAM", ("-c", f"import signal; signal.pthread_sigmask(0, {{15}})\n{DAEMON}")
    )
    monkeypatch.setattr(module, "PAUSE_FIRST_S", 0.01)
    made: list[Kept] = []

    class Noted(Kept):
        def __init__(self, *given: object) -> None:
            super().__init__(*given)  # type: ignore[arg-type]
            made.append(self)

    yield Noted
    for each in made:
        each.leave()


def order(base: Path, codes: str = "", name: str = "0", **given: object) -> Order:
    return Order((codes,), {"ATOLL_TOKEN": "secret"}, f"fleet/{name}", str(base), **given)  # type: ignore[arg-type]


def joined(worker: Kept) -> bool:
    return worker.status()["state"] == "joined"


def alive(process: int) -> bool:
    return os.path.exists(f"/proc/{process}")


def test_a_worker_joins_with_a_folder_of_its_own_and_leaves_when_it_is_asked(
    keep: type[Kept], tmp_path: Path
) -> None:
    worker = keep(order(tmp_path))
    eventually(lambda: joined(worker))
    shown = worker.status()
    folder = Path(shown["folder"])
    assert folder == tmp_path / os.uname().nodename / "fleet" / "0"
    assert folder.stat().st_mode & 0o077 == 0
    assert shown["log"].splitlines()[0] == "secret"
    process = int((folder / "state" / "process").read_text())
    worker.leave()
    assert not alive(process)
    assert (shown["starts"], worker.status()["state"], worker.status()["exit_code"]) == (1, "ended", 0)
    assert (folder / "state").is_dir()
    worker.leave(remove=True)
    assert list(tmp_path.rglob("fleet")) == []


def test_a_worker_that_fails_is_started_again_with_the_state_that_it_had(
    keep: type[Kept], tmp_path: Path
) -> None:
    worker = keep(order(tmp_path, "1,5,9"))
    eventually(lambda: joined(worker))
    assert worker.status()["starts"] == 4


def test_a_killed_worker_is_started_again(keep: type[Kept], tmp_path: Path) -> None:
    worker = keep(order(tmp_path))
    eventually(lambda: joined(worker))
    process = Path(worker.status()["folder"]) / "state" / "process"
    os.kill(int(process.read_text()), 9)
    eventually(lambda: worker.status()["starts"] == 2 and joined(worker))


@pytest.mark.parametrize("code", [0, 2, 6, 7])
def test_what_another_start_does_not_cure_ends_it(keep: type[Kept], tmp_path: Path, code: int) -> None:
    found = keep(order(tmp_path, f"1,{code}")).ended()
    assert (found["state"], found["exit_code"], found["starts"]) == ("ended", code, 2)


def test_a_folder_that_cannot_be_written_is_reported_and_tried_again(
    keep: type[Kept], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    worker = keep(order(tmp_path / "file"))
    eventually(lambda: worker.status()["state"] == "pausing")
    assert worker.status()["exit_code"] == 9
    assert str(tmp_path / "file") in worker.status()["log"]


def test_one_that_comes_for_the_same_folder_waits_until_the_last_one_is_gone(
    keep: type[Kept], tmp_path: Path
) -> None:
    first = keep(order(tmp_path))
    eventually(lambda: joined(first))
    second, other = keep(order(tmp_path)), keep(order(tmp_path, name="1"))
    eventually(lambda: joined(other))
    assert second.status()["starts"] == 0
    first.leave()
    eventually(lambda: joined(second))


def test_hosts_of_a_node_share_their_data_on_the_disk_and_the_last_one_takes_them_along(
    keep: type[Kept], tmp_path: Path
) -> None:
    data, fetched = (ShippedFile("digits/rows", ("a", "b")),), []

    def fetch(reference: str) -> bytes:
        fetched.append(reference)
        return reference.encode()

    first, second = (keep(order(tmp_path, name=n, data=data, passing=True), fetch) for n in ("a", "b"))
    eventually(lambda: joined(first) and joined(second))
    rows = [Path(each.status()["folder"]) / "state" / "data" / "digits" / "rows" for each in (first, second)]
    assert [path.read_bytes() for path in rows] == [b"ab", b"ab"]
    assert rows[0].stat().st_ino == rows[1].stat().st_ino
    first.leave()
    assert rows[1].exists()
    second.leave()
    assert list(tmp_path.rglob("fleet")) == []
