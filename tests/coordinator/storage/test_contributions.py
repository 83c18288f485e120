"""What workers give is added up by day, survives restarts, and nobody can claim more time than there was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.errors import StorageError
from coordinator.messages import instructions as do
from coordinator.messages.facts import RoundClosed
from coordinator.storage.contributions import (
    KEPT_DAYS,
    WRITTEN_EVERY_S,
    Contributions,
    Given,
    day_of,
    of_round,
)
from coordinator.storage.journal import Journal
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos.receipts import Receipt, checked
from tests.coordinator.serving import Owner, fleet, start
from tests.patience import HUNG_S
from worker.control.given import summed

NOON_S = 1_796_040_000.0  # 2026-11-30 12:00 UTC
DAY_S = 86400.0


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with closing(Journal(tmp_path / "journal.sqlite")) as opened:
        opened.claim(0.0)
        yield opened


def discards(worker: str, count: int = 1) -> list[do.Instruction]:
    return [do.SendTo(worker, do.StepDiscard("j", 1, 3, "why"))] * count


def round_of(**showed: Any) -> RoundClosed:
    participants = {"w-1": {"n_samples": 40, "train_s": 5.0, "bytes_up": 100, "bytes_down": 200, **showed}}
    return RoundClosed("j", 0, "", "", 0, None, participants, {"w-2": "late"}, None, took_s=9.0, at_s=0.0)


def by_worker(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["day"], row["worker"]): row for row in rows}


def test_days_are_those_of_utc_whatever_the_time_given() -> None:
    assert [day_of(at) for at in (NOON_S, NOON_S + DAY_S / 2)] == ["2026-11-30", "2026-12-01"]
    for odd in (-1e300, float("nan"), float("inf"), 1e300):
        assert day_of(odd)


def test_sums_grow_in_memory_and_in_the_database_and_are_one(journal: Journal, tmp_path: Path) -> None:
    given = Contributions(journal)
    given.take([round_of()], discards("w-1", 2), {}, NOON_S)
    given.write(NOON_S)
    given.take([round_of(), round_of()], [], {}, NOON_S + 1)
    expected = {
        "steps": 3,
        "samples": 120,
        "compute_s": 15.0,
        "bytes_in": 600,
        "bytes_out": 300,
        "discarded_steps": 2,
    }
    assert by_worker(given.since(0.0))["2026-11-30", "w-1"].items() >= expected.items()
    given.write(NOON_S + WRITTEN_EVERY_S / 2)
    assert len(journal.given_since("", 10)) == 2
    given.write(NOON_S + WRITTEN_EVERY_S / 2, at_once=True)
    again = Contributions(journal)
    assert by_worker(again.since(0.0)) == by_worker(given.since(0.0))
    assert by_worker(again.since(0.0))["2026-11-30", "w-2"]["discarded_steps"] == 3
    assert again.since(NOON_S + 2 * DAY_S) == []


def test_days_older_than_the_bound_go(journal: Journal) -> None:
    given = Contributions(journal)
    given.take([round_of()], [], {}, NOON_S)
    given.write(NOON_S)
    later_s = NOON_S + (KEPT_DAYS + 1) * DAY_S
    given.take([round_of()], [], {}, later_s)
    given.write(later_s)
    assert {row["day"] for row in given.since(0.0)} == {day_of(later_s)}


def test_what_a_disk_refuses_is_written_later_and_once(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Contributions(journal)
    given.take([round_of()], [], {}, NOON_S)

    def full(*_: Any) -> None:
        raise StorageError("no space left")

    with monkeypatch.context() as disk:
        disk.setattr(journal, "add_given", full)
        given.write(NOON_S)
    assert journal.given_since("", 10) == []
    given.write(NOON_S + WRITTEN_EVERY_S)
    assert by_worker(journal.given_since("", 10))["2026-11-30", "w-1"]["samples"] == 40


def test_a_coordinator_that_commands_no_more_adds_nothing(journal: Journal) -> None:
    given = Contributions(journal)
    given.take([round_of()], [], {}, NOON_S)
    journal.term = 0  # another one has claimed it
    given.write(NOON_S)
    assert journal.fenced
    assert journal.given_since("", 10) == []


def test_nobody_computed_for_longer_than_the_round_took() -> None:
    sums = dict(of_round(round_of(train_s=1e9)))
    assert sums["w-1"].compute_s == 9.0
    assert sums["w-2"] == Given(discarded_steps=1)


def test_committed_steps_of_a_job_count_for_its_workers_and_a_restart_keeps_them(tmp_path: Path) -> None:
    with ExitStack() as stack:
        running = start(stack, tmp_path)
        owner, workers = Owner(running), fleet(stack, running, 2)
        job = owner.submit(steps=6, n_micro=4)
        update = owner.watch(job)
        assert (update.state, len(update.stages)) == ("finished", 2)
        found = owner.call("Contributions", pb.ContributionsRequest()).contributions
        assert {row.worker for row in found} == {worker.worker for worker in workers}
        assert {row.name for row in found} == {"fake-0", "fake-1"}
        assert [(row.steps, row.samples, row.discarded_steps) for row in found] == [(6, 6 * 4 * 8, 0)] * 2
        assert all(0 <= row.compute_s <= 6 * 3600 for row in found)
        own = (
            rpc.WorkStub(workers[0]._channel)
            .Given(pb.Empty(), metadata=workers[0].metadata, timeout=HUNG_S)
            .contributions
        )
        assert [row.worker for row in own] == [workers[0].worker], "one's own alone"
        assert summed(pb.ContributionList(contributions=own)).steps == 6
        credits = owner.call("Credits", pb.ContributionsRequest()).credits
        assert {row.name for row in credits} == {"fake-0", "fake-1"}
        sums = [
            (row.useful.steps, row.useful.samples, row.discarded.steps, row.pending.steps) for row in credits
        ]
        assert sums == [(6, 6 * 4 * 8, 0, 0)] * 2
        signed = rpc.WorkStub(workers[0]._channel).Receipt(
            pb.Empty(), metadata=workers[0].metadata, timeout=HUNG_S
        )
        receipt = Receipt(signed.statement, signed.signature, signed.authority_pem)
        said = checked(receipt, [running.server.authority.newest.certificate_pem])
        assert (said["machine"], said["name"]) == (workers[0].worker, "fake-0")
        assert [row["useful"]["steps"] for row in said["credits"]] == [6]
        running.stop()
        running = start(stack, tmp_path)
        assert list(Owner(running).call("Credits", pb.ContributionsRequest()).credits) == list(credits)
        again = Owner(running).call("Contributions", pb.ContributionsRequest()).contributions
        assert sorted(row.SerializeToString() for row in again) == sorted(
            r.SerializeToString() for r in found
        )


def test_a_step_of_replicas_counts_each_ones_share() -> None:
    from coordinator.storage.contributions import of_step

    link = SimpleNamespace(peer="b", n_bytes=100)
    lying = SimpleNamespace(computed_s=1e9, links=(link, SimpleNamespace(peer="b", n_bytes=-5)))
    honest = SimpleNamespace(computed_s=0.4, links=())
    plan = SimpleNamespace(
        places=(SimpleNamespace(worker="a", replica=0), SimpleNamespace(worker="b", replica=1)),
        replicas=(SimpleNamespace(micros=(0, 3)), SimpleNamespace(micros=(3, 4))),
        exchange=None,
    )
    run = SimpleNamespace(reports={0: lying, 1: honest}, step_times_s=(0.5,), first_step=0)
    spec = SimpleNamespace(data=SimpleNamespace(batch=8))
    state: Any = SimpleNamespace(plan=plan, run=run, spec=spec, step=5)
    found = list(of_step(state))
    assert found == [
        ("a", Given(steps=1, samples=24, compute_s=0.5, bytes_out=100)),
        ("b", Given(bytes_in=100)),
        ("b", Given(bytes_in=0)),
        ("b", Given(steps=1, samples=8, compute_s=0.4)),
    ]
