"""What a data set's samples have spent: charged before anything leaves, bounded by their owner, shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.errors import StorageError, UsageError
from atoll.privacy import SamplePrivacy
from strategies.privacy.samples import BUDGET_DELTA, Charge, epsilon
from tests.worker.federated.owner.test_consent import FILE, invitation, state_dir
from worker.blobs import BlobFile
from worker.data.consent import ConsentStore
from worker.data.policy import OPEN, Policy
from worker.data.registry import set_policy
from worker.federated.owner.consent import Consent
from worker.federated.owner.terms import Asked
from worker.federated.samples.ledger import Charged, SampleLedger

__all__ = ["state_dir"]
ONE = Charge(1.0, 0.1, 10)
NOISED = {"evaluate_every": 0, "sample_privacy": SamplePrivacy(1.5)}


def test_an_update_is_charged_once_and_jobs_add_up(tmp_path: Path) -> None:
    ledger = SampleLedger(tmp_path)
    charged = Charged("mine", ONE, 3)
    assert ledger.spent("mine") == ()
    for update in ("a", "a", "b"):
        ledger.charge("job-1", charged, update, 0.0)
    ledger.charge("job-2", Charged("mine", Charge(2.0, 0.5, 4), 9), "c", 0.0)
    again = SampleLedger(tmp_path)
    assert again.spent("mine") == (ONE.times(2), Charge(2.0, 0.5, 4))
    assert again.spent("mine", "job-1") == (Charge(2.0, 0.5, 4),)
    assert again.spent("other") == ()


def test_no_job_sends_more_updates_than_it_states_whatever_it_is_asked(tmp_path: Path) -> None:
    ledger = SampleLedger(tmp_path)
    for update in ("a", "b", "c"):
        ledger.charge("job-1", Charged("mine", ONE, 3), update, 0.0)
    with pytest.raises(UsageError, match="has sent the 3 updates that its privacy accounts for"):
        ledger.charge("job-1", Charged("mine", ONE, 3), "d", 0.0)
    assert ledger.spent("mine") == (ONE.times(3),)


def test_the_update_that_would_exceed_the_budget_is_not_charged_and_does_not_leave(tmp_path: Path) -> None:
    ledger, budget = SampleLedger(tmp_path), epsilon([ONE.times(2)], BUDGET_DELTA)
    charged = Charged("mine", ONE, 100)
    ledger.charge("job-1", charged, "a", budget)
    ledger.charge("job-2", charged, "b", budget)
    with pytest.raises(UsageError, match=r"this update would bring .* to epsilon [\d.]+ at delta 1e-05"):
        ledger.charge("job-3", charged, "c", budget)
    assert epsilon(ledger.spent("mine"), BUDGET_DELTA) == pytest.approx(budget)


def test_a_damaged_ledger_lets_nothing_leave(tmp_path: Path) -> None:
    ledger = SampleLedger(tmp_path)
    ledger.charge("job-1", Charged("mine", ONE, 3), "a", 0.0)
    for damaged in ("[", "[]", '{"mine": 3}', '{"mine": {"job-1": {"last": "", "charges": [[1, 2]]}}}'):
        ledger.path.write_text(damaged)
        with pytest.raises(StorageError, match="is damaged"):
            ledger.spent("mine")
        with pytest.raises(StorageError, match="is damaged"):
            ledger.charge("job-1", Charged("mine", ONE, 3), "b", 0.0)


# ---------------------------------------------------------------- the daemon


def test_jobs_shows_the_bound_and_what_is_spent_in_words_and_numbers(state_dir: Path, tmp_path: Path) -> None:
    set_policy(state_dir, "mine", Policy(epsilon=50.0))
    m = invitation(tmp_path, **NOISED)
    Consent(state_dir).judge(m)
    (request,) = ConsentStore(state_dir).known()
    shown = dict(request.facts)
    assert "-DP at most for 10 updates of" in shown["each sample"]
    assert shown["spent by samples"].startswith("epsilon 0 spent in other jobs on these data, at most ")
    assert shown["spent by samples"].endswith("your budget is 50")
    assert shown["numbers"] == "samples and steps trained, times; no loss"
    charge = Asked(m).charge(60)
    assert charge is not None
    assert f"at most {epsilon([charge.times(10)], BUDGET_DELTA):.3g} with all" in shown["spent by samples"]
    assert "each sample" not in dict(Asked(invitation(tmp_path)).facts(60))


def test_a_job_that_would_exceed_the_budget_is_refused_and_stays_to_be_seen(
    state_dir: Path, tmp_path: Path
) -> None:
    m = invitation(tmp_path, **NOISED)
    charge = Asked(m).charge(60)
    assert charge is not None
    whole = epsilon([charge.times(10)], BUDGET_DELTA)
    set_policy(state_dir, "mine", Policy(("any",), epsilon=0.99 * whole))
    with pytest.raises(UsageError, match="this job would bring what its samples have spent to epsilon"):
        Consent(state_dir).judge(m)
    (request,) = ConsentStore(state_dir).known()
    assert dict(request.facts)["spent by samples"].endswith(", so it is refused")
    set_policy(state_dir, "mine", Policy(("any",), epsilon=1.01 * whole))
    assert Consent(state_dir).judge(m) is None
    with pytest.raises(UsageError, match="states no bound"):
        Consent(state_dir).judge(invitation(tmp_path, "job-2"))


def test_a_second_job_stops_where_the_first_has_left_too_little(state_dir: Path, tmp_path: Path) -> None:
    set_policy(state_dir, "mine", OPEN)
    consent = Consent(state_dir)
    for job in ("job-1", "job-2"):
        assert consent.judge(invitation(tmp_path, job, **NOISED)) is None
    charge = Asked(invitation(tmp_path, **NOISED)).charge(60)
    assert charge is not None
    budget = epsilon([charge.times(3)], BUDGET_DELTA)
    set_policy(state_dir, "mine", Policy(("any",), epsilon=budget))
    left = []
    for job, update in (("job-1", "11"), ("job-2", "22"), ("job-1", "33"), ("job-2", "44")):
        try:
            with consent.departing(job, [BlobFile(FILE.path, update * 32, 500)], lambda: 500):
                left.append(job)
        except UsageError as error:
            left.append(str(error))
    assert left[:3] == ["job-1", "job-2", "job-1"]
    assert "this update would bring" in left[3]
    assert epsilon(SampleLedger(state_dir).spent("mine"), BUDGET_DELTA) == pytest.approx(budget)


def test_a_policys_budget_is_kept_and_said(state_dir: Path) -> None:
    found = set_policy(state_dir, "mine", Policy(epsilon=4.0))
    assert found.policy.epsilon == 4.0
    assert "epsilon 4 of single samples over all jobs" in found.policy.bound_words
    with pytest.raises(UsageError, match="--epsilon"):
        Policy(epsilon=-1.0)
