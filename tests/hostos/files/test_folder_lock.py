"""One process per state folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.errors import StorageError, UsageError
from hostos.files.folder_lock import FolderLock, Holder, holder_of

HELD = """
import subprocess, sys
from pathlib import Path
from hostos.files.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]), str)
lock.note("127.0.0.1:7700")
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"],
                         stdout=subprocess.PIPE, text=True, close_fds=False)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


def refusal(holder: Holder) -> str:
    return f"held by {holder.process} at {holder.address!r}"


def test_a_second_taker_is_refused_in_words_that_name_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "state" / "lock"
    first = FolderLock(path, refusal)
    assert holder_of(path) == Holder(os.getpid(), "")
    first.note("[::1]:7700")
    with pytest.raises(UsageError, match=rf"held by {os.getpid()} at '\[::1\]:7700'"):
        FolderLock(path, refusal)
    assert holder_of(path) == Holder(os.getpid(), "[::1]:7700"), "who was refused changed the file"
    first.release()
    first.release()
    assert holder_of(path) is None
    FolderLock(path, refusal).release()


def test_a_shorter_note_leaves_nothing_of_a_longer_one(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "lock", refusal)
    lock.note("a-long-name.example.org:7700")
    lock.note("b:1")
    assert holder_of(tmp_path / "lock") == Holder(os.getpid(), "b:1")
    lock.release()


@pytest.mark.parametrize("text", ["", "one two", "99999999999999 x", "\x00\xff", "12 \x1b[2J"])
def test_a_damaged_note_still_refuses_and_names_nobody(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lock"
    lock = FolderLock(path, refusal)
    path.write_bytes(text.encode("latin-1"))
    found = holder_of(path)
    assert found is not None
    assert found.address == ""
    with pytest.raises(UsageError, match="held by"):
        FolderLock(path, refusal)
    lock.release()


def test_a_kill_frees_the_folder_even_where_a_child_lives_on(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HELD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            assert holder_of(path) == Holder(process.pid, "127.0.0.1:7700")
            process.kill()
            process.wait()
            os.kill(child, 0)  # it lives
            FolderLock(path, refusal).release()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_folder_that_cannot_be_written_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="choose another --state-dir"):
        FolderLock(tmp_path / "file" / "lock", refusal)
