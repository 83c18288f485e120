"""A token from a file or standard input, so that it stands on no command line."""

from __future__ import annotations

import codecs
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
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"atoll1_def\r\n")))
    assert given_token(None, path) == "atoll1_abc"
    assert given_token("atoll1_xyz", path) == "atoll1_abc", "what is in ATOLL_TOKEN gives way"
    assert given_token(None, Path("-")) == "atoll1_def"
    assert given_token("atoll1_xyz", None) == "atoll1_xyz"


@pytest.mark.parametrize(
    "data",
    [
        b"atoll2_a-b_c\r\n",
        codecs.BOM_UTF8 + b"atoll2_a-b_c\r\n",
        codecs.BOM_UTF16_LE + "atoll2_a-b_c\r\n".encode("utf-16-le"),
        codecs.BOM_UTF16_BE + "atoll2_a-b_c\r\n".encode("utf-16-be"),
        b'"atoll2_a-b_c"\n',
        b"  atoll-worker join --token atoll2_a-b_c --name lab\n",
        b"`atoll-worker join lab:7700 --token=atoll2_a-b_c`",
    ],
)
def test_a_token_is_found_as_windows_and_people_write_it(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(data)
    assert given_token(None, path) == "atoll2_a-b_c"


def test_a_token_in_a_variable_may_be_in_quotes() -> None:
    assert given_token("'atoll2_a-b_c'\r", None) == "atoll2_a-b_c"


@pytest.mark.parametrize("text", ["", " \n", "x" * (MAX_TOKEN_FILE_BYTES + 1)])
def test_a_file_without_a_token_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(UsageError, match="give a file with one token"):
        given_token(None, path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the token"):
        given_token(None, tmp_path / "none")
