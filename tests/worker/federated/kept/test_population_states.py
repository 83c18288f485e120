"""States of a population: all of a round's count or none, whatever is interrupted; bounded; movable."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from atoll.errors import StorageError
from atoll.federated import MAX_RESIDUAL_ROUNDS
from atoll.opdag import TensorMeta
from strategies.values import ClientState
from worker.federated.kept import population_states
from worker.federated.kept.population_states import COUNTS, PENDING, Held, Kept, PopulationStates

if TYPE_CHECKING:
    from numpy.typing import NDArray

N = 50


def state(value: float) -> ClientState:
    return ClientState({"control": {"w": np.full(N, value, np.float32), "b": np.full(1, value)}})


def left(value: float) -> dict[str, NDArray[Any]]:
    return {"weights/w": np.full(N, value, np.float32)}


def trained(store: PopulationStates, at_round: int, values: Mapping[str, float], order: str = "") -> None:
    with store.begin(at_round, "topk", order) as states:
        for client, value in values.items():
            states.put(client, state(value), left(-value))
        states.finish()


def value_of(store: PopulationStates, client: str, at_round: int = 3) -> float | None:
    held = store.load(client, at_round, "topk")
    if not held.state.slots:
        assert held == Held()
        return None
    control = held.state.slots["control"]
    value = float(control["b"][0])
    assert np.array_equal(control["w"], np.full(N, value, np.float32))
    if held.left:
        assert np.array_equal(held.left["weights/w"], np.full(N, -value, np.float32))
    return value


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_states_count_once_the_round_was_taken_and_survive_a_restart(tmp_path: Path) -> None:
    store = PopulationStates(tmp_path)
    trained(store, 0, {"a": 1.0, "b": 2.0})
    assert value_of(store, "a") is None
    assert store.settle(0, "abc")
    for again in (store, PopulationStates(tmp_path)):
        assert (value_of(again, "a"), value_of(again, "b"), value_of(again, "c")) == (1.0, 2.0, None)
        assert set(again.clients) == {"a", "b"}
        assert again.size == sum(path.stat().st_size for path in tmp_path.glob("*.state"))


def test_a_round_that_was_not_taken_leaves_every_client_as_it_was(tmp_path: Path) -> None:
    store = PopulationStates(tmp_path)
    trained(store, 0, {"a": 1.0})
    store.settle(0, "abc")
    before = files(tmp_path)
    trained(store, 1, {"a": 5.0, "b": 6.0})
    assert not store.settle(2, "abc")
    assert store.settle(1, ())
    assert (value_of(store, "a"), value_of(store, "b")) == (1.0, None)
    assert files(tmp_path) == before
    assert not store.settle(1, "abc")


def test_the_verdict_may_come_after_a_restart_and_twice(tmp_path: Path) -> None:
    trained(PopulationStates(tmp_path), 4, {"a": 1.0})
    store = PopulationStates(tmp_path)
    assert store.settle(4, "abc")
    assert not store.settle(4, "abc")
    assert value_of(store, "a") == 1.0


def test_what_a_round_drafts_later_comes_beside_and_only_clients_that_were_counted_count(
    tmp_path: Path,
) -> None:
    store = PopulationStates(tmp_path)
    trained(store, 0, {"a": 1.0, "b": 2.0})
    trained(store, 0, {"b": 3.0, "c": 4.0})  # of a host that was lost
    assert len(list(tmp_path.glob("*.state"))) == 3
    store.settle(0, "bc")  # a was counted as another host trained it
    assert [value_of(store, client) for client in "abc"] == [None, 3.0, 4.0]
    assert len(list(tmp_path.glob("*.state"))) == 2
    trained(store, 1, {"a": 5.0})
    trained(store, 2, {"b": 6.0})
    assert not store.settle(1, "a")
    store.settle(2, "abc")
    assert [value_of(store, client) for client in "abc"] == [None, 6.0, 4.0]


def test_a_verdict_on_one_order_leaves_what_another_of_the_same_model_drafted(tmp_path: Path) -> None:
    store = PopulationStates(tmp_path)
    trained(store, 0, {"a": 1.0, "b": 2.0}, "one")
    store.settle(0, "ab", "one")
    trained(store, 0, {"c": 3.0}, "two")
    assert store.settle(0, "ab", "one")  # said again
    again = PopulationStates(tmp_path)
    assert [value_of(again, client) for client in "abc"] == [1.0, 2.0, None]
    again.settle(0, "c", "two")
    assert [value_of(again, client) for client in "abc"] == [1.0, 2.0, 3.0]
    assert not again.settle(0, "c", "two")


class Crash(Exception):
    """The process ends here."""


def crash_points(monkeypatch: pytest.MonkeyPatch, at: int) -> Iterator[None]:
    """Whatever is written, replaced, synced or removed: the ``at``-th such call ends the process."""
    left_calls = iter(range(at))

    def guarded(call: Any) -> Any:
        def maybe(*args: Any, **options: Any) -> Any:
            if next(left_calls, None) is None:
                raise Crash
            return call(*args, **options)

        return maybe

    with monkeypatch.context() as patch:
        patch.setattr(population_states, "write_dense", guarded(population_states.write_dense))
        patch.setattr(os, "fsync", guarded(os.fsync))
        patch.setattr(Path, "replace", guarded(Path.replace))
        patch.setattr(Path, "unlink", guarded(Path.unlink))
        yield


def interrupted(monkeypatch: pytest.MonkeyPatch, folder: Path, at: int) -> bool:
    """Run a round and its verdict until call ``at``; False when it went through."""
    store = PopulationStates(folder)
    points = crash_points(monkeypatch, at)
    next(points)
    try:
        with store.begin(1, "topk") as states:
            states.put("a", state(10.0), left(-10.0))
            states.put("b", state(20.0), left(-20.0))
            states.finish()
        store.settle(1, "abc")
    except Crash:
        return True
    finally:
        next(points, None)
    return False


@pytest.mark.parametrize("verdict", [True, False])
def test_wherever_a_crash_comes_all_of_a_rounds_states_count_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: bool
) -> None:
    seen, at = set(), 0
    while True:
        folder = tmp_path / str(at)
        store = PopulationStates(folder)
        trained(store, 0, {"a": 1.0, "b": 2.0, "c": 3.0})
        store.settle(0, "abc")
        if not interrupted(monkeypatch, folder, at):
            break
        again = PopulationStates(folder)
        found = tuple(value_of(again, client) for client in "abc")
        assert found in {(1.0, 2.0, 3.0), (10.0, 20.0, 3.0)}
        counted = found[0] == 10.0
        pending = again.settle(1, "ab" if verdict else ())  # the coordinator repeats its word
        after = tuple(value_of(again, client) for client in "abc")
        assert after == ((10.0, 20.0, 3.0) if counted or (pending and verdict) else (1.0, 2.0, 3.0))
        assert files(folder) == {COUNTS, *(kept.file for kept in again.clients.values())}
        assert tuple(value_of(PopulationStates(folder), client) for client in "abc") == after
        seen.add((counted, pending))
        at += 1
    assert at > 8
    assert seen == {(False, False), (False, True), (True, True), (True, False)}


def test_a_residual_of_another_codec_or_too_old_is_left_and_the_state_stays(tmp_path: Path) -> None:
    store = PopulationStates(tmp_path)
    trained(store, 0, {"a": 1.0})
    store.settle(0, "abc")
    assert store.load("a", 1, "topk").left
    assert not store.load("a", 1, "int8_block").left
    assert not store.load("a", 2 + MAX_RESIDUAL_ROUNDS, "topk").left
    assert value_of(store, "a", 2 + MAX_RESIDUAL_ROUNDS) == 1.0


def test_what_is_damaged_counts_as_never_kept(tmp_path: Path) -> None:
    store = PopulationStates(tmp_path)
    trained(store, 0, {"a": 1.0, "b": 2.0})
    store.settle(0, "abc")
    store.path("a").write_bytes(store.path("a").read_bytes()[:100])
    again = PopulationStates(tmp_path)
    assert (value_of(again, "a"), value_of(again, "b")) == (None, 2.0)
    (tmp_path / COUNTS).write_text('{"round": 0, "clients": {"a": 3}}')
    empty = PopulationStates(tmp_path)
    assert value_of(empty, "b") is None
    trained(empty, 1, {"b": 4.0})
    empty.settle(1, "abc")
    assert value_of(empty, "b") == 4.0


def test_more_than_the_bound_is_refused_with_the_remedy_and_nothing_changes(tmp_path: Path) -> None:
    one = PopulationStates(tmp_path / "one")
    trained(one, 0, {"a": 1.0})
    size = one.size
    store = PopulationStates(tmp_path / "two", max_bytes=int(3.5 * size))
    trained(store, 0, {"a": 1.0, "b": 2.0})
    store.settle(0, "abc")
    before = files(store.folder)
    with pytest.raises(StorageError, match="raise --kept, or share the population"):
        trained(store, 1, {"a": 3.0, "b": 4.0})
    assert files(store.folder) == before
    assert (value_of(store, "a"), value_of(store, "b")) == (1.0, 2.0)
    trained(store, 1, {"a": 3.0})
    store.settle(1, "abc")
    assert store.size == 2 * size


def test_states_stay_mapped_up_to_a_bound_and_the_least_recently_used_go(tmp_path: Path) -> None:
    nbytes = 4 * N + 8 + 4 * N
    store = PopulationStates(tmp_path, cached_bytes=2 * nbytes)
    trained(store, 0, {"a": 1.0, "b": 2.0, "c": 3.0})
    store.settle(0, "abc")
    first = store.load("a", 1, "topk").state.slots["control"]["w"]
    assert store.load("a", 1, "topk").state.slots["control"]["w"] is first
    store.load("b", 1, "topk")
    store.load("a", 1, "topk")
    store.load("c", 1, "topk")  # b goes
    assert store.load("a", 1, "topk").state.slots["control"]["w"] is first
    assert store._cached == 2 * nbytes
    trained(store, 1, {"a": 9.0})
    store.settle(1, "abc")
    assert value_of(store, "a") == 9.0  # not what is mapped of before
    assert float(first[0]) == 1.0
    assert store._cached <= 2 * nbytes


METAS = {
    "state/control/w": TensorMeta((N,), "float32"),
    "state/control/b": TensorMeta((1,), "float64"),
    "left/weights/w": TensorMeta((N,), "float32"),
}


def test_clients_that_keep_nothing_leave_nothing(tmp_path: Path) -> None:
    store = PopulationStates(tmp_path)
    with store.begin(0, "none") as states:
        states.put("a", ClientState(), {})
        states.finish()
    assert store.settle(0, "abc")
    assert store.clients == {}
    assert files(tmp_path) == set()


def test_lists_hold_what_they_say(tmp_path: Path) -> None:
    store = PopulationStates(tmp_path)
    trained(store, 7, {"a": 1.0})
    found = json.loads((tmp_path / PENDING).read_text())
    assert found["round"] == 7
    assert Kept(**found["clients"]["a"]).codec == "topk"


def test_a_disk_that_refuses_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PopulationStates(tmp_path)

    def full(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StorageError, match="No space left on device; free space"):
        trained(store, 0, {"a": 1.0})
