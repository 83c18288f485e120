"""Privacy beside secure sums, by real workers and the real aggregator: noise at the members alone, every sum
that could be opened counted, and no more of them than were accounted for."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.errors import BadFrame, StorageError
from atoll.federated import Floors
from atoll.messages.from_worker import SecureAnswer
from atoll.messages.to_worker import TrainRound
from atoll.privacy import Privacy
from atoll.secure import Secure, Stage
from coordinator.federated import state as fed
from coordinator.federated.driver import FederatedDriver
from coordinator.membership.effects import Effects
from coordinator.messages.facts import JobSubmitted, Ledger, NoisedAsked, from_record, to_record
from coordinator.messages.jobs import Phase, Record
from strategies.privacy.private import Private
from tests.inprocess.secure_federation import SecureFederation, data_of
from worker.federated.secure.membership import SENT

NAMES = ("w1", "w2", "w3", "w4", "w5", "w6")
CLIP = 0.05
HOME = ("norm.running_mean", "norm.running_var")


def private(folder: Path, noise: float = 0.8, **options: Any) -> SecureFederation:
    wanted = {
        "secure": Secure(),
        "privacy": Privacy(noise=noise, clip=CLIP),
        "clients": 6,
        "local": HOME,
        "local_steps": 2,
        **options,
    }
    kind = wanted.pop("kind", SecureFederation)
    lost = wanted.pop("lost", {})
    found: SecureFederation = kind(folder, NAMES, wanted, lost, Floors(2, 1, 1, 2, counted=False))
    return found


def noised(made: SecureFederation) -> list[NoisedAsked]:
    return [i.fact for i in made.todo if isinstance(i, Record) and isinstance(i.fact, NoisedAsked)]


def silent(made: SecureFederation) -> SecureFederation:
    """The same job whose members add nothing."""
    for client in made.clients.values():
        rule = client._trainer.rule
        assert isinstance(rule, Private)
        client._trainer.rule = replace(rule, noise=lambda sigma, size, source: np.zeros(size, np.int64))
    return made


def test_rounds_differ_from_unnoised_ones_by_the_noise_of_their_survivors(tmp_path: Path) -> None:
    """Two of six are lost after training in each round: what is left is the threshold."""
    lost = {(at, Stage.VECTORS): ("w5", "w6") for at in range(5)}
    made = private(tmp_path / "noised", lost=lost)
    bare = silent(private(tmp_path / "bare", lost=lost))
    moved = []
    for each in (made, bare):
        each.begin()
        while each.state.round < 1:
            each.step(each.queue.pop(0)) if each.queue else _tick(each)
        moved.append(np.concatenate([np.ravel(each.weights()[n]) for n in ("head.weight", "head.bias")]))
    off = (moved[0] - moved[1]).astype(np.float64) / (CLIP / 6)  # in units of the clip, of the sum
    rule = made.clients["w1"]._trainer.rule
    assert isinstance(rule, Private)
    sigma = rule.member_sigma(4) * 2.0 / 2**24  # of four survivors
    assert sigma > 0.8
    assert 0.5 < float(np.std(off)) / sigma < 1.7  # of 21 words
    assert np.unique(off).size == off.size


def _tick(made: SecureFederation) -> None:
    made.now_s = max(made.now_s + 1.0, made.state.due_s)
    made.step(fed.Tick())


def test_every_round_is_counted_before_anybody_is_asked_to_train(tmp_path: Path) -> None:
    made = private(tmp_path)
    made.run()
    assert made.state.phase is Phase.FINISHED, made.state.reason
    assert [fact.privacy.rounds for fact in noised(made)] == [1, 2, 3, 4, 5]
    assert [fact.privacy for fact in made.facts()] == [fact.privacy for fact in noised(made)]
    kinds = [type(i.fact if isinstance(i, Record) else getattr(i, "message", i)) for i in made.todo]
    assert kinds.index(NoisedAsked) < kinds.index(TrainRound)
    told = made.facts()[0]
    assert all(entry["metrics"] == {} for entry in told.participants.values())
    assert from_record(to_record(noised(made)[0], 1.0)) == noised(made)[0]


class Once(SecureFederation):
    """Three of six lose round 2's first attempt after their vectors came."""

    def tells(self, worker: str, message: Any) -> None:
        signs = isinstance(message, SecureAnswer) and message.stage is Stage.SIGNATURES
        if not (signs and message.round == 1 and worker in NAMES[:3] and not self.state.repeats):
            super().tells(worker, message)


def test_a_repeated_round_is_spent_as_well_so_the_job_ends_a_round_sooner(tmp_path: Path) -> None:
    made = private(tmp_path, kind=Once)
    reasons = set()
    made.begin()
    while not made.state.ended:
        made.step(made.queue.pop(0)) if made.queue else _tick(made)
        reasons.add(made.state.reason)
    assert made.state.phase is Phase.FINISHED, made.state.reason
    assert "members send 5 noised updates each" in made.state.reason
    assert [fact.round for fact in made.facts()] == [0, 1, 2, 3]
    assert [fact.privacy.rounds for fact in made.facts() if fact.privacy] == [1, 3, 4, 5]
    told = [reason for reason in reasons if "is repeated" in reason]
    assert told
    assert all("too few of its members were left" in reason for reason in told)
    assert not any(name in reason for reason in told for name in NAMES)


def test_a_member_sends_no_more_vectors_than_were_accounted_for_whatever_it_is_asked(tmp_path: Path) -> None:
    made = private(tmp_path)
    made.run()
    rounds = made.clients["w1"]._secure
    assert rounds is not None
    rounds._spend(json.loads((rounds._sent).read_text())["last"])  # the same exchange again
    with pytest.raises(
        BadFrame, match="5 noised updates were sent, all that this job's privacy accounts for"
    ):
        rounds._spend("another exchange")
    again = made.client("w1", 0)._secure  # a process that begins anew
    assert again is not None
    with pytest.raises(BadFrame, match="5 noised updates were sent"):
        again._spend("another exchange")
    (again._sent.parent / SENT).write_text("[")
    with pytest.raises(StorageError, match="is damaged"):
        again._spend("another exchange")


def test_a_client_whose_training_fails_contributes_noise_and_cannot_be_told_from_others(
    tmp_path: Path,
) -> None:
    def data(seed: int) -> dict[str, Any]:
        found = data_of(seed)
        if seed == 1:
            found["image"] = np.full_like(found["image"], np.nan)
        return found

    wanted = {"secure": Secure(), "privacy": Privacy(noise=0.8, clip=CLIP), "clients": 6, "local": HOME}
    made = SecureFederation(tmp_path, NAMES, wanted, data=data)
    made.run()
    assert made.state.phase is Phase.FINISHED, made.state.reason
    assert all(sorted(fact.participants) == list(NAMES) for fact in made.facts())
    entries = [fact.participants["w2"] for fact in made.facts()]
    others = [fact.participants["w3"] for fact in made.facts()]
    for one, other in zip(entries, others, strict=True):
        assert {k: v for k, v in one.items() if not k.endswith("_s") and "bps" not in k} == {
            k: v for k, v in other.items() if not k.endswith("_s") and "bps" not in k
        }
    assert all(math.isfinite(float(np.sum(array))) for array in made.weights().values())


def test_what_could_be_opened_when_the_coordinator_died_is_spent_when_it_is_back(tmp_path: Path) -> None:
    made = private(tmp_path)
    ledger = Ledger()
    ledger.apply(JobSubmitted("job-1", "", made.spec, 0, {}, 0.0))
    made.begin()
    while not noised(made):
        made.step(made.queue.pop(0))
    (fact,) = noised(made)
    ledger.apply(fact)
    unused: Any = None
    driver = FederatedDriver(unused, Effects(ledger, unused, unused, 0.0), unused)
    driver.restore(ledger.jobs["job-1"])
    assert driver.jobs["job-1"].spent == fact.privacy == made.state.spent
    assert fact.privacy.rounds == 1
