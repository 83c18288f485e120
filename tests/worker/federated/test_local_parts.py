"""Tensors that each client keeps for itself, under any strategy, and FedRep's two parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atoll.errors import UsageError
from atoll.federated import NO_FLOORS, Federated
from coordinator.federated.checks import WRAPPERS, check_federated
from strategies import STRATEGIES
from strategies.files import broadcast_metas, update_arrays, update_metas
from tests.inprocess.federation import LocalFederation
from tests.worker.federated.test_trainer import Small, arrays, model_of, spec
from worker.federated.local_model import LocalModel

HEAD = ("head.weight", "head.bias")
ANY = sorted(STRATEGIES.keys() - WRAPPERS.keys() - {"ditto", "fedbn", "fedsvd", "flora"})


@pytest.fixture(scope="module")
def model() -> LocalModel:
    return model_of(Small(), spec())


def federation(model: LocalModel, rule: str, **options: Any) -> LocalFederation:
    data = {f"c{at}": arrays(48, at) for at in range(5)}
    federated = Federated(rule, evaluate_every=0, held_out=0.1, **options)
    return LocalFederation(model, federated, data, floors=NO_FLOORS)


@pytest.mark.parametrize("rule", ANY)
def test_a_head_of_the_clients_own_never_travels_under_any_strategy(model: LocalModel, rule: str) -> None:
    whole = federation(model, rule) if rule != "fedrep" else federation(model, "fedavg")
    made = federation(model, rule, local=("head.*",))
    layout, full = made.trainer.layout, whole.trainer.layout
    head_bytes = sum(full.metas[name].nbytes for name in HEAD)
    for metas in (update_metas, broadcast_metas):
        sent, of = metas(made.strategy, layout), metas(whole.strategy, full)
        assert not [name for name in sent if "head" in name]
        copies = len([name for name in of if "head.weight" in name])
        missing = sum(m.nbytes for m in of.values()) - sum(m.nbytes for m in sent.values())
        assert missing == copies * head_bytes
    for _ in range(2):
        made.run_round()
    assert not [name for name in made.state.weights if "head" in name]
    kept = [made.client_states[name].slots["local"]["head.weight"] for name in made.clients]
    assert all(not np.array_equal(kept[0], other) for other in kept[1:])
    found = made.trainer.train(
        made.clients["c0"], made.strategy.configure(made.state), made.client_states["c0"]
    )
    assert not [name for name in update_arrays(found.update) if "head" in name]


def test_fedrep_trains_the_head_under_the_broadcasts_body_and_then_the_body_under_that_head(
    model: LocalModel,
) -> None:
    made = federation(model, "fedrep", local=("head.*",))
    trainer, broadcast = made.trainer, made.strategy.configure(made.state)
    seen: list[dict[str, Any]] = []
    kept = trainer._kept

    def watched(done: Any) -> Any:
        seen.append({name: np.array(array) for name, array in done.weights.items()})
        return kept(done)

    trainer._kept = watched  # type: ignore[method-assign]
    found = trainer.train(made.clients["c0"], broadcast, made.client_states["c0"])
    (first,) = seen
    trained = [name for name in broadcast.weights if layout_role(trainer, name) == "trained"]
    assert all(np.array_equal(first[name], broadcast.weights[name]) for name in trained)
    start = model.tensors["head.weight"].numpy()
    assert not np.array_equal(first["head.weight"], start)
    own = found.state.slots["local"]
    assert np.array_equal(own["head.weight"], first["head.weight"])
    assert all(np.any(found.update.delta[name]) for name in trained)


def layout_role(trainer: Any, name: str) -> str:
    return str(trainer.layout.roles[name].value)


def test_local_without_a_match_or_where_it_cannot_fit_is_refused(model: LocalModel) -> None:
    with pytest.raises(UsageError, match="no tensor that training changes matches 'haed"):
        federation(model, "fedavg", local=("haed.*",))
    with pytest.raises(UsageError, match="keeps a model of its own"):
        check_federated(Federated("ditto", local=("head.*",)), spec())
    with pytest.raises(UsageError, match="fedrep trains a head"):
        check_federated(Federated("fedrep"), spec())
