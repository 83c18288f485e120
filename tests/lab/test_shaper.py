"""The shaper: rate and delay of a link on loopback, and the file that describes them."""

import asyncio
import time
from pathlib import Path

import pytest

from atoll.errors import UsageError
from lab.shaper import Shaper


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
    # 10 kB last 10 ms at 8 Mbit/s; all share an uplink of 16 Mbit/s.
    assert [pipe.depart(0.0, 10_000) for _ in range(3)] == pytest.approx([0.01, 0.02, 0.03])
    other = shaper.pipe("c")
    assert other is not None
    assert other.depart(0.0, 10_000) == pytest.approx(0.02)
    assert (pipe.delay_s, other.delay_s) == (0.04, 0.0)


class Record:
    """A pipe that notes what is sent on it, and when."""

    def __init__(self) -> None:
        self.sent: list[tuple[float, bytes]] = []
        self.finished = False

    async def send(self, message: bytes) -> None:
        self.sent.append((time.monotonic(), message))

    async def receive(self) -> bytes | None:
        return b"back"

    async def finish(self) -> None:
        self.finished = True

    async def close(self) -> None: ...


def test_a_shaped_pipe_hands_on_in_order_after_its_delay_and_is_free_before(tmp_path: Path) -> None:
    path = tmp_path / "shape.json"
    path.write_text('{"self": "a", "peers": {"b": {"mbit": 8, "ms": 40}}}')

    async def send() -> tuple[Record, float, float]:
        record, begun_s = Record(), time.monotonic()
        pipe = Shaper.load(path).shaped(record, "b")
        for number in range(5):
            await pipe.send(bytes([number]) * 10_000)
        free_s = time.monotonic() - begun_s
        assert await pipe.receive() == b"back"
        await pipe.finish()
        await pipe.close()
        return record, begun_s, free_s

    record, begun_s, free_s = asyncio.run(send())
    assert [message[0] for _, message in record.sent] == [0, 1, 2, 3, 4]
    assert free_s >= 0.05
    assert all(at_s - begun_s >= 0.05 + 0.01 * n for n, (at_s, _) in enumerate(record.sent))
    assert record.finished


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
