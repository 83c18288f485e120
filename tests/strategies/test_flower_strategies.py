"""Every rule under Flower's loop gives what it gives without Flower, and keeps Flower's conventions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as stock

from atoll.errors import BadUpdate, UsageError
from strategies import STRATEGIES, flower, make_strategy
from strategies import flower_records as words
from strategies.base import Strategy
from strategies.layout import Role
from strategies.values import Done, ServerState
from tests.parameters import sampled
from tests.strategies.flower_grid import Client, LocalGrid
from tests.strategies.test_conformance import RULES, N, model, one_round, rounds, start, trained_locally

every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


def client(rule: Strategy, dtype: str, at: int) -> Client:
    """The node that ``tests.strategies.test_conformance`` has as number ``at``."""

    def app(message: Message, context: Context) -> Message:
        layout, whole = model(dtype)
        if message.metadata.message_type == "evaluate":
            arrays = flower.evaluation_arrays(message, context, whole)
            norm = sum(float(np.sum(a**2)) for n, a in arrays.items() if n == "net.fc.weight")
            metrics = MetricRecord({"norm": norm, "num-examples": 10 + at})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)
        adapted = rule.adapt(layout)

        def train(work: flower.LocalWork) -> Done:
            return trained_locally(adapted, work.start, whole, at)

        return flower.local_round(message, context, whole, train, seed=at)

    return app


def nodes(rule: Strategy, dtype: str = "float32") -> LocalGrid:
    return LocalGrid({at + 1: client(rule, dtype, at) for at in range(N)})


def initial(dtype: str = "float32") -> ArrayRecord:
    return words.to_record(model(dtype)[1])


def adapted(rule: Strategy, dtype: str = "float32", **settings: Any) -> flower.AtollStrategy:
    layout, _ = model(dtype)
    roles = {"trained": layout.names(Role.TRAINED), "averaged": layout.names(Role.AVERAGED)}
    return flower.AtollStrategy(rule, n_clients=2 * N, min_train_nodes=N, **roles, **settings)


def run(rule: Strategy, count: int, dtype: str = "float32") -> tuple[flower.AtollStrategy, LocalGrid]:
    strategy, grid = adapted(rule, dtype), nodes(rule, dtype)
    strategy.start(grid=grid, initial_arrays=initial(dtype), num_rounds=count)
    return strategy, grid


def agree(one: ServerState, two: ServerState, tolerance: float = 0.0) -> None:
    assert (one.round, one.n_clients, one.layout) == (two.round, two.n_clients, two.layout)
    for mine, other in ((one.weights, two.weights), *((one.slots[s], two.slots[s]) for s in two.slots)):
        assert mine.keys() == other.keys()
        for name, array in other.items():
            assert mine[name].dtype == array.dtype
            assert np.allclose(mine[name], array, rtol=0.0, atol=tolerance), name


@every_rule
@pytest.mark.parametrize("dtype", sampled(1, ["float32", "float64"]))
def test_three_rounds_end_with_the_weights_of_the_rule_run_directly(rule: Strategy, dtype: str) -> None:
    strategy, grid = run(rule, 3, dtype)
    native, _ = rounds(rule, 3, dtype)
    agree(strategy.state, native, 1e-6)
    assert len(grid.requests) == 2 * 3 * N


@every_rule
def test_result_holds_the_whole_model_and_metrics_of_training_and_evaluation(rule: Strategy) -> None:
    strategy, grid = adapted(rule), nodes(rule)
    result = strategy.start(grid=grid, initial_arrays=initial(), num_rounds=2)
    assert list(result.arrays) == list(model("float32")[1])
    assert list(result.train_metrics_clientapp[2]) == ["loss"]
    assert result.train_metrics_clientapp[2]["loss"] == pytest.approx(0.25)
    assert result.evaluate_metrics_clientapp[2]["norm"] > 0


@every_rule
def test_requests_and_replies_keep_flowers_conventions(rule: Strategy) -> None:
    replies: list[Message] = []
    strategy, grid = adapted(rule), nodes(rule)
    grid.change = lambda reply: replies.append(reply) or reply  # type: ignore[func-returns-value]
    strategy.start(grid=grid, initial_arrays=initial(), num_rounds=1)
    for request in grid.requests:
        assert {"arrays", "config"} <= set(request.content)
        assert request.content["config"]["server-round"] == 1
    trained = [reply.content for reply in replies if reply.metadata.message_type == "train"]
    for content in trained:
        [arrays], [metrics] = content.array_records.values(), content.metric_records.values()
        assert set(arrays) == set(trained[0]["arrays"])
        assert isinstance(metrics["num-examples"], int)


@pytest.mark.parametrize("rule", sampled(8, RULES), ids=lambda rule: rule.name)
def test_a_saved_run_goes_on_as_if_it_had_never_stopped(rule: Strategy) -> None:
    whole, _ = run(rule, 4)
    first, grid = run(rule, 2)
    second = adapted(rule)
    second.resume(first.save())
    second.start(grid=grid, initial_arrays=second.arrays, num_rounds=2)
    agree(second.state, whole.state)
    assert grid.requests[-1].content["config"]["server-round"] == 4


def test_a_saved_state_is_resumed_by_its_own_rule_only() -> None:
    saved = run(make_strategy("fedavgm"), 1)[0].save()
    with pytest.raises(UsageError, match="same strategy"):
        flower.AtollStrategy(make_strategy("fedavgm", {"beta": 0.5})).resume(saved)
    for key in ("rule", "facts", "roles"):
        broken = ArrayRecord({k: a for k, a in saved.items() if k != key})
        with pytest.raises(UsageError, match="not a saved state"):
            flower.AtollStrategy(make_strategy("fedavgm")).resume(broken)
    with pytest.raises(UsageError, match="before its first round"):
        flower.AtollStrategy(make_strategy("fedavgm")).save()


def test_a_second_run_of_one_object_begins_anew() -> None:
    rule = make_strategy("fedadam")
    strategy, _ = run(rule, 2)
    strategy.start(grid=nodes(rule), initial_arrays=initial(), num_rounds=1)
    agree(strategy.state, run(rule, 1)[0].state)


def reply_with(change: Any) -> Any:
    """Node 3's replies to training, changed."""

    def changed(reply: Message) -> Message | None:
        if reply.metadata.src_node_id == 3 and reply.metadata.message_type == "train":
            return change(reply)  # type: ignore[no-any-return]
        return reply

    return changed


def array_with(name: str, array: Any) -> Any:
    def change(reply: Message) -> Message:
        reply.content["arrays"][name] = array if isinstance(array, Array) else words.to_array(array)
        return reply

    return change


def metric_with(name: str, value: Any) -> Any:
    def change(reply: Message) -> Message:
        reply.content["metrics"][name] = value
        return reply

    return change


def without(record: str, name: str) -> Any:
    def change(reply: Message) -> Message:
        del reply.content[record][name]
        return reply

    return change


HUGE = Array(np.zeros(3, np.float32))
HUGE.data = HUGE.data.replace(b"(3,)", b"(9,)")
BAD: dict[str, tuple[Any, str]] = {
    "nan": (array_with("net.fc.bias", np.full(3, np.nan, np.float32)), "non-finite"),
    "shape": (array_with("net.fc.bias", np.zeros(4, np.float32)), "expected float32"),
    "dtype": (array_with("net.fc.bias", np.zeros(3)), "float64"),
    "unknown": (array_with("other", np.zeros(3, np.float32)), "unknown"),
    "missing": (without("arrays", "net.fc.bias"), "lacks"),
    "header": (array_with("net.fc.bias", HUGE), "declares float32"),
    "bytes": (array_with("net.fc.bias", Array("float32", (3,), "numpy.ndarray", b"\x93NUMPY")), "header"),
    "pickle": (array_with("net.fc.bias", Array("float32", (3,), "python.pickle", b"")), "serialised as"),
    "samples": (metric_with("num-examples", 10**12), "samples"),
    "more than may count": (metric_with("num-examples", 1_000_001), "from 1 to 1000000"),
    "fraction": (metric_with("num-examples", 0.5), "whole number"),
    "list": (metric_with("num-examples", [1, 2]), "whole number"),
    "no samples": (without("metrics", "num-examples"), "whole number"),
    "no steps": (without("metrics", "atoll-steps"), "client half"),
    "metric": (metric_with("loss", float("nan")), "metric 'loss'"),
    "lost": (lambda reply: None, ""),
}


@pytest.mark.parametrize("how", BAD)
def test_a_round_closes_without_a_bad_reply_and_says_why(how: str, caplog: pytest.LogCaptureFixture) -> None:
    rule = make_strategy("scaffold")
    strategy, grid = adapted(rule), nodes(rule)
    change, reason = BAD[how]
    grid.change = reply_with(change)
    with caplog.at_level("WARNING", "flwr"):
        strategy.start(grid=grid, initial_arrays=initial(), num_rounds=1)
    state, whole = start(rule, "float32")
    others = [u for u in one_round(rule, state, whole, {}) if u.client != "c2"]
    agree(strategy.state, rule.aggregate(state, others), 1e-6)
    warned = [record.getMessage() for record in caplog.records if "node 3" in record.getMessage()]
    assert all(reason in text for text in warned)
    assert len(warned) == (how != "lost")


@pytest.mark.parametrize("name", ["fedavg", "coordinate_median", "krum"])
def test_a_huge_claim_of_examples_costs_its_node_the_round_under_every_rule(name: str) -> None:
    rule = make_strategy(name)
    strategy, grid = adapted(rule, max_samples=50), nodes(rule)
    grid.change = reply_with(metric_with("num-examples", 2 * 10**9))
    strategy.start(grid=grid, initial_arrays=initial(), num_rounds=2)
    assert strategy.state.round == 2
    state, whole = start(rule, "float32")
    clients: dict[str, Any] = {}
    for _ in range(2):
        updates = one_round(rule, state, whole, clients)
        state = rule.aggregate(state, [u for u in updates if u.client != "c2"])
    agree(strategy.state, state, 1e-6)


def test_a_start_loss_that_would_overflow_a_sum_leaves_its_node_out() -> None:
    rule = make_strategy("qfedavg", {"q": 8.0})
    strategy, grid = adapted(rule), nodes(rule)
    grid.change = reply_with(metric_with("atoll-start_loss", 1e6))
    strategy.start(grid=grid, initial_arrays=initial(), num_rounds=1)
    state, whole = start(rule, "float32")
    others = [u for u in one_round(rule, state, whole, {}) if u.client != "c2"]
    agree(strategy.state, rule.aggregate(state, others), 1e-6)


def test_a_client_that_raises_and_a_reply_that_comes_twice_count_once_at_most() -> None:
    rule = make_strategy("fedavg")
    strategy, grid = adapted(rule), nodes(rule)

    def broken(message: Message, context: Context) -> Message:
        raise RuntimeError("out of memory")

    grid.clients = {**grid.clients, 3: broken}
    answered = grid.send_and_receive

    def twice(messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        replies = list(answered(messages, timeout=timeout))
        return [*replies, replies[0]]

    grid.send_and_receive = twice  # type: ignore[method-assign]
    strategy.start(grid=grid, initial_arrays=initial(), num_rounds=1)
    state, whole = start(rule, "float32")
    others = [u for u in one_round(rule, state, whole, {}) if u.client != "c2"]
    agree(strategy.state, rule.aggregate(state, others), 1e-6)


def test_too_few_replies_leave_the_round_open_and_the_model_as_it_was() -> None:
    rule = make_strategy("krum", {"faulty": 2})  # needs 7
    strategy, grid = adapted(rule), nodes(rule)
    grid.change = reply_with(lambda reply: None)
    result = strategy.start(grid=grid, initial_arrays=initial(), num_rounds=1)
    assert strategy.state.round == 0
    assert len(result.arrays) == 0


def test_a_client_refuses_what_the_server_should_not_send() -> None:
    rule = make_strategy("scaffold")
    strategy, grid = adapted(rule), nodes(rule)
    messages = list(strategy.configure_train(1, initial(), ConfigRecord(), grid))
    content = messages[0].content

    def answered(records: dict[str, Any]) -> Message:
        message = Message(RecordDict(records), dst_node_id=1, message_type="train")
        return grid.clients[1](message, grid.contexts[1])

    answered(dict(content))
    arrays, config = content["arrays"], dict(content["config"])
    with pytest.raises(BadUpdate, match="extra arrays"):
        answered({"arrays": arrays, "config": content["config"]})
    with pytest.raises(BadUpdate, match=r"without .net\.fc\.bias"):
        answered({**content, "arrays": ArrayRecord({n: a for n, a in arrays.items() if n != "net.fc.bias"})})
    with pytest.raises(BadUpdate, match=r"net\.fc\.bias. is float32"):
        answered({**content, "arrays": ArrayRecord({**arrays, "net.fc.bias": Array(np.zeros(9, "float32"))})})
    for key, value in (
        ("atoll-strategy", "fedsgd"),
        ("atoll-options", "{'server_lr': 1}"),
        ("atoll-options", '{"server_lr": "much"}'),
        ("atoll-options", " " * 5000),
        ("atoll-trained", ["nothing"]),
    ):
        with pytest.raises(UsageError):
            answered({**content, "config": ConfigRecord({**config, key: value})})
    for key, value in (("atoll-round", -1), ("atoll-round", "1"), ("atoll-trained", 7)):
        with pytest.raises(BadUpdate):
            answered({**content, "config": ConfigRecord({**config, key: value})})


PLAIN = {
    "fedavg", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "flora",
    "coordinate_median", "trimmed_mean", "krum", "opwa",
}  # fmt: skip


def unmodified(at: int) -> Client:
    """An ordinary ClientApp that has never heard of us: loads a whole state dict, trains, sends it back."""

    def app(message: Message, context: Context) -> Message:
        layout, whole = model("float32")
        received = {name: array.numpy() for name, array in message.content["arrays"].items()}
        assert received.keys() == whole.keys()
        done = trained_locally(layout, received, whole, at)
        metrics = MetricRecord({"loss": 0.25, "num-examples": float(done.n_samples)})
        arrays = words.to_record({name: done.weights[name] for name in whole})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def test_rules_without_a_client_half_serve_an_unmodified_client_app() -> None:
    assert {rule.name for rule in RULES if flower.serves_any_client(rule)} == PLAIN
    for name in sorted(PLAIN):
        rule = make_strategy(name)
        strategy = adapted(rule, fraction_evaluate=0.0)
        grid = LocalGrid({at + 1: unmodified(at) for at in range(N)})
        strategy.start(grid=grid, initial_arrays=initial(), num_rounds=2)
        agree(strategy.state, rounds(rule, 2, "float32")[0], 1e-6)


def test_the_helper_serves_a_stock_strategy_as_plain_local_training() -> None:
    rule = make_strategy("fedavg")
    grid = nodes(rule)
    theirs = stock.FedAvg(min_train_nodes=N, min_available_nodes=N, fraction_evaluate=0.0)
    result = theirs.start(grid=grid, initial_arrays=initial(), num_rounds=2)
    native, _ = rounds(rule, 2, "float32")
    for name, array in native.weights.items():
        assert np.allclose(result.arrays[name].numpy(), array, atol=1e-6)


def test_roles_default_to_every_float_but_running_statistics() -> None:
    arrays = model("float32")[1]
    trained, averaged = words.roles_of(arrays, {name: a.dtype for name, a in arrays.items()})
    assert "net.bn.running_mean" in averaged
    assert "net.bn.num_batches_tracked" not in (*trained, *averaged)
    assert "net.frozen" in trained
    strategy = flower.FedAvg(min_train_nodes=N)
    strategy.start(grid=nodes(make_strategy("fedavg")), initial_arrays=initial(), num_rounds=1)
    assert strategy.state.layout.roles["net.bn.running_mean"] is Role.AVERAGED
    assert strategy.state.n_clients == N


def test_every_rule_has_a_class_of_its_own_with_its_options() -> None:
    assert {kind().rule.name for kind in flower.CLASSES.values()} == set(STRATEGIES)
    assert flower.Scaffold(server_lr=0.5).rule == make_strategy("scaffold", {"server_lr": 0.5})
    assert flower.atoll_strategy("fedprox", {"mu": 1}, min_train_nodes=3).min_train_nodes == 3
    with pytest.raises(UsageError, match="mew"):
        flower.FedProx(mew=1.0)
    with pytest.raises(UsageError, match="n_clients = -1"):
        flower.FedProx(n_clients=-1)
    with pytest.raises(UsageError, match="max_samples = 0; give a whole number from 1 to 1000000000"):
        flower.FedProx(max_samples=0)
    with pytest.raises(AttributeError, match="FedSgd"):
        _ = flower.FedSgd


def test_arrays_of_any_shape_and_order_come_through_as_they_were() -> None:
    draw = np.random.default_rng(3)
    for array in (
        np.array(2.5),
        np.zeros((0, 3), "float32"),
        np.asfortranarray(draw.normal(size=(3, 4))),
        draw.normal(size=(4, 6))[::2, ::3],
        np.arange(5, dtype="int64"),
        np.array([True, False]),
        draw.normal(size=3).astype(">f4"),
    ):
        read = words.from_array("x", words.to_array(array))
        assert read.shape == array.shape
        assert read.dtype == array.dtype
        assert np.array_equal(read, array)
        assert not read.flags.writeable or not read.size


def test_corrected_gradients_are_the_rules_own() -> None:
    import torch

    from strategies.values import Correction

    module = torch.nn.Linear(2, 1)
    module(torch.ones(1, 2)).sum().backward()
    before = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    offset = {"weight": torch.tensor([[1.0, 2.0]])}
    flower.correct(module, Correction(offset))
    assert module.weight.grad is not None
    assert torch.equal(module.weight.grad, before["weight"] + offset["weight"])
    assert module.bias.grad is not None
    assert torch.equal(module.bias.grad, before["bias"])
    assert flower.trained_names(module) == ["weight", "bias"]
