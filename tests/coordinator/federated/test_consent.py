"""Data owners' consent in a federated job's machine: who has not agreed is not available, and not lost."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.federated import ConsentWord as Word
from coordinator.federated import state as fed
from coordinator.federated.rounds import words_of_seconds
from coordinator.messages import events as ev
from coordinator.messages.facts import JobEnded, RoundClosed
from coordinator.messages.jobs import Phase
from tests.coordinator.federated.lone_machine import LoneMachine, spec

REFUSAL = "its data owner refused: no agreement"


def said(world: LoneMachine, worker: str, word: Word, reason: str = "") -> list[Any]:
    return world.says(worker, ev.ConsentSaid("job-1", word, reason, "ab" * 32))


def asking(*workers: str, **options: Any) -> LoneMachine:
    """A job whose clients were all asked."""
    world = LoneMachine(spec(**options))
    world.step(fed.Begin())
    for worker in workers:
        world.step(fed.Invited(worker, 100))
        said(world, worker, Word.AWAITED, "not yet")
    return world


def accepts(world: LoneMachine, worker: str) -> None:
    """Its owner agrees, so it is invited anew and loads."""
    assert fed.ConsentNews(worker, Word.GIVEN, "", "ab" * 32) in said(world, worker, Word.GIVEN)
    world.step(fed.Invited(worker, 100))
    world.says(worker, ev.Loaded("job-1", 1))


def test_a_job_whose_data_owners_were_asked_is_in_a_phase_of_its_own() -> None:
    world = asking("a", "b", min_clients=2)
    assert world.state.phase is Phase.CONSENTING
    assert world.state.reason == (
        "0 clients are ready, 2 are needed; waits until 1970-01-04 00:01 UTC for the consent of the data "
        "owners of a, b, who see it by `atoll-worker jobs`"
    )
    assert not any(client.present for client in world.state.clients.values())


def test_it_trains_once_enough_have_agreed_and_others_may_follow() -> None:
    world = asking("a", "b", "c", min_clients=2)
    accepts(world, "a")
    assert world.state.phase is Phase.CONSENTING
    accepts(world, "b")
    assert (world.state.phase, world.state.chosen) == (Phase.TRAINING, ("a", "b"))
    accepts(world, "c")
    world.updates("a", "b")
    (closed,) = world.facts(RoundClosed)
    assert closed.dropped == {}, "who was not asked to train is not lost"
    world.evaluates("a", "b", "c")
    assert world.state.chosen == ("a", "b", "c")


def test_without_enough_consent_in_time_it_fails_and_says_who_was_silent() -> None:
    world = asking("a", "b", min_clients=2, consent_s=7200.0)
    world.wait(3000.0)
    accepts(world, "a")
    world.wait(4199.0)
    assert world.state.phase is Phase.CONSENTING
    world.wait(1.0)
    assert world.state.phase is Phase.FAILED
    assert world.state.reason == (
        "1 clients take part, 2 are needed; within 2 hours no consent came from the data owners of b"
    )
    assert world.facts(JobEnded)[0].outcome == "failed"


def test_a_refusal_says_who_and_why_and_the_job_waits_for_others() -> None:
    world = LoneMachine(spec(min_clients=1))
    world.step(fed.Begin())
    world.step(fed.Invited("a", 100))
    news = said(world, "a", Word.REFUSED, REFUSAL)
    assert fed.ConsentNews("a", Word.REFUSED, REFUSAL, "ab" * 32) in news
    assert world.state.phase is Phase.GATHERING
    assert world.state.reason.endswith(f"and join; refused by a: {REFUSAL}")


def test_an_owner_that_takes_its_word_back_in_mid_round_costs_that_client_alone() -> None:
    world = LoneMachine(spec(min_clients=1))
    world.begin("a", "b")
    said(world, "a", Word.REFUSED, REFUSAL)
    world.updates("b")
    (closed,) = world.facts(RoundClosed)
    assert (sorted(closed.participants), closed.dropped) == (["b"], {"a": REFUSAL})


def test_a_word_said_again_after_a_reconnection_changes_nothing() -> None:
    world = asking("a", min_clients=1)
    before = world.state
    assert said(world, "a", Word.AWAITED, "not yet") == []
    assert world.state.phase is before.phase
    assert said(world, "z", Word.GIVEN)[0].why == "ConsentSaid of z while awaiting consent"


def test_consent_that_comes_while_the_job_is_paused_counts() -> None:
    world = asking("a", min_clients=1)
    world.step(fed.Interrupted("the disk is full"))
    assert fed.ConsentNews("a", Word.GIVEN, "", "ab" * 32) in said(world, "a", Word.GIVEN)
    assert world.state.clients["a"].consent is None


def test_a_job_waits_for_those_that_load_and_not_for_those_that_were_asked() -> None:
    world = asking("a", min_clients=1)
    world.step(fed.Invited("b", 100))
    world.says("b", ev.Loaded("job-1", 1))
    assert (world.state.phase, world.state.chosen) == (Phase.TRAINING, ("b",))


@pytest.mark.parametrize(
    ("seconds", "words"), [(259_200.0, "3 days"), (5400.0, "90 minutes"), (7200.0, "2 hours"), (1.5, "1.5 s")]
)
def test_a_deadline_is_said_in_the_largest_unit_that_it_is_whole_in(seconds: float, words: str) -> None:
    assert words_of_seconds(seconds) == words
