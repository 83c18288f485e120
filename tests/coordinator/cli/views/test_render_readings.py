"""What a plan says of the same machines with other workers: both figures, and how to start these."""

from __future__ import annotations

from rich.console import Console

from coordinator.cli.views.render_readings import readings_values, readings_view, remedy
from coordinator.planning.readings import Reading
from coordinator.planning.ways import Way, WayKind

ONE = Way(WayKind.PIPELINE, "one machine", "--replicas 1", micros_per_s=1.0, step_s=120.0)
CARDS = Way(WayKind.PIPELINE, "one pipeline of 8 stages", "--replicas 1", micros_per_s=12.0, step_s=10.0)
SLOW = Way(WayKind.REPLICAS, "2 replicas", "--replicas 2", micros_per_s=0.95, step_s=126.0)
BETTER = Reading(("lab",), (8,), False, CARDS, ONE)
WORSE = Reading(("lab", "attic"), (8, 2), False, SLOW, ONE)
SKIPPED = Way(WayKind.PIPELINE, "", why_not="16 workers are more than 12; describe them in a fleet file")
MANY = Reading(("attic",), (16,), False, SKIPPED, ONE)
JOINED = Reading(("box",), (2,), True, CARDS, ONE)


def text_of(*readings: Reading) -> str:
    console = Console(width=100, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(readings_view(readings))
    return " ".join(captured.get().split())


def test_the_better_reading_has_both_figures_and_the_command() -> None:
    text = text_of(BETTER, WORSE)
    assert text.startswith(
        "lab as 8 workers, one per card: 10.00 s a step (one pipeline of 8 stages), 12 times"
    )
    assert "as fast as the workers of the fleet file: 2m00s (one machine)" in text
    devices = ",".join(f"cuda:{n}" for n in range(8))
    assert f"start lab as a worker per card, `atoll-worker join HOST:PORT --devices {devices}`" in text
    assert "and the job with --replicas 1" in text
    assert text.count("start ") == 1
    assert "lab, attic as each 8, 2 workers, one per card: 2m06s a step (2 replicas), beside the" in text


def test_of_no_better_reading_nothing_is_to_be_started() -> None:
    assert not WORSE.better
    text = text_of(WORSE)
    assert "2m06s" in text
    assert "start" not in text


def test_cards_are_joined_with_a_plus_and_many_are_all_of_them() -> None:
    assert "--devices cuda:0+cuda:1`" in remedy(JOINED)
    assert "as one worker" in remedy(JOINED)
    assert "--devices all`" in remedy(WORSE)
    assert "--devices all+`" in remedy(Reading(("box",), (32,), True, CARDS, ONE))


def test_what_is_not_planned_is_a_line_with_the_reason() -> None:
    text = text_of(BETTER, MANY)
    assert "attic as 16 workers, one per card: not planned, as 16 workers are more than 12; describe" in text
    assert text.count("start ") == 1
    (values,) = readings_values([MANY])
    assert (values["step_s"], values["gain"], values["better"], values["remedy"]) == (None, 0.0, False, "")
    assert values["why_not"] == MANY.way.why_not


def test_values_are_plain() -> None:
    better, worse = readings_values([BETTER, WORSE])
    assert (better["step_s"], better["given_step_s"], better["better"]) == (10.0, 120.0, True)
    assert worse["better"] is False
    assert better["remedy"] == remedy(BETTER)


def test_where_the_fleet_has_no_room_the_other_reading_is_offered() -> None:
    none = Reading(("lab",), (2,), False, CARDS, None)
    assert "beside" not in text_of(none)
    assert "the workers of the fleet file: no room start lab as a worker per card" in text_of(none)
    (values,) = readings_values([none])
    assert (values["given_step_s"], values["given_way"]) == (None, "")
