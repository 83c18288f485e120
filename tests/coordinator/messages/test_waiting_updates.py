"""Updates of asynchronous jobs that wait in the ledger: a client has one there."""

from __future__ import annotations

from atoll.messages.from_worker import HostRows, UpdateReady
from coordinator.messages.facts import JobSubmitted, Ledger, UpdateTaken
from tests.sim.world import federated_job

MODEL = "ab" * 32


def taken(host: str, order: int, clients: dict[str, int]) -> UpdateTaken:
    """A host's sum of these clients by model 3, the blob of its order's number."""
    rows = HostRows({}, {}, {}, {}, order=str(order))
    update = UpdateReady("f", 3, f"{order:064x}", 10, 90, 3, host=rows)
    return UpdateTaken("f", host, update, 10, "", 0.0, MODEL, clients, (4, 40))


def begun() -> Ledger:
    ledger = Ledger()
    ledger.apply(JobSubmitted("f", "", federated_job(buffer=2), 0, {}, 0.0))
    return ledger


def test_sums_of_unlike_clients_wait_beside_each_other() -> None:
    ledger = begun()
    for each in (taken("h", 1, {"a": 5, "b": 5}), taken("h", 2, {"c": 5}), taken("i", 3, {"d": 5})):
        ledger.apply(each)
    assert len(ledger.jobs["f"].waiting) == 3


def test_a_client_that_trained_anew_after_a_refused_sum_waits_once() -> None:
    """The refusal is in no journal: after a restart both sums would be there."""
    ledger = begun()
    first, anew = taken("h", 1, {"a": 5, "b": 5}), taken("i", 2, {"b": 5, "c": 5})
    ledger.apply(first)
    ledger.apply(anew)
    assert ledger.jobs["f"].waiting == {anew.name: anew}
    assert first.update.update in ledger.take_superseded()
