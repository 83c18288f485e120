"""Folders of federated jobs: the daemon makes them, makes room, and knows nothing of what is in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.errors import StorageError
from worker.federated.kept.folders import (
    FOLDER,
    SECRET_FILE,
    forget_old,
    job_folder,
    make_job_folder,
    noise_key,
)


def test_a_jobs_folder_is_its_own_and_closed_to_others(tmp_path: Path) -> None:
    made = make_job_folder(tmp_path, "../../etc")
    assert made == job_folder(tmp_path, "../../etc")
    assert made.parent == tmp_path / FOLDER
    assert made.stat().st_mode & 0o777 == 0o700
    assert made != job_folder(tmp_path, "another")
    (made / "kept.json").write_text("{}")
    assert (make_job_folder(tmp_path, "../../etc") / "kept.json").exists()


def test_older_jobs_make_room_the_oldest_first_and_the_own_one_stays(tmp_path: Path) -> None:
    folders = [make_job_folder(tmp_path, f"job {at}") for at in range(3)]
    for at, folder in enumerate(folders):
        (folder / "state").write_bytes(bytes(100))
        os.utime(folder, (1e9 + at, 1e9 + at))
    own = make_job_folder(tmp_path, "job 0", max_bytes=250)  # used now: not the oldest any more
    assert own == folders[0]
    assert [folder.exists() for folder in folders] == [True, False, True]
    forget_old(own, 1000, 250)
    assert [folder.exists() for folder in folders] == [True, False, False]


def test_this_machines_noise_is_its_own_for_ever_and_nobody_reads_it(tmp_path: Path) -> None:
    key = noise_key(tmp_path / "a")
    assert len(key) == 32
    assert noise_key(tmp_path / "a") == key != noise_key(tmp_path / "b")
    path = tmp_path / "a" / FOLDER / SECRET_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert key not in path.read_bytes()
    path.write_bytes(b"cut off")
    # Another one in its place would give the same order other noise.
    with pytest.raises(StorageError, match=r"secret is damaged: 7 bytes instead of 32"):
        noise_key(tmp_path / "a")
    assert path.read_bytes() == b"cut off"


def test_a_folder_that_cannot_be_made_is_an_error_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("")
    with pytest.raises(StorageError, match="choose another --state-dir"):
        make_job_folder(tmp_path, "j")
    with pytest.raises(StorageError):
        noise_key(tmp_path)
