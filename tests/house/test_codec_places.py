"""Where each codec can be asked for, as the table of docs/compression.md says it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.compression import Compression
from atoll.errors import UsageError
from atoll.federated import Federated
from compressors import CODECS
from compressors.model_file import Coding
from coordinator.federated.checks import check_uplink
from coordinator.planning.codecs.ratios import check_compression

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "compression.md").read_text()


def told(name: str) -> str:
    """The letters in a codec's row."""
    (row,) = [
        line for line in TEXT.splitlines() if line.startswith(f"| `{name}` |") and line.count(" | ") == 6
    ]
    return row.split(" | ")[4]


def accepted(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except UsageError:
        return False
    return True


def rated(name: str) -> str:
    return name + ":8" * CODECS[name].rated


@pytest.mark.parametrize("name", CODECS)
def test_the_table_says_which_codecs_links_and_uplinks_take(name: str) -> None:
    assert set(told(name)) <= set("LUF-")
    assert ("L" in told(name)) == accepted(lambda: check_compression(Compression.parse(rated(name))))
    uplink = accepted(lambda: check_uplink(Federated(uplink=rated(name))))
    assert ("U" in told(name)) == uplink == accepted(lambda: Coding(name, 8.0))


@pytest.mark.parametrize("name", CODECS)
def test_the_table_says_which_codecs_flower_clients_take(name: str) -> None:
    pytest.importorskip("flwr")
    from compressors import flower

    assert ("F" in told(name)) == accepted(lambda: flower.Coding.of(rated(name)))
