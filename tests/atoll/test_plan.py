"""A plan's places: which worker runs which stage of which replica, by rank."""

from atoll.microbatch import ScheduleName
from atoll.plan import Place, Plan, StageSpec


def plan(*workers: tuple[str, ...]) -> Plan:
    stages = tuple(StageSpec(at, at + 1, 0, 0, held, 1) for at, held in enumerate(workers))
    return Plan("job", 1, "", "", "even", ScheduleName.GPIPE, 2, stages)


def test_with_one_replica_a_rank_is_a_stage() -> None:
    found = plan(("a",), ("b",), ("c",))
    assert found.places == (Place("a", 0, 0), Place("b", 1, 0), Place("c", 2, 0))
    assert [found.rank_of(worker) for worker in "abcd"] == [0, 1, 2, None]


def test_replicas_come_one_after_another_each_in_the_order_of_its_stages() -> None:
    found = plan(("a", "c"), ("b", "d", "e"))
    assert [(place.worker, place.stage, place.replica) for place in found.places] == [
        ("a", 0, 0), ("b", 1, 0), ("c", 0, 1), ("d", 1, 1), ("e", 1, 2),
    ]  # fmt: skip
    assert found.rank_of("d") == 3
