import random
from dataclasses import replace

import pytest

from atoll.job import TrainingSpec
from atoll.microbatch import Depth, gpipe, one_f_one_b
from coordinator.planning.costs.lower_bound import lower_bound
from coordinator.planning.costs.timeline import expected_step_s, simulate, step_bytes
from coordinator.planning.costs.traffic import Hop
from coordinator.planning.costs.workload import Route, StageLoad, Wire, Workload
from coordinator.planning.problem import Candidate, Problem
from tests.coordinator.planning.dags import chain_dag, gpt_like
from tests.coordinator.planning.fleets import random_fleet, two_islands
from tests.coordinator.planning.timeline_oracle import step_seconds

FREE = Wire(per_message_s=0.0, header_bytes=0, commit_s=0.0)


def chain_work(
    n_stages: int, n_micro: int, hop_s: float = 0.0, schedule: str = "gpipe", warmup_factor: int = 1
) -> Workload:
    """F = 1, B = 2 on every stage, no transfer time, one-way delay ``hop_s``."""
    stages = tuple(
        StageLoad(
            s,
            1.0,
            2.0,
            0.0,
            0.0,
            gpipe(n_micro)
            if schedule == "gpipe"
            else one_f_one_b(n_micro, min(n_micro - 1, warmup_factor * (n_stages - s - 1))),
        )
        for s in range(n_stages)
    )
    pairs = [(s, s + 1) for s in range(n_stages - 1)]
    routes = {p: Route(((f"{p}", 1e15),), hop_s) for a, b in pairs for p in ((a, b), (b, a))}
    forward = tuple(Hop(a, b, 1, 1) for a, b in pairs)
    backward = tuple(Hop(b, a, 1, 1) for a, b in pairs)
    return Workload(stages, n_micro, forward, backward, (), routes, FREE)


@pytest.mark.parametrize(
    ("n_micro", "hop_s", "schedule", "factor", "expected"),
    [
        (16, 0.0, "gpipe", 1, 69),
        (16, 0.0, "1f1b", 1, 69),
        (16, 0.5, "1f1b", 1, 89),
        (16, 0.5, "1f1b", 2, 76),
        (16, 2.0, "1f1b", 1, 149),
        (16, 2.0, "1f1b", 3, 97),
        (16, 2.0, "gpipe", 1, 97),
        (32, 2.0, "1f1b", 3, 145),
        (32, 4.0, "1f1b", 3, 191),
        (32, 4.0, "gpipe", 1, 173),
    ],
)
def test_schedules_under_delay_take_the_published_times(n_micro, hop_s, schedule, factor, expected):
    work = chain_work(8, n_micro, hop_s, schedule, factor)  # papers/decentralized.md 0.3
    assert simulate(work).step_s == pytest.approx(expected, abs=1e-6)


def test_deferred_weight_gradients_take_the_bubble_of_the_published_schedule():
    """ZB-H1: a bubble of (S - 1)(F + B - W), which is (S - 1) F where B = W, not (S - 1)(F + B + W)."""
    work = chain_work(4, 16, schedule="1f1b")
    stages = tuple(replace(s, weights_s=1.0, pieces=4) for s in work.stages)
    apart = replace(work, stages=stages)
    assert simulate(apart).step_s == pytest.approx(3.0 * (16 + 3))
    deferring = apart.with_actions([one_f_one_b(16, 3 - s, 5) for s in range(4)])
    assert simulate(deferring).step_s == pytest.approx(3.0 * 16 + 3)
    assert lower_bound(deferring).step_s == pytest.approx(3.0 * 16 + 3)
    as_much_memory = apart.with_actions([one_f_one_b(16, 3 - s, 4) for s in range(4)])
    assert simulate(as_much_memory).step_s == pytest.approx(3.0 * 16 + 4)


def random_work(seed: int) -> Workload:
    draw = random.Random(seed)
    n_devices = draw.randrange(2, 6)
    dag = chain_dag(seed, 40, skips=0.3, tied=seed % 2 == 0)
    n_micro = draw.choice([1, 2, 5, 8])
    training = TrainingSpec(10, n_micro, blocks=min(n_micro, 1 + seed // 2 % 3))
    problem = Problem(dag, training, random_fleet(seed, n_devices))
    starts = (0, *sorted(draw.sample(range(1, 40), n_devices - 1)))
    devices = tuple(draw.sample(range(n_devices), n_devices))
    candidate = Candidate(devices, starts)
    work = problem.workload(candidate, [Depth(problem.n_micro)] * n_devices)
    if draw.random() < 0.6:
        caps = [draw.randrange(1, 9) for _ in range(n_devices)]
        warmups = draw.choice(problem.warmups(work, caps))
        if draw.random() < 0.7:
            stages = (
                replace(
                    s,
                    weights_s=s.backward_s * draw.uniform(0, 0.9),
                    apart_s=s.backward_s * draw.choice([0.0, 0.1]),
                    pieces=draw.randrange(1, 5),
                )
                for s in work.stages
            )
            work = replace(work, stages=tuple(stages))
        held = [max(0, draw.randrange(-3, problem.n_micro + 1)) for _ in warmups]
        work = work.with_actions(
            [one_f_one_b(problem.n_micro, w, h) for w, h in zip(warmups, held, strict=True)]
        )
    if draw.random() < 0.5:
        stages = (replace(s, action_s=draw.random() / 9, bytes_s=draw.random() / 9) for s in work.stages)
        work = replace(work, stages=tuple(stages))
    return work


def in_pieces(seed: int) -> Workload:
    """Pipelines of which some devices have several pieces, tied parameters among them."""
    draw = random.Random(seed)
    n_devices, n_pieces = draw.randrange(1, 5), draw.randrange(3, 8)
    training = TrainingSpec(10, draw.choice([1, 2, 5, 8]), blocks=1)
    dag = chain_dag(seed, 40, skips=0.3, tied=seed % 2 == 0)
    problem = Problem(dag, training, random_fleet(seed, n_devices))
    starts = (0, *sorted(draw.sample(range(1, 40), n_pieces - 1)))
    devices = tuple(draw.randrange(n_devices) for _ in starts)
    warmups = sorted((draw.randrange(problem.n_micro + 1) for _ in starts), reverse=True)
    held = draw.randrange(1, problem.n_micro + 1) if draw.random() < 0.6 else 0
    work = problem.workload(Candidate(devices, starts), [Depth(warmup, held) for warmup in warmups])
    if not held:
        return work
    stages = (
        replace(s, weights_s=s.backward_s * draw.uniform(0.1, 0.9), pieces=draw.randrange(1, 5))
        for s in work.stages
    )
    return replace(work, stages=tuple(stages))


@pytest.mark.parametrize("block", range(4))
def test_devices_of_several_pieces_take_turns_as_in_an_independent_simulation(block: int) -> None:
    for seed in range(block * 40, block * 40 + 40):
        work = in_pieces(seed)
        found = simulate(work).step_s
        assert found == pytest.approx(step_seconds(work), rel=1e-9), f"seed {seed}"
        assert lower_bound(work).step_s <= found * (1 + 1e-9), f"seed {seed}"


@pytest.mark.parametrize("block", range(5))
def test_the_timeline_agrees_with_an_independent_simulation_with_shared_uplinks(block):
    for seed in range(block * 40, block * 40 + 40):
        work = random_work(seed)
        assert simulate(work).step_s == pytest.approx(step_seconds(work), rel=1e-9), f"seed {seed}"


def test_two_wires_through_one_uplink_take_turns():
    route_a = Route((("home up", 8e6), ("a", 1e9)), 0.0)
    route_b = Route((("home up", 8e6), ("b", 1e9)), 0.0)
    work = chain_work(2, 1)
    stages = (*work.stages, replace(work.stages[1], device=2))
    hops = (Hop(0, 1, 1_000_000, 1), Hop(0, 2, 1_000_000, 1))
    back = (Hop(1, 0, 0, 1), Hop(2, 0, 0, 1))
    ways = {
        (0, 1): route_a,
        (0, 2): route_b,
        (1, 0): Route((("c", 1e9),), 0),
        (2, 0): Route((("d", 1e9),), 0),
    }
    both = Workload(stages, 1, hops, back, (), ways, FREE)
    # 1 + 1 + 1 s on the uplink for the first, another 1 s for the second, then 1 + 2 + 2.
    assert simulate(both).step_s == pytest.approx(1 + 2 + 1 + 2 + 2)


def test_gradients_pass_waiting_activations_on_the_same_wire():
    work = random_work(3)
    spans = simulate(work, keep_spans=True).spans
    assert {s.kind for s in spans} >= {"F", "B", "send-F", "send-B"}
    assert all(s.end_s >= s.start_s >= 0 for s in spans)


def test_no_step_is_faster_than_the_physical_lower_bound():
    for seed in range(120):
        work = random_work(seed)
        assert simulate(work).step_s >= lower_bound(work).step_s * (1 - 1e-9), f"seed {seed}"


def test_the_lower_bound_of_a_free_network_is_met():
    work = chain_work(4, 8)
    bound = lower_bound(work)
    assert bound.step_s == pytest.approx((8 + 4 - 1) * 3.0)
    assert simulate(work).step_s == pytest.approx(bound.step_s)
    assert bound.term == "stage"


def test_the_shared_term_bounds_a_half_duplex_line():
    work = chain_work(2, 8)
    line = (("line", 8e6),)
    slow = replace(
        work,
        forward=(Hop(0, 1, 4_000_000, 1),),
        backward=(Hop(1, 0, 4_000_000, 1),),
        routes={(0, 1): Route(line, 0.01), (1, 0): Route(line, 0.01)},
    )
    bound = lower_bound(slow)
    assert bound.term == "shared"
    assert bound.step_s == pytest.approx(1 + 8 * (4 + 4) + 0.01 + 2)
    assert simulate(slow).step_s >= bound.step_s


def test_a_schedule_that_waits_for_itself_is_an_error():
    work = chain_work(2, 4)
    stuck = work.with_actions([one_f_one_b(4, 0), one_f_one_b(4, 2)])
    with pytest.raises(ValueError, match="deadlock"):
        simulate(stuck)


def test_bytes_of_a_tied_parameter_go_down_once_and_up_once():
    dag = gpt_like(4)
    problem = Problem(dag, TrainingSpec(10, 4), two_islands(400))
    candidate = Candidate((0, 2, 1), (0, 15, 30))
    work = problem.workload(candidate, (Depth(4),) * 3)
    tied = dag.parameters["wte"].meta.nbytes
    forward = sum(h.n_bytes for h in work.forward if (h.source, h.target) == (0, 2))
    assert step_bytes(work, 0, 2)[0] == tied + 4 * forward
    assert step_bytes(work, 2, 0)[0] == tied


def sharing(n_bytes: int) -> Workload:
    """Two bundles of a second each, at once on one line, which give way to each other four times a bundle."""
    stages = tuple(StageLoad(s, 1.0, 0.0, 0.0, 0.0, gpipe(1)) for s in range(3))
    routes = {pair: Route((("up", 8.0 * n_bytes), (f"{pair}", 1e15)), 0.0) for pair in ((0, 1), (0, 2))}
    forward = (Hop(0, 1, n_bytes, 1), Hop(0, 2, n_bytes, 1))
    return Workload(stages, 1, forward, (), (), routes, replace(FREE, piece_bytes=1000.0, pieces=4))


def test_flows_that_share_a_line_get_it_in_turns():
    """Neither is through before 1.75 s."""
    work = sharing(4000)
    timeline = simulate(work, keep_spans=True)
    sent = {span.target: span.end_s for span in timeline.spans if span.kind == "send-F"}
    assert sent == {1: pytest.approx(2.75), 2: pytest.approx(3.0)}
    assert [use.under_way_s for use in timeline.links] == [pytest.approx(1.75), pytest.approx(2.0)]
    assert step_seconds(work) == pytest.approx(timeline.step_s)
    alone = simulate(replace(work, wire=replace(FREE, pieces=1)))
    assert alone.step_s == pytest.approx(timeline.step_s)
    assert step_seconds(sharing(40_000)) == pytest.approx(timeline.step_s), "no more than four turns"
    small = simulate(sharing(1000), keep_spans=True)
    assert small.links[0].under_way_s == pytest.approx(1.0), "a chunk passes at once"


def test_what_is_under_way_on_a_shared_line_takes_its_turn_before_what_begins_at_that_moment() -> None:
    """Pieces of half a second; one bundle is sent at 2.0 s, when the other's second piece is through."""
    n_bytes = 4000
    seconds = (1.0, 0.0, 2.0, 0.0)
    stages = tuple(StageLoad(s, took, 0.0, 0.0, 0.0, gpipe(1)) for s, took in enumerate(seconds))
    routes = {pair: Route((("up", 4.0 * n_bytes), (f"{pair}", 1e15)), 0.0) for pair in ((0, 1), (2, 3))}
    hops = tuple(Hop(source, target, n_bytes, 1) for source, target in routes)
    work = Workload(stages, 1, hops, (), (), routes, replace(FREE, piece_bytes=1000.0, pieces=4))
    sent = {
        span.target: span.end_s for span in simulate(work, keep_spans=True).spans if span.kind == "send-F"
    }
    assert sent == {1: pytest.approx(3.5), 3: pytest.approx(5.0)}


def test_what_is_expected_of_shared_lines_is_a_mean_over_varying_times() -> None:
    work = sharing(4000)
    plain = step_seconds(work)
    expected = expected_step_s(work, plain)
    assert expected == expected_step_s(work, plain), "the same every time"
    assert expected != plain
    assert expected == pytest.approx(plain, rel=0.1)
    lonely = replace(work, routes={(0, 1): work.routes[0, 1]}, forward=work.forward[:1])
    assert expected_step_s(lonely, 1.23) == 1.23


def test_the_time_around_each_action_counts_on_its_own_device() -> None:
    work = chain_work(2, 4)
    slow = replace(work.stages[1], action_s=0.25)
    busy = replace(work, stages=(work.stages[0], slow))
    assert simulate(busy).step_s >= simulate(work).step_s + 4 * 2 * 0.25


def test_bytes_that_travel_keep_a_busy_stage_from_its_next_action_and_cost_a_waiting_one_nothing() -> None:
    work = chain_work(1, 4)
    alone = replace(work, stages=(replace(work.stages[0], bytes_s=0.25),))
    assert simulate(alone).step_s == pytest.approx(simulate(work).step_s + 7 * 0.25)
    # One micro-batch goes down and up: each stage waits longer for it than its own bytes take.
    work = chain_work(3, 1)
    waiting = replace(work, stages=tuple(replace(stage, bytes_s=0.25) for stage in work.stages[:-1]))
    assert simulate(replace(waiting, stages=(*waiting.stages, work.stages[-1]))).step_s == pytest.approx(9.0)
