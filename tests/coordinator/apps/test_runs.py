"""The machine of app runs: who takes part, and that every message gets exactly one answer."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from atoll.errors import UsageError
from coordinator.apps import runs, state
from coordinator.flower.readiness import judge
from protos import atoll_apps_pb2 as pb

RUN = 77
APP = pb.AppIdentity(hash="a" * 64, size=10, name="app", version="1", client="app:app")


@dataclass
class Fleet:
    """Workers as the scheduler would have them, and everything that was said."""

    order: list[str] = field(default_factory=lambda: ["w-0", "w-1", "w-2"])
    busy: set[str] = field(default_factory=set)
    told: dict[str, list[pb.ToNode]] = field(default_factory=dict)
    owner: list[pb.ToApp] = field(default_factory=list)
    dropped: list[frozenset[str] | None] = field(default_factory=list)
    runs: runs.AppRuns = field(init=False)

    def __post_init__(self) -> None:
        self.runs = runs.AppRuns(self)

    def free(self) -> list[str]:
        return [w for w in self.order if w not in self.busy]

    def connected(self) -> int:
        return len(self.order)

    def name_of(self, worker: str) -> str:
        return f"name of {worker}"

    def do(self, todo: list[state.Instruction]) -> None:
        for item in todo:
            match item:
                case state.TellNode(worker, message):
                    self.told.setdefault(worker, []).append(message)
                case state.TellOwner(_, message):
                    self.owner.append(message)
                case state.Lend(worker, _):
                    self.busy.add(worker)
                case state.GiveBack(worker, _, _):
                    self.busy.discard(worker)
                case state.DropParts(_, hashes, _):
                    self.dropped.append(hashes)

    def attend(self, *workers: str, held: tuple[int, ...] = ()) -> Fleet:
        for worker in workers:
            self.do(self.runs.attends(worker, pb.AppHello(runs=held), 0.0))
        return self

    def open(self) -> Fleet:
        self.do(self.runs.opened(pb.AppOpen(run=RUN, app=APP)))
        return self

    def ready(self, *workers: str) -> Fleet:
        for worker in workers:
            self.do(self.runs.ready(worker, pb.AppReady(run=RUN)))
        return self

    def begin(self, nodes: int, keep: tuple[pb.AppNode, ...] = ()) -> Fleet:
        self.do(self.runs.begun(self.run, pb.AppBegin(nodes=nodes, keep=keep)))
        return self

    def task(self, message: str, worker: str, *parts: str) -> None:
        refs = [pb.Part(hash=h, size=1) for h in parts]
        task = pb.AppTask(message=message, node=state.node_id(worker), parts=refs)
        self.do(self.runs.task(self.run, task))

    def reply(self, message: str, worker: str, *parts: str, here: bool = True) -> None:
        refs = [pb.Part(hash=h, size=1) for h in parts]
        reply = pb.AppReply(run=RUN, message=message, parts=refs)
        self.do(self.runs.replied(worker, reply, lambda run, name: here))

    @property
    def run(self) -> state.Run:
        return self.runs.of(RUN)

    def kinds(self, worker: str) -> list[str | None]:
        return [m.WhichOneof("body") for m in self.told.get(worker, [])]

    def partitions(self) -> dict[str, int]:
        return {place.worker: partition for place in self.run.hosts() for partition in place.seats}

    def fleet(self) -> pb.AppFleet:
        return next(m.fleet for m in reversed(self.owner) if m.HasField("fleet"))

    def replies(self) -> list[tuple[str, int]]:
        return [(m.reply.message, m.reply.error) for m in self.owner if m.HasField("reply")]


def running(nodes: int = 2) -> Fleet:
    fleet = Fleet().attend("w-0", "w-1", "w-2").open().ready("w-2", "w-1", "w-0")
    return fleet.begin(nodes)


def test_idle_workers_that_run_apps_are_offered_the_app_whenever_they_come() -> None:
    fleet = Fleet(busy={"w-1"}).attend("w-0", "w-1").open()
    assert (fleet.kinds("w-0"), fleet.kinds("w-1"), fleet.kinds("w-2")) == (["offer"], [], [])
    assert (fleet.fleet().workers, fleet.fleet().attending, fleet.fleet().busy) == (3, 2, 1)
    fleet.busy.clear()
    fleet.do(fleet.runs.fleet_changed())
    fleet.attend("w-2")
    assert (fleet.kinds("w-1"), fleet.kinds("w-2")) == (["offer"], ["offer"])
    assert fleet.fleet().preparing == 3


def test_nodes_get_their_partitions_in_join_order_whoever_was_ready_first() -> None:
    fleet = running(3)
    assert fleet.partitions() == {"w-0": 0, "w-1": 1, "w-2": 2}
    assert fleet.kinds("w-2") == ["offer", "start"]
    assert fleet.told["w-2"][-1].start.partitions == 3
    assert fleet.busy == {"w-0", "w-1", "w-2"}


def test_a_begin_with_too_few_ready_only_says_who_is_there() -> None:
    fleet = Fleet().attend("w-0", "w-1").open().ready("w-0").begin(2)
    assert fleet.run.partitions == 0
    assert list(fleet.fleet().ready) == ["name of w-0"]
    fleet.ready("w-1").begin(2)
    assert fleet.partitions() == {"w-0": 0, "w-1": 1}


def test_a_task_goes_to_its_node_and_its_reply_back_once() -> None:
    fleet = running()
    fleet.task("m", "w-1", "1" * 64)
    assert fleet.told["w-1"][-1].task.run == RUN
    fleet.reply("m", "w-0")  # not its own
    assert fleet.replies() == []
    fleet.reply("m", "w-1", "1" * 64)
    fleet.reply("m", "w-1", "2" * 64)  # again: late
    assert fleet.replies() == [("m", 0)]
    assert fleet.dropped[-1] == frozenset({"2" * 64})


def test_a_node_keeps_its_reply_until_the_owner_has_taken_it() -> None:
    fleet = running()
    fleet.task("m", "w-1")
    fleet.reply("m", "w-1", "2" * 64)
    assert fleet.kinds("w-1")[-1] == "task"
    fleet.do(fleet.runs.forgotten(fleet.run, frozenset({"2" * 64}), "m"))
    assert fleet.told["w-1"][-1].forget.message == "m"
    assert fleet.kinds("w-0")[-1] == "start"


def test_a_reply_whose_arrays_are_not_here_is_an_error() -> None:
    fleet = running()
    fleet.task("m", "w-1", "1" * 64)
    fleet.reply("m", "w-1", "1" * 64, "2" * 64, here=False)
    assert fleet.replies() == [("m", runs.NODE_UNAVAILABLE)]


def test_a_lost_node_answers_with_an_error_and_a_free_worker_takes_its_partition() -> None:
    fleet = running()
    fleet.task("m", "w-1")
    fleet.order.remove("w-1")
    fleet.do(fleet.runs.deserts("w-1", "silent for 2.1 s"))
    assert fleet.replies() == [("m", runs.NODE_UNAVAILABLE)]
    assert any(m.reply.reason == "name of w-1 was lost: silent for 2.1 s" for m in fleet.owner)
    assert fleet.partitions() == {"w-0": 0, "w-2": 1}
    fleet.task("n", "w-1")
    assert fleet.replies()[-1] == ("n", runs.NODE_UNAVAILABLE)


def test_a_worker_that_comes_back_gets_its_own_partition() -> None:
    fleet = running(3)
    for worker in ("w-0", "w-2"):
        fleet.do(fleet.runs.deserts(worker, "died"))
    fleet.attend("w-2").ready("w-2").attend("w-0").ready("w-0")
    assert fleet.partitions() == {"w-0": 0, "w-1": 1, "w-2": 2}


def test_a_host_that_kept_the_run_hears_its_tasks_again_and_one_that_lost_it_is_lost() -> None:
    fleet = running()
    fleet.task("m", "w-0")
    fleet.task("n", "w-1")
    fleet.attend("w-0", held=(RUN,))
    assert fleet.kinds("w-0")[-2:] == ["task", "task"]
    fleet.attend("w-1")
    assert fleet.replies() == [("n", runs.NODE_UNAVAILABLE)]
    # The spare worker has its place; it would be offered the app again when one is free.
    assert fleet.partitions() == {"w-0": 0, "w-2": 1}
    fleet.do(fleet.runs.deserts("w-2", "died"))
    fleet.do(fleet.runs.fleet_changed())
    assert fleet.kinds("w-1")[-1] == "offer"


def test_cancelled_messages_are_told_to_their_nodes_and_never_answered() -> None:
    fleet = running()
    fleet.task("m", "w-0")
    fleet.do(fleet.runs.cancelled(fleet.run, ["m", "unknown"]))
    assert list(fleet.told["w-0"][-1].cancel.messages) == ["m"]
    fleet.reply("m", "w-0")
    assert fleet.replies() == []


def test_the_end_frees_everybody_and_everything() -> None:
    fleet = running()
    fleet.task("m", "w-0")
    fleet.do(fleet.runs.closed(RUN, "done"))
    assert fleet.busy == set()
    assert all(fleet.kinds(worker)[-1] == "end" for worker in fleet.order)
    assert fleet.dropped[-1] is None
    assert fleet.owner[-1].ended.reason == "done"
    with pytest.raises(UsageError, match="is not open"):
        fleet.runs.of(RUN)


def test_an_owner_that_does_not_come_back_loses_its_run_and_one_that_does_keeps_it() -> None:
    fleet = running()
    fleet.do(fleet.runs.owner_lost(RUN, 10.0))
    fleet.do(fleet.runs.tick(10.0 + runs.OWNER_RETURNS_S / 2))
    fleet.do(fleet.runs.opened(pb.AppOpen(run=RUN, app=APP, resume=True)))
    assert len(fleet.owner[-1].nodes.nodes) == 2
    fleet.do(fleet.runs.tick(100.0))
    assert RUN in fleet.runs.runs
    fleet.do(fleet.runs.owner_lost(RUN, 200.0))
    fleet.do(fleet.runs.tick(200.1 + runs.OWNER_RETURNS_S))
    assert RUN not in fleet.runs.runs
    assert fleet.busy == set()


def test_a_second_owner_of_one_run_is_refused() -> None:
    fleet = running()
    with pytest.raises(UsageError, match="has an owner"):
        fleet.runs.opened(pb.AppOpen(run=RUN, app=APP, resume=True))


def test_who_has_a_runs_key_takes_it_over_and_nobody_else_does() -> None:
    fleet = Fleet().attend("w-0")
    opening = pb.AppOpen(run=RUN, app=APP, key=b"k" * 16)
    fleet.do(fleet.runs.opened(opening))
    fleet.ready("w-0").begin(1)
    again = pb.AppOpen(run=RUN, app=APP, key=b"k" * 16, resume=True)
    fleet.do(fleet.runs.opened(again))  # its line was cut, and nobody has noticed yet
    assert len(fleet.owner[-1].nodes.nodes) == 1
    other = pb.AppIdentity(hash="b" * 64)
    for gone in (False, True):
        for wrong in (
            opening,
            pb.AppOpen(run=RUN, app=APP, resume=True),
            pb.AppOpen(run=RUN, app=APP, key=b"x" * 16, resume=True),
            pb.AppOpen(run=RUN, app=other, key=b"k" * 16, resume=True),
        ):
            with pytest.raises(UsageError, match="has an owner"):
                fleet.runs.opened(wrong)
        if not gone:
            fleet.do(fleet.runs.owner_lost(RUN, 10.0))
    fleet.do(fleet.runs.opened(again))
    fleet.do(fleet.runs.tick(100.0))
    assert RUN in fleet.runs.runs


def test_a_run_that_was_ended_while_its_owner_was_away_does_not_go_on_without_its_states() -> None:
    fleet = running()
    fleet.do(fleet.runs.owner_lost(RUN, 10.0))
    fleet.do(fleet.runs.tick(10.1 + runs.OWNER_RETURNS_S))
    with pytest.raises(
        UsageError, match=r"was ended: its ServerApp was not heard of for 5 s; start it again"
    ):
        fleet.runs.opened(pb.AppOpen(run=RUN, app=APP, resume=True))
    fleet.open()  # a new one may have any number


def test_after_our_restart_nodes_keep_their_partitions_and_the_rest_follow() -> None:
    before = running(3)
    kept = tuple(next(m.nodes.nodes for m in reversed(before.owner) if m.HasField("nodes")))
    fleet = Fleet(order=["w-2", "w-1", "w-0"]).attend("w-2", held=(RUN,)).open().ready("w-2").begin(3, kept)
    assert fleet.partitions() == {"w-2": 2}
    fleet.attend("w-0", "w-1", held=(RUN,)).ready("w-0", "w-1")
    assert fleet.partitions() == {"w-0": 0, "w-1": 1, "w-2": 2}


def many(capacity: int, nodes: int, kept: tuple[pb.AppNode, ...] = ()) -> Fleet:
    """Two workers that may be ``capacity`` nodes each, in a run of ``nodes``."""
    fleet = Fleet(order=["w-0", "w-1"]).attend("w-0", "w-1").open()
    for worker in fleet.order:
        fleet.do(fleet.runs.ready(worker, pb.AppReady(run=RUN, nodes=capacity)))
    return fleet.begin(nodes, kept)


def seats(fleet: Fleet) -> dict[str, list[int]]:
    return {place.worker: sorted(place.seats) for place in fleet.run.hosts()}


def told_nodes(fleet: Fleet) -> list[pb.AppNode]:
    return list(next(m.nodes.nodes for m in reversed(fleet.owner) if m.HasField("nodes")))


def test_a_worker_is_as_many_nodes_as_it_may_be_and_each_gets_its_own_tasks() -> None:
    fleet = many(3, 5)
    assert seats(fleet) == {"w-0": [0, 2, 4], "w-1": [1, 3]}
    nodes = told_nodes(fleet)
    assert [node.partition for node in nodes] == [0, 1, 2, 3, 4]
    assert len({node.node for node in nodes}) == 5
    for node in nodes:
        task = pb.AppTask(message=f"m{node.partition}", node=node.node)
        fleet.do(fleet.runs.task(fleet.run, task))
        assert fleet.told[node.worker][-1].task.node == node.node
    assert judge(pb.AppFleet(workers=2, attending=2, ready=["a", "b"], nodes=6), 6, "").nodes == 6
    few = judge(pb.AppFleet(workers=2, attending=2, ready=["a", "b"], nodes=2), 5, "")
    assert (few.nodes, few.settled) == (0, True)
    assert "--app-nodes 3" in few.reason
    assert many(2, 5).run.partitions == 0  # too few for that


def test_a_lost_workers_nodes_go_to_who_has_room_and_come_back_to_it_where_nobody_had() -> None:
    fleet = many(5, 5)
    assert seats(fleet) == {"w-0": [0, 2, 4], "w-1": [1, 3]}
    fleet.do(fleet.runs.deserts("w-1", "lost"))
    assert seats(fleet) == {"w-0": [0, 1, 2, 3, 4]}
    assert fleet.told["w-0"][-1].start.seats[-1].partition == 4
    full = many(3, 5)
    before = {node.partition: node.node for node in told_nodes(full)}
    full.do(full.runs.deserts("w-1", "lost"))
    assert seats(full) == {"w-0": [0, 2, 4]}
    full.attend("w-1")
    full.do(full.runs.ready("w-1", pb.AppReady(run=RUN, nodes=3)))
    assert {node.partition: node.node for node in told_nodes(full)} == before


def test_after_our_restart_every_node_is_the_one_that_it_was() -> None:
    before = told_nodes(many(3, 5))
    assert told_nodes(many(3, 5, tuple(before))) == before


def test_an_app_that_loads_nowhere_is_not_waited_for() -> None:
    fleet = Fleet(order=["w-0", "w-1"]).attend("w-0", "w-1").open()
    refusal = pb.AppRefused(run=RUN, kind=pb.APP_REFUSAL_NOT_LOADED, reason="No module named 'x'")
    fleet.do(fleet.runs.refused("w-0", refusal))
    assert not judge(fleet.fleet(), 2, "").hopeless
    fleet.do(fleet.runs.refused("w-1", refusal))
    assert judge(fleet.fleet(), 2, "").hopeless


def test_a_run_that_nobody_opens_again_is_ended_on_the_workers_that_hold_it() -> None:
    fleet = Fleet().attend("w-0", held=(5,))
    fleet.do(fleet.runs.tick(runs.HELD_S - 1))
    assert fleet.kinds("w-0") == []
    fleet.do(fleet.runs.tick(runs.HELD_S + 1))
    assert fleet.told["w-0"][-1].end.run == 5


def test_refusals_are_told_with_the_workers_name_until_it_changes_its_mind() -> None:
    fleet = Fleet().attend("w-0", "w-1").open().ready("w-1")
    refusal = pb.AppRefused(run=RUN, kind=pb.APP_REFUSAL_NOT_ACCEPTED, reason="type this")
    fleet.do(fleet.runs.refused("w-0", refusal))
    verdict = judge(fleet.fleet(), 2, "a" * 64)
    assert (verdict.nodes, verdict.settled) == (0, True)
    assert "on 1 of 2 that run apps (name of w-0)" in verdict.reason
    assert "type this" in verdict.reason
    assert "1 of 3 workers do not run apps" in verdict.reason
    assert judge(fleet.fleet(), 0, "a" * 64).nodes == 1
    fleet.ready("w-0")
    assert judge(fleet.fleet(), 2, "a" * 64).nodes == 2


def test_a_refusal_said_again_is_old_news_and_its_words_are_cleaned() -> None:
    fleet = Fleet().attend("w-0").open()
    refusal = pb.AppRefused(run=RUN, reason="\x1b[2Jone\ntwo\r" + "x" * 10_000)
    fleet.do(fleet.runs.refused("w-0", refusal))
    told = len(fleet.owner)
    [heard] = fleet.fleet().refused
    assert heard.reason.startswith(" [2Jone\ntwo x")
    assert len(heard.reason) == runs.REASON_CHARS
    assert fleet.runs.refused("w-0", refusal) == []
    assert len(fleet.owner) == told


def test_nobody_there_is_said_in_words() -> None:
    assert "no worker is connected" in judge(pb.AppFleet(), 0, "").reason
    assert judge(pb.AppFleet(), 10, "", own=2).reason == "2 workers of this machine are starting"
    waiting = judge(pb.AppFleet(workers=2, attending=2, preparing=1, ready=["a"], nodes=1), 0, "")
    assert (waiting.nodes, waiting.settled) == (0, False)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_every_message_is_answered_exactly_once(seed: int) -> None:
    draw = random.Random(seed)
    fleet = running(3)
    sent: list[str] = []
    cancelled: set[str] = set()
    for number in range(200):
        worker = draw.choice(["w-0", "w-1", "w-2"])
        match draw.randrange(8):
            case 0 | 1 | 2:
                sent.append(f"m{number}")
                fleet.task(sent[-1], worker)
            case 3 | 4:
                if sent:
                    fleet.reply(draw.choice(sent), worker)
            case 5:
                fleet.do(fleet.runs.deserts(worker, "lost"))
                fleet.attend(worker).ready(worker)
            case 6:
                fleet.attend(worker, held=draw.choice([(), (RUN,)])).ready(worker)
            case 7:
                if sent:
                    message = draw.choice(sent)
                    if message in fleet.run.waiting:
                        cancelled.add(message)
                    fleet.do(fleet.runs.cancelled(fleet.run, [message]))
        owed = {m for place in fleet.run.hosts() for m in place.under_way}
        assert owed == set(fleet.run.waiting)
        assert sorted(fleet.partitions().values()) == sorted(set(fleet.partitions().values()))
        assert fleet.busy == set(fleet.partitions())
    for worker in fleet.order:
        fleet.do(fleet.runs.deserts(worker, "the end"))
    answered = [message for message, _ in fleet.replies()]
    assert sorted(answered) == sorted(set(sent) - cancelled)
