"""Hosts' sums of several models: exact by model whoever hosted the clients, and weighed as the papers say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atoll.federated import Federated
from compressors.model_file import read_model, write_sums
from coordinator.aggregation.server_half import Offered, ServerHalf, Summed
from coordinator.messages.instructions import HostSums
from strategies.files import broadcast_metas, parted, sums_arrays
from strategies.fixed import Accumulator
from strategies.linear import Linear
from strategies.values import ClientUpdate
from tests.coordinator.aggregation.test_server_half import TRAINED, Server, made, summed

GRID = (8, 512)  # of all orders: seven clients with at most 512 samples
OLD, NEW = "abc", "defg"
GROUPS: Mapping[str, Sequence[str]] = {
    "one host": ["abc", "defg"],
    "two hosts": ["ab", "c", "defg"],
    "three hosts": ["b", "ac", "dg", "ef"],
    "a machine each": list("abcdefg"),
}


def begun(tmp_path: Path, rule: str) -> tuple[Server, ServerHalf, str]:
    """A job after its first model, and the blob of the broadcast before."""
    server = made(tmp_path, strategy=rule, buffer=7, min_clients=1)
    half = server.half()
    base = half.open("", 7)
    server.store.adopt(base.path, base.stored.hash, base.stored.size)
    summed(server, half, {"z": server.offer(half, 50, 10)})
    return server, half, base.stored.hash


def each(server: Server, half: ServerHalf) -> dict[str, Offered]:
    return {client: server.offer(half, at, 10 + 3 * at) for at, client in enumerate(OLD + NEW, 1)}


def host(
    server: Server, half: ServerHalf, updates: Mapping[str, Offered], clients: str, base: str
) -> HostSums:
    """The sum of a host that trained ``clients``, those of ``OLD`` from the model before."""
    core = half.rule.core
    assert isinstance(core, Linear)
    held = Accumulator(core.round_grid(*GRID))
    for client in clients:
        told = updates[client]
        delta, _ = parted(read_model(server.store.path(told.blob), half.update_metas))
        held.add(
            core.contribute(half.layout, ClientUpdate(0, told.n_samples, told.steps, delta, client=client))
        )
    path, sums = server.folder / "sums", held.sums()
    write_sums(path, sums_arrays(sums))
    samples = {client: updates[client].n_samples for client in clients}
    age = 1 if clients[0] in OLD else 0
    blob = server.store.put(path.read_bytes())
    return HostSums(blob, samples, sums.loads, sums.scalars, GRID, age, base if age else "")


def closed(server: Server, half: ServerHalf, groups: Sequence[str], base: str) -> Summed:
    updates = each(server, half)
    offered = {f"{clients}/1": host(server, half, updates, clients, base) for clients in groups}
    drawn = {client: told.registered for client, told in updates.items()}
    assert half.state is not None
    return half.aggregate(half.state.round, offered, 7, 1, drawn=drawn)


@pytest.mark.parametrize("rule", ["fedavg", "fedavgm", "fedasync", "fedadam"])
def test_the_next_state_has_the_same_bits_whichever_host_had_whom(tmp_path: Path, rule: str) -> None:
    found = set()
    for words, groups in GROUPS.items():
        folder = tmp_path / words
        folder.mkdir()
        server, half, base = begun(folder, rule)
        done = closed(server, half, groups, base if rule == "fedasync" else "")
        assert done.dropped == {}
        assert done.state is not None
        found.add(done.state.stored.hash)
    assert len(found) == 1


@pytest.mark.parametrize("rule", ["fedavg", "fedasync"])
def test_sums_of_two_models_arrive_where_the_papers_put_them(tmp_path: Path, rule: str) -> None:
    """FedBuff: w + sum n s d / sum n. FedAsync: w + a (sum n s (b + d - w)) / sum n, b the model of then."""
    server, half, base = begun(tmp_path, rule)
    assert half.state is not None
    now = {name: value.astype(np.float64) for name, value in half.state.weights.items()}
    updates = each(server, half)
    first, _ = parted(read_model(server.store.path(base), broadcast_metas(half.rule, half.layout)))
    closed(server, half, GROUPS["two hosts"], base if rule == "fedasync" else "")
    total = sum(told.n_samples for told in updates.values())
    weight = Federated(buffer=7).weight(1)
    for name, value in half.state.weights.items():
        mean = np.zeros(value.shape)
        for client, told in updates.items():
            delta, _ = parted(read_model(server.store.path(told.blob), half.update_metas))
            change = delta[name].astype(np.float64)
            if client in OLD:
                change = weight * (change + (first[name] - now[name] if rule == "fedasync" else 0.0))
            mean += told.n_samples * change / total
        # Running statistics are averaged whole, whatever the strategy.
        alpha = 0.6 if rule == "fedasync" and (name.startswith("head") or name in TRAINED) else 1.0
        np.testing.assert_allclose(value, now[name] + alpha * mean, rtol=2e-6, atol=2e-6)


def test_one_model_with_everybody_has_the_bits_of_a_round(tmp_path: Path) -> None:
    server, half, _ = begun(tmp_path, "fedavg")
    updates = each(server, half)
    drawn = {client: told.registered for client, told in updates.items()}
    assert half.state is not None
    wide = (8, 1024)  # as an order says it: seven clients with 700 samples, rounded up
    core = half.rule.core
    assert isinstance(core, Linear)
    assert core.round_grid(*wide).unit("trained") == core.round_grid(7, 700).unit("trained")
    again = server.half()
    again.open("", 7)
    summed(server, again, {"z": server.offer(again, 50, 10)})
    rounds = again.aggregate(1, updates, 7, 1, drawn=drawn)
    path, held = server.folder / "sums", Accumulator(core.round_grid(*wide))
    for client, told in updates.items():
        delta, _ = parted(read_model(server.store.path(told.blob), half.update_metas))
        held.add(core.contribute(half.layout, ClientUpdate(1, told.n_samples, 3, delta, client=client)))
    write_sums(path, sums_arrays(held.sums()))
    samples = {client: told.n_samples for client, told in updates.items()}
    sums = held.sums()
    one = HostSums(server.store.put(path.read_bytes()), samples, sums.loads, sums.scalars, wide)
    flows = half.aggregate(1, {"host/1": one}, 7, 1, drawn=drawn)
    assert flows.state is not None
    assert rounds.state is not None
    assert flows.state.stored.hash == rounds.state.stored.hash


def test_an_update_of_before_the_first_host_joins_the_sum_and_a_bad_sum_costs_itself_alone(
    tmp_path: Path,
) -> None:
    server, half, base = begun(tmp_path, "fedavg")
    updates = each(server, half)
    drawn = {client: told.registered for client, told in updates.items()}
    old = host(server, half, updates, "abc", base)
    offered: dict[str, Offered | HostSums] = {
        "old": old,
        "bad": replace(old, samples={"d": 1}, age=0),
        "twice": replace(old, age=0),
        "e": replace(updates["e"], weight=0.5),
    }
    found = half.aggregate(1, offered, 7, 1, drawn=drawn)
    assert set(found.dropped) == {"bad", "twice"}
    assert found.dropped["twice"] == "client 'a' is counted already"
    assert found.state is not None
