"""A tied Llama on two real workers takes what the plan says, and trains to its end under that figure."""

from __future__ import annotations

import json

import pytest

from benchmarks import memory
from worker.hosting.contained.control_group import memory_groups


@pytest.mark.slow
def test_a_tied_llama_trains_to_its_end_under_a_limit_of_the_plans_figure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if why_not := memory_groups():
        pytest.skip(why_not)
    assert memory.main(["--models", "llama", "--precision", "fp32", "--limit", "1.02", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["within_limit"]
    assert memory.LEAST <= figures["least"] <= figures["most"] <= memory.MOST
