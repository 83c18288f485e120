"""FIGlet fonts as writers: who has all characters becomes images, each seed its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from atoll.errors import UsageError
from experiments.datasets import fonts
from experiments.datasets import split as splitting


def font(turn: int = 0, height: int = 7, blank: str = "", same: bool = False) -> bytes:
    """A font whose characters are their own bit patterns; those in ``blank`` have no ink."""
    lines = [f"flf2a$ {height} {height - 1} 20 0 2", "a comment", "and another"]
    for code in range(32, 127):
        bits = 0 if chr(code) in blank or code == 32 else 1 if same else (code - 31 + turn)
        rows = [("#" if bits >> at & 1 else "$") * 2 + ("." if bits else " ") for at in range(height)]
        lines += [row + ("@@" if at == height - 1 else "@") for at, row in enumerate(rows)]
    return "\n".join(lines).encode()


def test_a_font_with_all_characters_is_a_writer() -> None:
    files = {"fonts/slant.flf": font(), "fonts/b!lock.flf": font(3), "fonts/README": b"no font"}
    found = fonts.writers(files, seed=1, each=3)
    assert found.names == ("block", "slant")
    assert found.images.shape == (2 * 3 * 62, 28, 28)
    assert np.bincount(found.labels).tolist() == [6] * 62
    assert np.bincount(found.writers).tolist() == [186, 186]
    assert set(np.unique(found.images).tolist()) == {0, fonts.FAINT, fonts.FULL}
    # The same letter by one writer is the same ink, placed by the seed.
    ink = [np.count_nonzero(image) for image in found.images[:186:62]]
    assert len(set(ink)) == 1
    again = fonts.writers(files, seed=1, each=3)
    assert np.array_equal(found.images, again.images)
    assert not np.array_equal(found.images, fonts.writers(files, seed=2, each=3).images)


def test_fonts_without_all_characters_or_without_case_are_left_out() -> None:
    files = {
        "a.flf": font(),
        "no-q.flf": font(blank="q"),
        "alike.flf": font(same=True),
        "high.flf": font(height=17),
        "cut.flf": font()[:500],
    }
    assert fonts.writers(files).names == ("a",)
    with pytest.raises(UsageError, match="no font has all letters"):
        fonts.writers({"no-q.flf": font(blank="q")})


@pytest.mark.parametrize(
    "data", [b"", b"PK\x03\x04", b"flf2a$ x 1 1 0 1", b"flf2a$ 0 1 1 0 1", b"tlf2a$ 1 1 1 0 0"]
)
def test_what_is_no_font_is_refused(data: bytes) -> None:
    with pytest.raises(UsageError):
        fonts.characters(data)


def test_clients_of_a_natural_split_are_the_fonts(tmp_path: Path) -> None:
    owned = splitting.of_writers(fonts.writers({"slant.flf": font(), "block.flf": font(3)}, each=2))
    made = splitting.split_owned(owned, "natural", 0, 0, tmp_path / "out")
    assert [(part.client, part.samples) for part in made.clients] == [
        ("client-block", 124),
        ("client-slant", 124),
    ]
    assert (tmp_path / "out" / "schema.txt").read_text().splitlines()[0].startswith("image:float32[1,28,28]")
    whole = owned.whole(tmp_path / "whole")
    assert whole.name == "fonts.safetensors"
    assert "writer:int64=writer" in (tmp_path / "whole" / "schema.txt").read_text()
    with pytest.raises(UsageError, match="does not apply"):
        splitting.split_owned(owned, "noise:1", 2, 0, tmp_path / "odd")
