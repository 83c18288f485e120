"""What `atoll chaos` draws, does to processes, and judges."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import psutil
import pytest

from atoll.errors import UsageError
from atoll.exchange import Exchange
from atoll.microbatch import ScheduleName
from atoll.plan import Plan, Replica, StageSpec
from coordinator.cli.main import app
from coordinator.messages.facts import Fact, PlanAdopted, StepCommitted
from experiments.chaos.fleet import Fleet, filled, given
from experiments.chaos.kinds import COORDINATOR, LASTS_S, Deed, Draw, Kind, Wish
from experiments.chaos.members import WORKER_LOCK, frozen, full_disk, kill, lives
from experiments.chaos.promises import Line, Promise, Seen, Trained, committed, judged, pauses_s
from experiments.chaos.report import held
from experiments.chaos.run import Network, Watching, possible
from hostos.command_line import run
from hostos.files.folder_lock import FolderLock
from protos import atoll_control_pb2 as pb
from protos import atoll_job_pb2 as job_pb
from tests.patience import HUNG_S, eventually

MEMBERS = (COORDINATOR, "a", "b", "c")
TENSORS = {"weight": "1", "bias": "2"}


def drawn(seed: int, count: int = 200, members: Sequence[str] = MEMBERS) -> list[Wish]:
    draw = Draw(seed, 20.0, tuple(Kind), members)
    return [draw.next() for _ in range(count)]


def test_a_seed_draws_the_same_disturbances_again() -> None:
    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)


def test_what_is_drawn_fits_its_kind() -> None:
    wishes = drawn(1)
    assert {wish.kind for wish in wishes} == set(Kind)
    for wish in wishes:
        assert 10.0 <= wish.after_s <= 30.0
        assert wish.target == COORDINATOR or wish.kind is not Kind.RESTART
        assert wish.target != COORDINATOR or wish.kind in (Kind.RESTART, Kind.FREEZE)
        assert bool(wish.other) == (wish.kind in (Kind.CUT, Kind.SLOW))
        assert wish.other not in (wish.target, COORDINATOR)
        if wish.target != COORDINATOR:
            assert LASTS_S[wish.kind][0] <= wish.lasts_s <= LASTS_S[wish.kind][1]
    assert {wish.target for wish in wishes if wish.kind is Kind.FREEZE} == set(MEMBERS)


def test_a_coordinator_that_is_none_of_the_members_is_never_disturbed() -> None:
    assert COORDINATOR not in {wish.target for wish in drawn(1, members=MEMBERS[1:])}


def stages(*workers: str) -> list[job_pb.StageSpec]:
    return [job_pb.StageSpec(workers=[worker]) for worker in workers]


@pytest.mark.parametrize(
    "plan",
    [
        job_pb.Plan(stages=stages("a", "b")),
        job_pb.Plan(replicas=[job_pb.Replica(stages=stages(worker)) for worker in "ab"]),
    ],
    ids=["stages", "replicas"],
)
def test_who_holds_a_stage_of_a_replica_can_be_disturbed_too(plan: job_pb.Plan) -> None:
    class Told:
        client = property(lambda self: self)

        def watch(self, job: str) -> Iterator[pb.JobUpdate]:
            yield pb.JobUpdate(plan=plan)

    watching = Watching(cast("Fleet", Told()), "j-1")
    assert watching.ended.wait(HUNG_S)
    assert watching.holders == ("a", "b")


# ---------------------------------------------------------------- verdicts


def commit(step: int, at_s: float) -> StepCommitted:
    return StepCommitted("j-1", 1, step, 0.5, at_s)


def peers(exchange: Exchange) -> PlanAdopted:
    replicas = tuple(Replica((at, at + 1), (StageSpec(0, 4, 0, 0, f"w{at}", 1),)) for at in range(2))
    plan = Plan("j-1", 1, "", "", "", ScheduleName.GPIPE, 2, replicas, blocks=2, exchange=exchange)
    return PlanAdopted("j-1", plan)


def trained(facts: Sequence[Fact], steps: int = 4, tensors: Mapping[str, str] = TENSORS) -> Trained:
    return Trained("j-1", "finished", "", steps, facts, tensors)


def seen(*jobs: Trained, deeds: Sequence[Deed] = (), lines: Sequence[Line] = ()) -> Seen:
    return Seen(TENSORS, 0.1, jobs, deeds, lines)


WHOLE = [commit(step, 100.0 + step) for step in range(4)]


def verdict(what: Seen, name: str) -> Promise:
    return next(promise for promise in judged(what) if name in promise.name)


def test_an_undisturbed_job_keeps_its_promises_and_shows_nothing_of_notices() -> None:
    verdicts = {promise.name: promise.held for promise in judged(seen(trained(WHOLE)))}
    assert all(held is None for name, held in verdicts.items() if "noticed" in name)
    assert all(held is True for name, held in verdicts.items() if "noticed" not in name)


@pytest.mark.parametrize(
    ("facts", "once", "kept"),
    [
        (WHOLE[:3], False, True),
        ([*WHOLE, commit(3, 105.0)], False, False),
        ([*WHOLE[:3], commit(1, 103.0), commit(2, 104.0), commit(3, 105.0)], False, False),
        ([*WHOLE, commit(4, 105.0)], False, True),
        (WHOLE, True, True),
    ],
    ids=["one missing", "one twice", "gone back", "one too many", "whole"],
)
def test_each_step_is_to_be_committed_once(facts: Sequence[Fact], once: bool, kept: bool) -> None:
    found = seen(trained(facts))
    assert verdict(found, "committed once").held is once
    assert verdict(found, "reverted").held is kept


def test_without_a_journal_nothing_is_said_of_commits() -> None:
    unread = replace(seen(trained([])), journal=False)
    for name in ("committed once", "reverted"):
        assert verdict(unread, name).held is None
        assert "journal" in verdict(unread, name).words
    assert held(judged(unread))


@pytest.mark.parametrize(
    ("steps", "once"),
    [((3, 6, 9, 11), True), ((3, 9, 11), False), ((3, 6, 9), False), ((3, 6, 9, 9, 11), False)],
    ids=["whole", "one missing", "the last missing", "one twice"],
)
def test_a_commit_of_local_steps_is_one_of_each_step_of_its_period(
    steps: Sequence[int], *, once: bool
) -> None:
    exchange = Exchange("streaming_diloco", every=3, delay=1)
    facts = [peers(exchange), *(commit(step, 100.0 + step) for step in steps)]
    assert verdict(seen(trained(facts, steps=12)), "committed once").held is once


def test_local_steps_that_begin_in_mid_period_are_committed_once() -> None:
    facts = [commit(step, 100.0 + step) for step in range(2)]
    after = [peers(Exchange("diloco", every=4)), commit(3, 110.0), commit(7, 120.0)]
    assert committed([*facts, *after]) == Counter(range(8))


@pytest.mark.parametrize("tensors", [{"weight": "1"}, {"weight": "1", "bias": "3"}], ids=["missing", "other"])
def test_other_parameters_are_a_loss(tensors: Mapping[str, str]) -> None:
    assert verdict(seen(trained(WHOLE, tensors=tensors)), "lost").held is False


def test_a_job_that_failed_breaks_its_promise() -> None:
    failed = replace(trained(WHOLE[:1]), state="failed", reason="no worker", tensors={})
    assert verdict(seen(failed), "finishes").held is False
    assert verdict(seen(failed), "lost").held is False


def gone(worker: str, at_s: float) -> Line:
    return Line(at_s, "worker.state", {"worker": worker, "state": "dead"})


def killed(at_s: float, *, held: bool = True) -> Deed:
    return Deed(Kind.KILL, "a", at_s, at_s + 1.0, worker="w-a", held=held)


def test_the_median_of_the_notices_counts() -> None:
    deeds = [killed(10.0), killed(50.0), killed(90.0)]
    late = [gone("w-b", 10.1), gone("w-a", 10.5), gone("w-a", 50.6), gone("w-a", 99.0)]
    promise = verdict(seen(trained(WHOLE), deeds=deeds, lines=late), "killed")
    assert promise.held is True
    assert promise.figures["median_s"] == pytest.approx(0.6)
    assert verdict(seen(trained(WHOLE), deeds=deeds[1:], lines=late[3:]), "killed").held is False


def test_who_holds_no_stage_need_not_be_noticed_at_once() -> None:
    found = seen(trained(WHOLE), deeds=[killed(10.0, held=False)], lines=[gone("w-a", 19.0)])
    assert verdict(found, "killed").held is None


def test_a_hung_worker_may_take_three_steps() -> None:
    deed = Deed(Kind.HANG, "a", 10.0, 19.0, worker="w-a", held=True)
    line = Line(17.0, "worker.quarantined", {"worker": "w-a"})
    found = seen(trained(WHOLE), deeds=[deed], lines=[line])
    assert verdict(found, "hung").held is False
    assert verdict(replace(found, step_s=3.0), "hung").held is True


def test_what_outlives_its_daemon_is_named() -> None:
    promise = verdict(replace(seen(trained(WHOLE)), left=["python of a"]), "outlives")
    assert (promise.held, promise.words) == (False, "python of a")
    assert verdict(replace(seen(trained(WHOLE)), died=["a"]), "by itself").held is False


def test_a_pause_is_the_longest_time_between_two_commits_after_a_deed() -> None:
    facts = [commit(0, 100.0), commit(1, 101.0), commit(2, 108.0), commit(3, 109.0)]
    assert pauses_s(seen(trained(facts), deeds=[killed(101.5)])) == {Kind.KILL: [7.0]}


# ---------------------------------------------------------------- processes


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that, asked by a line, appends to a file and says whether it could."""
    program = (
        "import sys\n"
        "for line in sys.stdin:\n"
        "    try:\n"
        "        with open(sys.argv[1], 'a') as file: file.write(line)\n"
        "    except OSError as error: print(error.strerror, flush=True)\n"
        "    else: print('written', flush=True)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def asked(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("line\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_a_disk_is_full_for_as_long_as_it_is_said(writer: subprocess.Popen[str]) -> None:
    assert asked(writer) == "written"
    with full_disk([psutil.Process(writer.pid)]):
        assert asked(writer) == "File too large"
    assert asked(writer) == "written"


def test_a_frozen_process_goes_on_afterwards(writer: subprocess.Popen[str]) -> None:
    process = psutil.Process(writer.pid)
    with frozen([process]):
        eventually(lambda: process.status() == psutil.STATUS_STOPPED)
        assert lives(process)
    assert asked(writer) == "written"


def test_who_was_killed_is_gone(writer: subprocess.Popen[str]) -> None:
    process = psutil.Process(writer.pid)
    kill([process])
    assert not lives(process)
    assert writer.wait() == -9


# ---------------------------------------------------------------- whose they are


def test_processes_of_others_are_refused_unless_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = FolderLock(tmp_path / "theirs" / WORKER_LOCK, str)
    try:
        assert run(app, ["chaos", "--attach", str(tmp_path / "theirs")]) == 2
        assert "was not started by this command" in capsys.readouterr().err
        assert list(given([tmp_path / "theirs"], not_mine=True)) == ["theirs"]
    finally:
        lock.release()
    with pytest.raises(UsageError, match="no coordinator or worker runs from"):
        given([tmp_path / "theirs"], not_mine=True)


def test_what_lies_between_hosts_needs_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["chaos", "--kinds", "cut"]) == 2
    assert "--cut-by" in capsys.readouterr().err
    ways = Network("cut {one} {other}", "", "heal {one} {other}")
    assert possible(ways, (Kind.CUT,)) == (Kind.CUT,)
    assert filled(ways.cut_by, one="a", other="b") == ["cut", "a", "b"]
    with pytest.raises(UsageError, match="not a command"):
        filled("cut {three}", one="a", other="b")


def test_an_unknown_kind_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["chaos", "--kinds", "kill,flood"]) == 2
    assert "kill, crash, freeze" in capsys.readouterr().err
