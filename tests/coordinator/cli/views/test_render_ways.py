"""The table of ways: the best first, what each sends, and why others are impossible."""

from __future__ import annotations

from rich.console import Console

from coordinator.cli.views.render_ways import ways_values, ways_view
from coordinator.planning.ways import Way, WayKind

WAYS = (
    Way(
        WayKind.LOCAL_STEPS,
        "9 peers, diloco every 50 steps",
        micros_per_s=20.0,
        step_s=0.5,
        bytes_a_day=3e9,
        memory_share=0.5,
        exact=False,
        efficiency=0.8,
        workers=tuple((f"w{i}",) for i in range(9)),
        micros=(8,) * 8 + (3,),
    ),
    Way(WayKind.PIPELINE, "one machine", micros_per_s=7.0, step_s=1.0, workers=(("w1",),), micros=(8,)),
    Way(WayKind.REPLICAS, "replicas", why_not="needs room for the model twice"),
)


def text_of(width: int) -> str:
    console = Console(width=width, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(ways_view(WAYS, {"w0": "attic"}, batch=2))
    return captured.get()


def test_the_table_has_every_way_and_who_takes_what() -> None:
    text = text_of(120)
    assert "*" in text
    assert "40" in text  # samples a second
    assert "0.80" in text
    assert "attic, w1, w2, w3, w4, w5 and 3 more; micro-batches a step: 8 x 8, 3" in text
    assert "replicas: needs room for the model twice" in text


def test_values_are_plain() -> None:
    (first, *_, last) = ways_values(WAYS, batch=2)
    assert first["samples_per_s"] == 40.0
    assert first["same_model"] is False
    assert last["why_not"]
