"""Headlines as commands: graphs have the FLOPs of their models, and the figures follow what they are of."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from atoll.job import Recompute
from benchmarks import consumer_fleet, site_adapters, split_finetuning, split_lab, thin_sites, wan_speedrun
from benchmarks.block_graphs import transformer
from examples.gpt import GPT


def test_a_graph_has_a_transformers_parameters_and_flops() -> None:
    dag = transformer(64, 3, 32, vocabulary=100)
    parameters = sum(state.meta.nbytes // 4 for state in dag.parameters.values())
    assert parameters == 3 * 12 * 64 * 64 + 2 * 64 * 100
    attention = 3 * 4 * 32 * 32 * 64
    products = 2 * 32 * (parameters - 64 * 100)  # an embedding multiplies nothing
    assert sum(op.flops_forward for op in dag.ops) == products + attention
    assert sum(op.flops_backward for op in dag.ops) == 2 * (products + attention)


def test_fifty_cards_have_the_flops_of_four_h100() -> None:
    flops = {
        name: sum(device.gflops["matmul"] for device in consumer_fleet.fleet_of(name).devices)
        for name in ("rtx3080_x50", "h100_x4")
    }
    assert flops["rtx3080_x50"] / flops["h100_x4"] == pytest.approx(0.984, abs=5e-4)


def test_slower_links_and_less_memory_slow_the_cards_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_fleet, "LAYERS", 2)
    cards = [f"home{at:02d}" for at in range(1, 9)]

    def rate(mbit: float, memory_mib: float) -> float:
        fleet = consumer_fleet.fleet_of("rtx3080_x50", mbit, memory_mib).subset(cards)
        found = consumer_fleet.planned(consumer_fleet.gpt(256), fleet, 32, 0, Recompute.OFF)
        return float(found["samples_per_s"])

    rates = [rate(mbit, 1e6) for mbit in (1e6, 1e4, 1e2)]
    assert rates[0] > 1.2 * rates[1] > 2 * rates[2] > 0
    assert rate(1e6, 8600) < rates[0]


def test_a_model_without_room_has_no_rate() -> None:
    fleet = consumer_fleet.fleet_of("rtx3080_x50", memory_mib=100)
    found = consumer_fleet.planned(consumer_fleet.gpt(256), fleet, 8, 0, Recompute.FULL)
    assert found["samples_per_s"] == 0.0
    assert found["why"]


def test_a_cut_by_speed_takes_less_than_an_even_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_fleet, "NODES", 9)
    monkeypatch.setattr(consumer_fleet, "BERT_LAYERS", 24)
    monkeypatch.setattr(consumer_fleet, "BERT_MICROS", 36)
    mild, harsh = (consumer_fleet.sky(law, 0) for law in ("U[1,2)", "1..6"))
    assert 0.05 < mild["less"] < harsh["less"] < 0.8
    assert consumer_fleet.slowness("1..6", 1) == consumer_fleet.slowness("1..6", 1)
    assert set(consumer_fleet.slowness("1 + 1..6", 1)) <= {2.0, 3.0, 4.0, 5.0, 6.0, 7.0}


def test_a_stages_line_is_full_for_86_seconds_and_a_step_little_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wan_speedrun, "MICROS", 64)
    assert wan_speedrun.inbound_s("off", 524_288, 1024, 200.0, "bfloat16") == pytest.approx(85.9, abs=0.05)
    dense, coded = (wan_speedrun.planned(name, 0) for name in ("off", "int8_block"))
    assert 1.0 < dense["step_s"] / dense["inbound_s"] < 1.2
    assert 1.8 < dense["step_s"] / coded["step_s"] < 2.2


def plan(every: int, sent: dict[tuple[str, str], int]) -> dict[str, Any]:
    """Two peers of two workers, and what they send each other a step."""
    replicas = [{"stages": [{"workers": [name]} for name in names]} for names in ("ab", "cd")]
    links = [{"source": a, "target": b, "bytes_per_step": n} for (a, b), n in sent.items()]
    return {"replicas": replicas, "exchange": {"every": every}, "prediction": {"links": links}}


def test_what_crosses_between_sites_is_read_of_plan_and_log() -> None:
    assert thin_sites.crossing_bytes(plan(10, {("a", "b"): 7, ("a", "c"): 3, ("d", "b"): 2})) == 50
    met = {"job": "j", "round": 0, "included": 4, "bytes": 1234, "step": 9, "event": "round.met"}
    log = f"{json.dumps(met)}\n{json.dumps({'bytes': 5, 'event': 'link.probed'})}\nnot JSON\n"
    assert thin_sites.met_bytes(log * 2) == [1234, 1234]


def test_each_broken_promise_of_thin_sites_is_named() -> None:
    exact = {"what": "exact replicas", "stages": [2, 2], "rule": "sum", "error": 0.1}
    local = {"what": "named", "stages": [2, 2], "rule": "diloco", "error": 0.0, "bytes_error": 0.01}
    assert thin_sites.wrong_figures([exact, local], 9.0) == ""
    assert "7.0 times" in thin_sites.wrong_figures([exact, local], 7.0)
    assert "exact replicas: +40%" in thin_sites.wrong_figures([{**exact, "error": 0.4}, local], 9.0)
    assert "bytes are +10.0% off" in thin_sites.wrong_figures([exact, {**local, "bytes_error": 0.1}], 9.0)
    assert "no peers" in thin_sites.wrong_figures([exact, {**local, "stages": [1, 1]}], 9.0)


def test_each_broken_promise_of_a_narrow_cut_is_named() -> None:
    plain = {"rank": 0, "error": -0.1, "bytes": [786_432] * 2, "header": 100}
    narrow = {"rank": 4, "error": 0.1, "bytes": [8192] * 2, "header": 100}
    assert split_lab.wrong_figures([plain, narrow], 512, 10.5) == ""
    assert "9.0 times" in split_lab.wrong_figures([plain, narrow], 512, 9.0)
    assert "[8192, 8193] bytes" in split_lab.wrong_figures(
        [plain, {**narrow, "bytes": [8192, 8193]}], 512, 11
    )
    assert "a header of 200" in split_lab.wrong_figures([plain, {**narrow, "header": 200}], 512, 11.0)
    assert "rank 4: +20% off" in split_lab.wrong_figures([plain, {**narrow, "error": 0.2}], 512, 11.0)


def test_each_broken_promise_of_adapters_at_two_sites_is_named() -> None:
    exact, local = {"stages": [2, 2]}, {"stages": [2, 2], "round_bytes": [1000, 1010]}
    assert site_adapters.wrong_figures([exact, local], 1000.0, 3.0) == ""
    assert "1.2 times" in site_adapters.wrong_figures([exact, local], 1000.0, 1.2)
    assert "sent 1010 bytes" in site_adapters.wrong_figures([exact, local], 900.0, 3.0)
    assert "no round" in site_adapters.wrong_figures([exact, {"stages": [2, 2]}], 1000.0, 3.0)
    assert "not two of two" in site_adapters.wrong_figures([exact, {**local, "stages": [1, 1]}], 1000.0, 3.0)


def test_a_coded_residual_is_what_the_codecs_other_end_reads_both_ways() -> None:
    torch.manual_seed(0)
    net = GPT(32, 1, 4, 16)
    kept, coded = (split_finetuning.Variant(4, 0, residual=True, ratio=ratio).of(net) for ratio in (1.0, 8.0))
    tokens = torch.randint(0, 256, (4, 16))
    losses = [module(tokens) for module in (kept, coded)]
    assert 0.0 < abs(float(losses[0].detach() - losses[1].detach())) < 0.5
    for loss in losses:
        loss.backward()
    one, other = (module.get_parameter("blocks.0.out.weight").grad for module in (kept, coded))
    assert one is not None
    assert other is not None
    assert not torch.equal(one, other)
    assert torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0) > 0.8
    assert split_finetuning.Variant(8, 3, residual=True, ratio=8.0).bytes_a_token(128) == 96.0
