"""The order of a batch: facts before consequences, people last, and nothing built on facts that were lost."""

from __future__ import annotations

from coordinator.messages import batch
from coordinator.messages import instructions as do
from coordinator.messages.facts import StepCommitted

FACT = StepCommitted("j", 1, 0, 1.0, 5.0)
COMMIT = do.SendTo("w", do.StepCommit("j", 1, 0, 1.0, False, False, False))
RELEASE = do.SendTo("w", do.Release("j", 1, "it failed"))
DISCARD = do.SendTo("w", do.StepDiscard("j", 1, 0, "it begins anew"))
LINE = do.Log("job.state", "info", "j", {})
CAUSED = [do.Journal(FACT), LINE, COMMIT, RELEASE, do.Notify("j")]


def test_facts_come_first_and_words_for_people_last() -> None:
    assert batch.facts([CAUSED, CAUSED]) == [FACT, FACT]
    assert batch.consequences(CAUSED, durable=True) == [COMMIT, RELEASE]
    assert batch.words([CAUSED]) == [LINE, do.Notify("j")]


def test_where_facts_are_lost_no_worker_acts_on_them_or_lets_go_before_they_are_written() -> None:
    assert batch.consequences([*CAUSED, DISCARD], durable=False) == [DISCARD]
    assert batch.deferred([*CAUSED, DISCARD]) == [RELEASE]
