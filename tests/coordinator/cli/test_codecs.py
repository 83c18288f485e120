"""`atoll codecs`: every codec, its promises, figures that fit together, and torch left as it was."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from compressors import CODECS
from coordinator.cli.main import app
from hostos.command_line import run

SMALL = ["--elements", "65536", "--seed", "4711"]


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert run(app, ["codecs", *SMALL, *arguments, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_json_lists_every_codec_with_its_facts_and_figures(capsys: pytest.CaptureFixture[str]) -> None:
    found = {each["name"]: each for each in listed(capsys)}
    assert set(found) == set(CODECS)
    for name, each in found.items():
        facts = CODECS[name]
        assert set(each["valid_for"]) == {use.value for use in facts.valid_for}
        assert (each["exact"], each["linear"], each["stateful"]) == (
            facts.exact,
            facts.linear,
            facts.stateful,
        )
        assert each["asked"] == (32.0 if facts.rated else None)
        assert each["ratio"] == pytest.approx(4 / each["bytes_per_element"])
        share = each["bytes_per_element"] / 4
        seconds = 1 / each["encode_bytes_per_s"] + 1 / each["decode_bytes_per_s"]
        assert each["break_even_bps"] == pytest.approx(max(0.0, 8 * (1 - share) / seconds))
    assert found["none"]["break_even_bps"] == 0
    assert found["lossless"]["ratio"] > 1.15


def test_a_ratio_and_a_dtype_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    (topk,) = listed(capsys, "topk", "--ratio", "60")
    assert topk["asked"] == 60
    assert 45 < topk["ratio"] < 75
    (lossless,) = listed(capsys, "lossless", "--dtype", "bfloat16")
    assert lossless["bytes_per_element"] == pytest.approx(1.33, abs=0.04)


def test_the_table_fits_a_terminal_and_explains_its_letters(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["codecs", *SMALL]) == 0
    text = capsys.readouterr().out
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert set(CODECS) <= set(lines)
    assert lines["none"].split()[1:3] == ["AGDM", "EUL--"]
    assert lines["none"].split()[-1] == "never"
    assert lines["acp_sgd"].split()[1:3] == ["-GD-", "--LSB"]
    assert max(map(len, text.splitlines())) <= 80
    assert "pays below" in text


def test_named_codecs_come_with_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["codecs", "powersgd", *SMALL]) == 0
    text = capsys.readouterr().out
    assert "1905.13727" in text
    assert "lossless" not in text


@pytest.mark.parametrize(
    ("arguments", "word"), [(["zip"], "zip"), (["--dtype", "int8"], "bfloat16"), (["--ratio", "0.5"], "0.5")]
)
def test_what_does_not_exist_is_wrong_usage(
    capsys: pytest.CaptureFixture[str], arguments: list[str], word: str
) -> None:
    assert run(app, ["codecs", *arguments]) == 2
    assert word in capsys.readouterr().err


def test_measuring_leaves_torch_s_threads_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    listed(capsys, "fp16")
    assert torch.get_num_threads() == before
