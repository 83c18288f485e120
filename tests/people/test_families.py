"""Families of models that people bring train as in a plain loop, in one piece and cut in two."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.parameters import sampled
from tests.people.families import ADAPTERS, FAMILIES, language
from tests.people.loop import Case, case, run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "captured-models.md"


@pytest.mark.filterwarnings("ignore")  # of transformers and peft on models this small
@pytest.mark.parametrize(
    "kind", sampled(4, [case(make, rows, name=name) for name, (make, rows) in FAMILIES.items()])
)
def test_a_family_of_transformers_trains_as_in_a_plain_loop(kind: Case, one_thread: None) -> None:
    run(kind)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind", sampled(2, [case(make, language, name=name) for name, make in ADAPTERS.items()])
)
def test_a_method_of_peft_trains_as_in_a_plain_loop(kind: Case, one_thread: None) -> None:
    run(kind)


def test_the_page_lists_them() -> None:
    text = " ".join(PAGE.read_text().split())
    listed: dict[str, Any] = {
        name: re.search(rf"\b{re.escape(name)}(?![\w-])", text) for name in (*FAMILIES, *ADAPTERS)
    }
    assert [name for name, found in listed.items() if not found] == []
