"""The server half on files: what is summed, what is refused and why, and the same state after a restart."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.errors import JobFailed, UsageError
from atoll.federated import Federated, Registered
from atoll.job import Job, Optimizer, OptimizerName, TrainingSpec
from compressors.model_file import Coding, read_delta, read_model, write_update
from coordinator.aggregation import supervisor
from coordinator.aggregation.central_evaluation import CentralEvaluation
from coordinator.aggregation.server_half import Offered, ServerHalf, Summed
from coordinator.aggregation.supervisor import Aggregators
from coordinator.client.prepare import Prepared, prepare
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.storage.blob_store import BlobStore
from coordinator.storage.data_provider import map_value
from coordinator.storage.graph_store import GraphStore
from strategies import make_strategy
from strategies.files import broadcast_metas, broadcast_of, lossy_names, update_arrays
from strategies.layout import Role
from strategies.values import ClientUpdate
from tests.strategies.own.tutorial import ClientMomentum

BATCH = 4
TRAINED = ("norm.weight", "norm.bias")


class Net(nn.Module):
    """A layer with BatchNorm, so that there are averaged and still tensors too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits, y)
        if self.training:
            return loss
        return SimpleNamespace(loss=loss, accuracy=(logits.argmax(-1) == y).float().mean())


_known: dict[str, Prepared] = {}


def prepared(**options: Any) -> Prepared:
    """A job with these options of the federation, captured once: nobody writes to it."""
    named = repr(sorted(options.items()))
    if named not in _known:
        _known[named] = _prepared(options)
    return _known[named]


def _prepared(options: dict[str, Any]) -> Prepared:
    draw = np.random.default_rng(0)
    held = {"x": draw.normal(size=(12, 6)).astype(np.float32), "y": draw.integers(0, 3, 12)}
    training = TrainingSpec(
        steps=5, n_micro=1, eval_batches=3, optimizer=Optimizer(OptimizerName.SGD, lr=0.1)
    )
    job = Job(
        Net(),
        {"x": torch.randn(BATCH, 6), "y": torch.zeros(BATCH, dtype=torch.int64)},
        Registered("set", {"x": "image", "y": "label"}, held),
        training,
        federated=Federated(**options),
        metrics=("accuracy",),
    )
    return prepare(job)


@dataclass
class Server:
    """A store with a submitted job, and clients whose updates the test makes up."""

    store: BlobStore
    job: Prepared
    folder: Path

    def half(self) -> ServerHalf:
        graphs = GraphStore(self.store).graphs(self.job.spec.dag_hash, self.job.spec.eval_dag_hash)
        return ServerHalf("job-1", self.job.spec, graphs, self.store, self.store.partial)

    def offer(self, half: ServerHalf, seed: int, n_samples: int = 10, **changes: Any) -> Offered:
        draw = np.random.default_rng(seed)
        arrays = {
            name: draw.normal(size=meta.shape).astype(meta.dtype) for name, meta in half.update_metas.items()
        }
        arrays.update(changes.pop("arrays", {}))
        for name in changes.pop("without", ()):
            del arrays[name]
        codec, ratio = changes.pop("codec", "none"), changes.pop("ratio", 1.0)
        path = self.folder / f"update-{seed}"
        coding = Coding(codec, ratio, lossy_names(half.layout), half.rule_spec.error_feedback)
        write_update(path, arrays, coding)
        blob = self.store.put(path.read_bytes())
        return replace(Offered(blob, n_samples, 3, 100, codec, ratio, {}, {"loss": 1.0}), **changes)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return made(tmp_path)


def made(folder: Path, **options: Any) -> Server:
    store = BlobStore(folder / "blobs")
    job = prepared(**options)
    for blob in job.blobs:
        store.put(b"".join(blob.read(0)))
    return Server(store, job, folder)


def summed(server: Server, half: ServerHalf, offered: dict[str, Offered], least: int = 1) -> Summed:
    assert half.state is not None
    found = half.aggregate(half.state.round, offered, len(offered), least)
    for file in (found.state, found.model, found.delta):
        if file is not None:
            server.store.adopt(file.path, file.stored.hash, file.stored.size)
    return found


def test_a_round_is_what_the_rule_itself_makes_of_it(server: Server) -> None:
    half = server.half()
    half.open("", 2)
    before = half.state
    offered = {"a": server.offer(half, 1, 10), "b": server.offer(half, 2, 30)}
    summed(server, half, offered)
    rule = make_strategy("fedavg")
    updates = []
    for name, told in offered.items():
        arrays = {
            n.removeprefix("weights/"): a
            for n, a in read_model(server.store.path(told.blob), half.update_metas).items()
        }
        updates.append(ClientUpdate(0, told.n_samples, 3, arrays, client=name, metrics={"loss": 1.0}))
    assert before is not None
    expected = rule.aggregate(before, updates)
    assert half.state is not None
    for name, array in expected.weights.items():
        np.testing.assert_array_equal(half.state.weights[name], array)


def test_two_clients_in_a_fixed_order_arrive_where_the_papers_put_them(tmp_path: Path) -> None:
    """FedBuff: w + sum n s d / sum n. FedAsync: (1 - a s) w + a s w_k. In float64, of the same updates."""
    for rule, alpha in (("fedavg", None), ("fedasync", 0.6)):
        folder = tmp_path / rule
        folder.mkdir()
        server = made(folder, strategy=rule, buffer=2, min_clients=1)
        half = server.half()
        base = half.open("", 2)
        server.store.adopt(base.path, base.stored.hash, base.stored.size)
        assert half.state is not None
        began = {name: value.astype(np.float64) for name, value in half.state.weights.items()}
        summed(server, half, {"a": server.offer(half, 1, 10)})
        now = {name: value.astype(np.float64) for name, value in half.state.weights.items()}
        old = replace(server.offer(half, 2, 30), weight=0.5, base=base.stored.hash)
        new = server.offer(half, 3, 10)
        found = summed(server, half, {"a": new, "b": old})
        assert not found.dropped
        for name, value in half.state.weights.items():
            changes = [
                read_model(server.store.path(told.blob), half.update_metas)[f"weights/{name}"].astype(
                    np.float64
                )
                for told in (new, old)
            ]
            if alpha is None:
                expected = now[name] + (10 * changes[0] + 30 * 0.5 * changes[1]) / 40
            else:
                models = now[name] + changes[0], now[name] + 0.5 * (began[name] + changes[1] - now[name])
                mixed = (10 * models[0] + 30 * models[1]) / 40
                # Running statistics are averaged whole, whatever the strategy.
                expected = now[name] + (alpha if name.startswith("head") or name in TRAINED else 1) * (
                    mixed - now[name]
                )
            np.testing.assert_allclose(value, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("rule", ["fedadam", "scaffold", "feddyn", "coordinate_median"])
def test_a_stored_state_goes_on_bit_for_bit(tmp_path: Path, rule: str) -> None:
    server = made(tmp_path, strategy=rule)
    first = server.half()
    first.open("", 3)
    stored = summed(server, first, {"a": server.offer(first, 1), "b": server.offer(first, 2)})
    assert stored.state is not None
    second = server.half()
    model = second.open(stored.state.stored.hash, 3)
    assert stored.model is not None
    assert model.stored.hash == stored.model.stored.hash
    later = {"a": server.offer(first, 3), "b": server.offer(first, 4)}
    one, two = summed(server, first, later), summed(server, second, later)
    assert one.state is not None
    assert two.state is not None
    assert one.state.stored == two.state.stored


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"arrays": {"weights/head.bias": np.array([1, np.nan, 0], np.float32)}}, "non-finite"),
        ({"arrays": {"weights/head.bias": np.zeros(4, np.float32)}}, "expected"),
        ({"without": ("weights/head.bias",)}, "lacks 1 tensors"),
        ({"arrays": {"weights/other": np.zeros(3, np.float32)}}, "unknown 1 tensors"),
        ({"n_samples": 101}, "101 samples"),
        ({"metrics": {"loss": float("nan")}}, "metric 'loss' is nan"),
        ({"scalars": {"surprise": 1.0}}, "numbers"),
        ({"blob": "0" * 64}, "cannot read"),
    ],
)
def test_what_cannot_be_counted_is_dropped_with_the_reason(
    server: Server, changes: dict[str, Any], why: str
) -> None:
    half = server.half()
    half.open("", 2)
    good = server.offer(half, 1)
    found = summed(server, half, {"a": good, "b": server.offer(half, 2, **changes)})
    assert found.state is not None
    assert list(found.dropped) == ["b"]
    assert why in found.dropped["b"]
    alone = server.half()
    alone.open("", 2)
    assert half.state is not None
    summed(server, alone, {"a": good})
    assert alone.state is not None
    for name, array in alone.state.weights.items():
        np.testing.assert_array_equal(half.state.weights[name], array)


def five(server: Server, half: ServerHalf, **changes: Any) -> dict[str, Offered]:
    """Of as many clients as every rule here needs."""
    return {name: server.offer(half, at, **changes) for at, name in enumerate("abcde", 1)}


def same_without(server: Server, half: ServerHalf, good: dict[str, Offered]) -> None:
    """``half`` has closed the round that it closes where ``good`` are all that came."""
    alone = server.half()
    alone.open("", 6)
    summed(server, alone, good)
    assert half.state is not None
    assert alone.state is not None
    for name, array in alone.state.weights.items():
        np.testing.assert_array_equal(half.state.weights[name], array)


@pytest.mark.parametrize("rule", ["fedavg", "fednova", "coordinate_median", "trimmed_mean", "krum"])
def test_whoever_registered_too_much_costs_the_round_its_own_update_alone(tmp_path: Path, rule: str) -> None:
    server = made(tmp_path, strategy=rule, max_samples=50)
    half = server.half()
    half.open("", 6)
    numbers = {"effective_steps": 3.0} if rule == "fednova" else {}
    good = five(server, half, scalars=numbers)
    for claim in (51, 2 * 10**9):
        half.open("", 6)
        huge = server.offer(half, 9, claim, registered=2**40, scalars=numbers)
        found = summed(server, half, {**good, "huge": huge})
        assert found.state is not None
        assert found.dropped == {"huge": f"{claim} samples; a whole number from 1 to 50"}
        same_without(server, half, good)


FAIR = {"start_loss": 1.0, "lr": 0.1}


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        ({"lr": 1e-12}, "trained at the rate 1e-12; this round's is 0.1"),
        ({"lr": 1e3}, "trained at the rate 1000; this round's is 0.1"),
        ({"lr": 0.1001}, "this round's is 0.1"),
        ({"start_loss": 1e6}, "a start loss of 1e+06 at the rate 0.1"),
    ],
)
def test_under_qfedavg_no_client_chooses_its_rate_or_makes_a_sum_overflow(
    tmp_path: Path, numbers: dict[str, float], why: str
) -> None:
    server = made(tmp_path, strategy="qfedavg", options={"q": 6.0})
    half = server.half()
    half.open("", 6)
    good = five(server, half, scalars=FAIR)
    found = summed(server, half, {**good, "odd": server.offer(half, 9, scalars={**FAIR, **numbers})})
    assert found.state is not None
    assert list(found.dropped) == ["odd"]
    assert why in found.dropped["odd"]
    same_without(server, half, good)


def test_a_decoder_that_trips_over_one_update_costs_only_that_one(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = server.half()
    half.open("", 2)
    good, bad = server.offer(half, 1), server.offer(half, 2)
    judged = half._judged

    def trips(client: str, told: Offered, at_round: int) -> ClientUpdate:
        if client == "b":
            raise IndexError("index 9 is out of bounds")
        return judged(client, told, at_round)

    monkeypatch.setattr(half, "_judged", trips)
    found = summed(server, half, {"a": good, "b": bad})
    assert found.state is not None
    assert found.dropped == {"b": "cannot be read: IndexError: index 9 is out of bounds"}


def test_too_few_good_updates_change_nothing(server: Server) -> None:
    half = server.half()
    half.open("", 2)
    bad = server.offer(half, 2, arrays={"weights/head.bias": np.full(3, np.inf, np.float32)})
    found = summed(server, half, {"a": server.offer(half, 1), "b": bad}, least=2)
    assert (found.state, found.model) == (None, None)
    assert half.state is not None
    assert half.state.round == 0


def test_a_sum_of_another_round_is_refused(server: Server) -> None:
    half = server.half()
    half.open("", 2)
    with pytest.raises(UsageError, match="asked to sum round 4; the round in flight is 0"):
        half.aggregate(4, {"a": server.offer(half, 1)}, 1, 1)


def test_coded_updates_are_read_with_the_codec_that_was_asked(tmp_path: Path) -> None:
    server = made(tmp_path, uplink="topk:4")
    half = server.half()
    half.open("", 1)
    coded = server.offer(half, 1, codec="topk", ratio=4.0)
    found = summed(server, half, {"a": coded, "b": replace(coded, codec="none", ratio=1.0)})
    assert list(found.dropped) == ["b"]


def test_a_delta_leads_from_the_broadcast_before_to_this_one(tmp_path: Path) -> None:
    server = made(tmp_path, downlink="delta")
    half = server.half()
    opened = half.open("", 1)
    metas = broadcast_metas(half.rule, half.layout)
    base = read_model(opened.path, metas)
    found = summed(server, half, {"a": server.offer(half, 1)})
    assert found.delta is not None
    assert found.model is not None
    path = server.store.path(found.delta.stored.hash)
    led = read_delta(path, metas, base, opened.stored.hash)
    full = read_model(server.store.path(found.model.stored.hash), metas)
    assert all(np.array_equal(led[name], full[name]) for name in full)
    assert half.state is not None
    assert broadcast_of(1, full).weights.keys() == half.state.weights.keys()


def test_central_evaluation_is_the_modules_own(server: Server) -> None:
    half = server.half()
    half.open("", 1)
    found = CentralEvaluation(server.job.spec, half.graphs.evaluation, server.store).run(half.weights())
    module = Net()
    module.train(False)
    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.normal(size=(12, 6)).astype(np.float32))
    y = torch.from_numpy(draw.integers(0, 3, 12))
    with torch.no_grad():
        told = [module(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, 12, BATCH)]
    assert found.loss == pytest.approx(sum(float(t.loss) for t in told) / 3, rel=1e-6)
    assert found.metrics["accuracy"] == pytest.approx(sum(float(t.accuracy) for t in told) / 3)
    assert found.n_samples == 12


def test_names_of_an_update_are_those_that_a_client_writes(server: Server) -> None:
    half = server.half()
    half.open("", 1)
    update = ClientUpdate(0, 1, 1, {n.removeprefix("weights/"): np.zeros(1) for n in half.update_metas})
    assert set(update_arrays(update)) == set(half.update_metas)


# ---------------------------------------------------------------- the process


def test_the_process_opens_sums_and_evaluates_and_one_killed_is_an_event(tmp_path: Path) -> None:
    asyncio.run(_drive(made(tmp_path)))


def test_an_update_that_kills_or_hangs_the_process_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is ours but for one client's updates: one kills it, one never ends."""
    script = tmp_path / "odd.py"
    script.write_text(
        "import os, time\n"
        "from coordinator.aggregation import process, server_half\n"
        "judged = server_half.ServerHalf._judged\n"
        "def odd(self, client, told, at_round):\n"
        "    if client == 'killer':\n"
        "        os.kill(os.getpid(), 9)\n"
        "    while client == 'sleeper':\n"
        "        time.sleep(1)\n"
        "    return judged(self, client, told, at_round)\n"
        "server_half.ServerHalf._judged = odd\n"
        "process.main()\n"
    )
    monkeypatch.setattr(supervisor, "COMMAND", (str(script),))
    asyncio.run(_break(made(tmp_path)))


async def _break(server: Server) -> None:
    heard: asyncio.Queue[ev.AggregatorEvent] = asyncio.Queue()
    aggregators = Aggregators(server.store, heard.put_nowait, silent_s=5.0)
    half = server.half()
    half.open("", 3)
    update = server.offer(half, 1)
    told = ev.UpdateReady("job-1", 0, update.blob, 1, 10, 3, metrics={"loss": 1.0})
    try:
        broken = (("killer", "its process ended (-9)", 300.0), ("sleeper", "said nothing for 5 s", 5.0))
        for odd, why, silent_s in broken:
            names = ["honest", odd, "zealous"]
            aggregators.silent_s = 300.0
            aggregators.ask(do.OpenAggregator("job-1", server.job.spec, 0, "", 3))
            assert isinstance(await heard.get(), ev.AggregatorOpened)
            aggregators.silent_s = silent_s
            aggregators.ask(
                do.AggregateRound(
                    "job-1", 0, 1, dict.fromkeys(names, told), dict.fromkeys(names, ("none", 1.0)),
                    dict.fromkeys(names, 100), 3, 1,
                )
            )  # fmt: skip
            broke = await heard.get()
            assert isinstance(broke, ev.AggregatorBroke)
            assert (broke.client, broke.hopeless) == (odd, False)
            assert why in broke.reason
    finally:
        await aggregators.stop()


async def _drive(server: Server) -> None:
    heard: asyncio.Queue[ev.AggregatorEvent] = asyncio.Queue()
    aggregators = Aggregators(server.store, heard.put_nowait)
    spec, half = server.job.spec, server.half()
    half.open("", 2)
    update = server.offer(half, 1)
    told = ev.UpdateReady("job-1", 0, update.blob, 1, 10, 3, metrics={"loss": 1.0})
    asked = do.AggregateRound("job-1", 0, 7, {"a": told}, {"a": ("none", 1.0)}, {"a": 100}, 2, 1)
    try:
        aggregators.ask(do.OpenAggregator("job-1", spec, 0, "", 2))
        opened = await heard.get()
        assert isinstance(opened, ev.AggregatorOpened)
        assert server.store.has(opened.model.hash)
        assert opened.inputs["x"].shape == (BATCH, 6)
        aggregators.ask(do.EvaluateModel("job-1", 0))
        evaluated = await heard.get()
        assert isinstance(evaluated, ev.CentrallyEvaluated)
        assert evaluated.error == ""
        worker = aggregators.workers["job-1"]
        assert worker.process is not None
        os.kill(worker.process.process.pid, signal.SIGKILL)
        worker.process.process.wait()  # it ended before anything more was asked of it
        aggregators.ask(asked)
        broke = await heard.get()
        assert isinstance(broke, ev.AggregatorBroke)
        assert not broke.hopeless
        aggregators.ask(do.OpenAggregator("job-1", spec, 0, "", 2))
        again = await heard.get()
        assert isinstance(again, ev.AggregatorOpened)
        assert again.secret != opened.secret  # of a private job's draws: a process's own
        assert replace(again, secret=opened.secret) == opened
        aggregators.ask(asked)
        done = await heard.get()
        assert isinstance(done, ev.Aggregated)
        assert (done.attempt, dict(done.dropped)) == (7, {})
        assert done.state is not None
        assert server.store.has(done.state.hash)
    finally:
        await aggregators.stop()


def test_an_own_strategy_s_arrays_are_where_its_formulas_put_them_and_outlive_the_process(
    tmp_path: Path,
) -> None:
    server = made(tmp_path, strategy=ClientMomentum.name, options={"reach": 2.0}, evaluate_every=0)
    half = server.half()
    half.open("", 2)
    found = summed(server, half, {"a": server.offer(half, 1, 10), "b": server.offer(half, 2, 30)})
    assert half.state is not None
    assert found.state is not None
    again = server.half()
    again.open(found.state.stored.hash, 2)
    assert again.state is not None
    for name in half.layout.names(Role.TRAINED):
        moved = half.state.weights[name] - server_start(server, name)
        np.testing.assert_allclose(half.state.slots["m"][name], -moved / 2.0, rtol=1e-4, atol=1e-6)
        assert half.state.slots["m"][name].tobytes() == again.state.slots["m"][name].tobytes()
    offered = {"a": server.offer(half, 3), "b": server.offer(half, 4)}
    assert summed(server, half, offered).model == summed(server, again, offered).model


def server_start(server: Server, name: str) -> Any:
    return map_value(server.store.path(server.job.spec.tensors[name]))


def test_an_own_strategy_that_diverges_fails_the_job_and_names_its_method(tmp_path: Path) -> None:
    server = made(tmp_path, strategy=ClientMomentum.name, options={"reach": 1e-39}, evaluate_every=0)
    half = server.half()
    half.open("", 2)
    with pytest.raises(JobFailed, match=r"strategy client_momentum, step\(\): 'm' of '.*' is not finite"):
        summed(server, half, {"a": server.offer(half, 1), "b": server.offer(half, 2)})
