"""A token from a file or standard input, so that it stands on no command line."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from atoll.errors import UsageError
from hostos.command_line import MAX_TOKEN_FILE_BYTES, given_token


def test_a_token_is_read_from_a_file_or_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    path.write_text("atoll1_abc\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("atoll1_def\n"))
    assert given_token(None, path) == "atoll1_abc"
    assert given_token("atoll1_xyz", path) == "atoll1_abc", "what is in ATOLL_TOKEN gives way"
    assert given_token(None, Path("-")) == "atoll1_def"
    assert given_token("atoll1_xyz", None) == "atoll1_xyz"


@pytest.mark.parametrize("text", ["", " \n", "x" * (MAX_TOKEN_FILE_BYTES + 1)])
def test_a_file_without_a_token_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(UsageError, match="give a file with one token"):
        given_token(None, path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the token"):
        given_token(None, tmp_path / "none")
