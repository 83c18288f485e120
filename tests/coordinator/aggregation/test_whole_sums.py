"""Hosts' sums on files: the same state to the bit however clients are grouped, and nobody counted twice."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.errors import UsageError
from compressors.model_file import read_model, write_sums
from coordinator.aggregation.server_half import Offered, ServerHalf, Summed
from coordinator.aggregation.supervisor import Aggregators
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.instructions import HostSums
from strategies.files import parted, sums_arrays
from strategies.fixed import Accumulator
from strategies.linear import Linear
from strategies.values import ClientUpdate
from tests.coordinator.aggregation.test_server_half import Server, made

CLIENTS = ("a", "b", "c", "d", "e")
NUMBERS = {"fednova": {"effective_steps": 3.0}}


def updates(server: Server, half: ServerHalf) -> dict[str, Offered]:
    numbers = NUMBERS.get(half.rule.name, {})
    return {client: server.offer(half, at, 10 + at, scalars=numbers) for at, client in enumerate(CLIENTS, 1)}


def drawn_of(offered: Mapping[str, Offered]) -> dict[str, int]:
    return {client: told.registered for client, told in offered.items()}


def host(server: Server, half: ServerHalf, drawn: Mapping[str, int], mine: Mapping[str, Offered]) -> HostSums:
    """The sum that a host sends which trained ``mine``."""
    core = half.rule.core
    assert isinstance(core, Linear)
    held = Accumulator(core.grid(len(drawn), sum(drawn.values())))
    for client, told in mine.items():
        arrays = read_model(server.store.path(told.blob), half.update_metas)
        delta, extra = parted(arrays)
        slots = {slot: extra.get(slot, {}) for slot in half.rule.extra_up(half.layout)}
        update = ClientUpdate(0, told.n_samples, told.steps, delta, slots, told.scalars, told.metrics, client)
        held.add(core.contribute(half.layout, update))
    path = server.folder / "sums"
    sums = held.sums()
    write_sums(path, sums_arrays(sums))
    samples = {client: told.n_samples for client, told in mine.items()}
    return HostSums(server.store.put(path.read_bytes()), samples, sums.loads, sums.scalars)


def closed(
    server: Server,
    half: ServerHalf,
    offered: Mapping[str, Any],
    drawn: Mapping[str, int],
    least: int = 1,
) -> Summed:
    half.open("", len(CLIENTS))
    return half.aggregate(0, offered, len(CLIENTS), least, drawn=drawn)


GROUPS: dict[str, Sequence[str]] = {
    "one host": ["abcde"],
    "two hosts": ["abc", "de"],
    "three hosts": ["bd", "a", "ce"],
    "a host and two workers": ["ade", "b", "c"],
}


@pytest.mark.parametrize("rule", ["fedavg", "fedadam", "fednova", "scaffold", "feddyn", "opwa"])
def test_the_next_state_has_the_same_bits_whoever_trained_whom(tmp_path: Path, rule: str) -> None:
    server = made(tmp_path, strategy=rule)
    half = server.half()
    each = updates(server, half)
    drawn = drawn_of(each)
    apart = closed(server, half, each, drawn)
    assert apart.state is not None
    assert apart.dropped == {}
    for groups in GROUPS.values():
        offered: dict[str, Offered | HostSums] = {}
        for at, group in enumerate(groups):
            mine = {client: each[client] for client in group}
            alone = len(groups) == 3 and len(group) == 1
            offered |= mine if alone else {f"host-{at}": host(server, half, drawn, mine)}
        found = closed(server, half, offered, drawn)
        assert found.dropped == {}
        assert found.state is not None
        assert found.state.stored == apart.state.stored
    half.open("", len(CLIENTS))
    plain = half.aggregate(0, each, len(CLIENTS), 1)
    assert plain.state is not None
    assert plain.state.stored != apart.state.stored  # in floats, whose bits stay as they were


def test_a_client_is_counted_once_and_only_if_it_was_drawn(tmp_path: Path) -> None:
    server = made(tmp_path)
    half = server.half()
    each = updates(server, half)
    drawn = drawn_of(each)
    one = host(server, half, drawn, {c: each[c] for c in "abc"})
    two = host(server, half, drawn, {c: each[c] for c in "cde"})
    rest = {"d": each["d"], "e": each["e"]}
    found = closed(server, half, {"host-1": one, "host-2": two}, drawn)
    assert found.dropped == {"host-2": "client 'c' is counted already"}
    expected = closed(server, half, {"host-1": one}, drawn)
    assert found.state is not None
    assert expected.state is not None
    assert found.state.stored == expected.state.stored
    found = closed(server, half, {"a": each["a"], "host-1": one, **rest}, drawn)
    assert found.dropped == {"host-1": "client 'a' is counted already"}
    fewer = {client: drawn[client] for client in "abde"}
    found = closed(server, half, {"host-1": one, **rest}, fewer)
    assert found.dropped == {"host-1": "client 'c' was not drawn"}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"samples": {"a": 11, "b": 12, "c": 101}}, "client 'c' with 101 samples; from 1 to 100"),
        ({"samples": {"a": 11, "b": 12, "c": 0}}, "client 'c' with 0 samples"),
        ({"samples": {"a": 11, "b": 12, "c": 20}}, "a sum over 36 samples of clients that have 43"),
        ({"samples": {"a": 11, "b": 12}}, "of 2 clients is"),
        ({"samples": {}}, "a sum over no clients"),
        ({"loads": {"trained": 2**61, "averaged": 2**61}}, "trained of 3 clients is"),
        ({"loads": {"trained": 5, "averaged": 2**50}}, "more than its load of 5"),
        ({"scalars": {"samples": 1}}, "sums of"),
        ({"blob": "0" * 64}, "cannot read"),
    ],
)
def test_a_host_that_claims_more_than_its_clients_may_is_dropped_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    server = made(tmp_path)
    half = server.half()
    each = updates(server, half)
    drawn = drawn_of(each)
    bad = replace(host(server, half, drawn, {c: each[c] for c in "abc"}), **changes)
    good = host(server, half, drawn, {c: each[c] for c in "de"})
    found = closed(server, half, {"bad": bad, "good": good}, drawn)
    assert list(found.dropped) == ["bad"]
    assert why in found.dropped["bad"]
    expected = closed(server, half, {"good": good}, drawn)
    assert found.state is not None
    assert expected.state is not None
    assert found.state.stored == expected.state.stored
    assert closed(server, half, {"bad": bad, "good": good}, drawn, least=3).state is None


def test_a_sum_of_another_draw_or_another_model_is_dropped(tmp_path: Path) -> None:
    server = made(tmp_path)
    half = server.half()
    each = updates(server, half)
    drawn = drawn_of(each)
    wider = host(server, half, {**drawn, "f": 10**6}, {c: each[c] for c in "abc"})
    found = closed(server, half, {"a": each["d"], "host-1": wider}, drawn)
    assert list(found.dropped) == ["host-1"]  # on another grid its numbers are others
    path = server.folder / "other"
    write_sums(path, {"sum/trained/x": np.zeros(3, np.int64)})
    other = replace(wider, blob=server.store.put(path.read_bytes()))
    found = closed(server, half, {"d": each["d"], "host-1": other}, drawn)
    assert "tensors" in found.dropped["host-1"]


def test_sums_where_each_update_is_taken_apart_are_dropped_and_strategies_without_sums_refused(
    tmp_path: Path,
) -> None:
    server = made(tmp_path)
    half = server.half()
    each = updates(server, half)
    sums = host(server, half, drawn_of(each), {c: each[c] for c in "abc"})
    half.open("", 5)
    found = half.aggregate(0, {"d": each["d"], "host-1": sums}, 5, 1)
    assert found.dropped == {"host-1": "a sum of several clients in a round that needs individual updates"}
    for rule, why in (("krum", "krum needs individual updates"), ("qfedavg", "weighs clients by what")):
        other = made(tmp_path / rule, strategy=rule)
        half = other.half()
        half.open("", 5)
        with pytest.raises(UsageError, match=why):
            half.aggregate(0, {}, 5, 1, drawn={"a": 10})


def test_the_process_that_sums_takes_hosts_sums_too(tmp_path: Path) -> None:
    server = made(tmp_path)
    half = server.half()
    each = updates(server, half)
    drawn = drawn_of(each)
    sums = {"host-1": host(server, half, drawn, {c: each[c] for c in "abc"})}
    single = {c: ev.UpdateReady("job-1", 0, each[c].blob, 1, each[c].n_samples, 3) for c in "de"}
    registered, codecs = {c: drawn[c] for c in "de"}, dict.fromkeys("de", ("none", 1.0))

    async def run() -> list[ev.AggregatorEvent]:
        heard: asyncio.Queue[ev.AggregatorEvent] = asyncio.Queue()
        aggregators = Aggregators(server.store, heard.put_nowait)
        try:
            aggregators.ask(do.OpenAggregator("job-1", server.job.spec, 0, "", 5))
            aggregators.ask(
                do.AggregateRound("job-1", 0, 1, single, codecs, registered, 5, 5, sums=sums, drawn=drawn)
            )
            return [await heard.get() for _ in range(2)]
        finally:
            await aggregators.stop()

    _, done = asyncio.run(run())
    assert isinstance(done, ev.Aggregated)
    assert done.dropped == {}
    assert done.state is not None
    expected = closed(server, half, each, drawn)
    assert expected.state is not None
    assert done.state.hash == expected.state.stored.hash
