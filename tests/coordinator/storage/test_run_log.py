"""What a run leaves for people: the same points in memory, in the CSV file and for TensorBoard."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from coordinator.storage.run_log import Point, RunLog
from protos import atoll_control_pb2 as pb

POINTS = [Point(1, "loss", 2.5, 100.0), Point(1, "step_s", 0.25, 100.0), Point(2, "loss", 2.25, 101.5)]


@pytest.fixture
def written(tmp_path: Path) -> RunLog:
    return _written(tmp_path)


def _written(folder: Path) -> RunLog:
    run = RunLog(folder, trace_bytes=0)
    for point in POINTS:
        run.measured(point)
    run.close()
    return run


def test_scalars_are_read_back_as_tensorboard_reads_them(written: RunLog) -> None:
    [path] = written.folder.glob("events.out.tfevents.*")
    found = [
        Point(event.step, value.tag, value.simple_value, event.wall_time)
        for event in LegacyEventFileLoader(str(path)).Load()
        for value in event.summary.value
    ]
    assert found == POINTS


def test_tensorboard_goes_on_after_a_disk_that_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("threading.excepthook", lambda met: None)  # the library's thread ends by the error
    run = RunLog(tmp_path, trace_bytes=0)
    with monkeypatch.context() as patched:
        patched.setattr("tensorboard.compat.tensorflow_stub.io.gfile.LocalFileSystem._write", full)
        for point in POINTS:
            run.measured(point)
    monkeypatch.setattr("coordinator.loggers.tensorboard.time.monotonic", lambda: 1e12)
    late = Point(3, "loss", 2.0, 103.0)
    run.measured(late)
    run.close()
    loaded = [LegacyEventFileLoader(str(path)).Load() for path in tmp_path.glob("events.out.tfevents.*")]
    assert [event.step for events in loaded for event in events if event.summary.value] == [late.step]
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 1 + len(POINTS) + 1


def test_points_are_lines_of_the_csv_file_and_kept_for_watchers(written: RunLog) -> None:
    assert (written.folder / "metrics.csv").read_text().splitlines() == [
        "step,name,value,time_s",
        "1,loss,2.5,100.000",
        "1,step_s,0.25,100.000",
        "2,loss,2.25,101.500",
    ]
    assert written.since(1) == (3, POINTS[1:])


def test_without_tensorboard_the_csv_file_is_written_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "coordinator.loggers.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    _written(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def _on_a_full_disk(folder: Path) -> Callable[[], None]:
    spans = folder / "spans"
    spans.symlink_to("/dev/full")
    return spans.unlink


def _that_cannot_be_renamed(folder: Path) -> Callable[[], None]:
    old = folder / "spans.old"
    old.mkdir()
    return old.rmdir


@pytest.mark.parametrize("spoil", [_on_a_full_disk, _that_cannot_be_renamed])
def test_spans_that_cannot_be_rotated_stop_nothing_and_are_written_again_once_they_can(
    tmp_path: Path, spoil: Callable[[Path], Callable[[], None]]
) -> None:
    if spoil is _on_a_full_disk and not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    mend = spoil(tmp_path)
    run = RunLog(tmp_path, trace_bytes=200)
    chunks = [pb.TraceChunk(worker=letter * 60) for letter in "abc"]
    for chunk in chunks[:2]:  # the second one is too much for the file
        run.traced(chunk)
        run.flush()
    mend()
    run.traced(chunks[2])
    assert list(run.chunks())[-1] == chunks[2]
    run.close()
