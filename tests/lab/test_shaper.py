"""The shaper: rate and delay of a link on loopback, and the file that describes them."""

from pathlib import Path

import pytest

from atoll.errors import UsageError
from lab.shaper import Line, Shaper


def test_the_shaper_keeps_rate_and_delay(tmp_path: Path) -> None:
    path = tmp_path / "shape.json"
    path.write_text(
        '{"self": "a", "uplink": {"mbit": 16}, "peers": {"b": {"mbit": 8, "ms": 40}, "c": {}}, '
        '"names": {"b": "home2"}}'
    )
    shaper = Shaper.load(path)
    pipe = shaper.pipe("nobody", "b")
    assert pipe is not None
    assert shaper.pipe("home2") is pipe
    assert shaper.pipe("nobody") is None
    line, arrivals, left = Line(pipe), [], 5
    now_s: float | None = 0.0
    while now_s is not None:
        if left and (line.left(now_s) or left == 5):
            line.enter(now_s, bytes(10_000))
            left -= 1
        line.left(now_s)
        if line.arrived(now_s) is not None:
            arrivals.append(now_s)
        now_s = line.next_s
    # 10 kB last 10 ms at 8 Mbit/s, and arrive 40 ms later.
    assert arrivals == pytest.approx([0.05, 0.06, 0.07, 0.08, 0.09], abs=1e-3)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"self": 1, "peers": {"b": {"mbit": 0}}}', '{"self": "a", "peers": 3}']
)
def test_a_bad_shaper_file_is_refused_with_an_example(tmp_path: Path, text: str) -> None:
    path = tmp_path / "shape.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="mbit"):
        Shaper.load(path)
    with pytest.raises(UsageError):
        Shaper.load(tmp_path / "missing.json")
