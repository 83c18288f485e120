"""The settings file: what is written is read, by people too; what is damaged says where."""

from __future__ import annotations

import json
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import UsageError
from worker.config import REMEMBERED, change_settings, make_config, remember
from worker.manners.applied import Applied, read_applied, write_applied
from worker.manners.explained import EXPLAINED
from worker.manners.limits import LIMIT_NAMES
from worker.manners.settings_file import read_settings, stamp, write_settings

VALUES = (
    st.text(st.characters(exclude_categories=("Cs",)))
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
)


@given(VALUES | st.lists(st.lists(VALUES, max_size=3), max_size=3))
def test_what_is_written_is_toml_and_the_same_when_it_is_read(value: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for written in ({"a": 1, "b": 2}, {"a": value}):
            write_settings(Path(folder), written)
        assert tomllib.loads((Path(folder) / "settings.toml").read_text(encoding="utf-8")) == {"a": value}


def test_comments_of_ones_own_stay_where_a_command_changes_a_setting(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text("# of the lab\nthreads = 2  # of four\ncpu_percent = 40.0\n")
    change_settings(tmp_path, {"cpu_percent": 30.0})
    text = (tmp_path / "settings.toml").read_text()
    assert "# of the lab\n" in text
    assert "threads = 2  # of four\n" in text
    assert "cpu_percent = 30.0\n" in text


def test_an_older_versions_settings_become_the_file_with_the_next_join(tmp_path: Path) -> None:
    older = tmp_path / "worker.json"
    older.write_text(json.dumps({"host": "192.0.2.7", "threads": 3, "advertise": [["203.0.113.5", 9000]]}))
    config = make_config({"state_dir": tmp_path}, {})
    assert (config.host, config.threads) == ("192.0.2.7", 3)
    remember(config)
    assert not older.exists()
    assert make_config({"state_dir": tmp_path}, {}) == config


def test_a_join_leaves_the_limits_as_they_are(tmp_path: Path) -> None:
    change_settings(tmp_path, {"cpu_percent": 40.0})
    before = stamp(tmp_path)
    remember(make_config({"host": "lab", "state_dir": tmp_path}, {}))
    assert read_settings(tmp_path)["cpu_percent"] == 40.0
    assert stamp(tmp_path) != before
    change_settings(tmp_path, {"cpu_percent": None})
    assert "cpu_percent" not in read_settings(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a = 1\nthreads = x", "line 2"),
        ('threads = "many"', "threads"),
        ('memory_bytes = "lots"', "size 'lots'"),
    ],
)
def test_a_file_that_a_person_damaged_is_refused_with_the_place(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "settings.toml").write_text(text)
    with pytest.raises(UsageError, match=says):
        make_config({"host": "lab", "state_dir": tmp_path}, {})


def test_sizes_may_be_written_as_people_do(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text('host = "lab"\nmemory_bytes = "4GiB"\n')
    assert make_config({"state_dir": tmp_path}, {}).memory_bytes == 4 << 30


def test_every_setting_is_explained_and_no_other() -> None:
    assert sorted(EXPLAINED) == sorted({*REMEMBERED, *LIMIT_NAMES})


def test_what_the_daemon_made_of_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_applied(tmp_path) is None
    applied = Applied((3, 4, 5), "on battery", ("temperature",), "2026-11-25", 7, "")
    write_applied(tmp_path, applied)
    assert read_applied(tmp_path) == applied
    (tmp_path / "applied.json").write_text('{"stamp": "x"}')
    assert read_applied(tmp_path) is None
