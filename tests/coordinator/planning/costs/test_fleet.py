import numpy as np
import pytest

from atoll.errors import UsageError
from coordinator.client.fleet_file import parse_fleet, read_fleet
from coordinator.membership.links.table import LinkTable, measured_fleet
from coordinator.planning.costs.codec_costs import DEFAULT_SPEEDS, speed_of
from coordinator.planning.costs.fleet import LOSS_HOURS, TCP_SHARE, Device, LinkEstimate
from tests.coordinator.planning.fleets import random_fleet, two_islands

TEXT = """
[default]
mbit = 100
ms = 20
gflops = 30

[[group]]
name = "lab"
mbit = 1000
ms = 0.5
up_mbit = 40
down_mbit = 80

[[device]]
name = "lab1"
group = "lab"
memory_mib = 512

[[device]]
name = "home"
up_mbit = 10
gflops = { matmul = 60, conv = 20 }
coordinator_ms = 3

[[device]]
name = "lab2"
group = "lab"

[[link]]
from = "lab"
to = "home"
ms = 35

[[link]]
from = "home"
to = "lab2"
mbit = 5
one_way = true
"""


@pytest.fixture
def fleet(tmp_path):
    path = tmp_path / "fleet.toml"
    path.write_text(TEXT)
    return read_fleet(path)


def test_a_fleet_file_gives_devices_in_join_order_with_their_figures(fleet):
    assert [d.worker for d in fleet.devices] == ["lab1", "home", "lab2"]
    lab1, home, _ = fleet.devices
    assert lab1.memory_limit_bytes == 512 * 2**20
    assert lab1.gflops == {"": 30.0}
    assert home.gflops == {"matmul": 60.0, "conv": 20.0}
    assert home.coordinator.latency_s == pytest.approx(0.003)
    assert fleet.payload_share == TCP_SHARE


def test_a_fleet_file_says_how_often_a_worker_is_lost_else_once_in_an_evening():
    often = parse_fleet({"default": {"loss_hours": 0.5}, "device": [{"name": "a"}, {"name": "b"}]})
    assert often.losses_per_s == pytest.approx(1 / 1800)
    assert often.subset(["b"]).losses_per_s == often.losses_per_s
    assert parse_fleet({"device": [{"name": "a"}]}).losses_per_s == pytest.approx(1 / (LOSS_HOURS * 3600))


def test_codec_speeds_of_a_device_stand_over_the_default_ones(tmp_path):
    path = tmp_path / "fleet.toml"
    text = TEXT.replace("gflops = 30", "codec_gbps = { topk = [0.5, 8], fp16 = [4, 3] }")
    path.write_text(text.replace("memory_mib = 512", "codec_gbps = { topk = [0.1, 2] }"))
    lab1, home, _ = read_fleet(path).devices
    assert lab1.codec_speeds == {"topk": (0.1e9, 2e9), "fp16": (4e9, 3e9)}
    assert home.codec_speeds["topk"] == (0.5e9, 8e9)
    assert speed_of(home, "topk") == (0.5e9, 8e9)
    assert speed_of(home, "int8_block") == DEFAULT_SPEEDS["int8_block"]


def test_later_links_win_and_one_way_links_leave_the_other_direction(fleet):
    assert fleet.latency_s[0, 1] == fleet.latency_s[1, 2] == 0.035
    assert fleet.latency_s[0, 2] == 0.0005
    assert fleet.bandwidth_bps[1, 2] == 5e6
    assert fleet.bandwidth_bps[2, 1] == 100e6


def test_a_path_passes_the_uplinks_it_leaves_and_enters_and_then_the_pair(fleet):
    assert [name for name, _ in fleet.path(0, 1)] == ["lab up", "home down", "lab1>home"]
    assert [name for name, _ in fleet.path(0, 2)] == ["lab1>lab2"]
    assert fleet.path(1, 0)[0] == ("home up", pytest.approx(10e6 * TCP_SHARE))


def test_the_effective_rate_is_the_slowest_on_the_path():
    for fleet in (two_islands(), random_fleet(3, 5)):
        for a in range(len(fleet.devices)):
            for b in range(len(fleet.devices)):
                if a != b:
                    slowest = min(rate for _, rate in fleet.path(a, b))
                    assert fleet.effective_bps[a, b] == pytest.approx(slowest)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("ms = 20", "delay = 20"), "unknown key 'delay'"),
        (("mbit = 100\n", "mbit = -1\n"), "mbit = -1; give a number from"),
        (('group = "lab"\nmemory', 'group = "den"\nmemory'), "group 'den' is not one of"),
        (('to = "home"', 'to = "hme"'), "to = 'hme'; name a device or group"),
        (('name = "lab2"', 'name = "lab1"'), "two entries .* named 'lab1'"),
        (('name = "home"', 'name = "lab"'), "names both a device and a group"),
        (("gflops = 30", 'gflops = "fast"'), "gflops  = 'fast'"),
        (("[default]", "[defaults]"), "unknown key 'defaults'"),
        (("[[link]]", "[link"), "not TOML"),
        (("gflops = 30", "loss_hours = 0"), "loss_hours = 0; give a number from 0.01"),
        (("gflops = 30", "codec_gbps = { gzip = [1, 1] }"), "codec_gbps names 'gzip'; codecs are .*topk"),
        (("gflops = 30", "codec_gbps = { topk = 3 }"), r"topk = 3; give \[encode, decode\] in GB/s"),
        (("gflops = 30", "codec_gbps = { topk = [0, 3] }"), r"topk = \[0, 3\]; give"),
    ],
)
def test_a_bad_fleet_file_is_refused_with_the_place(tmp_path, change, message):
    path = tmp_path / "fleet.toml"
    path.write_text(TEXT.replace(*change))
    with pytest.raises(UsageError, match=message):
        read_fleet(path)


def test_a_missing_file_and_an_empty_fleet_are_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        read_fleet(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="0 devices"):
        parse_fleet({})


def test_a_live_fleet_uses_what_was_measured_and_a_home_line_where_nothing_was():
    table = LinkTable()
    table.probed("a", "b", 50e6, 0.02)
    devices = [Device(name, 2**30) for name in "abc"]
    fleet = measured_fleet(devices, table, unknown=LinkEstimate(7e6, 0.05))
    assert fleet.bandwidth_bps[0, 1] == fleet.bandwidth_bps[1, 0] == 50e6
    assert fleet.bandwidth_bps[0, 2] == 7e6
    assert fleet.latency_s[2, 1] == 0.05
    assert np.isinf(np.diag(fleet.bandwidth_bps)).all()


def test_a_subset_keeps_its_links_in_the_order_asked_for():
    fleet = random_fleet(1, 4)
    part = fleet.subset(["w3", "w1"])
    assert part.bandwidth_bps[0, 1] == fleet.bandwidth_bps[3, 1]
    assert part.path(0, 1)[-1] == fleet.path(3, 1)[-1]


def test_what_training_got_of_a_line_is_planned_with_and_what_a_probe_showed_bounds_it() -> None:
    table = LinkTable()
    table.probed("a", "b", 80e6, 0.02)
    table.dragged(("a", "b"), 1.0, 1.0, 1.05)
    fleet = measured_fleet([Device("a", 1), Device("b", 1)], table)
    assert fleet.probed is not None
    assert fleet.probed.bandwidth_bps[0, 1] == pytest.approx(1.05 * fleet.bandwidth_bps[0, 1])
    assert fleet.subset(["b", "a"]).probed is not None
