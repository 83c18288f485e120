"""Codecs inside a stock Flower run: what arrives, what is kept for the next round, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as stock
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import BadFrame, UsageError
from atoll.federated import MAX_RESIDUAL_ROUNDS
from compressors import CODECS
from compressors.catalogue import Use
from compressors.flower import RESIDUAL, STYPE, Coding, Compressed, Mod, compress_mod
from strategies import flower, make_strategy
from strategies.values import Done
from tests.strategies.flower_grid import Client, LocalGrid

SHAPES = {"weight": (48, 64), "bias": (48,), "steps": ()}
USABLE = [c for c in CODECS.values() if (c.exact or Use.DELTA in c.valid_for) and not c.shared_state]
every_codec = pytest.mark.parametrize("text", [c.name + ":8" * c.rated for c in USABLE])


def model(seed: int = 0) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    floats = {name: draw.normal(size=shape).astype("float32") for name, shape in SHAPES.items()}
    return {**floats, "steps": np.array(3)}


def record(arrays: dict[str, Any]) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def change(node: int, at_round: int) -> dict[str, Any]:
    """What local training does to the weights."""
    draw = np.random.default_rng([node, at_round])
    return {n: (0.1 * draw.normal(size=s)).astype("float32") for n, s in SHAPES.items() if n != "steps"}


def client(node: int, mod: Mod | None = None) -> Client:
    """An ordinary ClientApp, behind a mod where one is given."""

    def app(message: Message, context: Context) -> Message:
        at_round = int(message.content["config"]["server-round"])  # type: ignore[call-overload]
        moved = change(node, at_round)
        arrays = {n: a.numpy() for n, a in message.content["arrays"].items()}
        trained = {n: a + moved[n] if n in moved else a for n, a in arrays.items()}
        content = {"arrays": record(trained), "metrics": MetricRecord({"num-examples": 10})}
        return Message(RecordDict(content), reply_to=message)  # type: ignore[arg-type]

    return app if mod is None else lambda message, context: mod(message, context, app)


def grid(mod: Mod | None, nodes: int = 3) -> LocalGrid:
    return LocalGrid({node: client(node, mod) for node in range(1, nodes + 1)})


def fedavg() -> stock.FedAvg:
    return stock.FedAvg(min_train_nodes=3, min_available_nodes=3, fraction_evaluate=0.0)


def run(strategy: Any, nodes: LocalGrid, rounds: int = 3) -> dict[str, Any]:
    result = strategy.start(grid=nodes, initial_arrays=record(model()), num_rounds=rounds)
    return {name: array.numpy() for name, array in result.arrays.items()}


@every_codec
def test_a_stock_strategy_sees_dense_arrays_under_the_same_keys(text: str) -> None:
    plain = run(fedavg(), grid(None), 1)
    coded = run(Compressed(fedavg()), grid(compress_mod(text)), 1)
    assert {n: (a.shape, a.dtype) for n, a in coded.items()} == {
        n: (a.shape, a.dtype) for n, a in plain.items()
    }
    assert np.array_equal(coded["bias"], plain["bias"])  # too small to be packed
    moved = np.linalg.norm(plain["weight"] - model()["weight"])
    off = np.linalg.norm(coded["weight"] - plain["weight"])
    assert off == 0.0 if CODECS[text.partition(":")[0]].exact else off <= 3 * moved


@every_codec
def test_packets_take_no_more_than_the_codec_promises(text: str) -> None:
    strategy = Compressed(fedavg(), text)
    run(strategy, grid(compress_mod()), 2)
    facts = CODECS[text.partition(":")[0]]
    for traffic in strategy.traffic:
        if facts.rated:
            assert traffic.wire_bytes < 0.5 * traffic.dense_bytes
        assert traffic.wire_bytes <= 1.05 * traffic.dense_bytes


def test_what_top_k_leaves_out_arrives_in_later_rounds() -> None:
    nodes = grid(compress_mod("topk:8"))
    got = run(Compressed(fedavg()), nodes, 3)
    sent = got["weight"].astype("float64") - model()["weight"]
    true = sum(np.mean([change(node, r)["weight"] for node in (1, 2, 3)], axis=0) for r in (1, 2, 3))
    kept = [context.state[RESIDUAL]["arrays/weight#error"] for context in nodes.contexts.values()]
    waiting = np.mean([array.numpy().reshape(SHAPES["weight"]) for array in kept], axis=0)
    assert np.linalg.norm(waiting) > 0.1 * np.linalg.norm(true)
    assert np.allclose(sent + waiting, true, atol=1e-5)


def test_without_error_feedback_nothing_is_kept() -> None:
    nodes = grid(compress_mod("topk:8", error_feedback=False))
    run(Compressed(fedavg()), nodes, 2)
    assert all(not context.state[RESIDUAL] for context in nodes.contexts.values())


def test_a_residual_of_another_codec_is_dropped() -> None:
    nodes = grid(compress_mod())
    run(Compressed(fedavg(), "topk:8"), nodes, 2)
    before = nodes.contexts[1].state[RESIDUAL]
    run(Compressed(fedavg(), "lossless"), nodes, 1)
    assert before
    assert not nodes.contexts[1].state[RESIDUAL]


def packet_of(nodes: LocalGrid, at_round: int) -> bytes:
    """What node 1 sends when it is asked in this round."""
    requests = Compressed(fedavg()).configure_train(at_round, record(model()), ConfigRecord(), nodes)
    replies = {r.metadata.src_node_id: r for r in nodes.send_and_receive(requests)}
    return replies[1].content["arrays"]["weight"].data


def test_a_residual_counts_for_some_rounds_and_then_no_more() -> None:
    for missed, counts in ((MAX_RESIDUAL_ROUNDS, True), (MAX_RESIDUAL_ROUNDS + 1, False), (-1, False)):
        nodes = grid(compress_mod("topk:8"))
        packet_of(nodes, 3)
        fresh = packet_of(grid(compress_mod("topk:8")), 3 + missed)
        assert (packet_of(nodes, 3 + missed) != fresh) is counts


def test_power_iterations_go_on_where_they_were() -> None:
    nodes = grid(compress_mod("powersgd:8"))
    strategy = Compressed(fedavg())
    run(strategy, nodes, 1)
    first = dict(nodes.contexts[1].state[RESIDUAL])
    assert {key.partition("#")[2] for key in first} == {"q", "residual"}
    run(strategy, nodes, 1)
    assert first != dict(nodes.contexts[1].state[RESIDUAL])


def test_our_rules_and_their_extra_arrays_go_through_the_codecs() -> None:
    rule = make_strategy("scaffold")

    def app(node: int) -> Client:
        def local(message: Message, context: Context) -> Message:
            def train(work: flower.LocalWork) -> Done:
                moved = change(node, work.round)
                weights = {n: a + moved[n] if n in moved else a for n, a in work.start.items()}
                return Done(weights, 10, 5, 0.05)

            return flower.local_round(message, context, model(), train)

        mod = compress_mod("topk:4")
        return lambda message, context: mod(message, context, local)

    inner = flower.AtollStrategy(rule, trained=["weight", "bias"], min_train_nodes=3, fraction_evaluate=0.0)
    strategy = Compressed(inner)
    run(strategy, LocalGrid({node: app(node) for node in (1, 2, 3)}), 2)
    assert inner.state.round == 2
    assert strategy.traffic[-1].wire_bytes < 0.8 * strategy.traffic[-1].dense_bytes


def packets(text: str) -> tuple[Compressed, list[Message]]:
    """A strategy that waits for replies, and good ones."""
    strategy, nodes = Compressed(fedavg()), grid(compress_mod(text))
    requests = list(strategy.configure_train(1, record(model()), ConfigRecord(), nodes))
    return strategy, list(nodes.send_and_receive(requests))


def with_packet(reply: Message, name: str, data: bytes, stype: str = STYPE + "topk:8") -> None:
    reply.content["arrays"][name] = Array("uint8", (len(data),), stype, data)


@pytest.mark.parametrize(
    ("name", "damage", "stype", "reason"),
    [
        ("weight", lambda d: d[:1], "topk:8", "no whole header"),
        ("weight", lambda d: b"\xff\xff" + d[2:], "topk:8", "no whole header"),
        ("weight", lambda d: d[:-7], "topk:8", ""),
        ("weight", lambda d: d + bytes(10**6), "topk:8", "at most"),
        ("bias", lambda d: d, "topk:8", "the plan says"),
        ("other", lambda d: d, "topk:8", "not sent"),
        ("weight", lambda d: d, "qsgd:8", "codec"),
        ("weight", lambda d: d, "acp_sgd:8", "cannot carry"),
        ("weight", lambda d: d, "topk", "needs a ratio"),
        ("weight", lambda d: d, "nonsense", "cannot carry"),
        ("weight", lambda d: d, "topk:0.5", "from 1"),
    ],
)
def test_a_reply_with_a_bad_packet_is_left_out_with_the_reason(
    name: str, damage: Any, stype: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    strategy, replies = packets("topk:8")
    good = replies[1].content["arrays"]["weight"].data
    with_packet(replies[1], name, damage(good), STYPE + stype)
    with caplog.at_level("WARNING", "flwr"):
        arrays, _ = strategy.aggregate_train(1, replies)
    assert arrays is not None
    [warned] = [r.getMessage() for r in caplog.records if "without node" in r.getMessage()]
    assert reason in warned


def test_a_decoder_that_trips_costs_the_round_one_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, replies = packets("topk:8")
    codec = type(strategy._coding("topk:8").codec)
    decompress, calls = codec.decompress, []

    def trips(self: Any, packet: Any) -> Any:
        calls.append(packet)
        if len(calls) == 1:
            raise RuntimeError("index out of range")
        return decompress(self, packet)

    monkeypatch.setattr(codec, "decompress", trips)
    arrays, _ = strategy.aggregate_train(1, replies)
    assert arrays is not None


def test_a_codec_that_was_not_asked_for_is_refused() -> None:
    strategy, replies = packets("topk:8")
    strategy.codec = "lossless"
    arrays, metrics = strategy.aggregate_train(1, replies)
    assert arrays is None
    assert metrics is None


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_packet_however_made_breaks_the_server(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(["topk:8", "qsgd:8", "powersgd:8", "lossless", "chain:8"]))
    strategy, replies = packets(text)
    damaged = bytearray(replies[0].content["arrays"]["weight"].data)
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    with_packet(replies[0], "weight", bytes(damaged), STYPE + text)
    arrays, _ = strategy.aggregate_train(1, replies)
    assert arrays is not None
    assert arrays["weight"].shape == SHAPES["weight"]


def test_settings_are_checked_when_the_mod_is_made() -> None:
    for text in ("acp_sgd:8", "low_rank", "topk", "topk:8:9", "zip"):
        with pytest.raises(UsageError):
            compress_mod(text)
    with pytest.raises(UsageError, match="cannot carry"):
        Compressed(fedavg(), "acp_sgd:8")
    assert isinstance(Coding.of("topk:8"), Coding)
    assert issubclass(BadFrame, Exception)


def test_evaluation_and_errors_pass_untouched() -> None:
    mod = compress_mod("topk:8")
    strategy = Compressed(stock.FedAvg(min_train_nodes=3, min_evaluate_nodes=3))

    def app(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train":
            if message.metadata.dst_node_id == 2:
                raise RuntimeError("no data")
            return client(message.metadata.dst_node_id)(message, context)
        metrics = MetricRecord({"loss": 1.5, "num-examples": 10})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    nodes = LocalGrid({n: lambda m, c: mod(m, c, app) for n in (1, 2, 3)})
    result = strategy.start(grid=nodes, initial_arrays=record(model()), num_rounds=1)
    assert result.evaluate_metrics_clientapp[1] == MetricRecord({"loss": 1.5})
    assert set(result.arrays) == set(SHAPES)
