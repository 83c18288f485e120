"""The picture of a plan: what is on it, that it can be read, and that its size is bounded."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.patches import FancyArrowPatch
from matplotlib.text import Text

from atoll.errors import PlanError, StorageError
from atoll.exchange import Exchange
from atoll.job import TrainingSpec
from atoll.plan import Plan, Replica
from coordinator.cli.plot.fleet_map import ALL_SHOWN, fleet_map
from coordinator.cli.plot.plan import draw_plan, plot_plan
from coordinator.cli.plot.style import (
    ACCENT,
    fitted,
    lettering,
    memory_text,
    rate_text,
    size_text,
    text_width,
)
from coordinator.planning.costs.fleet import Device, Fleet, LinkEstimate, Uplink
from coordinator.planning.planner import PlanRequest, make_plan
from tests.coordinator.planning.dags import gpt_like
from tests.coordinator.planning.fleets import random_fleet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DAG = gpt_like(2, d=64, tokens=64)
LONG = gpt_like(8, d=64, tokens=64)


def sites(machines: int, of_a_site: int, uplink_bps: float = 1e9) -> Fleet:
    """Machines of three speeds, a gigabit within each site and 50 Mbit/s between them."""
    devices = tuple(
        Device(
            f"w-{i}", 2**28, f"site{i // of_a_site}-node{i % of_a_site}", f"site{i // of_a_site}",
            {"": (8.0, 16.0, 40.0)[i % 3]}, coordinator=LinkEstimate(1e8, 0.01),
        )
        for i in range(machines)
    )  # fmt: skip
    at = np.arange(machines) // of_a_site
    near = at[:, None] == at[None, :]
    uplinks = tuple(
        Uplink(f"site{s}", tuple(d.worker for d in devices if d.site == f"site{s}"), uplink_bps, uplink_bps)
        for s in set(at.tolist())
    )
    return Fleet(devices, np.where(near, 1e9, 5e7), np.where(near, 3e-4, 0.02), uplinks)


def names_of(fleet: Fleet) -> dict[str, str]:
    return {device.worker: device.label for device in fleet.devices}


@cache
def planned(machines: int, of_a_site: int, partitioner: str = "even") -> tuple[PlanRequest, Plan]:
    dag = LONG if machines > 20 else DAG
    request = PlanRequest(
        "job", 1, dag, None, TrainingSpec(10, 4), sites(machines, of_a_site), partitioner, "1f1b"
    )
    return request, make_plan(request)


def drawn(plan: Plan, request: PlanRequest | None, names: dict[str, str] | None = None) -> Figure:
    with lettering():
        return draw_plan(plan, names_of(request.fleet) if request and names is None else names or {}, request)


def words(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text() and text.get_visible()]


def two_replicas() -> tuple[PlanRequest, Plan]:
    """A pipeline of two machines and one machine alone."""
    request, plan = planned(3, 3)
    whole = replace(plan.stages[0], stop=plan.stages[-1].stop, worker=plan.stages[2].worker)
    first, second = plan.stages[0], replace(plan.stages[1], stop=plan.stages[-1].stop)
    replicas = (Replica((0, 3), (first, second), ()), Replica((3, 4), (whole,)))
    return request, replace(plan, replicas=replicas, exchange=Exchange(), blocks=4)


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_plan_is_drawn_in_the_format_of_the_files_ending(tmp_path: Path, ending: str, magic: bytes) -> None:
    request, plan = planned(2, 1)
    plot_plan(plan, names_of(request.fleet), tmp_path / f"plan.{ending}", request)
    assert (tmp_path / f"plan.{ending}").read_bytes().startswith(magic)


def test_the_same_plan_gives_the_same_file(tmp_path: Path) -> None:
    request, plan = planned(6, 3)
    for name in ("a.svg", "b.svg"):
        plot_plan(plan, names_of(request.fleet), tmp_path / name, request)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize("known", [True, False])
def test_every_machine_of_the_plan_is_there_with_its_stage_and_every_link_with_its_bytes(known: bool) -> None:
    request, plan = planned(6, 3)
    assert plan.prediction is not None
    assert len(plan.stages) == 6
    figure = drawn(plan, request if known else None, names_of(request.fleet))
    found = words(figure)
    for rank, stage in enumerate(plan.stages):
        label = names_of(request.fleet)[stage.worker]
        assert found.count(label) == 2, "once on the map, once at its row"
        assert found.count(str(rank)) >= 2
    pairs = {frozenset((link.source, link.target)) for link in plan.prediction.links}
    assert len(figure.findobj(FancyArrowPatch)) == len(pairs)
    carried = [word for word in found if "MB" in word]
    for link in plan.prediction.links:
        assert any(size_text(link.bytes_per_step) in word for word in carried)
    assert any(word.startswith(f"Bound by {plan.prediction.bottleneck}: ") for word in found)


def test_machines_that_the_plan_leaves_out_are_drawn_too() -> None:
    request, plan = planned(20, 5)
    left = {worker for worker, _ in plan.left_out}
    assert left
    assert {names_of(request.fleet)[worker] for worker in left} <= set(words(drawn(plan, request)))


def bounded_by(what: str) -> Figure:
    request, plan = planned(6, 3)
    assert plan.prediction is not None
    marked = replace(plan, prediction=replace(plan.prediction, bottleneck=what, reason="for the test"))
    return drawn(marked, request)


def accents(figure: Figure) -> tuple[int, int]:
    """(arrows, collections of bars) in the colour of what bounds the step."""
    rgb = tuple(int(ACCENT[i : i + 2], 16) / 255 for i in (1, 3, 5))
    arrows = sum(tuple(arrow.get_edgecolor()[:3]) == rgb for arrow in figure.findobj(FancyArrowPatch))
    bars = sum(tuple(bar.get_facecolor()[0][:3]) == rgb for bar in figure.findobj(PolyCollection))
    return arrows, bars


def test_what_bounds_the_step_is_marked_on_the_map_and_in_the_timeline() -> None:
    assert accents(bounded_by("nothing")) == (0, 0)
    assert accents(bounded_by("stage 2 on site0-node2")) == (0, 1)
    assert accents(bounded_by("link site0-node0>site0-node1")) == (1, 1)
    assert accents(bounded_by("uplink site0 up"))[0] >= 1
    assert accents(bounded_by("uplink site0 up"))[1] == 1
    _, plan = planned(6, 3)
    assert plan.prediction is not None
    pairs = {frozenset((link.source, link.target)) for link in plan.prediction.links}
    assert accents(bounded_by("latency")) == (len(pairs), 1)


def overlapping(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts whose boxes share more than a hair."""
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    figure.draw(renderer)
    texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts]
    found = []
    for (one, a), (other, b) in combinations(boxes, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        down = min(a.y1, b.y1) - max(a.y0, b.y0)
        if across > 1.5 and down > 1.5:
            found.append((one, other))
    return found


@pytest.mark.parametrize(("machines", "of_a_site"), [(2, 1), (6, 3), (20, 5), (64, 8)])
def test_no_words_lie_on_others(machines: int, of_a_site: int) -> None:
    request, plan = planned(machines, of_a_site)
    assert overlapping(drawn(plan, request)) == []


def test_no_words_lie_on_others_where_only_the_prediction_is_known() -> None:
    request, plan = planned(6, 3)
    assert overlapping(drawn(plan, None, names_of(request.fleet))) == []


def test_each_replica_has_a_band_that_names_its_micro_batches() -> None:
    request, plan = two_replicas()
    figure = drawn(plan, request)
    found = words(figure)
    assert "replica 0: micro-batches 0 to 2" in found
    assert "replica 1: micro-batches 3 to 3" in found
    assert "stages of replica" in found
    assert overlapping(figure) == []
    assert any("2 replicas, 3 stages" in word for word in found)


def test_a_plan_of_replicas_is_drawn_from_its_prediction_alone(tmp_path: Path) -> None:
    _, plan = two_replicas()
    plot_plan(plan, {}, tmp_path / "plan.svg")
    assert "replica 1: micro-batches 3 to 3" in (tmp_path / "plan.svg").read_text()


def test_a_plan_of_one_machine_is_drawn() -> None:
    request, plan = planned(1, 1)
    for known in (request, None):
        figure = drawn(plan, known, names_of(request.fleet))
        assert words(figure).count("site0-node0") == 2
        assert figure.findobj(FancyArrowPatch) == []


def test_names_are_drawn_as_they_are_and_cut_where_they_are_too_long() -> None:
    request, plan = planned(2, 1)
    first, second = (stage.worker for stage in plan.stages)
    figure = drawn(plan, request, {first: "$a_$b^", second: "x" * 64})
    assert words(figure).count("$a_$b^") == 2
    assert overlapping(figure) == []
    short = fitted("x" * 64, 1.0, 8)
    assert text_width(short, 8) <= 1.0
    assert "…" in short


def test_a_large_fleet_takes_no_more_artists_than_a_small_one() -> None:
    small, plan = planned(64, 8)
    large = replace(small, fleet=sites(400, 8))
    few, many = (len(drawn(plan, request).findobj()) for request in (small, large))
    # Of the machines that are left out there is one node a site, and of sites 24 at most and a rest.
    assert many < few + 25 * 20
    assert len(fleet_map(plan, {}, large.fleet).nodes) <= len(plan.stages) + 16 + 25


def test_in_a_large_fleet_unused_machines_of_a_site_are_one_node() -> None:
    fleet = random_fleet(3, ALL_SHOWN + 10)
    request = PlanRequest("job", 1, DAG, None, TrainingSpec(10, 4), fleet, "even")
    plan = make_plan(request)
    unused = len(fleet.devices) - len(plan.stages)
    assert f"{unused} unused" in words(drawn(plan, request))


def test_more_micro_batches_take_more_bars_but_hardly_more_artists() -> None:
    request, _ = planned(6, 3)
    longer = replace(request, training=TrainingSpec(10, 64))
    few, many = (len(drawn(make_plan(each), each).findobj()) for each in (request, longer))
    assert many <= few + 10 + 400  # numbers on bars


def test_no_node_or_site_lies_on_another() -> None:
    for machines, of_a_site in ((6, 3), (20, 5), (64, 8)):
        request, plan = planned(machines, of_a_site)
        found = fleet_map(plan, names_of(request.fleet), request.fleet)
        for a, b in combinations(found.islands, 2):
            assert a.x + a.width <= b.x + 1e-9 or b.x + b.width <= a.x + 1e-9 or (
                a.y + a.height <= b.y + 1e-9 or b.y + b.height <= a.y + 1e-9
            )  # fmt: skip
        for one, other in combinations(found.nodes, 2):
            assert abs(one.x - other.x) > 0.9 * found.cell[0] or abs(one.y - other.y) > 0.9 * found.cell[1]


def test_the_links_beside_the_plans_join_every_machine() -> None:
    request, plan = planned(20, 5)
    assert plan.prediction is not None
    found = fleet_map(plan, names_of(request.fleet), request.fleet)
    at = {node.machine.workers[0]: i for i, node in enumerate(found.nodes)}
    joined = {0}
    pairs = [(edge.source, edge.target) for edge in found.edges]
    pairs += [(at[link.source], at[link.target]) for link in plan.prediction.links]
    for _ in found.nodes:
        joined |= {b for a, b in pairs if a in joined} | {a for a, b in pairs if b in joined}
    assert joined == set(range(20))
    assert len(found.edges) < 20


def test_a_plan_without_a_prediction_is_refused(tmp_path: Path) -> None:
    _, plan = planned(2, 1)
    with pytest.raises(PlanError, match="carries no prediction to draw; make it again"):
        plot_plan(replace(plan, prediction=None), {}, tmp_path / "plan.png")
    assert not (tmp_path / "plan.png").exists()


@pytest.mark.parametrize("name", ["nowhere/plan.png", "plan.xyz"])
def test_a_file_that_cannot_be_written_is_an_error_with_the_way_out(tmp_path: Path, name: str) -> None:
    request, plan = planned(2, 1)
    with pytest.raises(StorageError, match=r"cannot write .*; give a \.png, \.svg or \.pdf file"):
        plot_plan(plan, {}, tmp_path / name, request)


def test_figures_have_two_digits_and_their_unit() -> None:
    assert [size_text(n) for n in (262_144, 4_194_304, 33_500_000, 2.5e9)] == [
        "0.26 MB", "4.2 MB", "34 MB", "2.5 GB",
    ]  # fmt: skip
    assert [rate_text(bps) for bps in (5e5, 9.5e6, 9.5e8, 1e10)] == [
        "0.5 Mbit/s", "9.5 Mbit/s", "950 Mbit/s", "10 Gbit/s",
    ]  # fmt: skip
    assert memory_text(198 * 2**20, 8 * 2**30) == "198 MiB of 8 GiB"
    assert memory_text(1.25 * 2**30, 8 * 2**30) == "1.2 of 8 GiB"
    assert memory_text(50 * 2**20, 60 * 2**20) == "50 of 60 MiB"
