"""The coordinator's own figures: the worst of a minute, and what a reader hears of them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from coordinator.cli.views.render import status_view
from coordinator.dashboard.rows import fleet_view
from coordinator.storage.health import KEPT_S, Health, Worst
from hostos.command_line import out
from protos import atoll_control_pb2 as pb


@pytest.mark.parametrize("seed", range(5))
def test_the_worst_of_a_minute_is_that_of_all_figures_in_it(seed: int) -> None:
    draw, kept, seen, now_s = random.Random(seed), Worst(), [], 0.0
    assert kept.of(now_s) == 0.0
    for _ in range(500):
        now_s += draw.expovariate(1.0)
        seen.append((now_s, draw.random()))
        kept.note(seen[-1][1], now_s)
        assert kept.of(now_s) == max(value for at_s, value in seen if at_s >= now_s - KEPT_S)
    assert kept.of(now_s + 2 * KEPT_S) == 0.0


def test_health_is_of_the_state_folders_disk_and_an_unknown_one_is_no_error(tmp_path: Path) -> None:
    health = Health(tmp_path, lambda: 100.0)
    health.lag.note(0.25, 90.0)
    found = health.now()
    assert (found.lag_s, found.append_s) == (0.25, 0.0)
    assert found.disk_free_bytes > 0
    assert found.memory_bytes > 1 << 20
    assert Health(tmp_path / "gone", lambda: 0.0).now().disk_free_bytes == 0


def test_status_says_what_is_unusual_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(**figures: float) -> str:
        out.print(status_view(pb.StatusReply(version="1", health=pb.CoordinatorHealth(**figures))))
        return " ".join(capsys.readouterr().out.split()).partition("no workers")[0]

    healthy = {"lag_s": 0.01, "append_s": 0.005, "disk_free_bytes": 1 << 40}
    assert ";" not in shown(**healthy)
    assert ";" not in shown()  # of an older coordinator: nothing is known
    odd = shown(lag_s=3.0, append_s=1.5, disk_free_bytes=1 << 30)
    assert all(word in odd for word in ("1.0 GiB of its disk", "1.50 s for one write", "3.00 s late"))


def test_the_page_has_figures_that_change_only_when_a_reader_would_look(tmp_path: Path) -> None:
    def facts(disk: int, lag_s: float) -> object:
        health = pb.CoordinatorHealth(disk_free_bytes=disk, lag_s=lag_s, memory_bytes=100 << 20)
        return fleet_view(pb.StatusReply(health=health)).facts

    assert facts(50 << 30, 0.0101) == facts((50 << 30) + (10 << 20), 0.0104)
    assert facts(50 << 30, 0.01) != facts(40 << 30, 0.01)
