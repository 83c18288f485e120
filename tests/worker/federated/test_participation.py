"""A client of a federated job: what it fetches, sends and keeps, across restarts and refusals."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import nn

from atoll.errors import BadFrame, ConnectionFailed, StorageError, UsageError
from atoll.federated import MAX_RESIDUAL_ROUNDS, Federated, FederatedSpec, Floors
from atoll.job import TrainingSpec
from atoll.messages.to_worker import Blob, EvaluateRound, Model, Participate, TrainRound
from atoll.privacy import SamplePrivacy
from compressors.model_file import Coding, read_update, write_delta, write_model
from coordinator.capture.capture import Captured, capture
from strategies.files import broadcast_arrays, lossy_names, parted, update_metas
from strategies.privacy.private import strategy_of
from tests.inprocess.federation import LocalFederation, local_model
from tests.worker.federated.test_trainer import BATCH, SGD, Small, arrays
from tests.worker.test_blobs import Store
from worker.blobs import BlobCache, BlobFiles
from worker.cancel import Cancel, Cancelled
from worker.context import ComputeContext, ComputeSettings
from worker.federated.kept.client_state import ClientStore
from worker.federated.kept.folders import MAX_BYTES, MAX_JOBS, make_job_folder
from worker.federated.orders import Update
from worker.federated.participation import UPDATE, Participation
from worker.machine.cpu import CpuMeter
from worker.machine.device import Device
from worker.pipe.arena import HEAD_BYTES
from worker.pipe.status import ComputeStatus
from worker.spans import Spans
from worker.stage.reports import Progress

KEY = bytes(range(32))
TRAINING = TrainingSpec(steps=10, n_micro=1, seed=5, optimizer=SGD)


@cache
def _captured(grouped: bool) -> Captured:
    net = Small(width=16)
    if grouped:
        net.norm = nn.GroupNorm(4, 16)  # type: ignore[assignment]
    return capture(net, {n: torch.from_numpy(a) for n, a in arrays(BATCH, 0).items()}, TRAINING)


class Server:
    """The coordinator's half of a federation of one or more clients, in memory."""

    def __init__(
        self, folder: Path, rule: str = "fedavg", clients: int = 1, grouped: bool = False, **options: Any
    ) -> None:
        """``grouped``: a norm that does not mix samples."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        found = _captured(grouped)
        torch.manual_seed(0)  # whichever test captured it
        self.found = replace(found, state={name: tensor.clone() for name, tensor in found.state.items()})
        self.model = local_model(self.found.train, self.found.evaluation, self.found.state, TRAINING)
        self.federated = Federated(rule, **options)
        self.rule = strategy_of(self.federated)
        layout = self.model.layout()
        weights = {n: self.found.state[n].numpy() for n in layout.metas}
        self.state = self.rule.init(layout, weights, clients)
        self.store = Store(chunk_bytes=4096)
        self.tensors = {n: self.put(save({"value": t.contiguous()})) for n, t in self.found.state.items()}
        self.before: tuple[str, Any] | None = None

    def put(self, data: bytes) -> str:
        name = hashlib.sha256(data).hexdigest()
        self.store.blobs[name] = data
        return name

    def joining(self) -> Participate:
        inputs = {
            n: replace(next(iter(self.model.states.values())), meta=m) for n, m in self.model.inputs.items()
        }
        constants = {n: m for g in (self.found.train, self.found.evaluation) for n, m in g.constants.items()}
        stills = {n: replace(next(iter(inputs.values())), meta=m) for n, m in constants.items()}
        assert self.model.eval_program is not None
        return Participate(
            "federation",
            1,
            TRAINING,
            FederatedSpec(self.federated, "mine", {"x": "image", "y": "label"}),
            self.model.program,
            self.model.eval_program,
            {**self.model.states, **inputs, **stills},
            self.tensors,
            BATCH,
        )

    def broadcast(self) -> Model:
        """The model of the round to come, in the downlink's form."""
        made, path = broadcast_arrays(self.rule.configure(self.state)), self.folder / "model"
        write_model(path, made, lossless=self.federated.downlink != "off")
        full, delta, base = self.put(path.read_bytes()), "", ""
        if self.federated.downlink == "delta" and self.before is not None:
            base, known = self.before
            write_delta(path, made, known, base)
            delta = self.put(path.read_bytes())
        self.before = (full, {n: np.array(a) for n, a in made.items()})
        return Model(Blob(full, 0), Blob(delta, 0) if delta else None, base)

    def read(self, update: Update, codec: str = "none", ratio: float = 1.0) -> Any:
        """The update as the aggregator counts it."""
        path = self.folder / "update"
        path.write_bytes(self.store.blobs[update.stored.hash])
        coding = Coding(codec, ratio, lossy_names(self.state.layout), self.federated.error_feedback)
        delta, extra = parted(read_update(path, update_metas(self.rule, self.state.layout), coding))
        return replace(update.answer, delta=delta, extra=extra, client="w-a")


def context(
    server: Server,
    folder: Path,
    data: Mapping[str, Any] | None = None,
    floors: Floors = Floors(),  # noqa: B008 - frozen
    kept_bytes: int = MAX_BYTES,
) -> ComputeContext:
    """A compute process's, without a daemon."""
    own = arrays(60, 1)
    mine = {"image": own["x"], "label": own["y"]} if data is None else data
    unused: Any = None
    return ComputeContext(
        "w-a",
        Device("cpu", 0, "test", 1, 1 << 34, 1 << 34),
        ComputeSettings(folder, "cpu", 1, 1 << 34, 2, 1 << 30, kept_bytes, floors),
        network=unused,
        blobs=BlobFiles(server.store, BlobCache(folder / "blobs", 1 << 30)),
        fetch_of=unused,
        open_data={"mine": mine}.__getitem__,
        open_population=lambda name: None,
        scratch=folder,
        spans=Spans(),
        progress=Progress(),
        cpu=CpuMeter(),
        status=ComputeStatus(memoryview(bytearray(HEAD_BYTES))),
    )


def joined(server: Server, folder: Path, samples: int = 60, **options: Any) -> Participation:
    own = arrays(samples, 1)
    mine = {"image": own["x"], "label": own["y"]}
    return Participation(server.joining(), context(server, folder, mine, **options), Cancel(), KEY)


def order(at_round: int, model: Model, codec: str = "none", ratio: float = 1.0) -> TrainRound:
    return TrainRound("job", at_round, model, codec, ratio, 60.0, seed=17 + at_round)


def run_round(
    server: Server, client: Participation, at_round: int, codec: str = "none", ratio: float = 1.0
) -> Update:
    update = client.train(order(at_round, server.broadcast(), codec, ratio), Cancel())
    server.state = server.rule.aggregate(server.state, [server.read(update, codec, ratio)])
    client.settle(at_round, True)
    return update


def local(server: Server, rounds: int) -> LocalFederation:
    """The reference in one process."""
    own = arrays(60, 1)
    federation = LocalFederation(server.model, server.federated, {"w-a": own})
    for _ in range(rounds):
        federation.run_round()
    return federation


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(a, other[n]) for n, a in one.items())


@pytest.mark.parametrize("downlink", ["off", "lossless", "delta"])
@pytest.mark.parametrize("rule", ["fedavg", "scaffold", "ditto"])
def test_rounds_over_the_store_are_those_in_one_process_bit_for_bit(
    tmp_path: Path, rule: str, downlink: str
) -> None:
    server = Server(tmp_path / "server", rule, downlink=downlink)
    client = joined(server, tmp_path / "w")
    for at_round in range(3):
        run_round(server, client, at_round)
    reference = local(server, 3)
    assert same(server.state.weights, reference.state.weights)
    tested = client.evaluate(EvaluateRound("job", 3, server.broadcast(), 60.0), Cancel())
    assert tested.found[""] == reference.evaluate_clients()["w-a"]


def test_a_client_trains_the_same_under_the_same_name_whatever_its_identity(tmp_path: Path) -> None:
    server, found = Server(tmp_path / "server"), []
    for worker, name in (("w-a", "clinic"), ("w-b", "clinic"), ("w-b", "ward")):
        here = replace(context(server, tmp_path / (worker + name)), worker=worker)
        client = Participation(replace(server.joining(), client=name), here, Cancel(), KEY)
        found.append(client.train(order(0, server.broadcast()), Cancel()).stored)
    first, again, renamed = (stored.hash for stored in found if stored is not None)
    assert first == again != renamed


def resident(path: Path) -> int:
    """Bytes of a mapped file that this process holds."""
    found, mapped = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()
        if "-" in head[0]:
            mapped = line.endswith(str(path))
        elif mapped and head[0] == "Rss:":
            found += int(head[1])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads smaps")
def test_mapped_data_are_not_held_between_rounds(tmp_path: Path) -> None:
    server, own = Server(tmp_path), arrays(60, 1)
    np.asarray(own["x"]).tofile(tmp_path / "image.bin")
    image = np.memmap(tmp_path / "image.bin", own["x"].dtype, "r", shape=own["x"].shape)
    data = {"image": image, "label": own["y"]}
    client = Participation(server.joining(), context(server, tmp_path, data), Cancel(), KEY)
    assert float(image.sum()) == pytest.approx(float(own["x"].sum()))
    assert resident(tmp_path / "image.bin") > 0
    run_round(server, client, 0)
    assert resident(tmp_path / "image.bin") == 0
    reference = local(server, 1)
    assert same(server.state.weights, reference.state.weights)


def test_a_model_comes_down_once_for_evaluation_and_the_next_round(tmp_path: Path) -> None:
    server = Server(tmp_path / "server")
    client = joined(server, tmp_path / "w")
    first = run_round(server, client, 0)
    assert first.download_bytes > 0
    model = server.broadcast()
    tested = client.evaluate(EvaluateRound("job", 1, model, 60.0), Cancel())
    assert tested.download_bytes > 0
    again = client.train(order(1, model), Cancel())
    assert (again.download_bytes, again.download_s) == (0, 0.0)
    assert client.evaluate(EvaluateRound("job", 1, model, 60.0), Cancel()).download_bytes == 0


def test_deltas_come_down_where_the_model_before_is_here_and_the_whole_one_elsewhere(tmp_path: Path) -> None:
    server = Server(tmp_path / "server", downlink="delta")
    client, fresh = joined(server, tmp_path / "w"), joined(server, tmp_path / "x")
    run_round(server, client, 0)
    model = server.broadcast()
    got = client.train(order(1, model), Cancel())
    assert got.download_bytes == len(server.store.blobs[model.delta.hash])
    assert fresh.train(order(1, model), Cancel()).download_bytes == len(server.store.blobs[model.full.hash])
    damaged = replace(model, delta=Blob(server.put(b"ATOLLPK1" + bytes(500)), 0))
    other = joined(server, tmp_path / "y")
    other.train(order(0, Model(Blob(model.base, 0))), Cancel())
    taken = other.train(order(1, damaged), Cancel())
    assert taken.stored == got.stored


def test_what_a_round_keeps_counts_only_once_its_update_was_taken(tmp_path: Path) -> None:
    server = Server(tmp_path / "server", "scaffold")
    client = joined(server, tmp_path / "w")
    model = server.broadcast()
    first = client.train(order(0, model), Cancel())
    client.settle(0, False)
    assert client.train(order(0, model), Cancel()).stored == first.stored
    client.settle(0, True)
    assert client.train(order(0, model), Cancel()).stored != first.stored  # c_i is another now


def test_a_restarted_worker_goes_on_with_its_state_and_hears_what_became_of_its_update(
    tmp_path: Path,
) -> None:
    server = Server(tmp_path / "server", "scaffold")
    joined(server, tmp_path / "w").train(order(0, server.broadcast()), Cancel())
    client = joined(server, tmp_path / "w")  # killed before it was told
    update = client.train(order(0, server.broadcast()), Cancel())  # and trained again
    joined(server, tmp_path / "w").settle(0, True)  # killed again
    server.state = server.rule.aggregate(server.state, [server.read(update)])
    client = joined(server, tmp_path / "w")
    run_round(server, client, 1)
    assert same(server.state.weights, local(server, 2).state.weights)


def test_a_round_with_private_samples_that_is_asked_for_again_is_answered_and_not_trained_again(
    tmp_path: Path,
) -> None:
    """Its noise is drawn anew each time: another answer would be another release, and charged."""
    privacy = SamplePrivacy(noise=1.0, clip=1.0, delta=1e-5)
    server = Server(
        tmp_path / "server", grouped=True, local_steps=2, evaluate_every=0, sample_privacy=privacy
    )
    client, model = joined(server, tmp_path / "w"), server.broadcast()
    first = client.train(order(0, model), Cancel())
    again = client.train(replace(order(0, model), deadline_s=9.0), Cancel())
    assert (again.stored, again.answer) == (first.stored, first.answer)
    restarted = joined(server, tmp_path / "w")
    again = restarted.train(order(0, model), Cancel())
    assert (again.stored, again.answer) == (first.stored, first.answer)
    second = restarted.train(order(1, model), Cancel())
    assert second.stored != first.stored
    (update,) = (tmp_path / "w").rglob(UPDATE)
    update.write_bytes(update.read_bytes()[:-1] + b"?")
    assert joined(server, tmp_path / "w").train(order(1, model), Cancel()).stored != second.stored


def test_an_update_that_was_late_and_is_sent_again_leaves_what_it_left_the_first_time(tmp_path: Path) -> None:
    privacy = SamplePrivacy(noise=1.0, clip=1.0, delta=1e-5)
    server = Server(
        tmp_path / "server", grouped=True, local_steps=2, evaluate_every=0, sample_privacy=privacy
    )
    client, first = joined(server, tmp_path / "w"), order(0, server.broadcast(), "topk", 16.0)
    client.train(first, Cancel())
    client.settle(0, False)
    client.train(first, Cancel())
    client.settle(0, True)
    _, left = ClientStore(tmp_path / "w", "federation").load(1, "topk")
    assert left
    assert all(bool(tensor.any()) for tensor in left.values())


def test_word_that_comes_while_the_round_is_trained_again_finds_the_first_draft(tmp_path: Path) -> None:
    server = Server(tmp_path / "server", "feddyn")
    joined(server, tmp_path / "w").train(order(0, server.broadcast()), Cancel())
    cancel, steps = Cancel(), iter(range(100))

    def tick() -> None:
        if next(steps) == 2:
            cancel.set("round 0 was closed")

    client = Participation(server.joining(), context(server, tmp_path / "w"), Cancel(), KEY)
    client._trainer._tick = tick
    with pytest.raises(Cancelled):
        client.train(order(0, server.broadcast()), cancel)
    client.settle(0, True)
    state, _ = ClientStore(tmp_path / "w", "federation").load(1, "none")
    assert "dual" in state.slots


def test_residuals_are_kept_across_restarts_and_bring_back_what_topk_left_out(tmp_path: Path) -> None:
    server = Server(tmp_path / "server", uplink="topk:16")
    for at_round in range(3):
        update = run_round(server, joined(server, tmp_path / "w"), at_round, "topk", 16.0)
    assert 2 * update.stored.size < sum(a.nbytes for a in server.state.weights.values())
    _, left = ClientStore(tmp_path / "w", "federation").load(3, "topk")
    assert left.keys() == {"weights/head.weight"}  # smaller tensors travel whole
    assert float(left["weights/head.weight"].abs().sum()) > 0
    assert ClientStore(tmp_path / "w", "federation").load(3, "int8_block")[1] == {}
    without = Server(tmp_path / "other", uplink="topk:16", error_feedback=False)
    run_round(without, joined(without, tmp_path / "v"), 0, "topk", 16.0)
    assert ClientStore(tmp_path / "v", "federation").load(1, "topk")[1] == {}


AGES = ((1, True), (MAX_RESIDUAL_ROUNDS, True), (MAX_RESIDUAL_ROUNDS + 1, False))


def test_a_residual_that_is_too_old_is_not_sent(tmp_path: Path) -> None:
    server = Server(tmp_path / "server", uplink="topk:16")
    client, fresh = joined(server, tmp_path / "w"), joined(server, tmp_path / "x")
    run_round(server, client, 0, "topk", 16.0)
    model = server.broadcast()
    for at_round, counts in AGES:
        asked = order(at_round, model, "topk", 16.0)
        one, other = (c.train(asked, Cancel()).stored for c in (client, fresh))
        assert (one != other) is counts


def test_the_rules_own_state_does_not_age_as_a_residual_does(tmp_path: Path) -> None:
    server = Server(tmp_path / "server", "feddyn", uplink="topk:16")
    run_round(server, joined(server, tmp_path / "w"), 0, "topk", 16.0)
    store = ClientStore(tmp_path / "w", "federation")
    for at_round, counts in AGES:
        state, left = store.load(at_round, "topk")
        assert "dual" in state.slots
        assert bool(left) is counts


def test_rounds_with_another_ratio_each_keep_their_residual(tmp_path: Path) -> None:
    server = Server(tmp_path / "server", uplink="bcrs:32")
    client = joined(server, tmp_path / "w")
    sizes = [
        run_round(server, client, r, "topk", ratio).stored.size for r, ratio in enumerate((32.0, 8.0, 2.0))
    ]
    assert sizes[0] < sizes[1] < sizes[2]


def test_damaged_state_counts_as_never_kept(tmp_path: Path) -> None:
    server = Server(tmp_path / "server", "scaffold")
    client = joined(server, tmp_path / "w")
    run_round(server, client, 0)
    store = ClientStore(tmp_path / "w", "federation")
    [kept] = list(store.folder.rglob("state"))
    kept.write_bytes(kept.read_bytes()[:100])
    assert store.load(1, "none")[0].slots == {}
    (store.folder / "kept.json").write_text("{}")
    assert store.load(1, "none")[0].slots == {}
    client.train(order(1, server.broadcast()), Cancel())


def test_folders_of_old_jobs_are_removed_and_no_scrap_is_left_of_rounds(tmp_path: Path) -> None:
    server = Server(tmp_path / "server", "scaffold", uplink="topk:8")
    client = joined(server, tmp_path / "w")
    for at_round in range(3):
        run_round(server, client, at_round, "topk", 8.0)
    client.close()
    store = ClientStore(tmp_path / "w", "federation")
    assert sorted(p.name.split("-")[0] for p in store.folder.iterdir()) == ["2", "kept.json", "models"]
    assert list((store.folder / "models").iterdir()) == []
    for at in range(MAX_JOBS + 3):
        make_job_folder(tmp_path / "w", f"job {at}")
    assert not store.folder.exists()
    assert len([p for p in store.folder.parent.iterdir() if p.is_dir()]) <= MAX_JOBS


def test_what_is_kept_is_bounded_in_bytes_and_older_jobs_go_first(tmp_path: Path) -> None:
    server = Server(tmp_path / "server", "scaffold")
    client = joined(server, tmp_path / "w")
    run_round(server, client, 0)
    store = ClientStore(tmp_path / "w", "federation")
    (state,) = store.folder.rglob("state")
    one = state.stat().st_size
    for at, size in enumerate((one, 3 * one)):
        other = ClientStore(tmp_path / "w", f"other {at}").folder
        (other / "state").write_bytes(bytes(size))
        os.utime(other, (1e9 + at, 1e9 + at))
    narrow = context(server, tmp_path / "w", kept_bytes=5 * one)
    run_round(server, Participation(server.joining(), narrow, Cancel(), KEY), 1)
    left = {path.name for path in store.folder.parent.iterdir() if path.is_dir()}
    assert left == {store.folder.name, other.name}  # the newer one still fits, the older does not
    limited = context(server, tmp_path / "w", kept_bytes=one * 3 // 2)
    tight = Participation(server.joining(), limited, Cancel(), KEY)
    with pytest.raises(StorageError, match=f"at most {one * 3 // 2} may be kept here.*larger --kept"):
        tight.train(order(2, server.broadcast()), Cancel())


def test_an_update_that_breaks_off_is_sent_from_where_it_was(tmp_path: Path) -> None:
    server = Server(tmp_path / "server")
    client = joined(server, tmp_path / "w")
    model = server.broadcast()
    client.train(order(0, model), Cancel())
    server.store.received, server.store.break_after = 0, 0
    server.store.blobs.pop(client.train(order(0, model), Cancel()).stored.hash)
    server.store.received, server.store.break_after = 0, 0
    update = client.train(order(0, model), Cancel())
    assert update.upload_bytes == update.stored.size == server.store.received
    assert client.train(order(0, model), Cancel()).upload_bytes == 0  # the store has it


def test_a_cancelled_upload_leaves_the_store_and_the_state_alone(tmp_path: Path) -> None:
    server = Server(tmp_path / "server", "scaffold")
    client = joined(server, tmp_path / "w")
    cancel = Cancel()
    server.store.put = lambda chunks: cancel.set("leaving") or next(chunks)  # type: ignore[assignment,func-returns-value]
    with pytest.raises(Cancelled):
        client.train(order(0, server.broadcast()), cancel)
    assert ClientStore(tmp_path / "w", "federation").load(1, "none")[0].slots == {}


def test_a_store_that_stays_away_is_an_error_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path / "server")
    client = joined(server, tmp_path / "w")
    monkeypatch.setattr("worker.blobs.PATIENCE_S", 0.001)

    def away(chunks: object) -> None:
        raise ConnectionFailed("reset")

    server.store.put = away  # type: ignore[method-assign]
    with pytest.raises(ConnectionFailed, match="reset"):
        client.train(order(0, server.broadcast()), Cancel())


def test_jobs_that_cannot_run_here_are_refused_with_the_reason(tmp_path: Path) -> None:
    server = Server(tmp_path / "server")
    good = server.joining()
    spec = good.federated

    def refused(joining: Participate, kind: type[Exception], why: str, **options: Any) -> None:
        with pytest.raises(kind, match=why):
            Participation(joining, context(server, tmp_path / "w", **options), Cancel(), KEY)

    refused(replace(good, batch=7), BadFrame, "micro-batches of 7")
    refused(replace(good, tensors={}), BadFrame, "no blob for")
    refused(replace(good, states={}), BadFrame, "no shape for")
    refused(replace(good, training=replace(TRAINING, n_micro=2)), BadFrame, "2 micro-batches")
    refused(replace(good, program=replace(good.program, n_stages=2)), BadFrame, "the whole model")
    refused(replace(good, program=replace(good.program, loss=None)), BadFrame, "without its loss")
    unknown = replace(spec, rule=replace(spec.rule, strategy="nonsense"))
    refused(replace(good, federated=unknown), UsageError, "no strategy")
    opwa = replace(spec, rule=replace(spec.rule, strategy="opwa", uplink="topk:8"))
    refused(replace(good, federated=opwa), UsageError, "counts twice")
    refused(
        replace(good, federated=replace(spec, inputs={"x": "image", "y": "other"})), UsageError, "'other'"
    )
    refused(
        good,
        UsageError,
        r"shape \(28, 28\)",
        data={"image": np.zeros((9, 28, 28), "f4"), "label": np.zeros(9)},
    )


def test_a_broadcast_that_is_not_the_rules_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    server = Server(tmp_path / "server")
    client = joined(server, tmp_path / "w")
    for data in (b"junk", b"ATOLLPK1" + bytes(100), save({"weights/other": torch.zeros(3)})):
        with pytest.raises(BadFrame):
            client.train(order(0, Model(Blob(server.put(data), 0))), Cancel())
    huge = server.put(bytes(1 << 20))
    with pytest.raises(BadFrame, match="at most"):
        client.train(order(0, Model(Blob(huge, 0))), Cancel())
    client.train(order(0, server.broadcast()), Cancel())
