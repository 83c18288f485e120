"""Who gets which workers: orders, shares, givers, quotas, places, and what is said of those that wait."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

import pytest

from atoll.errors import UsageError
from atoll.job import Priority
from coordinator.sharing.allotment import allot, sizes
from coordinator.sharing.claims import AS_MANY, Allotment, Claim, Machine, Quota
from coordinator.sharing.forecast import PROMISE, predicted_starts, promised_s
from coordinator.sharing.places import fewest_places, first_fit, least_work_first
from coordinator.sharing.policies import POLICIES, ordered, policy_of

SRSF, FIFO, SHARES, PRIORITIES = (POLICIES[name] for name in ("srsf", "fifo", "shares", "priorities"))


def fleet(workers: int, places: int = 1) -> list[Machine]:
    return [Machine(f"w{at}", f"p{at % places}") for at in range(workers)]


def held(*numbers: int) -> tuple[str, ...]:
    return tuple(f"w{at}" for at in numbers)


def test_a_job_alone_gets_every_idle_worker() -> None:
    found = allot([Claim("a", work_s=100.0)], fleet(4), SRSF, 0.0)
    assert found == Allotment({"a": held(0, 1, 2, 3)})


def test_two_jobs_that_need_two_each_begin_side_by_side() -> None:
    claims = [Claim("a", work_s=100.0, least=2), Claim("b", work_s=100.0, least=2)]
    found = allot(claims, fleet(4), SRSF, 0.0)
    assert {job: len(workers) for job, workers in found.starts.items()} == {"a": 2, "b": 2}
    assert not set(found.starts["a"]) & set(found.starts["b"])


def test_the_shorter_of_two_has_three_quarters() -> None:
    claims = [Claim("long", work_s=900.0), Claim("short", submitted_s=5.0, work_s=100.0)]
    assert sizes(claims, fleet(8), SRSF, 0.0) == {"short": 6, "long": 2}


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        (SRSF, ["high", "short", "long", "low"]),
        (PRIORITIES, ["high", "long", "short", "low"]),
        (FIFO, ["low", "long", "short", "high"]),
    ],
)
def test_the_order_of_a_policy(policy, order: list[str]) -> None:  # type: ignore[no-untyped-def]
    claims = [
        Claim("low", priority=Priority.LOW, submitted_s=0.0, work_s=1.0),
        Claim("long", submitted_s=1.0, work_s=500.0),
        Claim("short", submitted_s=2.0, work_s=50.0),
        Claim("high", priority=Priority.HIGH, submitted_s=3.0, work_s=900.0),
    ]
    assert [claim.job for claim in ordered(claims, policy, 10.0)] == order


def test_owners_take_turns() -> None:
    claims = [Claim(f"a{at}", "alice", work_s=10.0 + at) for at in range(3)]
    claims += [Claim("b0", "bob", work_s=1000.0)]
    assert [claim.job for claim in ordered(claims, SRSF, 0.0)] == ["a0", "b0", "a1", "a2"]


def test_shares_count_workers_by_weight() -> None:
    claims = [Claim(f"a{at}", "alice", work_s=10.0, least=2) for at in range(3)]
    claims += [Claim(f"b{at}", "bob", work_s=10.0) for at in range(3)]
    order = [claim.job for claim in ordered(claims, SHARES, 0.0, {"alice": Quota(weight=4.0)})]
    assert order == ["b0", "a0", "a1", "b1", "a2", "b2"]


def test_a_policy_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="choose srsf, shares, priorities, fifo"):
        policy_of("lottery")


def test_nobody_overtakes_under_fifo_and_who_fits_goes_on_under_srsf() -> None:
    claims = [
        Claim("runs", work_s=400.0, held=held(0, 1, 2), least=3, most=3),
        Claim("wide", submitted_s=1.0, work_s=400.0, least=4, most=4),
        Claim("small", submitted_s=2.0, work_s=900.0, most=1),
    ]
    strict = allot(claims, fleet(4), FIFO, 2.0)
    assert not strict.starts
    assert strict.waits["small"].reason == "wide goes first"
    assert set(allot(claims, fleet(4), SRSF, 2.0).starts) == {"small"}


def test_a_job_that_would_miss_its_promise_is_not_overtaken_any_more() -> None:
    wide = Claim("wide", submitted_s=1.0, work_s=400.0, least=4, most=4, due_s=150.0)
    claims = [
        Claim("runs", work_s=400.0, held=held(0, 1, 2), least=3, most=3, stays=True),
        wide,
        Claim("small", submitted_s=2.0, work_s=1.0, most=1),
    ]
    found = allot(claims, fleet(4), SRSF, 2.0)
    assert not found.starts
    assert found.waits["small"].reason == "wide goes first"
    assert set(allot([claims[0], replace(wide, due_s=inf), claims[2]], fleet(4), SRSF, 2.0).starts) == {
        "small"
    }


# ---------------------------------------------------------------- giving


def test_a_low_job_gives_its_workers_to_a_higher_one_at_once_and_whatever_it_costs() -> None:
    low = Claim("low", priority=Priority.LOW, work_s=10.0, held=held(0, 1), pause_s=1e6, stays=True)
    found = allot([low, Claim("b", work_s=1e6, least=2, most=2)], fleet(2), SRSF, 0.0)
    assert found.gives["low"].keep == 0
    assert "of a higher priority" in found.gives["low"].reason
    assert found.waits["b"].reason == "low gives workers at the next commit"
    assert not allot([low, Claim("b", work_s=1e6, least=2)], fleet(2), FIFO, 0.0).gives


def test_a_job_that_can_do_with_fewer_keeps_the_rest() -> None:
    runs = Claim("a", work_s=4000.0, held=held(0, 1, 2, 3), pause_s=10.0)
    found = allot([runs, Claim("b", submitted_s=1.0, work_s=900.0, least=2)], fleet(4), SRSF, 1.0)
    assert (found.gives["a"].keep, found.gives["a"].to) == (1, "b")


@pytest.mark.parametrize(("pause_s", "gives"), [(10.0, True), (2000.0, False)])
def test_giving_must_be_worth_its_pause(pause_s: float, gives: bool) -> None:
    runs = Claim("a", work_s=4000.0, held=held(0, 1, 2, 3), pause_s=pause_s)
    found = allot([runs, Claim("b", submitted_s=1.0, work_s=900.0, least=2)], fleet(4), SRSF, 1.0)
    assert bool(found.gives) is gives


def test_a_job_of_an_owner_who_wants_its_plan_left_alone_is() -> None:
    runs = Claim("a", work_s=4000.0, held=held(0, 1, 2, 3), stays=True)
    assert not allot([runs, Claim("b", work_s=9.0)], fleet(4), SRSF, 1.0).gives


def test_idle_workers_go_to_jobs_that_run_where_the_move_pays() -> None:
    runs = Claim("a", work_s=4000.0, held=held(0, 1), pause_s=10.0)
    assert allot([runs], fleet(4), SRSF, 0.0).grows == {"a": held(2, 3)}
    assert not allot([replace(runs, pause_s=1000.0)], fleet(4), SRSF, 0.0).grows
    assert not allot([replace(runs, most=2)], fleet(4), SRSF, 0.0).grows


# ---------------------------------------------------------------- quotas, places, words


def test_quotas_hold_an_owner_back_and_say_so() -> None:
    claims = [
        Claim("a0", "alice", work_s=100.0, held=held(0, 1)),
        Claim("a1", "alice", work_s=10.0),
        Claim("b0", "bob", work_s=1e5, most=1),
    ]
    jobs = allot(claims, fleet(4), SRSF, 0.0, {"alice": Quota(jobs=1)})
    assert set(jobs.starts) == {"b0"}
    assert jobs.waits["a1"].reason == "alice may have 1 jobs at once"
    workers = allot(claims, fleet(4), SRSF, 0.0, {"alice": Quota(workers=3)})
    assert {job: len(found) for job, found in workers.starts.items()} == {"a1": 1, "b0": 1}


def test_a_job_larger_than_the_fleet_says_so() -> None:
    found = allot([Claim("a", least=5)], fleet(2), SRSF, 0.0)
    assert found.waits["a"].reason == "needs 5 workers, the fleet has 2"


def test_a_start_is_predicted_with_the_job_after_which_it_is() -> None:
    claims = [
        Claim("a", work_s=100.0, held=held(0), most=1, stays=True),
        Claim("b", work_s=300.0, held=held(1), most=1, stays=True),
        Claim("c", work_s=10.0, least=2, most=2),
        Claim("d", work_s=1e6, least=2, most=2),
    ]
    waits = allot(claims, fleet(2), SRSF, 50.0).waits
    assert (waits["c"].starts_s, waits["c"].after) == (350.0, "b")
    assert waits["d"].starts_s == pytest.approx(350.0 + 10.0 / 2**0.8)
    assert waits["d"].after == "c"


def test_nobody_predicts_a_start_after_a_job_whose_end_is_not_known() -> None:
    found = predicted_starts([Claim("b")], [Claim("a", held=held(0))], 0, 0.0)
    assert found == {"b": (inf, "")}


def test_a_promise_counts_the_jobs_before() -> None:
    first, new = Claim("a", work_s=100.0, most=1), Claim("b", submitted_s=20.0, work_s=10.0)
    assert promised_s(new, [first, new], 1, 20.0) == 20.0 + PROMISE * 110.0
    assert promised_s(new, [replace(first, work_s=inf), new], 1, 20.0) == inf


def test_places_are_kept_whole() -> None:
    machines = [
        Machine("a0", "a"),
        Machine("b0", "b"),
        Machine("b1", "b"),
        Machine("c0", "c"),
        Machine("c1", "c"),
    ]
    assert least_work_first(machines, 1, {}) == ("a0",)
    assert least_work_first(machines, 2, {"b": 9.0}) == ("c0", "c1")
    assert least_work_first(machines, 3, {"b": 9.0}) == ("c0", "c1", "b0")
    assert least_work_first(machines, 1, {}, {"c1"}) == ("c1",)
    assert first_fit(machines, 3, {}) == ("a0", "b0", "b1")
    assert [fewest_places(machines, count) for count in (1, 2, 3, 5, 6)] == [1, 1, 2, 3, 0]


def test_a_job_whose_steps_fill_links_waits_for_one_place() -> None:
    claims = [
        Claim("a", work_s=50.0, held=("w0",), most=1, stays=True),
        Claim("b", work_s=50.0, held=("w1",), most=1, stays=True),
        Claim("c", work_s=10.0, least=2, most=2, together=True),
    ]
    found = allot(claims, fleet(4, places=2), SRSF, 0.0)
    assert found.waits["c"].reason == "needs 2 workers of as few places as could be, 2 idle"
    loose = allot([*claims[:2], replace(claims[2], together=False)], fleet(4, places=2), SRSF, 0.0)
    assert set(loose.starts) == {"c"}


# ---------------------------------------------------------------- whatever the fleet


@pytest.mark.parametrize("seed", range(60))
def test_an_allotment_gives_no_worker_twice_and_keeps_every_bound(seed: int) -> None:
    random = Random(seed)
    machines = fleet(random.randint(1, 12), random.randint(1, 4))
    names, claims = [machine.name for machine in machines], []
    for at in range(random.randint(1, 10)):
        least = random.randint(1, 4)
        took = (
            tuple(names.pop() for _ in range(least)) if len(names) >= least and random.random() < 0.5 else ()
        )
        claim = Claim(f"j{at}", random.choice("abc"), random.choice(list(Priority)), random.random() * 100.0)
        work_s, due_s = (random.choice((inf, random.random() * 1e4)) for _ in range(2))
        most = random.choice((least, least + 3, AS_MANY))
        claim = replace(claim, work_s=work_s, due_s=due_s, least=least, most=most, held=took)
        stays, fixed, near = (random.random() < 0.3 for _ in range(3))
        pause_s = random.random() * 50.0
        claims.append(replace(claim, pause_s=pause_s, stays=stays, fixed=bool(took) and fixed, together=near))
    quotas = {"a": Quota(workers=random.randint(1, 4)), "b": Quota(jobs=1)}
    by_job = {claim.job: claim for claim in claims}
    for policy in POLICIES.values():
        found = allot(claims, machines, policy, 100.0, quotas)
        given = [worker for workers in (*found.starts.values(), *found.grows.values()) for worker in workers]
        busy = {worker for claim in claims for worker in claim.held}
        assert len(given) == len(set(given))
        assert not busy & set(given)
        for job, workers in found.starts.items():
            assert by_job[job].least <= len(workers) <= by_job[job].most
            assert not by_job[job].held
        for job in found.gives:
            assert by_job[job].held
            assert not by_job[job].fixed
            assert found.gives[job].keep < len(by_job[job].held)
        assert {claim.job for claim in claims if not claim.held} == found.starts.keys() | found.waits.keys()
        for owner, quota in quotas.items():
            own = [c for c in claims if c.owner == owner]
            more = [w for c in own for w in found.starts.get(c.job, ()) + found.grows.get(c.job, ())]
            before = sum(len(c.held) for c in own)
            assert not more or not quota.workers or before + len(more) <= quota.workers
            begun = sum(c.job in found.starts for c in own)
            assert not begun or not quota.jobs or begun + sum(c.runs for c in own) <= quota.jobs
