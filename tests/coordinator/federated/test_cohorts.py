"""A population's round: whatever is lost, late, repeated or reordered, each client is counted once or out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import UsageError
from coordinator.federated.cohorts import (
    Cohort,
    Roster,
    answered,
    deal,
    dropped,
    expired,
    homes,
    lost,
    opened,
)
from coordinator.messages.instructions import HostSums

CLIENTS = [f"c{at:02d}" for at in range(12)]
ROSTER = Roster({client: 5 + at for at, client in enumerate(CLIENTS)}, move_s=0.5)
DRAWN = {client: 10 + at for at, client in enumerate(CLIENTS)}


def sums_of(clients: Mapping[str, Any] | list[str] | set[str], blob: str = "") -> HostSums:
    mine = {client: DRAWN[client] for client in sorted(clients)}
    return HostSums(blob or "+".join(mine), mine, {"trained": len(mine)}, {"samples": sum(mine.values())})


def of(cohort: Cohort, host: str) -> list[str]:
    return sorted(client for client, other in cohort.at.items() if other == host)


def each_once(cohort: Cohort) -> bool:
    """Every drawn client is in exactly one place."""
    counted = [client for answer in cohort.taken.values() for client in answer.sums.samples]
    places = [*counted, *cohort.waiting, *cohort.at, *cohort.out]
    return sorted(places) == sorted(cohort.drawn)


def test_a_round_without_faults() -> None:
    cohort, found = deal(ROSTER, opened(3, DRAWN), ["a", "b"])
    assert not cohort.complete
    assert {host: sorted(clients) for host, clients in found.clients.items()} == {
        host: of(cohort, host) for host in "ab"
    }
    cohort, why = answered(cohort, "a", sums_of(of(cohort, "a")), {})
    assert why == ""
    mine = of(cohort, "b")
    cohort, why = answered(cohort, "b", sums_of(mine[1:]), {mine[0]: "the loss is not finite"})
    assert why == ""
    assert cohort.complete
    assert each_once(cohort)
    assert cohort.out == {mine[0]: "the loss is not finite"}
    assert set(cohort.sums) == {"a", "b"}
    assert cohort.counted("b") == set(mine[1:])
    found_at = {**dict.fromkeys(cohort.counted("a"), "a"), **dict.fromkeys(mine[1:], "b")}
    assert homes({mine[1]: "c", "elsewhere": "c"}, cohort) == {**found_at, "elsewhere": "c"}


def test_clients_of_a_lost_host_go_to_others_and_what_it_sends_late_is_refused_as_a_whole() -> None:
    cohort, _ = deal(ROSTER, opened(0, DRAWN), ["a", "b", "c"])
    mine, late = of(cohort, "a"), sums_of(of(cohort, "a"))
    first = sums_of(of(cohort, "b"))
    cohort, _ = answered(cohort, "b", first, {})
    cohort = lost(cohort, "a")
    assert cohort.waiting == set(mine)
    assert answered(cohort, "a", late, {})[1] == (
        f"host 'a' answers for client '{mine[0]}' and {len(mine) - 1} more; it is not in training"
    )
    cohort, found = deal(ROSTER, cohort, ["b", "c"], elapsed_s={"b": 1.0, "c": 1.0})
    assert sorted(c for clients in found.clients.values() for c in clients) == mine
    assert len(found.clients["b"]) > len(found.clients["c"])  # which is still at work
    again, why = answered(cohort, "a", late, {})
    assert again == cohort
    assert "trains it" in why
    for host in "bc":
        cohort, why = answered(cohort, host, sums_of(of(cohort, host)), {})
        assert why == ""
    assert cohort.complete
    assert each_once(cohort)
    assert set(cohort.sums) == {"b", "b, part 2", "c"}
    assert cohort.counted("b") > set(first.samples)


def test_an_answer_counts_once_and_only_for_clients_that_the_host_has() -> None:
    cohort, _ = deal(ROSTER, opened(0, DRAWN), ["a", "b"])
    sums = sums_of(of(cohort, "a"))
    once, _ = answered(cohort, "a", sums, {})
    assert answered(once, "a", sums, {}) == (once, "")
    for host, clients, refused, why in (
        ("b", of(cohort, "a"), {}, "host 'b' answers for client"),
        ("a", ["c00", *of(cohort, "b")], {}, "host 'a' answers for client"),
        ("a", of(cohort, "a"), {of(cohort, "a")[0]: "late"}, "both in the sum and refused"),
        ("b", of(cohort, "b"), {of(cohort, "a")[0]: "not mine"}, "host 'b' answers for client"),
    ):
        found, reason = answered(cohort, host, sums_of(clients, "other"), refused)
        assert found == cohort
        assert why in reason
    cohort, why = answered(cohort, "a", None, dict.fromkeys(of(cohort, "a"), "no memory"))
    assert (why, len(cohort.taken), len(cohort.out)) == ("", 0, len(sums.samples))


def test_sums_that_could_not_be_added_are_trained_elsewhere_and_a_deadline_ends_the_rest() -> None:
    cohort, _ = deal(ROSTER, opened(0, DRAWN), ["a", "b"])
    for host in "ab":
        cohort, _ = answered(cohort, host, sums_of(of(cohort, host)), {})
    bad = cohort.counted("a")
    cohort = dropped(cohort, ["a"])
    assert cohort.waiting == bad
    cohort, _ = deal(ROSTER, cohort, ["b"])
    assert set(of(cohort, "b")) == bad
    cohort = expired(cohort, "600 s are over")
    assert cohort.complete
    assert each_once(cohort)
    assert cohort.out == dict.fromkeys(sorted(bad), "600 s are over")
    with pytest.raises(UsageError, match="no host"):
        deal(ROSTER, opened(0, DRAWN), [])


def test_later_sums_of_a_host_take_no_others_name() -> None:
    cohort, _ = deal(ROSTER, opened(0, DRAWN), ["a"])
    for part in (CLIENTS[:3], CLIENTS[3:6]):
        cohort, _ = answered(cohort, "a", sums_of(part), {})
    cohort, _ = deal(ROSTER, dropped(cohort, ["a"]), ["a"])
    for part in (CLIENTS[:2], CLIENTS[2:3], CLIENTS[6:]):
        cohort, _ = answered(cohort, "a", sums_of(part), {})
    assert set(cohort.sums) == {"a", "a, part 2", "a, part 3", "a, part 4"}
    assert each_once(cohort)


def test_states_keep_their_clients_where_they_are() -> None:
    cohort, _ = deal(ROSTER, opened(0, DRAWN), ["a", "b"])
    for host in "ab":
        cohort, _ = answered(cohort, host, sums_of(of(cohort, host)), {})
    roster = replace(ROSTER, homes=homes({}, cohort))
    _, found = deal(roster, opened(1, DRAWN), ["a", "b"])
    assert found.moved == 0
    _, found = deal(roster, opened(1, DRAWN), ["b", "c"])
    assert found.moved == len(cohort.counted("a"))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_order_of_faults_counts_a_client_twice_or_loses_one(data: Any) -> None:
    draw = data.draw
    names = ["a", "b", "c"]
    cohort, _ = deal(ROSTER, opened(0, DRAWN), names)
    sent: list[tuple[str, HostSums, dict[str, str]]] = []  # all that ever went over a wire
    up = set(names)
    for step in range(draw(st.integers(0, 12))):
        match draw(st.sampled_from(["train", "deliver", "repeat", "lose", "return", "deal", "drop"])):
            case "train":  # a host sends some of its clients, and refuses one
                host = draw(st.sampled_from(names))
                mine = of(cohort, host)
                part = mine[: draw(st.integers(0, len(mine)))]
                refused = {part.pop(): "broken"} if part and draw(st.booleans()) else {}
                if part:
                    sent.append((host, sums_of(part, f"blob-{step}"), refused))
            case "deliver" | "repeat" if sent:
                cohort, _ = answered(cohort, *draw(st.sampled_from(sent)))
            case "lose":
                host = draw(st.sampled_from(names))
                up.discard(host)
                cohort = lost(cohort, host)
            case "return":
                up.add(draw(st.sampled_from(names)))
            case "deal" if up:
                cohort, _ = deal(ROSTER, cohort, sorted(up))
            case "drop" if cohort.taken:
                cohort = dropped(cohort, [draw(st.sampled_from(sorted(cohort.taken)))])
            case _:
                pass
        assert each_once(cohort)
    for host in names:
        cohort = lost(cohort, host)
    cohort, _ = deal(ROSTER, cohort, ["d"])
    if of(cohort, "d"):
        cohort, why = answered(cohort, "d", sums_of(of(cohort, "d")), {})
        assert why == ""
    assert cohort.complete
    assert each_once(cohort)
    for host, sums, refused in sent:  # whatever arrives now is taken already, or refused
        assert answered(cohort, host, sums, refused)[0] == cohort
