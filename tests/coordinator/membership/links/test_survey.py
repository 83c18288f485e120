"""Few pairs a worker, every worker among them, and none measured twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.config import Probing
from coordinator.membership.links.probing import Kind, LinkProbing
from coordinator.membership.links.survey import Survey
from coordinator.messages.events import LinkProbed
from coordinator.planning.costs.fleet import Pair


def everything(survey: Survey, room: int = 32) -> list[Pair]:
    """Take until nothing is left, whatever is busy."""
    found: list[Pair] = []
    while taken := survey.take(room, lambda worker: True, lambda pair: True, ()):
        found += taken
    return found


def met(places: dict[str, str], few: int = 2) -> Survey:
    survey = Survey(few)
    for worker, place in places.items():
        survey.meet(worker, place)
    return survey


def test_a_thousand_homes_need_four_measurements_each_and_everybody_takes_part():
    homes = {f"w{at}": f"w{at}" for at in range(1000)}
    pairs = everything(met(homes))
    assert len(pairs) == len(set(pairs)) <= 4 * len(homes)
    assert {source for source, _ in pairs} == {target for _, target in pairs} == set(homes)


def test_of_a_site_only_the_first_are_measured_and_its_first_alone_against_others():
    sites = {f"a{at}": "a" for at in range(50)} | {f"b{at}": "b" for at in range(50)}
    pairs = set(everything(met(sites)))
    crossing = {pair for pair in pairs if sites[pair[0]] != sites[pair[1]]}
    assert crossing == {("a0", "b0"), ("b0", "a0")}
    assert {worker for pair in pairs for worker in pair} == {"a0", "a1", "a2", "b0", "b1", "b2"}


def test_pairs_taken_at_once_have_no_place_in_common():
    survey = met({f"w{at}": f"p{at // 3}" for at in range(30)})
    while taken := survey.take(32, lambda worker: True, lambda pair: True, ()):
        places = [{survey.place_of[worker] for worker in pair} for pair in taken]
        assert all(a.isdisjoint(b) for at, a in enumerate(places) for b in places[:at])


def test_a_pair_waits_for_workers_that_are_busy():
    survey = met({"a": "a", "b": "b"})
    assert survey.take(2, lambda worker: worker != "a", lambda pair: True, ()) == []
    assert survey.take(2, lambda worker: True, lambda pair: True, ("a",)) == []
    assert survey.pending(("a",))
    assert everything(survey) == [("b", "a"), ("a", "b")]
    assert not survey.pending(("a", "b"))


def test_the_next_of_a_site_takes_the_place_of_its_first():
    survey = met({"a0": "a", "a1": "a", "b0": "b"})
    everything(survey)
    survey.forget("a0")
    assert set(everything(survey)) == {("a1", "b0"), ("b0", "a1")}


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), max_size=60))
def test_whoever_comes_and_goes_those_left_are_pending_only_among_themselves(moves: list[tuple[int, int]]):
    survey, here = Survey(2), set()
    for number, place in moves:
        worker = f"w{number}"
        if worker in here:
            survey.forget(worker)
            here.discard(worker)
        else:
            survey.meet(worker, f"p{place}")
            here.add(worker)
    assert set(survey.place_of) == here
    pairs = everything(survey)
    assert len(pairs) == len(set(pairs))
    assert {worker for pair in pairs for worker in pair} <= here
    assert not survey.pending(here)


def test_a_pair_of_the_survey_that_fails_is_tried_as_often_as_any_and_then_avoided():
    probing = LinkProbing(Probing(attempts=2))
    probing.survey.meet("a", "a")
    probing.survey.meet("b", "b")
    asked, now_s = [], 0.0
    for request in range(1, 20):
        for measurement in probing.few_due(lambda worker: True, lambda *pair: True, now_s):
            assert measurement.kind is Kind.FEW
            (one,) = probing.begin(measurement, request, now_s)
            asked.append((one.source, one.target))
            probing.answered(one.source, LinkProbed(request, one.target, 0.0, 0.0, "no route"), now_s)
    assert sorted(asked) == [("a", "b")] * 2 + [("b", "a")] * 2
    assert probing.table.estimates["a", "b"].bandwidth_bps == 1e3
    assert not probing.unsurveyed(("a", "b"))
