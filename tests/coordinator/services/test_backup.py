"""A backup that is taken beside a running coordinator starts as that coordinator."""

from __future__ import annotations

import hashlib
import stat
from contextlib import closing
from pathlib import Path

import pytest

from atoll.errors import StorageError, UsageError
from atoll.job import TrainingSpec
from benchmarks.commit import submission, upload
from benchmarks.fake_worker import FakeWorker
from coordinator.client.client import connect
from coordinator.config import CoordinatorConfig
from coordinator.server import Running, serve
from coordinator.services import backup
from coordinator.services.backup import back_up
from coordinator.services.recovery import recover
from coordinator.storage.journal import Journal, StoredJournal
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos.convert import to_proto
from tests.patience import HUNG_S


def config(folder: Path) -> CoordinatorConfig:
    return CoordinatorConfig(state_dir=folder, entry_port=0)


def submitted(running: Running) -> str:
    """A job that waits for a fleet; its blobs are in the store."""
    with connect(f"127.0.0.1:{running.started.entry_port}", running.started.owner_token) as client:
        spec, blobs = submission(2, TrainingSpec(steps=3, n_micro=2), evaluate=False)
        metadata, channel = client.endpoint.metadata(), client.endpoint.channel()
        upload(rpc.BlobsStub(channel), blobs, metadata)
        request = pb.SubmitRequest(spec=to_proto(spec))
        return str(rpc.OwnerStub(channel).Submit(request, metadata=metadata, timeout=HUNG_S).job)


def test_a_copy_taken_while_it_runs_starts_with_its_jobs_tokens_and_workers(tmp_path: Path) -> None:
    target = tmp_path / "copy"
    with serve(config(tmp_path / "state")) as running:
        job = submitted(running)
        worker = FakeWorker(f"127.0.0.1:{running.started.entry_port}", running.started.join_token)
        worker.enroll()
        saved = back_up(config(tmp_path / "state"), target)
        assert (saved.jobs, saved.missing, saved.term) == (1, 0, 1)
        assert saved.blobs > 0
        tokens = running.started.owner_token, running.started.join_token
        leftovers = [path for path in (tmp_path / "state").iterdir() if path.name.startswith(".backup")]
        assert leftovers == []
    modes = {
        stat.S_IMODE(path.stat().st_mode) & 0o077 for path in (target, target / "ca", target / "owner-token")
    }
    assert modes == {0}, "closed to other users"
    with serve(config(target)) as again:
        assert (again.started.owner_token, again.started.join_token) == tokens
        with connect(f"127.0.0.1:{again.started.entry_port}", tokens[0]) as client:
            assert [known.job for known in client.status().jobs] == [job]
        assert again.server is not None
        assert worker.worker in again.server.register.workers
        assert again.server.journal.term == 2
    with pytest.raises(UsageError, match="already exists"):
        back_up(config(tmp_path / "state"), target)


def test_a_blob_that_goes_while_it_is_taken_costs_another_look_at_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(config(tmp_path / "state")) as running:
        submitted(running)
    looks, real = [], backup._held

    def held(store: object, names: set[str], folder: Path) -> set[str]:
        looks.append(len(names))
        gone = real(store, names, folder)  # type: ignore[arg-type]
        return gone | {"ab" * 32} if len(looks) == 1 else gone

    monkeypatch.setattr(backup, "_held", held)
    assert back_up(config(tmp_path / "state"), tmp_path / "copy").missing == 0
    assert len(looks) == 2


def test_what_is_missing_or_rotten_is_counted_and_the_rest_is_saved(tmp_path: Path) -> None:
    with serve(config(tmp_path / "state")) as running:
        submitted(running)
    with closing(StoredJournal(tmp_path / "state" / "journal.sqlite")) as journal:
        gone, rotten, *rest = sorted(recover(journal, 2).ledger.referenced_blobs())
    blobs = tmp_path / "state" / "blobs"
    (blobs / gone[:2] / gone[2:]).unlink()
    (blobs / rotten[:2] / rotten[2:]).write_bytes(b"other bytes")
    saved = back_up(config(tmp_path / "state"), tmp_path / "copy")
    assert (saved.missing, saved.blobs) == (2, len(rest))
    for name in rest:
        data = (tmp_path / "copy" / "blobs" / name[:2] / name[2:]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == name
    assert not (tmp_path / "copy" / "blobs" / rotten[:2] / rotten[2:]).exists()


def test_a_backup_that_broke_off_is_no_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Journal(tmp_path / "journal.sqlite")) as journal:
        journal.claim(0.0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(backup.os, "fsync", full)
    with pytest.raises(StorageError, match=r"No space left .* has space"):
        back_up(config(tmp_path), tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    assert not (tmp_path / ".copy.unfinished").exists()


def test_what_cannot_be_backed_up_here_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no journal\.sqlite: give the --state-dir"):
        back_up(config(tmp_path), tmp_path / "copy")
    elsewhere = CoordinatorConfig(state_dir=tmp_path, database_url="postgresql://u@h/n")
    with pytest.raises(UsageError, match="pg_dump"):
        back_up(elsewhere, tmp_path / "copy")
    (tmp_path / "journal.sqlite").touch()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(UsageError, match="already exists"):
        back_up(config(tmp_path), tmp_path / "taken")


def test_with_a_bucket_the_blobs_stay_there(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "journal.sqlite")) as journal:
        journal.claim(0.0)
    bucket = CoordinatorConfig(state_dir=tmp_path, blobs_url="s3://name/prefix")
    saved = back_up(bucket, tmp_path / "copy")
    assert (saved.bucket, saved.blobs, saved.missing) == ("s3://name/prefix", 0, 0)
    assert (tmp_path / "copy" / "journal.sqlite").exists()


def test_what_a_killed_backup_held_goes_at_the_next_start_and_what_one_holds_now_stays(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state"
    killed = state / f"{backup.HOLDING}killed"
    with serve(config(state)):
        pass
    killed.mkdir()
    (killed / ("ab" * 32)).write_bytes(b"a blob that is gone")
    with backup._holding(state) as held, serve(config(state)):
        assert held.is_dir()
        assert not killed.exists()
    assert not held.exists()
