"""A population on hosts: equal bits however it is dealt, each client counted once, its state with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.errors import UsageError
from atoll.federated import Federated, Floors
from coordinator.federated.makespan import Rate, Task, assign
from tests.inprocess.federation import LocalFederation
from tests.inprocess.population import LocalPopulation, PopulationRound
from tests.parameters import each_once
from tests.worker.federated.test_trainer import Small, arrays, model_of, spec
from worker.federated.local_model import LocalModel

CLIENTS, DRAWN, ROUNDS = 20, 8, 3
ALLOWED = Floors(statistics=96)  # running statistics of the net below


@pytest.fixture(scope="module")
def model() -> LocalModel:
    return model_of(Small(width=48), spec())  # its head is large enough for codecs


def federation(model: LocalModel, rule: str, **options: Any) -> LocalFederation:
    data = {f"c{at:02d}": arrays(20 + 7 * (at % 5), at) for at in range(CLIENTS)}
    federated = Federated(rule, clients=DRAWN, held_out=0.0, evaluate_every=0, **options)
    return LocalFederation(model, federated, data, floors=ALLOWED)


def by_time(
    steps: Mapping[str, int], homes: Mapping[str, str], hosts: Sequence[str]
) -> Mapping[str, Sequence[str]]:
    """As a coordinator deals that has measured hosts of unlike speeds."""
    tasks = [Task(name, count, homes.get(name, ""), 0.02) for name, count in steps.items()]
    return assign(tasks, {host: Rate(0.01 * (1 + at)) for at, host in enumerate(hosts)}).clients


def ran(
    where: Path,
    made: LocalFederation,
    hosts: int,
    lost: Mapping[int, Mapping[str, int]] | None = None,
    **options: Any,
) -> tuple[dict[str, bytes], list[PopulationRound]]:
    population = LocalPopulation(made, [f"host-{at}" for at in range(hosts)], where, **options)
    rounds = [population.run_round((lost or {}).get(at)) for at in range(ROUNDS)]
    for host in population.hosts:
        kept = population.states[host]
        assert {population.homes[client] for client in kept.clients} <= {host}
        assert len(list(kept.folder.glob("*.state"))) == len(kept.clients)
    arrays_of = {
        **made.state.weights,
        **{f"{s}/{n}": a for s, v in made.state.slots.items() for n, a in v.items()},
    }
    return {name: array.tobytes() for name, array in arrays_of.items()}, rounds


def once_each(rounds: Sequence[PopulationRound]) -> bool:
    """Every drawn client is in exactly one host's rows."""
    return all(len(r.rows) == DRAWN and not r.refused for r in rounds)


@pytest.mark.parametrize("rule", ["fedavg", "scaffold"])
def test_the_model_has_the_same_bits_for_any_number_of_hosts(
    tmp_path: Path, model: LocalModel, rule: str
) -> None:
    alone, rounds = ran(tmp_path / "1", federation(model, rule), 1)
    assert once_each(rounds)
    drawn = Counter(name for r in rounds for name in r.rows)
    assert max(drawn.values()) > 1  # else no state is ever used again
    for hosts in (2, 3, DRAWN):  # the last: a machine each, as real workers
        found, others = ran(tmp_path / str(hosts), federation(model, rule), hosts)
        assert found == alone
        assert [r.rows for r in others] == [r.rows for r in rounds]
        assert (sum(r.moved for r in others) > 0) == (rule == "scaffold")
    found, others = ran(tmp_path / "dealt", federation(model, rule), 3, deal=by_time)
    assert found == alone


@pytest.mark.parametrize(("rule", "seed"), each_once(["fedavg", "scaffold"], [0, 1, 2]))
def test_a_host_lost_in_mid_round_changes_no_bit_and_nobody_is_counted_twice(
    tmp_path: Path, model: LocalModel, rule: str, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    lost = {
        int(at): {f"host-{draw.integers(3)}": int(draw.integers(0, DRAWN // 3 + 1))}
        for at in draw.permutation(ROUNDS)[:2]
    }
    expected, _ = ran(tmp_path / "whole", federation(model, rule), 2)
    found, rounds = ran(tmp_path / "lost", federation(model, rule), 3, lost)
    assert found == expected, lost
    assert once_each(rounds)
    uploads = [sum(size > 0 for size in r.uploaded_bytes.values()) for r in rounds]
    assert all(uploads[at] < 3 for at in lost)


@pytest.mark.parametrize("uplink", ["lossless", "topk:4", "int8_block"])
def test_codecs_and_their_residuals_go_with_the_client(
    tmp_path: Path, model: LocalModel, uplink: str
) -> None:
    found = [
        ran(tmp_path / str(hosts), federation(model, "fedavg", uplink=uplink), hosts, deal=by_time)[0]
        for hosts in (1, 3)
    ]
    assert found[0] == found[1]
    if uplink != "lossless":
        without, _ = ran(
            tmp_path / "none", federation(model, "fedavg", uplink=uplink, error_feedback=False), 1
        )
        assert without != found[0]
        dense, _ = ran(tmp_path / "dense", federation(model, "fedavg"), 1)
        assert dense != found[0]


@pytest.mark.parametrize(("rule", "uplink"), each_once(["fedavg", "scaffold", "fedadam"], ["off", "topk:4"]))
def test_it_is_the_federation_without_hosts_up_to_rounding(
    tmp_path: Path, model: LocalModel, rule: str, uplink: str
) -> None:
    apart, together = (federation(model, rule, uplink=uplink) for _ in range(2))
    population = LocalPopulation(together, ["a", "b"], tmp_path)
    for _ in range(2):
        expected, found = apart.run_round(), population.run_round()
        assert found.rows.keys() == set(expected.participants)
        assert {name: row.steps for name, row in found.rows.items()} == expected.steps
        sizes = {name: row.coded_bytes for name, row in found.rows.items()}
        assert sizes == expected.uploaded_bytes
    for name, array in apart.state.weights.items():
        np.testing.assert_allclose(
            together.state.weights[name], array, atol=2e-6 if rule != "fedadam" else 2e-3
        )


def test_hosts_upload_a_sum_each_whatever_the_number_of_clients(tmp_path: Path, model: LocalModel) -> None:
    made = federation(model, "scaffold")
    dense = sum(array.nbytes for array in made.state.weights.values())
    dense += sum(array.nbytes for array in made.state.slots["control"].values())
    _, rounds = ran(tmp_path, made, 2)
    for r in rounds:
        assert all(0 < size < 1.1 * dense + 3000 for size in r.uploaded_bytes.values())  # and a directory
        assert sum(row.coded_bytes for row in r.rows.values()) == DRAWN * dense


def test_a_client_that_cannot_be_trained_is_refused_alone(tmp_path: Path, model: LocalModel) -> None:
    made = federation(model, "fedavg")
    bad = made.choose()[3]
    made.clients[bad].data._sources["x"][0][:] = np.nan
    found = LocalPopulation(made, ["a", "b"], tmp_path).run_round()
    assert set(found.refused) == {bad}
    assert len(found.rows) == DRAWN - 1
    assert all(np.isfinite(array).all() for array in made.state.weights.values())


def test_a_population_needs_a_strategy_that_sums_a_host_and_one_that_stays(
    tmp_path: Path, model: LocalModel
) -> None:
    with pytest.raises(UsageError, match="krum on 1 hosts"):
        LocalPopulation(federation(model, "krum"), ["a"], tmp_path)
    with pytest.raises(UsageError, match="fedavg on 0 hosts"):
        LocalPopulation(federation(model, "fedavg"), [], tmp_path)
    with pytest.raises(UsageError, match="qfedavg weighs clients by what they measured"):
        LocalPopulation(federation(model, "qfedavg"), ["a"], tmp_path).run_round()
    with pytest.raises(UsageError, match="no host is left for 8 clients"):
        LocalPopulation(federation(model, "fedavg"), ["a"], tmp_path).run_round({"a": 2})
