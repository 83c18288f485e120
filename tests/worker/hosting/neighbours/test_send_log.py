"""The send log: what was sent in a step is there again, in its order, or the step is not there at all."""

from __future__ import annotations

import os
import threading
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.errors import StorageError
from tests.patience import HUNG_S, eventually
from worker.hosting.neighbours import send_log
from worker.hosting.neighbours.send_log import NOTHING, SendLog
from worker.transport.frames import Direction, MessageKey


def held_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def key(step: int, micro: int = 0, direction: Direction = Direction.FORWARD) -> MessageKey:
    return MessageKey("j", 1, step, micro, 7, direction)


def body(step: int, micro: int, size: int) -> bytes:
    return bytes((step + micro + at) % 251 for at in range(size))


def read(log: SendLog, step: int, stage: int = 1, at: int = 0) -> list[tuple[MessageKey, bytes, bytes]]:
    return [(r.key, r.header, r.payload) for r in log.records(step, stage, at)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "send_log" / "1"


@pytest.fixture
def log(folder: Path) -> Iterator[SendLog]:
    made = SendLog(folder, "j", 64 << 20, 3)
    yield made
    made.close()
    eventually(lambda: not folder.exists())


@pytest.mark.parametrize("size", [0, 5, send_log.TUNED.copied_bytes + 1, send_log.TUNED.write_bytes + 1])
def test_messages_of_a_step_come_back_by_stage_and_in_order(log: SendLog, folder: Path, size: int) -> None:
    for step in (3, 4, 5):
        for micro in range(3):
            for stage in (0, 1):
                log.append(stage, key(step, micro), b"h%d" % stage, memoryview(body(step, micro, size)))
    for step in (3, 4, 5):
        for stage in (0, 1):
            expected = [(key(step, m), b"h%d" % stage, body(step, m, size)) for m in range(3)]
            assert read(log, step, stage) == expected
    assert (log.logged_from, log.newest) == (3, 5)
    first = next(iter(log.records(4, 1)))
    assert [k for k, *_ in read(log, 4, 1, first.next)] == [key(4, 1), key(4, 2)]
    assert {path.stat().st_mode & 0o77 for path in (folder, *folder.iterdir())} == {0}


def test_a_step_under_way_gives_what_there_is_and_later_the_rest(log: SendLog) -> None:
    log.append(1, key(3), b"", b"a")
    found = list(log.records(3, 1))
    log.append(0, key(3, 1), b"", b"b")
    log.append(1, key(3, 2), b"", b"c")
    assert [r.payload for r in found] == [b"a"]
    assert [r.payload for r in log.records(3, 1, found[-1].next)] == [b"c"]


def test_neither_evaluations_nor_steps_before_the_first_are_logged(log: SendLog) -> None:
    log.append(1, key(3, direction=Direction.EVALUATION), b"", b"a")
    log.append(1, key(2), b"", b"a")
    assert log.newest == -1
    with pytest.raises(StorageError, match="step 2 is not in the send log, which begins at 3"):
        read(log, 2)


def test_what_no_replay_needs_leaves_the_disk(
    log: SendLog, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_log, "MAX_SEGMENT_BYTES", 1000)
    for step in range(3, 9):
        log.append(1, key(step), b"", body(step, 0, 900))
        read(log, step)
    files = len(list(folder.iterdir()))
    assert files >= 3
    log.trim(7)
    assert log.logged_from == 7
    eventually(lambda: len(list(folder.iterdir())) < files - 1)
    assert read(log, 8) == [(key(8), b"", body(8, 0, 900))]
    with pytest.raises(StorageError):
        read(log, 6)
    log.trim(5)
    assert log.logged_from == 7


def test_the_oldest_steps_make_way_when_the_bound_is_reached(folder: Path) -> None:
    log = SendLog(folder, "j", 16_000, 0)
    for step in range(40):
        log.append(1, key(step), b"", body(step, 0, 1000))
        read(log, step)
        assert held_bytes(folder) <= 16_000
    assert 24 <= log.logged_from <= 28
    for step in range(log.logged_from, 40):
        assert read(log, step) == [(key(step), b"", body(step, 0, 1000))]
    log.close()


def test_no_more_is_taken_than_a_share_of_what_is_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(send_log.shutil, "disk_usage", lambda _: usage(0, 0, 16_000))
    log = SendLog(folder, "j", 1 << 30, 0)
    for step in range(20):
        log.append(1, key(step), b"", body(step, 0, 1000))
        read(log, step)
    held = held_bytes(folder)
    assert held <= 0.25 * (16_000 + held)
    assert log.logged_from > 12
    log.close()


def test_a_step_that_begins_anew_forgets_what_was_sent(log: SendLog) -> None:
    log.append(1, key(3), b"", b"old3")
    log.append(1, key(4), b"", b"old4")
    log.drop_from(4)
    log.append(1, key(4)._replace(plan_version=2), b"", b"new4")
    assert [p for *_, p in read(log, 3)] == [b"old3"]
    assert [(k.plan_version, p) for k, _, p in read(log, 4)] == [(2, b"new4")]


def test_a_disk_that_is_full_costs_the_steps_and_no_more(
    log: SendLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    log.append(1, key(3), b"", b"a")
    read(log, 3)
    with monkeypatch.context() as patch:
        patch.setattr(SendLog, "_write_step", full)
        log.append(1, key(4), b"", b"b")
        with pytest.raises(StorageError, match="begins at 5"):
            read(log, 4)
    log.append(1, key(4, 1), b"", b"c")  # the rest of a step that is lost
    log.append(1, key(5), b"", b"d")
    assert log.logged_from == 5
    assert [p for *_, p in read(log, 5)] == [b"d"]


def test_a_disk_that_is_too_slow_costs_the_steps_and_holds_up_nobody(
    log: SendLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_log, "MAX_PENDING_BYTES", 2_500)
    monkeypatch.setattr(send_log, "TUNED", replace(send_log.TUNED, write_bytes=1_000))
    go_on, write = threading.Event(), SendLog._write_step

    def slow(*arguments: object) -> None:
        assert go_on.wait(HUNG_S)
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(SendLog, "_write_step", slow)
    for step in range(3, 8):
        log.append(1, key(step), b"", bytes(1000))
    assert log.logged_from > 4
    go_on.set()
    log.append(1, key(9), b"", b"a")
    assert [p for *_, p in read(log, 9)] == [b"a"]
    with pytest.raises(StorageError):
        read(log, 4)


def test_a_file_that_was_cut_short_is_a_step_that_is_not_there(log: SendLog, folder: Path) -> None:
    log.append(1, key(3), b"", bytes(100))
    read(log, 3)
    [path] = folder.iterdir()
    os.truncate(path, 60)
    with pytest.raises(StorageError, match="step 3 of the send log cannot be read"):
        read(log, 3)


def test_without_a_bound_of_bytes_nothing_is_logged(folder: Path) -> None:
    log = SendLog(folder, "j", 0, 0)
    log.append(1, key(0), b"", b"a")
    assert log.logged_from == NOTHING
    with pytest.raises(StorageError):
        read(log, 0)
    log.close()
    assert not folder.exists()


def test_a_closed_log_takes_and_gives_nothing(folder: Path) -> None:
    log = SendLog(folder, "j", 1 << 20, 0)
    log.append(1, key(0), b"", b"a")
    read(log, 0)
    log.close()
    log.append(1, key(1), b"", b"a")
    with pytest.raises(StorageError):
        read(log, 0)
    eventually(lambda: not folder.exists())


def test_a_disk_that_deletes_nothing_ends_no_log(log: SendLog, folder: Path) -> None:
    for step in (3, 4):
        log.append(1, key(step), b"h", body(step, 0, 5))
        assert read(log, step) == [(key(step), b"h", body(step, 0, 5))]
        [file] = folder.glob(str(step - 2))
        file.unlink()
        file.mkdir()  # which no unlink removes
        log.trim(step + 1)
    log.append(1, key(5), b"h", body(5, 0, 5))
    assert read(log, 5) == [(key(5), b"h", body(5, 0, 5))]
